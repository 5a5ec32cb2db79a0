/* Contexts: creating and destroying them in a loop, wrong options, backends; versions, statuses,
 * log. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "attention.h"

#include <dirent.h>
#include <sys/mman.h>

static flashtune_context_options cpu_options(void) {
  flashtune_context_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.backend = FLASHTUNE_BACKEND_CPU;
  options.cache_dir = "";
  return options;
}

#define OPTIONS_REFUSED(status, word, mutation)                            \
  do {                                                                     \
    flashtune_context_options options = cpu_options();                     \
    flashtune_context *untouched = (flashtune_context *)(intptr_t)0x1234;  \
    mutation;                                                              \
    FAILS(flashtune_context_create(&options, &untouched), status, word);   \
    CHECK(untouched == (flashtune_context *)(intptr_t)0x1234, "written");  \
  } while (0)

static void wrong_options(void) {
  const int32_t invalid = FLASHTUNE_STATUS_INVALID_ARGUMENT;
  flashtune_context_options good = cpu_options();
  FAILS(flashtune_context_create(&good, NULL), invalid, "context is NULL");
  OPTIONS_REFUSED(invalid, "options.struct_size is 0", options.struct_size = 0);
  OPTIONS_REFUSED(invalid, "options.struct_size is 8", options.struct_size = 8);
  OPTIONS_REFUSED(invalid, "options.struct_size is 18446744073709551615", options.struct_size = UINT64_MAX);
  /* The first half of a pointer to the pack. */
  OPTIONS_REFUSED(invalid, "a multiple of 8", options.struct_size = 52; options.pack = "");
  OPTIONS_REFUSED(invalid, "options.backend is 3", options.backend = 3);
  OPTIONS_REFUSED(invalid, "options.backend is -1", options.backend = -1);
  OPTIONS_REFUSED(invalid, "options.device_ordinal is -1", options.device_ordinal = -1);
  OPTIONS_REFUSED(invalid, "options.cuda_context is 0x40", options.cuda_context = (void *)(intptr_t)0x40);
  OPTIONS_REFUSED(invalid, "options.tuning_policy is 2", options.tuning_policy = 2);
  OPTIONS_REFUSED(invalid, "options.num_threads is -1", options.num_threads = -1);
  OPTIONS_REFUSED(invalid, "options.num_threads is 1025", options.num_threads = 1025);
  OPTIONS_REFUSED(invalid, "options.tuning_time_limit_seconds is -1", options.tuning_time_limit_seconds = -1);
  OPTIONS_REFUSED(invalid, "options.tuning_time_limit_seconds is inf", options.tuning_time_limit_seconds = INFINITY);
  OPTIONS_REFUSED(invalid, "options.tuning_time_limit_seconds is NaN", options.tuning_time_limit_seconds = NAN);
  /* The machine has no such GPU or no driver. Either message says what was asked for or which
   * places were tried. */
  OPTIONS_REFUSED(FLASHTUNE_STATUS_NO_DEVICE, "", options.backend = FLASHTUNE_BACKEND_CUDA;
                  options.device_ordinal = 9999);
  CHECK(strstr(flashtune_last_error(), "9999") || strstr(flashtune_last_error(), "libcuda.so.1"), "%s",
        flashtune_last_error());
}

static void sizes_of_other_releases(void) {
  struct {
    flashtune_context_options known;
    uint64_t later;
  } newer;
  flashtune_context *context = NULL;
  memset(&newer, 0, sizeof newer);
  newer.known = cpu_options();
  newer.known.struct_size = sizeof newer;
  OK(flashtune_context_create(&newer.known, &context));
  OK(flashtune_context_destroy(context));
  newer.later = 1;
  FAILS(flashtune_context_create(&newer.known, &context), FLASHTUNE_STATUS_INVALID_ARGUMENT, "struct_size");
}

static void what_it_runs_on(void) {
  flashtune_context *context = cpu_context("");
  struct {
    flashtune_device_info known;
    uint64_t later;
  } info;
  memset(&info, 0xab, sizeof info);
  FAILS(flashtune_context_device(context, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, "info is NULL");
  FAILS(flashtune_context_device(NULL, &info.known), FLASHTUNE_STATUS_INVALID_ARGUMENT, "context is NULL");
  info.known.struct_size = 4;
  FAILS(flashtune_context_device(context, &info.known), FLASHTUNE_STATUS_INVALID_ARGUMENT, "info.struct_size is 4");
  info.known.struct_size = sizeof info;
  OK(flashtune_context_device(context, &info.known));
  CHECK(info.known.struct_size == sizeof info && info.later == 0, "a newer caller's rest must be zero");
  CHECK(info.known.backend == FLASHTUNE_BACKEND_CPU && strcmp(info.known.arch, "cpu") == 0, "%s", info.known.arch);
  CHECK(info.known.name[0] != 0 && info.known.sm_count == 2, "%s, %u threads", info.known.name, info.known.sm_count);
  OK(flashtune_context_destroy(context));
}

static void pack_of_a_cpu_context(void) {
  flashtune_context_options options = cpu_options();
  struct {
    flashtune_pack_info known;
    uint64_t later;
  } info;
  flashtune_context *context = NULL;
  options.pack = "/nowhere/a.pack"; /* a CPU context looks at no pack */
  OK(flashtune_context_create(&options, &context));
  memset(&info, 0xab, sizeof info);
  FAILS(flashtune_context_pack(context, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, "info is NULL");
  FAILS(flashtune_context_pack(NULL, &info.known), FLASHTUNE_STATUS_INVALID_ARGUMENT, "context is NULL");
  info.known.struct_size = 4;
  FAILS(flashtune_context_pack(context, &info.known), FLASHTUNE_STATUS_INVALID_ARGUMENT, "info.struct_size is 4");
  info.known.struct_size = sizeof info;
  OK(flashtune_context_pack(context, &info.known));
  CHECK(info.known.struct_size == sizeof info && info.later == 0, "a newer caller's rest must be zero");
  CHECK(info.known.state == FLASHTUNE_PACK_NONE && info.known.num_kernels == 0, "state %d", info.known.state);
  CHECK(!info.known.path[0] && !info.known.reason[0], "%s: %s", info.known.path, info.known.reason);
  OK(flashtune_context_destroy(context));
  /* The options of an older release end before pack. */
  options.struct_size = offsetof(flashtune_context_options, pack);
  OK(flashtune_context_create(&options, &context));
  OK(flashtune_context_destroy(context));
}

static int threads_of_this_process(void) {
  DIR *folder = opendir("/proc/self/task");
  int count = 0;
  if (!folder) return 0;
  while (readdir(folder)) count++;
  closedir(folder);
  return count;
}

static void threads_end_with_their_context(void) {
  flashtune_context_options options = cpu_options();
  flashtune_context *context = NULL;
  options.num_threads = 17;
  const int before = threads_of_this_process();
  for (int round = 0; round < 20; round++) {
    OK(flashtune_context_create(&options, &context));
    OK(flashtune_context_destroy(context));
    CHECK(threads_of_this_process() == before, "%d threads instead of %d", threads_of_this_process(), before);
  }
}

static void made_and_ended_often(void) {
  Shape shape = {1, 2, 2, 9, 9, 8, 8, FLASHTUNE_CAUSAL_NONE};
  Attention a = make_attention(shape, 1);
  for (int i = 0; i < 50; i++) {
    flashtune_context *context = cpu_context("");
    if (i % 10 == 0) run_and_check(context, &a);
    OK(flashtune_context_destroy(context));
  }
  OK(flashtune_context_destroy(NULL));
  free_attention(&a);
}

static void sealed_context_prepares_nothing(void) {
  Shape shape = {1, 2, 2, 9, 9, 8, 8, FLASHTUNE_CAUSAL_NONE};
  Attention a = make_attention(shape, 1);
  flashtune_context *context = cpu_context("");
  flashtune_plan_info info;
  info.struct_size = sizeof info;
  OK(flashtune_forward_prepare(context, &a.forward));
  OK(flashtune_context_seal(context));
  OK(flashtune_forward(context, &a.forward, NULL, 0, NULL));
  OK(flashtune_forward_prepare(context, &a.forward));
  reset_outputs(&a);
  uint64_t bytes = 0;
  OK(flashtune_backward_workspace_size(context, &a.backward, &bytes));
  void *workspace = make_workspace(bytes);
  FAILS(flashtune_backward(context, &a.backward, workspace, bytes, NULL), FLASHTUNE_STATUS_NOT_PREPARED, "sealed");
  FAILS(flashtune_backward_prepare(context, &a.backward), FLASHTUNE_STATUS_NOT_PREPARED, "sealed");
  FAILS(flashtune_backward_plan_info(context, &a.backward, &info), FLASHTUNE_STATUS_NOT_PREPARED, "sealed");
  CHECK(a.data[DQ][0] == CANARY && a.data[DV][0] == CANARY, "written");
  FAILS(flashtune_context_seal(NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, "context is NULL");
  free(workspace);
  free_attention(&a);
  OK(flashtune_context_destroy(context));
}

static void versions_and_statuses(void) {
  char text[32];
  CHECK(flashtune_version() == FLASHTUNE_VERSION, "%d", flashtune_version());
  snprintf(text, sizeof text, "%d.%d.%d", FLASHTUNE_VERSION_MAJOR, FLASHTUNE_VERSION_MINOR, FLASHTUNE_VERSION_PATCH);
  CHECK(strcmp(flashtune_version_string(), text) == 0, "%s", flashtune_version_string());
  for (int32_t status = 0; status <= 12; status++) {
    const char *string = flashtune_status_string(status);
    CHECK(strcmp(string, "unknown status") != 0 && string[0] != 0, "status %d has no name", status);
  }
  CHECK(strcmp(flashtune_status_string(13), "unknown status") == 0, "13 is new");
  CHECK(strcmp(flashtune_status_string(-1), "unknown status") == 0, "-1 has a name");
}

typedef struct Lines {
  int count, inside;
} Lines;

static void on_line(int32_t level, const char *message, void *user) {
  Lines *lines = user;
  CHECK(level >= FLASHTUNE_LOG_ERROR && level <= FLASHTUNE_LOG_DEBUG, "level %d", level);
  CHECK(message[0] != 0 && strchr(message, '\n') == NULL, "line: %s", message);
  lines->count++;
  lines->inside = flashtune_set_log_callback(NULL, NULL);
}

/* A cache folder that cannot be used costs one line of log and nothing else. */
static void log_lines(void) {
  Lines lines = {0, 0};
  OK(flashtune_set_log_callback(on_line, &lines));
  flashtune_context *context = cpu_context("/dev/null/no-folder");
  OK(flashtune_context_destroy(context));
  CHECK(lines.count >= 1, "no line");
  CHECK(lines.inside == FLASHTUNE_STATUS_INVALID_ARGUMENT, "set from inside the callback");
  int before = lines.count;
  OK(flashtune_set_log_callback(NULL, NULL));
  context = cpu_context("/dev/null/no-folder");
  OK(flashtune_context_destroy(context));
  CHECK(lines.count == before, "called after removal");
}

static void on_plan(int32_t level, const char *message, void *user) {
  if (level == FLASHTUNE_LOG_INFO && strstr(message, "heuristic") && strstr(message, "cpu ")) ++*(int *)user;
}

/* Each new plan gives one line of level INFO with device and source; an old plan gives none. */
static void line_of_each_new_plan(void) {
  int lines = 0;
  flashtune_context *context = cpu_context("");
  Shape shape = {1, 2, 2, 16, 16, 32, 32, FLASHTUNE_CAUSAL_NONE};
  Attention a = make_attention(shape, 3);
  OK(flashtune_set_log_callback(on_plan, &lines));
  OK(flashtune_forward_prepare(context, &a.forward));
  OK(flashtune_forward_prepare(context, &a.forward));
  CHECK(lines == 1, "%d lines", lines);
  OK(flashtune_set_log_callback(NULL, NULL));
  free_attention(&a);
  OK(flashtune_context_destroy(context));
}

/* Where AUTO opens the CPU, a pointer that the host cannot read is refused before any work. */
static void auto_refuses_device_pointers_on_the_cpu(void) {
  flashtune_context_options options = cpu_options();
  flashtune_device_info info;
  flashtune_context *context;
  options.backend = FLASHTUNE_BACKEND_AUTO;
  info.struct_size = sizeof info;
  OK(flashtune_context_create(&options, &context));
  OK(flashtune_context_device(context, &info));
  if (info.backend == FLASHTUNE_BACKEND_CPU) {
    Shape shape = {1, 2, 2, 16, 16, 32, 32, FLASHTUNE_CAUSAL_NONE};
    Attention a = make_attention(shape, 3);
    run_and_check(context, &a);
    reset_outputs(&a);
    void *device = mmap(NULL, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    flashtune_forward_params p = a.forward;
    p.k.data = device;
    OK(flashtune_forward_supported(context, &p));
    FAILS(flashtune_forward(context, &p, NULL, 0, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, "k [0x");
    p = a.forward;
    p.out.data = device;
    FAILS(flashtune_forward(context, &p, NULL, 0, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, "out [0x");
    for (int64_t i = 0; i < a.count[OUT]; i++) CHECK(a.data[OUT][i] == CANARY, "a failed call wrote out");
    uint64_t bytes = 0;
    OK(flashtune_backward_workspace_size(context, &a.backward, &bytes));
    FAILS(flashtune_backward(context, &a.backward, device, bytes, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, "workspace");
    munmap(device, 1 << 20);
    free_attention(&a);
  }
  OK(flashtune_context_destroy(context));
}

int main(void) {
  versions_and_statuses();
  wrong_options();
  sizes_of_other_releases();
  what_it_runs_on();
  pack_of_a_cpu_context();
  threads_end_with_their_context();
  made_and_ended_often();
  sealed_context_prepares_nothing();
  log_lines();
  line_of_each_new_plan();
  auto_refuses_device_pointers_on_the_cpu();
  return 0;
}
