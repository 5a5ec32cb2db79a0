/* A caller who fills params with junk. Each call must end with a status, and a failed launch must
 * leave its outputs alone. Every tensor ends at a page that may not be touched.
 *
 * The argument is the number of calls, 20000 if it is no number. JUNK_SEED sets the generator's
 * first number. Junk keeps the caller's part of the contract: a size or a stride is right, smaller
 * than right, or impossible, so that no accepted problem leads outside of its tensors. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "check.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

static uint64_t state;

static uint64_t next(void) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return state >> 33;
}

static uint64_t below(uint64_t bound) { return next() % bound; }

/* The largest page of a Linux kernel: those of aarch64 may have 64 KB. */
enum { PAGE = 1 << 16, ROOM = 2 * PAGE, TENSORS = 8, ARRAY = 64 };

/* `ROOM` bytes with a page on either side that may not be touched. */
static char *guarded(void) {
  char *all = mmap(NULL, ROOM + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(all != MAP_FAILED && !mprotect(all + PAGE, ROOM, PROT_READ | PROT_WRITE), "mmap failed");
  return all + PAGE;
}

static char *rooms[TENSORS];
static float *numbers; /* ARRAY of them, up to a guard */
static int32_t *integers;

/* A packed tensor that ends where its room does. */
static flashtune_tensor tensor(int at, int64_t batch, int64_t seqlen, int64_t heads, int64_t dim, int64_t element) {
  const int64_t bytes = batch * seqlen * heads * dim * element;
  CHECK(bytes <= ROOM, "%ld bytes", (long)bytes);
  flashtune_tensor packed = {rooms[at] + ROOM - bytes, seqlen * heads * dim, heads * dim, dim};
  return packed;
}

static flashtune_const_tensor input(int at, int64_t batch, int64_t seqlen, int64_t heads, int64_t dim, int64_t element) {
  return read_of(tensor(at, batch, seqlen, heads, dim, element));
}

static int64_t junk_size(int64_t right) {
  const int64_t sizes[] = {right, -1, 0, 1, INT64_MIN, INT64_MAX, (int64_t)1 << 40};
  return sizes[below(7)];
}

static float junk_float(void) {
  const float floats[] = {0, 0.5f, -1, 2, INFINITY, NAN, 1e38f, -0.0f};
  return floats[below(8)];
}

static void *junk_pointer(void *right) {
  return below(2) || !right ? NULL : (char *)right - 1;
}

static void junk_tensor(flashtune_tensor *of) {
  switch (below(4)) {
    case 0: of->data = junk_pointer(of->data); break;
    case 1: of->stride_batch /= 2; break;
    case 2: of->stride_seqlen = (int64_t)below(2); break;
    default: of->stride_head = (int64_t)below(2); break;
  }
}

static void junk_input(flashtune_const_tensor *of) {
  flashtune_tensor tensor = written_of(*of);
  junk_tensor(&tensor);
  *of = read_of(tensor);
}

static flashtune_forward_params forward(void) {
  flashtune_forward_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  const int32_t dtypes[] = {FLASHTUNE_DTYPE_FP16, FLASHTUNE_DTYPE_BF16, FLASHTUNE_DTYPE_FP32};
  p.dtype = dtypes[below(3)];
  p.causal = (int32_t)below(3);
  const int64_t element = p.dtype == FLASHTUNE_DTYPE_FP32 ? 4 : 2, dims[] = {1, 8, 16, 20};
  p.batch_size = 1 + (int64_t)below(2), p.num_heads_kv = 1 + (int64_t)below(2);
  p.num_heads_q = p.num_heads_kv * (1 + (int64_t)below(3));
  p.seqlen_q = 1 + (int64_t)below(40), p.seqlen_k = 1 + (int64_t)below(40);
  p.head_dim = dims[below(4)], p.head_dim_v = dims[below(4)];
  p.q = input(0, p.batch_size, p.seqlen_q, p.num_heads_q, p.head_dim, element);
  p.k = input(1, p.batch_size, p.seqlen_k, p.num_heads_kv, p.head_dim, element);
  p.v = input(2, p.batch_size, p.seqlen_k, p.num_heads_kv, p.head_dim_v, element);
  p.out = tensor(3, p.batch_size, p.seqlen_q, p.num_heads_q, p.head_dim_v, element);
  if (below(2)) p.lse = (float *)tensor(7, p.batch_size, p.seqlen_q, p.num_heads_q, 1, 4).data;
  for (uint64_t count = below(4); count > 0; count--) {
    switch (below(24)) {
      case 0: p.struct_size = below(2) ? below(8) : UINT64_MAX; break;
      case 1: p.dtype = below(2) ? -(int32_t)below(9) : 4 + (int32_t)below(100); break;
      case 2: p.causal = (int32_t)next(); break;
      case 3: p.batch_size = junk_size(p.batch_size); break;
      case 4: p.num_heads_q = junk_size(p.num_heads_q); break;
      case 5: p.num_heads_kv = junk_size(p.num_heads_kv); break;
      case 6: p.seqlen_q = junk_size(p.seqlen_q); break;
      case 7: p.seqlen_k = junk_size(p.seqlen_k); break;
      case 8: p.head_dim = junk_size(p.head_dim); break;
      case 9: p.head_dim_v = junk_size(p.head_dim_v); break;
      case 10: p.softmax_scale = junk_float(); break;
      case 11: p.dropout_p = junk_float(), p.dropout_seed = next(), p.dropout_offset = next(); break;
      case 12: junk_input(&p.q); break;
      case 13: junk_input(&p.k); break;
      case 14: junk_input(&p.v); break;
      case 15: junk_tensor(&p.out); break;
      case 16: p.features = below(4) ? (uint64_t)1 << below(20) : next() << below(33); break;
      case 17: p.window = (int32_t)below(5), p.window_left = junk_size(8), p.window_right = junk_size(8); break;
      case 18: p.softcap = junk_float(); break;
      case 19: p.alibi_slopes = numbers, p.alibi_stride_batch = (int64_t)below(2); break;
      case 20: p.bias.data = numbers, p.bias.stride_seqlen_k = 1, p.mask = p.bias; break;
      case 21: p.sinks = numbers; break;
      case 22: p.reserved = (int32_t)below(2), p.batch_invariant = (int32_t)below(4); break;
      default:
        for (int i = 0; i < ARRAY; i++) integers[i] = below(4) ? (int32_t)below(41) : (int32_t)(next() - next());
        if (below(2)) p.seqused_k = integers;
        else p.cu_seqlens_q = p.cu_seqlens_k = integers, p.total_q = p.seqlen_q, p.total_k = p.seqlen_k;
    }
  }
  return p;
}

static flashtune_backward_params backward(const flashtune_forward_params *of) {
  flashtune_backward_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  if (flashtune_backward_params_from_forward(of, &p)) return p;
  /* Rooms of their own, in the same places. */
  flashtune_tensor tensors[] = {written_of(p.out), written_of(p.q), written_of(p.k), written_of(p.v)};
  const int own[] = {4, 5, 6, 7}, from[] = {3, 0, 1, 2};
  for (int i = 0; i < 4; i++) {
    if (tensors[i].data) tensors[i].data = rooms[own[i]] + ((char *)tensors[i].data - rooms[from[i]]);
    if (!below(16)) junk_tensor(&tensors[i]);
  }
  p.dout = read_of(tensors[0]), p.dq = tensors[1], p.dk = tensors[2], p.dv = tensors[3];
  if (p.lse) p.lse = numbers; /* short: refused, or as many rows as there are numbers */
  if (p.batch_size > 0 && p.num_heads_q > 0 && p.seqlen_q > 0 &&
      (p.batch_size > ARRAY || p.num_heads_q > ARRAY || p.seqlen_q > ARRAY ||
       p.batch_size * p.num_heads_q * p.seqlen_q > ARRAY))
    p.lse = NULL;
  p.deterministic = (int32_t)below(4);
  return p;
}

static uint64_t counts[64];

static int32_t seen(int32_t status) {
  CHECK(status >= FLASHTUNE_STATUS_OK && status <= FLASHTUNE_STATUS_INTERNAL, "status %d", status);
  CHECK(status != FLASHTUNE_STATUS_INTERNAL, "%s", flashtune_last_error());
  CHECK((status == 0) == (flashtune_last_error()[0] == 0), "%d: '%s'", status, flashtune_last_error());
  counts[status]++;
  return status;
}

/* A launch, before which its outputs hold a pattern that a failure must leave. */
#define LAUNCH(call, first, last)                                                       \
  do {                                                                                  \
    for (int at = first; at <= last; at++) memset(rooms[at], 0x5a, ROOM);               \
    if (seen(call))                                                                     \
      for (int at = first; at <= last; at++)                                            \
        CHECK(rooms[at][0] == 0x5a && !memcmp(rooms[at], rooms[at] + 1, ROOM - 1), "a failed launch wrote"); \
  } while (0)

static void one_call(flashtune_context *good) {
  flashtune_context *context = below(50) ? good : NULL;
  flashtune_forward_params f = forward();
  flashtune_backward_params b = backward(&f);
  const flashtune_forward_params *of_f = below(50) ? &f : NULL;
  const flashtune_backward_params *of_b = below(50) ? &b : NULL;
  static char workspace[1 << 20];
  void *space = below(8) ? workspace : NULL;
  const uint64_t bytes = below(8) ? sizeof workspace : below(64);
  uint64_t result = 0;
  flashtune_plan_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = below(4) ? sizeof info : below(8);
  switch (below(16)) {
    case 0: seen(flashtune_forward_supported(context, of_f)); break;
    case 1: seen(flashtune_forward_workspace_size(context, of_f, below(20) ? &result : NULL)); break;
    case 2: seen(flashtune_forward_prepare(context, of_f)); break;
    case 3: seen(flashtune_forward_plan_info(context, of_f, below(20) ? &info : NULL)); break;
    case 4: seen(flashtune_backward_supported(context, of_b)); break;
    case 5: seen(flashtune_backward_workspace_size(context, of_b, below(20) ? &result : NULL)); break;
    case 6: seen(flashtune_backward_prepare(context, of_b)); break;
    case 7: seen(flashtune_backward_plan_info(context, of_b, below(20) ? &info : NULL)); break;
    case 8: {
      flashtune_merge_params m;
      memset(&m, 0, sizeof m);
      m.struct_size = below(8) ? sizeof m : below(8);
      m.dtype = f.dtype, m.partial_dtype = FLASHTUNE_DTYPE_FP32, m.num_partials = junk_size(1);
      m.batch_size = f.batch_size, m.seqlen = f.seqlen_q, m.num_heads = f.num_heads_q, m.head_dim_v = f.head_dim_v;
      m.out = f.out;
      seen(flashtune_merge_prepare(context, &m));
      seen(flashtune_merge(context, &m, NULL));
      break;
    }
    case 9: {
      flashtune_kv_append_params a;
      memset(&a, 0, sizeof a);
      a.struct_size = below(8) ? sizeof a : below(8);
      a.dtype = f.dtype, a.batch_size = f.batch_size, a.num_heads_kv = f.num_heads_kv;
      a.seqlen_new = junk_size(1), a.seqlen_cache = f.seqlen_k, a.head_dim = f.head_dim, a.head_dim_v = f.head_dim_v;
      a.k_cache = written_of(f.k), a.v_cache = written_of(f.v);
      seen(flashtune_kv_append_prepare(context, &a));
      seen(flashtune_kv_append(context, &a, NULL));
      break;
    }
    case 10: {
      flashtune_device_info device;
      memset(&device, 0, sizeof device);
      device.struct_size = below(2) ? sizeof device : below(8);
      seen(flashtune_context_device(context, below(20) ? &device : NULL));
      CHECK(flashtune_status_string((int32_t)next())[0] != 0, "no text");
      break;
    }
    case 11: {
      const char *paths[] = {NULL, "", "/", "/dev/zero", "/nowhere/at/all", "/dev/full"};
      const char *path = paths[below(6)];
      seen(below(2) ? flashtune_records_import(context, path, &result)
                    : flashtune_records_export(context, path, &result));
      break;
    }
    case 12:
    case 13: LAUNCH(flashtune_forward(context, of_f, space, bytes, NULL), 3, 3); break;
    default: LAUNCH(flashtune_backward(context, of_b, space, bytes, NULL), 5, 7); break;
  }
}

int main(int argc, char **argv) {
  const uint64_t asked = argc > 1 ? strtoull(argv[1], NULL, 10) : 0, count = asked ? asked : 20000;
  const char *seed = getenv("JUNK_SEED");
  state = seed ? strtoull(seed, NULL, 10) : 1;
  for (int at = 0; at < TENSORS; at++) rooms[at] = guarded();
  numbers = (float *)(void *)(guarded() + ROOM) - ARRAY;
  integers = (int32_t *)(void *)(guarded() + ROOM) - ARRAY;
  flashtune_context_options options;
  flashtune_context *context = NULL;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.backend = FLASHTUNE_BACKEND_CPU;
  options.cache_dir = "", options.num_threads = 2;
  OK(flashtune_context_create(&options, &context));
  for (uint64_t call = 0; call < count; call++) one_call(context);
  OK(flashtune_context_destroy(context));
  /* Junk that is always refused, or always taken, tests little. */
  CHECK(counts[FLASHTUNE_STATUS_OK] > count / 8, "%lu accepted", (unsigned long)counts[0]);
  CHECK(counts[FLASHTUNE_STATUS_INVALID_ARGUMENT] > count / 8, "%lu refused", (unsigned long)counts[1]);
  return 0;
}
