// Norms and rotations of vectors, a line at a time. Knows no mlx.
#pragma once

#include "vectors.h"

// `weight` may be null.
inline void rms_norm(const float* x, const float* weight, float eps, long count, float* y) {
  const float factor = 1.0f / std::sqrt(sum_of_squares(x, count) / count + eps);
  if (weight) {
    for (long i = 0; i < count; i++) y[i] = x[i] * factor * weight[i];
  } else {
    for (long i = 0; i < count; i++) y[i] = x[i] * factor;
  }
}

// Turns the first 2 * half numbers of x by half angles: pairs are (i, half + i).
inline void rotate(const float* x, const float* cos, const float* sin, long half, long count, float* y) {
  for (long i = 0; i < half; i++) {
    const float a = x[i], b = x[half + i];
    y[i] = a * cos[i] - b * sin[i];
    y[half + i] = a * sin[i] + b * cos[i];
  }
  std::copy(x + 2 * half, x + count, y + 2 * half);
}
