// Greedy decoding's memory traffic without its model: each step writes one new key and value of
// every sequence into pages (flashtune_kv_append) and attends over all keys so far. At the end the
// output of the last step is compared with plain arithmetic. On the CPU, in fp32.
#include <flashtune.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

int main() try {
  constexpr int batch = 3, heads_q = 4, heads_kv = 2, dim = 32, page_size = 16, steps = 40;
  constexpr int pages_each = (steps + page_size - 1) / page_size, num_pages = batch * pages_each;
  constexpr int row_kv = heads_kv * dim, row_q = heads_q * dim;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;

  // Pages in any order: sequence b's i-th page is block_table[b * pages_each + i].
  std::vector<int> block_table(num_pages);
  std::iota(block_table.begin(), block_table.end(), 0);
  std::shuffle(block_table.begin(), block_table.end(), random);
  std::vector<float> k_cache(num_pages * page_size * row_kv), v_cache(k_cache.size());
  std::vector<float> k_new(batch * row_kv), v_new(batch * row_kv), q(batch * row_q), out(batch * row_q);
  std::vector<float> all_k, all_v;  // for the comparison: (step, batch, heads_kv, dim)
  std::vector<int> before(batch, 0), after(batch, 0);

  flashtune::context context(flashtune::backend::cpu);
  auto workspace = flashtune::workspace::host();

  flashtune::kv_append_params append;
  append.dtype = FLASHTUNE_DTYPE_FP32;
  append.batch_size = batch, append.num_heads_kv = heads_kv, append.seqlen_new = 1;
  append.seqlen_cache = pages_each * page_size, append.head_dim = dim, append.head_dim_v = dim;
  append.k_new = flashtune::dense(k_new.data(), 1, heads_kv, dim);
  append.v_new = flashtune::dense(v_new.data(), 1, heads_kv, dim);
  append.k_cache = flashtune::dense(k_cache.data(), page_size, heads_kv, dim);
  append.v_cache = flashtune::dense(v_cache.data(), page_size, heads_kv, dim);
  append.seqlens = before.data(), append.seqused = after.data();
  append.block_table = block_table.data(), append.block_table_stride = pages_each;
  append.page_size = page_size, append.num_pages = num_pages;

  auto attend = flashtune::forward_params()
                    .with_dtype(flashtune::dtype::fp32)
                    .with_batch_size(batch)
                    .with_seqlens(1, pages_each * page_size)
                    .with_heads(heads_q, heads_kv)
                    .with_head_dim(dim)
                    .with_tensors(flashtune::dense(q.data(), 1, heads_q, dim), append.k_cache, append.v_cache,
                                  flashtune::dense(out.data(), 1, heads_q, dim))
                    .with_pages(block_table.data(), pages_each, page_size, num_pages)
                    .with_seqused_k(after.data());

  for (int step = 0; step < steps; step++) {
    for (auto *values : {&k_new, &v_new, &q})
      for (float &x : *values) x = normal(random);
    all_k.insert(all_k.end(), k_new.begin(), k_new.end());
    all_v.insert(all_v.end(), v_new.begin(), v_new.end());
    context.launch(append);
    context.launch(attend, workspace);
    before = after;
  }

  double worst = 0;
  for (int b = 0; b < batch; b++)
    for (int h = 0; h < heads_q; h++) {
      const int of_kv = b * row_kv + h / (heads_q / heads_kv) * dim;
      std::vector<double> weights(steps), result(dim);
      double sum = 0;
      for (int i = 0; i < steps; i++) {
        for (int c = 0; c < dim; c++) weights[i] += double(q[b * row_q + h * dim + c]) * all_k[i * batch * row_kv + of_kv + c];
        sum += weights[i] = std::exp(weights[i] / std::sqrt(double(dim)));
      }
      for (int i = 0; i < steps; i++)
        for (int c = 0; c < dim; c++) result[c] += weights[i] / sum * all_v[i * batch * row_kv + of_kv + c];
      for (int c = 0; c < dim; c++) worst = std::max(worst, std::abs(result[c] - out[b * row_q + h * dim + c]));
    }
  std::printf("%d sequences of %d keys in pages of %d; largest error %.1e\n", batch, after[0], page_size, worst);
  return worst < 1e-5 && after[0] == steps ? 0 : 1;
} catch (const flashtune::error &why) {
  std::fprintf(stderr, "flashtune: %s: %s\n", flashtune_status_string(why.status()), why.what());
  return 1;
}
