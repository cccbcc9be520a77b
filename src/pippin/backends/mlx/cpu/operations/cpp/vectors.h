// Vectors of the CPU at hand, and what is done with many floats. Knows no mlx.
#pragma once

#include <algorithm>
#include <cmath>

#include "scratch.h"

#if defined(__AVX512F__)
constexpr int BYTES = 64, WIDE = 4;
#elif defined(__AVX__)
constexpr int BYTES = 32, WIDE = 4;  // 16 registers
#else
constexpr int BYTES = 16, WIDE = 8;  // NEON has 32
#endif
constexpr int LANES = BYTES / sizeof(float), STRIP = WIDE * LANES;

typedef float Vector __attribute__((vector_size(BYTES)));
typedef float Unaligned __attribute__((vector_size(BYTES), aligned(4), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void store(float* to, Vector x) { *reinterpret_cast<Unaligned*>(to) = x; }

typedef int Lanes __attribute__((vector_size(BYTES)));
typedef unsigned Words __attribute__((vector_size(BYTES)));

// The halves are added to each other until one lane is left.
template <int HALF = LANES / 2>
inline float sum_lanes(Vector x) {
  if constexpr (HALF == 0) {
    return x[0];
  } else {
    Lanes other;
    for (int lane = 0; lane < LANES; lane++) other[lane] = (lane + HALF) % LANES;
    return sum_lanes<HALF / 2>(x + __builtin_shuffle(x, other));
  }
}

// Of as many vectors as there are lanes, each one's sum in its lane; as sum_lanes adds them. Overwrites them.
template <int HALF = LANES / 2>
inline Vector sum_each(Vector* x) {
  if constexpr (HALF == 0) {
    return x[0];
  } else {
    Lanes low;
    for (int lane = 0; lane < LANES; lane++) low[lane] = lane % (2 * HALF) < HALF ? lane : LANES + lane - HALF;
    for (int i = 0; i < HALF; i++) {
      x[i] = __builtin_shuffle(x[i], x[i + HALF], low) + __builtin_shuffle(x[i], x[i + HALF], low + HALF);
    }
    return sum_each<HALF / 2>(x);
  }
}

// The sum of products of one and another; two sums, as one would wait for itself.
inline float dot(const float* x, const float* y, long count) {
  Vector sums[2] = {};
  long i = 0;
  for (; i + 2 * LANES <= count; i += 2 * LANES) {
    sums[0] += load(x + i) * load(y + i);
    sums[1] += load(x + i + LANES) * load(y + i + LANES);
  }
  float total = sum_lanes(sums[0] + sums[1]);
  for (; i < count; i++) total += x[i] * y[i];
  return total;
}

inline float sum_of_squares(const float* x, long count) { return dot(x, x, count); }

// 1 / (1 + exp(-x)) to 1e-7: (1 + tanh(x / 2)) / 2, tanh as Eigen's quotient of polynomials. Without a
// call or a branch, so that a loop over it takes vectors. What is not a number stays none.
inline float sigmoid(float x) {
  constexpr float LIMIT = 15.81f;
  x = std::max(std::min(x, LIMIT), -LIMIT);
  const float h = 0.5f * x, h2 = h * h;
  float odd = -2.76076847742355e-16f;
  odd = odd * h2 + 2.00018790482477e-13f;
  odd = odd * h2 - 8.60467152213735e-11f;
  odd = odd * h2 + 5.12229709037114e-08f;
  odd = odd * h2 + 1.48572235717979e-05f;
  odd = odd * h2 + 6.37261928875436e-04f;
  odd = odd * h2 + 4.89352455891786e-03f;
  float even = 1.19825839466702e-06f;
  even = even * h2 + 1.18534705686654e-04f;
  even = even * h2 + 2.26843463243900e-03f;
  even = even * h2 + 4.89352518554385e-03f;
  return 0.5f + 0.5f * h * odd / even;
}

inline float softplus(float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x))); }
