/* A user's program, in C99 and C++17: attention over values of 1 gives 1. It includes nothing from
 * the source tree. */
#include <flashtune.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { SEQLEN = 64, HEADS = 2, DIM = 32, COUNT = SEQLEN * HEADS * DIM };

static float q[COUNT], k[COUNT], v[COUNT], out[COUNT];

static flashtune_const_tensor input(const float *data) {
  flashtune_const_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.stride_batch = COUNT;
  t.stride_seqlen = HEADS * DIM;
  t.stride_head = DIM;
  return t;
}

static int failed(const char *call, int32_t status) {
  if (status) fprintf(stderr, "%s: %s\n", call, flashtune_last_error());
  return status != FLASHTUNE_STATUS_OK;
}

int main(void) {
  if (flashtune_version() != FLASHTUNE_VERSION) return fprintf(stderr, "header and library differ\n"), 1;
  for (int i = 0; i < COUNT; i++) q[i] = k[i] = (float)(i % 7), v[i] = 1;

  flashtune_context_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.backend = FLASHTUNE_BACKEND_CPU;
  flashtune_context *context;
  if (failed("context_create", flashtune_context_create(&options, &context))) return 1;

  flashtune_forward_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.dtype = FLASHTUNE_DTYPE_FP32;
  p.batch_size = 1;
  p.seqlen_q = p.seqlen_k = SEQLEN;
  p.num_heads_q = p.num_heads_kv = HEADS;
  p.head_dim = p.head_dim_v = DIM;
  p.q = input(q), p.k = input(k), p.v = input(v);
  p.out.data = out, p.out.stride_batch = COUNT, p.out.stride_seqlen = HEADS * DIM, p.out.stride_head = DIM;
  if (failed("forward", flashtune_forward(context, &p, NULL, 0, NULL))) return 1;

  float worst = 0;
  for (int i = 0; i < COUNT; i++) worst = fmaxf(worst, fabsf(out[i] - 1));
  printf("largest error %.1e\n", (double)worst);
  return failed("context_destroy", flashtune_context_destroy(context)) || !(worst < 1e-5f);
}
