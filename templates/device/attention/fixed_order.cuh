// The order of a row's arithmetic with kIsBatchInvariant, which all families keep. The result of a
// row then follows from its query and its keys alone. Other rows, splits and kernels do not matter.
//
// Keys form blocks of kBlockN (64 in 16 bits), segments of at least 1,024 keys and groups of four
// segments, all at absolute places of the sequence. A segment is walked from its last block to its
// first, and begins with an empty state. The segments of a group are merged from the last to the
// first, and then the groups in the same order. A row that sees no key of a block, a segment or a
// group keeps its state to the bit, so it does not matter whether a kernel walks it.
//
// So a CTA that has whole groups leaves one state for each group, or one for all of them if it has
// the last keys.
//
// Nothing here depends on another row: a reference moves for its own row alone.

#include "device/attention/row_weights.cuh"
#include "device/ptx/compiler.cuh"
#include "device/ptx/shared.cuh"

// ---- segments. Up to key 2^16 they have 1,024 keys. From there on, each doubling of the keys has
// 32 segments, so that a long sequence has few. With fewer keys the merges of prompts cost more,
// and with more a short sequence is decoded by too few CTAs (docs/tuning/batch-invariant.md).
constexpr int kSegmentKeysLog2 = 10, kSegmentsOfDoublingLog2 = 5, kFirstDoublingLog2 = 16;
constexpr int kEqualSegments = 1 << (kFirstDoublingLog2 - kSegmentKeysLog2);
static_assert(kHasBlockMask || (1 << kSegmentKeysLog2) % kBlockN == 0, "segments are whole blocks");

// The binary logarithm of the keys of the segment at `key`.
__device__ __forceinline__ int segment_log2(int key) { return max(kSegmentKeysLog2, 31 - kSegmentsOfDoublingLog2 - __clz(key | 1)); }
__device__ __forceinline__ int segment_of(int key) {
    const int doubling = segment_log2(key) - kSegmentKeysLog2;
    if (key < 1 << kFirstDoublingLog2) return key >> kSegmentKeysLog2;
    // The doubling's first key is 2^(16 + doubling), and its segments have 2^(11 + doubling).
    return kEqualSegments + (doubling - 1) * (1 << kSegmentsOfDoublingLog2) + (key >> segment_log2(key)) - (1 << kSegmentsOfDoublingLog2);
}
// The first block of the segment that holds a block. A segment begins at a multiple of its own
// length. A walk from the last block down compares with it.
__device__ __forceinline__ int first_block_of_segment(int block) {
    const int keys_log2 = segment_log2(block * kBlockN);
    return (block * kBlockN >> keys_log2 << keys_log2) / kBlockN;
}
// The first key of a segment. Unsigned: the segment behind the last one would begin at 2^31.
__device__ __forceinline__ uint32 segment_begin(int segment) {
    if (segment < kEqualSegments) return uint32(segment) << kSegmentKeysLog2;
    const int past = segment - kEqualSegments, doubling = past >> kSegmentsOfDoublingLog2;
    const int keys_log2 = kSegmentKeysLog2 + 1 + doubling;
    return (1u << (kFirstDoublingLog2 + doubling)) + (uint32(past & ((1 << kSegmentsOfDoublingLog2) - 1)) << keys_log2);
}

// ---- groups of segments. A group has segments of one length, since their number in a doubling and
// before the first doubling is a multiple of kGroupSegments.
constexpr int kGroupSegments = 4;
static_assert(kEqualSegments % kGroupSegments == 0 && (1 << kSegmentsOfDoublingLog2) % kGroupSegments == 0, "whole groups");
__device__ __forceinline__ int group_of(int segment) { return segment / kGroupSegments; }
__device__ __forceinline__ bool begins_group(int segment) { return segment % kGroupSegments == 0; }

// ---- when a row's reference moves to the block's maximum. fp16: when a weight would pass 2^8.
// bf16 has the exponents of fp32. There it moves at the first block with a finite score, and when a
// lane's weights of a block sum to more than 2^40. Few blocks do, and it takes no search to see.
constexpr bool kMovesBySums = kIsBf16;
constexpr float kMostAdded = 0x1p40f;
// The 16 weights of a lane's row add up to less if no score outgrows the reference by 2^35.
constexpr float kLeastGrowthLog2 = kMovesBySums ? 35.f : 8.f;

// ---- a segment's softmax, of a lane's two rows in 16 (device/attention/softmax.cuh)
struct SegmentRows {
    float reference[2];  // in log2 units; -inf for a row that has seen no key
    float sum[2];        // over this lane's columns
    float factor[2];     // the factor of O where the last step moved the row's reference, else 1

    __device__ __forceinline__ void reset() {
        #pragma unroll
        for (int r = 0; r < 2; ++r) reference[r] = -infinity(), sum[r] = 0.f;
    }

    // Turns a block's scores into weights in place. Returns whether some row's reference may have
    // moved, the same in all lanes of the warp.
    template <int kTiles>
    __device__ __forceinline__ bool step(float (&s)[kTiles][4], float scale_log2) {
        float found[2], added[2];
        // At head dim 128 integers were slower on an H200 (docs/tuning/batch-invariant.md).
        const bool may_move = find_outgrown<kHeadDimV <= 64>(s, found, [&](int r, float score) { return may_outgrow(r, score, scale_log2); });
        if (may_move) move(s, found, scale_log2);
        weigh_block(s, added, scale_log2);
        add(added);
        return may_move;
    }

    // The same with kMovesBySums, for a caller that can repeat the rows: it searches rows without a
    // reference alone. If another row's reference has to move, it sets `misses` in a lane.
    template <int kTiles>
    __device__ __forceinline__ void step_or_miss(float (&s)[kTiles][4], float scale_log2, bool& misses) {
        if (__any_sync(0xffffffff, fminf(reference[0], reference[1]) == -infinity())) {
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float found = __fmul_rn(row_maximum(s, r), scale_log2);
                if (reference[r] == -infinity() && found > -infinity()) reference[r] = found;
            }
        }
        float added[2];
        weigh_block(s, added, scale_log2);
        misses |= fmaxf(added[0], added[1]) > kMostAdded;
        add(added);
    }

    // ---- parts of a step
    __device__ __forceinline__ bool may_outgrow(int r, float score, float scale_log2) const { return score * scale_log2 > reference[r] + kLeastGrowthLog2; }

    // Moves the references that have to, where `found` has the rows' largest scores.
    template <int kTiles>
    __device__ __forceinline__ void move(const float (&s)[kTiles][4], float (&found)[2], float scale_log2) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            bool row_moves = may_outgrow(r, found[r], scale_log2);
            if constexpr (kMovesBySums) row_moves &= quad_max(weights_of_row(s, r, scale_log2)) > kMostAdded || reference[r] == -infinity();
            // Rounded in all families: the compiler may fuse it with the subtraction.
            found[r] = __fmul_rn(found[r], scale_log2);
            factor[r] = row_moves ? exp2_approx(reference[r] - found[r]) : 1.f;
            if (row_moves) reference[r] = found[r];
            sum[r] = __fmul_rn(sum[r], factor[r]);
        }
    }

    // Turns scores into weights, and returns this lane's sums of the block.
    template <int kTiles>
    __device__ __forceinline__ void weigh_block(float (&s)[kTiles][4], float (&added)[2], float scale_log2) const {
        added[0] = added[1] = 0.f;
        weigh(s, added, scale_log2, lowered(reference[0]), lowered(reference[1]));
    }
    __device__ __forceinline__ void add(const float (&added)[2]) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] = __fadd_rn(sum[r], added[r]);
    }

    // Scales O to references that have moved.
    template <int kTiles>
    __device__ __forceinline__ void rescale(float (&o)[kTiles][4]) const {
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) o[n][i] *= factor[i / 2];
        }
    }

    // The number that is subtracted from a row's scores. A row that has seen no key takes 0:
    // infinity minus infinity would be NaN.
    static __device__ __forceinline__ float lowered(float reference) { return reference == -infinity() ? 0.f : reference; }

private:
    // What weigh_block() would return for row r.
    template <int kTiles>
    __device__ __forceinline__ float weights_of_row(const float (&s)[kTiles][4], int r, float scale_log2) const {
        float added = 0.f;
        #pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i) added += exp2_approx(fmaf(s[i / 2][2 * r + i % 2], scale_log2, -reference[r]));
        return added;
    }
};

// ---- the merge of a segment's row into the row's state of later segments
struct MergedRow {
    float reference = -infinity(), sum = 0.f;
    float old_factor, new_factor;  // of the last `add`

    // `segment_sum` is that of the whole row.
    __device__ __forceinline__ void add(float segment_reference, float segment_sum) {
        const float top = fmaxf(reference, segment_reference), lower = SegmentRows::lowered(top);
        old_factor = exp2_approx(reference - lower), new_factor = exp2_approx(segment_reference - lower);
        sum = fmaf(segment_sum, new_factor, sum * old_factor);
        reference = top;
    }
    __device__ __forceinline__ float added(float merged, float of_segment) const { return fmaf(of_segment, new_factor, merged * old_factor); }
    __device__ __forceinline__ float lowered() const { return SegmentRows::lowered(reference); }
};

// A row with four of its columns, for kernels that merge states from memory.
struct MergedColumns {
    MergedRow row;
    float4 o = make_float4(0.f, 0.f, 0.f, 0.f);

    __device__ __forceinline__ void add(const float2& state, const float4& of_state) {
        row.add(state.x, state.y);
        o.x = row.added(o.x, of_state.x), o.y = row.added(o.y, of_state.y), o.z = row.added(o.z, of_state.z), o.w = row.added(o.w, of_state.w);
    }
    // The bits of a state. Merging it with nothing would turn -0 to 0.
    __device__ __forceinline__ void copy(const float2& state, const float4& of_state) { row.reference = state.x, row.sum = state.y, o = of_state; }
    __device__ __forceinline__ float2 state() const { return make_float2(row.reference, row.sum); }
};

__device__ __forceinline__ void add_rows(MergedRow (&rows)[2], const SegmentRows& segment) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) rows[r].add(segment.reference[r], quad_sum(segment.sum[r]));
}
// An element of the first segment's O, merged with nothing: its factor is 1, and -0 becomes 0.
__device__ __forceinline__ float as_merged(float of_segment) { return of_segment + 0.f; }
// Ends a tile of one segment: its O becomes the merged O.
template <int kTiles>
__device__ __forceinline__ void finish_only(MergedRow (&rows)[2], float (&o)[kTiles][4], const SegmentRows& segment) {
    add_rows(rows, segment);
    #pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) o[i / 4][i % 4] = as_merged(o[i / 4][i % 4]);
}

// A piece of a group's O, merged into that of the groups before.
__device__ __forceinline__ float4 added_piece(const MergedRow (&rows)[2], const float4& merged, const float4& of_group) {
    return make_float4(rows[0].added(merged.x, of_group.x), rows[0].added(merged.y, of_group.y),
                       rows[1].added(merged.z, of_group.z), rows[1].added(merged.w, of_group.w));
}

// The merged O of a lane's two rows. kInMemory: it lies in the thread's local memory, where
// registers have no room for it beside the segment's.
template <int kTiles, bool kInMemory>
struct MergedOutput {
    float o[kTiles][4];

    __device__ __forceinline__ float* place() {
        float* at = &o[0][0];
        if constexpr (kInMemory) make_opaque(at);
        return at;
    }
    __device__ __forceinline__ void reset() {
        float* const at = place();
        #pragma unroll
        for (int i = 0; i < kTiles * 4; ++i) at[i] = 0.f;
    }
    // Merges a segment's state into the lane's rows.
    __device__ __forceinline__ void add(MergedRow (&rows)[2], const float (&of_segment)[kTiles][4], const SegmentRows& segment) {
        add_rows(rows, segment);
        float* const at = place();
        #pragma unroll
        for (int i = 0; i < kTiles * 4; ++i) at[i] = rows[i % 4 / 2].added(at[i], of_segment[i / 4][i % 4]);
    }
    // Takes the first segment of a tile in place of reset() and add().
    __device__ __forceinline__ void begin(MergedRow (&rows)[2], const float (&of_segment)[kTiles][4], const SegmentRows& segment) {
        add_rows(rows, segment);
        float* const at = place();
        #pragma unroll
        for (int i = 0; i < kTiles * 4; ++i) at[i] = as_merged(of_segment[i / 4][i % 4]);
    }
    // Ends a tile: replaces O of the last segment by the merged one.
    __device__ __forceinline__ void take(float (&out)[kTiles][4]) {
        float* const at = place();
        #pragma unroll
        for (int i = 0; i < kTiles * 4; ++i) out[i / 4][i % 4] = at[i];
    }
    // Merges a tile's last segment: o becomes the merged O.
    __device__ __forceinline__ void finish(MergedRow (&rows)[2], float (&o)[kTiles][4], const SegmentRows& segment) {
        add_rows(rows, segment);
        const float* const at = place();
        #pragma unroll
        for (int i = 0; i < kTiles * 4; ++i) o[i / 4][i % 4] = rows[i % 4 / 2].added(at[i], o[i / 4][i % 4]);
    }
    // The same where `rows` has merged the segment's rows, with `zero` added to each element.
    __device__ __forceinline__ void finish_plus(const MergedRow (&rows)[2], float (&o)[kTiles][4], float zero) {
        const float* const at = place();
        #pragma unroll
        for (int i = 0; i < kTiles * 4; ++i) o[i / 4][i % 4] = __fadd_rn(rows[i % 4 / 2].added(at[i], o[i / 4][i % 4]), zero);
    }
    // Merges this group into the groups before. The result takes this group's place.
    __device__ __forceinline__ void merge_into(const MergedRow (&rows)[2], const float4* groups) {
        float* const at = place();
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const float4 all = added_piece(rows, groups[n], make_float4(at[4 * n], at[4 * n + 1], at[4 * n + 2], at[4 * n + 3]));
            at[4 * n] = all.x, at[4 * n + 1] = all.y, at[4 * n + 2] = all.z, at[4 * n + 3] = all.w;
        }
    }
};

// The same in pieces of 16 bytes. The last kLocal of a thread's pieces are in local memory and the
// others in shared memory, where `at` is the first one.
template <int kTiles, int kLocal>
struct PiecesOfMergedOutput {
    static constexpr int kShared = kTiles - kLocal;
    static constexpr uint32 kStride = 128 * 16;  // from a thread's piece to its next one
    uint32 at;
    float4 (&local)[kLocal > 0 ? kLocal : 1];

    __device__ __forceinline__ void add(MergedRow (&rows)[2], const float (&of_segment)[kTiles][4], const SegmentRows& segment) const {
        add_rows(rows, segment);
        // Some loads before the first store: each waits for the one before it.
        constexpr int kInFlight = 4;
        #pragma unroll
        for (int first = 0; first < kTiles; first += kInFlight) {
            float merged[kInFlight][4];
            #pragma unroll
            for (int n = 0; n < kInFlight && first + n < kTiles; ++n) load(merged[n], first + n);
            #pragma unroll
            for (int n = 0; n < kInFlight && first + n < kTiles; ++n) {
                #pragma unroll
                for (int i = 0; i < 4; ++i) merged[n][i] = rows[i / 2].added(merged[n][i], of_segment[first + n][i]);
                store(merged[n], first + n);
            }
        }
    }
    __device__ __forceinline__ void begin(MergedRow (&rows)[2], const float (&of_segment)[kTiles][4], const SegmentRows& segment) const {
        add_rows(rows, segment);
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            float merged[4];
            #pragma unroll
            for (int i = 0; i < 4; ++i) merged[i] = as_merged(of_segment[n][i]);
            store(merged, n);
        }
    }
    __device__ __forceinline__ void finish(MergedRow (&rows)[2], float (&o)[kTiles][4], const SegmentRows& segment) const {
        add_rows(rows, segment);
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            float merged[4];
            load(merged, n);
            #pragma unroll
            for (int i = 0; i < 4; ++i) o[n][i] = rows[i / 2].added(merged[i], o[n][i]);
        }
    }
    __device__ __forceinline__ void finish_plus(const MergedRow (&rows)[2], float (&o)[kTiles][4], float zero) const {
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            float merged[4];
            load(merged, n);
            #pragma unroll
            for (int i = 0; i < 4; ++i) o[n][i] = __fadd_rn(rows[i / 2].added(merged[i], o[n][i]), zero);
        }
    }
    // As MergedOutput::merge_into, in a loop that is not unrolled. An unrolled one took registers,
    // and every tile spilled for it (docs/tuning/batch-invariant.md#ends-of-tiles-with-groups).
    __device__ __forceinline__ void merge_into(const MergedRow (&rows)[2], const float4* groups) const {
        constexpr int kInFlight = 4;
        #pragma unroll 1
        for (int first = 0; first < kTiles; first += kInFlight) {
            float own[kInFlight][4];
            float4 before[kInFlight];
            #pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                if (kTiles % kInFlight != 0 && first + i >= kTiles) continue;
                load(own[i], first + i);
                before[i] = groups[first + i];
            }
            #pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                if (kTiles % kInFlight != 0 && first + i >= kTiles) continue;
                const float4 all = added_piece(rows, before[i], make_float4(own[i][0], own[i][1], own[i][2], own[i][3]));
                const float piece[4] = {all.x, all.y, all.z, all.w};
                store(piece, first + i);
            }
        }
    }

private:
    __device__ __forceinline__ void load(float (&piece)[4], int n) const {
        if (n < kShared) {
            const uint4 words = load_four_words(at + n * kStride);
            piece[0] = __uint_as_float(words.x), piece[1] = __uint_as_float(words.y);
            piece[2] = __uint_as_float(words.z), piece[3] = __uint_as_float(words.w);
        } else {
            const float4 floats = in_memory(local)[n - kShared];
            piece[0] = floats.x, piece[1] = floats.y, piece[2] = floats.z, piece[3] = floats.w;
        }
    }
    __device__ __forceinline__ void store(const float (&piece)[4], int n) const {
        if (n < kShared) store_floats(at + n * kStride, piece);
        else in_memory(local)[n - kShared] = make_float4(piece[0], piece[1], piece[2], piece[3]);
    }
};

// The merged O and rows of whole groups, in local memory: few blocks end a group, and tiles of few
// keys end none before their last block.
template <int kTiles>
struct MergedGroups {
    float4 o[kTiles];
    float4 rows;  // of both rows: reference and sum; a negative sum if no group has ended

    __device__ __forceinline__ void reset() { in_memory(rows) = make_float4(-infinity(), -1.f, -infinity(), -1.f); }

    // Whether a group has ended. The sum of a row with NaN is NaN, so all lanes of a warp agree.
    __device__ __forceinline__ bool has_any() { return holds_groups(in_memory(rows)); }
    // Takes the next group's state.
    __device__ __forceinline__ void add(const MergedRow (&of_group)[2], const float (&o_of_group)[kTiles][4]) {
        MergedRow merged[2];
        const bool is_first = !load(merged);
        #pragma unroll
        for (int r = 0; r < 2; ++r) merged[r].add(of_group[r].reference, of_group[r].sum);
        float4* const at = &in_memory(o[0]);
        constexpr int kInFlight = 4;
        #pragma unroll
        for (int first = 0; first < kTiles; first += kInFlight) {
            float4 pieces[kInFlight];
            #pragma unroll
            for (int n = 0; n < kInFlight && first + n < kTiles; ++n) pieces[n] = is_first ? make_float4(0.f, 0.f, 0.f, 0.f) : at[first + n];
            #pragma unroll
            for (int n = 0; n < kInFlight && first + n < kTiles; ++n) at[first + n] = added(merged, pieces[n], o_of_group[first + n]);
        }
        in_memory(rows) = make_float4(merged[0].reference, merged[0].sum, merged[1].reference, merged[1].sum);
    }
    // Ends a tile: the state of the last group becomes that of all groups.
    __device__ __forceinline__ void finish(MergedRow (&of_group)[2], float (&o_of_group)[kTiles][4]) {
        MergedRow merged[2];
        const bool has_groups = load(merged);
        #pragma unroll
        for (int r = 0; r < 2; ++r) merged[r].add(of_group[r].reference, of_group[r].sum), of_group[r] = merged[r];
        float4* const at = &in_memory(o[0]);
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const float4 piece = has_groups ? at[n] : make_float4(0.f, 0.f, 0.f, 0.f);
            const float4 all = added(merged, piece, o_of_group[n]);
            o_of_group[n][0] = all.x, o_of_group[n][1] = all.y, o_of_group[n][2] = all.z, o_of_group[n][3] = all.w;
        }
    }
    // The same in memory, where there are groups: the state of all takes the last one's place.
    template <class MergedO>
    __device__ __forceinline__ void finish_in_memory(MergedRow (&of_group)[2], MergedO& o_of_group) {
        MergedRow merged[2];
        load(merged);
        #pragma unroll
        for (int r = 0; r < 2; ++r) merged[r].add(of_group[r].reference, of_group[r].sum);
        o_of_group.merge_into(merged, &in_memory(o[0]));
        of_group[0] = merged[0], of_group[1] = merged[1];
    }
    // The state of the groups that have ended, which may be none.
    __device__ __forceinline__ void take(MergedRow (&merged)[2], float (&all)[kTiles][4]) {
        const bool has_groups = load(merged);
        float4* const at = &in_memory(o[0]);
        #pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const float4 piece = has_groups ? at[n] : make_float4(0.f, 0.f, 0.f, 0.f);
            all[n][0] = piece.x, all[n][1] = piece.y, all[n][2] = piece.z, all[n][3] = piece.w;
        }
    }

private:
    static __device__ __forceinline__ bool holds_groups(const float4& state) { return !(state.y < 0.f); }
    // Returns whether there are groups.
    __device__ __forceinline__ bool load(MergedRow (&merged)[2]) {
        const float4 state = in_memory(rows);
        if (!holds_groups(state)) return false;
        merged[0].reference = state.x, merged[0].sum = state.y, merged[1].reference = state.z, merged[1].sum = state.w;
        return true;
    }
    static __device__ __forceinline__ float4 added(const MergedRow (&merged)[2], const float4& piece, const float (&of_group)[4]) {
        return make_float4(merged[0].added(piece.x, of_group[0]), merged[0].added(piece.y, of_group[1]),
                           merged[1].added(piece.z, of_group[2]), merged[1].added(piece.w, of_group[3]));
    }
};

// The merge of a tile's segments. Only the ends of segments need the rows' state, so it lies in
// local memory, where it takes no registers of the loop over blocks.
template <class MergedO, int kTiles>
struct SegmentMerge {
    MergedO& o;     // of the current group
    float4& kept;   // of both rows: reference and sum
    MergedGroups<kTiles>& groups;
    bool is_first;  // no segment of the group has been merged

    __device__ __forceinline__ SegmentMerge(MergedO& o, float4& kept, MergedGroups<kTiles>& groups) : o(o), kept(kept), groups(groups) {}

    __device__ __forceinline__ void begin_tile() {
        is_first = true;
        groups.reset();
    }
    // Merges a segment whose first block is `first_block`. With `ends_group` its O is not kept.
    __device__ __forceinline__ void add(float (&of_segment)[kTiles][4], const SegmentRows& segment, int first_block, bool ends_group) {
        MergedRow rows[2];
        if (ends_group) {
            finish_group(rows, of_segment, segment);
            groups.add(rows, of_segment);
            is_first = true;
            return;
        }
        merge(rows, of_segment, segment);
        is_first = false;
        in_memory(kept) = make_float4(rows[0].reference, rows[0].sum, rows[1].reference, rows[1].sum);
    }
    // Merges a group's last segment: its O becomes that of the group.
    __device__ __forceinline__ void finish_group(MergedRow (&rows)[2], float (&of_segment)[kTiles][4], const SegmentRows& segment) {
        load(rows);
        if (is_first) finish_only(rows, of_segment, segment);
        else o.finish(rows, of_segment, segment);
    }
    // Merges a tile's last segment: its O becomes the merged O. Few tiles have several groups.
    // These merge the last segment and the groups in memory, and finish_plus then returns the bits
    // that lie there. Other tiles have one group, whose merge with no other one turns -0 into +0.
    __device__ __forceinline__ void finish(MergedRow (&rows)[2], float (&of_segment)[kTiles][4], const SegmentRows& segment) {
        const bool has_groups = groups.has_any();
        if (is_first && !has_groups) return finish_only(rows, of_segment, segment);
        if (has_groups) {
            merge(rows, of_segment, segment);
            groups.finish_in_memory(rows, o);
            // An element x becomes x * 1 + -0 * 0 + -0, which has the bits of x.
            #pragma unroll
            for (int i = 0; i < kTiles * 4; ++i) of_segment[i / 4][i % 4] = -0.f;
            #pragma unroll
            for (int r = 0; r < 2; ++r) rows[r].old_factor = 1.f, rows[r].new_factor = 0.f;
        } else {
            load(rows);
            add_rows(rows, segment);
        }
        o.finish_plus(rows, of_segment, has_groups ? -0.f : 0.f);
    }

private:
    // Merges a segment into the current group's state.
    __device__ __forceinline__ void merge(MergedRow (&rows)[2], const float (&of_segment)[kTiles][4], const SegmentRows& segment) {
        load(rows);
        if (is_first) o.begin(rows, of_segment, segment);
        else o.add(rows, of_segment, segment);
    }
    __device__ __forceinline__ void load(MergedRow (&rows)[2]) {
        if (is_first) return;
        const float4 state = in_memory(kept);
        rows[0].reference = state.x, rows[0].sum = state.y, rows[1].reference = state.z, rows[1].sum = state.w;
    }
};

// The merged O of 128 threads: in pieces, of which kLocal are in `local`, or in registers.
template <int kTiles, bool kInPieces, int kLocal>
__device__ __forceinline__ auto merged_output(uint32 at, float4 (&local)[kLocal > 0 ? kLocal : 1]) {
    if constexpr (kInPieces) return PiecesOfMergedOutput<kTiles, kLocal>{at, local};
    else return MergedOutput<kTiles, false>{};
}

// ---- whether a block begins a segment, in a walk from the last block down
struct MayBegin {};  // the walk does not know
__device__ __forceinline__ bool begins_segment(Bool<false>, int, int) { return false; }
__device__ __forceinline__ bool begins_segment(Bool<true>, int, int) { return true; }
// Lists of blocks go up and down.
__device__ __forceinline__ bool begins_segment(MayBegin, int block, int first_of_segment) {
    return kHasBlockMask ? first_block_of_segment(block) != first_of_segment : block < first_of_segment;
}
// The same of a group, where the segment before has `first_of_segment`.
__device__ __forceinline__ bool ends_group(int first_of_segment, int block) {
    const int ended = segment_of(first_of_segment * kBlockN);
    return kHasBlockMask ? group_of(ended) != group_of(segment_of(block * kBlockN)) : begins_group(ended);
}
