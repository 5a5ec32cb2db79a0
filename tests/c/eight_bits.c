/* Tensors of 8 bits: appended with computed scales, attended to, quantised, rotated. Every wrong
 * type and every wrong scale gets a message that names it, and no output is written. */
#include "attention.h"
#include "bf16.h"

enum { BATCH = 2, QUERIES = 1, KEYS = 5, HEADS = 2, DIM = 4 };
enum { CACHE = BATCH * KEYS * HEADS * DIM, ROWS = BATCH * KEYS * HEADS, OUTPUTS = BATCH * QUERIES * HEADS * DIM };

static flashtune_context *context;
static uint16_t q[OUTPUTS], k[CACHE], v[CACHE], out[OUTPUTS];
static int8_t k_cache[CACHE], v_cache[CACHE];
static float k_scales[ROWS], v_scales[ROWS];
static const int32_t none[BATCH] = {0, 0};
static flashtune_forward_params good;


static flashtune_tensor scales(float *data) {
  flashtune_tensor tensor = {data, KEYS * HEADS, HEADS, 1};
  return tensor;
}

static flashtune_kv_append_params append(void) {
  flashtune_kv_append_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.dtype = FLASHTUNE_DTYPE_BF16, p.cache_dtype = FLASHTUNE_DTYPE_INT8;
  p.batch_size = BATCH, p.num_heads_kv = HEADS, p.seqlen_new = KEYS, p.seqlen_cache = KEYS;
  p.head_dim = DIM, p.head_dim_v = DIM;
  p.k_new = packed_input(k, KEYS, HEADS, DIM), p.v_new = packed_input(v, KEYS, HEADS, DIM);
  p.k_cache = packed(k_cache, KEYS, HEADS, DIM), p.v_cache = packed(v_cache, KEYS, HEADS, DIM);
  p.seqlens = none;
  p.computes_descale = 1, p.keys_per_descale = 1;
  p.k_descale = scales(k_scales), p.v_descale = scales(v_scales);
  return p;
}

static flashtune_const_tensor read_only(flashtune_tensor t) {
  flashtune_const_tensor tensor = {t.data, t.stride_batch, t.stride_seqlen, t.stride_head};
  return tensor;
}

static flashtune_forward_params forward(void) {
  flashtune_forward_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.dtype = FLASHTUNE_DTYPE_BF16, p.kv_dtype = FLASHTUNE_DTYPE_INT8;
  p.batch_size = BATCH, p.num_heads_q = HEADS, p.num_heads_kv = HEADS;
  p.seqlen_q = QUERIES, p.seqlen_k = KEYS, p.head_dim = DIM, p.head_dim_v = DIM;
  p.q = packed_input(q, QUERIES, HEADS, DIM);
  p.k = packed_input(k_cache, KEYS, HEADS, DIM), p.v = packed_input(v_cache, KEYS, HEADS, DIM);
  p.out = packed(out, QUERIES, HEADS, DIM);
  p.k_descale = read_only(scales(k_scales)), p.v_descale = read_only(scales(v_scales));
  p.keys_per_descale = 1;
  return p;
}

/* Attention in double over numbers times scales. */
static double expected(int b, int h, int c) {
  double sum = 0, weighted = 0;
  for (int key = 0; key < KEYS; key++) {
    int row = (b * KEYS + key) * HEADS + h;
    double score = 0;
    for (int i = 0; i < DIM; i++)
      score += (double)wide(q[(b * HEADS + h) * DIM + i]) * k_cache[row * DIM + i] * (double)k_scales[row];
    double weight = exp(score / sqrt(DIM));
    sum += weight;
    weighted += weight * v_cache[row * DIM + c] * (double)v_scales[row];
  }
  return weighted / sum;
}

static void appends_and_attends(void) {
  flashtune_kv_append_params p = append();
  OK(flashtune_kv_append(context, &p, NULL));
  for (int row = 0; row < ROWS; row++) {
    float top = 0;
    for (int i = 0; i < DIM; i++) top = fmaxf(top, fabsf(wide(k[row * DIM + i])));
    CHECK(k_scales[row] == top / 127, "scale %d is %g", row, (double)k_scales[row]);
    for (int i = 0; i < DIM; i++) {
      float number = rintf(wide(k[row * DIM + i]) * (1 / k_scales[row]));
      CHECK(k_cache[row * DIM + i] == (int)number, "number %d of row %d is %d", i, row, k_cache[row * DIM + i]);
    }
  }
  OK(flashtune_forward(context, &good, NULL, 0, NULL));
  for (int b = 0; b < BATCH; b++)
    for (int h = 0; h < HEADS; h++)
      for (int c = 0; c < DIM; c++) {
        double got = wide(out[(b * HEADS + h) * DIM + c]), exact = expected(b, h, c);
        CHECK(fabs(got - exact) < 0.01, "out[%d][%d][%d] is %g and not %g", b, h, c, got, exact);
      }
}

/* The append with the most outputs: computed scales, lengths in place and rotated queries. */
static void appends_with_every_output(void) {
  static float cosines[KEYS], sines[KEYS];
  static uint16_t rotated[OUTPUTS];
  static int8_t before[CACHE];
  int32_t lengths[BATCH] = {0, 0};
  for (int i = 0; i < KEYS; i++) cosines[i] = 1;
  memcpy(before, k_cache, sizeof before);
  flashtune_kv_append_params p = append();
  p.features = FLASHTUNE_APPEND_SLOTS, p.seqlens = lengths, p.seqused = lengths;
  p.rotary_dim = 2, p.rotary_dtype = FLASHTUNE_DTYPE_FP32, p.rotary_cos = cosines, p.rotary_sin = sines;
  p.rotary_stride = 1, p.seqlen_rotary = KEYS;
  p.seqlen_q = QUERIES, p.num_heads_q = HEADS;
  p.q = packed_input(q, QUERIES, HEADS, DIM), p.q_rotated = packed(rotated, QUERIES, HEADS, DIM);
  OK(flashtune_kv_append(context, &p, NULL));
  CHECK(lengths[0] == KEYS && lengths[1] == KEYS, "the lengths are %d and %d", lengths[0], lengths[1]);
  CHECK(memcmp(before, k_cache, sizeof before) == 0, "a rotation by 0 changed keys");
  CHECK(memcmp(q, rotated, sizeof q) == 0, "a rotation by 0 changed queries");
}

static void quantises(void) {
  static uint8_t numbers[CACHE];
  static float descale[BATCH * HEADS];
  flashtune_quantize_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.dtype = FLASHTUNE_DTYPE_BF16, p.out_dtype = FLASHTUNE_DTYPE_E4M3;
  p.batch_size = BATCH, p.seqlen = KEYS, p.num_heads = HEADS, p.head_dim = DIM;
  p.x = packed_input(k, KEYS, HEADS, DIM), p.out = packed(numbers, KEYS, HEADS, DIM);
  p.descale.data = descale, p.descale.stride_batch = HEADS, p.descale.stride_head = 1;
  p.heads_per_descale = 1, p.computes_descale = 1;
  OK(flashtune_quantize_prepare(context, &p));
  OK(flashtune_quantize(context, &p, NULL));
  for (int b = 0; b < BATCH; b++)
    for (int h = 0; h < HEADS; h++) {
      float top = 0;
      int largest = 0;
      for (int key = 0; key < KEYS; key++)
        for (int i = 0; i < DIM; i++) {
          int at = ((b * KEYS + key) * HEADS + h) * DIM + i;
          if (fabsf(wide(k[at])) > top) top = fabsf(wide(k[at])), largest = at;
        }
      CHECK(descale[b * HEADS + h] == top / 448, "scale of %d, %d", b, h);
      CHECK((numbers[largest] & 0x7f) == 0x7e, "the largest number is %#x", numbers[largest]);
    }
  /* q, k and v of 8 bits. */
  flashtune_forward_params f = good;
  f.dtype = FLASHTUNE_DTYPE_E4M3, f.kv_dtype = 0, f.out_dtype = FLASHTUNE_DTYPE_BF16;
  f.q = packed_input(numbers, KEYS, HEADS, DIM), f.k = f.q, f.v = f.q;
  flashtune_const_tensor of_heads = {descale, HEADS, 0, 1};
  f.q_descale = f.k_descale = f.v_descale = of_heads;
  f.keys_per_descale = 0;
  OK(flashtune_forward(context, &f, NULL, 0, NULL));

  /* Without a row there is no scale of a row, whatever the strides. */
  flashtune_quantize_params bad = p;
  bad.seqlen = 0, bad.keys_per_descale = 1;
  bad.descale.stride_batch = 0, bad.descale.stride_seqlen = HEADS;
  OK(flashtune_quantize(context, &bad, NULL));
#define QUANTIZE_REFUSED(words, change) \
  do { \
    bad = p, change; \
    FAILS(flashtune_quantize(context, &bad, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, words); \
  } while (0)
  QUANTIZE_REFUSED("dtype is 3", bad.dtype = FLASHTUNE_DTYPE_FP32);
  QUANTIZE_REFUSED("out_dtype is 2", bad.out_dtype = FLASHTUNE_DTYPE_BF16);
  QUANTIZE_REFUSED("keys_per_descale is 64", bad.keys_per_descale = 64);
  QUANTIZE_REFUSED("heads_per_descale is 3", bad.heads_per_descale = 3);
  QUANTIZE_REFUSED("computes_descale is 2", bad.computes_descale = 2);
  QUANTIZE_REFUSED("descale is NULL", bad.descale.data = NULL);
  QUANTIZE_REFUSED("descale.stride_head is 0", bad.descale.stride_head = 0);
  QUANTIZE_REFUSED("descale[0][0][0] is 0", (descale[0] = 0, bad.computes_descale = 0));
}

/* k as 5 rows of 2 heads of 8 columns, rotated in bf16 and quantised. */
enum { ROTATED_ROWS = CACHE / 8 };

static flashtune_quantize_params rotation(uint16_t *rotated) {
  flashtune_quantize_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.dtype = p.out_dtype = FLASHTUNE_DTYPE_BF16;
  p.batch_size = 1, p.seqlen = ROTATED_ROWS / 2, p.num_heads = 2, p.head_dim = 8;
  p.x = packed_input(k, ROTATED_ROWS / 2, 2, 8), p.out = packed(rotated, ROTATED_ROWS / 2, 2, 8);
  p.rotation = FLASHTUNE_ROTATION_HADAMARD;
  return p;
}

static void rotates(void) {
  static uint16_t rotated[CACHE];
  static uint8_t numbers[CACHE], plain[CACHE];
  static float descale[2], plain_descale[2];
  flashtune_quantize_params p = rotation(rotated);
  OK(flashtune_quantize_prepare(context, &p));
  OK(flashtune_quantize(context, &p, NULL));
  /* Philox4x32-10 of zeros begins with the word 0x6627e8d5: the signs of 8 columns are 0xd5. */
  double tops[2] = {0, 0};
  for (int row = 0; row < ROTATED_ROWS; row++)
    for (int c = 0; c < 8; c++) {
      double exact = 0;
      for (int j = 0; j < 8; j++) {
        int common = c & j, odd = (common ^ common >> 1 ^ common >> 2 ^ 0xd5 >> j) & 1;
        exact += (odd ? -1 : 1) * (double)wide(k[row * 8 + j]) / sqrt(8);
      }
      double got = wide(rotated[row * 8 + c]);
      CHECK(fabs(got - exact) <= fabs(exact) / 256 + 1e-6, "column %d of row %d is %g and not %g", c, row, got, exact);
      if (fabs(exact) > tops[row % 2]) tops[row % 2] = fabs(exact);
    }
  flashtune_quantize_params eight = p;
  eight.out_dtype = FLASHTUNE_DTYPE_E4M3, eight.heads_per_descale = 1, eight.computes_descale = 1;
  eight.out.data = numbers, eight.descale.data = descale, eight.descale.stride_batch = 2, eight.descale.stride_head = 1;
  OK(flashtune_quantize(context, &eight, NULL));
  for (int h = 0; h < 2; h++)
    CHECK(fabs((double)descale[h] * 448 - tops[h]) < 1e-5 * tops[h], "scale %d is %g", h, (double)descale[h]);

  /* A seed without a rotation is not read, and neither is a rotation past an older struct's end. */
  flashtune_quantize_params older = eight;
  older.rotation = FLASHTUNE_ROTATION_NONE, older.rotation_seed = 7;
  older.out.data = plain, older.descale.data = plain_descale;
  OK(flashtune_quantize(context, &older, NULL));
  CHECK(memcmp(plain, numbers, sizeof plain) != 0, "the rotation changed nothing");
  older.struct_size = offsetof(flashtune_quantize_params, rotation), older.rotation = 9;
  older.out.data = numbers, older.descale.data = descale;
  OK(flashtune_quantize(context, &older, NULL));
  CHECK(memcmp(plain, numbers, sizeof plain) == 0, "an older caller's rows are rotated");
  CHECK(memcmp(plain_descale, descale, sizeof descale) == 0, "an older caller's rows are rotated");

  flashtune_quantize_params bad;
#define ROTATION_REFUSED(words, from, change) \
  do { \
    bad = from, change; \
    FAILS(flashtune_quantize(context, &bad, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, words); \
  } while (0)
  ROTATION_REFUSED("rotation is 2; it must be 0 or 1", eight, bad.rotation = 2);
  ROTATION_REFUSED("rotation_reserved is 1; it must be 0", eight, bad.rotation_reserved = 1);
  ROTATION_REFUSED("head_dim is 4; with FLASHTUNE_ROTATION_HADAMARD it must be a multiple of 8", eight, bad.head_dim = 4);
  ROTATION_REFUSED("out_dtype is 2; it must be FLASHTUNE_DTYPE_E4M3", p, bad.rotation = FLASHTUNE_ROTATION_NONE);
  ROTATION_REFUSED("out_dtype is 1; it must be dtype, FLASHTUNE_DTYPE_E4M3 (4), _E5M2 (5) or _INT8 (6)", p, bad.out_dtype = FLASHTUNE_DTYPE_FP16);
  ROTATION_REFUSED("computes_descale is 1; it must be 0, since out_dtype equals dtype", p, bad.computes_descale = 1);
  ROTATION_REFUSED("heads_per_descale is 1; it must be 0", p, bad.heads_per_descale = 1);
  ROTATION_REFUSED("keys_per_descale is 128; it must be 0", p, bad.keys_per_descale = 128);
  ROTATION_REFUSED("must be NULL, since out_dtype equals dtype", p, bad.descale.data = descale);
  ROTATION_REFUSED("out", p, bad.out.data = k);
}

static void refuses(void) {
#define REFUSED_8(words, change) \
  do { \
    flashtune_forward_params bad = good; \
    change; \
    for (int i = 0; i < OUTPUTS; i++) out[i] = 0x1234; \
    FAILS(flashtune_forward(context, &bad, NULL, 0, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, words); \
    for (int i = 0; i < OUTPUTS; i++) CHECK(out[i] == 0x1234, "out was written"); \
  } while (0)
  static float wrong[1];
  flashtune_const_tensor of_wrong = {wrong, 0, 0, 0};
  REFUSED_8("kv_dtype is 9", bad.kv_dtype = 9);
  REFUSED_8("kv_dtype is 6 and dtype FLASHTUNE_DTYPE_FP32", bad.dtype = FLASHTUNE_DTYPE_FP32);
  REFUSED_8("kv_dtype is 1 and dtype 2", bad.kv_dtype = FLASHTUNE_DTYPE_FP16);
  REFUSED_8("dtype is 5; q must be", bad.dtype = FLASHTUNE_DTYPE_E5M2);
  REFUSED_8("out_dtype is 1 and dtype 2", bad.out_dtype = FLASHTUNE_DTYPE_FP16);
  REFUSED_8("out_dtype is 0 and dtype FLASHTUNE_DTYPE_E4M3", bad.dtype = FLASHTUNE_DTYPE_E4M3);
  REFUSED_8("kv_dtype is 6 and dtype FLASHTUNE_DTYPE_E4M3", (bad.dtype = FLASHTUNE_DTYPE_E4M3, bad.out_dtype = FLASHTUNE_DTYPE_BF16));
  REFUSED_8("k_descale is NULL", bad.k_descale.data = NULL);
  REFUSED_8("v_descale is NULL", bad.v_descale.data = NULL);
  REFUSED_8("q_descale.data is", bad.q_descale = of_wrong);
  REFUSED_8("k_descale.data is", (bad.kv_dtype = 0, bad.keys_per_descale = 0));
  REFUSED_8("v_descale.stride_seqlen is -1", bad.v_descale.stride_seqlen = -1);
  REFUSED_8("keys_per_scale is 64", bad.keys_per_descale = 64);
  REFUSED_8("dropout_p must be 0", bad.dropout_p = 0.5f);
  const float values[] = {0, -1, INFINITY, NAN};
  for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
    wrong[0] = values[i];
    REFUSED_8("v_descale of sequence 0, key 0 and head 0 is", bad.v_descale = of_wrong);
  }
  flashtune_backward_params backward;
  memset(&backward, 0, sizeof backward);
  backward.struct_size = sizeof backward;
  backward.dtype = FLASHTUNE_DTYPE_E4M3;
  FAILS(flashtune_backward_supported(context, &backward), FLASHTUNE_STATUS_INVALID_ARGUMENT, "no backward pass");

  flashtune_kv_append_params p = append();
  p.cache_dtype = FLASHTUNE_DTYPE_FP16;
  FAILS(flashtune_kv_append(context, &p, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, "cache_dtype is 1");
  p = append(), p.keys_per_descale = 0;
  FAILS(flashtune_kv_append(context, &p, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, "keys_per_descale is 0");
  p = append(), p.cache_dtype = 0, p.computes_descale = 0, p.keys_per_descale = 0;
  FAILS(flashtune_kv_append(context, &p, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, "k_descale.data is");
  p = append(), p.v_descale.data = NULL;
  FAILS(flashtune_kv_append(context, &p, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, "v_descale is NULL");
  p = append(), p.computes_descale = 0, k_scales[0] = NAN;
  FAILS(flashtune_kv_append(context, &p, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, "k_descale of sequence 0, key 0 and head 0 is");
}

int main(void) {
  flashtune_context_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.backend = FLASHTUNE_BACKEND_CPU;
  OK(flashtune_context_create(&options, &context));
  uint32_t state = 5;
  for (int i = 0; i < CACHE; i++) k[i] = narrow(random_float(&state)), v[i] = narrow(random_float(&state));
  for (int i = 0; i < OUTPUTS; i++) q[i] = narrow(random_float(&state));
  good = forward();
  appends_and_attends();
  appends_with_every_output();
  quantises();
  rotates();
  refuses();
  OK(flashtune_context_destroy(context));
  return 0;
}
