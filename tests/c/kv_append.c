/* Appending to a K/V cache, contiguous and paged: new keys go behind those of each sequence, and
 * sequences without room are left out. Every wrong argument gets a message that names it, and no
 * output is written. */
#define OPERATION flashtune_kv_append
#include "attention.h"
#include "refused.h"

#include <limits.h>

static flashtune_context *context;
static flashtune_kv_append_params good;

/* Two new keys for each of four sequences, with two heads. The cache has seven keys a sequence, or
 * seven pages of three keys. */
enum { BATCH = 4, NEW = 2, HEADS = 2, DIM = 6, DIM_V = 4, CACHE = 7, PAGE_SIZE = 3, PAGES = 7, OF_A_SEQUENCE = 3 };
static const int32_t seqlens[BATCH] = {2, 6, 5, -1};
static const int32_t table[BATCH * OF_A_SEQUENCE] = {4, 0, 9, 1, 1, 1, 8, 5, 2, 6, 6, 6};
/* The second sequence has no room, and the length of the fourth is invalid. */
static const int32_t used[BATCH] = {4, 6, 7, 0};

static float k_new[BATCH * NEW * HEADS * DIM], v_new[BATCH * NEW * HEADS * DIM_V];
/* The size of a contiguous cache, which is larger than a paged one, with guards. */
static float k_cache[BATCH * CACHE * HEADS * DIM + 2 * GUARD], v_cache[BATCH * CACHE * HEADS * DIM_V + 2 * GUARD];
static int32_t seqused[BATCH];

static void reset(void) {
  for (size_t i = 0; i < sizeof k_cache / sizeof *k_cache; i++) k_cache[i] = CANARY;
  for (size_t i = 0; i < sizeof v_cache / sizeof *v_cache; i++) v_cache[i] = CANARY;
  for (int b = 0; b < BATCH; b++) seqused[b] = -7;
}

static flashtune_kv_append_params in_a_row(void) {
  flashtune_kv_append_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.dtype = FLASHTUNE_DTYPE_FP32;
  p.batch_size = BATCH, p.num_heads_kv = HEADS;
  p.seqlen_new = NEW, p.seqlen_cache = CACHE;
  p.head_dim = DIM, p.head_dim_v = DIM_V;
  p.k_new = packed_input(k_new, NEW, HEADS, DIM), p.v_new = packed_input(v_new, NEW, HEADS, DIM_V);
  p.k_cache = packed(k_cache + GUARD, CACHE, HEADS, DIM), p.v_cache = packed(v_cache + GUARD, CACHE, HEADS, DIM_V);
  p.seqlens = seqlens, p.seqused = seqused;
  return p;
}

static flashtune_kv_append_params in_pages(void) {
  flashtune_kv_append_params p = in_a_row();
  p.k_cache = packed(k_cache + GUARD, PAGE_SIZE, HEADS, DIM), p.v_cache = packed(v_cache + GUARD, PAGE_SIZE, HEADS, DIM_V);
  p.block_table = table, p.block_table_stride = OF_A_SEQUENCE;
  p.page_size = PAGE_SIZE, p.num_pages = PAGES;
  return p;
}

/* The cache holds the new keys of the sequences with room, and the canary everywhere else. */
static void check_cache(const flashtune_kv_append_params *p, const float *cache, size_t count, const float *new, int dim) {
  static int is_new[sizeof k_cache / sizeof *k_cache];
  memset(is_new, 0, sizeof is_new);
  for (int b = 0; b < BATCH; b++)
    for (int s = 0; used[b] == seqlens[b] + NEW && s < NEW; s++) {
      int key = seqlens[b] + s, row = b * CACHE + key;
      if (p->page_size) row = table[b * OF_A_SEQUENCE + key / PAGE_SIZE] * PAGE_SIZE + key % PAGE_SIZE;
      for (int i = 0; i < HEADS * dim; i++) {
        int at = GUARD + row * HEADS * dim + i;
        is_new[at] = 1;
        CHECK(cache[at] == new[(b * NEW + s) * HEADS * dim + i], "sequence %d, new key %d, element %d", b, s, i);
      }
    }
  for (size_t i = 0; i < count; i++) CHECK(is_new[i] || cache[i] == CANARY, "element %zu was written", i);
}

static void appends(const flashtune_kv_append_params *p) {
  reset();
  OK(flashtune_kv_append(context, p, NULL));
  check_cache(p, k_cache, sizeof k_cache / sizeof *k_cache, k_new, DIM);
  check_cache(p, v_cache, sizeof v_cache / sizeof *v_cache, v_new, DIM_V);
  for (int b = 0; b < BATCH; b++) CHECK(seqused[b] == (p->seqused ? used[b] : -7), "seqused[%d] is %d", b, seqused[b]);
}

static void bad_arguments(void) {
  FAILS(flashtune_kv_append(context, NULL, NULL), invalid, "params is NULL");
  FAILS(flashtune_kv_append(NULL, &good, NULL), invalid, "context is NULL");
  FAILS(flashtune_kv_append_prepare(NULL, &good), invalid, "context is NULL");
  REFUSED("struct_size is 8", p.struct_size = 8);
  REFUSED("dtype is 4", p.dtype = 4);
  REFUSED("reserved is 1", p.reserved = 1);
  REFUSED("batch_size is -1", p.batch_size = -1);
  REFUSED("num_heads_kv is 0", p.num_heads_kv = 0);
  REFUSED("seqlen_new is -2", p.seqlen_new = -2);
  REFUSED("seqlen_cache is 2147479553", p.seqlen_cache = INT_MAX - 4094);
  REFUSED("head_dim is 0", p.head_dim = 0);
  REFUSED("head_dim_v is 513", p.head_dim_v = 513);
  REFUSED("batch_size x seqlen_new x num_heads_kv", p.batch_size = p.seqlen_new = p.num_heads_kv = 1 << 30);
  REFUSED("k_new.stride_head is -6", p.k_new.stride_head = -6);
  REFUSED("v_new at", p.v_new.stride_batch = INT64_MAX);
  REFUSED("k_cache is written", p.k_cache.stride_seqlen = 0);
  REFUSED("v_cache is written", p.v_cache.stride_head = DIM_V - 1);
  REFUSED("k_cache overlaps k_new", p.k_cache.data = k_new);
  REFUSED("k_cache overlaps v_cache", p.v_cache.data = k_cache + GUARD);
  REFUSED("v_cache overlaps v_new", p.v_new.data = v_cache + GUARD);
  REFUSED("seqused overlaps seqlens", p.seqused = (int32_t *)(uintptr_t)seqlens);
  REFUSED("k_cache overlaps seqused", p.seqused = (int32_t *)(void *)(k_cache + GUARD));
  REFUSED("seqlens is", p.seqlens = (const int32_t *)((const char *)seqlens + 2));
  REFUSED("seqused is", p.seqused = (int32_t *)((char *)seqused + 1));
  NEEDS("k_new.data is NULL", p.k_new.data = NULL);
  NEEDS("v_cache.data is NULL", p.v_cache.data = NULL);
  NEEDS("seqlens is NULL; it must point to 4 int32 values", p.seqlens = NULL);
}

static void bad_pages(void) {
  REFUSED("page_size is -3; it must be from 1 to", p.page_size = -3);
  REFUSED("num_pages is 0; it must be from 1 to 2147483647", p.num_pages = 0);
  REFUSED("num_pages is 7; it must be 0, since page_size is 0", p.page_size = 0; p.block_table = NULL);
  REFUSED("it must be NULL, since page_size is 0", p.page_size = p.num_pages = 0);
  REFUSED("block_table_stride is 2; it must be at least 3, since seqlen_cache 7 takes 3 pages of 3 keys",
          p.block_table_stride = 2);
  REFUSED("block_table at", p.block_table_stride = INT64_MAX);
  REFUSED("cache entries x keys of each x num_heads_kv", p.num_pages = p.page_size = p.num_heads_kv = 1 << 30);
  REFUSED("seqused overlaps block_table", p.seqused = (int32_t *)(uintptr_t)(table + 3));
  NEEDS("block_table is NULL; it must point to (4, 3) int32 values", p.block_table = NULL);
  NEEDS("k_cache.data is NULL; it must point to (pages, page_size, heads, dim) = (7, 3, 2, 6)", p.k_cache.data = NULL);
}

int main(void) {
  uint32_t state = 5;
  for (size_t i = 0; i < sizeof k_new / sizeof *k_new; i++) k_new[i] = random_float(&state);
  for (size_t i = 0; i < sizeof v_new / sizeof *v_new; i++) v_new[i] = random_float(&state);
  context = cpu_context("");

  reset();
  good = in_a_row();
  bad_arguments();
  good = in_pages();
  bad_arguments();
  bad_pages();
  for (size_t i = 0; i < sizeof k_cache / sizeof *k_cache; i++) CHECK(k_cache[i] == CANARY, "a failed call wrote k_cache");
  for (size_t i = 0; i < sizeof v_cache / sizeof *v_cache; i++) CHECK(v_cache[i] == CANARY, "a failed call wrote v_cache");
  for (int b = 0; b < BATCH; b++) CHECK(seqused[b] == -7, "a failed call wrote seqused");

  flashtune_kv_append_params row = in_a_row(), pages = in_pages();
  appends(&row);
  appends(&pages);
  pages.seqused = NULL;
  appends(&pages);

  /* Without new keys only lengths are written, and without a sequence nothing is. */
  flashtune_kv_append_params p = in_pages();
  reset();
  p.seqlen_new = 0;
  p.k_new.data = p.v_new.data = p.k_cache.data = p.v_cache.data = NULL, p.block_table = NULL;
  OK(flashtune_kv_append(context, &p, NULL));
  for (int b = 0; b < BATCH; b++) CHECK(seqused[b] == (seqlens[b] < 0 ? 0 : seqlens[b]), "seqused[%d] is %d", b, seqused[b]);
  p.batch_size = 0, p.seqlens = NULL;
  OK(flashtune_kv_append(context, &p, NULL));

  /* A sealed context still serves prepared problems and refuses others. */
  OK(flashtune_context_seal(context));
  appends(&row);
  row.dtype = FLASHTUNE_DTYPE_BF16;
  FAILS(flashtune_kv_append(context, &row, NULL), FLASHTUNE_STATUS_NOT_PREPARED, "flashtune_kv_append_prepare");
  OK(flashtune_context_destroy(context));
  return 0;
}
