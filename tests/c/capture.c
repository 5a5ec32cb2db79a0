/* Graph capture behind driver_shim.c, which fails on each call that is illegal while a stream
 * captures. Every function that may be called then is called: launches with a plan, with another
 * shape's plan and without one, from this thread and from others.
 *
 * On a real GPU the graph's results must be those of plain launches. */
#include "check.h"
#include "device.h"

#include <pthread.h>
#include <stddef.h>

enum { HEADS = 4, DIM = 64, SEQLEN = 300, OTHER = 200, ELEMENTS = SEQLEN * HEADS * DIM, BYTES = 2 * ELEMENTS };
enum { Q, K, V, OUT, DOUT, DQ, DK, DV, LSE, OTHER_OUT, OTHER_LSE, BUFFERS };

static char *buffers[BUFFERS], *workspace;
static int32_t *lengths;
static uint64_t workspace_bytes;
static void *stream;
static int (*shim_refused)(const char **);
static void *(*shim_real)(const char *);

static flashtune_tensor packed(int buffer) {
  const flashtune_tensor tensor = {buffers[buffer], ELEMENTS, HEADS * DIM, DIM};
  return tensor;
}

static flashtune_forward_params forward(int64_t seqlen, int32_t dtype) {
  flashtune_forward_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.dtype = dtype, p.causal = FLASHTUNE_CAUSAL_BOTTOM_RIGHT;
  p.batch_size = 1, p.num_heads_q = p.num_heads_kv = HEADS;
  p.seqlen_q = p.seqlen_k = seqlen, p.head_dim = p.head_dim_v = DIM;
  p.q = read_of(packed(Q)), p.k = read_of(packed(K)), p.v = read_of(packed(V));
  p.out = packed(seqlen == OTHER ? OTHER_OUT : OUT);
  p.lse = (float *)(void *)buffers[seqlen == OTHER ? OTHER_LSE : LSE];
  return p;
}

static flashtune_backward_params backward(void) {
  const flashtune_forward_params of = forward(SEQLEN, FLASHTUNE_DTYPE_BF16);
  flashtune_backward_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  OK(flashtune_backward_params_from_forward(&of, &p));
  p.dout = read_of(packed(DOUT)), p.dq = packed(DQ), p.dk = packed(DK), p.dv = packed(DV);
  p.deterministic = 1; /* the same bits at every run */
  return p;
}

/* One new key and value of each head. */
static flashtune_kv_append_params append(void) {
  flashtune_kv_append_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.dtype = FLASHTUNE_DTYPE_BF16, p.batch_size = 1, p.num_heads_kv = HEADS;
  p.seqlen_new = 1, p.seqlen_cache = SEQLEN, p.head_dim = p.head_dim_v = DIM;
  p.k_new = read_of(packed(Q)), p.v_new = read_of(packed(DOUT)), p.k_cache = packed(K), p.v_cache = packed(V);
  p.seqlens = lengths;
  return p;
}

/* What a server captures: the cache grows, then both passes. */
static void launch(flashtune_context *context) {
  const flashtune_forward_params f = forward(SEQLEN, FLASHTUNE_DTYPE_BF16);
  const flashtune_backward_params b = backward();
  const flashtune_kv_append_params a = append();
  OK(flashtune_kv_append(context, &a, stream));
  OK(flashtune_forward(context, &f, workspace, workspace_bytes, stream));
  OK(flashtune_backward(context, &b, workspace, workspace_bytes, stream));
}

/* All else that the header allows during capture, from a thread of its own. */
static void *ask(void *of) {
  flashtune_context *context = of;
  const flashtune_forward_params f = forward(SEQLEN, FLASHTUNE_DTYPE_BF16);
  flashtune_device_info device;
  flashtune_pack_info pack;
  uint64_t bytes = 0;
  memset(&device, 0, sizeof device), memset(&pack, 0, sizeof pack);
  device.struct_size = sizeof device, pack.struct_size = sizeof pack;
  OK(flashtune_forward_supported(context, &f));
  OK(flashtune_forward_workspace_size(context, &f, &bytes));
  OK(flashtune_context_device(context, &device));
  OK(flashtune_context_pack(context, &pack));
  CHECK(flashtune_status_string(0)[0] && flashtune_version() > 0, "no text");
  return NULL;
}

static void capture(flashtune_context *context, void **graph, int mode) {
  const char *name = "none";
  const flashtune_forward_params other = forward(OTHER, FLASHTUNE_DTYPE_BF16);
  const flashtune_forward_params unprepared = forward(SEQLEN, FLASHTUNE_DTYPE_FP16);
  pthread_t thread;
  const int before = shim_refused(&name);
  CUDA(cuStreamBeginCapture_v2(stream, mode));
  launch(context);
  OK(flashtune_forward(context, &other, workspace, workspace_bytes, stream));
  FAILS(flashtune_forward(context, &unprepared, workspace, workspace_bytes, stream), FLASHTUNE_STATUS_NOT_PREPARED,
        "no plan yet");
  CHECK(!pthread_create(&thread, NULL, ask, context) && !pthread_join(thread, NULL), "no thread");
  const int refused = shim_refused(&name) - before;
  CHECK(refused == 0, "%d calls that are illegal in a capture, the last one %s", refused, name);
  CUDA(cuStreamEndCapture(stream, graph));
}

/* The shim is in the way: it refuses what this does. */
static void check_shim(void) {
  const char *name = "none";
  uint64_t address = 0;
  void *graph = NULL;
  const int before = shim_refused(&name);
  CUDA(cuStreamBeginCapture_v2(stream, 2));
  CHECK(cuMemAlloc_v2(&address, 16) == 900 && shim_refused(&name) == before + 1 && !strcmp(name, "cuMemAlloc_v2"), "%s", name);
  CUDA(cuStreamEndCapture(stream, &graph));
  CUDA(cuGraphDestroy(graph));
}

enum { RESULTS = 4 };
static const int outputs[RESULTS] = {OUT, DQ, DK, DV};

static void results(uint16_t *to[RESULTS]) {
  CUDA(cuStreamSynchronize(stream));
  for (int i = 0; i < RESULTS; i++) from_device(to[i], buffers[outputs[i]], BYTES);
}

int main(void) {
  uint16_t *host = malloc(BYTES), *plain[RESULTS], *replayed[RESULTS];
  uint32_t state = 1;
  CHECK(host && open_driver() > 0, "no GPU");
  *(void **)(&shim_refused) = driver_symbol("shim_refused");
  *(void **)(&shim_real) = driver_symbol("shim_real");
  CHECK(shim_refused && shim_real, "this needs driver_shim.c as libcuda.so.1");
  const int computes = !shim_real("fake_launches"); /* the stand-in does not */
  enter_device(0);
  CUDA(cuStreamCreate(&stream, 1));
  for (int i = 0; i < BUFFERS; i++) {
    buffers[i] = device_memory(BYTES);
    /* bf16 from 0.5 to 2, of both signs */
    for (int j = 0; j < ELEMENTS; j++) state = state * 1664525u + 1013904223u, host[j] = (uint16_t)((state >> 16 & 0x80ff) | 0x3f00);
    to_device(buffers[i], host, BYTES);
  }
  for (int i = 0; i < RESULTS; i++) plain[i] = malloc(BYTES), replayed[i] = malloc(BYTES);
  const int32_t length = SEQLEN - 1;
  lengths = device_memory(sizeof length);
  to_device(lengths, &length, sizeof length);
  check_shim();

  for (int is_sealed = 0; is_sealed < 2; is_sealed++) {
    flashtune_context *context = cuda_context(0, "");
    const flashtune_forward_params f = forward(SEQLEN, FLASHTUNE_DTYPE_BF16);
    const flashtune_backward_params b = backward();
    uint64_t bytes[2] = {0, 0};
    OK(flashtune_forward_workspace_size(context, &f, &bytes[0]));
    OK(flashtune_backward_workspace_size(context, &b, &bytes[1]));
    workspace_bytes = bytes[0] > bytes[1] ? bytes[0] : bytes[1];
    workspace = device_memory(workspace_bytes);
    launch(context);
    results(plain);
    if (is_sealed) OK(flashtune_context_seal(context));
    for (int mode = 0; mode < 3; mode++) { /* global, thread local, relaxed */
      void *graph = NULL, *executable = NULL;
      capture(context, &graph, mode);
      CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
      for (int i = 0; i < RESULTS; i++) fill_device(buffers[outputs[i]], 0, BYTES);
      CUDA(cuStreamSynchronize(NULL));
      for (int time = 0; time < 3; time++) CUDA(cuGraphLaunch(executable, stream));
      results(replayed);
      for (int i = 0; i < RESULTS && computes; i++) CHECK(!memcmp(plain[i], replayed[i], BYTES), "result %d differs", i);
      CUDA(cuGraphExecDestroy(executable));
      CUDA(cuGraphDestroy(graph));
    }
    free_device(workspace);
    OK(flashtune_context_destroy(context));
  }
  for (int i = 0; i < RESULTS; i++) free(plain[i]), free(replayed[i]);
  free(host);
  return 0;
}
