// flashtune.hpp: a thin C++17 wrapper of flashtune.h. It is header only and links to the same
// library.
//
// - context owns a flashtune_context. It moves and does not copy.
// - forward_params, backward_params, merge_params, kv_append_params and quantize_params are the C
//   structs, zeroed, with struct_size set. The with_* functions set fields that belong together and
//   their feature bits. All fields are reachable by their names in flashtune.h, which describes
//   them.
// - Each call has two forms. launch() throws flashtune::error. try_launch() returns a result, which
//   holds the value or the failure. With -fno-exceptions, or FLASHTUNE_NO_EXCEPTIONS defined before
//   the include, only the second form exists.
// - workspace is memory that grows to the largest launch.
//
// Tensors, streams, captures and threads follow the rules of flashtune.h.

#ifndef FLASHTUNE_HPP
#define FLASHTUNE_HPP

#include "flashtune.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#if !defined(FLASHTUNE_NO_EXCEPTIONS) && !defined(__cpp_exceptions)
#define FLASHTUNE_NO_EXCEPTIONS
#endif

namespace flashtune {

enum class dtype : std::int32_t {
  fp16 = FLASHTUNE_DTYPE_FP16,
  bf16 = FLASHTUNE_DTYPE_BF16,
  fp32 = FLASHTUNE_DTYPE_FP32,
  e4m3 = FLASHTUNE_DTYPE_E4M3,
  e5m2 = FLASHTUNE_DTYPE_E5M2,
  int8 = FLASHTUNE_DTYPE_INT8,
  int4_group32 = FLASHTUNE_DTYPE_INT4_GROUP32,
  int4_group64 = FLASHTUNE_DTYPE_INT4_GROUP64
};

enum class causal : std::int32_t {
  none = FLASHTUNE_CAUSAL_NONE,
  top_left = FLASHTUNE_CAUSAL_TOP_LEFT,
  bottom_right = FLASHTUNE_CAUSAL_BOTTOM_RIGHT
};

enum class backend : std::int32_t {
  automatic = FLASHTUNE_BACKEND_AUTO,
  cuda = FLASHTUNE_BACKEND_CUDA,
  cpu = FLASHTUNE_BACKEND_CPU
};

// A status other than OK, a FLASHTUNE_STATUS_*, and the sentence that names the reason.
struct failure {
  std::int32_t status = FLASHTUNE_STATUS_OK;
  std::string message;
};

#ifndef FLASHTUNE_NO_EXCEPTIONS
class error : public std::runtime_error {
 public:
  explicit error(const failure &why) : std::runtime_error(why.message), status_(why.status) {}
  std::int32_t status() const noexcept { return status_; }

 private:
  std::int32_t status_;
};
#endif

// A value or a failure. value() of a failure throws flashtune::error, or aborts without exceptions.
template <class T>
class [[nodiscard]] result {
 public:
  result(T value) : value_(std::move(value)) {}
  result(failure why) : failure_(std::move(why)) {}

  bool has_value() const noexcept { return value_.has_value(); }
  explicit operator bool() const noexcept { return has_value(); }
  const failure &why() const noexcept { return failure_; }

  T &value() & { return require(), *value_; }
  T &&value() && { return require(), *std::move(value_); }
  const T &value() const & { return require(), *value_; }
  T &operator*() & { return value(); }
  T &&operator*() && { return std::move(*this).value(); }
  const T &operator*() const & { return value(); }
  T *operator->() { return &value(); }
  const T *operator->() const { return &value(); }

 private:
  void require() const {
    if (has_value()) return;
#ifdef FLASHTUNE_NO_EXCEPTIONS
    std::abort();
#else
    throw error(failure_);
#endif
  }

  std::optional<T> value_;
  failure failure_;
};

// Success without a value.
struct done {};

namespace detail {

inline result<done> of(std::int32_t status) {
  if (status == FLASHTUNE_STATUS_OK) return done{};
  return failure{status, flashtune_last_error()};
}

// The functions of each pass, by its struct.
inline std::int32_t supported(flashtune_context *c, const flashtune_forward_params &p) { return flashtune_forward_supported(c, &p); }
inline std::int32_t supported(flashtune_context *c, const flashtune_backward_params &p) { return flashtune_backward_supported(c, &p); }
inline std::int32_t prepare(flashtune_context *c, const flashtune_forward_params &p) { return flashtune_forward_prepare(c, &p); }
inline std::int32_t prepare(flashtune_context *c, const flashtune_backward_params &p) { return flashtune_backward_prepare(c, &p); }
inline std::int32_t prepare(flashtune_context *c, const flashtune_merge_params &p) { return flashtune_merge_prepare(c, &p); }
inline std::int32_t prepare(flashtune_context *c, const flashtune_kv_append_params &p) { return flashtune_kv_append_prepare(c, &p); }
inline std::int32_t prepare(flashtune_context *c, const flashtune_quantize_params &p) { return flashtune_quantize_prepare(c, &p); }
inline std::int32_t size(flashtune_context *c, const flashtune_forward_params &p, std::uint64_t *b) { return flashtune_forward_workspace_size(c, &p, b); }
inline std::int32_t size(flashtune_context *c, const flashtune_backward_params &p, std::uint64_t *b) { return flashtune_backward_workspace_size(c, &p, b); }
inline std::int32_t info(flashtune_context *c, const flashtune_forward_params &p, flashtune_plan_info *i) { return flashtune_forward_plan_info(c, &p, i); }
inline std::int32_t info(flashtune_context *c, const flashtune_backward_params &p, flashtune_plan_info *i) { return flashtune_backward_plan_info(c, &p, i); }
inline std::int32_t launch(flashtune_context *c, const flashtune_forward_params &p, void *w, std::uint64_t b, void *s) { return flashtune_forward(c, &p, w, b, s); }
inline std::int32_t launch(flashtune_context *c, const flashtune_backward_params &p, void *w, std::uint64_t b, void *s) { return flashtune_backward(c, &p, w, b, s); }
inline std::int32_t launch(flashtune_context *c, const flashtune_merge_params &p, void *s) { return flashtune_merge(c, &p, s); }
inline std::int32_t launch(flashtune_context *c, const flashtune_kv_append_params &p, void *s) { return flashtune_kv_append(c, &p, s); }
inline std::int32_t launch(flashtune_context *c, const flashtune_quantize_params &p, void *s) { return flashtune_quantize(c, &p, s); }
inline void point(flashtune_autotune_params &to, const flashtune_forward_params &p) { to.forward = &p; }
inline void point(flashtune_autotune_params &to, const flashtune_backward_params &p) { to.backward = &p; }

}  // namespace detail

// Elements from one entry to the next. The last dim is contiguous.
struct strides {
  std::int64_t batch = 0, seqlen = 0, head = 0;
};

// A tensor that is written. It may also be read, so it converts to an input.
struct output : flashtune_tensor {
  operator flashtune_const_tensor() const noexcept { return {data, stride_batch, stride_seqlen, stride_head}; }
};

// A tensor that is read, of either C struct.
struct input : flashtune_const_tensor {
  input(const flashtune_const_tensor &t) noexcept : flashtune_const_tensor(t) {}
  input(const flashtune_tensor &t) noexcept : flashtune_const_tensor{t.data, t.stride_batch, t.stride_seqlen, t.stride_head} {}
};

// The same for tensors of scores.
struct scores_input : flashtune_const_scores_tensor {
  scores_input(const flashtune_const_scores_tensor &t) noexcept : flashtune_const_scores_tensor(t) {}
  scores_input(const flashtune_scores_tensor &t) noexcept
      : flashtune_const_scores_tensor{t.data, t.stride_batch, t.stride_head, t.stride_seqlen_q, t.stride_seqlen_k} {}
};

// A tensor of the given strides. Data that is const makes a tensor that is only read.
inline output tensor(void *data, strides by) { return output{{data, by.batch, by.seqlen, by.head}}; }
inline flashtune_const_tensor tensor(const void *data, strides by) { return {data, by.batch, by.seqlen, by.head}; }

// A tensor without memory, for calls that read no data, such as prepare.
inline output tensor(std::nullptr_t, strides by) { return tensor(static_cast<void *>(nullptr), by); }

// A contiguous (batch, seqlen, heads, dim) tensor.
template <class T>
auto dense(T *data, std::int64_t seqlen, std::int64_t heads, std::int64_t dim) {
  return tensor(data, {seqlen * heads * dim, heads * dim, dim});
}

// One slice of a packed (batch, seqlen, slices, heads, dim) buffer. `data` is the slice's first
// element.
template <class T>
auto packed(T *data, std::int64_t slices, std::int64_t seqlen, std::int64_t heads, std::int64_t dim) {
  return tensor(data, {seqlen * slices * heads * dim, slices * heads * dim, dim});
}

// A C struct, zeroed, with struct_size set.
template <class C>
struct zeroed : C {
  zeroed() : C() { this->struct_size = sizeof(C); }
};

struct merge_params : zeroed<flashtune_merge_params> {};
struct kv_append_params : zeroed<flashtune_kv_append_params> {};
struct quantize_params : zeroed<flashtune_quantize_params> {};

// What both passes have.
template <class Self, class C>
struct pass_params : zeroed<C> {
  Self &with_dtype(flashtune::dtype type) { return this->dtype = static_cast<std::int32_t>(type), self(); }
  Self &with_causal(flashtune::causal aligned) { return this->causal = static_cast<std::int32_t>(aligned), self(); }
  Self &with_batch_size(std::int64_t size) { return this->batch_size = size, self(); }
  Self &with_seqlens(std::int64_t of_q, std::int64_t of_k) { return this->seqlen_q = of_q, this->seqlen_k = of_k, self(); }
  Self &with_heads(std::int64_t of_q, std::int64_t of_kv) { return this->num_heads_q = of_q, this->num_heads_kv = of_kv, self(); }
  Self &with_head_dim(std::int64_t dim) { return with_head_dims(dim, dim); }
  Self &with_head_dims(std::int64_t dim, std::int64_t dim_v) { return this->head_dim = dim, this->head_dim_v = dim_v, self(); }
  // 0 is 1 / sqrt(head_dim).
  Self &with_softmax_scale(float scale) { return this->softmax_scale = scale, self(); }
  // The probability to drop a weight.
  Self &with_dropout(float p, std::uint64_t seed, std::uint64_t offset = 0) {
    return this->dropout_p = p, this->dropout_seed = seed, this->dropout_offset = offset, self();
  }
  Self &with_softcap(float cap) { return this->softcap = cap, self(); }
  // Keys before and after a query's diagonal; -1 is all. The diagonal aligns as `bottom_right`
  // says.
  Self &with_window(std::int64_t left, std::int64_t right, bool bottom_right = true) {
    this->window = bottom_right ? FLASHTUNE_WINDOW_BOTTOM_RIGHT : FLASHTUNE_WINDOW_TOP_LEFT;
    return this->window_left = left, this->window_right = right, self();
  }
  Self &with_alibi(const float *slopes, std::int64_t stride_batch = 0) {
    return this->alibi_slopes = slopes, this->alibi_stride_batch = stride_batch, with(FLASHTUNE_FEATURE_ALIBI);
  }
  Self &with_bias(const scores_input &added) { return this->bias = added, with(FLASHTUNE_FEATURE_BIAS); }
  Self &with_mask(const scores_input &seen) { return this->mask = seen, with(FLASHTUNE_FEATURE_MASK); }
  Self &with_block_mask(const flashtune_block_mask &lists) {
    return this->block_mask = lists, with(FLASHTUNE_FEATURE_BLOCK_MASK);
  }
  Self &with_sinks(const float *scores) { return this->sinks = scores, with(FLASHTUNE_FEATURE_SINKS); }
  // Sequences end to end: batch_size + 1 offsets, and the rows of all sequences.
  Self &with_cu_seqlens(const std::int32_t *of_q, std::int64_t rows_q, const std::int32_t *of_k, std::int64_t rows_k) {
    this->cu_seqlens_q = of_q, this->total_q = rows_q, this->cu_seqlens_k = of_k, this->total_k = rows_k;
    return with(FLASHTUNE_FEATURE_CU_SEQLENS_Q | FLASHTUNE_FEATURE_CU_SEQLENS_K);
  }
  Self &with_seqused_q(const std::int32_t *lengths) { return this->seqused_q = lengths, with(FLASHTUNE_FEATURE_SEQUSED_Q); }
  Self &with_seqused_k(const std::int32_t *lengths) { return this->seqused_k = lengths, with(FLASHTUNE_FEATURE_SEQUSED_K); }
  // Adds FLASHTUNE_FEATURE_* bits.
  Self &with(std::uint64_t bits) { return this->features |= bits, self(); }

 private:
  Self &self() { return static_cast<Self &>(*this); }
};

struct forward_params : pass_params<forward_params, flashtune_forward_params> {
  // softmax_lse: fp32 (batch_size, num_heads_q, seqlen_q), which a backward pass needs; NULL if not
  // wanted.
  forward_params &with_tensors(const input &query, const input &key, const input &value, flashtune_tensor written,
                               float *softmax_lse = nullptr) {
    return this->q = query, this->k = key, this->v = value, this->out = written, this->lse = softmax_lse, *this;
  }
  // k and v are then (num_pages, page_size, num_heads_kv, dim).
  forward_params &with_pages(const std::int32_t *table, std::int64_t table_stride, std::int64_t keys_per_page,
                             std::int64_t count) {
    this->block_table = table, this->block_table_stride = table_stride;
    this->page_size = keys_per_page, this->num_pages = count;
    return with(FLASHTUNE_FEATURE_PAGED);
  }
  // k and v of 8 bits or int4 beside a 16-bit q. Rows of int4 hold their scales.
  forward_params &with_kv_dtype(flashtune::dtype type) { return this->kv_dtype = static_cast<std::int32_t>(type), *this; }
  // The type of out, with q, k and v in e4m3.
  forward_params &with_out_dtype(flashtune::dtype type) { return this->out_dtype = static_cast<std::int32_t>(type), *this; }
  // fp32 scales of k and v of 8 bits. `keys` share one: 0 (all of a sequence), 1 or 128.
  forward_params &with_kv_descales(const input &of_k, const input &of_v, std::int64_t keys = 0) {
    return this->k_descale = of_k, this->v_descale = of_v, this->keys_per_descale = keys, *this;
  }
  forward_params &with_q_descale(const input &of_q) { return this->q_descale = of_q, *this; }
};

struct backward_params : pass_params<backward_params, flashtune_backward_params> {
  // The fields that the forward pass has too. dout and the gradients remain to be set.
  static result<backward_params> try_from(const flashtune_forward_params &forward) {
    backward_params made;
    auto written = detail::of(flashtune_backward_params_from_forward(&forward, &made));
    if (!written) return written.why();
    return made;
  }
#ifndef FLASHTUNE_NO_EXCEPTIONS
  static backward_params from(const flashtune_forward_params &forward) { return try_from(forward).value(); }
#endif
  backward_params &with_gradients(const input &of_out, flashtune_tensor of_q, flashtune_tensor of_k, flashtune_tensor of_v) {
    return this->dout = of_out, this->dq = of_q, this->dk = of_k, this->dv = of_v, *this;
  }
};

// Memory for launches. It grows to the largest size asked for and is freed at the end. Launches
// that share a workspace run one after the other, on one stream or in a caller's order.
class workspace {
 public:
  // Returns memory aligned to 256 bytes, which frees itself, or an empty pointer. Memory that is
  // freed when a workspace grows may still be in use by enqueued work: cudaFree waits for that.
  using allocate = std::function<std::shared_ptr<void>(std::size_t bytes)>;

  explicit workspace(allocate from) : allocate_(std::move(from)) {}

  static workspace host() {
    return workspace([](std::size_t bytes) {
      constexpr std::align_val_t alignment{256};
      void *memory = ::operator new(bytes, alignment, std::nothrow);
      return std::shared_ptr<void>(memory, [=](void *p) { ::operator delete(p, alignment); });
    });
  }
#ifdef CUDART_VERSION  // <cuda_runtime_api.h> was included before
  static workspace cuda() {
    return workspace([](std::size_t bytes) {
      void *memory = nullptr;
      if (cudaMalloc(&memory, bytes) != cudaSuccess) memory = nullptr;
      return std::shared_ptr<void>(memory, [](void *p) { cudaFree(p); });
    });
  }
#endif

  std::uint64_t bytes() const noexcept { return bytes_; }
  void *data() const noexcept { return memory_.get(); }

  result<done> try_reserve(std::uint64_t bytes) {
    if (bytes <= bytes_) return done{};
    std::shared_ptr<void> larger = allocate_(static_cast<std::size_t>(bytes));
    if (!larger) return failure{FLASHTUNE_STATUS_OUT_OF_MEMORY, "no memory for a workspace of " + std::to_string(bytes) + " bytes"};
    return memory_ = std::move(larger), bytes_ = bytes, done{};
  }
#ifndef FLASHTUNE_NO_EXCEPTIONS
  void reserve(std::uint64_t bytes) { try_reserve(bytes).value(); }
#endif

 private:
  allocate allocate_;
  std::shared_ptr<void> memory_;
  std::uint64_t bytes_ = 0;
};

struct context_options : zeroed<flashtune_context_options> {
  context_options &with_backend(flashtune::backend on) { return this->backend = static_cast<std::int32_t>(on), *this; }
  context_options &with_device(std::int32_t ordinal) { return this->device_ordinal = ordinal, *this; }
  // The string must live until the context is made. "" keeps everything in memory.
  context_options &with_cache_dir(const char *folder) { return this->cache_dir = folder, *this; }
  // The string must live until the context is made. "" uses no pack.
  context_options &with_pack(const char *file) { return this->pack = file, *this; }
  context_options &with_num_threads(std::int32_t threads) { return this->num_threads = threads, *this; }
};

// A device, its plans and its records.
class context {
 public:
  static result<context> try_open(const flashtune_context_options &options) {
    flashtune_context *made = nullptr;
    auto opened = detail::of(flashtune_context_create(&options, &made));
    if (!opened) return opened.why();
    return context(made);
  }
#ifndef FLASHTUNE_NO_EXCEPTIONS
  explicit context(const flashtune_context_options &options) : context(try_open(options).value()) {}
  explicit context(backend on = backend::automatic) : context(context_options().with_backend(on)) {}
#endif

  // For functions of flashtune.h that have no wrapper.
  flashtune_context *get() const noexcept { return context_.get(); }

  result<flashtune_device_info> try_device() const {
    zeroed<flashtune_device_info> info;
    auto asked = detail::of(flashtune_context_device(get(), &info));
    return with(std::move(asked), flashtune_device_info(info));
  }
  result<flashtune_pack_info> try_pack() const {
    zeroed<flashtune_pack_info> info;
    auto asked = detail::of(flashtune_context_pack(get(), &info));
    return with(std::move(asked), flashtune_pack_info(info));
  }
  // Prepares every problem of a range. zeroed<flashtune_range> is one without params.
  result<flashtune_range_info> try_prepare_range(const flashtune_range &range) {
    zeroed<flashtune_range_info> info;
    auto prepared = detail::of(flashtune_prepare_range(get(), &range, &info));
    return with(std::move(prepared), flashtune_range_info(info));
  }
  result<done> try_seal() { return detail::of(flashtune_context_seal(get())); }

  // Params is one of the five structs, or the C struct under it.
  template <class Params>
  result<done> try_supported(const Params &params) const { return detail::of(detail::supported(get(), params)); }
  template <class Params>
  result<done> try_prepare(const Params &params) { return detail::of(detail::prepare(get(), params)); }
  template <class Params>
  result<std::uint64_t> try_workspace_size(const Params &params) const {
    std::uint64_t bytes = 0;
    auto asked = detail::of(detail::size(get(), params, &bytes));
    return with(std::move(asked), bytes);
  }
  template <class Params>
  result<flashtune_plan_info> try_plan_info(const Params &params) {
    zeroed<flashtune_plan_info> info;
    auto asked = detail::of(detail::info(get(), params, &info));
    return with(std::move(asked), flashtune_plan_info(info));
  }
  // One pass. The workspace grows if it is too small; a graph is captured with one that is not.
  template <class Params>
  result<done> try_launch(const Params &params, workspace &memory, void *stream = nullptr) {
    auto bytes = try_workspace_size(params);
    if (!bytes) return bytes.why();
    if (auto reserved = memory.try_reserve(*bytes); !reserved) return reserved;
    return try_launch(params, memory.data(), memory.bytes(), stream);
  }
  template <class Params>
  result<done> try_launch(const Params &params, void *memory, std::uint64_t bytes, void *stream) {
    return detail::of(detail::launch(get(), params, memory, bytes, stream));
  }
  // Merging, appending and quantising need no workspace.
  template <class Params>
  result<done> try_launch(const Params &params, void *stream = nullptr) {
    return detail::of(detail::launch(get(), params, stream));
  }
  // Measures the candidates for one pass; 0 seconds mean the default limit.
  template <class Params>
  result<done> try_autotune(const Params &params, double seconds = 0) {
    zeroed<flashtune_autotune_params> tune;
    tune.time_limit_seconds = seconds;
    detail::point(tune, params);
    return detail::of(flashtune_autotune(get(), &tune));
  }

#ifndef FLASHTUNE_NO_EXCEPTIONS
  flashtune_device_info device() const { return try_device().value(); }
  flashtune_pack_info pack() const { return try_pack().value(); }
  flashtune_range_info prepare_range(const flashtune_range &range) { return try_prepare_range(range).value(); }
  void seal() { try_seal().value(); }
  template <class Params>
  void supported(const Params &params) const { try_supported(params).value(); }
  template <class Params>
  void prepare(const Params &params) { try_prepare(params).value(); }
  template <class Params>
  std::uint64_t workspace_size(const Params &params) const { return try_workspace_size(params).value(); }
  template <class Params>
  flashtune_plan_info plan_info(const Params &params) { return try_plan_info(params).value(); }
  template <class Params, class... Rest>
  void launch(const Params &params, Rest &&...rest) { try_launch(params, std::forward<Rest>(rest)...).value(); }
  template <class Params>
  void autotune(const Params &params, double seconds = 0) { try_autotune(params, seconds).value(); }
#endif

 private:
  struct destroy {
    void operator()(flashtune_context *context) const noexcept { flashtune_context_destroy(context); }
  };

  explicit context(flashtune_context *made) : context_(made) {}

  template <class T>
  static result<T> with(result<done> status, T value) {
    if (!status) return status.why();
    return value;
  }

  std::unique_ptr<flashtune_context, destroy> context_;
};

}  // namespace flashtune

#endif
