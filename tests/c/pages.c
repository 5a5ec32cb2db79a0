/* The paged K/V cache gives the same bits as contiguous keys. Every wrong argument gets a message
 * that names it, and no output is written. */
#include "attention.h"
#include "refused.h"

#include <limits.h>

static flashtune_context *context;
static Attention a;
static flashtune_forward_params good;

/* Pages hold 3 keys, so a sequence of 7 keys takes 3 pages. k and v have 7 pages; no sequence uses
 * the last one. */
enum { PAGE_SIZE = 3, PAGES = 7, OF_A_SEQUENCE = 3 };
static const int32_t table[2 * OF_A_SEQUENCE] = {4, 0, 3, 1, 5, 2};

static void bad_arguments(void) {
  static const int32_t below[6] = {4, 0, -1, 1, 5, 2}, above[6] = {4, 0, 3, 7, 5, 2};
  REFUSED("block_table is", p.features = 0; p.page_size = p.num_pages = 0);
  REFUSED("page_size is 3; it must be 0, since features has no FLASHTUNE_FEATURE_PAGED",
          p.features = 0; p.block_table = NULL);
  REFUSED("num_pages is 7; it must be 0", p.features = 0; p.block_table = NULL; p.page_size = 0);
  REFUSED("page_size is 0; it must be from 1 to", p.page_size = 0);
  REFUSED("page_size is -3", p.page_size = -3);
  REFUSED("window is 3", p.window = 3; p.page_size = 0);
  REFUSED("num_pages is 0; it must be from 1 to 2147483647", p.num_pages = 0);
  REFUSED("num_pages is 2147483648", p.num_pages = (int64_t)1 << 31);
  REFUSED("block_table_stride is 2; it must be at least 3", p.block_table_stride = 2);
  REFUSED("block_table_stride is 0", p.block_table_stride = 0);
  REFUSED("block_table at", p.block_table_stride = INT64_MAX);
  REFUSED("block_table is", p.block_table = (const int32_t *)((const char *)table + 2));
  REFUSED("paged and packed end to end", p.features |= FLASHTUNE_FEATURE_CU_SEQLENS_K; p.total_k = 12);
  REFUSED("k and v are paged and dropout_p is not 0", p.dropout_p = 0.5f);
  REFUSED("out overlaps block_table", p.block_table = p.out.data);
  REFUSED("k.stride_batch is -48", p.k.stride_batch = -48);
  NEEDS("k.data is NULL; it must point to (pages, page_size, heads, dim) = (7, 3, 2, 8) fp32", p.k.data = NULL);
  NEEDS("block_table is NULL; it must point to (2, 3) int32 values", p.block_table = NULL);
  NEEDS("block_table[0][2] is -1; it must be from 0 to num_pages - 1, which is 6", p.block_table = below);
  NEEDS("block_table[1][0] is 7", p.block_table = above);
  /* The backward pass has no pages. */
  flashtune_backward_params backward = a.backward;
  backward.features = FLASHTUNE_FEATURE_PAGED;
  FAILS(flashtune_backward_supported(context, &backward), invalid, "0x400 is no FLASHTUNE_FEATURE_* of the backward pass");
}

/* Copies the rows of a tensor of keys to the pages in the block table; the rest becomes NAN. */
static float *in_pages(const float *rows, int64_t row) {
  float *pages = malloc(PAGES * PAGE_SIZE * (size_t)row * sizeof *pages);
  CHECK(pages != NULL, "no memory");
  for (int64_t i = 0; i < PAGES * PAGE_SIZE * row; i++) pages[i] = NAN;
  for (int64_t b = 0; b < a.shape.batch_size; b++)
    for (int64_t key = 0; key < a.shape.seqlen_k; key++) {
      int64_t place = table[b * OF_A_SEQUENCE + key / PAGE_SIZE] * PAGE_SIZE + key % PAGE_SIZE;
      memcpy(pages + place * row, rows + (b * a.shape.seqlen_k + key) * row, (size_t)row * sizeof *pages);
    }
  return pages;
}

static void same_bits(const flashtune_forward_params *contiguous, const flashtune_forward_params *paged) {
  float *out = malloc((size_t)a.count[OUT] * sizeof *out), *lse = malloc((size_t)a.count[LSE] * sizeof *lse);
  CHECK(out != NULL && lse != NULL, "no memory");
  reset_outputs(&a);
  OK(flashtune_forward(context, contiguous, NULL, 0, NULL));
  memcpy(out, a.data[OUT], (size_t)a.count[OUT] * sizeof *out);
  memcpy(lse, a.data[LSE], (size_t)a.count[LSE] * sizeof *lse);
  reset_outputs(&a);
  OK(flashtune_forward(context, paged, NULL, 0, NULL));
  CHECK(memcmp(out, a.data[OUT], (size_t)a.count[OUT] * sizeof *out) == 0, "out differs");
  CHECK(memcmp(lse, a.data[LSE], (size_t)a.count[LSE] * sizeof *lse) == 0, "lse differs");
  check_guards(&a);
  free(out);
  free(lse);
}

int main(void) {
  const Shape shape = {2, 4, 2, 5, 7, 8, 4, FLASHTUNE_CAUSAL_BOTTOM_RIGHT};
  a = make_attention(shape, 5);
  context = cpu_context("");
  float *k = in_pages(a.data[K], shape.num_heads_kv * shape.head_dim);
  float *v = in_pages(a.data[V], shape.num_heads_kv * shape.head_dim_v);
  good = a.forward;
  good.features = FLASHTUNE_FEATURE_PAGED;
  good.block_table = table, good.block_table_stride = OF_A_SEQUENCE;
  good.page_size = PAGE_SIZE, good.num_pages = PAGES;
  good.k = packed_input(k, PAGE_SIZE, shape.num_heads_kv, shape.head_dim);
  good.v = packed_input(v, PAGE_SIZE, shape.num_heads_kv, shape.head_dim_v);

  reset_outputs(&a);
  bad_arguments();
  for (int64_t i = 0; i < a.count[OUT]; i++) CHECK(a.data[OUT][i] == CANARY, "a failed call wrote out");
  same_bits(&a.forward, &good);

  /* Entries past a sequence's length are not read. */
  static const int32_t used[2] = {7, 2}, short_table[6] = {4, 0, 3, 1, 99, -1};
  flashtune_forward_params contiguous = a.forward, paged = good;
  contiguous.features |= FLASHTUNE_FEATURE_SEQUSED_K, paged.features |= FLASHTUNE_FEATURE_SEQUSED_K;
  contiguous.seqused_k = paged.seqused_k = used;
  paged.block_table = short_table;
  same_bits(&contiguous, &paged);

  /* A single sequence does not use the table's stride, and a call for shapes needs neither stride
   * nor table. */
  paged = good;
  paged.batch_size = 1, paged.block_table_stride = 0;
  OK(flashtune_forward_supported(context, &paged));
  paged = good;
  paged.block_table = NULL, paged.block_table_stride = 0;
  OK(flashtune_forward_supported(context, &paged));
  free(k);
  free(v);
  free_attention(&a);
  OK(flashtune_context_destroy(context));
  return 0;
}
