/* Many threads use one context, each with its own problems. Every result is right, and every thread
 * has its own last error. */
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

int main(void) {
  pthread_t threads[THREADS];
  context = cpu_context("");
  for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, work, (void *)(intptr_t)i) == 0, "no thread");
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0, "lost a thread");
  OK(flashtune_context_destroy(context));
  return 0;
}
