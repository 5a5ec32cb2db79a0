/* Macros for wrong arguments. The program has `context`, and `good`, whose every field is valid. A
 * program of a small operation defines OPERATION as its function's name; others test the forward
 * pass. */
#ifndef REFUSED_H
#define REFUSED_H

#include "check.h"

#ifdef OPERATION
#define JOINED_(a, b) a##b
#define JOINED(a, b) JOINED_(a, b)
#define PARAMS JOINED(OPERATION, _params)
#define BEFORE_LAUNCH(p) JOINED(OPERATION, _prepare)(context, p)
#define LAUNCH(p) OPERATION(context, p, NULL)
#else
#define PARAMS flashtune_forward_params
#define BEFORE_LAUNCH(p) flashtune_forward_supported(context, p)
#define LAUNCH(p) flashtune_forward(context, p, NULL, 0, NULL)
#endif

static const int32_t invalid = FLASHTUNE_STATUS_INVALID_ARGUMENT;

/* Arguments that every function refuses. */
#define REFUSED(word, mutation)             \
  do {                                      \
    PARAMS p = good;                        \
    mutation;                               \
    FAILS(BEFORE_LAUNCH(&p), invalid, word); \
    REFUSED_BY_PREPARE(word);               \
    FAILS(LAUNCH(&p), invalid, word);       \
  } while (0)
#ifdef OPERATION
#define REFUSED_BY_PREPARE(word) (void)0
#else
#define REFUSED_BY_PREPARE(word) FAILS(flashtune_forward_prepare(context, &p), invalid, word)
#endif

/* Arguments that only a launch needs. */
#define NEEDS(word, mutation)         \
  do {                                \
    PARAMS p = good;                  \
    mutation;                         \
    OK(BEFORE_LAUNCH(&p));            \
    FAILS(LAUNCH(&p), invalid, word); \
  } while (0)

#endif
