// The end of a row's softmax: what O is multiplied with, and the LSE, with the share that an
// attention sink takes.
//
// A sink is a score per query head to no key: it stands in the softmax's denominator, and so in the
// LSE, and adds nothing to O.

#include "device/numeric.cuh"
#include "device/params.cuh"

struct RowEnd {
    float factor;  // O / row_sum, and the sink's share
    float lse;     // natural log; -inf for a row that sees nothing and has no sink
};

// `sum` is of 2^(score - reference), both in log2 units; 0 for a row that sees nothing.
__device__ __forceinline__ RowEnd end_row(float sum, float reference, int head, const KernelParams& params) {
    const float keep_scale = kHasDropout ? params.dropout_keep_scale : 1.f;
    RowEnd end = {sum == 0.f ? 0.f : keep_scale / sum, sum == 0.f ? -infinity() : natural_log(sum, reference)};
    if constexpr (kHasSinks) {
        const float sink = params.sinks[head] * kLog2E;
        if (sum == 0.f) {
            end.lse = params.sinks[head];
        } else if (sink != -infinity()) {  // nor is a NaN
            const float top = fmaxf(reference, sink), share = exp2_approx(reference - top), both = sum * share + exp2_approx(sink - top);
            end = {keep_scale * share / both, natural_log(both, top)};
        }
    }
    return end;
}
