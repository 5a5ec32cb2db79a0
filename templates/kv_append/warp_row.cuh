// A warp's row of 16-bit elements in fp32, which kv_append_eight rotates and quantises.
//
// A lane has kLaneCols neighbouring columns, then as many 32 * kLaneCols columns further on.

#include "device/quantise.cuh"

constexpr int kLaneCols = kKeyFormat == kInt4 ? 8 : kVec;  // 8 int4 numbers are a word
constexpr int kSteps = kMostCols / (32 * kLaneCols);

// As many elements as an access has.
struct __align__(kVec * 2) Elements16 { uint16 values[kVec]; };
struct __align__(kVec) Bytes8 { uint8 values[kVec]; };

// A row of at most kMostCols columns. Columns past its end are 0.
struct WarpRow {
    float x[kSteps][kLaneCols];

    static __device__ __forceinline__ int col(int step, int lane) { return (step * 32 + lane) * kLaneCols; }

    __device__ __forceinline__ void load(const uint16* row, int cols, int lane) {
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            #pragma unroll
            for (int part = 0; part < kLaneCols; part += kVec) {
                Elements16 loaded = {};
                if (col(step, lane) + part < cols) loaded = *reinterpret_cast<const Elements16*>(row + col(step, lane) + part);
                #pragma unroll
                for (int i = 0; i < kVec; ++i) x[step][part + i] = unpack(loaded.values[i]);
            }
        }
    }

    // The lane's largest magnitude. NaN does not count.
    __device__ __forceinline__ float largest() const {
        float top = 0.f;
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            #pragma unroll
            for (int i = 0; i < kLaneCols; ++i) top = fmaxf(top, fabsf(x[step][i]));
        }
        return top;
    }

    __device__ __forceinline__ void store(uint16* row, int cols, int lane) const {
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            #pragma unroll
            for (int part = 0; part < kLaneCols; part += kVec) {
                if (col(step, lane) + part >= cols) continue;
                Elements16 narrow;
                #pragma unroll
                for (int i = 0; i < kVec; ++i) narrow.values[i] = uint16(pack2(x[step][part + i], 0.f));
                *reinterpret_cast<Elements16*>(row + col(step, lane) + part) = narrow;
            }
        }
    }

    // The numbers nearest to x / scale.
    __device__ __forceinline__ void store_eight(uint8* row, int cols, float scale, int lane) const {
        const float factor = 1.f / scale;
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (col(step, lane) >= cols) continue;
            Bytes8 narrow;
            #pragma unroll
            for (int i = 0; i < kVec; i += 2) {
                const uint32 two = narrow_two(x[step][i] * factor, i + 1 < kVec ? x[step][i + 1 < kVec ? i + 1 : i] * factor : 0.f);
                narrow.values[i] = uint8(two);
                if (i + 1 < kVec) narrow.values[i + 1 < kVec ? i + 1 : i] = uint8(two >> 8);
            }
            *reinterpret_cast<Bytes8*>(row + col(step, lane)) = narrow;
        }
    }

    // The row as int4 (src/four.rs), whose bits are the same. All lanes call it.
    template <int kGroup>
    __device__ __forceinline__ void store_four(uint8* row, int cols, int lane) const {
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int first = col(step, lane);
            float held[kLaneCols], low = __uint_as_float(0x7fffffff), high = low;
            #pragma unroll
            for (int i = 0; i < kLaneCols; ++i) {
                held[i] = x[step][i];
                if (held[i] == held[i]) held[i] = fminf(fmaxf(held[i], -kMostHeld), kMostHeld);
                low = fminf(low, held[i]), high = fmaxf(high, held[i]);  // NaN does not count
            }
            #pragma unroll
            for (int distance = 1; distance * kLaneCols < kGroup; distance *= 2) {
                low = fminf(low, __shfl_xor_sync(0xffffffff, low, distance));
                high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, distance));
            }
            // The sum makes 0 of -0, of which a minimum may be either.
            const uint16 zero_bits = uint16(floats_to_fp16_pair(low == low ? low + 0.f : 0.f, 0.f));
            const float zero = fp16_to_float(zero_bits);
            uint16 scale_bits = uint16(floats_to_fp16_pair((high == high ? high - zero : 0.f) / 15.f, 0.f));
            if (!(fp16_to_float(scale_bits) > 0.f)) scale_bits = 0x3c00;
            const float factor = 1.f / fp16_to_float(scale_bits);
            uint32 numbers = 0;
            #pragma unroll
            for (int i = 0; i < kLaneCols; ++i) {
                // A NaN becomes 0.
                numbers |= uint32(min(max(__float2int_rn((held[i] - zero) * factor), 0), 15)) << 4 * i;
            }
            if (first >= cols) continue;
            store_word(row + first / 2, numbers);
            if (first % kGroup == 0) store_word(row + cols / 2 + first / kGroup * 4, scale_bits | uint32(zero_bits) << 16);
        }
    }

private:
    static constexpr float kMostHeld = 65408.f;

    // Rows lie at whole words unless accesses are of single elements.
    static __device__ __forceinline__ void store_word(uint8* to, uint32 word) {
        if constexpr (kVec > 1) {
            *reinterpret_cast<uint32*>(to) = word;
        } else {
            #pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = uint8(word >> 8 * i);
        }
    }
};
