// A Gated DeltaNet layer of decode rows that verify drafts, for one head of one row. Knows no mlx.
//
//   state -> [ kept: drafts that the last step accepted | the input token ] -> new state -> [ drafts ]
//
// Drafts may be rejected, so the state that is kept is the one behind the input token, and so are what the drafts
// bring to it: the next step runs those first that were accepted. Each token as a step of it alone has it, to the
// last bit.
#pragma once

#include "delta_layer.h"

inline void verify_head(const Layer& l, const Row& r, int head) {
  const FlushedToZero here;
  const int key_dim = l.key_dim, value_dim = l.value_dim, wide = 2 * key_dim + value_dim;
  const int total = r.num_kept + r.count, committed = r.num_kept + 1;
  const long state_size = long(value_dim) * key_dim, own = head * state_size;
  const auto mixed = scratch(long(total) * wide), gates = scratch(2L * total), read = scratch(long(total) * value_dim);
  for (int n = 0; n < total; n++) {
    mix_token(l, r, n, head, mixed.get() + long(n) * wide, &gates[n], &gates[total + n]);
  }
  const auto tokens = [&](int first, int end) {
    const float* q = mixed.get() + long(first) * wide;
    return Tokens{end - first, q, q + key_dim, q + 2 * key_dim, wide, gates.get() + first,
                  gates.get() + total + first, read.get() + long(first) * value_dim, value_dim};
  };
  float* state = r.states[0] + own;
  run_few(tokens(0, committed), r.state + own, state, key_dim, value_dim);
  if (committed < total) {
    const auto passing = scratch(state_size);
    run_few(tokens(committed, total), state, passing.get(), key_dim, value_dim);
  }
  for (int n = 0; n < r.count; n++) {
    const float* from = read.get() + long(r.num_kept + n) * value_dim;
    const long at = long(n) * l.values() + head * value_dim;
    std::copy(from, from + value_dim, r.out + at);
    gated_norm(l, r.z + at, r.out + at);
  }
}
