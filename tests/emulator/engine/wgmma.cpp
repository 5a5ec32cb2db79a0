// Products of a warpgroup: wgmma with its descriptors, groups and waits.
//
// A thread's call leaves its registers of A and poisons its accumulators. The product is computed
// at the first wait that covers it, and a thread gets its sums at its own wait. The operands in
// shared memory are kept as the first warp's call found them. If they have changed at the wait,
// some warp overwrote them too early, or they arrived too late, and the sums are NaN. That is no
// failure by itself, since a kernel may issue a product of a slot that is being filled and not use
// the sums.

#include "engine.h"

namespace emulator {

namespace {

Warpgroup& my_warpgroup() { return my_cta()->warpgroups[self->thread_index.x / 128]; }
unsigned my_thread() { return self->thread_index.x % 128; }

// The bytes of a row in a descriptor's swizzle: 1 to 3 are of 128, 64 and 32 bytes.
unsigned row_bytes_of(uint64_t descriptor, bool transposed, const char* operand) {
    const int swizzle = int(descriptor >> 62);
    if (swizzle == 0 || (transposed && swizzle != 1)) fail("a wgmma whose descriptor of %s has swizzle %d: the emulator knows 1, 128 bytes, and 2 and 3 where the inner index is contiguous", operand, swizzle);
    return 256u >> swizzle;
}

// The matrix that a descriptor names (PTX ISA, "matrix descriptor"), as [outer][16 words]. A word
// is one inner index of a 16-bit element, or two of an 8-bit element, which is never transposed.
// Transposed, the outer index is contiguous in memory: boxes of 64 lie leading_bytes apart.
// Otherwise the inner index is contiguous. In both cases 8 rows of the swizzle's bytes are a group,
// and groups are stride_bytes apart.
void gather(std::vector<uint16_t>& words, uint64_t descriptor, int outer, bool transposed, const char* operand) {
    const unsigned start = (descriptor & 0x3fff) << 4, leading_bytes = (descriptor >> 16 & 0x3fff) << 4,
                   stride_bytes = (descriptor >> 32 & 0x3fff) << 4;
    const unsigned row_bytes = row_bytes_of(descriptor, transposed, operand), chunk_bits = row_bytes - 16;
    if (descriptor >> 49 & 7) fail("a wgmma whose descriptor of %s has a base offset", operand);
    words.resize(size_t(outer) * 16);
    Cta* cta = my_cta();
    const auto chunk_at = [&](unsigned row, unsigned bytes) {
        const unsigned linear = start + row / 8 * stride_bytes + row % 8 * row_bytes + bytes;
        const unsigned offset = (linear ^ (linear >> 3 & chunk_bits)) - kSharedBase;
        if (offset >= self->shared_bytes || self->shared_bytes - offset < 16) fail_shared(offset + kSharedBase, 16);
        check_fenced(cta, offset, 16, "wgmma");
        return reinterpret_cast<const uint16_t*>(cta->shared + offset);
    };
    if (transposed) {
        for (int box = 0; box < outer; box += 8) {
            for (int k = 0; k < 16; ++k) {
                const uint16_t* chunk = chunk_at(k, box / 64 * leading_bytes + box % 64 * 2);
                const int count = outer - box < 8 ? outer - box : 8;
                for (int i = 0; i < count; ++i) words[size_t(box + i) * 16 + k] = chunk[i];
            }
        }
    } else {
        for (int row = 0; row < outer; ++row) {
            for (int half = 0; half < 2; ++half) memcpy(&words[size_t(row) * 16 + half * 8], chunk_at(row, half * 16), 16);
        }
    }
}

float widen(uint16_t bits, bool is_bf16) {
    if (is_bf16) {
        const uint32_t wide = uint32_t(bits) << 16;
        float value;
        memcpy(&value, &wide, 4);
        return value;
    }
    _Float16 half;
    memcpy(&half, &bits, 2);
    return float(half);
}

// e4m3: a sign, four bits of exponent with a bias of 7, three bits of mantissa, and NaN for 0x7f.
float widen_e4m3(unsigned bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    if ((bits & 0x7f) == 0x7f) return __builtin_nanf("");
    const float size = exponent == 0 ? __builtin_ldexpf(mantissa, -9) : __builtin_ldexpf(8 + mantissa, exponent - 10);
    return bits & 0x80 ? -size : size;
}

// Sums are exact to fp32's rounding, so they do not show the short accumulators of 8-bit products.
void multiply_e4m3(float* sums, const IssuedProduct& issued) {
    float table[256];
    for (int bits = 0; bits < 256; ++bits) table[bits] = widen_e4m3(bits);
    const auto* a = reinterpret_cast<const uint8_t*>(issued.a_words.data());
    const auto* b = reinterpret_cast<const uint8_t*>(issued.b_words.data());
    const int n = issued.product.n;
    std::vector<float> wide(size_t(32) * n);
    for (int i = 0; i < 32 * n; ++i) wide[size_t(i % 32) * n + i / 32] = table[b[i]];
    for (int row = 0; row < 64; ++row) {
        float* out = sums + size_t(row) * n;
        for (int k = 0; k < 32; ++k) {
            const float factor = table[a[row * 32 + k]];
            for (int col = 0; col < n; ++col) out[col] += factor * wide[size_t(k) * n + col];
        }
    }
}

void multiply(float* sums, const IssuedProduct& issued) {
    if (issued.product.element == Element::kE4m3) return multiply_e4m3(sums, issued);
    const int n = issued.product.n;
    const bool is_bf16 = issued.product.element == Element::kBf16;
    float a[64][16];
    float b[16][256];
    for (int i = 0; i < 64 * 16; ++i) a[i / 16][i % 16] = widen(issued.a_words[i], is_bf16);
    for (int col = 0; col < n; ++col) {
        for (int k = 0; k < 16; ++k) b[k][col] = widen(issued.b_words[size_t(col) * 16 + k], is_bf16);
    }
    for (int row = 0; row < 64; ++row) {
        float* out = sums + size_t(row) * n;
        for (int k = 0; k < 16; k += 4) {
            const float a0 = a[row][k], a1 = a[row][k + 1], a2 = a[row][k + 2], a3 = a[row][k + 3];
            for (int col = 0; col < n; ++col) add_four(out[col], a0, b[k][col], a1, b[k + 1][col], a2, b[k + 2][col], a3, b[k + 3][col]);
        }
    }
}

// The element of C at register i of 8-column tile `tile` of a thread.
size_t place(unsigned thread, int n, int tile, int i) {
    const unsigned lane = thread % 32, row = thread / 32 * 16 + lane / 4 + i / 2 * 8;
    return size_t(row) * n + tile * 8 + lane % 4 * 2 + i % 2;
}

void compute_up_to(Warpgroup& group, unsigned end) {
    for (; group.multiplied < end; ++group.multiplied) {
        IssuedProduct& issued = group.products[group.multiplied - group.first_product];
        std::vector<uint16_t> now;
        bool changed = false;
        if (!issued.a_in_registers) {
            gather(now, issued.a, 64, issued.product.transpose_a, "A");
            changed = now != issued.a_words;
        }
        gather(now, issued.b, issued.product.n, issued.product.transpose_b, "B");
        changed = changed || now != issued.b_words;
        std::vector<float>& sums = group.chains[issued.chain - group.first_chain].sums;
        if (changed) memset(sums.data(), kPoison, sums.size() * sizeof(float)); else multiply(sums.data(), issued);
    }
    while (!group.products.empty() && group.first_product < group.multiplied) group.products.pop_front(), ++group.first_product;
}

// The chain of this thread's accumulator, a new one if the accumulator has no product in flight.
unsigned chain_of(Warpgroup& group, float* acc, const Product& product) {
    Fiber* fiber = me();
    for (AccUse& use : fiber->uses) {
        if (use.acc == acc) {
            use.last_product = fiber->products;
            return use.chain;
        }
    }
    const unsigned number = fiber->chains++;
    fiber->uses.push_back({acc, number, fiber->products});
    if (number - group.first_chain == group.chains.size()) {
        group.chains.push_back({product.n, std::vector<float>(64 * size_t(product.n)), 0});
    }
    Chain& chain = group.chains[number - group.first_chain];
    for (int tile = 0; tile < product.n / 8; ++tile) {
        for (int i = 0; i < 4; ++i) {
            if (product.accumulate) chain.sums[place(my_thread(), product.n, tile, i)] = acc[tile * 4 + i];
        }
    }
    memset(acc, kPoison, sizeof(float) * product.n / 2);
    return number;
}

}  // namespace

void wgmma(float* acc, const unsigned* a_words, unsigned long long a, unsigned long long b, const Product& product) {
    Fiber* fiber = me();
    Warpgroup& group = my_warpgroup();
    if (fiber->needs_fence) fail("a wgmma without wgmma_fence since the last wgmma_wait");
    bool is_open = false;
    for (const AccUse& use : fiber->uses) is_open = is_open || use.acc == acc;
    if (is_open && !product.accumulate) fail("a wgmma that overwrites an accumulator of products in flight");
    const unsigned number = fiber->products;
    const unsigned chain = chain_of(group, acc, product);
    if (number - group.first_product == group.products.size()) {
        IssuedProduct issued;
        issued.product = product, issued.a = a, issued.b = b, issued.chain = chain, issued.a_in_registers = a_words != nullptr;
        if (a_words) issued.a_words.resize(64 * 16); else gather(issued.a_words, a, 64, product.transpose_a, "A");
        gather(issued.b_words, b, product.n, product.transpose_b, "B");
        group.products.push_back(std::move(issued));
    }
    IssuedProduct& issued = group.products[number - group.first_product];
    if (issued.a != a || issued.b != b || issued.product.n != product.n || issued.chain != chain ||
        issued.product.accumulate != product.accumulate || issued.a_in_registers != (a_words != nullptr)) {
        fail("wgmma %u differs between threads of a warpgroup", number);
    }
    if (a_words) {
        const unsigned lane = self->lane, row = my_thread() / 32 * 16 + lane / 4;
        for (int i = 0; i < 4; ++i) memcpy(&issued.a_words[(row + i % 2 * 8) * 16 + i / 2 * 8 + lane % 4 * 2], &a_words[i], 4);
    }
    ++fiber->products;
    if (++issued.posted == 128) {
        for (Fiber* waiter : group.waiters) wake(waiter);
        group.waiters.clear();
    }
}

void wgmma_fence() { me()->needs_fence = false; }

void wgmma_commit() {
    Fiber* fiber = me();
    fiber->product_groups.push_back(fiber->products);
    fiber->committed = fiber->products;
}

void wgmma_wait(unsigned pending) {
    Fiber* fiber = me();
    Warpgroup& group = my_warpgroup();
    auto& groups = fiber->product_groups;
    fiber->needs_fence = true;
    if (groups.size() <= pending) return;
    const unsigned end = groups[groups.size() - pending - 1];
    groups.erase(groups.begin(), groups.end() - pending);
    while (end > group.multiplied && group.products[end - 1 - group.first_product].posted < 128) {
        group.waiters.push_back(fiber);
        block(Wait::kProducts, end - 1, 0);
    }
    compute_up_to(group, end);
    for (size_t i = 0; i < fiber->uses.size();) {
        const AccUse use = fiber->uses[i];
        if (use.last_product >= end) {
            ++i;
            continue;
        }
        Chain& chain = group.chains[use.chain - group.first_chain];
        for (int tile = 0; tile < chain.n / 8; ++tile) {
            for (int r = 0; r < 4; ++r) use.acc[tile * 4 + r] = chain.sums[place(my_thread(), chain.n, tile, r)];
        }
        ++chain.delivered;
        fiber->uses.erase(fiber->uses.begin() + i);
    }
    while (!group.chains.empty() && group.chains.front().delivered == 128) group.chains.pop_front(), ++group.first_chain;
}

}  // namespace emulator
