// Device memory: host pages of their own for each allocation. Pages without access lie on both
// sides, so a far access out of bounds is a fault. The bytes between an allocation's end and the
// page behind hold a pattern, which is checked after each launch. Fresh memory holds NaN.

#include "engine.h"

#include <map>
#include <mutex>
#include <sys/mman.h>

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
    munmap(found->second.mapping, found->second.mapped);
    allocations.erase(found);
    return ok;
}

const void* overwritten() {
    std::lock_guard lock(mutex);
    for (const auto& [start, allocation] : allocations) {
        if (!is_untouched(start, allocation)) return start;
    }
    return nullptr;
}

}  // namespace emulator
