// flashtune.hpp: values, failures, ownership and workspaces, on the CPU. It compiles with and
// without exceptions.
#include <flashtune.hpp>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <vector>

static int failures = 0;

#define CHECK(condition)                                                     \
  do {                                                                       \
    if (!(condition)) failures++, std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
  } while (0)

static_assert(!std::is_copy_constructible_v<flashtune::context> && std::is_nothrow_move_constructible_v<flashtune::context>);
static_assert(std::is_base_of_v<flashtune_forward_params, flashtune::forward_params>);
static_assert(sizeof(flashtune::forward_params) == sizeof(flashtune_forward_params), "the C functions take its address");

// Every setter is compiled, so that a warning in one fails the test.
template struct flashtune::pass_params<flashtune::forward_params, flashtune_forward_params>;
template struct flashtune::pass_params<flashtune::backward_params, flashtune_backward_params>;

namespace {

constexpr int seqlen = 20, heads = 2, dim = 16, count = seqlen * heads * dim;

struct Attention {
  std::vector<float> q = std::vector<float>(count, 0.5f), k = q, v = std::vector<float>(count, 1), out = q, lse = std::vector<float>(heads * seqlen);

  flashtune::forward_params params() {
    auto dense = [](std::vector<float> &data) { return flashtune::dense(data.data(), seqlen, heads, dim); };
    return flashtune::forward_params()
        .with_dtype(flashtune::dtype::fp32)
        .with_causal(flashtune::causal::bottom_right)
        .with_batch_size(1)
        .with_seqlens(seqlen, seqlen)
        .with_heads(heads, heads)
        .with_head_dim(dim)
        .with_tensors(dense(q), dense(k), dense(v), dense(out), lse.data());
  }
  bool is_one() const {
    for (float x : out)
      if (std::fabs(x - 1) > 1e-5f) return false;
    return true;
  }
};

flashtune::context open() {
  auto options = flashtune::context_options().with_backend(flashtune::backend::cpu).with_cache_dir("").with_pack("").with_num_threads(1);
  return std::move(flashtune::context::try_open(options)).value();
}

void results_hold_values_or_failures() {
  auto wrong = flashtune::context_options();
  wrong.num_threads = -1;
  auto refused = flashtune::context::try_open(wrong);
  CHECK(!refused && refused.why().status == FLASHTUNE_STATUS_INVALID_ARGUMENT);
  CHECK(refused.why().message.find("num_threads is -1") != std::string::npos);

  auto context = open();
  Attention a;
  auto memory = flashtune::workspace::host();
  CHECK(context.try_supported(a.params()));
  CHECK(context.try_launch(a.params(), memory));
  CHECK(a.is_one());
  auto bad = a.params().with_heads(3, 2);
  auto failed = context.try_launch(bad, memory);
  CHECK(!failed && failed.why().message.find("num_heads") != std::string::npos);
  auto info = context.try_plan_info(a.params());
  CHECK(info && std::strncmp(info->config, "cpu ", 4) == 0);
  CHECK(context.try_device()->backend == FLASHTUNE_BACKEND_CPU);
  CHECK(context.try_pack()->state == FLASHTUNE_PACK_NONE);
}

void moved_contexts_work_and_sealed_ones_prepare_nothing() {
  auto first = open();
  auto second = std::move(first);
  CHECK(first.get() == nullptr && second.get() != nullptr);
  CHECK(second.try_seal());
  Attention a;
  auto refused = second.try_prepare(a.params());
  CHECK(!refused && refused.why().status == FLASHTUNE_STATUS_NOT_PREPARED);
}

void prepared_ranges_are_described() {
  auto context = open();
  Attention a;
  auto params = a.params();
  flashtune::zeroed<flashtune_range> range;
  auto refused = context.try_prepare_range(range);
  CHECK(!refused && refused.why().status == FLASHTUNE_STATUS_INVALID_ARGUMENT);
  range.forward = &params;
  auto prepared = context.try_prepare_range(range);
  CHECK(prepared && prepared->num_classes >= 1 && prepared->num_kernels == 0);
  CHECK(context.try_seal());
  CHECK(context.try_prepare(params));
}

void workspaces_grow_and_report_missing_memory() {
  auto context = open();
  Attention a;
  auto forward = a.params();
  auto made = flashtune::backward_params::try_from(forward);
  CHECK(made && made->q.data == a.q.data() && made->lse == a.lse.data() && made->dq.data == nullptr);
  std::vector<float> dout(count, 1), dq(count, 9), dk(count, 9), dv(count, 9);
  auto dense = [](std::vector<float> &data) { return flashtune::dense(data.data(), seqlen, heads, dim); };
  auto backward = made->with_gradients(dense(dout), dense(dq), dense(dk), dense(dv));
  auto memory = flashtune::workspace::host();
  CHECK(context.try_launch(forward, memory) && context.try_launch(backward, memory));
  CHECK(memory.bytes() == *context.try_workspace_size(backward) && reinterpret_cast<std::uintptr_t>(memory.data()) % 256 == 0);
  float sum = 0;  // every weight's gradient is in dv: one for each query and channel
  for (float x : dv) sum += x;
  CHECK(std::fabs(sum - count) < 1e-2f * count && std::fabs(dq[5]) < 1e-5f);

  flashtune::workspace none([](std::size_t) { return std::shared_ptr<void>(); });
  auto failed = context.try_launch(backward, none);
  CHECK(!failed && failed.why().status == FLASHTUNE_STATUS_OUT_OF_MEMORY);

  auto paged = forward.with(FLASHTUNE_FEATURE_PAGED);
  CHECK(flashtune::backward_params::try_from(paged).why().status == FLASHTUNE_STATUS_UNSUPPORTED);
}

// K of ones and V of ones in 8 bits: out is 1.
void tensors_of_eight_bits_are_quantised_and_read() {
  auto context = open();
  constexpr std::uint16_t one = 0x3c00;  // in fp16
  std::vector<std::uint16_t> x(count, one), out(count, 0);
  auto rows = [](auto *data) { return flashtune::dense(data, seqlen, heads, dim); };
  for (auto type : {flashtune::dtype::e4m3, flashtune::dtype::e5m2, flashtune::dtype::int8}) {
    std::vector<std::uint8_t> eight(count, 0);
    std::vector<float> scales(heads, 0);
    const flashtune::strides by_head{heads, 0, 1};
    flashtune::quantize_params quantize;
    quantize.dtype = FLASHTUNE_DTYPE_FP16, quantize.out_dtype = static_cast<std::int32_t>(type);
    quantize.batch_size = 1, quantize.seqlen = seqlen, quantize.num_heads = heads, quantize.head_dim = dim;
    quantize.x = rows(x.data()), quantize.out = rows(eight.data());
    quantize.descale = flashtune::tensor(scales.data(), by_head);
    quantize.heads_per_descale = 1, quantize.computes_descale = 1;
    CHECK(context.try_launch(quantize));
    auto memory = flashtune::workspace::host();
    auto forward = flashtune::forward_params()
                       .with_dtype(flashtune::dtype::fp16)
                       .with_kv_dtype(type)
                       .with_kv_descales(flashtune::tensor(scales.data(), by_head), quantize.descale)
                       .with_batch_size(1)
                       .with_seqlens(seqlen, seqlen)
                       .with_heads(heads, heads)
                       .with_head_dim(dim)
                       .with_tensors(rows(x.data()), rows(eight.data()), rows(eight.data()), rows(out.data()));
    out.assign(count, 0);
    CHECK(context.try_launch(forward, memory));
    for (std::uint16_t y : out) CHECK(y == one);
  }
  auto wrong = flashtune::forward_params().with_dtype(flashtune::dtype::e4m3).with_out_dtype(flashtune::dtype::fp32);
  wrong.with_q_descale(flashtune::tensor(nullptr, {})).with_kv_dtype(flashtune::dtype::int4_group64);
  CHECK(!context.try_supported(wrong));
}

#ifndef FLASHTUNE_NO_EXCEPTIONS
void failures_throw_with_their_status() {
  auto context = open();
  Attention a;
  auto memory = flashtune::workspace::host();
  context.prepare(a.params());
  context.launch(a.params(), memory);
  CHECK(a.is_one());
  try {
    context.launch(a.params().with_head_dim(0), memory);
    CHECK(!"it threw nothing");
  } catch (const flashtune::error &why) {
    CHECK(why.status() == FLASHTUNE_STATUS_INVALID_ARGUMENT && std::strstr(why.what(), "head_dim is 0"));
  }
}
#endif

}  // namespace

int main() {
  results_hold_values_or_failures();
  moved_contexts_work_and_sealed_ones_prepare_nothing();
  prepared_ranges_are_described();
  workspaces_grow_and_report_missing_memory();
  tensors_of_eight_bits_are_quantised_and_read();
#ifndef FLASHTUNE_NO_EXCEPTIONS
  failures_throw_with_their_status();
#endif
  return failures;
}
