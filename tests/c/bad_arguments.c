/* Every wrong argument gets its status and a message that names it, and no output is written. */
#include "attention.h"

#include <limits.h>
#include <stddef.h>

static flashtune_context *context;
static Attention a;
static void *workspace;
static uint64_t workspace_bytes;

static const Shape shape = {2, 4, 2, 5, 7, 8, 4, FLASHTUNE_CAUSAL_BOTTOM_RIGHT};
static const int32_t invalid = FLASHTUNE_STATUS_INVALID_ARGUMENT;

/* Data of the features for 2 batch entries, 4 heads, 5 queries, 7 keys. */
static float slopes[8], scores[2 * 4 * 5 * 7], score_gradients[2 * 4 * 5 * 7], sinks[4], sink_gradients[4];
static const uint8_t shown[7];
static const int32_t begins[3] = {0, 3, 8}, used[2] = {5, 0};

static void nothing_written(const flashtune_plan_info *info, uint64_t bytes) {
  static const int outputs[] = {OUT, LSE, DQ, DK, DV};
  for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++)
    for (int64_t j = 0; j < a.count[outputs[i]]; j++)
      CHECK(a.data[outputs[i]][j] == CANARY, "a failed call wrote buffer %d", outputs[i]);
  for (size_t i = 0; i < sizeof score_gradients / sizeof *score_gradients; i++)
    CHECK(score_gradients[i] == CANARY, "a failed call wrote dbias");
  for (size_t i = 0; i < sizeof sink_gradients / sizeof *sink_gradients; i++)
    CHECK(sink_gradients[i] == CANARY, "a failed call wrote dsinks");
  check_guards(&a);
  CHECK(bytes == 77, "a failed call wrote bytes");
  CHECK(info->source == -5 && info->kernel[0] == 'x' && info->measured_us == 3.0, "a failed call wrote info");
}

static flashtune_plan_info canary_info(void) {
  flashtune_plan_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  info.source = -5;
  info.kernel[0] = 'x';
  info.measured_us = 3.0;
  return info;
}

/* Arguments that every function refuses: all five functions and autotune. */
static void forward_refused(const flashtune_forward_params *p, int32_t status, const char *word) {
  flashtune_plan_info info = canary_info();
  flashtune_autotune_params tune;
  uint64_t bytes = 77;
  memset(&tune, 0, sizeof tune);
  tune.struct_size = sizeof tune;
  tune.forward = p;
  FAILS(flashtune_forward_supported(context, p), status, word);
  FAILS(flashtune_forward_workspace_size(context, p, &bytes), status, word);
  FAILS(flashtune_forward_prepare(context, p), status, word);
  FAILS(flashtune_forward_plan_info(context, p, &info), status, word);
  FAILS(flashtune_forward(context, p, workspace, workspace_bytes, NULL), status, word);
  if (p != NULL) FAILS(flashtune_autotune(context, &tune), status, word);
  nothing_written(&info, bytes);
}

static void backward_refused(const flashtune_backward_params *p, int32_t status, const char *word) {
  flashtune_plan_info info = canary_info();
  flashtune_autotune_params tune;
  uint64_t bytes = 77;
  memset(&tune, 0, sizeof tune);
  tune.struct_size = sizeof tune;
  tune.backward = p;
  FAILS(flashtune_backward_supported(context, p), status, word);
  FAILS(flashtune_backward_workspace_size(context, p, &bytes), status, word);
  FAILS(flashtune_backward_prepare(context, p), status, word);
  FAILS(flashtune_backward_plan_info(context, p, &info), status, word);
  FAILS(flashtune_backward(context, p, workspace, workspace_bytes, NULL), status, word);
  if (p != NULL) FAILS(flashtune_autotune(context, &tune), status, word);
  nothing_written(&info, bytes);
}

#define FORWARD_REFUSED(word, mutation)      \
  do {                                       \
    flashtune_forward_params p = a.forward;  \
    mutation;                                \
    forward_refused(&p, invalid, word);      \
  } while (0)

#define BACKWARD_REFUSED(word, mutation)      \
  do {                                        \
    flashtune_backward_params p = a.backward; \
    mutation;                                 \
    backward_refused(&p, invalid, word);      \
  } while (0)

#define BOTH_REFUSED(word, mutation) \
  FORWARD_REFUSED(word, mutation);   \
  BACKWARD_REFUSED(word, mutation)

/* Arguments that only a launch needs; the other functions accept the same struct. */
#define FORWARD_NEEDS(word, mutation)                                           \
  do {                                                                          \
    flashtune_forward_params p = a.forward;                                     \
    flashtune_plan_info info = canary_info();                                   \
    mutation;                                                                   \
    OK(flashtune_forward_supported(context, &p));                               \
    FAILS(flashtune_forward(context, &p, NULL, 0, NULL), invalid, word);        \
    nothing_written(&info, 77);                                                 \
  } while (0)

#define BACKWARD_NEEDS(word, mutation)                                                         \
  do {                                                                                         \
    flashtune_backward_params p = a.backward;                                                  \
    flashtune_plan_info info = canary_info();                                                  \
    mutation;                                                                                  \
    OK(flashtune_backward_supported(context, &p));                                             \
    FAILS(flashtune_backward(context, &p, workspace, workspace_bytes, NULL), invalid, word);   \
    nothing_written(&info, 77);                                                                \
  } while (0)

static void nulls(void) {
  uint64_t bytes = 77;
  flashtune_plan_info info = canary_info();
  forward_refused(NULL, invalid, "params is NULL");
  backward_refused(NULL, invalid, "params is NULL");
  FAILS(flashtune_forward_supported(NULL, &a.forward), invalid, "context is NULL");
  FAILS(flashtune_forward_workspace_size(NULL, &a.forward, &bytes), invalid, "context is NULL");
  FAILS(flashtune_forward_prepare(NULL, &a.forward), invalid, "context is NULL");
  FAILS(flashtune_forward_plan_info(NULL, &a.forward, &info), invalid, "context is NULL");
  FAILS(flashtune_forward(NULL, &a.forward, NULL, 0, NULL), invalid, "context is NULL");
  FAILS(flashtune_backward_supported(NULL, &a.backward), invalid, "context is NULL");
  FAILS(flashtune_backward_workspace_size(NULL, &a.backward, &bytes), invalid, "context is NULL");
  FAILS(flashtune_backward_prepare(NULL, &a.backward), invalid, "context is NULL");
  FAILS(flashtune_backward_plan_info(NULL, &a.backward, &info), invalid, "context is NULL");
  FAILS(flashtune_backward(NULL, &a.backward, workspace, workspace_bytes, NULL), invalid, "context is NULL");
  FAILS(flashtune_forward_workspace_size(context, &a.forward, NULL), invalid, "bytes is NULL");
  FAILS(flashtune_backward_workspace_size(context, &a.backward, NULL), invalid, "bytes is NULL");
  FAILS(flashtune_forward_plan_info(context, &a.forward, NULL), invalid, "info is NULL");
  FAILS(flashtune_backward_plan_info(context, &a.backward, NULL), invalid, "info is NULL");
  nothing_written(&info, bytes);

  FORWARD_NEEDS("q.data is NULL", p.q.data = NULL);
  FORWARD_NEEDS("k.data is NULL", p.k.data = NULL);
  FORWARD_NEEDS("v.data is NULL", p.v.data = NULL);
  FORWARD_NEEDS("out.data is NULL", p.out.data = NULL);
  BACKWARD_NEEDS("q.data is NULL", p.q.data = NULL);
  BACKWARD_NEEDS("k.data is NULL", p.k.data = NULL);
  BACKWARD_NEEDS("v.data is NULL", p.v.data = NULL);
  BACKWARD_NEEDS("out.data is NULL", p.out.data = NULL);
  BACKWARD_NEEDS("dout.data is NULL", p.dout.data = NULL);
  BACKWARD_NEEDS("dq.data is NULL", p.dq.data = NULL);
  BACKWARD_NEEDS("dk.data is NULL", p.dk.data = NULL);
  BACKWARD_NEEDS("dv.data is NULL", p.dv.data = NULL);
  BACKWARD_NEEDS("lse is NULL", p.lse = NULL);
}

static void struct_sizes(void) {
  struct {
    flashtune_forward_params known;
    uint64_t later[2];
  } newer;
  FORWARD_REFUSED("struct_size is 0", p.struct_size = 0);
  FORWARD_REFUSED("struct_size is 8", p.struct_size = 8);
  /* The params of the first release end before `features`. */
  FORWARD_REFUSED("struct_size", p.struct_size = offsetof(flashtune_forward_params, features) - 1);
  FORWARD_REFUSED("struct_size is 16385", p.struct_size = 16385);
  FORWARD_REFUSED("struct_size is 18446744073709551615", p.struct_size = UINT64_MAX);
  BACKWARD_REFUSED("struct_size is 0", p.struct_size = 0);
  BACKWARD_REFUSED("struct_size", p.struct_size = offsetof(flashtune_backward_params, deterministic) - 1);
  BACKWARD_REFUSED("struct_size is 18446744073709551615", p.struct_size = UINT64_MAX);

  memset(&newer, 0, sizeof newer);
  newer.known = a.forward;
  newer.known.struct_size = sizeof newer;
  OK(flashtune_forward_supported(context, &newer.known));
  newer.later[1] = 1;
  forward_refused(&newer.known, invalid, "must be zero");

  /* A caller of the first release, whose params end before `deterministic`. */
  flashtune_backward_params older = a.backward;
  older.struct_size = offsetof(flashtune_backward_params, deterministic);
  older.deterministic = 2;
  OK(flashtune_backward_supported(context, &older));
  flashtune_forward_params before_features = a.forward;
  before_features.struct_size = offsetof(flashtune_forward_params, features);
  before_features.features = ~(uint64_t)0;
  OK(flashtune_forward_supported(context, &before_features));

  flashtune_plan_info info = canary_info();
  info.struct_size = 16;
  FAILS(flashtune_forward_plan_info(context, &a.forward, &info), invalid, "info.struct_size is 16");
  nothing_written(&info, 77);
  char odd[sizeof(flashtune_forward_params) + 8];
  const void *misaligned = odd + ((uintptr_t)odd % 8 == 1 ? 2 : 1 + (8 - (uintptr_t)odd % 8) % 8);
  forward_refused((const flashtune_forward_params *)misaligned, invalid, "aligned");
}

static void enums_and_scalars(void) {
  BOTH_REFUSED("dtype is 0", p.dtype = 0);
  BOTH_REFUSED("dtype is 7", p.dtype = 7);
  BOTH_REFUSED("dtype is -2147483648", p.dtype = INT32_MIN);
  BOTH_REFUSED("causal is 3", p.causal = 3);
  BOTH_REFUSED("causal is -1", p.causal = -1);
  BOTH_REFUSED("softmax_scale is NaN", p.softmax_scale = NAN);
  BOTH_REFUSED("softmax_scale is inf", p.softmax_scale = INFINITY);
  /* These values are finite, but the constants made from them are infinite or 0: softmax_scale *
   * log2(e), 1 / softcap, softmax_scale / softcap. */
  BOTH_REFUSED("softmax_scale is -2.4e38; its magnitude must be from 2^-100 to 2^100", p.softmax_scale = -2.4e38f);
  BOTH_REFUSED("softmax_scale is 1e-40", p.softmax_scale = 1e-40f);
  BOTH_REFUSED("softmax_scale is 1.2676508e30", p.softmax_scale = nextafterf(ldexpf(1, 100), INFINITY));
  BOTH_REFUSED("softmax_scale is 7.8886086e-31", p.softmax_scale = nextafterf(ldexpf(1, -100), 0));
  BOTH_REFUSED("softcap is 2.4e38; its magnitude must be from 2^-100 to 2^100 (0 means none)", p.softcap = 2.4e38f);
  BOTH_REFUSED("softcap is 1e-40", p.softcap = 1e-40f);
  BOTH_REFUSED("|softmax_scale| / softcap is 1e36; its magnitude must be", p.softmax_scale = -1e18f; p.softcap = 1e-18f);
  BOTH_REFUSED("(softmax_scale is 0.25 and softcap 1e30)", p.softmax_scale = 0.25f; p.softcap = 1e30f);
  BOTH_REFUSED("dropout_p is NaN", p.dropout_p = NAN);
  BOTH_REFUSED("dropout_p is 1", p.dropout_p = 1.0f);
  BOTH_REFUSED("dropout_p is -0.1", p.dropout_p = -0.1f);
  BOTH_REFUSED("dropout_p is inf", p.dropout_p = INFINITY);
  FORWARD_REFUSED("batch_invariant is 2", p.batch_invariant = 2);
  FORWARD_REFUSED("reserved is 1; it must be 0", p.reserved = 1);
  FORWARD_REFUSED("batch_invariant is true and dropout_p is not 0", p.batch_invariant = 1; p.dropout_p = 0.5f);
  BACKWARD_REFUSED("deterministic is 2", p.deterministic = 2);
  BACKWARD_REFUSED("deterministic is -1", p.deterministic = -1);
  BACKWARD_REFUSED("reserved is 1", p.reserved = 1);
  BOTH_REFUSED("dropout_seed_ptr is 0x1001",
               p.dropout_p = 0.1f; p.dropout_seed_ptr = (const uint64_t *)(intptr_t)0x1001);
  BOTH_REFUSED("dropout_offset_ptr is 0x1004",
               p.dropout_p = 0.1f; p.dropout_offset_ptr = (const uint64_t *)(intptr_t)0x1004);
}

static void sizes(void) {
  BOTH_REFUSED("batch_size is -1", p.batch_size = -1);
  BOTH_REFUSED("batch_size is 9223372036854775807", p.batch_size = INT64_MAX);
  BOTH_REFUSED("num_heads_q is 0", p.num_heads_q = 0);
  BOTH_REFUSED("num_heads_q is -4", p.num_heads_q = -4);
  BOTH_REFUSED("num_heads_q is 5; it must be a multiple of num_heads_kv", p.num_heads_q = 5);
  BOTH_REFUSED("num_heads_kv is 0", p.num_heads_kv = 0);
  BOTH_REFUSED("num_heads_kv is -2", p.num_heads_kv = -2);
  BOTH_REFUSED("seqlen_q is -1", p.seqlen_q = -1);
  BOTH_REFUSED("seqlen_q is 9223372036854775807", p.seqlen_q = INT64_MAX);
  BOTH_REFUSED("seqlen_k is -9223372036854775808", p.seqlen_k = INT64_MIN);
  BOTH_REFUSED("head_dim is 0", p.head_dim = 0);
  BOTH_REFUSED("head_dim is 513; it must be from 1 to 512", p.head_dim = 513);
  BOTH_REFUSED("head_dim_v is -1", p.head_dim_v = -1);
  BOTH_REFUSED("head_dim_v is 513", p.head_dim_v = 513);
  /* Each number is in range, but their product is not. */
  BOTH_REFUSED("overflows", p.batch_size = 1 << 30; p.num_heads_q = p.num_heads_kv = 1 << 30);
  BOTH_REFUSED("overflows", p.batch_size = 1 << 30; p.num_heads_q = p.num_heads_kv = 1; p.seqlen_q = 1 << 30);
}

static void strides(void) {
  BOTH_REFUSED("q.stride_batch is -1", p.q.stride_batch = -1);
  BOTH_REFUSED("k.stride_seqlen is -16", p.k.stride_seqlen = -16);
  BOTH_REFUSED("v.stride_head is -9223372036854775808", p.v.stride_head = INT64_MIN);
  BOTH_REFUSED("out.stride_seqlen is -1", p.out.stride_seqlen = -1);
  BOTH_REFUSED("q at", p.q.stride_batch = INT64_MAX);
  BOTH_REFUSED("overflows", p.k.stride_seqlen = INT64_MAX / 2);
  BOTH_REFUSED("overflows", p.v.stride_head = (int64_t)1 << 60);
  BACKWARD_REFUSED("dout.stride_head is -4", p.dout.stride_head = -4);
  BACKWARD_REFUSED("dq.stride_batch is -1", p.dq.stride_batch = -1);
  BACKWARD_REFUSED("dk at", p.dk.stride_batch = INT64_MAX);
  /* Outputs that hold two elements in one place are refused; inputs may have the same strides. */
  FORWARD_REFUSED("out is written", p.out.stride_batch = 0);
  FORWARD_REFUSED("out is written", p.out.stride_head = 0);
  FORWARD_REFUSED("out is written", p.out.stride_seqlen = p.out.stride_head);
  FORWARD_REFUSED("out is written", p.out.stride_head = 3);
  BACKWARD_REFUSED("dq is written", p.dq.stride_seqlen = 0);
  BACKWARD_REFUSED("dk is written", p.dk.stride_head = 7);
  BACKWARD_REFUSED("dv is written", p.dv.stride_batch = 4);
}

static void *shifted(const void *data, int bytes) { return (char *)WRITABLE(data) + bytes; }

static void misaligned(void) {
  BOTH_REFUSED("q.data is", p.q.data = shifted(p.q.data, 1));
  BOTH_REFUSED("k.data is", p.k.data = shifted(p.k.data, 2));
  BOTH_REFUSED("v.data is", p.v.data = shifted(p.v.data, 3));
  BOTH_REFUSED("aligned to the 4 bytes of one fp32 element", p.out.data = shifted(p.out.data, 2));
  BOTH_REFUSED("aligned to the 2 bytes of one bf16 element", p.dtype = FLASHTUNE_DTYPE_BF16;
               p.q.data = shifted(p.q.data, 1));
  BACKWARD_REFUSED("dout.data is", p.dout.data = shifted(p.dout.data, 1));
  BACKWARD_REFUSED("dq.data is", p.dq.data = shifted(p.dq.data, 1));
  BACKWARD_REFUSED("dk.data is", p.dk.data = shifted(p.dk.data, 1));
  BACKWARD_REFUSED("dv.data is", p.dv.data = shifted(p.dv.data, 1));
  BOTH_REFUSED("lse is", p.lse = shifted(p.lse, 2));
}

static void overlapping(void) {
  static float joined[1024]; /* what lies behind a buffer of its own, malloc decides */
  CHECK(a.count[V] + a.count[OUT] <= 1024, "joined is too small");
  FORWARD_REFUSED("out overlaps q", p.out.data = WRITABLE(p.q.data));
  FORWARD_REFUSED("out overlaps k", p.k.data = p.out.data);
  FORWARD_REFUSED("out overlaps v", p.v.data = joined; p.out.data = joined + a.count[V] - 1);
  FORWARD_REFUSED("out overlaps lse", p.lse = (float *)p.out.data + 3);
  FORWARD_REFUSED("lse overlaps q", p.lse = WRITABLE(p.q.data));
  FORWARD_REFUSED("out overlaps dropout_seed_ptr", p.dropout_p = 0.5f; p.dropout_seed_ptr = p.out.data);
  BACKWARD_REFUSED("dq overlaps q", p.dq.data = WRITABLE(p.q.data));
  BACKWARD_REFUSED("dq overlaps out", p.dq.data = WRITABLE(p.out.data));
  BACKWARD_REFUSED("dq overlaps lse", p.lse = (const float *)p.dq.data + 1);
  BACKWARD_REFUSED("dk overlaps k", p.dk.data = WRITABLE(p.k.data));
  BACKWARD_REFUSED("dv overlaps v", p.dv.data = WRITABLE(p.v.data));
  BACKWARD_REFUSED("dv overlaps dout", p.dout.data = p.dv.data);
  BACKWARD_REFUSED("dk overlaps dv", p.dv.data = p.dk.data);
  BACKWARD_REFUSED("dq overlaps dk", p.dk.data = (float *)p.dq.data + 8);
  /* Inputs may overlap. */
  flashtune_forward_params p = a.forward;
  p.k.data = p.q.data;
  p.v.data = p.q.data;
  OK(flashtune_forward_supported(context, &p));
  p.v.stride_head = p.v.stride_batch = 0;
  OK(flashtune_forward_supported(context, &p));
}

static flashtune_const_scores_tensor whole(const void *data) {
  flashtune_const_scores_tensor tensor = {data, 4 * 5 * 7, 5 * 7, 7, 1};
  return tensor;
}

static flashtune_scores_tensor whole_output(void *data) {
  flashtune_scores_tensor tensor = {data, 4 * 5 * 7, 5 * 7, 7, 1};
  return tensor;
}

#define ASK(name) p.features |= FLASHTUNE_FEATURE_##name

static void windows_and_caps(void) {
  BOTH_REFUSED("window is 3", p.window = 3);
  BOTH_REFUSED("window is -1", p.window = -1);
  BOTH_REFUSED("window_left is -2; it must be from 0 to",
               p.window = FLASHTUNE_WINDOW_BOTTOM_RIGHT; p.window_left = -2);
  BOTH_REFUSED("window_right is 9223372036854775807", p.causal = 0; p.window = FLASHTUNE_WINDOW_TOP_LEFT;
               p.window_right = INT64_MAX);
  BOTH_REFUSED("window_left is 4, and window is FLASHTUNE_WINDOW_NONE", p.window_left = 4);
  BOTH_REFUSED("window_right is -7, and window is FLASHTUNE_WINDOW_NONE", p.window_right = -7);
  BOTH_REFUSED("the window aligns to the top left and causal to the bottom right", p.window = FLASHTUNE_WINDOW_TOP_LEFT);
  BOTH_REFUSED("the window aligns to the bottom right and causal to the top left", p.window = FLASHTUNE_WINDOW_BOTTOM_RIGHT;
               p.causal = FLASHTUNE_CAUSAL_TOP_LEFT);
  /* A window that hides no more keys than causal does is refused too. */
  BOTH_REFUSED("the window aligns to the top left and causal to the bottom right", p.window = FLASHTUNE_WINDOW_TOP_LEFT;
               p.window_left = -1; p.window_right = 0);
  BOTH_REFUSED("the window aligns to the top left and causal to the bottom right", p.window = FLASHTUNE_WINDOW_TOP_LEFT;
               p.window_left = p.window_right = -1);
  BOTH_REFUSED("the window aligns to the bottom right and causal to the top left", p.window = FLASHTUNE_WINDOW_BOTTOM_RIGHT;
               p.causal = FLASHTUNE_CAUSAL_TOP_LEFT; p.window_left = -1);
  BOTH_REFUSED("window_right is 1, and causal hides", p.window = FLASHTUNE_WINDOW_BOTTOM_RIGHT; p.window_right = 1);
  BOTH_REFUSED("softcap is -1", p.softcap = -1.0f);
  BOTH_REFUSED("softcap is NaN", p.softcap = NAN);
  BOTH_REFUSED("softcap is inf", p.softcap = INFINITY);
}

static void features_and_their_bits(void) {
  BOTH_REFUSED("features is 0x4000000000000000: 0x4000000000000000 is no FLASHTUNE_FEATURE_*", p.features = (uint64_t)1 << 62);
  BOTH_REFUSED("features is 0x804, with FLASHTUNE_FEATURE_MASK and FLASHTUNE_FEATURE_MASK_BITS", ASK(MASK); ASK(MASK_BITS));
  BACKWARD_REFUSED("0x400 is no FLASHTUNE_FEATURE_* of the backward pass", ASK(PAGED));
  BOTH_REFUSED("0x8000000000000000 is no", p.features = (uint64_t)1 << 63 | FLASHTUNE_FEATURE_MASK);
  FORWARD_REFUSED("0x100 is no FLASHTUNE_FEATURE_* of the forward pass", ASK(BIAS); ASK(DBIAS));
  FORWARD_REFUSED("0x200 is no FLASHTUNE_FEATURE_* of the forward pass", ASK(DLSE));
  BACKWARD_REFUSED("dbias is asked for without a bias", ASK(DBIAS));
  /* A pointer without its feature bit. */
  BOTH_REFUSED("features has no FLASHTUNE_FEATURE_ALIBI", p.alibi_slopes = slopes);
  BOTH_REFUSED("bias.data is", p.bias = whole(scores));
  BOTH_REFUSED("mask.data is", p.mask.data = shown);
  BOTH_REFUSED("features has no FLASHTUNE_FEATURE_SINKS", p.sinks = sinks);
  BOTH_REFUSED("cu_seqlens_q is", p.cu_seqlens_q = begins);
  BOTH_REFUSED("cu_seqlens_k is", p.cu_seqlens_k = begins);
  BOTH_REFUSED("seqused_q is", p.seqused_q = used);
  BOTH_REFUSED("seqused_k is", p.seqused_k = used);
  BOTH_REFUSED("total_q is 10; it must be 0", p.total_q = 10);
  BOTH_REFUSED("total_k is 1; it must be 0", p.total_k = 1);
  BACKWARD_REFUSED("dbias.data is", ASK(BIAS); p.bias = whole(scores); p.dbias = whole_output(score_gradients));
  BACKWARD_REFUSED("dsinks is", p.dsinks = sink_gradients);
  BACKWARD_REFUSED("dlse is", p.dlse = (const float *)p.lse);
  /* A feature bit without its pointer. */
  FORWARD_NEEDS("alibi_slopes is NULL; it must point to 4 fp32 values", ASK(ALIBI));
  FORWARD_NEEDS("alibi_slopes is NULL; it must point to (2, 4) fp32 values", ASK(ALIBI); p.alibi_stride_batch = 4);
  FORWARD_NEEDS("bias.data is NULL; it must point to (batch, heads_q, seqlen_q, seqlen_k) = (2, 4, 5, 7) fp32", ASK(BIAS));
  FORWARD_NEEDS("mask.data is NULL", ASK(MASK));
  FORWARD_NEEDS("mask.data is NULL; it must point to (batch, heads_q, seqlen_q, ceil(seqlen_k / 8)) = (2, 4, 5, 1) one-byte",
                ASK(MASK_BITS));
  FORWARD_NEEDS("sinks is NULL", ASK(SINKS));
  FORWARD_NEEDS("cu_seqlens_q is NULL; it must point to 3 int32 values", ASK(CU_SEQLENS_Q); p.total_q = 10);
  FORWARD_NEEDS("cu_seqlens_k is NULL", ASK(CU_SEQLENS_K); p.total_k = 14);
  FORWARD_NEEDS("seqused_q is NULL; it must point to 2 int32 values", ASK(SEQUSED_Q));
  FORWARD_NEEDS("seqused_k is NULL", ASK(SEQUSED_K));
  BACKWARD_NEEDS("dbias.data is NULL", ASK(BIAS); ASK(DBIAS); p.bias = whole(scores));
  BACKWARD_NEEDS("dlse is NULL; it must point to 40 fp32 values", ASK(DLSE));
}

static void feature_data(void) {
  BOTH_REFUSED("alibi_stride_batch is -1", ASK(ALIBI); p.alibi_stride_batch = -1);
  BOTH_REFUSED("with rows of 4 elements, 2 rows 9223372036854775807 elements apart overflows", ASK(ALIBI); p.alibi_slopes = slopes; p.alibi_stride_batch = INT64_MAX);
  BOTH_REFUSED("alibi_slopes is", ASK(ALIBI); p.alibi_slopes = shifted(slopes, 1));
  BOTH_REFUSED("aligned to 4 bytes", ASK(SINKS); p.sinks = shifted(sinks, 2));
  BOTH_REFUSED("seqused_k is", ASK(SEQUSED_K); p.seqused_k = shifted(used, 3));
  BOTH_REFUSED("bias.stride_seqlen_q is -7", ASK(BIAS); p.bias = whole(scores); p.bias.stride_seqlen_q = -7);
  BOTH_REFUSED("mask.stride_batch is -1", ASK(MASK); p.mask.stride_batch = -1);
  FORWARD_REFUSED("mask.stride_seqlen_k is 7; it must be 1 for a mask of bits", ASK(MASK_BITS); p.mask.data = shown;
                  p.mask.stride_seqlen_k = 7; p.seqlen_k = 9);
  BOTH_REFUSED("bias at", ASK(BIAS); p.bias = whole(scores); p.bias.stride_head = INT64_MAX);
  BOTH_REFUSED("aligned to the 4 bytes of one fp32 element", ASK(BIAS); p.bias = whole(shifted(scores, 2)));
  BOTH_REFUSED("total_q is -1", ASK(CU_SEQLENS_Q); p.total_q = -1);
  BOTH_REFUSED("total_k is 2147483647; it must be from 0 to 2147479552", ASK(CU_SEQLENS_K); p.total_k = INT32_MAX);
  BOTH_REFUSED("overflows", ASK(CU_SEQLENS_Q); p.total_q = 1 << 29; p.batch_size = 1;
               p.num_heads_q = p.num_heads_kv = INT32_MAX);
  FORWARD_REFUSED("out overlaps bias", ASK(BIAS); p.bias = whole(p.out.data); p.bias.stride_batch = 0);
  FORWARD_REFUSED("out overlaps sinks", ASK(SINKS); p.sinks = (float *)p.out.data + 8);
  FORWARD_REFUSED("lse overlaps seqused_q", ASK(SEQUSED_Q); p.seqused_q = (const int32_t *)p.lse);
  BACKWARD_REFUSED("dq overlaps dlse", ASK(DLSE); p.dlse = p.dq.data);
  BACKWARD_REFUSED("dbias overlaps bias", ASK(BIAS); ASK(DBIAS); p.bias = whole(scores); p.dbias = whole_output(scores));
#define ASK_DBIAS ASK(BIAS); ASK(DBIAS); p.bias = whole(scores)
  BACKWARD_REFUSED("dk overlaps dbias", ASK_DBIAS; p.dbias = whole_output((float *)p.dk.data - 30));
  BACKWARD_REFUSED("dsinks overlaps sinks", ASK(SINKS); p.sinks = p.dsinks = sinks);
  BACKWARD_REFUSED("dq overlaps dsinks", ASK(SINKS); p.sinks = sinks; p.dsinks = (float *)p.dq.data + 4);
  BACKWARD_REFUSED("dbias is written", ASK_DBIAS; p.dbias = whole_output(score_gradients);
                   p.dbias.stride_seqlen_q = 6);
  /* Heads that share a dbias are summed, which is no overlap, but the sum has no fixed order. */
  flashtune_backward_params p = a.backward;
  ASK_DBIAS;
  p.dbias = whole_output(score_gradients);
  p.dbias.stride_head = 0;
  OK(flashtune_backward_supported(context, &p));
  p.deterministic = 1;
  backward_refused(&p, FLASHTUNE_STATUS_UNSUPPORTED, "dbias.stride_head is 0 and deterministic is 1");
  p.dbias = whole_output(score_gradients);
  OK(flashtune_backward_supported(context, &p));
  /* Without a score nothing is summed, whatever the strides. NumPy's empty arrays have 0. */
  p.dbias.stride_head = p.seqlen_k = 0;
  OK(flashtune_backward_supported(context, &p));
}

/* On the host lengths are readable, so a launch checks them. */
static void lengths(void) {
  static const int32_t from_one[3] = {1, 3, 8}, falling[3] = {0, 4, 3}, long_one[3] = {0, 2, 8}, many[3] = {0, 5, 11};
  static const int32_t negative[2] = {5, -1}, past_its_end[2] = {4, 0};
#define PACKED(array) ASK(CU_SEQLENS_Q); p.total_q = 10; p.cu_seqlens_q = array
  FORWARD_NEEDS("cu_seqlens_q[0] is 1; it must be 0", PACKED(from_one));
  FORWARD_NEEDS("cu_seqlens_q[2] is 3; it must be at least the one before it, 4", PACKED(falling));
  FORWARD_NEEDS("cu_seqlens_q makes sequence 1 6 rows long; it must be at most seqlen_q, which is 5", PACKED(long_one));
  FORWARD_NEEDS("cu_seqlens_q[2] is 11", PACKED(many));
  FORWARD_NEEDS("cu_seqlens_k[0] is 1", ASK(CU_SEQLENS_K); p.total_k = 14; p.cu_seqlens_k = from_one);
  FORWARD_NEEDS("seqused_q[1] is -1; it must be from 0 to the sequence's length, 5", ASK(SEQUSED_Q);
                p.seqused_q = negative);
  FORWARD_NEEDS("seqused_q[0] is 4; it must be from 0 to the sequence's length, 3", PACKED(begins); ASK(SEQUSED_Q);
                p.seqused_q = past_its_end);
  BACKWARD_NEEDS("seqused_k[1] is -1; it must be from 0 to the sequence's length, 7", ASK(SEQUSED_K);
                 p.seqused_k = negative);
  /* Packed tensors have no batch dimension. */
  FORWARD_NEEDS("q.data is NULL; it must point to (total, heads, dim) = (10, 4, 8) fp32", PACKED(begins); p.q.data = NULL);
  FORWARD_REFUSED("out is written, but its strides (seqlen 0, head 4) put several of its (total, heads, dim) = (10, 4, 4)",
                  PACKED(begins); p.out.stride_seqlen = 0);
  FORWARD_REFUSED("with strides (seqlen 9223372036854775807, head", PACKED(begins); p.q.stride_seqlen = INT64_MAX);
  /* Without a row there is no plan. */
  flashtune_plan_info info = {.struct_size = sizeof info};
  flashtune_forward_params p = a.forward;
  PACKED(begins);
  p.total_q = 0;
  FAILS(flashtune_forward_plan_info(context, &p, &info), invalid, "batch_size is 2, total_q 0 and seqlen_k 7");
}

/* Blocks of 16 x 32 scores: one block of queries and one of keys. */
static void block_masks(void) {
  static const int32_t one[1] = {1}, none[1] = {0}, two[1] = {2}, minus[1] = {-1}, first[2] = {0, 0}, second[2] = {1, 0};
#define BLOCKS(counts, entries) ASK(BLOCK_MASK); p.block_mask.block_q = 16; p.block_mask.block_k = 32; \
  p.block_mask.num_blocks = counts; p.block_mask.indices = entries; p.block_mask.max_blocks = 2
  BOTH_REFUSED("block_mask.num_blocks is", p.block_mask.num_blocks = one);
  BOTH_REFUSED("features has no FLASHTUNE_FEATURE_BLOCK_MASK", p.block_mask.full_indices = first);
  BOTH_REFUSED("block_mask.block_q is 64; it must be 0", p.block_mask.block_q = 64);
  BOTH_REFUSED("block_mask.block_q is 0; it must be a multiple of 16 from 16 to 2048", ASK(BLOCK_MASK));
  BOTH_REFUSED("block_mask.block_k is 100", BLOCKS(one, first); p.block_mask.block_k = 100);
  BOTH_REFUSED("block_mask.block_k is 4096", BLOCKS(one, first); p.block_mask.block_k = 4096);
  BOTH_REFUSED("block_mask.max_blocks is -1", BLOCKS(one, first); p.block_mask.max_blocks = -1);
  BOTH_REFUSED("block_mask.indices_stride_row is -2", BLOCKS(one, first); p.block_mask.indices_stride_row = -2);
  BOTH_REFUSED("block_mask.indices is", BLOCKS(one, shifted((void *)first, 2)));
  BOTH_REFUSED("block_mask.num_blocks at", BLOCKS(one, first); p.block_mask.num_blocks_stride_head = INT64_MAX);
  FORWARD_REFUSED("out overlaps block_mask.indices", BLOCKS(one, p.out.data));
  FORWARD_NEEDS("block_mask.num_blocks is NULL", BLOCKS(NULL, first));
  BACKWARD_NEEDS("block_mask.indices is NULL", BLOCKS(one, NULL));
  FORWARD_NEEDS("one of block_mask.full_num_blocks and block_mask.full_indices is NULL", BLOCKS(one, first);
                p.block_mask.full_num_blocks = none);
  /* On the host block lists are readable, so a launch checks them. */
  FORWARD_NEEDS("block_mask.num_blocks[0][0][0] is -1; it must be from 0 to max_blocks, which is 2", BLOCKS(minus, first));
  BACKWARD_NEEDS("block_mask.full_num_blocks[0][0][0] is 2; it must be from 0 to max_blocks, which is 1", BLOCKS(none, first);
                 p.block_mask.max_blocks = 1; p.block_mask.full_num_blocks = two; p.block_mask.full_indices = first);
  FORWARD_NEEDS("block_mask.indices[0][0][0][0] is 1; it must be from 0 to 0", BLOCKS(one, second));
  BACKWARD_NEEDS("block_mask.indices[0][0][0][1] is 0, which the row lists twice", BLOCKS(two, first));
  FORWARD_NEEDS("block_mask.full_indices[0][0][0][0] is 0, which the row lists twice", BLOCKS(one, first);
                p.block_mask.full_num_blocks = one; p.block_mask.full_indices = first);
  flashtune_forward_params p = a.forward;
  BLOCKS(one, first);
  ASK(SEQUSED_K);
  forward_refused(&p, FLASHTUNE_STATUS_UNSUPPORTED, "a block mask goes with sequences of one length alone");
  p = a.forward;
  BLOCKS(one, first);
  ASK(CACHE_BATCH_IDX);
  p.batch_size_cache = p.batch_size;
  forward_refused(&p, FLASHTUNE_STATUS_UNSUPPORTED, "seqused, cache_batch_idx, leftpad_k and pages");
  /* Lists without room for an entry have no element, and their address may be NULL. */
  static float unseen[2 * 5 * 4 * 4];
  p = a.forward;
  BLOCKS(none, NULL);
  p.block_mask.full_num_blocks = none, p.block_mask.max_blocks = 0;
  CHECK(p.batch_size * p.seqlen_q * p.num_heads_q * p.head_dim_v == 2 * 5 * 4 * 4, "other sizes");
  p.out = (flashtune_tensor){unseen, 5 * 4 * 4, 4 * 4, 4}, p.lse = NULL;
  unseen[159] = CANARY;
  OK(flashtune_forward(context, &p, NULL, 0, NULL));
  CHECK(unseen[159] == 0, "a query that sees no key has %g", (double)unseen[159]);
}

static void workspaces(void) {
  const flashtune_backward_params *p = &a.backward;
  const int32_t small = FLASHTUNE_STATUS_WORKSPACE_TOO_SMALL;
  flashtune_backward_params q = *p;
  flashtune_plan_info info = canary_info();
  CHECK(workspace_bytes > 256, "%llu bytes", (unsigned long long)workspace_bytes);
  FAILS(flashtune_backward(context, p, NULL, workspace_bytes, NULL), invalid, "workspace is NULL");
  FAILS(flashtune_backward(context, p, shifted(workspace, 128), workspace_bytes, NULL), invalid, "aligned to 256");
  FAILS(flashtune_backward(context, p, workspace, workspace_bytes - 1, NULL), small, "workspace_bytes is");
  FAILS(flashtune_backward(context, p, workspace, 0, NULL), small, "workspace_bytes is 0");
  q.q.data = workspace;
  FAILS(flashtune_backward(context, &q, workspace, workspace_bytes, NULL), invalid, "workspace overlaps q");
  q = *p;
  q.dv.data = shifted(workspace, 512);
  FAILS(flashtune_backward(context, &q, workspace, workspace_bytes, NULL), invalid, "workspace overlaps dv");
  nothing_written(&info, 77);
}

static void autotune_params(void) {
  flashtune_autotune_params good, p;
  memset(&good, 0, sizeof good);
  good.struct_size = sizeof good;
  good.forward = &a.forward;
  FAILS(flashtune_autotune(context, NULL), invalid, "params is NULL");
  FAILS(flashtune_autotune(NULL, &good), invalid, "context is NULL");
  FAILS((p = good, p.struct_size = 0, flashtune_autotune(context, &p)), invalid, "params.struct_size is 0");
  FAILS((p = good, p.forward = NULL, flashtune_autotune(context, &p)), invalid, "both NULL");
  FAILS((p = good, p.backward = &a.backward, flashtune_autotune(context, &p)), invalid, "both set");
  flashtune_backward_params fixed = a.backward;
  fixed.deterministic = 1;
  FAILS((p = good, p.forward = NULL, p.backward = &fixed, flashtune_autotune(context, &p)), invalid, "deterministic");
  FAILS((p = good, p.retune = 2, flashtune_autotune(context, &p)), invalid, "params.retune is 2");
  FAILS((p = good, p.reserved = 1, flashtune_autotune(context, &p)), invalid, "params.reserved is 1");
  FAILS((p = good, p.time_limit_seconds = -1, flashtune_autotune(context, &p)), invalid, "time_limit_seconds is -1");
  FAILS((p = good, p.time_limit_seconds = NAN, flashtune_autotune(context, &p)), invalid, "time_limit_seconds is NaN");
}

static void record_files(void) {
  uint64_t count = 77;
  FAILS(flashtune_records_export(NULL, "x", &count), invalid, "context is NULL");
  FAILS(flashtune_records_import(NULL, "x", &count), invalid, "context is NULL");
  FAILS(flashtune_records_export(context, NULL, &count), invalid, "path is NULL");
  FAILS(flashtune_records_import(context, NULL, &count), invalid, "path is NULL");
  FAILS(flashtune_records_export(context, "", &count), invalid, "path is \"\"");
  FAILS(flashtune_records_import(context, "/no/such/file", &count), FLASHTUNE_STATUS_IO, "/no/such/file");
  FAILS(flashtune_records_export(context, "/no/such/folder/x", &count), FLASHTUNE_STATUS_IO, "/no/such/folder");
  CHECK(count == 77, "a failed call wrote count");
}

int main(void) {
  context = cpu_context("");
  a = make_attention(shape, 1);
  reset_outputs(&a);
  for (size_t i = 0; i < sizeof score_gradients / sizeof *score_gradients; i++) score_gradients[i] = CANARY;
  for (size_t i = 0; i < sizeof sink_gradients / sizeof *sink_gradients; i++) sink_gradients[i] = CANARY;
  OK(flashtune_backward_workspace_size(context, &a.backward, &workspace_bytes));
  workspace = make_workspace(workspace_bytes + 256);
  nulls();
  struct_sizes();
  enums_and_scalars();
  sizes();
  strides();
  misaligned();
  overlapping();
  windows_and_caps();
  features_and_their_bits();
  feature_data();
  lengths();
  block_masks();
  workspaces();
  autotune_params();
  record_files();
  /* The context still works after all these errors. */
  run_and_check(context, &a);
  free(workspace);
  free_attention(&a);
  OK(flashtune_context_destroy(context));
  return 0;
}
