// A tensor map as this driver encodes it, in the 128 bytes of a CUtensorMap. driver.cpp writes it
// and copies.cpp reads it.

#pragma once

#include <cstdint>
#include <cstring>

namespace emulator {

constexpr uint32_t kTensorMapMagic = 0x7e450a90;

struct TensorMapFields {
    uint32_t magic, rank;
    uint64_t address;
    uint64_t extents[5], strides[4];
    uint16_t box[5];
};
static_assert(sizeof(TensorMapFields) <= 128, "the size of a CUtensorMap");

inline TensorMapFields fields_of(const void* map) {
    TensorMapFields fields;
    memcpy(&fields, map, sizeof fields);
    return fields;
}

}  // namespace emulator
