// The engine's state: a launch, its resident clusters, their CTAs, warps and fibers. A fiber is one
// thread of the GPU on a stack of its own. All fibers of a launch share one thread of the host.
//
// launch.cpp schedules. warp.cpp, barriers.cpp, copies.cpp and wgmma.cpp implement cuda/device.h.
// driver.cpp is libcuda's face. No file knows a kernel.

#pragma once

#include "../cuda/device.h"

#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace emulator {

// Every byte of memory that holds nothing yet. In each floating-point format it makes a NaN.
constexpr unsigned char kPoison = 0xff;

struct Warp;
struct Cta;
struct Cluster;
struct Fiber;

enum class Wait { kNothing, kWarp, kBarrier, kNamed, kAllThreads, kCluster, kCounter, kProducts };

// Four steps of an inner product. mma.sync and wgmma add up in one order, as on the hardware.
inline void add_four(float& sum, float a0, float b0, float a1, float b1, float a2, float b2, float a3, float b3) {
    sum += __builtin_fmaf(a0, b0, a1 * b1) + __builtin_fmaf(a2, b2, a3 * b3);
}

// ---- asynchronous work of a thread

// A cp.async that has not arrived.
struct SmallCopy {
    char* to;
    const void* from;
    unsigned bytes, group;
    bool valid;
};

// A box of a tensor, or contiguous bytes, between shared and device memory.
struct Box {
    char* to;            // loads: where it lies in shared memory; bulk additions: in device memory
    const char* from;    // bulk copies; stores: in shared memory
    unsigned bytes;
    bool adds, is_tensor;
    uint64_t map[16];
    int at[5];
};
struct StoreGroup {
    std::vector<Box> boxes;
    std::vector<std::vector<char>> read;  // the bytes of each box, once shared memory has been read
};

// The use of one accumulator by a thread, from its first product to the wait for its last one.
struct AccUse {
    float* acc;
    unsigned chain;
    unsigned last_product;
};

struct Fiber : Thread {
    void* stack_pointer;
    Warp* warp;
    Wait wait;
    unsigned wait_at, wait_for;  // what it waits for, in the terms of `wait`
    const void* place;           // the kernel's instruction behind the call
    bool done;

    std::vector<SmallCopy> copies;
    unsigned copy_groups;
    unsigned fenced_deliveries;  // the CTA's deliveries at the thread's last fence of the asynchronous proxy

    std::vector<StoreGroup> stores;  // committed groups; the last one is open

    unsigned products, committed;               // issued; number of the first product after the last commit
    std::vector<unsigned> product_groups;       // for each group in flight the number behind its last product
    std::vector<AccUse> uses;
    unsigned chains;
    bool needs_fence;

    const unsigned* counter;  // the last load_acquire
    unsigned counter_value;
};

struct Warp {
    Cta* cta;
    int index;
    uint32_t ready, live;  // a bit for each lane
    bool queued;
    bool lags;  // lanes 1 to 31 run only if nothing else can
    // The collective function under way: its name, who has come, their arguments.
    const char* function;
    uint32_t arrived;
    void* arguments[32];
};

// ---- shared state of a CTA

struct Mbarrier {
    unsigned address;
    int arrivals, pending;
    int64_t bytes;
    unsigned phase;
    std::vector<Fiber*> waiters;
};

struct NamedBarrier {
    unsigned threads = 0, arrived = 0;  // arrived: without waiting, since it opened last
    std::vector<Fiber*> waiters;
    bool votes = true, result = true;  // of those that wait; of those that waited last
};

// One wgmma of a warpgroup.
struct IssuedProduct {
    Product product;
    uint64_t a, b;
    unsigned chain, posted = 0;
    bool a_in_registers, multiplied = false;
    std::vector<uint16_t> a_words, b_words;  // 64 x 16 and n x 16, as they were at the first warp's call
};
// The sums of one accumulator over its products in flight: 64 x n.
struct Chain {
    int n;
    std::vector<float> sums;
    unsigned delivered = 0;
};
struct Warpgroup {
    unsigned first_product = 0, first_chain = 0;  // numbers of the first ones that are kept
    std::deque<IssuedProduct> products;
    std::deque<Chain> chains;
    unsigned multiplied = 0;  // number of the first product that is not done
    std::vector<Fiber*> waiters;
};

struct Cta {
    Cluster* cluster;
    unsigned rank;
    std::vector<char> memory;
    char* shared;
    std::vector<unsigned> writers;
    unsigned deliveries = 0;           // arrivals of cp.async so far
    std::vector<unsigned> delivered;   // for each 16 bytes: which of them wrote it, or 0
    std::vector<Mbarrier> barriers;
    std::vector<uint16_t> barrier_at;  // 1 + index into barriers, for each 8 bytes
    NamedBarrier named[16];
    std::vector<Fiber*> at_sync;       // of __syncthreads
    bool or_vote, or_result;
    unsigned live;
    std::vector<Warp> warps;
    std::vector<Fiber> fibers;
    std::vector<Warpgroup> warpgroups;
};

// A load that has not arrived.
struct Load {
    Box box;
    Cta* cta;
    unsigned offset, barrier;  // in that CTA's shared memory
    bool arrives;              // no box: a thread's copies by cp.async, which end in an arrival
    std::vector<SmallCopy> small;
};

struct Cluster {
    std::vector<Cta> ctas;
    std::vector<Load> loads;
    std::vector<Fiber*> at_sync;
    unsigned live = 0;  // threads
};

struct Launch {
    const Kernel* kernel;
    const char* name;
    void** arguments;
    Dim grid, block;
    unsigned shared_bytes;
    std::vector<std::unique_ptr<Cluster>> resident;
    uint64_t next_cluster = 0;
    std::vector<Warp*> runnable;
    std::vector<Fiber*> at_counters;
    std::minstd_rand random;
    bool runs_laggards = false;
    void* scheduler = nullptr;
    std::string error;
};

extern thread_local Launch* launch;
inline Fiber* me() { return static_cast<Fiber*>(self); }
inline Cta* my_cta() { return me()->warp->cta; }

// Runs a whole grid. Returns what went wrong, or nothing.
std::string run(Launch& work);

// The current fiber waits until another one wakes it.
void block(Wait wait, unsigned at, unsigned what);
void wake(Fiber* fiber);
// Lanes that lag have caught up with the others, which go first again.
void lag_again();

// The CTA and the offset in its shared memory of an address that may lie in another CTA.
Cta* owner_of(unsigned address, unsigned bytes, unsigned* offset);

// ---- hooks of the scheduler

// Delivers one load. Returns false if there is none.
bool deliver_a_load();
// Wakes the threads whose counter in device memory has changed. Returns whether there was one.
bool wake_at_counters();
void complete_bytes(Cta* cta, unsigned barrier, unsigned bytes);
void complete_arrival(Cta* cta, unsigned barrier);
// A thread exits.
void check_at_exit(Fiber* fiber);
void finish_copies(Fiber* fiber);
// A warp has lost a lane: its collective function may be complete.
void complete_warp(Warp* warp);
void complete_sync(Cta* cta);
// Fails if TMA or wgmma reads bytes that their writer has not fenced.
void check_fenced(Cta* cta, unsigned offset, unsigned bytes, const char* reader);
std::string describe_barrier(Cta* cta, unsigned address);

// ---- device memory (memory.cpp)

void* allocate(size_t bytes);
bool release(void* memory);
// The writes of a launch to device memory: all of it is kept before, and compared after. They may
// be hidden from the next launch until it waits for them. One launch runs at a time.
void keep_memory();
// Returns whether a thread of the launch has waited.
bool find_writes();
void hide_writes();
// Returns the address of an allocation whose surroundings were written, or null.
const void* overwritten();

}  // namespace emulator
