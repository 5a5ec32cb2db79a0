/* A small fp32 attention problem in C: packed buffers between guards, and the same passes in naive
 * double arithmetic to compare with. */
#ifndef ATTENTION_H
#define ATTENTION_H

#include "check.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>

typedef struct Shape {
  int64_t batch_size, num_heads_q, num_heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v;
  int32_t causal;
} Shape;

enum { Q, K, V, OUT, LSE, DOUT, DQ, DK, DV, BUFFERS };

/* Floats on either side of every buffer that no call may change. */
enum { GUARD = 16 };
#define CANARY 1234.5f

typedef struct Attention {
  Shape shape;
  float *whole[BUFFERS]; /* with guards */
  float *data[BUFFERS];
  int64_t count[BUFFERS];
  flashtune_forward_params forward;
  flashtune_backward_params backward;
} Attention;

static inline flashtune_tensor packed(void *data, int64_t seqlen, int64_t heads, int64_t dim) {
  flashtune_tensor tensor = {data, seqlen * heads * dim, heads * dim, dim};
  return tensor;
}

static inline flashtune_const_tensor packed_input(const void *data, int64_t seqlen, int64_t heads, int64_t dim) {
  flashtune_const_tensor tensor = {data, seqlen * heads * dim, heads * dim, dim};
  return tensor;
}

static inline float random_float(uint32_t *state) {
  *state = *state * 1664525u + 1013904223u;
  return (float)(*state >> 8) / (float)(1 << 24) * 2.0f - 1.0f;
}

/* Outputs start as the canary, so a failed call that writes one is noticed. */
static inline void reset_outputs(Attention *a) {
  static const int outputs[] = {OUT, LSE, DQ, DK, DV};
  for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++)
    for (int64_t j = 0; j < a->count[outputs[i]]; j++) a->data[outputs[i]][j] = CANARY;
}

static inline Attention make_attention(Shape s, uint32_t seed) {
  Attention a;
  memset(&a, 0, sizeof a);
  a.shape = s;
  int64_t rows_q = s.batch_size * s.seqlen_q * s.num_heads_q;
  int64_t rows_k = s.batch_size * s.seqlen_k * s.num_heads_kv;
  a.count[Q] = a.count[DQ] = rows_q * s.head_dim;
  a.count[K] = a.count[DK] = rows_k * s.head_dim;
  a.count[V] = a.count[DV] = rows_k * s.head_dim_v;
  a.count[OUT] = a.count[DOUT] = rows_q * s.head_dim_v;
  a.count[LSE] = rows_q;
  for (int b = 0; b < BUFFERS; b++) {
    int64_t whole = a.count[b] + 2 * GUARD;
    a.whole[b] = malloc((size_t)whole * sizeof(float));
    CHECK(a.whole[b] != NULL, "no memory");
    a.data[b] = a.whole[b] + GUARD;
    for (int64_t i = 0; i < whole; i++) a.whole[b][i] = CANARY;
  }
  for (int b = Q; b <= DOUT; b++)
    for (int64_t i = 0; (b <= V || b == DOUT) && i < a.count[b]; i++) a.data[b][i] = random_float(&seed);

  flashtune_forward_params *f = &a.forward;
  flashtune_backward_params *g = &a.backward;
  f->struct_size = sizeof *f;
  f->dtype = FLASHTUNE_DTYPE_FP32;
  f->causal = s.causal;
  f->batch_size = s.batch_size;
  f->num_heads_q = s.num_heads_q;
  f->num_heads_kv = s.num_heads_kv;
  f->seqlen_q = s.seqlen_q;
  f->seqlen_k = s.seqlen_k;
  f->head_dim = s.head_dim;
  f->head_dim_v = s.head_dim_v;
  f->q = packed_input(a.data[Q], s.seqlen_q, s.num_heads_q, s.head_dim);
  f->k = packed_input(a.data[K], s.seqlen_k, s.num_heads_kv, s.head_dim);
  f->v = packed_input(a.data[V], s.seqlen_k, s.num_heads_kv, s.head_dim_v);
  f->out = packed(a.data[OUT], s.seqlen_q, s.num_heads_q, s.head_dim_v);
  f->lse = a.data[LSE];
  /* Both structs have the same fields up to lse. */
  memcpy(g, f, offsetof(flashtune_forward_params, features));
  g->struct_size = sizeof *g;
  g->dout = packed_input(a.data[DOUT], s.seqlen_q, s.num_heads_q, s.head_dim_v);
  g->dq = packed(a.data[DQ], s.seqlen_q, s.num_heads_q, s.head_dim);
  g->dk = packed(a.data[DK], s.seqlen_k, s.num_heads_kv, s.head_dim);
  g->dv = packed(a.data[DV], s.seqlen_k, s.num_heads_kv, s.head_dim_v);
  return a;
}

static inline void check_guards(const Attention *a) {
  for (int b = 0; b < BUFFERS; b++)
    for (int i = 0; i < GUARD; i++)
      CHECK(a->whole[b][i] == CANARY && a->data[b][a->count[b] + i] == CANARY, "buffer %d written outside", b);
}

static inline void free_attention(Attention *a) {
  check_guards(a);
  for (int b = 0; b < BUFFERS; b++) free(a->whole[b]);
}

/* Workspace of a backward pass, aligned to 256 bytes; the caller frees it. */
static inline void *make_workspace(uint64_t bytes) {
  void *workspace = NULL;
  CHECK(posix_memalign(&workspace, 256, bytes ? bytes : 256) == 0, "no memory");
  return workspace;
}

/* Both passes in double. Fills results[OUT..DV] with malloced arrays, and with NULL for inputs. */
static inline void reference(const Attention *a, double *results[BUFFERS]) {
  Shape s = a->shape;
  int64_t hq = s.num_heads_q, hk = s.num_heads_kv, sq = s.seqlen_q, sk = s.seqlen_k, d = s.head_dim, dv = s.head_dim_v;
  double scale = 1.0 / sqrt((double)d), *p = malloc((size_t)(sk + 1) * sizeof *p);
  for (int b = 0; b < BUFFERS; b++) {
    int is_result = b == OUT || b == LSE || b >= DQ;
    results[b] = is_result ? calloc((size_t)a->count[b] + 1, sizeof(double)) : NULL;
  }
  for (int64_t b = 0; b < s.batch_size; b++)
    for (int64_t h = 0; h < hq; h++)
      for (int64_t i = 0; i < sq; i++) {
        int64_t kv = h / (hq / hk), seen = sk, row_q = (b * sq + i) * hq + h;
        if (s.causal == FLASHTUNE_CAUSAL_BOTTOM_RIGHT) seen = i + sk - sq + 1;
        if (s.causal == FLASHTUNE_CAUSAL_TOP_LEFT) seen = i + 1;
        seen = seen < 0 ? 0 : seen > sk ? sk : seen;
        const float *q = a->data[Q] + row_q * d, *dout = a->data[DOUT] + row_q * dv;
        double largest = -INFINITY, sum = 0, delta = 0;
        for (int64_t j = 0; j < seen; j++) {
          const float *k = a->data[K] + ((b * sk + j) * hk + kv) * d;
          p[j] = 0;
          for (int64_t c = 0; c < d; c++) p[j] += (double)q[c] * k[c] * scale;
          largest = p[j] > largest ? p[j] : largest;
        }
        for (int64_t j = 0; j < seen; j++) sum += p[j] = exp(p[j] - largest);
        for (int64_t j = 0; j < seen; j++) p[j] /= sum;
        results[LSE][(b * hq + h) * sq + i] = seen ? largest + log(sum) : -INFINITY;
        double *out = results[OUT] + row_q * dv;
        for (int64_t j = 0; j < seen; j++)
          for (int64_t c = 0; c < dv; c++)
            out[c] += p[j] * a->data[V][((b * sk + j) * hk + kv) * dv + c];
        for (int64_t c = 0; c < dv; c++) delta += out[c] * dout[c];
        for (int64_t j = 0; j < seen; j++) {
          int64_t row_k = (b * sk + j) * hk + kv;
          double dp = 0;
          for (int64_t c = 0; c < dv; c++) {
            dp += (double)dout[c] * a->data[V][row_k * dv + c];
            results[DV][row_k * dv + c] += p[j] * dout[c];
          }
          double ds = p[j] * (dp - delta) * scale;
          for (int64_t c = 0; c < d; c++) {
            results[DQ][row_q * d + c] += ds * a->data[K][row_k * d + c];
            results[DK][row_k * d + c] += ds * q[c];
          }
        }
      }
  free(p);
}

/* Largest difference of one result, relative to the largest value of its reference. The fp32 passes
 * sum at most a few hundred terms of size 1, and 2e-5 is a hundred roundings. */
static inline void check_close(const Attention *a, double *results[BUFFERS], int first, int last) {
  for (int b = first; b <= last; b++) {
    if (results[b] == NULL) continue;
    double largest = 1e-3;
    for (int64_t i = 0; i < a->count[b]; i++)
      if (isfinite(results[b][i]) && fabs(results[b][i]) > largest) largest = fabs(results[b][i]);
    for (int64_t i = 0; i < a->count[b]; i++) {
      double got = a->data[b][i], want = results[b][i];
      int close = got == want || fabs(got - want) <= 2e-5 * largest;
      CHECK(close, "buffer %d element %ld is %.9g instead of %.9g", b, (long)i, got, want);
    }
  }
}

static inline void free_reference(double *results[BUFFERS]) {
  for (int b = 0; b < BUFFERS; b++) free(results[b]);
}

/* A CPU context that keeps its records in `folder`, or in memory for "". */
static inline flashtune_context *cpu_context(const char *folder) {
  flashtune_context_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.backend = FLASHTUNE_BACKEND_CPU;
  options.num_threads = 2;
  options.cache_dir = folder;
  flashtune_context *context = NULL;
  OK(flashtune_context_create(&options, &context));
  CHECK(context != NULL, "no context");
  return context;
}

/* Runs both passes and compares them with the reference. */
static inline void run_and_check(flashtune_context *context, Attention *a) {
  uint64_t bytes = 0;
  reset_outputs(a);
  OK(flashtune_forward(context, &a->forward, NULL, 0, NULL));
  OK(flashtune_backward_workspace_size(context, &a->backward, &bytes));
  void *workspace = make_workspace(bytes);
  OK(flashtune_backward(context, &a->backward, workspace, bytes, NULL));
  free(workspace);
  double *results[BUFFERS];
  reference(a, results);
  check_close(a, results, OUT, DV);
  check_guards(a);
  free_reference(results);
}

#endif
