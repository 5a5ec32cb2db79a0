/* Numbers in bf16. */
#ifndef BF16_H
#define BF16_H
#include <stdint.h>
#include <string.h>

/* bf16 is the upper half of fp32. */
static uint16_t narrow(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (uint16_t)(bits >> 16);
}
static float wide(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, sizeof y);
  return y;
}

#endif
