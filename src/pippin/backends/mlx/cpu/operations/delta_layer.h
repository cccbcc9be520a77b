// A Gated DeltaNet layer between its products, for one row. Knows no mlx.
//
//   qkv -> convolution, silu -> q, k of unit length; a, b -> gates -> recurrence -> norm, gated by z
//
// Blocks of 64 tokens go through all of it together, so that what lies between stays in the cache.
#pragma once

#include "recurrence.h"

struct Layer {
  int key_heads, key_dim, value_heads, value_dim, taps;
  float eps;  // of the norm behind the recurrence
  const float *conv;             // [taps, channels]
  const float *log_a, *dt_bias;  // [value_heads]
  const float *norm;             // [value_dim]

  int keys() const { return key_heads * key_dim; }
  int values() const { return value_heads * value_dim; }
  int channels() const { return 2 * keys() + values(); }
};

struct Row {
  int count;                       // tokens
  const float *qkv, *z, *b, *a;    // [count, ...]
  const float *conv_state, *state; // [taps - 1, channels], [value_heads, value_dim, key_dim]
  float *out;                      // [count, values]
  float *new_conv_state;
  float *const *states;            // see states_after
  int num_states;
};

// What the convolution reads as token `at`, which may be one before the chunk.
inline const float* past(const Layer& l, const Row& r, int at) {
  const long channels = l.channels();
  return at < 0 ? r.conv_state + (l.taps - 1 + at) * channels : r.qkv + at * channels;
}

inline void convolve(const Layer& l, const Row& r, int token, float* mixed) {
  const int channels = l.channels();
  for (int i = 0; i < l.taps; i++) {
    const float *x = past(l, r, token - (l.taps - 1) + i), *tap = l.conv + long(i) * channels;
    if (i == 0) {
      for (int c = 0; c < channels; c++) mixed[c] = x[c] * tap[c];
    } else {
      for (int c = 0; c < channels; c++) mixed[c] += x[c] * tap[c];
    }
  }
  for (int c = 0; c < channels; c++) mixed[c] *= sigmoid(mixed[c]);
}

inline void scale_by(float* x, int count, float factor) {
  for (int i = 0; i < count; i++) x[i] *= factor;
}

// Queries and keys of one token to unit length, queries by key_dim^-1/2 more.
inline void normalise(const Layer& l, float* mixed) {
  for (int head = 0; head < 2 * l.key_heads; head++) {
    float* x = mixed + head * l.key_dim;
    const float length = std::sqrt(sum_of_squares(x, l.key_dim) + 1e-6f);
    scale_by(x, l.key_dim, (head < l.key_heads ? 1.0f / std::sqrt(float(l.key_dim)) : 1.0f) / length);
  }
}

inline void gated_norm(const Layer& l, const float* z, float* out) {
  for (int head = 0; head < l.value_heads; head++, z += l.value_dim, out += l.value_dim) {
    const float mean = sum_of_squares(out, l.value_dim) / l.value_dim;
    const float factor = 1.0f / std::sqrt(mean + l.eps);
    for (int i = 0; i < l.value_dim; i++) out[i] *= factor * l.norm[i] * (z[i] * sigmoid(z[i]));
  }
}

inline void run_row(const Layer& l, const Row& r) {
  const FlushedToZero here;
  const int heads = l.value_heads, channels = l.channels(), shared = heads / l.key_heads;
  const long per_head = held_size(l.key_dim, l.value_dim), state_size = long(l.value_dim) * l.key_dim;
  const auto held = scratch(per_head * heads);
  const int most = std::min(BLOCK, r.count);
  const auto mixed = scratch(long(most) * channels), gates = scratch(2L * most * heads);
  float* betas = gates.get() + long(most) * heads;
  const bool few = r.count <= FEW_TOKENS;
  for (int h = 0; h < (few ? 0 : heads); h++) {
    hold(r.state + h * state_size, held.get() + h * per_head, l.key_dim, l.value_dim);
  }
  for (int start = 0; start < r.count; start += BLOCK) {
    const int count = std::min(BLOCK, r.count - start);
    for (int n = 0; n < count; n++) {
      const int token = start + n;
      convolve(l, r, token, mixed.get() + long(n) * channels);
      normalise(l, mixed.get() + long(n) * channels);
      for (int h = 0; h < heads; h++) {
        const float a = r.a[long(token) * heads + h] + l.dt_bias[h];
        gates[n * heads + h] = std::exp(-std::exp(l.log_a[h]) * softplus(a));
        betas[n * heads + h] = sigmoid(r.b[long(token) * heads + h]);
      }
    }
    float* out = r.out + long(start) * l.values();
    for (int h = 0; h < heads; h++) {
      const float* q = mixed.get() + h / shared * l.key_dim;
      const float* v = mixed.get() + 2 * l.keys() + h * l.value_dim;
      float* own = held.get() + h * per_head;
      const Tokens tokens{count, q, q + l.keys(), v, gates.get() + h, betas + h, out + h * l.value_dim,
                          channels, channels, channels, heads, heads, l.values()};
      if (few) {
        float* to = r.states[0] + h * state_size;
        run_few(tokens, r.state + h * state_size, to, l.key_dim, l.value_dim, false);
        continue;
      }
      run_tokens(tokens, own, l.key_dim, l.value_dim, false);
      const Places to = states_after(start, count, r.count, r.num_states);
      for (int n = to.first; n < to.end; n++) {
        give(own, r.states[n] + h * state_size, l.key_dim, l.value_dim);
      }
    }
    for (int n = 0; n < count; n++) {
      gated_norm(l, r.z + long(start + n) * l.values(), out + long(n) * l.values());
    }
  }
  const float* last = r.count ? r.states[0] : r.state;
  for (int n = r.count ? 1 : 0; n < (few ? r.num_states : 0); n++) {
    std::copy(last, last + heads * state_size, r.states[n]);
  }
  for (int i = 0; i < l.taps - 1; i++) {
    const float* from = past(l, r, r.count - (l.taps - 1) + i);
    std::copy(from, from + channels, r.new_conv_state + long(i) * channels);
  }
}
