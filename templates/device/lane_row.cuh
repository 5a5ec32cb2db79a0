// A lane's share of a row of 16-bit elements, in registers: two chunks of 8 columns. The n lanes of
// a row are neighbours, and n is a power of two up to 32. Lane i has the chunks i and i + n. So a
// warp has several rows of few columns, and each access of a lane has 16 bytes. quantize uses this
// file. It knows kVec and kKeyFormat but no tensor.

#include "device/quantise.cuh"

constexpr int kChunk = 8;

// A chunk's elements.
template <class Element>
struct Chunk {
    // An access has whole words, or it is a part of one.
    static constexpr int kAccess = kVec * sizeof(Element), kWords = kAccess < 4 ? 1 : kAccess / 4;
    using Part = typename Either<kAccess == 1, uint8, uint16>::Type;
    struct __align__(kWords * 4) Whole { uint32 words[kWords]; };
    uint32 words[kChunk * sizeof(Element) / 4];

    // The first `count` elements; the others are 0.
    __device__ __forceinline__ void load(const Element* from, int count) {
        #pragma unroll
        for (int i = 0; i < kChunk; i += kVec) {
            const int word = i * sizeof(Element) / 4, shift = i * sizeof(Element) % 4 * 8;
            if constexpr (kAccess >= 4) {
                Whole whole = {};
                if (i < count) whole = *reinterpret_cast<const Whole*>(from + i);
                #pragma unroll
                for (int j = 0; j < kWords; ++j) words[word + j] = whole.words[j];
            } else {
                if (shift == 0) words[word] = 0;
                if (i < count) words[word] |= uint32(*reinterpret_cast<const Part*>(from + i)) << shift;
            }
        }
    }

    __device__ __forceinline__ void store(Element* to, int count) const {
        #pragma unroll
        for (int i = 0; i < kChunk; i += kVec) {
            const int word = i * sizeof(Element) / 4, shift = i * sizeof(Element) % 4 * 8;
            if (i >= count) continue;
            if constexpr (kAccess >= 4) {
                Whole whole;
                #pragma unroll
                for (int j = 0; j < kWords; ++j) whole.words[j] = words[word + j];
                *reinterpret_cast<Whole*>(to + i) = whole;
            } else {
                *reinterpret_cast<Part*>(to + i) = Part(words[word] >> shift);
            }
        }
    }
};

// Where a lane's chunks begin, and the end of the row. A row that is not there has no columns.
struct LaneCols {
    int first, second, end;
};

// Elements as they are in memory.
struct RawRow {
    Chunk<uint16> chunks[2];

    // Columns past the end are 0.
    __device__ __forceinline__ void load(const uint16* row, const LaneCols& cols) {
        chunks[0].load(row + cols.first, cols.end - cols.first);
        chunks[1].load(row + cols.second, cols.end - cols.second);
    }
};

// Elements in fp32.
struct LaneRow {
    float x[2][kChunk];

    LaneRow() = default;
    __device__ __forceinline__ explicit LaneRow(const RawRow& raw) {
        #pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
            #pragma unroll
            for (int i = 0; i < kChunk; ++i) x[chunk][i] = unpack(uint16(raw.chunks[chunk].words[i / 2] >> i % 2 * 16));
        }
    }

    // The lane's largest magnitude. NaN does not count.
    __device__ __forceinline__ float largest() const {
        float top = 0.f;
        #pragma unroll
        for (int i = 0; i < kChunk; ++i) top = fmaxf(top, fmaxf(fabsf(x[0][i]), fabsf(x[1][i])));
        return top;
    }

    __device__ __forceinline__ void store(uint16* row, const LaneCols& cols) const {
        #pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
            const int col = chunk == 0 ? cols.first : cols.second;
            Chunk<uint16> narrow;
            #pragma unroll
            for (int i = 0; i < kChunk; i += 2) narrow.words[i / 2] = pack2(x[chunk][i], x[chunk][i + 1]);
            narrow.store(row + col, cols.end - col);
        }
    }

    // The numbers nearest to x * factor, where factor is 1 / scale.
    __device__ __forceinline__ void store_eight(uint8* row, const LaneCols& cols, float factor) const {
        #pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
            const int col = chunk == 0 ? cols.first : cols.second;
            Chunk<uint8> narrow;
            #pragma unroll
            for (int i = 0; i < kChunk; i += 4) {
                const float (&of)[kChunk] = x[chunk];
                narrow.words[i / 4] = narrow_four({of[i] * factor, of[i + 1] * factor, of[i + 2] * factor, of[i + 3] * factor});
            }
            narrow.store(row + col, cols.end - col);
        }
    }
};

// The largest value of neighbouring lanes, a power of two of them.
__device__ __forceinline__ float largest_of_neighbours(float top, int lanes) {
    for (int distance = 1; distance < lanes; distance *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, distance));
    return top;
}
