/* Tensors past 2^31 elements and 2^32 bytes, in both passes: sampled rows are compared with the
 * same passes in double. An element's value follows from its place, so that a place that wraps
 * around shows.
 *
 * Without an argument the shapes are small and run on the CPU, which tests this program. The
 * argument "gpu" runs the large ones on GPU 0, which needs 50 GB of device memory.
 */
#include "check.h"
#include "device.h"

#include <math.h>
#include <stddef.h>
#include <time.h>

enum { Q, K, V, OUT, DOUT, DQ, DK, DV, TENSORS, DIM = 128, SAMPLES = 12 };

typedef struct Case {
  const char *name;
  int32_t dtype, causal;
  int64_t batch, seqlen_q, seqlen_k, heads_q, heads_kv;
  int64_t pitch;     /* elements from row to row of one buffer for all tensors; 0: each has its own */
  int64_t page_size; /* 0: no pages */
  int has_backward;
} Case;

/* A tensor: where its elements are, and the number of its first one. */
typedef struct Tensor {
  char *data;
  int64_t first, pitch;
} Tensor;

static int on_gpu, failures;
static Case it;
static Tensor tensors[TENSORS];
static int64_t element, lse_count;
static float *lse; /* of the device */
static int32_t *table, *host_table;
static float *deltas; /* dot products of rows of dout and out, as far as they are known; else NaN */

/* A prime, so that no power of two of elements is a whole number of periods. */
static int64_t period;
static float *values; /* one period of bf16 numbers from -1 to 1, and a row's length of the next */
static const float scale = 0.75f; /* some tens of keys have most of the weight */

static void *memory(size_t bytes) {
  void *at = on_gpu ? device_memory(bytes) : malloc(bytes);
  CHECK(at, "no memory");
  return at;
}

static void give_back(void *at) {
  if (on_gpu) free_device(at);
  else free(at);
}

static void write_to(void *to, const void *from, size_t bytes) {
  if (!on_gpu) {
    memcpy(to, from, bytes);
    return;
  }
  to_device(to, from, bytes);
  CUDA(cuStreamSynchronize(NULL));
}

static void read_from(void *to, const void *from, size_t bytes) {
  if (on_gpu) from_device(to, from, bytes);
  else memcpy(to, from, bytes);
}

static void make_values(void) {
  uint32_t state = 1;
  values = malloc((size_t)(period + DIM) * sizeof *values);
  CHECK(values, "no memory");
  for (int64_t i = 0; i < period; i++) {
    state = state * 1664525u + 1013904223u;
    values[i] = (float)((int32_t)(state >> 24) - 128) / 128.0f; /* eight bits: exact in bf16 */
  }
  memcpy(values + period, values, DIM * sizeof *values);
}

/* `count` elements from the one of number `first` on. */
static void *filled(int64_t first, int64_t count) {
  char *at = memory((size_t)(count * element)), *once = malloc((size_t)(period * element));
  CHECK(once, "no memory");
  for (int64_t i = 0; i < period; i++) {
    const float value = values[(first + i) % period];
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint16_t half = (uint16_t)(bits >> 16);
    memcpy(once + i * element, element == 4 ? (void *)&bits : (void *)&half, (size_t)element);
  }
  int64_t done = count < period ? count : period;
  write_to(at, once, (size_t)(done * element));
  while (done < count) {
    const int64_t more = done < count - done ? done : count - done;
    const size_t bytes = (size_t)(more * element);
    if (on_gpu) CUDA(cuMemcpyDtoDAsync_v2((uint64_t)(uintptr_t)(at + done * element), (uint64_t)(uintptr_t)at, bytes, NULL));
    else memcpy(at + done * element, at, bytes);
    done += more;
  }
  free(once);
  return at;
}

static int64_t heads(int which) {
  return which == Q || which == OUT || which == DOUT || which == DQ ? it.heads_q : it.heads_kv;
}

static int64_t rows(int which) {
  return it.batch * (heads(which) == it.heads_q && which != K && which != V && which != DK && which != DV ? it.seqlen_q : it.seqlen_k);
}

/* The row of a key, through the table of pages if there is one. */
static int64_t key_row(int64_t b, int64_t j) {
  if (!it.page_size) return b * it.seqlen_k + j;
  const int64_t pages = it.seqlen_k / it.page_size;
  return host_table[b * pages + j / it.page_size] * it.page_size + j % it.page_size;
}

/* An input's row. */
static const float *input_row(int which, int64_t row, int64_t head) {
  const Tensor *of = &tensors[which];
  return values + (of->first + row * of->pitch + head * DIM) % period;
}

/* The row as it is in memory. */
static void row_in_memory(int which, int64_t row, int64_t head, float to[DIM]) {
  const Tensor *of = &tensors[which];
  char bytes[DIM * 4];
  read_from(bytes, of->data + (row * of->pitch + head * DIM) * element, (size_t)(DIM * element));
  for (int64_t c = 0; c < DIM; c++) {
    uint32_t bits = 0;
    uint16_t half;
    float value;
    memcpy(&half, bytes + 2 * c, sizeof half);
    if (element == 4) memcpy(&bits, bytes + 4 * c, sizeof bits);
    else bits = (uint32_t)half << 16;
    memcpy(&value, &bits, sizeof value);
    to[c] = value;
  }
}

static double dot(const float a[DIM], const float b[DIM]) {
  double sum = 0;
  for (int c = 0; c < DIM; c++) sum += (double)a[c] * b[c];
  return sum;
}

static void add(double to[DIM], double weight, const float row[DIM]) {
  for (int c = 0; c < DIM; c++) to[c] += weight * row[c];
}

static void compare(const char *what, int64_t b, int64_t at, int64_t head, const float found[DIM], const double right[DIM]) {
  double off = 0, norm = 1e-30;
  for (int c = 0; c < DIM; c++) off += (found[c] - right[c]) * (found[c] - right[c]), norm += right[c] * right[c];
  /* Rounding P and dS to bf16 costs about 1e-2 here, a wrong key about 1. */
  const double bound = element == 4 ? 1e-3 : 5e-2;
  if (sqrt(off / norm) <= bound) return;
  failures++;
  fprintf(stderr, "%s: %s of batch entry %ld, row %ld, head %ld is off by %g\n", it.name, what, (long)b, (long)at, (long)head, sqrt(off / norm));
}

static int64_t seen(int64_t i) { return it.causal ? i + it.seqlen_k - it.seqlen_q + 1 : it.seqlen_k; }

/* The scores of a query with its keys, their largest and the sum of exponentials. */
static double lse_of(int64_t b, int64_t i, int64_t head, double *p) {
  const float *q = input_row(Q, b * it.seqlen_q + i, head);
  double largest = -INFINITY, sum = 0;
  for (int64_t j = 0; j < seen(i); j++) {
    p[j] = dot(q, input_row(K, key_row(b, j), head / (it.heads_q / it.heads_kv))) * scale;
    if (p[j] > largest) largest = p[j];
  }
  for (int64_t j = 0; j < seen(i); j++) sum += exp(p[j] - largest);
  return largest + log(sum);
}

static void check_query(int64_t b, int64_t i, int64_t head) {
  double out[DIM] = {0}, dq[DIM] = {0};
  float found[DIM], device_lse = 0;
  double *p = malloc((size_t)it.seqlen_k * sizeof *p);
  CHECK(p, "no memory");
  const int64_t row = b * it.seqlen_q + i, kv = head / (it.heads_q / it.heads_kv);
  const double total = lse_of(b, i, head, p);
  for (int64_t j = 0; j < seen(i); j++) {
    p[j] = exp(p[j] - total);
    add(out, p[j], input_row(V, key_row(b, j), kv));
  }
  row_in_memory(OUT, row, head, found);
  compare("out", b, i, head, found, out);
  read_from(&device_lse, lse + (b * it.heads_q + head) * it.seqlen_q + i, sizeof device_lse);
  if (!(fabs(device_lse - total) < 1e-2)) {
    failures++;
    fprintf(stderr, "%s: lse of row %ld is %g, not %g\n", it.name, (long)i, device_lse, total);
  }
  if (it.has_backward) {
    const float *dout = input_row(DOUT, row, head);
    const double delta = dot(dout, found); /* of the rounded output, as the pass takes it */
    for (int64_t j = 0; j < seen(i); j++) {
      const double dp = dot(dout, input_row(V, key_row(b, j), kv));
      add(dq, p[j] * (dp - delta) * scale, input_row(K, key_row(b, j), kv));
    }
    row_in_memory(DQ, row, head, found);
    compare("dq", b, i, head, found, dq);
  }
  free(p);
}

/* Takes the LSE and the output, which check_query has sampled, from memory. */
static void check_key(int64_t b, int64_t j, int64_t kv) {
  double dk[DIM] = {0}, dv[DIM] = {0};
  float found[DIM], *all = malloc((size_t)it.seqlen_q * sizeof *all);
  CHECK(all, "no memory");
  const float *k = input_row(K, key_row(b, j), kv), *v = input_row(V, key_row(b, j), kv);
  const int64_t group = it.heads_q / it.heads_kv;
  for (int64_t head = kv * group; head < (kv + 1) * group; head++) {
    read_from(all, lse + (b * it.heads_q + head) * it.seqlen_q, (size_t)it.seqlen_q * sizeof *all);
    for (int64_t i = 0; i < it.seqlen_q; i++) {
      if (j >= seen(i)) continue;
      const int64_t row = b * it.seqlen_q + i;
      const float *q = input_row(Q, row, head), *dout = input_row(DOUT, row, head);
      const double p = exp(dot(q, k) * scale - all[i]);
      if (p < 1e-12) continue; /* too little to matter, and perhaps a row less to read */
      float *delta = &deltas[row * it.heads_q + head];
      if (isnan(*delta)) row_in_memory(OUT, row, head, found), *delta = (float)dot(dout, found);
      add(dv, p, dout);
      add(dk, p * (dot(dout, v) - *delta) * scale, q);
    }
  }
  free(all);
  row_in_memory(DK, key_row(b, j), kv, found);
  compare("dk", b, j, kv, found, dk);
  row_in_memory(DV, key_row(b, j), kv, found);
  compare("dv", b, j, kv, found, dv);
}

/* Inputs, and what lies between the tensors, are as they were. */
static void check_untouched(uint32_t state) {
  float found[DIM];
  for (int sample = 0; sample < 500; sample++) {
    static const int inputs[] = {Q, K, V, DOUT};
    const int which = inputs[sample % (it.has_backward ? 4 : 3)];
    state = state * 1664525u + 1013904223u;
    const int64_t row = (int64_t)((double)state / 4294967296.0 * (double)rows(which)), head = sample % heads(which);
    row_in_memory(which, row, head, found);
    CHECK(!memcmp(found, input_row(which, row, head), sizeof found), "%s: row %ld of input %d has changed", it.name, (long)row, which);
  }
}

static flashtune_tensor described(int which) {
  const Tensor *of = &tensors[which];
  const int is_key = which == K || which == V || which == DK || which == DV;
  const int64_t length = is_key ? (it.page_size ? it.page_size : it.seqlen_k) : it.seqlen_q;
  const flashtune_tensor tensor = {of->data, length * of->pitch, of->pitch, DIM};
  return tensor;
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void run(flashtune_context *context, const Case *of) {
  const double began = now();
  const int before = failures;
  char *shared = NULL;
  int64_t column = 0, largest = 0;
  it = *of, element = it.dtype == FLASHTUNE_DTYPE_FP32 ? 4 : 2;
  if (it.pitch) {
    const int64_t most = it.batch * (it.seqlen_q > it.seqlen_k ? it.seqlen_q : it.seqlen_k);
    shared = filled(0, most * it.pitch);
  }
  for (int i = 0; i < (it.has_backward ? TENSORS : DOUT); i++) {
    tensors[i].pitch = it.pitch ? it.pitch : heads(i) * DIM;
    tensors[i].first = it.pitch ? column : i * 1000003;
    tensors[i].data = it.pitch ? shared + column * element : filled(tensors[i].first, rows(i) * tensors[i].pitch);
    column += heads(i) * DIM;
    const int64_t end = rows(i) * tensors[i].pitch;
    if (end > largest) largest = end;
  }
  CHECK(!it.pitch || column <= it.pitch, "%ld columns", (long)column);
  lse_count = it.batch * it.heads_q * it.seqlen_q, lse = memory((size_t)lse_count * sizeof *lse);
  flashtune_forward_params f;
  memset(&f, 0, sizeof f);
  f.struct_size = sizeof f, f.dtype = it.dtype, f.causal = it.causal, f.softmax_scale = scale;
  f.batch_size = it.batch, f.num_heads_q = it.heads_q, f.num_heads_kv = it.heads_kv;
  f.seqlen_q = it.seqlen_q, f.seqlen_k = it.seqlen_k, f.head_dim = f.head_dim_v = DIM;
  f.q = read_of(described(Q)), f.k = read_of(described(K)), f.v = read_of(described(V)), f.out = described(OUT), f.lse = lse;
  if (it.page_size) {
    const int64_t pages = it.seqlen_k / it.page_size, count = it.batch * pages;
    host_table = malloc((size_t)count * sizeof *host_table), table = memory((size_t)count * sizeof *table);
    CHECK(host_table, "no memory");
    /* 7919 is prime and divides no number of pages here: every page is used once. */
    for (int64_t i = 0; i < count; i++) host_table[i] = (int32_t)(i * 7919 % count);
    write_to(table, host_table, (size_t)count * sizeof *table);
    f.features = FLASHTUNE_FEATURE_PAGED, f.block_table = table, f.block_table_stride = pages;
    f.page_size = it.page_size, f.num_pages = count;
  }
  uint64_t bytes = 0;
  OK(flashtune_forward_workspace_size(context, &f, &bytes));
  void *workspace = memory(bytes ? bytes : 256);
  OK(flashtune_forward(context, &f, bytes ? workspace : NULL, bytes, NULL));
  flashtune_plan_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  OK(flashtune_forward_plan_info(context, &f, &info));
  if (it.has_backward) {
    flashtune_backward_params b;
    memset(&b, 0, sizeof b);
    b.struct_size = sizeof b;
    OK(flashtune_backward_params_from_forward(&f, &b));
    b.dout = read_of(described(DOUT)), b.dq = described(DQ), b.dk = described(DK), b.dv = described(DV);
    if (on_gpu) CUDA(cuStreamSynchronize(NULL));
    give_back(workspace);
    OK(flashtune_backward_workspace_size(context, &b, &bytes));
    /* The CPU's is aligned as malloc aligns; it needs 256. */
    workspace = memory(bytes + 256);
    void *aligned = (void *)(((uintptr_t)workspace + 255) / 256 * 256);
    OK(flashtune_backward(context, &b, aligned, bytes, NULL));
  }
  if (on_gpu) CUDA(cuStreamSynchronize(NULL));
  const double launched = now();
  deltas = malloc((size_t)lse_count * sizeof *deltas);
  CHECK(deltas, "no memory");
  for (int64_t i = 0; i < lse_count; i++) deltas[i] = NAN;
  for (int64_t sample = 0; sample < SAMPLES; sample++) {
    /* From the last row down, at growing distances: the far end is where numbers overflow. */
    const int64_t b = (it.batch - 1) * (SAMPLES - 1 - sample) / (SAMPLES - 1), back = sample * sample * sample;
    const int64_t head_q = (sample * 7) % it.heads_q, head_kv = (sample * 5) % it.heads_kv;
    check_query(b, it.seqlen_q - 1 - back * (it.seqlen_q - 1) / 1331, head_q);
    if (it.has_backward) check_key(b, it.seqlen_k - 1 - back * (it.seqlen_k - 1) / 1331, head_kv);
  }
  check_untouched(1);
  if (on_gpu)
    printf("%-18s %.3f x 2^31 elements, %.3f x 2^32 bytes, %s: %.1f s and %.1f s of checks, %s\n", it.name, (double)largest / 2147483648.0,
           (double)(largest * element) / 4294967296.0, info.config, launched - began, now() - launched, failures > before ? "WRONG" : "right");
  fflush(stdout);
  free(deltas);
  give_back(workspace), give_back(lse);
  if (it.page_size) give_back(table), free(host_table);
  if (shared) give_back(shared);
  for (int i = 0; i < (it.has_backward ? TENSORS : DOUT) && !shared; i++) give_back(tensors[i].data);
}

int main(int argc, char **argv) {
  enum { B16 = FLASHTUNE_DTYPE_BF16, B32 = FLASHTUNE_DTYPE_FP32 };
  static const Case large[] = {
    {"long rows", B16, 1, 1, 133000, 133000, 2, 1, 16384, 0, 1},
    {"many sequences", B16, 0, 133, 1000, 1000, 4, 2, 16384, 0, 1},
    {"packed", B16, 1, 64, 2080, 2080, 128, 128, 0, 0, 1},
    {"fp32", B32, 1, 1, 70000, 70000, 1, 1, 32768, 0, 1},
    {"decode", B16, 1, 1, 1, 133000, 8, 1, 16384, 0, 0},
    {"decode pages", B16, 1, 8, 2, 16640, 8, 1, 16384, 64, 0},
    {"chunk of pages", B16, 1, 1, 2048, 133120, 4, 1, 16384, 128, 0},
  };
  static const Case small[] = {
    {"long rows", B16, 1, 1, 300, 300, 2, 1, 2048, 0, 1},
    {"many sequences", B16, 0, 3, 64, 70, 4, 2, 4096, 0, 1},
    {"packed", B16, 1, 2, 80, 80, 4, 4, 0, 0, 1},
    {"fp32", B32, 1, 1, 90, 90, 1, 1, 2048, 0, 1},
    {"decode pages", B16, 1, 3, 2, 256, 8, 1, 4096, 64, 0},
  };
  on_gpu = argc > 1 && !strcmp(argv[1], "gpu");
  period = on_gpu ? 16777213 : 65521;
  make_values();
  if (on_gpu) {
    CHECK(open_driver() > 0, "no GPU");
    enter_device(0);
  }
  flashtune_context_options options;
  flashtune_context *context = NULL;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.backend = on_gpu ? FLASHTUNE_BACKEND_CUDA : FLASHTUNE_BACKEND_CPU;
  options.cache_dir = "", options.num_threads = 2;
  OK(flashtune_context_create(&options, &context));
  const int count = on_gpu ? sizeof large / sizeof *large : sizeof small / sizeof *small;
  for (int i = 0; i < count; i++) run(context, on_gpu ? &large[i] : &small[i]);
  OK(flashtune_context_destroy(context));
  free(values);
  CHECK(failures == 0, "%d wrong rows", failures);
  return 0;
}
