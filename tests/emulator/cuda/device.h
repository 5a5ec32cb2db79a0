// What kernels that run on the CPU call: the engine's interface, and inline accesses to shared
// memory. cuda/prelude.h and ptx/ build CUDA's names on it. The engine implements it in engine/.
// It has no includes, since a kernel's names must meet no other ones.

#pragma once

namespace emulator {

struct Dim {
    unsigned x, y, z;
};

// The part of a thread that a kernel's code reads. The engine's Fiber derives from it.
struct Thread {
    Dim thread_index, block_index, block_dim, grid_dim;
    unsigned lane, rank;     // in the warp; of the CTA in its cluster
    char* shared;            // the CTA's dynamic shared memory
    unsigned shared_bytes;
    unsigned* writers;       // for each 16 bytes of it: the stamp of the last ordinary store
    unsigned stamp;          // number of fences of the asynchronous proxy so far, << 10, and the thread
};

// The thread that runs now on this thread of the host.
extern __thread Thread* self __attribute__((tls_model("initial-exec")));

// Addresses of shared memory. Bytes below kSharedBase belong to the system. An address in another
// CTA of the cluster has 1 + its rank above bit kRankShift.
constexpr unsigned kSharedBase = 1024, kRankShift = 24;

// Ends the launch with a message. The message names the thread's place.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

[[noreturn]] void fail_shared(unsigned address, unsigned bytes);

// The place of an access to this CTA's shared memory, checked for bounds and alignment.
inline char* shared_place(unsigned address, unsigned bytes) {
    const unsigned offset = address - kSharedBase;
    if (__builtin_expect(address % bytes != 0 || offset >= self->shared_bytes || self->shared_bytes - offset < bytes, 0)) {
        fail_shared(address, bytes);
    }
    return self->shared + offset;
}
template <class T>
inline T load(unsigned address) {
    T value;
    __builtin_memcpy(&value, shared_place(address, sizeof(T)), sizeof(T));
    return value;
}
template <class T>
inline void store(unsigned address, const T& value) {
    __builtin_memcpy(shared_place(address, sizeof(T)), &value, sizeof(T));
    self->writers[(address - kSharedBase) / 16] = self->stamp;
}

// ---- warps. All lanes that have not exited take part.

unsigned shuffle(unsigned value, unsigned source_lane);
unsigned ballot(bool vote);
void sync_warp();
void load_matrices(unsigned* r, int count, bool transposed, unsigned address);
void store_matrices(const unsigned* r, int count, bool transposed, unsigned address);
enum class Element { kBf16, kFp16, kTf32, kE4m3 };
// c += a b over the inner indices of `a_words` registers of A and `b_words` of B.
void multiply(float* c, const unsigned* a, const unsigned* b, int a_words, int b_words, Element element);

// ---- barriers

void named_barrier(int id, unsigned threads);
void named_barrier_arrive(int id, unsigned threads);
bool named_barrier_all(int id, unsigned threads, bool vote);
void sync_threads();
bool sync_threads_or(bool vote);
void cluster_sync();
void barrier_init(unsigned barrier, int arrivals);
// `barrier` may lie in another CTA of the cluster.
void barrier_arrive(unsigned barrier);
void barrier_expect(unsigned barrier, unsigned bytes);
void barrier_wait(unsigned barrier, unsigned parity);
bool barrier_test_wait(unsigned barrier, unsigned parity);

// ---- device memory

unsigned load_acquire(const unsigned* from);
void wait_for_previous_grid();

// ---- copies

void cp_async(unsigned target, const void* source, unsigned bytes, bool valid);
void cp_async_arrive(unsigned barrier);
void cp_async_commit();
void cp_async_wait(unsigned pending);
void fence_async_proxy();

// Loads a box; `ctas` has a bit for each CTA of the cluster that gets it.
void tma_load(unsigned to, const void* map, unsigned barrier, int rank, const int* at, unsigned ctas);
void tma_store(const void* map, unsigned from, int rank, const int* at);
void bulk_load(unsigned to, const void* from, unsigned bytes, unsigned barrier);
void bulk_copy_in(unsigned there, unsigned from, unsigned bytes, unsigned barrier);
void bulk_add(float* to, unsigned from, unsigned bytes);
void bulk_commit();
void bulk_wait_read();
void bulk_wait();
void store_ints_in(unsigned there, int a, int b, int c, int d);

// ---- products of a warpgroup

// The inner index counts 16 elements of 16 bits or 32 of 8 bits.
struct Product {
    Element element;
    int n;
    bool transpose_a, transpose_b, accumulate;
};
// `a_words` are four registers of A, or null if A lies where the descriptor `a` says.
void wgmma(float* acc, const unsigned* a_words, unsigned long long a, unsigned long long b, const Product& product);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(unsigned pending);

unsigned sm_index();
void read_clocks(unsigned long long& cycles, unsigned long long& ns);

// ---- a kernel as the driver finds it, under the name emulator_<entry>

struct Kernel {
    void (*call)(void** arguments);
    int max_threads, ctas_per_sm, cluster;
    bool has_static_shared;
};
template <unsigned long... kIndices>
struct Indices {};
template <class... Parameters, unsigned long... kIndices>
inline void call(void (*kernel)(Parameters...), void** arguments, Indices<kIndices...>) {
    kernel(*static_cast<Parameters*>(arguments[kIndices])...);
}
// Calls a kernel with the arguments to which the driver's pointers lead.
template <class... Parameters>
inline void call(void (*kernel)(Parameters...), void** arguments) {
    call(kernel, arguments, Indices<__integer_pack(sizeof...(Parameters))...>{});
}

}  // namespace emulator
