// Copies that run beside the threads: cp.async, TMA's boxes, bulk copies and additions. All of them
// arrive as late as their waits allow, and the bytes on the way hold NaN.

#include "engine.h"
#include "tensor_map.h"

namespace emulator {

namespace {

constexpr unsigned kRowBytes = 128;

void mark_ordinary(const void* to, unsigned bytes) {
    const unsigned offset = unsigned(static_cast<const char*>(to) - self->shared);
    for (unsigned chunk = offset / 16; chunk <= (offset + bytes - 1) / 16; ++chunk) self->writers[chunk] = self->stamp;
}

void mark_asynchronous(Cta* cta, unsigned offset, unsigned bytes) {
    for (unsigned chunk = offset / 16; chunk <= (offset + bytes - 1) / 16; ++chunk) cta->writers[chunk] = cta->delivered[chunk] = 0;
}

void finish(const SmallCopy& copy) {
    if (copy.valid) memcpy(copy.to, copy.from, copy.bytes); else memset(copy.to, 0, copy.bytes);
}

void finish(std::vector<SmallCopy>& copies, unsigned groups) {
    size_t kept = 0;
    for (const SmallCopy& copy : copies) {
        if (copy.group >= groups) copies[kept++] = copy; else finish(copy);
    }
    copies.resize(kept);
}

// The bytes of cp.async that an arrival covers. Each thread that lets wgmma or TMA read them has
// fenced the asynchronous proxy since they arrived.
void deliver_small_copies(const Load& load) {
    Cta* cta = load.cta;
    ++cta->deliveries;
    for (const SmallCopy& copy : load.small) {
        finish(copy);
        const unsigned chunk = unsigned(copy.to - cta->shared) / 16;
        cta->writers[chunk] = 0, cta->delivered[chunk] = cta->deliveries;
    }
}

// Calls `row(place in the box, address in device memory or null, bytes)` for each row of a box.
template <class Row>
void for_each_row(const TensorMapFields& map, const int* at, const Row& row) {
    const unsigned row_bytes = map.box[0] * 2;
    unsigned rows = 1;
    for (unsigned d = 1; d < map.rank; ++d) rows *= map.box[d];
    for (unsigned r = 0; r < rows; ++r) {
        bool inside = at[0] >= 0 && uint64_t(at[0]) < map.extents[0];
        uint64_t address = map.address + 2 * int64_t(at[0]);
        unsigned rest = r;
        for (unsigned d = 1; d < map.rank; ++d) {
            const int64_t place = int64_t(at[d]) + rest % map.box[d];
            rest /= map.box[d];
            inside = inside && place >= 0 && uint64_t(place) < map.extents[d];
            address += uint64_t(place) * map.strides[d - 1];
        }
        const uint64_t left = inside ? 2 * (map.extents[0] - at[0]) : 0;
        row(r, inside ? reinterpret_cast<char*>(address) : nullptr, unsigned(left < row_bytes ? left : row_bytes));
    }
}

// The place of byte `byte` of a box's row, in the 128-byte swizzle: bits 4 to 6 of an address are
// xored with bits 7 to 9.
unsigned swizzled(unsigned address) { return address ^ (address >> 3 & 0x70); }

void load_box(const Load& load) {
    const TensorMapFields map = fields_of(load.box.map);
    char* shared = load.cta->shared;
    for_each_row(map, load.box.at, [&](unsigned r, const char* from, unsigned bytes) {
        char row[kRowBytes] = {};
        if (from) memcpy(row, from, bytes);
        const unsigned begin = load.offset + kSharedBase + r * kRowBytes;
        for (unsigned chunk = 0; chunk < kRowBytes; chunk += 16) memcpy(shared + swizzled(begin + chunk) - kSharedBase, row + chunk, 16);
    });
}

const TensorMapFields checked_map(const void* map, int rank, unsigned shared, const char* function) {
    const TensorMapFields fields = fields_of(map);
    if (fields.magic != kTensorMapMagic) fail("%s with a tensor map that was not encoded", function);
    if (int(fields.rank) != rank) fail("%s of rank %d with a map of rank %u", function, rank, fields.rank);
    if (fields.box[0] * 2 != kRowBytes) fail("%s of rows of %u bytes: the emulator knows 128", function, fields.box[0] * 2);
    if (shared % 1024) fail("%s at shared address %#x: the swizzle's pattern begins at multiples of 1024", function, shared);
    return fields;
}

void start_load(Cta* cta, Load load) {
    load.cta = cta;
    if (cta->barrier_at[load.barrier / 8] == 0) fail("a copy that counts on the mbarrier at %#x, which is not initialised", load.barrier + kSharedBase);
    memset(cta->shared + load.offset, kPoison, load.box.bytes);
    mark_asynchronous(cta, load.offset, load.box.bytes);
    cta->cluster->loads.push_back(load);
}

// Reads the bytes of a store or an addition from shared memory.
std::vector<char> read_box(const Box& box) {
    std::vector<char> bytes(box.bytes);
    const unsigned offset = unsigned(box.from - self->shared);
    check_fenced(my_cta(), offset, box.bytes, "TMA");
    if (!box.is_tensor) {
        memcpy(bytes.data(), box.from, box.bytes);
        return bytes;
    }
    for (unsigned at = 0; at < box.bytes; at += 16) {
        memcpy(bytes.data() + at, self->shared + swizzled(offset + kSharedBase + at) - kSharedBase, 16);
    }
    return bytes;
}

void write_box(const Box& box, const std::vector<char>& bytes) {
    if (box.is_tensor) {
        for_each_row(fields_of(box.map), box.at, [&](unsigned r, char* to, unsigned row_bytes) {
            if (to) memcpy(to, bytes.data() + r * kRowBytes, row_bytes);
        });
    } else {
        for (unsigned at = 0; at < box.bytes; at += 4) {
            float sum, term;
            memcpy(&sum, box.to + at, 4), memcpy(&term, bytes.data() + at, 4);
            sum += term;
            memcpy(box.to + at, &sum, 4);
        }
    }
}

StoreGroup& open_group() {
    auto& stores = me()->stores;
    if (stores.empty()) stores.emplace_back();
    return stores.back();
}

void read_group(StoreGroup& group) {
    while (group.read.size() < group.boxes.size()) group.read.push_back(read_box(group.boxes[group.read.size()]));
}

void write_group(const StoreGroup& group) {
    for (size_t i = 0; i < group.boxes.size(); ++i) write_box(group.boxes[i], group.read[i]);
}

void check_bulk(const void* device, unsigned shared, unsigned bytes, const char* function) {
    if (uint64_t(device) % 16 || shared % 16 || bytes % 16 || bytes == 0) {
        fail("%s of %u bytes between %p and shared address %#x: all are multiples of 16", function, bytes, device, shared);
    }
}

}  // namespace

void check_fenced(Cta* cta, unsigned offset, unsigned bytes, const char* reader) {
    for (unsigned chunk = offset / 16; chunk <= (offset + bytes - 1) / 16; ++chunk) {
        if (cta->delivered[chunk] > me()->fenced_deliveries) {
            fail("%s reads shared address %#x, which a cp.async has written, and this thread has not fenced the asynchronous proxy since",
                 reader, chunk * 16 + kSharedBase);
        }
        const unsigned stamp = cta->writers[chunk];
        if (stamp != 0 && cta->fibers[stamp & 1023].stamp == stamp) {
            fail("%s reads shared address %#x, which thread %u has written without a fence of the asynchronous proxy since", reader,
                 chunk * 16 + kSharedBase, stamp & 1023);
        }
    }
}

void cp_async(unsigned target, const void* source, unsigned bytes, bool valid) {
    Fiber* fiber = me();
    char* to = shared_place(target, bytes);
    if (valid && uint64_t(source) % bytes) fail("a cp.async of %u bytes from %p, which is not aligned", bytes, source);
    memset(to, kPoison, bytes);
    mark_ordinary(to, bytes);
    fiber->copies.push_back({to, source, bytes, fiber->copy_groups, valid});
}
void cp_async_commit() { ++me()->copy_groups; }
void cp_async_wait(unsigned pending) {
    Fiber* fiber = me();
    if (fiber->copy_groups > pending) finish(fiber->copies, fiber->copy_groups - pending);
}

void cp_async_arrive(unsigned barrier) {
    Load load = {};
    load.cta = owner_of(barrier, 8, &load.barrier);
    load.arrives = true;
    load.small.swap(me()->copies);
    load.cta->cluster->loads.push_back(std::move(load));
}

void fence_async_proxy() {
    self->stamp += 1 << 10;
    me()->fenced_deliveries = my_cta()->deliveries;
}

void tma_load(unsigned to, const void* map, unsigned barrier, int rank, const int* at, unsigned ctas) {
    const TensorMapFields fields = checked_map(map, rank, to, "a TMA load");
    Load load = {};
    load.box.is_tensor = true;
    memcpy(load.box.map, map, sizeof load.box.map), memcpy(load.box.at, at, sizeof(int) * rank);
    load.box.bytes = kRowBytes;
    for (int d = 1; d < rank; ++d) load.box.bytes *= fields.box[d];
    Cta* own = owner_of(to, load.box.bytes, &load.offset);
    owner_of(barrier, 8, &load.barrier);
    if (ctas == 0) return start_load(own, load);
    for (Cta& cta : own->cluster->ctas) {
        if (ctas >> cta.rank & 1) start_load(&cta, load);
    }
}

void bulk_load(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
    check_bulk(from, to, bytes, "a bulk load");
    Load load = {};
    load.box.from = static_cast<const char*>(from), load.box.bytes = bytes;
    Cta* cta = owner_of(to, bytes, &load.offset);
    owner_of(barrier, 8, &load.barrier);
    start_load(cta, load);
}

void bulk_copy_in(unsigned there, unsigned from, unsigned bytes, unsigned barrier) {
    check_bulk(nullptr, there | from, bytes, "a bulk copy");
    Load load = {};
    unsigned from_offset;
    Cta* own = owner_of(from, bytes, &from_offset);
    check_fenced(own, from_offset, bytes, "a bulk copy");
    load.box.from = own->shared + from_offset, load.box.bytes = bytes;
    Cta* cta = owner_of(there, bytes, &load.offset);
    if (owner_of(barrier, 8, &load.barrier) != cta) fail("a bulk copy to one CTA that counts on another CTA's mbarrier");
    start_load(cta, load);
}

bool deliver_a_load() {
    size_t count = 0;
    for (const auto& cluster : launch->resident) count += cluster ? cluster->loads.size() : 0;
    if (count == 0) return false;
    size_t pick = launch->random() % count;
    for (const auto& cluster : launch->resident) {
        if (!cluster) continue;
        if (pick >= cluster->loads.size()) {
            pick -= cluster->loads.size();
            continue;
        }
        const Load load = cluster->loads[pick];
        cluster->loads[pick] = cluster->loads.back();
        cluster->loads.pop_back();
        if (load.arrives) {
            deliver_small_copies(load);
            complete_arrival(load.cta, load.barrier);
            break;
        }
        if (load.box.is_tensor) load_box(load); else memcpy(load.cta->shared + load.offset, load.box.from, load.box.bytes);
        complete_bytes(load.cta, load.barrier, load.box.bytes);
        break;
    }
    return true;
}

void tma_store(const void* map, unsigned from, int rank, const int* at) {
    const TensorMapFields fields = checked_map(map, rank, from, "a TMA store");
    Box box = {};
    box.is_tensor = true;
    memcpy(box.map, map, sizeof box.map), memcpy(box.at, at, sizeof(int) * rank);
    box.bytes = kRowBytes;
    for (int d = 1; d < rank; ++d) box.bytes *= fields.box[d];
    unsigned offset;
    box.from = owner_of(from, box.bytes, &offset)->shared + offset;
    check_fenced(my_cta(), offset, box.bytes, "TMA");
    open_group().boxes.push_back(box);
}

void bulk_add(float* to, unsigned from, unsigned bytes) {
    check_bulk(to, from, bytes, "a bulk addition");
    Box box = {};
    box.adds = true, box.to = reinterpret_cast<char*>(to), box.bytes = bytes;
    unsigned offset;
    box.from = owner_of(from, bytes, &offset)->shared + offset;
    check_fenced(my_cta(), offset, bytes, "TMA");
    open_group().boxes.push_back(box);
}

void bulk_commit() { me()->stores.emplace_back(); }

void bulk_wait_read() {
    auto& stores = me()->stores;
    for (size_t i = 0; i + 1 < stores.size(); ++i) read_group(stores[i]);
}

void bulk_wait() {
    bulk_wait_read();
    auto& stores = me()->stores;
    for (size_t i = 0; i + 1 < stores.size(); ++i) write_group(stores[i]);
    if (!stores.empty()) stores.erase(stores.begin(), stores.end() - 1);
}

void store_ints_in(unsigned there, int a, int b, int c, int d) {
    if (there % 16) fail("a store of 16 bytes at shared address %#x, which is not aligned", there);
    unsigned offset;
    Cta* cta = owner_of(there, 16, &offset);
    const int words[4] = {a, b, c, d};
    memcpy(cta->shared + offset, words, 16);
    cta->writers[offset / 16] = self->stamp;
}

void check_at_exit(Fiber* fiber) {
    for (const StoreGroup& group : fiber->stores) {
        if (group.read.size() < group.boxes.size()) fail("the thread exits before TMA has read what it stores from shared memory");
    }
    if (!fiber->uses.empty()) fail("the thread exits while products are in flight");
}

void finish_copies(Fiber* fiber) {
    for (const StoreGroup& group : fiber->stores) write_group(group);
    fiber->stores.clear();
}

}  // namespace emulator
