// What a warp does together: shuffles, votes, 8 x 8 matrices, products of fragments.
//
// A lane leaves its arguments and waits. The last lane that comes does the work of all 32 on the
// others' arguments, which lie on their stacks.

#include "engine.h"

namespace emulator {

namespace {

using Work = void (*)(void* const* lanes);

// The work of the function under way in each warp is found through its first argument.
struct Arguments {
    Work work;
};

void finish(Warp* warp) {
    void* const* lanes = warp->arguments;
    const uint32_t arrived = warp->arrived;
    warp->arrived = 0;
    static_cast<Arguments*>(lanes[__builtin_ctz(arrived)])->work(lanes);
    for (uint32_t left = arrived; left; left &= left - 1) {
        Fiber& fiber = warp->cta->fibers[warp->index * 32 + __builtin_ctz(left)];
        if (&fiber != self) wake(&fiber);
        warp->arguments[fiber.lane] = nullptr;
    }
}

void together(const char* function, Arguments* arguments) {
    Fiber* fiber = me();
    Warp* warp = fiber->warp;
    if (warp->arrived == 0) {
        warp->function = function;
    } else if (warp->function != function) {
        fail("%s, while other lanes of the warp are at %s", function, warp->function);
    }
    warp->arguments[fiber->lane] = arguments;
    warp->arrived |= 1u << fiber->lane;
    if (warp->arrived == warp->live) {
        finish(warp);
        lag_again();
    } else {
        block(Wait::kWarp, 0, 0);
    }
}

template <class T>
const T& of(void* const* lanes, int lane) {
    return *static_cast<T*>(lanes[lane]);
}

struct Shuffle : Arguments {
    unsigned value, source, result;
};
void do_shuffle(void* const* lanes) {
    for (int lane = 0; lane < 32; ++lane) {
        if (!lanes[lane]) continue;
        auto* mine = static_cast<Shuffle*>(lanes[lane]);
        // The value of a lane that has exited is undefined.
        mine->result = lanes[mine->source] ? of<Shuffle>(lanes, mine->source).value : ~0u;
    }
}

struct Ballot : Arguments {
    bool vote;
    unsigned result;
};
void do_ballot(void* const* lanes) {
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= unsigned(lanes[lane] && of<Ballot>(lanes, lane).vote) << lane;
    for (int lane = 0; lane < 32; ++lane) {
        if (lanes[lane]) static_cast<Ballot*>(lanes[lane])->result = votes;
    }
}

void do_nothing(void* const*) {}

void need_all(void* const* lanes, const char* function) {
    for (int lane = 0; lane < 32; ++lane) {
        if (!lanes[lane]) fail("%s without lane %d, which has exited", function, lane);
    }
}

struct Matrices : Arguments {
    unsigned* r;
    int count;
    bool transposed, stores;
    char* row;  // the lane's row in shared memory
};
void do_matrices(void* const* lanes) {
    need_all(lanes, "ldmatrix or stmatrix");
    const auto& first = of<Matrices>(lanes, 0);
    for (int i = 0; i < first.count; ++i) {
        char* rows[8];
        for (int r = 0; r < 8; ++r) rows[r] = of<Matrices>(lanes, 8 * i + r).row;
        for (int lane = 0; lane < 32; ++lane) {
            unsigned* word = &of<Matrices>(lanes, lane).r[i];
            for (int half = 0; half < 2; ++half) {
                const int outer = lane / 4, inner = lane % 4 * 2 + half;
                char* at = first.transposed ? rows[inner] + outer * 2 : rows[outer] + inner * 2;
                char* mine = reinterpret_cast<char*>(word) + half * 2;
                first.stores ? memcpy(at, mine, 2) : memcpy(mine, at, 2);
            }
        }
    }
}

float widen(unsigned bits, Element element) {
    float value;
    if (element == Element::kFp16) {
        _Float16 half;
        const uint16_t low = uint16_t(bits);
        memcpy(&half, &low, 2);
        return float(half);
    }
    bits = element == Element::kBf16 ? bits << 16 : bits & ~0x1fffu;
    memcpy(&value, &bits, 4);
    return value;
}

struct Mma : Arguments {
    float* c;
    const unsigned *a, *b;
    int a_words, b_words;
    Element element;
};
void do_multiply(void* const* lanes) {
    need_all(lanes, "mma");
    const Mma& first = of<Mma>(lanes, 0);
    const int halves = first.element == Element::kTf32 ? 1 : 2;  // elements of a word
    const int k_of_word = 4 * halves, depth = first.b_words * k_of_word;
    float a[16][16], b[16][8];  // [row][k], [k][column]
    for (int lane = 0; lane < 32; ++lane) {
        const Mma& mine = of<Mma>(lanes, lane);
        const int g = lane / 4, t = lane % 4;
        for (int half = 0; half < halves; ++half) {
            const int shift = 16 * half;
            for (int w = 0; w < first.a_words; ++w) {
                const unsigned bits = halves == 2 ? mine.a[w] >> shift & 0xffff : mine.a[w];
                a[g + w % 2 * 8][w / 2 * k_of_word + t * halves + half] = widen(bits, first.element);
            }
            for (int w = 0; w < first.b_words; ++w) {
                const unsigned bits = halves == 2 ? mine.b[w] >> shift & 0xffff : mine.b[w];
                b[w * k_of_word + t * halves + half][g] = widen(bits, first.element);
            }
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        float* mine = of<Mma>(lanes, lane).c;
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
            for (int k = 0; k < depth; k += 4) {
                add_four(mine[i], a[row][k], b[k][col], a[row][k + 1], b[k + 1][col], a[row][k + 2], b[k + 2][col], a[row][k + 3], b[k + 3][col]);
            }
        }
    }
}

}  // namespace

void complete_warp(Warp* warp) {
    if (warp->arrived && warp->arrived == warp->live) finish(warp);
}

unsigned shuffle(unsigned value, unsigned source_lane) {
    Shuffle arguments{{do_shuffle}, value, source_lane, 0};
    together("a shuffle", &arguments);
    return arguments.result;
}

unsigned ballot(bool vote) {
    Ballot arguments{{do_ballot}, vote, 0};
    together("a vote", &arguments);
    return arguments.result;
}

void sync_warp() {
    Arguments arguments{do_nothing};
    together("__syncwarp", &arguments);
}

void load_matrices(unsigned* r, int count, bool transposed, unsigned address) {
    // Lanes past the last matrix give no address.
    char* row = int(self->lane) < 8 * count ? shared_place(address, 16) : nullptr;
    Matrices arguments{{do_matrices}, r, count, transposed, false, row};
    together("ldmatrix", &arguments);
}

void store_matrices(const unsigned* r, int count, bool transposed, unsigned address) {
    char* row = shared_place(address, 16);
    self->writers[(address - kSharedBase) / 16] = self->stamp;
    Matrices arguments{{do_matrices}, const_cast<unsigned*>(r), count, transposed, true, row};
    together("stmatrix", &arguments);
}

void multiply(float* c, const unsigned* a, const unsigned* b, int a_words, int b_words, Element element) {
    Mma arguments{{do_multiply}, c, a, b, a_words, b_words, element};
    together("mma", &arguments);
}

}  // namespace emulator
