/* Two GPUs in one process: a context on each, and threads that switch between them launch by
 * launch, whatever context the caller has made current. With one GPU both contexts are on it.
 *
 * The stand-in refuses handles of another GPU's context. On real GPUs the results must be the same
 * bits as before, on each. The argument is the least number of GPUs. With it the program prints
 * their number. */
#include "check.h"
#include "device.h"

#include <pthread.h>
#include <stddef.h>

enum { GPUS = 2, THREADS = 4, LAUNCHES = 50, HEADS = 4, DIM = 64, SEQLEN = 200, ELEMENTS = SEQLEN * HEADS * DIM, BYTES = 2 * ELEMENTS };
enum { Q, K, V, OUT, DOUT, DQ, DK, DV, LSE, BUFFERS };

/* What one thread has on one GPU. */
typedef struct Place {
  char *buffers[BUFFERS], *workspace;
  uint64_t workspace_bytes;
  void *stream;
} Place;

static flashtune_context *contexts[GPUS];
static void *devices[GPUS]; /* their CUcontexts */
static Place places[THREADS][GPUS];
static char *expected[GPUS][3];
static const int outputs[3] = {OUT, DQ, DV};

static flashtune_tensor packed(const Place *at, int buffer) {
  const flashtune_tensor tensor = {at->buffers[buffer], ELEMENTS, HEADS * DIM, DIM};
  return tensor;
}

static void launch(int gpu, const Place *at) {
  flashtune_forward_params f;
  flashtune_backward_params b;
  memset(&f, 0, sizeof f), memset(&b, 0, sizeof b);
  f.struct_size = sizeof f, b.struct_size = sizeof b;
  f.dtype = FLASHTUNE_DTYPE_BF16, f.causal = FLASHTUNE_CAUSAL_TOP_LEFT;
  f.batch_size = 1, f.num_heads_q = f.num_heads_kv = HEADS;
  f.seqlen_q = f.seqlen_k = SEQLEN, f.head_dim = f.head_dim_v = DIM;
  f.q = read_of(packed(at, Q)), f.k = read_of(packed(at, K)), f.v = read_of(packed(at, V)), f.out = packed(at, OUT);
  f.lse = (float *)(void *)at->buffers[LSE];
  OK(flashtune_backward_params_from_forward(&f, &b));
  b.dout = read_of(packed(at, DOUT)), b.dq = packed(at, DQ), b.dk = packed(at, DK), b.dv = packed(at, DV);
  b.deterministic = 1;
  OK(flashtune_forward(contexts[gpu], &f, at->workspace, at->workspace_bytes, at->stream));
  OK(flashtune_backward(contexts[gpu], &b, at->workspace, at->workspace_bytes, at->stream));
}

static void make_place(Place *at, uint32_t state) {
  static uint16_t host[ELEMENTS];
  CUDA(cuStreamCreate(&at->stream, 1));
  for (int i = 0; i < BUFFERS; i++) {
    at->buffers[i] = device_memory(BYTES);
    for (int j = 0; j < ELEMENTS; j++) state = state * 1664525u + 1013904223u, host[j] = (uint16_t)((state >> 16 & 0x80ff) | 0x3f00);
    to_device(at->buffers[i], host, BYTES);
    CUDA(cuStreamSynchronize(NULL));
  }
  at->workspace_bytes = 8 << 20;
  at->workspace = device_memory(at->workspace_bytes);
}

/* Copies a place's results to the host. Its GPU must be current. */
static void results(const Place *at, char *to[3]) {
  CUDA(cuStreamSynchronize(at->stream));
  for (int i = 0; i < 3; i++) from_device(to[i], at->buffers[outputs[i]], BYTES);
}

static void *switch_often(void *of) {
  Place *mine = of;
  char *found[3];
  for (int i = 0; i < 3; i++) found[i] = malloc(BYTES);
  for (int i = 0; i < LAUNCHES; i++) {
    const int gpu = i % 2, current = i / 2 % 3; /* neither GPU, the other one or this one is current */
    void *before = NULL, *after = NULL;
    if (current) CUDA(cuCtxPushCurrent_v2(devices[current == 1 ? !gpu : gpu]));
    CUDA(cuCtxGetCurrent(&before));
    launch(gpu, &mine[gpu]);
    CUDA(cuCtxGetCurrent(&after));
    CHECK(before == after, "another context is current");
    if (current) CUDA(cuCtxPopCurrent_v2(&after));
  }
  for (int gpu = 0; gpu < GPUS; gpu++) {
    void *popped = NULL;
    CUDA(cuCtxPushCurrent_v2(devices[gpu]));
    results(&mine[gpu], found);
    for (int i = 0; i < 3 && !is_stand_in(); i++) CHECK(!memcmp(found[i], expected[gpu][i], BYTES), "GPU %d: result %d", gpu, i);
    CUDA(cuCtxPopCurrent_v2(&popped));
  }
  for (int i = 0; i < 3; i++) free(found[i]);
  return NULL;
}

int main(int argc, char **argv) {
  pthread_t threads[THREADS];
  void *popped = NULL;
  const int count = open_driver();
  const int least = argc > 1 ? atoi(argv[1]) : 0;
  CHECK(count >= 1 && count >= least, "%d GPUs", count);
  for (int gpu = 0; gpu < GPUS; gpu++) {
    devices[gpu] = enter_device(gpu % count);
    contexts[gpu] = cuda_context(gpu % count, "");
    for (int thread = 0; thread < THREADS; thread++) make_place(&places[thread][gpu], 1);
    launch(gpu, &places[0][gpu]);
    for (int i = 0; i < 3; i++) expected[gpu][i] = malloc(BYTES);
    results(&places[0][gpu], expected[gpu]);
    CUDA(cuCtxPopCurrent_v2(&popped));
  }
  for (int i = 0; i < 3 && !is_stand_in(); i++) CHECK(!memcmp(expected[0][i], expected[1][i], BYTES), "the GPUs differ");
  for (int i = 0; i < THREADS; i++) CHECK(!pthread_create(&threads[i], NULL, switch_often, places[i]), "no thread");
  for (int i = 0; i < THREADS; i++) CHECK(!pthread_join(threads[i], NULL), "no thread");
  /* One context goes, and the other one stays. */
  OK(flashtune_context_destroy(contexts[0]));
  launch(1, &places[0][1]);
  CUDA(cuCtxPushCurrent_v2(devices[1]));
  CUDA(cuStreamSynchronize(places[0][1].stream));
  CUDA(cuCtxPopCurrent_v2(&popped));
  OK(flashtune_context_destroy(contexts[1]));
  for (int gpu = 0; gpu < GPUS; gpu++)
    for (int i = 0; i < 3; i++) free(expected[gpu][i]);
  if (least) printf("%d GPUs, %d threads, %d launches each\n", count, THREADS, LAUNCHES);
  return 0;
}
