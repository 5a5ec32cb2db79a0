/* Keys in entries of a cache that an array names, behind padding, give the bits of the same keys
 * without either. Every wrong argument gets a message that names it, and no output is written. */
#include "attention.h"
#include "refused.h"

static flashtune_context *context;
static Attention a;
static flashtune_forward_params good;

/* Two sequences of up to 7 keys in a cache with 4 entries of 10 rows. */
enum { ENTRIES = 4, ROWS = 10 };
static const int32_t entry[2] = {3, 1}, leftpad[2] = {2, 0}, used[2] = {9, 4};
static const int32_t keys[2] = {7, 4};

static void bad_arguments(void) {
  static const int32_t below[2] = {3, -1}, above[2] = {4, 1}, past[2] = {2, 5}, negative[2] = {-2, 0}, long_used[2] = {9, 11};
  const uint64_t index = FLASHTUNE_FEATURE_CACHE_BATCH_IDX, padding = FLASHTUNE_FEATURE_LEFTPAD_K;
  REFUSED("cache_batch_idx is", p.features &= ~index; p.batch_size_cache = 0);
  REFUSED("batch_size_cache is 4; it must be 0", p.features &= ~index; p.cache_batch_idx = NULL);
  REFUSED("leftpad_k is", p.features &= ~padding);
  REFUSED("batch_size_cache is 0; it must be from 1 to 2147483647", p.batch_size_cache = 0);
  REFUSED("cache_batch_idx is", p.cache_batch_idx = (const int32_t *)((const char *)entry + 2));
  REFUSED("out overlaps leftpad_k", p.leftpad_k = p.out.data);
  REFUSED("without cu_seqlens_k", p.features |= FLASHTUNE_FEATURE_CU_SEQLENS_K; p.total_k = 12);
  REFUSED("num_splits is -1", p.num_splits = -1);
  REFUSED("num_splits is 2 and batch_invariant 1", p.num_splits = 2; p.batch_invariant = 1);
  NEEDS("k.data is NULL; it must point to (batch, seqlen, heads, dim) = (4, 10, 2, 8)", p.k.data = NULL);
  NEEDS("cache_batch_idx is NULL; it must point to 2 int32 values", p.cache_batch_idx = NULL);
  NEEDS("leftpad_k is NULL", p.leftpad_k = NULL);
  NEEDS("cache_batch_idx[1] is -1; it must be from 0 to batch_size_cache - 1, which is 3", p.cache_batch_idx = below);
  NEEDS("cache_batch_idx[0] is 4", p.cache_batch_idx = above);
  NEEDS("leftpad_k[1] is 5; it must be from 0 to seqused_k[1], which is 4", p.leftpad_k = past);
  NEEDS("leftpad_k[0] is -2", p.leftpad_k = negative);
  NEEDS("seqused_k[1] is 11; it must be from 0 to the sequence's length, 10", p.seqused_k = long_used);
  flashtune_forward_params paged = good;
  paged.features |= FLASHTUNE_FEATURE_PAGED, paged.page_size = 5, paged.num_pages = 8;
  FAILS(flashtune_forward_supported(context, &paged), FLASHTUNE_STATUS_UNSUPPORTED, "k and v are paged and cache_batch_idx or leftpad_k is used");
  flashtune_backward_params backward = a.backward;
  backward.features = padding;
  FAILS(flashtune_backward_supported(context, &backward), invalid, "0x4000 is no FLASHTUNE_FEATURE_* of the backward pass");
}

/* Copies the used rows of a tensor of keys to their places in the cache; the rest becomes NAN. */
static float *in_cache(const float *rows, int64_t row) {
  float *cache = malloc(ENTRIES * ROWS * (size_t)row * sizeof *cache);
  CHECK(cache != NULL, "no memory");
  for (int64_t i = 0; i < ENTRIES * ROWS * row; i++) cache[i] = NAN;
  for (int64_t b = 0; b < 2; b++)
    memcpy(cache + (entry[b] * ROWS + leftpad[b]) * row, rows + b * a.shape.seqlen_k * row, (size_t)(keys[b] * row) * sizeof *cache);
  return cache;
}

int main(void) {
  const Shape shape = {2, 4, 2, 3, 7, 8, 4, FLASHTUNE_CAUSAL_BOTTOM_RIGHT};
  a = make_attention(shape, 9);
  context = cpu_context("");
  float *k = in_cache(a.data[K], shape.num_heads_kv * shape.head_dim);
  float *v = in_cache(a.data[V], shape.num_heads_kv * shape.head_dim_v);
  good = a.forward;
  good.features = FLASHTUNE_FEATURE_CACHE_BATCH_IDX | FLASHTUNE_FEATURE_LEFTPAD_K | FLASHTUNE_FEATURE_SEQUSED_K;
  good.seqlen_k = ROWS, good.batch_size_cache = ENTRIES;
  good.cache_batch_idx = entry, good.leftpad_k = leftpad, good.seqused_k = used;
  good.k = packed_input(k, ROWS, shape.num_heads_kv, shape.head_dim);
  good.v = packed_input(v, ROWS, shape.num_heads_kv, shape.head_dim_v);

  reset_outputs(&a);
  bad_arguments();
  for (int64_t i = 0; i < a.count[OUT]; i++) CHECK(a.data[OUT][i] == CANARY, "a failed call wrote out");

  flashtune_forward_params plain = a.forward;
  plain.features = FLASHTUNE_FEATURE_SEQUSED_K, plain.seqused_k = keys;
  OK(flashtune_forward(context, &plain, NULL, 0, NULL));
  float *out = malloc((size_t)a.count[OUT] * sizeof *out);
  CHECK(out != NULL, "no memory");
  memcpy(out, a.data[OUT], (size_t)a.count[OUT] * sizeof *out);
  /* A limit of the splits changes nothing on the host, which never splits. */
  for (int64_t num_splits = 0; num_splits < 3; num_splits++) {
    good.num_splits = num_splits;
    reset_outputs(&a);
    OK(flashtune_forward(context, &good, NULL, 0, NULL));
    CHECK(memcmp(out, a.data[OUT], (size_t)a.count[OUT] * sizeof *out) == 0, "out differs");
    check_guards(&a);
  }
  free(out);
  free(k);
  free(v);
  free_attention(&a);
  OK(flashtune_context_destroy(context));
  return 0;
}
