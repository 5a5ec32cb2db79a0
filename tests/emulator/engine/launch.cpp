// The scheduler: fibers, their stacks, and the choice of the warp that runs next.
//
// A warp runs until none of its lanes can go on. The next one is chosen at random among the warps
// that can, so warps drift as far apart as the barriers allow. With FLASHTUNE_EMULATOR_LAGS, one
// warpgroup of each CTA holds back lanes 1 to 31 of each warp, so lanes of a warp drift apart too.
// A load arrives only when no warp can run. A launch in which nothing can go on is a deadlock.

#include "engine.h"

#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <sys/mman.h>

namespace emulator {

__thread Thread* self;
thread_local Launch* launch;

namespace {

constexpr size_t kStackBytes = 128 << 10, kGuardBytes = 4096;

// Stacks of this thread of the host, which launches use again.
struct Stacks {
    std::vector<char*> all;
    ~Stacks() {
        for (char* stack : all) munmap(stack, kStackBytes);
    }
    char* at(size_t index) {
        while (all.size() <= index) {
            void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (stack == MAP_FAILED) std::abort();
            mprotect(stack, kGuardBytes, PROT_NONE);
            all.push_back(static_cast<char*>(stack));
        }
        return all[index];
    }
};
thread_local Stacks stacks;

// Where a failure outside of all fibers leads.
thread_local jmp_buf to_run;

// Saves the registers that a call preserves, and goes on where `to` was saved.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, . - emulator_switch
)");

Fiber* ready_lane(Warp* warp) {
    const uint32_t ready = warp->lags && !launch->runs_laggards ? warp->ready & 1 : warp->ready;
    return ready ? &warp->cta->fibers[warp->index * 32 + __builtin_ctz(ready)] : nullptr;
}

// Leaves the current fiber for another lane of its warp, or for the scheduler.
void leave() {
    Fiber* fiber = me();
    if (Fiber* next = ready_lane(fiber->warp)) {
        self = next;
        emulator_switch(&fiber->stack_pointer, next->stack_pointer);
    } else {
        emulator_switch(&fiber->stack_pointer, launch->scheduler);
    }
}

void fiber_main() {
    launch->kernel->call(launch->arguments);
    Fiber* fiber = me();
    Warp* warp = fiber->warp;
    Cta* cta = warp->cta;
    check_at_exit(fiber);
    fiber->done = true;
    warp->ready &= ~(1u << fiber->lane), warp->live &= ~(1u << fiber->lane);
    --cta->live, --cta->cluster->live;
    complete_warp(warp);
    complete_sync(cta);
    leave();
    std::abort();
}

void start_fiber(Fiber& fiber, char* stack) {
    void** top = reinterpret_cast<void**>(stack + kStackBytes);
    top[-2] = reinterpret_cast<void*>(fiber_main);
    fiber.stack_pointer = top - 8;
}

unsigned seed() {
    const char* given = getenv("FLASHTUNE_EMULATOR_SEED");
    return given ? atoi(given) : 1;
}

void start_cta(Cta& cta, Dim block_index, size_t first_stack) {
    const Launch& work = *launch;
    const unsigned threads = work.block.x;
    cta.memory.assign(work.shared_bytes + 1024, char(kPoison));
    cta.shared = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(cta.memory.data()) + 1023) & ~uintptr_t(1023));
    cta.writers.assign(work.shared_bytes / 16 + 1, 0);
    cta.delivered.assign(work.shared_bytes / 16 + 1, 0);
    cta.barrier_at.assign(work.shared_bytes / 8 + 1, 0);
    cta.live = threads;
    cta.warps.resize((threads + 31) / 32);
    cta.fibers.resize(threads);
    cta.warpgroups.resize((threads + 127) / 128);
    // Where warpgroups have roles, each role lags in some CTA.
    const size_t lagging = getenv("FLASHTUNE_EMULATOR_LAGS") ? (block_index.x + seed()) % cta.warpgroups.size() : ~size_t(0);
    for (size_t w = 0; w < cta.warps.size(); ++w) {
        const unsigned lanes = std::min<unsigned>(32, threads - w * 32);
        const uint32_t mask = lanes == 32 ? ~0u : (1u << lanes) - 1;
        cta.warps[w] = Warp{};
        cta.warps[w].lags = w / 4 == lagging;
        cta.warps[w].cta = &cta, cta.warps[w].index = int(w), cta.warps[w].ready = cta.warps[w].live = mask;
    }
    for (unsigned t = 0; t < threads; ++t) {
        Fiber& fiber = cta.fibers[t];
        fiber.thread_index = {t, 0, 0}, fiber.block_index = block_index, fiber.block_dim = work.block, fiber.grid_dim = work.grid;
        fiber.lane = t % 32, fiber.rank = cta.rank, fiber.shared = cta.shared, fiber.shared_bytes = work.shared_bytes;
        fiber.writers = cta.writers.data(), fiber.stamp = 1 << 10 | t;
        fiber.warp = &cta.warps[t / 32];
        fiber.needs_fence = true;
        start_fiber(fiber, stacks.at(first_stack + t));
    }
}

void start_cluster(size_t slot) {
    Launch& work = *launch;
    const unsigned size = work.kernel->cluster;
    auto cluster = std::make_unique<Cluster>();
    cluster->ctas.resize(size);
    cluster->live = size * work.block.x;
    for (unsigned rank = 0; rank < size; ++rank) {
        const uint64_t index = work.next_cluster * size + rank;
        const Dim block_index = {unsigned(index % work.grid.x), unsigned(index / work.grid.x % work.grid.y),
                                 unsigned(index / work.grid.x / work.grid.y)};
        Cta& cta = cluster->ctas[rank];
        cta.cluster = cluster.get(), cta.rank = rank;
        start_cta(cta, block_index, (slot * size + rank) * work.block.x);
        for (Warp& warp : cta.warps) warp.queued = true, work.runnable.push_back(&warp);
    }
    ++work.next_cluster;
    work.resident[slot] = std::move(cluster);
}

std::string describe_wait(const Fiber& fiber) {
    char text[160];
    switch (fiber.wait) {
    case Wait::kWarp: snprintf(text, sizeof text, "the other lanes at %s", fiber.warp->function); break;
    case Wait::kBarrier: return describe_barrier(fiber.warp->cta, fiber.wait_at) + ", parity " + std::to_string(fiber.wait_for);
    case Wait::kNamed: snprintf(text, sizeof text, "named barrier %u of %u threads", fiber.wait_at, fiber.wait_for); break;
    case Wait::kAllThreads: snprintf(text, sizeof text, "__syncthreads"); break;
    case Wait::kCluster: snprintf(text, sizeof text, "cluster_sync"); break;
    case Wait::kCounter: snprintf(text, sizeof text, "a counter in device memory that is %u", fiber.wait_for); break;
    case Wait::kProducts: snprintf(text, sizeof text, "its warpgroup's other warps at wgmma %u", fiber.wait_at); break;
    case Wait::kNothing: snprintf(text, sizeof text, "nothing"); break;
    }
    return text;
}

std::string describe_place(const Fiber& fiber) {
    char text[120];
    snprintf(text, sizeof text, "CTA (%u, %u, %u) warp %u", fiber.block_index.x, fiber.block_index.y, fiber.block_index.z,
             fiber.thread_index.x / 32);
    return text;
}

// Groups the lanes of each warp by what they wait for.
std::string describe_deadlock() {
    std::string text = "DEADLOCK: no thread can go on, and no copy is in flight";
    for (const auto& cluster : launch->resident) {
        if (!cluster) continue;
        for (const Cta& cta : cluster->ctas) {
            for (const Warp& warp : cta.warps) {
                std::string last;
                for (unsigned lane = 0; lane < 32; ++lane) {
                    if (!(warp.live >> lane & 1)) continue;
                    const Fiber& fiber = cta.fibers[warp.index * 32 + lane];
                    const std::string wait = describe_wait(fiber);
                    if (wait != last) {
                        text += "\n  " + describe_place(fiber) + " lane " + std::to_string(lane) + " waits for " + wait;
                    }
                    last = wait;
                }
            }
        }
    }
    return text;
}

size_t resident_clusters() {
    const char* given = getenv("FLASHTUNE_EMULATOR_RESIDENT");
    return given && atoi(given) > 0 ? atoi(given) : 2;
}

void run_warp(Warp* warp) {
    if (Fiber* lane = ready_lane(warp)) {
        self = lane;
        emulator_switch(&launch->scheduler, lane->stack_pointer);
        self = nullptr;
    }
}

// Runs the lagging lanes of one warp. Returns false if there are none.
bool run_laggards() {
    Launch& work = *launch;
    std::vector<Warp*> behind;
    for (const auto& cluster : work.resident) {
        if (!cluster) continue;
        for (Cta& cta : cluster->ctas) for (Warp& warp : cta.warps) if (warp.ready) behind.push_back(&warp);
    }
    if (behind.empty()) return false;
    work.runs_laggards = true;
    run_warp(behind[work.random() % behind.size()]);
    work.runs_laggards = false;
    return true;
}

void schedule(uint64_t clusters) {
    Launch& work = *launch;
    while (work.error.empty()) {
        if (work.runnable.empty()) {
            // A cluster that has ended leaves its place to the next one.
            for (size_t slot = 0; slot < work.resident.size(); ++slot) {
                auto& cluster = work.resident[slot];
                if (cluster && cluster->live == 0) {
                    if (!cluster->loads.empty()) {
                        work.error = "a CTA has ended while a copy into its shared memory is in flight";
                        return;
                    }
                    for (Cta& cta : cluster->ctas) for (Fiber& fiber : cta.fibers) finish_copies(&fiber);
                    cluster.reset();
                }
                if (!cluster && work.next_cluster < clusters) start_cluster(slot);
            }
            if (!work.runnable.empty()) continue;
            if (wake_at_counters() || deliver_a_load() || run_laggards()) continue;
            for (const auto& cluster : work.resident) if (cluster) work.error = describe_deadlock();
            return;
        }
        if (!work.at_counters.empty()) wake_at_counters();
        const size_t pick = work.random() % work.runnable.size();
        Warp* warp = work.runnable[pick];
        work.runnable[pick] = work.runnable.back();
        work.runnable.pop_back();
        warp->queued = false;
        run_warp(warp);
    }
}

}  // namespace

std::string run(Launch& work) {
    launch = &work;
    work.random.seed(seed());
    const uint64_t clusters = uint64_t(work.grid.x) * work.grid.y * work.grid.z / work.kernel->cluster;
    if (work.kernel->has_static_shared && work.kernel->cluster > 1) return "static shared memory in a cluster, which the emulator does not know";
    work.resident.resize(std::min<uint64_t>(clusters, work.kernel->has_static_shared ? 1 : resident_clusters()));
    if (setjmp(to_run) == 0) schedule(clusters);
    launch = nullptr, self = nullptr;
    return work.error;
}

void block(Wait wait, unsigned at, unsigned what) {
    Fiber* fiber = me();
    fiber->wait = wait, fiber->wait_at = at, fiber->wait_for = what;
    fiber->warp->ready &= ~(1u << fiber->lane);
    leave();
    fiber->wait = Wait::kNothing;
}

void wake(Fiber* fiber) {
    Warp* warp = fiber->warp;
    warp->ready |= 1u << fiber->lane;
    if (!warp->queued) warp->queued = true, launch->runnable.push_back(warp);
}

void lag_again() {
    if (!launch->runs_laggards) return;
    launch->runs_laggards = false;
    leave();
}

void fail(const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    Fiber* fiber = me();
    launch->error = text;
    if (fiber) {
        launch->error = describe_place(*fiber) + " lane " + std::to_string(fiber->lane) + ": " + text;
        emulator_switch(&fiber->stack_pointer, launch->scheduler);
    }
    longjmp(to_run, 1);
}

unsigned sm_index() { return self->block_index.x; }

void read_clocks(unsigned long long& cycles, unsigned long long& ns) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    cycles = ns = now.tv_sec * 1000000000ull + now.tv_nsec;
}

}  // namespace emulator
