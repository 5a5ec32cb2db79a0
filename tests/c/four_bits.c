/* int4 rows: appended with their scales and zeros, and attended to. Every wrong size, type and
 * scale gets a message that names it, and no output is written. */
#include "attention.h"
#include "bf16.h"

enum { BATCH = 2, QUERIES = 1, KEYS = 5, HEADS = 2, DIM = 64, ROW = 48 };
enum { NUMBERS = BATCH * KEYS * HEADS * DIM, ROWS = BATCH * KEYS * HEADS, OUTPUTS = BATCH * QUERIES * HEADS * DIM };

static flashtune_context *context;
static uint16_t q[OUTPUTS], k[NUMBERS], v[NUMBERS], out[OUTPUTS];
static uint8_t k_cache[ROWS * ROW], v_cache[ROWS * ROW];
static const int32_t none[BATCH] = {0, 0};
static flashtune_forward_params good;

/* A normal fp16 number, or 0. */
static double half(const uint8_t *bytes) {
  int bits = bytes[0] | bytes[1] << 8, exponent = bits >> 10 & 31;
  double magnitude = exponent ? ldexp(1024 + (bits & 1023), exponent - 25) : ldexp(bits & 1023, -24);
  return bits & 0x8000 ? -magnitude : magnitude;
}
/* What column c of a row stands for, without the rounding to fp16. */
static double number(const uint8_t *row, int c, double *scale) {
  const uint8_t *group = row + DIM / 2 + 4 * (c / 32);
  *scale = half(group);
  return *scale * (row[c / 2] >> (c % 2 * 4) & 15) + half(group + 2);
}

static flashtune_kv_append_params append(void) {
  flashtune_kv_append_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.dtype = FLASHTUNE_DTYPE_BF16, p.cache_dtype = FLASHTUNE_DTYPE_INT4_GROUP32;
  p.batch_size = BATCH, p.num_heads_kv = HEADS, p.seqlen_new = KEYS, p.seqlen_cache = KEYS;
  p.head_dim = DIM, p.head_dim_v = DIM;
  p.k_new = packed_input(k, KEYS, HEADS, DIM), p.v_new = packed_input(v, KEYS, HEADS, DIM);
  p.k_cache = packed(k_cache, KEYS, HEADS, ROW), p.v_cache = packed(v_cache, KEYS, HEADS, ROW);
  p.seqlens = none;
  return p;
}

static flashtune_forward_params forward(void) {
  flashtune_forward_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.dtype = FLASHTUNE_DTYPE_BF16, p.kv_dtype = FLASHTUNE_DTYPE_INT4_GROUP32;
  p.batch_size = BATCH, p.num_heads_q = HEADS, p.num_heads_kv = HEADS;
  p.seqlen_q = QUERIES, p.seqlen_k = KEYS, p.head_dim = DIM, p.head_dim_v = DIM;
  p.q = packed_input(q, QUERIES, HEADS, DIM);
  p.k = packed_input(k_cache, KEYS, HEADS, ROW), p.v = packed_input(v_cache, KEYS, HEADS, ROW);
  p.out = packed(out, QUERIES, HEADS, DIM);
  return p;
}

/* Attention in double over the numbers that rows stand for. */
static double expected(int b, int h, int c) {
  double sum = 0, weighted = 0, scale;
  for (int key = 0; key < KEYS; key++) {
    int row = (b * KEYS + key) * HEADS + h;
    double score = 0;
    for (int i = 0; i < DIM; i++) score += (double)wide(q[(b * HEADS + h) * DIM + i]) * number(k_cache + row * ROW, i, &scale);
    double weight = exp(score / sqrt(DIM));
    sum += weight;
    weighted += weight * number(v_cache + row * ROW, c, &scale);
  }
  return weighted / sum;
}

static void appends_and_attends(void) {
  flashtune_kv_append_params p = append();
  OK(flashtune_kv_append(context, &p, NULL));
  for (int row = 0; row < ROWS; row++)
    for (int i = 0; i < DIM; i++) {
      double scale, got = number(v_cache + row * ROW, i, &scale), given = wide(v[row * DIM + i]);
      CHECK(fabs(got - given) <= 0.51 * scale, "number %d of row %d is %g and not %g", i, row, got, given);
    }
  OK(flashtune_forward(context, &good, NULL, 0, NULL));
  for (int b = 0; b < BATCH; b++)
    for (int h = 0; h < HEADS; h++)
      for (int c = 0; c < DIM; c++) {
        double got = wide(out[(b * HEADS + h) * DIM + c]), exact = expected(b, h, c);
        CHECK(fabs(got - exact) < 0.01, "out[%d][%d][%d] is %g and not %g", b, h, c, got, exact);
      }
}

static void refuses(void) {
#define REFUSED(words, change) \
  do { \
    flashtune_forward_params bad = good; \
    change; \
    for (int i = 0; i < OUTPUTS; i++) out[i] = 0x1234; \
    FAILS(flashtune_forward(context, &bad, NULL, 0, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, words); \
    for (int i = 0; i < OUTPUTS; i++) CHECK(out[i] == 0x1234, "out was written"); \
  } while (0)
  static float scale[1] = {1};
  flashtune_const_tensor of_scale = {scale, 0, 0, 0};
  REFUSED("head_dim is 40 and k and v are int4g32; it must be a multiple of the 32 columns", bad.head_dim = 40);
  REFUSED("head_dim_v is 48 and k and v are int4g32", bad.head_dim_v = 48);
  REFUSED("head_dim_v is 32 and k and v are int4g64; it must be a multiple of the 64 columns", (bad.kv_dtype = FLASHTUNE_DTYPE_INT4_GROUP64, bad.head_dim_v = 32));
  REFUSED("kv_dtype is 7 and dtype FLASHTUNE_DTYPE_FP32", bad.dtype = FLASHTUNE_DTYPE_FP32);
  REFUSED("kv_dtype is 7 and dtype FLASHTUNE_DTYPE_E4M3", (bad.dtype = FLASHTUNE_DTYPE_E4M3, bad.out_dtype = FLASHTUNE_DTYPE_BF16));
  REFUSED("dtype is 7; it must be FLASHTUNE_DTYPE_FP16", bad.dtype = FLASHTUNE_DTYPE_INT4_GROUP32);
  REFUSED("k_descale.data is", bad.k_descale = of_scale);
  REFUSED("v_descale.data is", bad.v_descale = of_scale);
  REFUSED("keys_per_descale is 1", bad.keys_per_descale = 1);
  REFUSED("k.stride_head is -48", bad.k.stride_head = -48);
  REFUSED("k.data is NULL", bad.k.data = NULL);
  REFUSED("dropout_p must be 0", bad.dropout_p = 0.5f);

  uint8_t *group = v_cache + ROW * (ROWS - 1) + DIM / 2 + 4, kept[4];
  memcpy(kept, group, 4);
  const uint8_t scales[][2] = {{0, 0}, {0, 0xbc}, {0, 0x7c}, {0, 0x7e}};
  for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
    memcpy(group, scales[i], 2);
    REFUSED("the scale of v, sequence 1, key 4, head 1 and group 1 is", (void)bad);
  }
  memcpy(group, kept, 2);
  const uint8_t zeros[][2] = {{0, 0xfc}, {0, 0x7e}};
  for (size_t i = 0; i < sizeof zeros / sizeof *zeros; i++) {
    memcpy(group + 2, zeros[i], 2);
    REFUSED("the zero of v, sequence 1, key 4, head 1 and group 1 is", (void)bad);
  }
  memcpy(group, kept, 4);
  OK(flashtune_forward(context, &good, NULL, 0, NULL));

#define APPEND_REFUSED(words, change) \
  do { \
    flashtune_kv_append_params bad = append(); \
    change; \
    FAILS(flashtune_kv_append(context, &bad, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, words); \
  } while (0)
  flashtune_tensor of_append = {scale, 0, 0, 0};
  APPEND_REFUSED("head_dim is 72 and the cache int4g32", bad.head_dim = 72);
  APPEND_REFUSED("head_dim_v is 32 and the cache int4g64", (bad.cache_dtype = FLASHTUNE_DTYPE_INT4_GROUP64, bad.head_dim_v = 32));
  APPEND_REFUSED("cache_dtype is 7 and dtype 3", bad.dtype = FLASHTUNE_DTYPE_FP32);
  APPEND_REFUSED("computes_descale is 1; it must be 0, since int4 rows hold their scales", bad.computes_descale = 1);
  APPEND_REFUSED("k_descale.data is", bad.k_descale = of_append);
  APPEND_REFUSED("k_cache is written, but its strides", bad.k_cache.stride_head = 32);
}

int main(void) {
  flashtune_context_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.backend = FLASHTUNE_BACKEND_CPU;
  OK(flashtune_context_create(&options, &context));
  uint32_t state = 5;
  for (int i = 0; i < NUMBERS; i++) k[i] = narrow(random_float(&state)), v[i] = narrow(random_float(&state));
  for (int i = 0; i < OUTPUTS; i++) q[i] = narrow(random_float(&state));
  good = forward();
  appends_and_attends();
  refuses();
  OK(flashtune_context_destroy(context));
  return 0;
}
