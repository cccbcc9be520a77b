// The gated delta rule, a token at a time, for one head. Knows no mlx.
//
//   S <- g S;   S <- S + b (v - S k) k^T;   y = S q          S [value_dim, key_dim]
//
// Value channels do not meet each other, so S is held as strips of a few vectors of them, which stay in
// the innermost cache, channel by channel of the keys: [strips][key_dim][STRIP]. No sum runs across a
// vector. Few tokens take the lines of S as they lie: to turn S around would take longer than they do.
#pragma once

#include "vectors.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

// An x86 core takes some hundred cycles for each number under 1e-38, and states decay.
class FlushedToZero {
#if defined(__SSE__)
 public:
  FlushedToZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushedToZero() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
 public:
  ~FlushedToZero() {}
#endif
};

// Of one head: where its tokens' numbers lie, and how far one token is from the next.
struct Tokens {
  int count;
  const float *q, *k, *v;
  long step;
  const float *g, *beta;
  float* y;
  long y_step;
};

constexpr int BLOCK = 64;  // tokens after which a state may be asked for
constexpr int FEW_TOKENS = 4;

// Which of `num_states` are the state after tokens [start, start + count) of `total`: that of the own
// block, if it is asked for; after the last token all that are left. One state is the last one.
inline std::pair<int, int> states_after(int start, int count, int total, int num_states) {
  const int block = start / BLOCK;
  if (start + count == total) return {std::min(block, num_states - 1), num_states};
  return {block, std::min(block + 1, num_states - 1)};
}

inline long held_size(int key_dim, int value_dim) {
  return long((value_dim + STRIP - 1) / STRIP) * STRIP * key_dim;
}

// From [value_dim, key_dim] to strips and back.
inline void hold(const float* state, float* held, int key_dim, int value_dim) {
  for (int start = 0; start < value_dim; start += STRIP, held += STRIP * key_dim) {
    const int columns = std::min(STRIP, value_dim - start);
    for (int i = 0; i < key_dim; i++) {
      for (int c = 0; c < STRIP; c++) {
        held[i * STRIP + c] = c < columns ? state[long(start + c) * key_dim + i] : 0.0f;
      }
    }
  }
}

inline void give(const float* held, float* state, int key_dim, int value_dim) {
  for (int start = 0; start < value_dim; start += STRIP, held += STRIP * key_dim) {
    const int columns = std::min(STRIP, value_dim - start);
    for (int c = 0; c < columns; c++) {
      for (int i = 0; i < key_dim; i++) state[long(start + c) * key_dim + i] = held[i * STRIP + c];
    }
  }
}

inline void run_strip(const Tokens& t, float* held, int key_dim, int start, int columns) {
  for (int n = 0; n < t.count; n++) {
    const float *q = t.q + n * t.step, *k = t.k + n * t.step;
    const float gate = t.g[n], beta = t.beta[n];
    Vector recalled[2][WIDE] = {};  // two sums: one would wait for itself
    for (int i = 0; i < key_dim; i += 2) {
      for (int s = 0; s < 2 && i + s < key_dim; s++) {
        for (int w = 0; w < WIDE; w++) {
          recalled[s][w] += load(held + (i + s) * STRIP + w * LANES) * k[i + s];
        }
      }
    }
    alignas(BYTES) float edge[STRIP] = {};
    const float* v = t.v + n * t.step + start;
    if (columns < STRIP) v = std::copy(v, v + columns, edge) - columns;
    Vector delta[WIDE], y[WIDE] = {};
    for (int w = 0; w < WIDE; w++) {
      delta[w] = (load(v + w * LANES) - (recalled[0][w] + recalled[1][w]) * gate) * beta;
    }
    for (int i = 0; i < key_dim; i++) {
      const float key = k[i], query = q[i];
      for (int w = 0; w < WIDE; w++) {
        float* at = held + i * STRIP + w * LANES;
        const Vector s = load(at) * gate + delta[w] * key;
        store(at, s);
        y[w] += s * query;
      }
    }
    float* out = t.y + n * t.y_step + start;
    for (int w = 0; w < WIDE; w++) store((columns < STRIP ? edge : out) + w * LANES, y[w]);
    if (columns < STRIP) std::copy(edge, edge + columns, out);
  }
}

inline void run_tokens(const Tokens& t, float* held, int key_dim, int value_dim) {
  for (int start = 0; start < value_dim; start += STRIP, held += STRIP * key_dim) {
    run_strip(t, held, key_dim, start, std::min(STRIP, value_dim - start));
  }
}

// A line of the state by itself.
inline void run_line(const Tokens& t, const float* held, float* own, int key_dim, int line) {
  for (int n = 0; n < t.count; n++, held = own) {
    const float *q = t.q + n * t.step, *k = t.k + n * t.step, gate = t.g[n];
    const float delta = (t.v[n * t.step + line] - gate * dot(held, k, key_dim)) * t.beta[n];
    for (int i = 0; i < key_dim; i++) own[i] = held[i] * gate + delta * k[i];
    t.y[n * t.y_step + line] = dot(own, q, key_dim);
  }
}

// As many lines as there are lanes, from `line` on: sums of several at once. `key_dim` is a multiple of 2 * LANES.
inline void run_lines(const Tokens& t, const float* held, float* own, int key_dim, int line) {
  for (int n = 0; n < t.count; n++, held = own) {
    const float *q = t.q + n * t.step, *k = t.k + n * t.step, gate = t.g[n];
    Vector sums[LANES];
    for (int l = 0; l < LANES; l++) {
      const float* from = held + long(l) * key_dim;
      Vector both[2] = {};
      for (int i = 0; i < key_dim; i += 2 * LANES) {
        both[0] += load(from + i) * load(k + i);
        both[1] += load(from + i + LANES) * load(k + i + LANES);
      }
      sums[l] = both[0] + both[1];
    }
    alignas(BYTES) float deltas[LANES];
    store(deltas, (load(t.v + n * t.step + line) - gate * sum_each(sums)) * t.beta[n]);
    for (int l = 0; l < LANES; l++) {
      const float* from = held + long(l) * key_dim;
      float* to = own + long(l) * key_dim;
      const float delta = deltas[l];
      Vector both[2] = {};
      for (int i = 0; i < key_dim; i += 2 * LANES) {
        const Vector first = load(from + i) * gate + delta * load(k + i);
        const Vector second = load(from + i + LANES) * gate + delta * load(k + i + LANES);
        store(to + i, first);
        store(to + i + LANES, second);
        both[0] += first * load(q + i);
        both[1] += second * load(q + i + LANES);
      }
      sums[l] = both[0] + both[1];
    }
    store(t.y + n * t.y_step + line, sum_each(sums));
  }
}

// Few tokens: from one state to another, [value_dim, key_dim] both.
inline void run_few(const Tokens& t, const float* state, float* new_state, int key_dim, int value_dim) {
  int line = 0;
  for (; key_dim % (2 * LANES) == 0 && line + LANES <= value_dim; line += LANES) {
    run_lines(t, state + long(line) * key_dim, new_state + long(line) * key_dim, key_dim, line);
  }
  for (; line < value_dim; line++) {
    run_line(t, state + long(line) * key_dim, new_state + long(line) * key_dim, key_dim, line);
  }
}
