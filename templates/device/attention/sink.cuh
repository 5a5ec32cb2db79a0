// The end of a row's softmax: the factor of O, and the LSE, with the share of an attention sink.
// Forward kernels and combine call it once a row. It knows no accumulator.
//
// A sink is a score per query head that belongs to no key. It adds to the softmax's denominator,
// and so to the LSE, and adds nothing to O.

#include "device/numeric.cuh"
#include "device/params.cuh"

struct RowEnd {
    float factor;  // 1 / row_sum, with the sink's share and the dropout scale
    float lse;     // natural log; -inf for a row that sees no key and has no sink
};

// `sum` is the sum of 2^(score - reference), both in log2 units. It is 0 for a row that sees no
// key.
__device__ __forceinline__ RowEnd end_row(float sum, float reference, int head, const KernelParams& params) {
    const float keep_scale = kHasDropout ? params.dropout_keep_scale : 1.f;
    RowEnd end = {sum == 0.f ? 0.f : keep_scale / sum, sum == 0.f ? -infinity() : natural_log(sum, reference)};
    if constexpr (kHasSinks) {
        const float sink = params.sinks[head] * kLog2E;
        if (sum == 0.f) {
            end.lse = params.sinks[head];
        } else if (sink != -infinity()) {  // a NaN sink takes this branch too
            const float top = fmaxf(reference, sink), share = exp2_approx(reference - top), both = sum * share + exp2_approx(sink - top);
            end = {keep_scale * share / both, natural_log(both, top)};
        }
    }
    return end;
}
