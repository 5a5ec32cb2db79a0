/* Appending to the slots of a server: rotated keys and queries, idle slots, entries by index, and
 * lengths that advance in place. Every wrong argument gets a message that names it. */
#define OPERATION flashtune_kv_append
#include "attention.h"
#include "refused.h"

static flashtune_context *context;
static flashtune_kv_append_params good;

/* Three slots with two new keys each at most, in a cache of five entries of eight keys. Four of six
 * columns are rotated, and the tables have a row for each key. */
enum { BATCH = 3, NEW = 2, HEADS = 2, HEADS_Q = 3, DIM = 6, DIM_V = 4, CACHE = 8, ENTRIES = 5, HALF = 2 };
static const int32_t before[BATCH] = {3, 5, 0}, count[BATCH] = {2, 0, 1}, entry[BATCH] = {4, 0, 1};
static float k_new[BATCH * NEW * HEADS * DIM], v_new[BATCH * NEW * HEADS * DIM_V], q[BATCH * HEADS_Q * DIM];
static float k_cache[ENTRIES * CACHE * HEADS * DIM], v_cache[ENTRIES * CACHE * HEADS * DIM_V], q_rotated[BATCH * HEADS_Q * DIM];
static float angles[CACHE * 2 * HALF]; /* rows of cosines, then sines */
static int32_t lengths[BATCH];

static void reset(void) {
  for (size_t i = 0; i < sizeof k_cache / sizeof *k_cache; i++) k_cache[i] = CANARY;
  for (size_t i = 0; i < sizeof v_cache / sizeof *v_cache; i++) v_cache[i] = CANARY;
  for (size_t i = 0; i < sizeof q_rotated / sizeof *q_rotated; i++) q_rotated[i] = CANARY;
  memcpy(lengths, before, sizeof lengths);
}

static void check_row(const float *got, const float *row, int position, int interleaved) {
  float expected[DIM];
  memcpy(expected, row, sizeof expected);
  for (int i = 0; i < HALF; i++) {
    int x = interleaved ? 2 * i : i, y = interleaved ? 2 * i + 1 : i + HALF;
    float c = angles[position * 2 * HALF + i], s = angles[position * 2 * HALF + HALF + i];
    expected[x] = row[x] * c - row[y] * s, expected[y] = row[x] * s + row[y] * c;
  }
  for (int i = 0; i < DIM; i++)
    CHECK(fabsf(got[i] - expected[i]) < 1e-5f, "column %d is %g instead of %g", i, (double)got[i], (double)expected[i]);
}

/* Two steps in a row, as a replayed graph runs them: the second takes the lengths of the first. */
static void appends(int interleaved) {
  flashtune_kv_append_params p = good;
  p.rotary_interleaved = interleaved;
  reset();
  for (int step = 0; step < 2; step++) {
    OK(flashtune_kv_append(context, &p, NULL));
    for (int b = 0; b < BATCH; b++) {
      int length = before[b] + (step + 1) * count[b];
      CHECK(lengths[b] == length, "slot %d has %d keys instead of %d", b, lengths[b], length);
      for (int s = 0; s < count[b]; s++)
        for (int h = 0; h < HEADS; h++) {
          int key = length - count[b] + s, at = (entry[b] * CACHE + key) * HEADS + h, from = (b * NEW + s) * HEADS + h;
          check_row(k_cache + at * DIM, k_new + from * DIM, key, interleaved);
          CHECK(memcmp(v_cache + at * DIM_V, v_new + from * DIM_V, DIM_V * sizeof(float)) == 0, "values differ");
        }
      for (int h = 0; h < HEADS_Q; h++)
        check_row(q_rotated + (b * HEADS_Q + h) * DIM, q + (b * HEADS_Q + h) * DIM, length - count[b], interleaved);
    }
  }
  /* The idle slot's entry, and those of no slot. */
  const int untouched[] = {0, 2, 3};
  for (int i = 0; i < 3; i++)
    for (int at = 0; at < CACHE * HEADS * DIM; at++)
      CHECK(k_cache[untouched[i] * CACHE * HEADS * DIM + at] == CANARY, "entry %d was written", untouched[i]);
}

static void bad_arguments(void) {
  REFUSED("features is 0x2; it must be 0 or FLASHTUNE_APPEND_SLOTS", p.features = 2);
  REFUSED("seqused_new is", p.features = 0; p.seqused = NULL);
  REFUSED("cache_batch_idx is", p.features = 0; p.seqused_new = NULL; p.seqused = NULL);
  REFUSED("batch_size_cache is 5; it must be 0", p.features = 0; p.seqused_new = p.cache_batch_idx = p.seqused = NULL);
  REFUSED("batch_size_cache is 0; with cache_batch_idx", p.batch_size_cache = 0);
  REFUSED("batch_size_cache is -1", p.batch_size_cache = -1);
  REFUSED("with pages it must be 0, since block_table", p.page_size = 2; p.num_pages = 20);
  REFUSED("seqused overlaps seqused_new", p.seqused_new = lengths);
  REFUSED("seqused overlaps seqlens", p.seqused = lengths + 1);
  REFUSED("rotary_dim is 5; it must be even and from 2 to head_dim, which is 6", p.rotary_dim = 5);
  REFUSED("rotary_dim is 8", p.rotary_dim = 8);
  REFUSED("rotary_dim is -2", p.rotary_dim = -2);
  REFUSED("rotary_dtype is bf16; it must be fp32", p.rotary_dtype = FLASHTUNE_DTYPE_BF16);
  REFUSED("rotary_dtype is 0", p.rotary_dtype = 0);
  REFUSED("rotary_interleaved is 2", p.rotary_interleaved = 2);
  REFUSED("rotary_q_at_one_position is -1", p.rotary_q_at_one_position = -1);
  REFUSED("rotary_reserved is 1", p.rotary_reserved = 1);
  REFUSED("rotary_stride is 1; it must be at least 2, which is rotary_dim / 2", p.rotary_stride = 1);
  REFUSED("seqlen_rotary is 7; it must be from 8 to", p.seqlen_rotary = 7);
  REFUSED("seqlen_q is -1", p.seqlen_q = -1);
  REFUSED("num_heads_q is 0; it must be from 1 to", p.num_heads_q = 0);
  REFUSED("rotary_dtype is 3; it must be 0, since rotary_dim is 0", p.rotary_dim = 0);
  REFUSED("q_rotated overlaps q", p.q_rotated = packed(q + DIM, 1, HEADS_Q, DIM));
  REFUSED("q_rotated overlaps rotary_cos", p.rotary_cos = q_rotated);
  REFUSED("rotary_sin is", p.rotary_sin = (const char *)angles + 2);
  NEEDS("rotary_cos is NULL", p.rotary_cos = NULL);
  NEEDS("q.data is NULL; it must point to (batch, seqlen, heads, dim) = (3, 1, 3, 6)", p.q.data = NULL);
  NEEDS("cache_batch_idx is NULL", p.cache_batch_idx = NULL);
}

int main(void) {
  uint32_t state = 11;
  for (size_t i = 0; i < sizeof k_new / sizeof *k_new; i++) k_new[i] = random_float(&state);
  for (size_t i = 0; i < sizeof v_new / sizeof *v_new; i++) v_new[i] = random_float(&state);
  for (size_t i = 0; i < sizeof q / sizeof *q; i++) q[i] = random_float(&state);
  for (int at = 0; at < CACHE; at++)
    for (int i = 0; i < HALF; i++) {
      float angle = (float)at / (float)(1 + 9 * i);
      angles[at * 2 * HALF + i] = cosf(angle), angles[at * 2 * HALF + HALF + i] = sinf(angle);
    }
  context = cpu_context("");
  memset(&good, 0, sizeof good);
  good.struct_size = sizeof good;
  good.dtype = good.rotary_dtype = FLASHTUNE_DTYPE_FP32;
  good.batch_size = BATCH, good.num_heads_kv = HEADS;
  good.seqlen_new = NEW, good.seqlen_cache = CACHE;
  good.head_dim = DIM, good.head_dim_v = DIM_V;
  good.k_new = packed_input(k_new, NEW, HEADS, DIM), good.v_new = packed_input(v_new, NEW, HEADS, DIM_V);
  good.k_cache = packed(k_cache, CACHE, HEADS, DIM), good.v_cache = packed(v_cache, CACHE, HEADS, DIM_V);
  good.features = FLASHTUNE_APPEND_SLOTS;
  good.seqlens = lengths, good.seqused = lengths;
  good.seqused_new = count, good.cache_batch_idx = entry, good.batch_size_cache = ENTRIES;
  good.rotary_dim = 2 * HALF, good.rotary_stride = 2 * HALF, good.seqlen_rotary = CACHE;
  good.rotary_cos = angles, good.rotary_sin = angles + HALF;
  good.seqlen_q = 1, good.num_heads_q = HEADS_Q;
  good.q = packed_input(q, 1, HEADS_Q, DIM), good.q_rotated = packed(q_rotated, 1, HEADS_Q, DIM);

  reset();
  bad_arguments();
  CHECK(memcmp(lengths, before, sizeof lengths) == 0, "a failed call advanced a length");
  for (size_t i = 0; i < sizeof k_cache / sizeof *k_cache; i++) CHECK(k_cache[i] == CANARY, "a failed call wrote k_cache");
  appends(0);
  appends(1);

  /* q may be rotated in place. */
  flashtune_kv_append_params p = good;
  reset();
  memcpy(q_rotated, q, sizeof q);
  p.q = read_of(p.q_rotated);
  OK(flashtune_kv_append(context, &p, NULL));
  for (int b = 0; b < BATCH; b++) check_row(q_rotated + b * HEADS_Q * DIM, q + b * HEADS_Q * DIM, before[b], 0);

  /* A prepared class needs no pointers and serves a sealed context. */
  OK(flashtune_context_seal(context));
  OK(flashtune_kv_append(context, &p, NULL));
  p.rotary_dim = p.rotary_stride = p.seqlen_rotary = p.seqlen_q = p.num_heads_q = 0;
  p.rotary_cos = p.rotary_sin = NULL, p.q.data = p.q_rotated.data = NULL, p.rotary_dtype = 0;
  FAILS(flashtune_kv_append(context, &p, NULL), FLASHTUNE_STATUS_NOT_PREPARED, "in slots");
  OK(flashtune_context_destroy(context));
  return 0;
}
