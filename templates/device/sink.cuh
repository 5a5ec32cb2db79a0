// The end of a row's softmax: what O is multiplied with, and the LSE, with the share that an attention sink takes.
//
// A sink is a score per query head to no key: it stands in the softmax's denominator, and so in the LSE, and adds nothing to O.

struct RowEnd {
    float factor;  // O / row_sum, and the sink's share
    float lse;     // natural log; -inf for a row that sees nothing and has no sink
};

// `sum` is of 2^(score - reference), both in log2 units; 0 for a row that sees nothing.
__device__ __forceinline__ RowEnd end_row(float sum, float reference, int head, const KernelParams& params) {
    const float keep_scale = kHasDropout ? params.dropout_keep_scale : 1.f;
    RowEnd end = {sum == 0.f ? 0.f : keep_scale / sum, sum == 0.f ? -infinity() : (reference + log2_approx(sum)) * kLn2};
    if constexpr (kHasSinks) {
        const float sink = params.sinks[head] * kLog2E, keys = reference + log2_approx(sum);
        if (sum == 0.f) {
            end.lse = params.sinks[head];
        } else if (sink != -infinity()) {  // nor is a NaN
            const float top = fmaxf(keys, sink), share = exp2_approx(keys - top), both = share + exp2_approx(sink - top);
            end.factor *= share / both;
            end.lse = (top + log2_approx(both)) * kLn2;
        }
    }
    return end;
}
