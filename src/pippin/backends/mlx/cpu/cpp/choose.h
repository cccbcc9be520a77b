// How a row of logits becomes a token: the stages from the temperature on, as backends/sampling/rules.py has them,
// with the noise of backends/sampling/noise.py. Knows no mlx.
//
// Noise is made for the few tokens alone that can still be drawn.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>

#include "vectors.h"

constexpr float MASS_UNITS = 0x1p40f;  // of the likeliest token's mass
constexpr float MOST_NOISE = 22.5f;    // -log(2^-32), and room for rounding
constexpr float NEARLY_ONE = 1e-6f;    // a top_p closer to 1 leaves no room for the rounding of its share

struct Choice {
  float scale;  // 1 / temperature; 0: the largest logit is taken
  long top_k;   // 0: off
  float top_p;  // infinite: off
  float min_p;  // 0: off
  uint32_t key[2];
};

// The first of the largest, where all are numbers.
inline long largest_at(const float* x, long count) {
  return std::min<long>(std::find(x, x + count, largest(x, count)) - x, count - 1);
}

// ---- noise -------------------------------------------------------------------------------------------

// Threefry-2x32 of 20 rounds.
inline void threefry(const uint32_t* key, Words& x0, Words& x1) {
  constexpr int ROTATIONS[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t schedule[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA};
  x0 += schedule[0];
  x1 += schedule[1];
  for (uint32_t four = 0; four < 5; four++) {
    for (const int by : ROTATIONS[four % 2]) {
      x0 += x1;
      x1 = (x1 << by) | (x1 >> (32 - by));
      x1 ^= x0;
    }
    x0 += schedule[(four + 1) % 3];
    x1 += schedule[(four + 2) % 3] + four + 1;
  }
}

// Of normal positive numbers, to a unit in the last place: a polynomial of cephes' logf.
inline Vector log_of(Vector x) {
  constexpr uint32_t ROOT_HALF = 0x3f3504f3, MANTISSA = 0x007fffff;
  const Words above = std::bit_cast<Words>(x) - ROOT_HALF;
  const Vector power = __builtin_convertvector(std::bit_cast<Lanes>(above) >> 23, Vector);
  const Vector f = std::bit_cast<Vector>((above & MANTISSA) + ROOT_HALF) - 1.0f;  // in [-0.3, 0.42]
  Vector p = 7.0376836292e-2f * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const Vector f2 = f * f;
  const Vector tail = p * f * f2 + power * -2.12194440e-4f - 0.5f * f2;
  return f + tail + power * 0.693359375f;
}

// The noise of tokens [LANES] among `count`.
inline Vector noise_of(const uint32_t* key, Words tokens, uint32_t count) {
  const uint32_t half = (count + 1) / 2;
  const Words in_first = Words(tokens < half);  // all bits, or none
  Words x0 = tokens - (~in_first & half), x1 = x0 + half;
  threefry(key, x0, x1);
  const Words bits = (x0 & in_first) | (x1 & ~in_first);
  const Vector coarse = 2.0f - std::bit_cast<Vector>((bits >> 9) | 0x3f800000);
  const Vector fine = __builtin_convertvector(512 - (bits & 511), Vector) * 0x1p-32f;
  return -log_of(fine - log_of(coarse));
}

// ---- masses ------------------------------------------------------------------------------------------

inline float mass_of(float x) { return exp_nonpositive(Vector{} + x)[0]; }

inline int64_t units(float mass) { return int64_t(mass * MASS_UNITS); }

// The units above a token that leave it out, where all that count have `total`.
inline int64_t needed_of(int64_t total, float top_p) {
  return std::max<int64_t>(int64_t(std::ceil(float(total) * std::min(top_p, 2.0f))), 1);
}

// The least mass of [from, to) such that what is above it has less than `needed` units. Changes their order.
inline float least_kept(float* from, float* to, int64_t needed) {
  for (;;) {
    const float pivot = from[(to - from) / 2];
    float* tied = std::partition(from, to, [=](float mass) { return mass > pivot; });
    float* below = std::partition(tied, to, [=](float mass) { return mass == pivot; });
    int64_t above = 0;
    for (float* i = from; i < tied; i++) above += units(*i);
    if (above >= needed) {
      to = tied;
      continue;
    }
    needed -= above + (below - tied) * units(pivot);
    if (needed <= 0 || below == to || below == from) return pivot;
    from = below;
  }
}

// ---- a row -------------------------------------------------------------------------------------------

// Where one row after the other is worked on.
struct RowScratch {
  explicit RowScratch(long count)
      : scaled(count + LANES), masses(count + LANES), some(count), tokens(count + LANES) {}

  Scratch scaled, masses, some;
  Scratch tokens;  // as uint32_t
};

// Tokens that have less than `least` of these are left out.
struct Filter {
  const float* of;
  float least;
};

// To `some`: the numbers that are no less than `least`. Without branches, half of which would be mispredicted.
inline long gather(const float* x, long count, float least, float* some) {
  long found = 0;
  for (long i = 0; i < count; i++) {
    some[found] = x[i];
    found += x[i] >= least;
  }
  return found;
}

// The k largest lie in the k blocks with the largest maxima, so none of them is less than the least of these.
inline float top_k_at_least(const float* x, long count, long k, float* maxima) {
  constexpr long SIDE = 64;
  if (count / SIDE < k) return -std::numeric_limits<float>::infinity();
  long blocks = 0;
  for (long start = 0; start + SIDE <= count; start += SIDE) {
    float top = x[start];
    for (long i = 0; i < SIDE; i++) top = std::max(top, x[start + i]);
    maxima[blocks++] = top;
  }
  std::nth_element(maxima, maxima + k - 1, maxima + blocks, std::greater<float>());
  return maxima[k - 1];
}

// Of tokens that tie for the last place, as many count for the mass as belong to the k.
inline Filter keep_top_k(const Choice& choice, const float* x, long count, float top, RowScratch& room) {
  float* some = room.some.get();
  const float at_least = top_k_at_least(x, count, choice.top_k, some);
  const long found = gather(x, count, at_least, some);
  std::nth_element(some, some + choice.top_k - 1, some + found, std::greater<float>());
  std::sort(some, some + choice.top_k, std::greater<float>());
  int64_t total = 0, above = 0;
  for (long i = 0; i < choice.top_k; i++) total += units(mass_of(some[i] - top));
  const int64_t needed = needed_of(total, choice.top_p);
  float least = some[0];
  for (long i = 0; i < choice.top_k && above < needed; i++) {
    least = some[i];
    above += units(mass_of(least - top));
  }
  return {x, std::max(least, top + std::log(choice.min_p))};
}

// Tokens of less than (1 - top_p) / 2 count of the likeliest one's mass weigh too little, all together, for one
// of them to be kept.
inline Filter keep_top_p(const Choice& choice, const float* x, long count, float top, RowScratch& room) {
  float *masses = room.masses.get(), *some = room.some.get();
  for (long i = 0; i < count; i += LANES) store(masses + i, exp_nonpositive(load(x + i) - top));
  int64_t total = 0;
  for (long i = 0; i < count; i++) total += units(masses[i]);
  const float light = std::max((1.0f - choice.top_p) / 2 - NEARLY_ONE, 0.0f) / float(count);
  const long found = gather(masses, count, light, some);
  const float least = found ? least_kept(some, some + found, needed_of(total, choice.top_p)) : 0.0f;
  return {masses, std::max(least, choice.min_p)};
}

inline Filter filter_of(const Choice& choice, const float* x, long count, float top, RowScratch& room) {
  if (choice.top_k) return keep_top_k(choice, x, count, top, room);
  if (choice.top_p < 1) return keep_top_p(choice, x, count, top, room);
  return {x, top + std::log(choice.min_p)};
}

inline long choose(const Choice& choice, const float* logits, long count) {
  if (!choice.scale) return largest_at(logits, count);
  RowScratch room(count);
  float* x = room.scaled.get();
  bool numbers = true;
  for (long i = 0; i < count; i++) {
    x[i] = logits[i] * choice.scale;
    numbers &= x[i] == x[i];
  }
  const long likeliest = largest_at(x, count);
  if (!numbers) return likeliest;
  const Filter filter = filter_of(choice, x, count, x[likeliest], room);
  const float beaten =
      x[likeliest] + noise_of(choice.key, Words{} + uint32_t(likeliest), count)[0] - MOST_NOISE;
  uint32_t* tokens = reinterpret_cast<uint32_t*>(room.tokens.get());
  long kept = 0;
  for (long i = 0; i < count; i++) {
    tokens[kept] = i;
    kept += !(filter.of[i] < filter.least) & !(x[i] < beaten);
  }
  std::fill(tokens + kept, tokens + kept + LANES, 0);
  long drawn = likeliest;
  float most = -std::numeric_limits<float>::infinity();
  for (long start = 0; start < kept; start += LANES) {
    Words some;
    for (int lane = 0; lane < LANES; lane++) some[lane] = tokens[start + lane];
    const Vector noise = noise_of(choice.key, some, count);
    for (int lane = 0; lane < std::min<long>(LANES, kept - start); lane++) {
      const float sum = x[some[lane]] + noise[lane];
      if (sum > most) most = sum, drawn = some[lane];
    }
  }
  return drawn;
}
