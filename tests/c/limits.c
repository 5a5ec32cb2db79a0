/* Limits of the system: whatever the limit of the address space or of the number of threads, each
 * call ends with OK or with OUT_OF_MEMORY, and no process with a signal. Each limit has a child
 * process of its own.
 *
 * usage: limits CACHE-FOLDER [STEPS] */
#define _DEFAULT_SOURCE /* fork */
#include "attention.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 4 };

/* What a child does before the limit is set. */
typedef enum { NOTHING, CONTEXT, LAUNCHES, STARTS } Start;

/* How a child ended: every call succeeded, or one was refused. */
enum { ALL_OK = 0, REFUSED = 9 };

static flashtune_context *context;

/* Ends the child where memory is out. A failed call must say so. */
static void ok_or_refused(int32_t status, const char *call) {
  if (status == FLASHTUNE_STATUS_OK) return;
  const char *reason = flashtune_last_error();
  CHECK(status == FLASHTUNE_STATUS_OUT_OF_MEMORY, "%s: %s: %s", call, flashtune_status_string(status), reason);
  CHECK(*reason, "%s is refused without a reason", call);
  /* The context is still of use, and can be destroyed. */
  flashtune_device_info info;
  info.struct_size = sizeof info;
  if (context) {
    OK(flashtune_context_device(context, &info));
    OK(flashtune_context_destroy(context));
  }
  _exit(REFUSED);
}
#define TRY(call) ok_or_refused(call, #call)

static void create(const char *folder) {
  flashtune_context_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.backend = FLASHTUNE_BACKEND_CPU;
  options.num_threads = THREADS;
  options.cache_dir = folder;
  TRY(flashtune_context_create(&options, &context));
}

static void launch(Attention *a, void *workspace, uint64_t bytes) {
  uint64_t needed = 0;
  TRY(flashtune_forward(context, &a->forward, NULL, 0, NULL));
  TRY(flashtune_backward_workspace_size(context, &a->backward, &needed));
  CHECK(needed <= bytes, "%llu bytes of workspace", (unsigned long long)needed);
  TRY(flashtune_backward(context, &a->backward, workspace, bytes, NULL));
}

static void tune(const Attention *a) {
  flashtune_autotune_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  params.time_limit_seconds = 0.02;
  params.forward = &a->forward;
  TRY(flashtune_autotune(context, &params));
  params.forward = NULL;
  params.backward = &a->backward;
  TRY(flashtune_autotune(context, &params));
}

static void work(const char *folder, Attention *a, void *workspace, uint64_t bytes) {
  if (!context) create(folder);
  launch(a, workspace, bytes);
  tune(a);
  launch(a, workspace, bytes);
  OK(flashtune_context_destroy(context));
  _exit(ALL_OK);
}

/* The address space in use, in bytes. */
static size_t in_use(void) {
  unsigned long pages = 0;
  FILE *file = fopen("/proc/self/statm", "r");
  CHECK(file && fscanf(file, "%lu", &pages) == 1, "no /proc/self/statm");
  fclose(file);
  return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static void limited_memory(Start start, size_t limit, const char *folder, Attention *a, void *workspace, uint64_t bytes) {
  struct rlimit as;
  if (start >= CONTEXT) create(folder);
  if (start >= LAUNCHES) launch(a, workspace, bytes);
  as.rlim_cur = as.rlim_max = limit + (start == NOTHING ? 0 : in_use());
  CHECK(setrlimit(RLIMIT_AS, &as) == 0, "setrlimit failed");
  work(folder, a, workspace, bytes);
}

/* A limit counts the threads of a user, and does not hold for root. */
static void limited_threads(rlim_t limit, const char *folder, Attention *a, void *workspace, uint64_t bytes) {
  enum { NOBODY = 65534 };
  struct rlimit threads;
  threads.rlim_cur = threads.rlim_max = limit;
  if (geteuid() == 0) CHECK(setgid(NOBODY) == 0 && setuid(NOBODY) == 0, "setuid failed");
  CHECK(setrlimit(RLIMIT_NPROC, &threads) == 0, "setrlimit failed");
  work(folder, a, workspace, bytes);
}

/* The limits of each start: 10 MB to 400 MB for a process that has nothing yet. One that has a
 * context is at its limit before it allocates anything, and then gets more in growing steps. */
static size_t limit_of(Start start, size_t step, size_t steps) {
  if (start == NOTHING) return (10 << 20) + step * ((390 << 20) / steps);
  return (260 << 20) / (steps * steps) * step * step;
}

static int refused, succeeded, broken;

/* Counts how a child ended. */
static void count(pid_t pid, const char *kind, size_t limit) {
  int status = 0;
  CHECK(pid > 0 && waitpid(pid, &status, 0) == pid, "fork or waitpid failed");
  int code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  refused += code == REFUSED;
  succeeded += code == ALL_OK;
  if (code == REFUSED || code == ALL_OK) return;
  fprintf(stderr, "%s, limit %zu: the child ended with %d\n", kind, limit, code);
  broken++;
}

int main(int argc, char **argv) {
  static const char *const names[] = {"memory from the start", "memory with a context", "memory after launches"};
  size_t steps = argc > 2 ? (size_t)atol(argv[2]) : 24;
  Shape shape = {2, 4, 2, 200, 200, 64, 64, FLASHTUNE_CAUSAL_BOTTOM_RIGHT};
  Attention a = make_attention(shape, 5);
  uint64_t bytes = 8 << 20;
  void *workspace = make_workspace(bytes);
  const char *folder = argc > 1 ? argv[1] : "";
  for (int start = NOTHING; start < STARTS; start++)
    for (size_t step = 0; step <= steps; step++) {
      size_t limit = limit_of((Start)start, step, steps);
      pid_t pid = fork();
      if (pid == 0) {
        alarm(60);
        limited_memory((Start)start, limit, folder, &a, workspace, bytes);
      }
      count(pid, names[start], limit);
    }
  CHECK(refused > 0, "no limit of memory was low enough");
  refused = 0;
  for (size_t limit = 0; limit <= 2 * THREADS; limit++) {
    pid_t pid = fork();
    if (pid == 0) {
      alarm(60);
      limited_threads(limit, folder, &a, workspace, bytes);
    }
    count(pid, "threads", limit);
  }
  CHECK(!broken, "%d of %d children broke; %d were refused", broken, broken + refused + succeeded, refused);
  CHECK(refused > 0 && succeeded > 0, "%d children were refused and %d succeeded", refused, succeeded);
  free(workspace);
  free_attention(&a);
  return 0;
}
