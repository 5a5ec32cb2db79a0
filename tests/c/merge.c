/* Merging: attention over both halves of the keys merges into attention over all of them. Every
 * wrong argument gets a message that names it, and no output is written. */
#define OPERATION flashtune_merge
#include "attention.h"
#include "refused.h"

#include <limits.h>

static flashtune_context *context;
static flashtune_merge_params good;

static void bad_arguments(void) {
  FAILS(flashtune_merge(context, NULL, NULL), invalid, "params is NULL");
  FAILS(flashtune_merge(NULL, &good, NULL), invalid, "context is NULL");
  FAILS(flashtune_merge_prepare(NULL, &good), invalid, "context is NULL");
  REFUSED("struct_size is 8", p.struct_size = 8);
  REFUSED("dtype is 0", p.dtype = 0);
  REFUSED("partial_dtype is 4", p.partial_dtype = 4);
  REFUSED("partial_dtype is 1 and dtype 3", p.partial_dtype = FLASHTUNE_DTYPE_FP16);
  REFUSED("num_partials is 0", p.num_partials = 0);
  REFUSED("batch_size is -1", p.batch_size = -1);
  REFUSED("seqlen is -2", p.seqlen = -2);
  REFUSED("num_heads is 0", p.num_heads = 0);
  REFUSED("head_dim_v is 513", p.head_dim_v = 513);
  REFUSED("it must be at most 2147483647", p.batch_size = p.seqlen = 1 << 20);
  REFUSED("partial_out_stride is -1", p.partial_out_stride = -1);
  REFUSED("partial_lse_stride is -1", p.partial_lse_stride = -1);
  REFUSED("partial_out at", p.partial_out_stride = INT64_MAX);
  REFUSED("partial_out.stride_head is -4", p.partial_out.stride_head = -4);
  REFUSED("partial_lse is", p.partial_lse = (const float *)((const char *)p.partial_lse + 1));
  REFUSED("out is written", p.out.stride_head = 0);
  REFUSED("out overlaps partial_out", p.out.data = WRITABLE(p.partial_out.data));
  REFUSED("out overlaps partial_out", p.out.data = (float *)WRITABLE(p.partial_out.data) + p.partial_out_stride);
  REFUSED("lse overlaps partial_lse", p.lse = (float *)(uintptr_t)p.partial_lse + p.partial_lse_stride);
  REFUSED("out overlaps lse", p.lse = p.out.data);
  NEEDS("partial_out.data is NULL", p.partial_out.data = NULL);
  NEEDS("partial_lse is NULL; it must point to the 40 fp32 values of each of 2 partials", p.partial_lse = NULL);
  NEEDS("out.data is NULL", p.out.data = NULL);
}

int main(void) {
  const Shape shape = {2, 4, 2, 5, 14, 8, 4, FLASHTUNE_CAUSAL_NONE};
  Attention a = make_attention(shape, 3);
  context = cpu_context("");
  /* The out and lse of both halves, one behind the other. */
  float *outs = malloc(2 * sizeof(float) * (size_t)a.count[OUT]), *lses = malloc(2 * sizeof(float) * (size_t)a.count[LSE]);
  CHECK(outs != NULL && lses != NULL, "no memory");
  for (int half = 0; half < 2; half++) {
    flashtune_forward_params p = a.forward;
    p.seqlen_k = 7;
    p.k.data = a.data[K] + half * 7 * p.k.stride_seqlen;
    p.v.data = a.data[V] + half * 7 * p.v.stride_seqlen;
    p.out.data = outs + half * a.count[OUT];
    p.lse = lses + half * a.count[LSE];
    OK(flashtune_forward(context, &p, NULL, 0, NULL));
  }
  good.struct_size = sizeof good;
  good.dtype = good.partial_dtype = FLASHTUNE_DTYPE_FP32;
  good.num_partials = 2;
  good.batch_size = shape.batch_size, good.seqlen = shape.seqlen_q;
  good.num_heads = shape.num_heads_q, good.head_dim_v = shape.head_dim_v;
  good.partial_out = packed_input(outs, shape.seqlen_q, shape.num_heads_q, shape.head_dim_v);
  good.partial_out_stride = a.count[OUT];
  good.partial_lse = lses;
  good.partial_lse_stride = a.count[LSE];
  good.out = a.forward.out;
  good.lse = a.data[LSE];

  reset_outputs(&a);
  bad_arguments();
  for (int64_t i = 0; i < a.count[OUT]; i++) CHECK(a.data[OUT][i] == CANARY, "a failed call wrote out");
  for (int64_t i = 0; i < a.count[LSE]; i++) CHECK(a.data[LSE][i] == CANARY, "a failed call wrote lse");

  double *results[BUFFERS];
  OK(flashtune_merge(context, &good, NULL));
  reference(&a, results);
  check_close(&a, results, OUT, LSE);
  free_reference(results);
  check_guards(&a);

  /* Without an lse, and without any work. */
  flashtune_merge_params p = good;
  p.lse = NULL;
  OK(flashtune_merge(context, &p, NULL));
  p.seqlen = 0, p.out.data = NULL, p.partial_out.data = NULL, p.partial_lse = NULL;
  OK(flashtune_merge(context, &p, NULL));

  /* A sealed context still serves prepared problems and refuses others. */
  OK(flashtune_context_seal(context));
  OK(flashtune_merge(context, &good, NULL));
  p = good;
  p.dtype = p.partial_dtype = FLASHTUNE_DTYPE_BF16;
  FAILS(flashtune_merge(context, &p, NULL), FLASHTUNE_STATUS_NOT_PREPARED, "flashtune_merge_prepare");
  free(outs);
  free(lses);
  free_attention(&a);
  OK(flashtune_context_destroy(context));
  return 0;
}
