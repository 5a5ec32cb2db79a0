// A server's decoding loop in bf16, on a GPU with the CUDA runtime: 16 slots over pages, one
// captured graph and a sealed context, so that nothing is compiled while requests come and go.
// Between two replays a request leaves its slot, another one joins, or a slot stays idle. Only
// lengths and rows of the block table change then. Some steps are repeated on the CPU backend.
//
//   nvcc -std=c++17 serving.cu $(pkg-config --cflags --libs flashtune) -o serving
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <flashtune.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

constexpr int slots = 16, heads_q = 32, heads_kv = 8, dim = 128, page_size = 64, room = 512, steps = 1200;
constexpr int pages_each = room / page_size, num_pages = slots * pages_each;
constexpr int row_q = heads_q * dim, row_kv = heads_kv * dim;
using element = __nv_bfloat16;

static void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

template <class T>
static T *allocate(std::size_t elements) {
  void *memory;
  check(cudaMalloc(&memory, elements * sizeof(T)));
  check(cudaMemset(memory, 0, elements * sizeof(T)));
  return static_cast<T *>(memory);
}

template <class T>
static std::vector<T> read(const T *device, std::size_t elements) {
  std::vector<T> host(elements);
  check(cudaMemcpy(host.data(), device, elements * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

// Stands for the model: a number of -1 to 1 for each request, position and column.
__host__ __device__ inline element value(unsigned request, unsigned position, unsigned column) {
  unsigned x = ((request * 2654435761u + position) * 2246822519u + column) * 747796405u;
  x = (x >> (x >> 28) ^ x) * 277803737u;
  return __float2bfloat16(float(int(x >> 23) - 256) / 256.0f);
}

__global__ void model(element *q, element *k, element *v, const int *request, const int *length) {
  const int slot = blockIdx.x;
  for (int i = threadIdx.x; i < row_q; i += blockDim.x) q[slot * row_q + i] = value(request[slot], length[slot], i);
  for (int i = threadIdx.x; i < row_kv; i += blockDim.x) {
    k[slot * row_kv + i] = value(request[slot], length[slot], row_q + i);
    v[slot * row_kv + i] = value(request[slot], length[slot], row_q + row_kv + i);
  }
}

// The slots on the host. A request has all its pages from its join on.
struct Server {
  std::mt19937 random{7};
  std::vector<int> free_pages, block_table, request, length, active, last;
  int joined = 0, left = 0;

  Server() : free_pages(num_pages), block_table(num_pages), request(slots), length(slots), active(slots), last(slots) {
    std::iota(free_pages.begin(), free_pages.end(), 0);
    std::shuffle(free_pages.begin(), free_pages.end(), random);
  }
  static int pages_of(int keys) { return (keys + page_size - 1) / page_size; }

  // Requests that have all their tokens leave. An idle slot may take a new one.
  bool change() {
    bool changes = false;
    for (int slot = 0; slot < slots; slot++) {
      int *row = &block_table[slot * pages_each];
      if (active[slot] && length[slot] == last[slot]) {
        free_pages.insert(free_pages.begin(), row, row + pages_of(last[slot]));
        active[slot] = length[slot] = 0, left++, changes = true;
      }
      if (!active[slot] && random() % 20 == 0) {
        last[slot] = 1 + random() % room;
        for (int page = 0; page < pages_of(last[slot]); page++) row[page] = free_pages.back(), free_pages.pop_back();
        active[slot] = 1, request[slot] = ++joined, changes = true;
      }
    }
    return changes;
  }
};

int main() try {
  auto *q = allocate<element>(slots * row_q), *out = allocate<element>(slots * row_q);
  auto *k_new = allocate<element>(slots * row_kv), *v_new = allocate<element>(slots * row_kv);
  const std::size_t cached = std::size_t(num_pages) * page_size * row_kv;
  auto *k_cache = allocate<element>(cached), *v_cache = allocate<element>(cached);
  int *length = allocate<int>(slots), *active = allocate<int>(slots), *request = allocate<int>(slots);
  int *block_table = allocate<int>(num_pages);

  flashtune::context context(flashtune::backend::cuda);
  flashtune::kv_append_params append;
  append.dtype = FLASHTUNE_DTYPE_BF16;
  append.batch_size = slots, append.num_heads_kv = heads_kv, append.seqlen_new = 1, append.seqlen_cache = room;
  append.head_dim = dim, append.head_dim_v = dim;
  append.k_new = flashtune::dense(k_new, 1, heads_kv, dim), append.v_new = flashtune::dense(v_new, 1, heads_kv, dim);
  append.k_cache = flashtune::dense(k_cache, page_size, heads_kv, dim);
  append.v_cache = flashtune::dense(v_cache, page_size, heads_kv, dim);
  append.features = FLASHTUNE_APPEND_SLOTS;
  append.seqlens = length, append.seqused = length, append.seqused_new = active;  // lengths advance in place
  append.block_table = block_table, append.block_table_stride = pages_each;
  append.page_size = page_size, append.num_pages = num_pages;
  auto attend = flashtune::forward_params()
                    .with_dtype(flashtune::dtype::bf16)
                    .with_batch_size(slots)
                    .with_seqlens(1, room)
                    .with_heads(heads_q, heads_kv)
                    .with_head_dim(dim)
                    .with_tensors(flashtune::dense(q, 1, heads_q, dim), append.k_cache, append.v_cache,
                                  flashtune::dense(out, 1, heads_q, dim))
                    .with_pages(block_table, pages_each, page_size, num_pages)
                    .with_seqused_k(length);

  // One call prepares every batch up to this one. The sealed context then compiles nothing.
  flashtune_range range = {};
  range.struct_size = sizeof range, range.forward = &attend;
  const flashtune_range_info prepared = context.prepare_range(range);
  context.prepare(append);
  context.seal();
  auto workspace = flashtune::workspace::cuda();
  workspace.reserve(context.workspace_size(attend));

  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t step;
  check(cudaStreamCreate(&stream));
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  model<<<slots, 256, 0, stream>>>(q, k_new, v_new, request, length);
  context.launch(append, stream);
  context.launch(attend, workspace, stream);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&step, graph, 0));

  Server server;
  flashtune::context cpu(flashtune::backend::cpu);
  double worst = 0;
  int compared = 0;
  for (int i = 0; i < steps; i++) {
    if (server.change()) {
      const auto write = [&](int *to, const std::vector<int> &from) {
        check(cudaMemcpyAsync(to, from.data(), from.size() * sizeof(int), cudaMemcpyHostToDevice, stream));
      };
      write(length, server.length), write(active, server.active), write(request, server.request);
      write(block_table, server.block_table);
    }
    check(cudaGraphLaunch(step, stream));
    for (int slot = 0; slot < slots; slot++) server.length[slot] += server.active[slot];
    if (i % 100 != 99) continue;

    // ---- the step again on the CPU, over the keys that the model gave
    check(cudaStreamSynchronize(stream));
    if (read(length, slots) != server.length) return std::fprintf(stderr, "a length is wrong\n"), 1;
    const auto got = read(out, slots * row_q), on_device = read(q, slots * row_q);
    std::vector<element> k(cached), v(cached), expected(slots * row_q);
    for (int slot = 0; slot < slots; slot++) {
      for (int key = 0; key < server.length[slot]; key++) {
        const int page = server.block_table[slot * pages_each + key / page_size];
        const std::size_t row = (std::size_t(page) * page_size + key % page_size) * row_kv;
        for (int column = 0; column < row_kv; column++) {
          k[row + column] = value(server.request[slot], key, row_q + column);
          v[row + column] = value(server.request[slot], key, row_q + row_kv + column);
        }
      }
    }
    auto on_host = attend;
    on_host.with_tensors(flashtune::dense(on_device.data(), 1, heads_q, dim), flashtune::dense(k.data(), page_size, heads_kv, dim),
                         flashtune::dense(v.data(), page_size, heads_kv, dim), flashtune::dense(expected.data(), 1, heads_q, dim));
    on_host.block_table = server.block_table.data(), on_host.seqused_k = server.length.data();
    auto none = flashtune::workspace::host();
    cpu.launch(on_host, none);
    for (std::size_t at = 0; at < got.size(); at++) {
      const double difference = std::fabs(__bfloat162float(got[at]) - __bfloat162float(expected[at]));
      worst = std::isnan(difference) ? INFINITY : std::max(worst, difference);
    }
    compared++;
  }
  std::printf("%d kernels for the range in %.0f ms; %d requests joined and %d left in %d replays\n", int(prepared.num_kernels),
              double(prepared.milliseconds), server.joined, server.left, steps);
  std::printf("%d steps agree with the CPU backend to %.1e\n", compared, worst);
  return worst < 1e-2 && server.left > slots ? 0 : 1;
} catch (const flashtune::error &why) {
  std::fprintf(stderr, "flashtune: %s: %s\n", flashtune_status_string(why.status()), why.what());
  return 1;
}
