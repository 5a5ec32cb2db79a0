// Device memory: host pages of their own for each allocation. Pages without access lie on both
// sides, so a far access out of bounds is a fault. The bytes between an allocation's end and the
// page behind hold a pattern, which is checked after each launch. Fresh memory holds NaN.
//
// With FLASHTUNE_EMULATOR_OVERLAPS a kernel that may start before the end of the one before it does
// not see what that one wrote until one of its threads has waited for that. One has to.

#include "engine.h"

#include <map>
#include <mutex>
#include <sys/mman.h>
#include <utility>

namespace emulator {

namespace {

constexpr size_t kPage = 4096, kAlignment = 256;
constexpr unsigned char kSurroundings = 0xa5;

struct Allocation {
    char* mapping;
    size_t mapped, bytes;
};

std::mutex mutex;
std::map<char*, Allocation> allocations;

char* end_of(const Allocation& allocation) { return allocation.mapping + allocation.mapped - kPage; }

// A run of bytes that the last launch changed.
struct Write {
    char* at;
    std::vector<char> before, after;
};
std::vector<std::pair<char*, std::vector<char>>> kept;  // allocations before a launch
std::vector<Write> writes;
bool are_hidden = false, has_waited = false;

void add_writes(char* start, const std::vector<char>& before) {
    constexpr size_t kStep = 64;
    const size_t bytes = before.size();
    for (size_t at = 0; at < bytes;) {
        if (at % kStep == 0 && at + kStep <= bytes && !memcmp(start + at, before.data() + at, kStep)) {
            at += kStep;
        } else if (start[at] == before[at]) {
            ++at;
        } else {
            size_t end = at;
            while (end < bytes && start[end] != before[end]) ++end;
            writes.push_back({start + at, {before.begin() + at, before.begin() + end}, {start + at, start + end}});
            at = end;
        }
    }
}

void show_writes() {
    if (!are_hidden) return;
    for (const Write& write : writes) memcpy(write.at, write.after.data(), write.after.size());
    are_hidden = false;
}

bool is_untouched(char* start, const Allocation& allocation) {
    for (const char* at = allocation.mapping + kPage; at < start; ++at) if ((unsigned char)*at != kSurroundings) return false;
    for (const char* at = start + allocation.bytes; at < end_of(allocation); ++at) if ((unsigned char)*at != kSurroundings) return false;
    return true;
}

}  // namespace

void* allocate(size_t bytes) {
    const size_t inner = (bytes + kPage - 1) / kPage * kPage, mapped = inner + 2 * kPage;
    char* mapping = static_cast<char*>(mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (mapping == MAP_FAILED) return nullptr;
    mprotect(mapping, kPage, PROT_NONE);
    mprotect(mapping + mapped - kPage, kPage, PROT_NONE);
    char* start = mapping + kPage + (inner - bytes) / kAlignment * kAlignment;
    memset(mapping + kPage, kSurroundings, inner);
    memset(start, kPoison, bytes);
    std::lock_guard lock(mutex);
    allocations[start] = {mapping, mapped, bytes};
    return start;
}

bool release(void* memory) {
    std::lock_guard lock(mutex);
    const auto found = allocations.find(static_cast<char*>(memory));
    if (found == allocations.end()) return false;
    const bool ok = is_untouched(found->first, found->second);
    writes.clear();  // some may lie in the allocation
    munmap(found->second.mapping, found->second.mapped);
    allocations.erase(found);
    return ok;
}

void keep_memory() {
    std::lock_guard lock(mutex);
    kept.clear();
    for (const auto& [start, allocation] : allocations) kept.push_back({start, {start, start + allocation.bytes}});
}

bool find_writes() {
    std::lock_guard lock(mutex);
    show_writes();
    writes.clear();
    for (const auto& [start, before] : kept) add_writes(start, before);
    kept.clear();
    return std::exchange(has_waited, false);
}

void hide_writes() {
    std::lock_guard lock(mutex);
    // The host may have written since.
    std::erase_if(writes, [](const Write& write) { return memcmp(write.at, write.after.data(), write.after.size()); });
    for (const Write& write : writes) memcpy(write.at, write.before.data(), write.before.size());
    are_hidden = true;
}

void wait_for_previous_grid() {
    has_waited = true;
    show_writes();
}

const void* overwritten() {
    std::lock_guard lock(mutex);
    for (const auto& [start, allocation] : allocations) {
        if (!is_untouched(start, allocation)) return start;
    }
    return nullptr;
}

}  // namespace emulator
