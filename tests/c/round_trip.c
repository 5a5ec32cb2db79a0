/* Forward and backward on the CPU against naive double arithmetic: masks, head ratios, different
 * head dims, odd lengths, rows without keys, empty problems, other strides, packed gradients. */
#include "attention.h"

static void shapes(flashtune_context *context) {
  static const Shape all[] = {
      /* batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, causal */
      {1, 1, 1, 1, 1, 1, 1, FLASHTUNE_CAUSAL_NONE},
      {2, 4, 4, 65, 65, 64, 64, FLASHTUNE_CAUSAL_NONE},
      {2, 4, 2, 33, 70, 32, 32, FLASHTUNE_CAUSAL_BOTTOM_RIGHT},
      {1, 6, 1, 70, 33, 40, 24, FLASHTUNE_CAUSAL_BOTTOM_RIGHT}, /* the first 37 queries see no key */
      {1, 3, 3, 40, 19, 17, 5, FLASHTUNE_CAUSAL_TOP_LEFT},
      {1, 2, 1, 5, 130, 80, 128, FLASHTUNE_CAUSAL_NONE},
  };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    Attention a = make_attention(all[i], (uint32_t)i + 1);
    run_and_check(context, &a);
    free_attention(&a);
  }
}

/* Empty problems: without inputs or without outputs, where pointers to tensors without elements are
 * NULL. */
static void empty_problems(flashtune_context *context) {
  Shape no_keys = {1, 2, 2, 5, 0, 8, 8, FLASHTUNE_CAUSAL_NONE};
  Attention a = make_attention(no_keys, 1);
  a.forward.k.data = a.forward.v.data = NULL;
  a.backward.k.data = a.backward.v.data = a.backward.dk.data = a.backward.dv.data = NULL;
  run_and_check(context, &a); /* the reference says out = 0, lse = -inf, dq = 0 */
  free_attention(&a);

  Shape no_queries = {1, 2, 2, 0, 5, 8, 8, FLASHTUNE_CAUSAL_NONE};
  a = make_attention(no_queries, 1);
  a.forward.q.data = a.forward.out.data = a.forward.lse = NULL;
  a.backward.q.data = a.backward.out.data = a.backward.dout.data = a.backward.dq.data = NULL;
  a.backward.lse = NULL;
  run_and_check(context, &a); /* dk = dv = 0 */
  free_attention(&a);

  Shape no_batch = {0, 2, 2, 5, 5, 8, 8, FLASHTUNE_CAUSAL_NONE};
  a = make_attention(no_batch, 1);
  run_and_check(context, &a);
  OK(flashtune_forward_prepare(context, &a.forward));
  flashtune_plan_info info;
  info.struct_size = sizeof info;
  FAILS(flashtune_forward_plan_info(context, &a.forward, &info), FLASHTUNE_STATUS_INVALID_ARGUMENT, "batch_size is 0");
  free_attention(&a);
}

/* q, k, v in one (batch, seqlen, 3, heads, dim) buffer and dq, dk, dv in another give the same
 * results as separate buffers. So does (batch, heads, seqlen, dim). */
static void packed_and_transposed(flashtune_context *context) {
  enum { B = 2, S = 37, H = 3, D = 16, N = B * S * H * D };
  Shape shape = {B, H, H, S, S, D, D, FLASHTUNE_CAUSAL_BOTTOM_RIGHT};
  Attention a = make_attention(shape, 7);
  run_and_check(context, &a);

  static float qkv[3 * N], dqkv[3 * N], out[N];
  flashtune_forward_params f = a.forward;
  flashtune_backward_params g = a.backward;
  for (int i = 0; i < B * S; i++)
    for (int t = 0; t < 3; t++)
      memcpy(qkv + (i * 3 + t) * H * D, a.data[Q + t] + i * H * D, H * D * sizeof(float));
  flashtune_const_tensor *inputs[3] = {&f.q, &f.k, &f.v}, *inputs_again[3] = {&g.q, &g.k, &g.v};
  flashtune_tensor *gradients[3] = {&g.dq, &g.dk, &g.dv};
  for (int t = 0; t < 3; t++) {
    flashtune_tensor view = {qkv + t * H * D, S * 3 * H * D, 3 * H * D, D};
    *inputs[t] = *inputs_again[t] = read_of(view);
    view.data = dqkv + t * H * D;
    *gradients[t] = view;
  }
  /* out as (batch, heads, seqlen, dim) */
  flashtune_tensor transposed = {out, H * S * D, D, S * D};
  f.out = transposed, g.out = read_of(transposed);

  uint64_t bytes = 0;
  OK(flashtune_forward(context, &f, NULL, 0, NULL));
  OK(flashtune_backward_workspace_size(context, &g, &bytes));
  void *workspace = make_workspace(bytes);
  OK(flashtune_backward(context, &g, workspace, bytes, NULL));
  free(workspace);
  for (int b = 0; b < B; b++)
    for (int i = 0; i < S; i++)
      for (int h = 0; h < H; h++)
        for (int c = 0; c < D; c++) {
          int at = ((b * S + i) * H + h) * D + c;
          CHECK(out[((b * H + h) * S + i) * D + c] == a.data[OUT][at], "out differs at %d", at);
          for (int t = 0; t < 3; t++)
            CHECK(fabsf(dqkv[(((b * S + i) * 3 + t) * H + h) * D + c] - a.data[DQ + t][at]) <= 1e-5f, "gradient %d differs at %d", t, at);
        }
  free_attention(&a);
}

/* V = 1 gives O = 1 for any scores. Dropout scales the kept weights, so the mean over many rows
 * stays near 1. A seed read through a pointer gives the same mask as the seed by value. */
static void dropout_is_a_function_of_its_seed(flashtune_context *context) {
  Shape shape = {1, 4, 4, 64, 64, 16, 16, FLASHTUNE_CAUSAL_NONE};
  Attention a = make_attention(shape, 3);
  for (int64_t i = 0; i < a.count[V]; i++) a.data[V][i] = 1.0f;
  OK(flashtune_forward(context, &a.forward, NULL, 0, NULL));
  for (int64_t i = 0; i < a.count[OUT]; i++) CHECK(fabsf(a.data[OUT][i] - 1.0f) < 1e-5f, "out is %g", a.data[OUT][i]);

  a.forward.dropout_p = 0.25f;
  a.forward.dropout_seed = 11;
  a.forward.dropout_offset = 5;
  OK(flashtune_forward(context, &a.forward, NULL, 0, NULL));
  double mean = 0;
  float *by_value = malloc((size_t)a.count[OUT] * sizeof(float));
  for (int64_t i = 0; i < a.count[OUT]; i++) mean += a.data[OUT][i] / (double)a.count[OUT];
  memcpy(by_value, a.data[OUT], (size_t)a.count[OUT] * sizeof(float));
  /* 256 rows of 64 weights near 1/64, each kept with 0.75: the mean's deviation is 0.0045. */
  CHECK(fabs(mean - 1.0) < 0.02, "mean is %g", mean);

  static const uint64_t seed = 11, offset = 5, other = 6;
  a.forward.dropout_seed = a.forward.dropout_offset = 99;
  a.forward.dropout_seed_ptr = &seed;
  a.forward.dropout_offset_ptr = &offset;
  OK(flashtune_forward(context, &a.forward, NULL, 0, NULL));
  CHECK(memcmp(by_value, a.data[OUT], (size_t)a.count[OUT] * sizeof(float)) == 0, "the mask is not the seed's");
  a.forward.dropout_offset_ptr = &other;
  OK(flashtune_forward(context, &a.forward, NULL, 0, NULL));
  CHECK(memcmp(by_value, a.data[OUT], (size_t)a.count[OUT] * sizeof(float)) != 0, "the offset changes nothing");
  free(by_value);
  free_attention(&a);
}

/* A deterministic backward pass needs a larger workspace, and its plan says that it is
 * deterministic. */
static void deterministic_backward(flashtune_context *context) {
  Shape shape = {2, 4, 2, 70, 90, 32, 32, FLASHTUNE_CAUSAL_BOTTOM_RIGHT};
  Attention a = make_attention(shape, 9);
  uint64_t plain = 0, with_turns = 0;
  OK(flashtune_backward_workspace_size(context, &a.backward, &plain));
  a.backward.deterministic = 1;
  OK(flashtune_backward_workspace_size(context, &a.backward, &with_turns));
  CHECK(with_turns > plain, "%llu bytes where it was %llu", (unsigned long long)with_turns, (unsigned long long)plain);
  run_and_check(context, &a);
  flashtune_plan_info info;
  info.struct_size = sizeof info;
  OK(flashtune_backward_plan_info(context, &a.backward, &info));
  CHECK(info.source == FLASHTUNE_SOURCE_HEURISTIC && strstr(info.reason, "deterministic") != NULL, "%s", info.reason);
  free_attention(&a);
}

static void forward_and_backward(flashtune_context *context, Attention *a) {
  uint64_t bytes = 0;
  reset_outputs(a);
  OK(flashtune_forward(context, &a->forward, NULL, 0, NULL));
  OK(flashtune_backward_workspace_size(context, &a->backward, &bytes));
  void *workspace = make_workspace(bytes);
  OK(flashtune_backward(context, &a->backward, workspace, bytes, NULL));
  free(workspace);
  check_guards(a);
}

/* The parameters made from those of the forward pass give the same gradients. What a backward pass
 * does not have is refused, and then nothing is written. */
static void backward_params_follow_from_the_forward_ones(flashtune_context *context) {
  Shape shape = {2, 4, 2, 33, 45, 32, 16, FLASHTUNE_CAUSAL_TOP_LEFT};
  Attention a = make_attention(shape, 21);
  a.forward.softcap = a.backward.softcap = 5;
  a.forward.softmax_scale = a.backward.softmax_scale = 0.3f;
  a.forward.window = a.backward.window = FLASHTUNE_WINDOW_TOP_LEFT;
  a.forward.window_left = a.backward.window_left = 20;
  flashtune_backward_params made, by_hand = a.backward;
  memset(&made, 0xff, sizeof made);
  made.struct_size = sizeof made;
  OK(flashtune_backward_params_from_forward(&a.forward, &made));
  CHECK(made.dq.data == NULL && made.dout.data == NULL && made.dlse == NULL && made.deterministic == 0, "not zero");
  made.dout = by_hand.dout, made.dq = by_hand.dq, made.dk = by_hand.dk, made.dv = by_hand.dv;
  CHECK(memcmp(&made, &by_hand, sizeof made) == 0, "made and written params differ");
  a.backward = made;
  forward_and_backward(context, &a);
  CHECK(a.data[DQ][0] != CANARY, "dq is not written");

  flashtune_backward_params before = made;
  flashtune_forward_params p = a.forward;
  const int32_t invalid = FLASHTUNE_STATUS_INVALID_ARGUMENT, unsupported = FLASHTUNE_STATUS_UNSUPPORTED;
  FAILS(flashtune_backward_params_from_forward(NULL, &made), invalid, "forward is NULL");
  FAILS(flashtune_backward_params_from_forward(&p, NULL), invalid, "backward is NULL");
  p.struct_size = 3;
  FAILS(flashtune_backward_params_from_forward(&p, &made), invalid, "forward.struct_size is 3");
  p = a.forward;
  p.features |= FLASHTUNE_FEATURE_PAGED;
  FAILS(flashtune_backward_params_from_forward(&p, &made), unsupported, "PAGED");
  p = a.forward;
  p.batch_invariant = 1;
  FAILS(flashtune_backward_params_from_forward(&p, &made), unsupported, "batch_invariant");
  CHECK(memcmp(&made, &before, sizeof made) == 0, "a failed call wrote");
  made.struct_size = 8;
  FAILS(flashtune_backward_params_from_forward(&a.forward, &made), invalid, "backward.struct_size is 8");
  free_attention(&a);
}

/* A packed batch holds its sequences end to end; only lse is ordered by heads. Rows that no
 * sequence uses are unchanged. */
static void sequences_end_to_end(flashtune_context *context) {
  enum { B = 2, H = 4, SQ = 33, SK = 40 };
  static const int32_t begins_q[B + 1] = {0, SQ, B * SQ}, begins_k[B + 1] = {0, SK, B * SK}, used_k[B] = {SK, 0};
  Shape shape = {B, H, 2, SQ, SK, 16, 24, FLASHTUNE_CAUSAL_BOTTOM_RIGHT};
  Attention a = make_attention(shape, 17);
  double *results[BUFFERS];
  reference(&a, results);
#define SET(field, value) a.forward.field = a.backward.field = (value)
  SET(features, FLASHTUNE_FEATURE_CU_SEQLENS_Q | FLASHTUNE_FEATURE_CU_SEQLENS_K);
  SET(cu_seqlens_q, begins_q);
  SET(cu_seqlens_k, begins_k);
  SET(total_q, B * SQ);
  SET(total_k, B * SK);
  SET(q.stride_batch, 1);
  forward_and_backward(context, &a);
  check_close(&a, results, OUT, OUT);
  check_close(&a, results, DQ, DV);
  for (int b = 0; b < B; b++)
    for (int h = 0; h < H; h++)
      for (int i = 0; i < SQ; i++) {
        double got = a.data[LSE][(h * B + b) * SQ + i], want = results[LSE][(b * H + h) * SQ + i];
        CHECK(fabs(got - want) <= 1e-5, "lse of %d, %d, %d is %g instead of %g", b, h, i, got, want);
      }

  SET(features, a.forward.features | FLASHTUNE_FEATURE_SEQUSED_K);
  SET(seqused_k, used_k);
  forward_and_backward(context, &a);
  for (int64_t i = 0; i < a.count[DK]; i++)
    CHECK((a.data[DK][i] == CANARY) == (i >= a.count[DK] / B), "dk at %ld is %g", (long)i, a.data[DK][i]);
  for (int64_t i = a.count[OUT] / B; i < a.count[OUT]; i++) CHECK(a.data[OUT][i] == 0, "out is %g", a.data[OUT][i]);
  free_reference(results);
  free_attention(&a);
}

/* On a GPU one query over many keys is split, and its partial results need a workspace. The CPU
 * never splits. */
static void one_query_needs_no_workspace(flashtune_context *context) {
  Shape shape = {1, 2, 2, 1, 256, 64, 64, FLASHTUNE_CAUSAL_NONE};
  Attention a = make_attention(shape, 5);
  const uint16_t one = 0x3f80; /* in bf16 */
  for (int64_t i = 0; i < a.count[V]; i++) memcpy((char *)a.data[V] + 2 * i, &one, 2);
  memset(a.data[Q], 0, (size_t)a.count[Q] * 2);
  memset(a.data[K], 0, (size_t)a.count[K] * 2);
  a.forward.dtype = FLASHTUNE_DTYPE_BF16;
  uint64_t bytes = 77;
  OK(flashtune_forward_workspace_size(context, &a.forward, &bytes));
  CHECK(bytes == 0, "%llu bytes", (unsigned long long)bytes);
  OK(flashtune_forward(context, &a.forward, NULL, 0, NULL));
  for (int64_t i = 0; i < a.count[OUT]; i++)
    CHECK(memcmp((char *)a.data[OUT] + 2 * i, &one, 2) == 0, "out of V = 1 is not 1 at %ld", (long)i);
  free_attention(&a);
}

int main(void) {
  flashtune_context *context = cpu_context("");
  shapes(context);
  empty_problems(context);
  packed_and_transposed(context);
  dropout_is_a_function_of_its_seed(context);
  deterministic_backward(context);
  backward_params_follow_from_the_forward_ones(context);
  sequences_end_to_end(context);
  one_query_needs_no_workspace(context);
  OK(flashtune_context_destroy(context));
  return 0;
}
