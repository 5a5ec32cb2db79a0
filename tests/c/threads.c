/* Many threads use one context, each with its own problems. Every result is right, and every thread
 * has its own last error. A thread may have a small stack. */
#include "attention.h"

#include <pthread.h>

enum { THREADS = 8, ROUNDS = 12 };

static flashtune_context *context;

static void *work(void *argument) {
  int thread = (int)(intptr_t)argument;
  for (int round = 0; round < ROUNDS; round++) {
    Shape shape = {1, 2, 1, 17 + round, 20 + thread, 16, 16, round % 3};
    Attention a = make_attention(shape, (uint32_t)(thread * ROUNDS + round));
    char word[64];
    run_and_check(context, &a);
    /* The last error belongs to this thread, whatever the others do meanwhile. */
    a.forward.num_heads_kv = -1 - thread;
    snprintf(word, sizeof word, "num_heads_kv is %d;", -1 - thread);
    FAILS(flashtune_forward(context, &a.forward, NULL, 0, NULL), FLASHTUNE_STATUS_INVALID_ARGUMENT, word);
    CHECK(strstr(flashtune_last_error(), word) != NULL, "%s", flashtune_last_error());
    free_attention(&a);
  }
  return NULL;
}

/* The header's promise. */
enum { STACK_BYTES = 128 << 10 };

static void *launch_and_tune(void *argument) {
  Attention *a = argument;
  flashtune_autotune_params tune;
  memset(&tune, 0, sizeof tune);
  tune.struct_size = sizeof tune;
  tune.forward = &a->forward;
  OK(flashtune_forward(context, &a->forward, NULL, 0, NULL));
  OK(flashtune_autotune(context, &tune));
  return NULL;
}

static void small_stack(void) {
  Shape shape = {1, 2, 1, 33, 65, 16, 16, 0};
  Attention a = make_attention(shape, 1);
  pthread_attr_t attributes;
  pthread_t thread;
  CHECK(pthread_attr_init(&attributes) == 0, "no attributes");
  CHECK(pthread_attr_setstacksize(&attributes, STACK_BYTES) == 0, "no stack");
  CHECK(pthread_create(&thread, &attributes, launch_and_tune, &a) == 0, "no thread");
  CHECK(pthread_join(thread, NULL) == 0, "lost a thread");
  pthread_attr_destroy(&attributes);
  free_attention(&a);
}

int main(void) {
  pthread_t threads[THREADS];
  context = cpu_context("");
  for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, work, (void *)(intptr_t)i) == 0, "no thread");
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0, "lost a thread");
  small_stack();
  OK(flashtune_context_destroy(context));
  return 0;
}
