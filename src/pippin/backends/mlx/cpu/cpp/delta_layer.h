// A Gated DeltaNet layer between its products, for one head of one row. Knows no mlx.
//
//   qkv -> convolution, silu -> q, k of unit length; a, b -> gates -> recurrence -> norm, gated by z
//
// A head by itself, blocks of 64 tokens through all of it together, so that what lies between stays in
// the cache. Of a row that verifies drafts:
//
//   state -> [ kept: drafts that the last step accepted | the input token ] -> new state -> [ drafts ]
//
// Drafts may be rejected, so the state that is kept is the one behind the input token, and so are what the drafts
// bring to it: the next step runs those first that were accepted. Each token as a step of it alone has it, to the
// last bit.
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
  bool verifies = false;           // drafts, which are behind its first token
  int num_kept = 0;                // tokens before these, which the states have not seen
  const float *kept_qkv = nullptr, *kept_b = nullptr, *kept_a = nullptr;
};

// What the convolution reads as token `at`, which may be one before the chunk.
inline const float* past(const Layer& l, const Row& r, int at) {
  const long channels = l.channels();
  if (at < 0) return r.conv_state + (l.taps - 1 + at) * channels;
  return at < r.num_kept ? r.kept_qkv + at * channels : r.qkv + (at - r.num_kept) * channels;
}

// `count` channels of one token from `first` on.
inline void convolve(const Layer& l, const Row& r, int token, int first, int count, float* mixed) {
  std::fill(mixed, mixed + count, 0.0f);
  for (int i = 0; i < l.taps; i++) {
    const float* x = past(l, r, token - (l.taps - 1) + i) + first;
    const float* tap = l.conv + long(i) * l.channels() + first;
    for (int c = 0; c < count; c++) mixed[c] += x[c] * tap[c];
  }
  for (int c = 0; c < count; c++) mixed[c] *= sigmoid(mixed[c]);
}

// To unit length, and by `factor`.
inline void normalise(float* x, int count, float factor) {
  factor /= std::sqrt(sum_of_squares(x, count) + 1e-6f);
  for (int i = 0; i < count; i++) x[i] *= factor;
}

inline void gated_norm(const Layer& l, const float* x, const float* z, float* out) {
  const float mean = sum_of_squares(x, l.value_dim) / l.value_dim;
  const float factor = 1.0f / std::sqrt(mean + l.eps);
  for (int i = 0; i < l.value_dim; i++) out[i] = x[i] * (factor * l.norm[i] * (z[i] * sigmoid(z[i])));
}

// What the recurrence reads of a token: q, k and v in `mixed`, and its gates.
inline void mix_token(const Layer& l, const Row& r, int token, int head, float* mixed, float* gate, float* beta) {
  const int key_dim = l.key_dim, heads = l.value_heads, key_head = head / (heads / l.key_heads);
  float *q = mixed, *k = q + key_dim, *v = k + key_dim;
  convolve(l, r, token, key_head * key_dim, key_dim, q);
  convolve(l, r, token, l.keys() + key_head * key_dim, key_dim, k);
  convolve(l, r, token, 2 * l.keys() + head * l.value_dim, l.value_dim, v);
  normalise(q, key_dim, 1.0f / std::sqrt(float(key_dim)));
  normalise(k, key_dim, 1.0f);
  const bool kept = token < r.num_kept;
  const long at = long(kept ? token : token - r.num_kept) * heads + head;
  *gate = std::exp(-std::exp(l.log_a[head]) * softplus((kept ? r.kept_a : r.a)[at] + l.dt_bias[head]));
  *beta = sigmoid((kept ? r.kept_b : r.b)[at]);
}

// One head; heads do not meet each other.
inline void run_head(const Layer& l, const Row& r, int head) {
  const FlushedToZero here;
  const int key_dim = l.key_dim, value_dim = l.value_dim, wide = 2 * key_dim + value_dim;
  const int total = r.num_kept + r.count, most = std::min(BLOCK, total);
  const long state_size = long(value_dim) * key_dim, own = head * state_size;
  const bool few = r.verifies || r.count <= FEW_TOKENS;
  const auto held = scratch(few ? state_size : held_size(key_dim, value_dim));  // of drafts, or as strips
  const auto mixed = scratch(long(most) * wide), gates = scratch(2L * most), read = scratch(long(most) * value_dim);
  const float* state = r.state + own;
  if (!few) hold(state, held.get(), key_dim, value_dim);
  for (int start = 0, end; start < total; start = end) {
    end = r.verifies && start == 0 ? r.num_kept + 1 : std::min(start + BLOCK, total);
    const int count = end - start;
    float *q = mixed.get(), *betas = gates.get() + count;
    for (int n = 0; n < count; n++) mix_token(l, r, start + n, head, q + long(n) * wide, &gates[n], &betas[n]);
    const Tokens tokens{count, q, q + key_dim, q + 2 * key_dim, wide, gates.get(), betas, read.get(), value_dim};
    if (few) {
      float* after = start ? held.get() : r.states[0] + own;
      run_few(tokens, state, after, key_dim, value_dim);
      state = after;
    } else {
      run_tokens(tokens, held.get(), key_dim, value_dim);
      const auto [first, past_last] = states_after(start, count, r.count, r.num_states);
      for (int n = first; n < past_last; n++) give(held.get(), r.states[n] + own, key_dim, value_dim);
    }
    for (int n = std::max(r.num_kept - start, 0); n < count; n++) {
      const long at = long(start + n - r.num_kept) * l.values() + head * value_dim;
      gated_norm(l, &read[long(n) * value_dim], r.z + at, r.out + at);
    }
  }
  for (int n = r.count ? 1 : 0; n < (few ? r.num_states : 0); n++) {
    std::copy(state, state + state_size, r.states[n] + own);
  }
}

// What the convolution will read of the first `count` tokens.
inline void keep_past(const Layer& l, const Row& r, int count) {
  for (int i = 0; i < l.taps - 1; i++) {
    const float* from = past(l, r, count - (l.taps - 1) + i);
    std::copy(from, from + l.channels(), r.new_conv_state + long(i) * l.channels());
  }
}
