// Barriers: of named threads, of the CTA, of the cluster, and mbarriers with their phases. A
// counter in device memory is waited for here too.

#include "engine.h"

#include <cstdio>

namespace emulator {

namespace {

void wake_all(std::vector<Fiber*>& waiters) {
    for (Fiber* fiber : waiters) wake(fiber);
    waiters.clear();
}

Mbarrier& barrier_of(Cta* cta, unsigned offset, unsigned address) {
    const uint16_t index = address % 8 ? 0 : cta->barrier_at[offset / 8];
    if (index == 0) fail("the mbarrier at %#x is not initialised", address);
    Mbarrier& barrier = cta->barriers[index - 1];
    uint64_t held;
    memcpy(&held, cta->shared + offset, 8);
    if (held != 0x6d62617272696572ull) fail("the mbarrier at %#x has been overwritten", address);
    return barrier;
}

bool is_over(const Mbarrier& barrier, unsigned parity) { return (barrier.phase & 1) != parity; }

void end_phase_if_complete(Mbarrier& barrier) {
    if (barrier.pending != 0 || barrier.bytes != 0) return;
    ++barrier.phase;
    barrier.pending = barrier.arrivals;
    std::vector<Fiber*> still;
    for (Fiber* fiber : barrier.waiters) {
        if (is_over(barrier, fiber->wait_for)) wake(fiber); else still.push_back(fiber);
    }
    barrier.waiters.swap(still);
}

void arrive(unsigned address, unsigned bytes) {
    unsigned offset;
    Cta* cta = owner_of(address, 8, &offset);
    Mbarrier& barrier = barrier_of(cta, offset, address);
    barrier.bytes += bytes;
    --barrier.pending;
    end_phase_if_complete(barrier);
}

// The barrier with this id, which this thread is about to reach.
NamedBarrier& named_barrier_of(int id, unsigned threads) {
    if (id < 0 || id > 15) fail("named barrier %d", id);
    Cta* cta = my_cta();
    if (threads % 32 || threads == 0 || threads > cta->fibers.size()) fail("named barrier %d of %u threads", id, threads);
    NamedBarrier& barrier = cta->named[id];
    if (barrier.waiters.empty() && barrier.arrived == 0) barrier.threads = threads;
    else if (barrier.threads != threads) fail("named barrier %d of %u threads, where others wait for %u", id, threads, barrier.threads);
    if (id == 0 && !cta->at_sync.empty()) fail("named barrier 0, while other threads are at __syncthreads");
    return barrier;
}

// Whether only this thread is missing.
bool is_last(const NamedBarrier& barrier) { return barrier.waiters.size() + barrier.arrived + 1 == barrier.threads; }

void open_barrier(NamedBarrier& barrier) {
    barrier.arrived = 0, barrier.result = barrier.votes, barrier.votes = true;
    wake_all(barrier.waiters);
}

}  // namespace

Cta* owner_of(unsigned address, unsigned bytes, unsigned* offset) {
    Cta* cta = my_cta();
    if (address >> kRankShift) {
        const unsigned rank = (address >> kRankShift) - 1;
        if (rank >= cta->cluster->ctas.size()) fail_shared(address, bytes);
        cta = &cta->cluster->ctas[rank];
        address &= (1u << kRankShift) - 1;
        if (cta->live == 0) fail("an access to CTA %u of the cluster, which has ended", rank);
    }
    *offset = address - kSharedBase;
    if (*offset >= self->shared_bytes || self->shared_bytes - *offset < bytes) fail_shared(address, bytes);
    return cta;
}

void fail_shared(unsigned address, unsigned bytes) {
    const unsigned own = address & ((1u << kRankShift) - 1);
    if (own >= kSharedBase && own - kSharedBase + bytes <= self->shared_bytes) {
        fail("an access of %u bytes at shared address %#x, which is not aligned", bytes, address);
    }
    fail("an access of %u bytes at shared address %#x, outside of the launch's %u bytes from %#x on", bytes, address,
         self->shared_bytes, kSharedBase);
}

void barrier_init(unsigned address, int arrivals) {
    unsigned offset;
    Cta* cta = owner_of(address, 8, &offset);
    if (address % 8) fail("an mbarrier at %#x, which is not aligned to 8 bytes", address);
    if (arrivals < 1) fail("an mbarrier at %#x for %d arrivals", address, arrivals);
    Mbarrier barrier = {};
    barrier.address = address, barrier.arrivals = barrier.pending = arrivals;
    uint16_t& index = cta->barrier_at[offset / 8];
    if (index == 0) cta->barriers.push_back(barrier), index = uint16_t(cta->barriers.size());
    else if (!cta->barriers[index - 1].waiters.empty()) fail("the mbarrier at %#x is initialised while threads wait", address);
    else cta->barriers[index - 1] = barrier;
    const uint64_t held = 0x6d62617272696572ull;
    memcpy(cta->shared + offset, &held, 8);
}

void barrier_arrive(unsigned address) { arrive(address, 0); }
void barrier_expect(unsigned address, unsigned bytes) { arrive(address, bytes); }

void barrier_wait(unsigned address, unsigned parity) {
    unsigned offset;
    Cta* cta = owner_of(address, 8, &offset);
    if (parity > 1) fail("a wait for parity %u of the mbarrier at %#x", parity, address);
    // A thread that runs late finds a later phase, as on a GPU, and waits on.
    while (!is_over(barrier_of(cta, offset, address), parity)) {
        barrier_of(cta, offset, address).waiters.push_back(me());
        block(Wait::kBarrier, address, parity);
    }
}

bool barrier_test_wait(unsigned address, unsigned parity) {
    unsigned offset;
    Cta* cta = owner_of(address, 8, &offset);
    const Mbarrier& barrier = barrier_of(cta, offset, address);
    if (parity > 1) fail("a test for parity %u of the mbarrier at %#x", parity, address);
    return is_over(barrier, parity);
}

void complete_bytes(Cta* cta, unsigned offset, unsigned bytes) {
    Mbarrier& barrier = barrier_of(cta, offset, offset + kSharedBase);
    barrier.bytes -= bytes;
    end_phase_if_complete(barrier);
}

void complete_arrival(Cta* cta, unsigned offset) {
    Mbarrier& barrier = barrier_of(cta, offset, offset + kSharedBase);
    --barrier.pending;
    end_phase_if_complete(barrier);
}

std::string describe_barrier(Cta* cta, unsigned address) {
    const Mbarrier& barrier = cta->barriers[cta->barrier_at[(address - kSharedBase) / 8] - 1];
    char text[160];
    snprintf(text, sizeof text, "mbarrier %#x (phase %u, %d of %d arrivals and %lld bytes missing)", address, barrier.phase,
             barrier.pending, barrier.arrivals, static_cast<long long>(barrier.bytes));
    return text;
}

void named_barrier_arrive(int id, unsigned threads) {
    NamedBarrier& barrier = named_barrier_of(id, threads);
    if (is_last(barrier)) open_barrier(barrier);
    else ++barrier.arrived;
}

void named_barrier(int id, unsigned threads) { named_barrier_all(id, threads, true); }

bool named_barrier_all(int id, unsigned threads, bool vote) {
    NamedBarrier& barrier = named_barrier_of(id, threads);
    barrier.votes &= vote;
    if (is_last(barrier)) {
        open_barrier(barrier);
    } else {
        barrier.waiters.push_back(me());
        block(Wait::kNamed, id, threads);
    }
    return barrier.result;
}

void complete_sync(Cta* cta) {
    if (!cta->at_sync.empty() && cta->at_sync.size() == cta->live) {
        cta->or_result = cta->or_vote, cta->or_vote = false;
        wake_all(cta->at_sync);
    }
    Cluster* cluster = cta->cluster;
    if (!cluster->at_sync.empty() && cluster->at_sync.size() == cluster->live) wake_all(cluster->at_sync);
}

bool sync_threads_or(bool vote) {
    Cta* cta = my_cta();
    cta->or_vote |= vote;
    if (cta->at_sync.size() + 1 == cta->live) {
        cta->or_result = cta->or_vote, cta->or_vote = false;
        wake_all(cta->at_sync);
    } else {
        cta->at_sync.push_back(me());
        block(Wait::kAllThreads, 0, 0);
    }
    return cta->or_result;
}

void sync_threads() { sync_threads_or(false); }

void cluster_sync() {
    Cluster* cluster = my_cta()->cluster;
    if (cluster->at_sync.size() + 1 == cluster->live) {
        wake_all(cluster->at_sync);
    } else {
        cluster->at_sync.push_back(me());
        block(Wait::kCluster, 0, 0);
    }
}

unsigned load_acquire(const unsigned* from) {
    Fiber* fiber = me();
    unsigned value = __atomic_load_n(from, __ATOMIC_SEQ_CST);
    if (fiber->counter == from && fiber->counter_value == value) {
        launch->at_counters.push_back(fiber);
        block(Wait::kCounter, 0, value);
        value = __atomic_load_n(from, __ATOMIC_SEQ_CST);
    }
    fiber->counter = from, fiber->counter_value = value;
    return value;
}

bool wake_at_counters() {
    bool woken = false;
    std::vector<Fiber*> still;
    for (Fiber* fiber : launch->at_counters) {
        if (__atomic_load_n(fiber->counter, __ATOMIC_SEQ_CST) != fiber->counter_value) wake(fiber), woken = true;
        else still.push_back(fiber);
    }
    launch->at_counters.swap(still);
    return woken;
}

}  // namespace emulator
