/* Tuning through C: progress, cancelling, the text of a plan, records in other contexts and in
 * files. The argument is an empty folder. */
#include "attention.h"

typedef struct Seen {
  int calls, stop_after;
  char config[256];
} Seen;

static int32_t on_progress(const flashtune_progress *progress, void *user) {
  Seen *seen = user;
  CHECK(progress->struct_size >= sizeof *progress, "%llu", (unsigned long long)progress->struct_size);
  CHECK(progress->phase != NULL && progress->phase[0] != 0, "no phase");
  CHECK(progress->done <= progress->total, "%llu of %llu", (unsigned long long)progress->done, (unsigned long long)progress->total);
  CHECK((progress->best_config != NULL) == (progress->best_us > 0), "best is half there");
  if (progress->best_config != NULL) snprintf(seen->config, sizeof seen->config, "%s", progress->best_config);
  return ++seen->calls == seen->stop_after;
}

static flashtune_plan_info forward_plan(flashtune_context *context, const Attention *a) {
  flashtune_plan_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  OK(flashtune_forward_plan_info(context, &a->forward, &info));
  CHECK(strncmp(info.config, "cpu ", 4) == 0 && strchr(info.config, '=') != NULL, "config: %s", info.config);
  CHECK(info.kernel[0] != 0 && strlen(info.reason) > 10, "%s: %s", info.kernel, info.reason);
  return info;
}

int main(int argc, char **argv) {
  char file[4096];
  uint64_t count = 0;
  Shape shape = {1, 2, 1, 96, 96, 32, 32, FLASHTUNE_CAUSAL_BOTTOM_RIGHT};
  Attention a = make_attention(shape, 5);
  Seen seen = {0, 1, ""};
  flashtune_autotune_params tune;
  CHECK(argc == 2, "usage: tuning FOLDER");
  flashtune_context *context = cpu_context(argv[1]);

  /* Without a record the plan is the heuristic's and has no time. The shapes are enough for this
   * call. */
  Attention shapes_only = a;
  shapes_only.forward.q.data = shapes_only.forward.k.data = shapes_only.forward.v.data = NULL;
  shapes_only.forward.out.data = shapes_only.forward.lse = NULL;
  flashtune_plan_info info = forward_plan(context, &shapes_only);
  CHECK(info.source == FLASHTUNE_SOURCE_HEURISTIC && info.measured_us == 0, "source %d", info.source);

  memset(&tune, 0, sizeof tune);
  tune.struct_size = sizeof tune;
  tune.forward = &shapes_only.forward;
  tune.time_limit_seconds = 5;
  tune.progress = on_progress;
  tune.progress_user = &seen;
  FAILS(flashtune_autotune(context, &tune), FLASHTUNE_STATUS_CANCELLED, "");
  CHECK(seen.calls == 1 && flashtune_last_error()[0] != 0, "%d calls", seen.calls);

  seen.stop_after = 0;
  OK(flashtune_autotune(context, &tune));
  CHECK(seen.calls > 1 && seen.config[0] != 0, "%d calls, best '%s'", seen.calls, seen.config);
  info = forward_plan(context, &a);
  CHECK(info.source == FLASHTUNE_SOURCE_PROCESS && info.measured_us > 0, "source %d", info.source);
  run_and_check(context, &a);

  /* Another context finds the record in the folder, under either policy, and does not measure
   * again. */
  flashtune_context *later = cpu_context(argv[1]);
  flashtune_plan_info again = forward_plan(later, &a);
  CHECK(again.source == FLASHTUNE_SOURCE_MACHINE, "source %d", again.source);
  CHECK(strcmp(again.config, info.config) == 0 && again.measured_us == info.measured_us, "%s", again.config);
  OK(flashtune_context_destroy(later));

  /* Records go to a file and from there into a context without a folder. */
  snprintf(file, sizeof file, "%s/records.jsonl", argv[1]);
  OK(flashtune_records_export(context, file, &count));
  CHECK(count == 1, "%llu records", (unsigned long long)count);
  OK(flashtune_records_export(context, file, NULL));
  flashtune_context *elsewhere = cpu_context("");
  CHECK(forward_plan(elsewhere, &shapes_only).source == FLASHTUNE_SOURCE_HEURISTIC, "a record without a folder");
  OK(flashtune_context_destroy(elsewhere));
  elsewhere = cpu_context("");
  OK(flashtune_records_import(elsewhere, file, &count));
  CHECK(count == 1, "%llu records", (unsigned long long)count);
  again = forward_plan(elsewhere, &a);
  CHECK(again.source == FLASHTUNE_SOURCE_MACHINE && strcmp(again.config, info.config) == 0, "source %d: %s", again.source, again.config);
  run_and_check(elsewhere, &a);
  OK(flashtune_context_destroy(elsewhere));

  OK(flashtune_context_destroy(context));
  free_attention(&a);
  return 0;
}
