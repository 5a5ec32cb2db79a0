/* Many processes on one device and one cache folder: all make a context, tune, prepare and launch
 * at the same time. Each gets right results, and the records of all problems are there afterwards.
 *
 * Arguments: the folder, and the number of processes (8). PROCESSES_GPU=1 runs on GPU 0. */
#define _DEFAULT_SOURCE /* fork */
#include "check.h"
#include "device.h"

#include <math.h>
#include <stddef.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PROBLEMS = 4, HEADS = 2, DIM = 64, MOST = 256, ELEMENTS = MOST * HEADS * DIM, BYTES = 2 * ELEMENTS, PATIENCE = 150 };
enum { Q, K, V, OUT, BUFFERS };

static int on_gpu;
static uint16_t host[BUFFERS][ELEMENTS], wanted[ELEMENTS];

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static flashtune_forward_params problem(int which, void *const buffers[BUFFERS]) {
  flashtune_forward_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.dtype = FLASHTUNE_DTYPE_BF16, p.causal = which % 2;
  p.batch_size = 1, p.num_heads_q = p.num_heads_kv = HEADS;
  p.seqlen_q = p.seqlen_k = MOST >> which / 2, p.head_dim = p.head_dim_v = DIM;
  flashtune_tensor tensors[BUFFERS];
  for (int i = 0; i < BUFFERS; i++) {
    const flashtune_tensor packed = {buffers[i], ELEMENTS, HEADS * DIM, DIM};
    tensors[i] = packed;
  }
  p.q = read_of(tensors[Q]), p.k = read_of(tensors[K]), p.v = read_of(tensors[V]), p.out = tensors[OUT];
  return p;
}

static flashtune_context *context_of(int32_t backend, const char *folder) {
  flashtune_context_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.backend = backend, options.cache_dir = folder, options.num_threads = 1;
  flashtune_context *context = NULL;
  OK(flashtune_context_create(&options, &context));
  return context;
}

static float of_bf16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

/* A process: returns after the parent has closed the other end of `gate`. */
static void work(int number, const char *folder, int gate) {
  void *buffers[BUFFERS], *workspace = NULL, *on_host[BUFFERS];
  const uint64_t workspace_bytes = 8 << 20;
  char byte;
  alarm(PATIENCE);
  for (int i = 0; i < BUFFERS; i++) {
    uint32_t state = 7 * (uint32_t)i + 1;
    for (int j = 0; j < ELEMENTS; j++) state = state * 1664525u + 1013904223u, host[i][j] = (uint16_t)((state >> 16 & 0x80ff) | 0x3f00);
    buffers[i] = on_host[i] = host[i];
  }
  CHECK(read(gate, &byte, 1) == 0, "the gate");
  flashtune_context *context = context_of(on_gpu ? FLASHTUNE_BACKEND_CUDA : FLASHTUNE_BACKEND_CPU, folder);
  if (on_gpu) {
    open_driver(), enter_device(0);
    workspace = device_memory(workspace_bytes);
    for (int i = 0; i < BUFFERS; i++) to_device(buffers[i] = device_memory(BYTES), host[i], BYTES);
    CUDA(cuStreamSynchronize(NULL));
  }
  const flashtune_forward_params own = problem(number % PROBLEMS, buffers);
  flashtune_autotune_params tune;
  memset(&tune, 0, sizeof tune);
  tune.struct_size = sizeof tune;
  tune.forward = &own, tune.time_limit_seconds = on_gpu ? 1 : 0.02;
  OK(flashtune_autotune(context, &tune));

  flashtune_context *oracle = context_of(FLASHTUNE_BACKEND_CPU, "");
  for (int which = 0; which < PROBLEMS; which++) {
    const flashtune_forward_params p = problem(which, buffers), expected = problem(which, on_host);
    OK(flashtune_forward(context, &p, workspace, on_gpu ? workspace_bytes : 0, NULL));
    if (on_gpu) from_device(wanted, buffers[OUT], BYTES);
    else memcpy(wanted, host[OUT], BYTES);
    OK(flashtune_forward(oracle, &expected, NULL, 0, NULL));
    for (int64_t i = 0; i < p.seqlen_q * HEADS * DIM; i++) {
      const float found = of_bf16(wanted[i]), right = of_bf16(host[OUT][i]);
      /* bf16 keeps 8 bits; the values are averages of numbers up to 2. */
      CHECK(fabsf(found - right) <= 0.02f, "process %d, problem %d: element %ld is %g instead of %g", number, which, (long)i, found, right);
    }
  }
  OK(flashtune_context_destroy(oracle));
  OK(flashtune_context_destroy(context));
}

int main(int argc, char **argv) {
  CHECK(argc > 1, "usage: processes FOLDER [COUNT]");
  const int count = argc > 2 ? atoi(argv[2]) : 8;
  int gate[2], failed = 0;
  on_gpu = getenv("PROCESSES_GPU") != NULL;
  CHECK(!pipe(gate), "no pipe");
  /* This process has no thread and has not used CUDA before the fork. */
  for (int i = 0; i < count; i++) {
    const pid_t child = fork();
    CHECK(child >= 0, "fork failed");
    if (child == 0) {
      close(gate[1]);
      work(i, argv[1], gate[0]);
      exit(0);
    }
  }
  const double began = now();
  close(gate[0]), close(gate[1]);
  for (int i = 0; i < count; i++) {
    int status = 0;
    CHECK(wait(&status) > 0, "wait failed");
    failed += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
  }
  CHECK(failed == 0, "%d of %d processes failed", failed, count);
  void *nowhere[BUFFERS] = {NULL};
  flashtune_context *later = context_of(on_gpu ? FLASHTUNE_BACKEND_CUDA : FLASHTUNE_BACKEND_CPU, argv[1]);
  for (int which = 0; which < PROBLEMS && which < count; which++) {
    const flashtune_forward_params p = problem(which, nowhere);
    flashtune_plan_info info;
    memset(&info, 0, sizeof info);
    info.struct_size = sizeof info;
    OK(flashtune_forward_plan_info(later, &p, &info));
    CHECK(info.source == FLASHTUNE_SOURCE_MACHINE, "the record of problem %d is lost: source %d", which, info.source);
  }
  OK(flashtune_context_destroy(later));
  if (on_gpu) printf("%d processes, %.1f s\n", count, now() - began);
  return 0;
}
