/* Serves random batches over a paged K/V cache in a sealed context, on the CPU backend. One call
 * prepares every batch that may come; then nothing is prepared any more.
 * usage: serving [LAUNCHES] */
#include <flashtune.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { SLOTS = 8, HEADS = 8, GROUP = 4, DIM = 32, PAGE = 16, PAGES = 16, CHUNK = 48 };
enum { HEADS_KV = HEADS / GROUP, LONGEST = PAGES * PAGE, ROWS = SLOTS * CHUNK, KEYS = SLOTS * LONGEST };

static float q[ROWS][HEADS][DIM], out[ROWS][HEADS][DIM]; /* the tokens of a batch, end to end */
static float k[KEYS][HEADS_KV][DIM], v[KEYS][HEADS_KV][DIM];
static int32_t block_table[SLOTS][PAGES]; /* the pages of each slot */
static int32_t cu_seqlens_q[SLOTS + 1], seqused_k[SLOTS];

static void check(int32_t status) {
  if (status == FLASHTUNE_STATUS_OK) return;
  fprintf(stderr, "%s: %s\n", flashtune_status_string(status), flashtune_last_error());
  exit(1);
}

static float value(void) { return (float)(rand() % 257 - 128) / 128; }

/* The largest batch: a chunk for each slot. Smaller ones set the sizes anew. */
static flashtune_forward_params largest(void) {
  flashtune_forward_params p = {.struct_size = sizeof p, .dtype = FLASHTUNE_DTYPE_FP32};
  p.causal = FLASHTUNE_CAUSAL_BOTTOM_RIGHT;
  p.batch_size = SLOTS, p.seqlen_q = CHUNK, p.seqlen_k = LONGEST;
  p.num_heads_q = HEADS, p.num_heads_kv = HEADS_KV, p.head_dim = DIM, p.head_dim_v = DIM;
  p.features = FLASHTUNE_FEATURE_PAGED | FLASHTUNE_FEATURE_SEQUSED_K | FLASHTUNE_FEATURE_CU_SEQLENS_Q;
  p.block_table = block_table[0], p.block_table_stride = PAGES, p.page_size = PAGE, p.num_pages = SLOTS * PAGES;
  p.cu_seqlens_q = cu_seqlens_q, p.seqused_k = seqused_k, p.total_q = ROWS;
  p.q = (flashtune_const_tensor){q, 0, HEADS * DIM, DIM};
  p.k = (flashtune_const_tensor){k, PAGE * HEADS_KV * DIM, HEADS_KV * DIM, DIM};
  p.v = (flashtune_const_tensor){v, PAGE * HEADS_KV * DIM, HEADS_KV * DIM, DIM};
  p.out = (flashtune_tensor){out, 0, HEADS * DIM, DIM};
  return p;
}

/* Decoding: one token for each sequence, without cu_seqlens_q. Else chunks beside single tokens. */
static flashtune_forward_params random_batch(void) {
  flashtune_forward_params p = largest();
  int decodes = rand() % 2;
  p.batch_size = 1 + rand() % SLOTS;
  p.seqlen_q = 0;
  for (int slot = 0; slot < p.batch_size; slot++) {
    int rows = decodes || rand() % 2 ? 1 : 1 + rand() % CHUNK;
    cu_seqlens_q[slot + 1] = cu_seqlens_q[slot] + rows;
    seqused_k[slot] = rows + rand() % (LONGEST - rows + 1);
    if (rows > p.seqlen_q) p.seqlen_q = rows;
  }
  p.total_q = cu_seqlens_q[p.batch_size];
  if (decodes) {
    p.features &= ~(uint64_t)FLASHTUNE_FEATURE_CU_SEQLENS_Q;
    p.cu_seqlens_q = NULL, p.total_q = 0;
    p.q.stride_batch = p.out.stride_batch = HEADS * DIM;
  }
  return p;
}

/* The error of a random row of a batch against plain arithmetic. */
static double error_of_a_row(const flashtune_forward_params *p) {
  int slot = (int)(rand() % p->batch_size), rows = cu_seqlens_q[slot + 1] - cu_seqlens_q[slot];
  int row = rand() % rows, head = rand() % HEADS, token = cu_seqlens_q[slot] + row;
  double weights[LONGEST], sum = 0, worst = 0;
  int seen = seqused_k[slot] - rows + row + 1; /* the last query sees the last key */
  for (int j = 0; j < seen; j++) {
    double score = 0;
    int key = block_table[slot][j / PAGE] * PAGE + j % PAGE;
    for (int d = 0; d < DIM; d++) score += (double)q[token][head][d] * k[key][head / GROUP][d];
    sum += weights[j] = exp(score / sqrt(DIM));
  }
  for (int d = 0; d < DIM; d++) {
    double expected = 0;
    for (int j = 0; j < seen; j++) {
      expected += weights[j] / sum * v[block_table[slot][j / PAGE] * PAGE + j % PAGE][head / GROUP][d];
    }
    worst = fmax(worst, fabs(expected - out[token][head][d]));
  }
  return worst;
}

int main(int argc, char **argv) {
  int launches = argc > 1 ? atoi(argv[1]) : 1000;
  flashtune_context_options options = {.struct_size = sizeof options, .backend = FLASHTUNE_BACKEND_CPU};
  flashtune_context *context;
  check(flashtune_context_create(&options, &context));

  flashtune_forward_params most = largest();
  flashtune_range range = {.struct_size = sizeof range, .forward = &most};
  range.optional_features = FLASHTUNE_FEATURE_CU_SEQLENS_Q;
  flashtune_range_info info = {.struct_size = sizeof info};
  check(flashtune_prepare_range(context, &range, &info));
  check(flashtune_context_seal(context));
  printf("prepared  %d classes, %d configs, %d kernels in %.0f ms\n", (int)info.num_classes, (int)info.num_configs,
         (int)info.num_kernels, info.milliseconds);

  for (int i = 0; i < ROWS * HEADS * DIM; i++) (&q[0][0][0])[i] = value();
  for (int i = 0; i < KEYS * HEADS_KV * DIM; i++) (&k[0][0][0])[i] = value(), (&v[0][0][0])[i] = value();
  for (int i = 0; i < SLOTS * PAGES; i++) (&block_table[0][0])[i] = i * 5 % (SLOTS * PAGES);
  double worst = 0;
  for (int i = 0; i < launches; i++) {
    flashtune_forward_params batch = random_batch();
    check(flashtune_forward(context, &batch, NULL, 0, NULL));
    worst = fmax(worst, error_of_a_row(&batch));
  }
  printf("launches  %d, none of which had to prepare\nerror     %.1e\n", launches, worst);
  check(flashtune_context_destroy(context));
  return worst < 1e-5 ? 0 : 1;
}
