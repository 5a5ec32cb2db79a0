/* Checks for the C test programs. A failed check prints its place and reason, and ends the program
 * with 1. */
#ifndef CHECK_H
#define CHECK_H

#define _POSIX_C_SOURCE 200809L

#include <flashtune.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition, ...)                                                        \
  do {                                                                               \
    if (!(condition)) {                                                              \
      fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                \
      fprintf(stderr, __VA_ARGS__);                                                  \
      fprintf(stderr, "\n");                                                         \
      exit(1);                                                                       \
    }                                                                                \
  } while (0)

/* A flashtune call that must succeed. */
#define OK(call)                                                                     \
  do {                                                                               \
    int32_t status_ = (call);                                                        \
    CHECK(status_ == FLASHTUNE_STATUS_OK, "%s: %s", flashtune_status_string(status_), \
          flashtune_last_error());                                                   \
    CHECK(flashtune_last_error()[0] == 0, "success left: %s", flashtune_last_error()); \
  } while (0)

/* A flashtune call that must fail with `expected` and name `word` in its message. */
#define FAILS(call, expected, word)                                                  \
  do {                                                                               \
    int32_t status_ = (call);                                                        \
    CHECK(status_ == (expected), "%s instead of %s for '%s': %s", flashtune_status_string(status_), \
          flashtune_status_string(expected), (word), flashtune_last_error());        \
    CHECK(strstr(flashtune_last_error(), (word)) != NULL, "no '%s' in: %s", (word),  \
          flashtune_last_error());                                                   \
  } while (0)

/* What one call writes and another reads, and the reverse, which only tests of overlaps need. */
#define WRITABLE(pointer) ((void *)(uintptr_t)(pointer))

static inline flashtune_const_tensor read_of(flashtune_tensor t) {
  flashtune_const_tensor tensor = {t.data, t.stride_batch, t.stride_seqlen, t.stride_head};
  return tensor;
}

static inline flashtune_tensor written_of(flashtune_const_tensor t) {
  flashtune_tensor tensor = {WRITABLE(t.data), t.stride_batch, t.stride_seqlen, t.stride_head};
  return tensor;
}

#endif
