/* Where the launches of junk.c read and write: rooms of host memory between pages that may not be
 * touched, rooms of device memory between canaries, or allocations that end where a tensor does.
 * Include it after device.h. */
#ifndef ROOMS_H
#define ROOMS_H

#include <stdint.h>
#include <sys/mman.h>

/* The largest page of a Linux kernel: those of aarch64 may have 64 KB. */
enum { PAGE = 1 << 16, ROOM = 2 * PAGE, TENSORS = 10, ARRAY = 64, WORKSPACE = 1 << 20 };
enum { CANARY = 0xc5, PATTERN = 0x5a };

static int on_gpu, exact;

/* `ROOM` bytes with a page on either side that may not be touched. */
static char *guarded(void) {
  char *all = mmap(NULL, ROOM + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(all != MAP_FAILED && !mprotect(all + PAGE, ROOM, PROT_READ | PROT_WRITE), "mmap failed");
  return all + PAGE;
}

/* What launches read and write: device memory on a GPU. */
static char *rooms[TENSORS], *workspace;
static float *numbers; /* ARRAY of them, up to a guard */
static int32_t *integers, host_integers[ARRAY];

/* Device memory with a page of canaries on either side. */
static char *between_canaries(size_t bytes) {
  char *all = device_memory(bytes + 2 * PAGE);
  fill_device(all, CANARY, bytes + 2 * PAGE);
  return all + PAGE;
}

/* Makes the room of a tensor that ends with an allocation of its own. */
static void exact_room(int at, int64_t bytes) {
  static void *blocks[TENSORS];
  if (blocks[at]) free_device(blocks[at]);
  /* The tensor is aligned as in a room. */
  const uintptr_t place = (uintptr_t)((ROOM - bytes) % 256 + bytes);
  blocks[at] = device_memory(place);
  rooms[at] = (char *)((uintptr_t)blocks[at] + place - ROOM);
}

static int holds(const char *memory, size_t bytes, unsigned char value) {
  static unsigned char copy[ROOM];
  const unsigned char *at = (const unsigned char *)memory;
  if (on_gpu) from_device(copy, memory, bytes), at = copy;
  return at[0] == value && !memcmp(at, at + 1, bytes - 1);
}

/* The canaries around all that launches write. */
static void check_canaries(void) {
  if (!on_gpu || exact) return;
  for (int at = 0; at <= TENSORS; at++) {
    const char *begin = at < TENSORS ? rooms[at] : workspace;
    CHECK(holds(begin - PAGE, PAGE, CANARY), "a launch wrote before room %d", at);
    CHECK(holds(begin + (at < TENSORS ? ROOM : WORKSPACE), PAGE, CANARY), "a launch wrote behind room %d", at);
  }
}

/* A packed tensor that ends where its room does. */
static flashtune_tensor tensor(int at, int64_t batch, int64_t seqlen, int64_t heads, int64_t dim, int64_t element) {
  const int64_t bytes = batch * seqlen * heads * dim * element;
  CHECK(bytes <= ROOM, "%ld bytes", (long)bytes);
  if (exact) exact_room(at, bytes);
  flashtune_tensor packed = {rooms[at] + ROOM - bytes, seqlen * heads * dim, heads * dim, dim};
  return packed;
}

/* The outputs hold a pattern before a launch, which a failed launch must leave. */
static void fill(int first, int last) {
  for (int at = first; at <= last && !exact; at++) {
    if (on_gpu) fill_device(rooms[at], PATTERN, ROOM);
    else memset(rooms[at], PATTERN, ROOM);
  }
}

static void make_rooms(void) {
  static float host_numbers[ARRAY];
  if (!on_gpu) {
    static char host_workspace[WORKSPACE];
    for (int at = 0; at < TENSORS; at++) rooms[at] = guarded();
    workspace = host_workspace;
    numbers = (float *)(void *)(guarded() + ROOM) - ARRAY;
    integers = (int32_t *)(void *)(guarded() + ROOM) - ARRAY;
    return;
  }
  CHECK(open_driver() > 0, "no GPU");
  enter_device(0);
  for (int at = 0; at < TENSORS; at++) {
    if (exact) exact_room(at, ROOM);
    else rooms[at] = between_canaries(ROOM);
  }
  workspace = exact ? device_memory(WORKSPACE) : between_canaries(WORKSPACE);
  numbers = device_memory(sizeof host_numbers), integers = device_memory(sizeof host_integers);
  to_device(numbers, host_numbers, sizeof host_numbers);
  to_device(integers, host_integers, sizeof host_integers);
}

#endif
