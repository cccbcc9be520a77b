// Vectors of the CPU at hand, and what is done with many floats. Knows no mlx.
#pragma once

#include <algorithm>
#include <bit>
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

inline float largest(const float* x, long count) {
  float found[LANES];
  std::fill(found, found + LANES, x[0]);
  long i = 0;
  for (; i + LANES <= count; i += LANES) {
    for (int lane = 0; lane < LANES; lane++) found[lane] = std::max(x[i + lane], found[lane]);
  }
  for (; i < count; i++) found[0] = std::max(x[i], found[0]);
  return *std::max_element(found, found + LANES);
}

// exp(x) of what is not above zero, as activations.py has it; zero below 2^-126. What is no number stays none.
inline Vector exp_nonpositive(Vector x) {
  constexpr float LOG2_E = 1.4426950408889634f, ROUNDER = 12582912.0f;  // 1.5 * 2^23
  const Vector power = x * LOG2_E, least = Vector{} - 127.0f;
  const Vector held = power < least ? least : power;
  const Vector whole = (held + ROUNDER) - ROUNDER, f = held - whole, f2 = f * f;
  const Vector scale = std::bit_cast<Vector>((__builtin_convertvector(whole, Lanes) + 127) << 23);
  const Vector high = (0.009618489071726799f + 0.0013399930903688073f * f) + 0.00015345810970757157f * f2;
  const Vector middle = (0.24022646248340607f + 0.05550328642129898f * f) + high * f2;
  return ((1.0f + 0.6931471824645996f * f) + middle * f2) * scale;
}

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
