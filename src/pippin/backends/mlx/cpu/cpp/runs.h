// What each operation computes of its inputs. The arithmetic is in the other headers.
//
// All arrays are float32 but lengths and tokens, which are int32, keys, and packed weights; Python sees to it.
#pragma once

#include "attention.h"
#include "choose.h"
#include "delta_layer.h"
#include "graph.h"
#include "panels.h"
#include "pool.h"
#include "row_attention.h"

using Floats = std::vector<float>;

// That one thread takes at a time:
constexpr long FEWEST_NUMBERS = 1 << 14;  // of weights, or of lines
constexpr int FEWEST_TOKENS = 16;         // of a head

// Line by line from `in` [batch, count, ...] without its first token to `out` [batch, most, ...]; then zeros.
inline void keep_drafts(const float* in, float* out, int batch, int count, int most, long size) {
  for (int row = 0; row < batch; row++, in += count * size, out += most * size) {
    float* end = std::copy(in + size, in + count * size, out);
    std::fill(end, out + most * size, 0.0f);
  }
}

enum DeltaInput {
  QKV, Z, B, A, CONV_STATE, STATE, TAPS, LOG_A, DT_BIAS, GATED_NORM,
  LENGTHS,  // int32 [batch]: tokens of each row, if not all of them; or, where rows verify drafts,
  KEPT_QKV = LENGTHS, KEPT_B, KEPT_A,  // [batch, most, ...] of the drafts of the step before,
  ACCEPTED,                            // int32 [batch]: how many of these were accepted
  VERIFY_INPUTS,
};

// out: what the output product reads, the convolution's state, states; where rows verify drafts one state, behind the
// first token, and maybe qkv, b, a of those behind it.
inline void run_layer(const Inputs& in, const Outputs& out, int key_heads, int key_dim, float eps) {
  const bool verifies = in.size() == VERIFY_INPUTS;
  const size_t num_floats = verifies ? ACCEPTED : LENGTHS;
  const float* of[ACCEPTED] = {};
  for (size_t i = 0; i < num_floats; i++) of[i] = in[i].all();
  const int* numbers = in.size() > num_floats ? in[num_floats].all<int>() : nullptr;
  const int batch = in[QKV].dim(0), width = in[QKV].dim(1), most = verifies ? in[KEPT_QKV].dim(1) : 0;
  const Layer layer{key_heads, key_dim, in[STATE].dim(1), in[STATE].dim(2), in[TAPS].dim(0), eps,
                    of[TAPS], of[LOG_A], of[DT_BIAS], of[GATED_NORM]};
  const long values = layer.values(), channels = layer.channels(), heads = layer.value_heads;
  const long state_size = values * key_dim, past_size = (layer.taps - 1) * channels;
  const int num_states = verifies ? 1 : out.size() - 2;
  std::vector<std::vector<float*>> states(batch);
  std::vector<Row> rows;
  for (int row = 0; row < batch; row++) {
    const long token = long(row) * width, kept = long(row) * most;
    for (int n = 0; n < num_states; n++) states[row].push_back(out[2 + n] + row * state_size);
    Row one{width, of[QKV] + token * channels, of[Z] + token * values, of[B] + token * heads, of[A] + token * heads,
            of[CONV_STATE] + row * past_size, of[STATE] + row * state_size,
            out[0] + token * values, out[1] + row * past_size, states[row].data(), num_states, verifies};
    if (verifies) {
      one.num_kept = std::clamp(numbers[row], 0, most);
      one.kept_qkv = of[KEPT_QKV] + kept * channels;
      one.kept_b = of[KEPT_B] + kept * heads;
      one.kept_a = of[KEPT_A] + kept * heads;
    } else if (numbers) {
      one.count = std::clamp(numbers[row], 0, width);
    }
    keep_past(layer, one, verifies ? one.num_kept + 1 : one.count);
    // What comes out of padding means nothing, but is a number.
    std::fill(one.out + one.count * values, one.out + width * values, 0.0f);
    rows.push_back(one);
  }
  if (verifies && out.size() > 3) {
    keep_drafts(of[QKV], out[3], batch, width, most, channels);
    keep_drafts(of[B], out[4], batch, width, most, heads);
    keep_drafts(of[A], out[5], batch, width, most, heads);
  }
  Pool::shared().run(batch * heads, std::max(1, FEWEST_TOKENS / std::max(width, 1)), [&](long from, long to) {
    for (long i = from; i < to; i++) run_head(layer, rows[i / heads], i % heads);
  });
}

// `body(line, room)` of each line of `x`; room is for lines whose numbers do not lie side by side.
template <typename F>
inline void for_lines(const View& x, const F& body) {
  Pool::shared().run(x.lines(), FEWEST_NUMBERS / std::max(x.dim(-1), 1) + 1, [&](long from, long to) {
    Floats rooms[2];
    for (long line = from; line < to; line++) body(line, rooms);
  });
}

// `weight` may be null.
inline void rms_norm(const float* x, const float* weight, float eps, long count, float* y) {
  const float factor = 1.0f / std::sqrt(sum_of_squares(x, count) / count + eps);
  if (weight) {
    for (long i = 0; i < count; i++) y[i] = x[i] * factor * weight[i];
  } else {
    for (long i = 0; i < count; i++) y[i] = x[i] * factor;
  }
}

inline void run_rms_norm(const Inputs& in, const Outputs& out, float eps) {
  const float* weight = in.size() > 1 ? in[1].all() : nullptr;
  const long count = in[0].dim(-1);
  for_lines(in[0], [&](long line, Floats* rooms) {
    rms_norm(in[0].line(line, rooms[0]), weight, eps, count, out[0] + line * count);
  });
}

inline void run_swiglu(const Inputs& in, const Outputs& out) {
  const long count = in[0].dim(-1);
  for_lines(in[0], [&](long line, Floats* rooms) {
    const float *gate = in[0].line(line, rooms[0]), *x = in[1].line(line, rooms[1]);
    float* y = out[0] + line * count;
    for (long i = 0; i < count; i++) y[i] = gate[i] * sigmoid(gate[i]) * x[i];
  });
}

// `read(numbers)`, in whatever type they lie.
template <typename F>
void with_numbers(const View& x, const F& read) {
  if (x.dtype() == mx::float16) return read(x.data<Float16>());
  if (x.dtype() == mx::bfloat16) return read(x.data<BFloat16>());
  read(x.data<float>());
}

// Packed weights lie as they are read.
inline void multiply_panel(const Product& product, const View& panels, long number) {
  with_numbers(panels, [&](const auto* weights) {
    using Number = std::remove_cvref_t<decltype(*weights)>;
    multiply<Number>(product, {number, weights + number * product.inputs * PANEL});
  });
}

// All of several products as one task. `biases` has null where there is none, or is empty.
inline void multiply_all(const std::vector<Product>& products, const std::vector<const View*>& weights,
                         const std::vector<const float*>& biases) {
  std::vector<long> first{0};  // panel of each product
  long inputs = 1;
  for (size_t i = 0; i < products.size(); i++) {
    first.push_back(first.back() + weights[i]->dim(0));
    inputs = std::max(inputs, products[i].inputs);
  }
  const long block = std::max(1L, FEWEST_NUMBERS / (inputs * PANEL));
  Pool::shared().run(first.back(), block, [&](long from, long to) {
    size_t layer = 0;
    for (long panel = from; panel < to; panel++) {
      while (panel >= first[layer + 1]) layer++;
      const long number = panel - first[layer];
      multiply_panel(products[layer], *weights[layer], number);
      if (!biases.empty() && biases[layer]) add_bias(products[layer], biases[layer], number);
    }
  });
}

// in: x; of each layer its packed weights and maybe its bias. `num_out`: outputs of each layer.
inline void run_linear(const Inputs& in, const Outputs& out, const std::vector<int>& num_out) {
  const float* x = in[0].all();
  std::vector<Product> products;
  std::vector<const View*> weights;
  std::vector<const float*> biases;
  size_t next = 1;
  for (const int outputs : num_out) {
    products.push_back({in[0].lines(), outputs, in[0].dim(-1), x, out[products.size()]});
    weights.push_back(&in[next++]);
    const bool biased = next < in.size() && in[next].axes() == 1;
    biases.push_back(biased ? in[next].all() : nullptr);
    next += biased;
  }
  multiply_all(products, weights, biases);
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

// in: x [batch, heads, tokens, dim], frequencies [half], maybe offsets [batch] or [1] (int32).
inline void run_rope(const Inputs& in, const Outputs& out, float scale, int offset) {
  Floats room;
  const float* frequency = in[1].all();
  const int* offsets = in.size() > 2 ? in[2].all<int>() : nullptr;
  const long half = in[1].size(), tokens = in[0].dim(2), heads = in[0].dim(1), dim = in[0].dim(3);
  const long tables = offsets && in[2].size() > 1 ? in[0].dim(0) : 1;
  Floats cos(tables * tokens * half), sin(cos.size());
  for (long at = 0; at < tables * tokens; at++) {
    const float place = float(at % tokens + (offsets ? offsets[at / tokens] : offset)) * scale;
    for (long i = 0; i < half; i++) {
      cos[at * half + i] = std::cos(place * frequency[i]);
      sin[at * half + i] = std::sin(place * frequency[i]);
    }
  }
  for (long line = 0; line < in[0].lines(); line++) {
    const long row = line / tokens / heads;
    const long at = ((tables > 1 ? row * tokens : 0) + line % tokens) * half;
    rotate(in[0].line(line, room), &cos[at], &sin[at], half, dim, out[0] + line * dim);
  }
}

// in: queries [batch, heads, tokens, dim], keys and values of fewer heads, maybe what may be seen (bool,
// one for all heads).
inline void run_attention(const Inputs& in, const Outputs& out, float scale, bool causal) {
  const float *all_keys = in[1].all(), *all_values = in[2].all();
  const char* mask = in.size() > 3 ? in[3].all<char>() : nullptr;
  const int heads = in[0].dim(1), tokens = in[0].dim(2), groups = in[1].dim(1), shared = heads / groups;
  const int dim = in[1].dim(3), value_dim = in[2].dim(3);
  const long num_keys = in[1].dim(2);
  const int at_once = queries_at_once(shared, num_keys), parts = (tokens + at_once - 1) / at_once;
  const auto run_part = [&](int pair, int part) {  // of a row and a key head; of the queries
    Floats room;
    const int row = pair / groups, start = part * at_once;
    const long first = long(pair) * shared;  // of the heads of all rows
    const Keys keys{num_keys, dim, value_dim, all_keys + pair * num_keys * dim, all_values + pair * num_keys * value_dim};
    const auto query = [&](int head, int at) { return in[0].line((first + head) * tokens + at, room); };
    const auto seen = [&](int at) { return causal ? num_keys - tokens + at + 1 : num_keys; };
    const auto allowed = [&](int at) -> const char* {
      return mask ? mask + ((in[3].dim(0) > 1 ? long(row) * tokens : 0) + at) * num_keys : nullptr;
    };
    const auto to = [&](int head, int at) { return out[0] + ((first + head) * tokens + at) * value_dim; };
    attend(keys, shared, start, std::min(start + at_once, tokens), scale, query, seen, allowed, to);
  };
  Pool::shared().run(long(in[0].dim(0)) * groups * parts, 1, [&](long from, long to) {
    for (long i = from; i < to; i++) run_part(i / parts, i % parts);
  });
}

// in: logits [rows, vocabulary], choices [rows, 4] as `Choice` has them, keys [rows, 2] (uint32); out: tokens, int32.
inline void run_choose(const Inputs& in, const Outputs& out) {
  const float* choices = in[1].all();
  const uint32_t* keys = in[2].all<uint32_t>();
  const long count = in[0].dim(-1);
  int* tokens = reinterpret_cast<int*>(out[0]);
  Pool::shared().run(in[0].lines(), 1, [&](long from, long to) {
    Floats line;
    for (long row = from; row < to; row++) {
      const float* given = choices + 4 * row;
      const Choice choice{given[0], long(given[1]), given[2], given[3], {keys[2 * row], keys[2 * row + 1]}};
      tokens[row] = choose(choice, in[0].line(row, line), count);
    }
  });
}
