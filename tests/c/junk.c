/* A caller who fills params with junk. Each call must end with a status, and a failed launch must
 * leave its outputs alone. Every tensor ends at a guard, and so does every struct of params.
 *
 * The argument is the number of calls, 20000 if it is no number. JUNK_SEED sets the generator's
 * first number. Junk keeps the caller's part of the contract: a size or a stride is right, smaller
 * than right, or impossible, so that no accepted problem leads outside of its tensors.
 *
 * JUNK_GPU=1 calls a CUDA context. Guards are then bytes of device memory that must stay as they
 * are. With JUNK_GPU=exact each tensor is an allocation of its own, for compute-sanitizer.
 * JUNK_PREPARE=N prepares N problems first and seals the context, so that nothing compiles later.
 * JUNK_REPORT=1 prints how often each status came. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "check.h"
#include "device.h"
#include "rooms.h"

#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

static uint64_t state;

static uint64_t next(void) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return state >> 33;
}

static uint64_t below(uint64_t bound) { return next() % bound; }

static flashtune_const_tensor input(int at, int64_t batch, int64_t seqlen, int64_t heads, int64_t dim, int64_t element) {
  return read_of(tensor(at, batch, seqlen, heads, dim, element));
}

static int64_t junk_size(int64_t right) {
  const int64_t sizes[] = {right, -1, 0, 1, INT64_MIN, INT64_MAX, (int64_t)1 << 40};
  return sizes[below(7)];
}

/* A copy of params that ends at a page that may not be touched, or as near as alignment allows. */
static void *at_the_end(int which, const void *params, uint64_t struct_size, size_t known) {
  static char *pages[2];
  if (!pages[which]) pages[which] = guarded();
  const size_t bytes = struct_size < 8 ? 8 : struct_size > ROOM ? known : struct_size;
  char *copy = pages[which] + ROOM - (bytes + 7) / 8 * 8;
  memset(pages[which], 0, ROOM);
  return memcpy(copy, params, bytes < known ? bytes : known);
}

/* A size that ends anywhere: behind the known fields, or inside of a field that is set. */
static uint64_t junk_struct_size(const void *params, size_t right) {
  const uint64_t sizes[] = {below(8), UINT64_MAX, below(right), right + below(64)};
  const uint64_t kind = below(8);
  if (kind < 4) return sizes[kind];
  size_t end = (size_t)below(right);
  while (end + 1 < right && !((const char *)params)[end]) end++;
  return end + below(8);
}

/* A size that a tensor was made for, or 1 for one that is refused. */
static int64_t present(int64_t size) { return size >= 1 && size <= 64 ? size : 1; }

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

/* Nothing checks lengths on a GPU, so they are right there. */
static void write_integers(const flashtune_forward_params *p) {
  if (!on_gpu) {
    /* Mostly what can be right: lengths, pages, blocks. */
    const uint64_t bound = 1 + below(41), wild = below(4);
    for (int i = 0; i < ARRAY; i++)
      integers[i] = below(8) || wild ? (int32_t)below(bound) : (int32_t)(next() - next());
    return;
  }
  const int64_t lengths[] = {p->seqlen_q, p->seqlen_k, p->total_q, p->total_k};
  int64_t most = 40;
  for (int i = 0; i < (p->cu_seqlens_q ? 4 : 2); i++)
    if (lengths[i] < most) most = lengths[i] < 0 ? 0 : lengths[i];
  /* Offsets rise, and lengths need not. */
  int32_t last = 0;
  for (int i = 0; i < ARRAY; i++) {
    const int32_t random = (int32_t)below((uint64_t)most + 1);
    host_integers[i] = p->cu_seqlens_q ? (i == 0 ? 0 : (last = random > last ? random : last)) : random;
  }
  to_device(integers, host_integers, sizeof host_integers);
  CUDA(cuStreamSynchronize(NULL));
}

static flashtune_forward_params forward(void) {
  flashtune_forward_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  const int32_t dtypes[] = {FLASHTUNE_DTYPE_FP16, FLASHTUNE_DTYPE_BF16, FLASHTUNE_DTYPE_FP32};
  p.dtype = dtypes[below(3)];
  p.causal = (int32_t)below(3);
  const int64_t element = p.dtype == FLASHTUNE_DTYPE_FP32 ? 4 : 2, few[] = {1, 8, 16, 20}, gpus[] = {16, 16, 20, 64};
  const int64_t *dims = on_gpu ? gpus : few;
  uint64_t with = 0;
  int has_integers = 0;
  p.batch_size = 1 + (int64_t)below(2), p.num_heads_kv = 1 + (int64_t)below(2);
  p.num_heads_q = p.num_heads_kv * (1 + (int64_t)below(3));
  p.seqlen_q = 1 + (int64_t)below(40), p.seqlen_k = 1 + (int64_t)below(40);
  p.head_dim = dims[below(4)], p.head_dim_v = dims[below(4)];
  p.q = input(0, p.batch_size, p.seqlen_q, p.num_heads_q, p.head_dim, element);
  p.k = input(1, p.batch_size, p.seqlen_k, p.num_heads_kv, p.head_dim, element);
  p.v = input(2, p.batch_size, p.seqlen_k, p.num_heads_kv, p.head_dim_v, element);
  p.out = tensor(3, p.batch_size, p.seqlen_q, p.num_heads_q, p.head_dim_v, element);
  if (below(2)) p.lse = (float *)tensor(9, p.batch_size, p.seqlen_q, p.num_heads_q, 1, 4).data;
  for (uint64_t count = below(4); count > 0; count--) {
    switch (below(28)) {
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
      case 19: p.alibi_slopes = numbers, p.alibi_stride_batch = (int64_t)below(2), with |= FLASHTUNE_FEATURE_ALIBI; break;
      case 20: {
        const int which = (int)below(3);
        flashtune_const_scores_tensor *scores = which ? &p.mask : &p.bias;
        scores->data = numbers, scores->stride_seqlen_k = 1, scores->stride_seqlen_q = (int64_t)below(2) / 2;
        with |= which == 0 ? FLASHTUNE_FEATURE_BIAS : which == 1 ? FLASHTUNE_FEATURE_MASK : FLASHTUNE_FEATURE_MASK_BITS;
        break;
      }
      case 21: p.sinks = numbers, with |= FLASHTUNE_FEATURE_SINKS; break;
      case 22: p.reserved = (int32_t)below(2), p.batch_invariant = (int32_t)below(4); break;
      case 23: {
        const flashtune_block_mask mask = {16, 16 * (int64_t)below(4), integers, integers, NULL, NULL, 0, 0, 0, 0, 0, (int64_t)below(4)};
        p.block_mask = mask, with |= FLASHTUNE_FEATURE_BLOCK_MASK, has_integers = 1;
        break;
      }
      case 24: /* The sequences of k and v are pages. */
        p.block_table = integers, p.block_table_stride = (int64_t)below(3), p.page_size = p.seqlen_k, p.num_pages = p.batch_size;
        with |= FLASHTUNE_FEATURE_PAGED, has_integers = 1;
        break;
      case 25: p.leftpad_k = integers, with |= FLASHTUNE_FEATURE_LEFTPAD_K, has_integers = 1; break;
      default:
        has_integers = 1;
        if (below(2)) p.seqused_k = integers, with |= FLASHTUNE_FEATURE_SEQUSED_K;
        if (below(2)) p.seqused_q = integers, with |= FLASHTUNE_FEATURE_SEQUSED_Q;
        if (p.seqused_k || p.seqused_q) break;
        p.cu_seqlens_q = p.cu_seqlens_k = integers, p.total_q = p.seqlen_q, p.total_k = p.seqlen_k;
        with |= FLASHTUNE_FEATURE_CU_SEQLENS_Q | FLASHTUNE_FEATURE_CU_SEQLENS_K;
    }
  }
  /* Data without its bit is refused, and so is a bit without data. */
  if (below(8)) p.features |= with;
  if (has_integers) write_integers(&p);
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
    const int64_t place = (char *)tensors[i].data - rooms[from[i]];
    if (tensors[i].data && exact) exact_room(own[i], ROOM - place);
    if (tensors[i].data) tensors[i].data = rooms[own[i]] + place;
    if (!below(16)) junk_tensor(&tensors[i]);
  }
  p.dout = read_of(tensors[0]), p.dq = tensors[1], p.dk = tensors[2], p.dv = tensors[3];
  if (p.lse) p.lse = numbers; /* short: refused, or as many rows as there are numbers */
  if (p.batch_size > 0 && p.num_heads_q > 0 && p.seqlen_q > 0 &&
      (p.batch_size > ARRAY || p.num_heads_q > ARRAY || p.seqlen_q > ARRAY ||
       p.batch_size * p.num_heads_q * p.seqlen_q > ARRAY))
    p.lse = NULL;
  if (!below(4) && !p.block_mask.block_q) p.deterministic = (int32_t)below(4);
  if (p.sinks && below(2)) p.dsinks = (float *)(void *)rooms[8];
  else if (!below(8)) p.dlse = numbers, p.features |= FLASHTUNE_FEATURE_DLSE;
  else if (p.bias.data && below(2)) {
    const flashtune_scores_tensor dbias = {rooms[8], 6 * 40 * 40, 40 * 40, 40, 1};
    p.dbias = dbias, p.features |= FLASHTUNE_FEATURE_DBIAS;
  }
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

static void launched(int32_t status, int first, int last) {
  if (!seen(status)) return;
  for (int at = first; at <= last && !exact; at++) CHECK(holds(rooms[at], ROOM, PATTERN), "a failed launch wrote");
}

/* Ranges, tuning and contexts, which take long where they are right, and so are wrong mostly. */
static void ask_much(flashtune_context *context, const flashtune_forward_params *f, const flashtune_backward_params *b) {
  const double seconds[] = {-1, NAN, INFINITY, 1e300, 1e-9};
  if (below(2)) {
    flashtune_range range;
    flashtune_range_info info;
    memset(&range, 0, sizeof range), memset(&info, 0, sizeof info);
    range.struct_size = below(8) ? sizeof range : below(8), info.struct_size = below(8) ? sizeof info : below(8);
    range.forward = below(2) ? f : NULL, range.backward = below(4) ? NULL : b;
    range.least_batch_size = junk_size(1), range.least_seqlen_q = junk_size(1), range.least_seqlen_k = junk_size(1);
    range.optional = below(2) ? 0 : next(), range.optional_features = below(2) ? 0 : next();
    seen(flashtune_prepare_range(context, below(20) ? &range : NULL, below(8) ? &info : NULL));
  } else if (below(2)) {
    flashtune_autotune_params tune;
    memset(&tune, 0, sizeof tune);
    tune.struct_size = below(8) ? sizeof tune : below(8);
    tune.time_limit_seconds = seconds[below(200) ? below(4) : 4];
    tune.forward = below(2) ? f : NULL, tune.backward = below(2) ? b : NULL, tune.reserved = (int32_t)below(2);
    seen(flashtune_autotune(context, below(20) ? &tune : NULL));
  } else {
    flashtune_context_options options;
    flashtune_context *made = NULL;
    memset(&options, 0, sizeof options);
    options.struct_size = junk_struct_size(&options, sizeof options), options.cache_dir = "";
    options.backend = (int32_t)below(5) - 1, options.device_ordinal = (int32_t)below(3) - 1;
    options.num_threads = (int32_t)below(4) - 1, options.tuning_policy = (int32_t)below(4) - 1;
    options.tuning_time_limit_seconds = below(2) ? 0 : seconds[below(5)];
    if (!seen(flashtune_context_create(at_the_end(0, &options, options.struct_size, sizeof options), &made)))
      seen(flashtune_context_destroy(made));
  }
}

static flashtune_forward_params last_forward;
static uint64_t last_kind;

static void one_call(flashtune_context *good) {
  flashtune_context *context = below(50) ? good : NULL;
  flashtune_forward_params f = forward();
  flashtune_backward_params b = backward(&f);
  if (!below(16)) f.struct_size = junk_struct_size(&f, sizeof f);
  if (!below(16)) b.struct_size = junk_struct_size(&b, sizeof b);
  const flashtune_forward_params *of_f = below(50) ? at_the_end(0, &f, f.struct_size, sizeof f) : NULL;
  const flashtune_backward_params *of_b = below(50) ? at_the_end(1, &b, b.struct_size, sizeof b) : NULL;
  void *space = below(8) ? workspace : NULL;
  const uint64_t bytes = below(8) ? WORKSPACE : below(64);
  uint64_t result = 0;
  flashtune_plan_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = below(4) ? sizeof info : below(8);
  last_forward = f, last_kind = below(18);
  switch (last_kind) {
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
      if (below(4)) {
        const int64_t b = present(m.batch_size), q = present(m.seqlen), h = present(m.num_heads), d = present(m.head_dim_v);
        m.partial_out = input(0, b, q, h, d, 4);
        m.partial_lse = (const float *)(const void *)tensor(1, b, q, h, 1, 4).data;
      }
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
      if (below(4)) {
        const int64_t b = present(a.batch_size), n = present(a.seqlen_new), h = present(a.num_heads_kv);
        const int64_t element = a.dtype == FLASHTUNE_DTYPE_FP32 ? 4 : 2;
        a.k_new = input(4, b, n, h, present(a.head_dim), element), a.v_new = input(5, b, n, h, present(a.head_dim_v), element);
        a.seqlens = integers;
        if (below(2)) a.seqused = integers + ARRAY / 2;
      }
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
      flashtune_pack_info pack;
      memset(&pack, 0, sizeof pack);
      pack.struct_size = below(2) ? sizeof pack : below(8);
      seen(flashtune_context_pack(context, below(20) ? &pack : NULL));
      break;
    }
    case 11: {
      const char *paths[] = {NULL, "", "/", "/dev/zero", "/nowhere/at/all", "/dev/full"};
      const char *path = paths[below(6)];
      seen(below(2) ? flashtune_records_import(context, path, &result)
                    : flashtune_records_export(context, path, &result));
      break;
    }
    case 12: ask_much(context, of_f, of_b); break;
    case 13: {
      const int32_t outs[] = {FLASHTUNE_DTYPE_E4M3, FLASHTUNE_DTYPE_E5M2, FLASHTUNE_DTYPE_INT8, f.dtype};
      const int64_t b = present(f.batch_size), q = present(f.seqlen_q), h = present(f.num_heads_q), d = present(f.head_dim);
      const int64_t keys[] = {0, 1, 128, 64};
      flashtune_quantize_params z;
      memset(&z, 0, sizeof z);
      z.dtype = f.dtype, z.out_dtype = outs[below(4)], z.x = f.q, z.out = tensor(4, b, q, h, d, 2);
      z.batch_size = f.batch_size, z.seqlen = f.seqlen_q, z.num_heads = f.num_heads_q, z.head_dim = f.head_dim;
      if (z.out_dtype != z.dtype || !below(4)) {
        z.descale = tensor(5, b, q, h, 1, 4), z.keys_per_descale = keys[below(4)], z.heads_per_descale = junk_size(1);
        z.computes_descale = (int32_t)below(3);
      }
      z.rotation = (int32_t)below(3), z.rotation_reserved = !below(8), z.rotation_seed = next();
      z.struct_size = below(4) ? sizeof z : junk_struct_size(&z, sizeof z);
      const flashtune_quantize_params *of_z = at_the_end(1, &z, z.struct_size, sizeof z);
      seen(flashtune_quantize_prepare(context, of_z));
      fill(4, 5);
      launched(flashtune_quantize(context, of_z, NULL), 4, 5);
      break;
    }
    case 14:
    case 15:
      fill(3, 3);
      launched(flashtune_forward(context, of_f, space, bytes, NULL), 3, 3);
      break;
    default:
      fill(5, 8);
      launched(flashtune_backward(context, of_b, space, bytes, NULL), 5, 8);
  }
}

enum { THREADS = 16 };

static struct Problems {
  flashtune_context *context;
  uint64_t count;
  flashtune_forward_params *forward;
  flashtune_backward_params *backward;
} problems;

static void *prepare_some(void *first) {
  for (uint64_t i = *(uint64_t *)first; i < problems.count; i += THREADS) {
    flashtune_forward_prepare(problems.context, &problems.forward[i]);
    flashtune_backward_prepare(problems.context, &problems.backward[i]);
  }
  return NULL;
}

/* Prepares problems as junk draws them, on many threads, and seals the context. */
static void prepare_and_seal(flashtune_context *context, uint64_t count) {
  pthread_t threads[THREADS];
  uint64_t firsts[THREADS];
  problems.context = context, problems.count = count;
  problems.forward = calloc(count, sizeof *problems.forward);
  problems.backward = calloc(count, sizeof *problems.backward);
  CHECK(problems.forward && problems.backward, "no memory");
  for (uint64_t i = 0; i < count; i++) {
    problems.forward[i] = forward(), problems.backward[i] = backward(&problems.forward[i]);
    /* Only whole structs: the others are read past their end here. */
    problems.forward[i].struct_size = sizeof problems.forward[i];
    problems.backward[i].struct_size = sizeof problems.backward[i];
  }
  for (uint64_t i = 0; i < THREADS; i++) {
    firsts[i] = i;
    CHECK(!pthread_create(&threads[i], NULL, prepare_some, &firsts[i]), "no thread");
  }
  for (int i = 0; i < THREADS; i++) CHECK(!pthread_join(threads[i], NULL), "no thread");
  free(problems.forward), free(problems.backward);
  OK(flashtune_context_seal(context));
}

/* The call during which a kernel failed. Only exact tensors wait for each call. */
static void check_device(uint64_t call) {
  if (!exact || !cuStreamSynchronize(NULL)) return;
  const flashtune_forward_params *p = &last_forward;
  const long sizes[] = {p->batch_size, p->num_heads_q, p->num_heads_kv, p->seqlen_q, p->seqlen_k, p->head_dim, p->head_dim_v};
  fprintf(stderr, "dtype %d, causal %d, sizes", p->dtype, p->causal);
  for (int i = 0; i < 7; i++) fprintf(stderr, " %ld", sizes[i]);
  fprintf(stderr, ", features %#lx, q %p, k %p, v %p, out %p, lse %p\n", (unsigned long)p->features, p->q.data, p->k.data,
          p->v.data, (void *)p->out.data, (void *)p->lse);
  CHECK(0, "a kernel of call %lu, kind %lu, failed", (unsigned long)call, (unsigned long)last_kind);
}

int main(int argc, char **argv) {
  const uint64_t asked = argc > 1 ? strtoull(argv[1], NULL, 10) : 0, count = asked ? asked : 20000;
  const char *seed = getenv("JUNK_SEED"), *gpu = getenv("JUNK_GPU"), *prepare = getenv("JUNK_PREPARE");
  const uint64_t batch = 256; /* calls between two looks at the canaries */
  state = seed ? strtoull(seed, NULL, 10) : 1;
  on_gpu = gpu != NULL, exact = gpu && !strcmp(gpu, "exact");
  make_rooms();
  flashtune_context_options options;
  flashtune_context *context = NULL;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.backend = on_gpu ? FLASHTUNE_BACKEND_CUDA : FLASHTUNE_BACKEND_CPU;
  options.cache_dir = getenv("JUNK_CACHE") ? getenv("JUNK_CACHE") : "", options.num_threads = 2;
  OK(flashtune_context_create(&options, &context));
  if (prepare) prepare_and_seal(context, strtoull(prepare, NULL, 10));
  for (uint64_t call = 1; call <= count; call++) {
    one_call(context);
    check_device(call);
    if (call % batch == 0 || call == count) check_canaries();
  }
  if (on_gpu) CUDA(cuStreamSynchronize(NULL));
  OK(flashtune_context_destroy(context));
  for (int status = 0; getenv("JUNK_REPORT") && status <= FLASHTUNE_STATUS_INTERNAL; status++)
    if (counts[status]) printf("%9lu %s\n", (unsigned long)counts[status], flashtune_status_string(status));
  /* Junk that is always refused, or always taken, tests little. */
  CHECK(counts[FLASHTUNE_STATUS_OK] > count / (prepare ? 16 : 8), "%lu accepted", (unsigned long)counts[0]);
  CHECK(counts[FLASHTUNE_STATUS_INVALID_ARGUMENT] > count / 8, "%lu refused", (unsigned long)counts[1]);
  CHECK(counts[FLASHTUNE_STATUS_CUDA] == 0, "%lu errors of the driver", (unsigned long)counts[FLASHTUNE_STATUS_CUDA]);
  return 0;
}
