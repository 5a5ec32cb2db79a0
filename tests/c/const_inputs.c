/* Inputs that are const, in C99 and through flashtune.hpp in C++17. The test compiles this file
 * with -Wcast-qual, so no input needs a cast. Attention over values of 1 gives 1, and dv sums to
 * the number of queries. */
#ifdef __cplusplus
#include <flashtune.hpp>
#else
#include <flashtune.h>
#endif
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { SEQLEN = 6, DIM = 4, COUNT = SEQLEN * DIM };

/* In read-only memory, so a write would end the program. */
static const float q[COUNT] = {0.5f, -1, 2}, k[COUNT] = {1, 1, 3};
static const float ones[COUNT] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
static const float scores[SEQLEN * SEQLEN] = {0.25f, 0.5f};
static const int32_t offsets[] = {0, SEQLEN};
static float out[COUNT], lse[SEQLEN], dq[COUNT], dk[COUNT], dv[COUNT];

static int failed(const char *call, int32_t status) {
  if (status) fprintf(stderr, "%s: %s\n", call, flashtune_last_error());
  return status != FLASHTUNE_STATUS_OK;
}

static flashtune_forward_params forward_params(void) {
  const flashtune_const_scores_tensor bias = {scores, SEQLEN * SEQLEN, SEQLEN * SEQLEN, SEQLEN, 1};
#ifdef __cplusplus
  flashtune::forward_params p;
  p.with_dtype(flashtune::dtype::fp32).with_batch_size(1).with_seqlens(SEQLEN, SEQLEN).with_heads(1, 1).with_head_dim(DIM);
  p.with_tensors(flashtune::dense(q, SEQLEN, 1, DIM), flashtune::dense(k, SEQLEN, 1, DIM),
                 flashtune::dense(ones, SEQLEN, 1, DIM), flashtune::dense(out, SEQLEN, 1, DIM), lse);
  p.with_bias(bias).with_cu_seqlens(offsets, SEQLEN, offsets, SEQLEN);
#else
  const flashtune_const_tensor of_q = {q, COUNT, DIM, DIM};
  const flashtune_tensor of_out = {out, COUNT, DIM, DIM};
  flashtune_forward_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.dtype = FLASHTUNE_DTYPE_FP32;
  p.batch_size = p.num_heads_q = p.num_heads_kv = 1;
  p.seqlen_q = p.seqlen_k = SEQLEN;
  p.head_dim = p.head_dim_v = DIM;
  p.q = p.k = p.v = of_q;
  p.k.data = k;
  p.v.data = ones;
  p.out = of_out;
  p.lse = lse;
  p.bias = bias;
  p.cu_seqlens_q = p.cu_seqlens_k = offsets;
  p.total_q = p.total_k = SEQLEN;
  p.features = FLASHTUNE_FEATURE_BIAS | FLASHTUNE_FEATURE_CU_SEQLENS_Q | FLASHTUNE_FEATURE_CU_SEQLENS_K;
#endif
  return p;
}

static int both_passes(flashtune_context *context) {
  static double room[8192];
  char *const workspace = (char *)room + (256 - (size_t)((uintptr_t)room % 256));
  const flashtune_forward_params p = forward_params();
  const flashtune_const_tensor dout = {ones, COUNT, DIM, DIM};
  flashtune_backward_params g;
  flashtune_merge_params m;
  uint64_t bytes = 0;
  memset(&g, 0, sizeof g);
  g.struct_size = sizeof g;
  if (failed("forward", flashtune_forward(context, &p, NULL, 0, NULL))) return 1;
  if (failed("params_from_forward", flashtune_backward_params_from_forward(&p, &g))) return 1;
  g.dout = dout;
  g.dq = g.dk = g.dv = p.out;
  g.dq.data = dq, g.dk.data = dk, g.dv.data = dv;
  if (failed("workspace_size", flashtune_backward_workspace_size(context, &g, &bytes))) return 1;
  if (bytes > sizeof room - 256) return fprintf(stderr, "%lu bytes\n", (unsigned long)bytes), 1;
  if (failed("backward", flashtune_backward(context, &g, workspace, sizeof room - 256, NULL))) return 1;
  float sum = 0, worst = 0;
  for (int i = 0; i < COUNT; i++) sum += dv[i], worst = fmaxf(worst, fabsf(out[i] - 1));

  /* A merge reads const partials too: one partial is the result itself. */
  memset(&m, 0, sizeof m);
  m.struct_size = sizeof m;
  m.dtype = m.partial_dtype = FLASHTUNE_DTYPE_FP32;
  m.num_partials = m.batch_size = m.num_heads = 1;
  m.seqlen = SEQLEN, m.head_dim_v = DIM;
  m.partial_out = dout, m.partial_lse = scores;
  m.out = g.dq;
  if (failed("merge", flashtune_merge(context, &m, NULL))) return 1;
  for (int i = 0; i < COUNT; i++) worst = fmaxf(worst, fabsf(dq[i] - 1));
  if (!(worst < 1e-5f) || !(fabsf(sum - COUNT) < 1e-4f)) return fprintf(stderr, "error %g, sum %g\n", (double)worst, (double)sum), 1;
  return 0;
}

int main(void) {
  flashtune_context_options options;
  flashtune_context *context = NULL;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.backend = FLASHTUNE_BACKEND_CPU;
  options.cache_dir = "";
  options.num_threads = 1;
  if (failed("context_create", flashtune_context_create(&options, &context))) return 1;
  const int status = both_passes(context);
  return failed("context_destroy", flashtune_context_destroy(context)) || status;
}
