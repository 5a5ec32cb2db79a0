/* A driver that fails one call of a run, with each of three codes, from the first call to the last.
 * Each failure is a status; nothing is left behind; the context goes on afterwards.
 *
 * The driver is the stand-in of tests/driver, or a GPU's behind driver_shim.c. The argument "all"
 * fails every call of a tuning run too, instead of some. FAILING_STEP=N fails one call in N.
 * FAILING_CACHE names a folder of kernels. */
#define _DEFAULT_SOURCE /* fork */
#include "check.h"
#include "device.h"

#include <stddef.h>
#include <sys/wait.h>
#include <unistd.h>

static int64_t (*fake_fail)(int64_t, int), (*fake_left)(void);
static const char *(*fake_failed)(void);
static int (*fake_capture_mode)(void);

enum { OUT_OF_MEMORY = 2, ECC = 214, LAUNCH_FAILED = 719, SEQLEN = 300, HEADS = 4, DIM = 64, ROOM = SEQLEN * HEADS * DIM * 2, WORKSPACE = 4 << 20 };
static const int codes[] = {OUT_OF_MEMORY, ECC, LAUNCH_FAILED};

static char *rooms[9], *workspace;
static int32_t *lengths;
static void *stream;

static int64_t statuses, unnoticed;
static const char *last_failed;

enum { CREATES = 1, PREPARES = 2, LAUNCHES = 4 };

/* Calls that the library may do without, and then return OK. */
static const struct Dispensable {
  const char *name;
  int during;
} dispensable[] = {
  {"cuDeviceGetAttribute", CREATES}, /* the memory's clock, which some virtual GPUs do not tell */
  {"", PREPARES}, /* any: another config may serve, and kernels may do without tile counters */
  /* These are tried twice. */
  {"cuCtxPopCurrent_v2", CREATES | LAUNCHES}, {"cuThreadExchangeStreamCaptureMode", CREATES},
  {"cuCtxGetCurrent", CREATES}, {"cuCtxPushCurrent_v2", CREATES},
};

/* The status of a call during which the driver may have failed. */
static int32_t met(int32_t status, int64_t at, int code, int during) {
  const char *name = fake_failed();
  if (!name) {
    CHECK(status == 0, "call %ld: %s without a failure", (long)at, flashtune_last_error());
    return 0;
  }
  if (status) {
    const int32_t expected = code == OUT_OF_MEMORY ? FLASHTUNE_STATUS_OUT_OF_MEMORY : FLASHTUNE_STATUS_CUDA;
    CHECK(status == expected, "call %ld, %s: status %d: %s", (long)at, name, status, flashtune_last_error());
    CHECK(strstr(flashtune_last_error(), name), "call %ld, %s: %s", (long)at, name, flashtune_last_error());
    statuses++;
    return status;
  }
  for (size_t i = 0; i < sizeof dispensable / sizeof *dispensable; i++) {
    if (!(dispensable[i].during & during) || !strstr(name, dispensable[i].name)) continue;
    unnoticed++;
    last_failed = name;
    fake_fail(0, 0); /* it may not excuse a later call */
    return 0;
  }
  CHECK(0, "call %ld: %s failed with %d, and the status is OK", (long)at, name, code);
  return 0;
}

static flashtune_forward_params forward(void) {
  flashtune_forward_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.dtype = FLASHTUNE_DTYPE_BF16, p.causal = FLASHTUNE_CAUSAL_BOTTOM_RIGHT;
  p.batch_size = 1, p.num_heads_q = p.num_heads_kv = HEADS;
  p.seqlen_q = p.seqlen_k = SEQLEN, p.head_dim = p.head_dim_v = DIM;
  flashtune_tensor at[4];
  for (int i = 0; i < 4; i++) {
    const flashtune_tensor packed = {rooms[i], SEQLEN * HEADS * DIM, HEADS * DIM, DIM};
    at[i] = packed;
  }
  p.q = read_of(at[0]), p.k = read_of(at[1]), p.v = read_of(at[2]), p.out = at[3];
  p.lse = (float *)(void *)rooms[8];
  return p;
}

static flashtune_backward_params backward(void) {
  const flashtune_forward_params of = forward();
  flashtune_backward_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  OK(flashtune_backward_params_from_forward(&of, &p));
  flashtune_tensor at[4];
  for (int i = 0; i < 4; i++) {
    const flashtune_tensor packed = {rooms[4 + i], SEQLEN * HEADS * DIM, HEADS * DIM, DIM};
    at[i] = packed;
  }
  p.dout = read_of(at[0]), p.dq = at[1], p.dk = at[2], p.dv = at[3];
  return p;
}

/* Both passes and both operations, prepared and launched. Stops at the first failure. */
static int32_t run(flashtune_context *context, int64_t at, int code) {
  const flashtune_forward_params f = forward();
  const flashtune_backward_params b = backward();
  uint64_t bytes = 0;
  int32_t status = 0;
  flashtune_kv_append_params a;
  memset(&a, 0, sizeof a);
  a.struct_size = sizeof a;
  a.dtype = f.dtype, a.batch_size = 1, a.num_heads_kv = HEADS, a.seqlen_new = 1, a.seqlen_cache = SEQLEN;
  a.head_dim = a.head_dim_v = DIM, a.k_new = f.q, a.v_new = f.q, a.k_cache = written_of(f.k), a.v_cache = written_of(f.v);
  a.seqlens = lengths;
#define STEP(during, call) if ((status = met(call, at, code, during))) return status
  STEP(PREPARES, flashtune_forward_prepare(context, &f));
  STEP(PREPARES, flashtune_backward_prepare(context, &b));
  STEP(PREPARES, flashtune_kv_append_prepare(context, &a));
  STEP(LAUNCHES, flashtune_forward(context, &f, workspace, WORKSPACE, stream));
  STEP(LAUNCHES, flashtune_forward(context, &f, workspace, WORKSPACE, stream));
  STEP(LAUNCHES, flashtune_backward_workspace_size(context, &b, &bytes));
  CHECK(bytes <= WORKSPACE, "%lu bytes", (unsigned long)bytes);
  STEP(LAUNCHES, flashtune_backward(context, &b, workspace, WORKSPACE, stream));
  STEP(LAUNCHES, flashtune_kv_append(context, &a, stream));
#undef STEP
  return 0;
}

static int32_t tune(flashtune_context *context, int64_t at, int code) {
  const flashtune_forward_params f = forward();
  flashtune_autotune_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  params.forward = &f, params.time_limit_seconds = 0.001;
  const int32_t status = flashtune_autotune(context, &params);
  /* The stand-in computes nothing, so no candidate is right. */
  CHECK(status || !is_stand_in(), "tuned call %ld with code %d", (long)at, code);
  return status;
}

static int32_t create(flashtune_context **context) {
  flashtune_context_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.backend = FLASHTUNE_BACKEND_CUDA;
  options.cache_dir = getenv("FAILING_CACHE") ? getenv("FAILING_CACHE") : "";
  return flashtune_context_create(&options, context);
}

static void check_the_rest(int64_t left, void *current, int64_t at, const char *name) {
  void *now = NULL;
  CHECK(fake_left() == left, "call %ld, %s: %ld things are left behind", (long)at, name, (long)(fake_left() - left));
  CUDA(cuCtxGetCurrent(&now));
  CHECK(now == current, "call %ld, %s: another context is current", (long)at, name);
  CHECK(fake_capture_mode() == 0, "call %ld, %s: the thread's capture mode is changed", (long)at, name);
}

/* Fails call `at` of a whole life of a context. Returns the calls of such a life. */
static int64_t live(int64_t at, int code, int tunes) {
  flashtune_context *context = NULL;
  void *current = NULL;
  last_failed = "none";
  const int64_t left = fake_left();
  CUDA(cuCtxGetCurrent(&current));
  fake_fail(at, code);
  if (!met(create(&context), at, code, CREATES)) {
    if (tunes) tune(context, at, code);
    else run(context, at, code);
  }
  if (fake_failed()) last_failed = fake_failed();
  const char *name = last_failed;
  const int64_t calls = fake_fail(0, 0);
  /* The context goes on as if nothing had been. */
  if (context) {
    CHECK(run(context, at, 0) == 0, "call %ld, %s", (long)at, name);
    OK(flashtune_context_destroy(context));
  }
  check_the_rest(left, current, at, name);
  return calls;
}

/* Fails the calls that give a whole context back. */
static int64_t die(int64_t at, int code) {
  flashtune_context *context = NULL;
  void *current = NULL;
  const int64_t left = fake_left();
  CUDA(cuCtxGetCurrent(&current));
  OK(create(&context));
  CHECK(run(context, 0, 0) == 0, "no call fails here");
  fake_fail(at, code);
  OK(flashtune_context_destroy(context));
  const char *name = fake_failed() ? fake_failed() : "none";
  const int64_t calls = fake_fail(0, 0);
  check_the_rest(left, current, at, name);
  return calls;
}

static void find_stand_in(void) {
  open_driver();
  *(void **)(&fake_fail) = driver_symbol("fake_fail"), *(void **)(&fake_left) = driver_symbol("fake_left");
  *(void **)(&fake_failed) = driver_symbol("fake_failed");
  *(void **)(&fake_capture_mode) = driver_symbol("fake_capture_mode");
  CHECK(fake_fail && fake_left && fake_failed && fake_capture_mode, "this needs the stand-in or driver_shim.c");
}

/* The first calls of a process open the driver. Where one fails, the process goes on without a GPU,
 * and says so each time. A later one fails that context alone. */
static void open_with_failure(int64_t at, int code) {
  const char *opening[] = {"cuDriverGetVersion", "cuInit"};
  flashtune_context *context = NULL;
  find_stand_in();
  fake_fail(at, code);
  const int32_t status = create(&context);
  const char *name = fake_failed() ? fake_failed() : "none";
  const int is_opening = at <= 2 && (!strcmp(name, opening[0]) || !strcmp(name, opening[1]));
  CHECK(at > 2 || is_opening, "call %ld is %s", (long)at, name);
  CHECK(status, "call %ld, %s: no status", (long)at, name);
  CHECK(strstr(flashtune_last_error(), name) || is_opening, "call %ld, %s: %s", (long)at, name, flashtune_last_error());
  fake_fail(0, 0);
  const int32_t again = create(&context);
  CHECK(again == (is_opening ? FLASHTUNE_STATUS_NO_DEVICE : FLASHTUNE_STATUS_OK), "call %ld, %s: status %d: %s",
        (long)at, name, again, flashtune_last_error());
  OK(flashtune_context_destroy(again ? NULL : context));
  CHECK(fake_left() == 0, "call %ld, %s: something is left behind", (long)at, name);
}

/* Each in a process of its own. This one has not used CUDA yet. */
static void opening_fails(void) {
  for (int64_t at = 1; at <= 4; at++) {
    const pid_t child = fork();
    int status = 0;
    CHECK(child >= 0, "fork failed");
    if (child == 0) {
      open_with_failure(at, codes[at % 3]);
      exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0, "call %ld: the child ended with %d", (long)at, status);
  }
}

int main(int argc, char **argv) {
  const int is_all = argc > 1 && !strcmp(argv[1], "all");
  opening_fails();
  find_stand_in();
  enter_device(0);
  for (int i = 0; i < 9; i++) rooms[i] = device_memory(ROOM);
  workspace = device_memory(WORKSPACE), lengths = device_memory(sizeof *lengths);
  fill_device(lengths, 0, sizeof *lengths);
  CUDA(cuStreamCreate(&stream, 1));
  /* The library pushes its context over the caller's other one, and not over its own. */
  void *other = (void *)(intptr_t)0x2000;
  const int64_t one_in = getenv("FAILING_STEP") ? atoi(getenv("FAILING_STEP")) : 1;
  for (int is_other = 0; is_other < (is_stand_in() ? 2 : 1); is_other++) {
    if (is_other) CUDA(cuCtxPushCurrent_v2(other));
    const int64_t lives = live(0, 0, 0), deaths = die(0, 0), tunings = live(0, 0, 1);
    CHECK(lives > 60 && deaths > 8 && tunings > 60, "%ld, %ld and %ld calls", (long)lives, (long)deaths, (long)tunings);
    /* Each call fails with each code, or with one of them. Few calls depend on the caller's
     * context. */
    const int64_t step = is_all ? 1 : is_other ? 4 * one_in : one_in;
    for (int code = 0; code < 3; code++) {
      for (int64_t at = 1; at <= lives; at++)
        if (is_all || (at % step == 0 && (at / step + code) % 3 == 0)) live(at, codes[code], 0);
      for (int64_t at = 1; at <= deaths; at++)
        if (is_all || (at % step == 0 && (at / step + code) % 3 == 0)) die(at, codes[code]);
      /* Tuning takes long, since its results are compared with the CPU's. */
      for (int64_t at = 1 + code; at <= tunings && !is_other; at += is_all ? 3 : tunings / 2 * step) live(at, codes[code], 1);
    }
    if (getenv("FAILING_REPORT")) printf("%ld, %ld and %ld calls; %ld statuses, %ld calls done without\n", (long)lives, (long)deaths, (long)tunings, (long)statuses, (long)unnoticed);
  }
  CHECK(statuses * one_in > 60, "only %ld failures gave a status", (long)statuses);
  return 0;
}
