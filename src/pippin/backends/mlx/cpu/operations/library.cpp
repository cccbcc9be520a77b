// Operations for mlx's graphs on a CPU: what they take and give. The arithmetic is in the headers.
//
// All arrays are float32 but lengths, which are int32; Python sees to it. No exception leaves here.

#include <cstring>

#include "attention.h"
#include "delta_layer.h"
#include "graph.h"
#include "norms.h"

namespace {

using Floats = std::vector<float>;

void run_delta(const Inputs& in, const Outputs& out, bool gate_per_channel) {
  const FlushedToZero here;
  Floats rooms[6];
  const float* of[6];
  for (int i = 0; i < 6; i++) of[i] = in[i].all(rooms[i]);
  const int batch = in[0].dim(0), count = in[0].dim(1), key_heads = in[0].dim(2), key_dim = in[0].dim(3);
  const int heads = in[2].dim(2), value_dim = in[2].dim(3), shared = heads / key_heads;
  const long key_step = long(key_heads) * key_dim, value_step = long(heads) * value_dim;
  const int gates = gate_per_channel ? key_dim : 1, num_states = out.size() - 1;
  const long state_size = long(value_dim) * key_dim;
  const auto held = scratch(held_size(key_dim, value_dim));
  for (int row = 0; row < batch; row++) {
    for (int h = 0; h < heads; h++) {
      const long place = (long(row) * heads + h) * state_size;
      if (count > FEW_TOKENS) hold(of[5] + place, held.get(), key_dim, value_dim);
      for (int start = 0; start < count; start += BLOCK) {
        const long token = long(row) * count + start;
        const int block = std::min(BLOCK, count - start);
        const Tokens tokens{
            block,
            of[0] + token * key_step + h / shared * key_dim,
            of[1] + token * key_step + h / shared * key_dim,
            of[2] + token * value_step + h * value_dim,
            of[3] + (token * heads + h) * gates,
            of[4] + token * heads + h,
            out[0] + token * value_step + h * value_dim,
            key_step, key_step, value_step, long(heads) * gates, heads, value_step};
        if (count <= FEW_TOKENS) {
          run_few(tokens, of[5] + place, out[1] + place, key_dim, value_dim, gate_per_channel);
          break;
        }
        run_tokens(tokens, held.get(), key_dim, value_dim, gate_per_channel);
        const Places to = states_after(start, block, count, num_states);
        for (int n = to.first; n < to.end; n++) give(held.get(), out[1 + n] + place, key_dim, value_dim);
      }
    }
  }
}

// in: qkv, z, b, a, conv_state, state, taps, log_a, dt_bias, norm, maybe lengths.
void run_layer(const Inputs& in, const Outputs& out, int key_heads, int key_dim, float eps) {
  constexpr int ARRAYS = 10;
  Floats rooms[ARRAYS];
  const float* of[ARRAYS];
  for (int i = 0; i < ARRAYS; i++) of[i] = in[i].all(rooms[i]);
  std::vector<int> room;
  const int* lengths = int(in.size()) > ARRAYS ? in[ARRAYS].all(room) : nullptr;
  const int batch = in[0].dim(0), width = in[0].dim(1);
  const Layer layer{key_heads, key_dim, in[5].dim(1), in[5].dim(2), in[6].dim(0), eps,
                    of[6], of[7], of[8], of[9]};
  const long state_size = long(layer.values()) * key_dim, kept = long(layer.taps - 1) * layer.channels();
  const int num_states = out.size() - 2;
  for (int row = 0; row < batch; row++) {
    const long token = long(row) * width;
    std::vector<float*> states;
    for (int n = 0; n < num_states; n++) states.push_back(out[2 + n] + row * state_size);
    const Row one{lengths ? std::clamp(lengths[row], 0, width) : width,
                  of[0] + token * layer.channels(), of[1] + token * layer.values(),
                  of[2] + token * layer.value_heads, of[3] + token * layer.value_heads,
                  of[4] + row * kept, of[5] + row * state_size,
                  out[0] + token * layer.values(), out[1] + row * kept, states.data(), num_states};
    run_row(layer, one);
    // What comes out of padding means nothing, but is a number.
    std::fill(one.out + long(one.count) * layer.values(), out[0] + (token + width) * layer.values(), 0.0f);
  }
}

void run_rms_norm(const Inputs& in, const Outputs& out, float eps) {
  Floats room, weights;
  const float* weight = in.size() > 1 ? in[1].all(weights) : nullptr;
  const long count = in[0].dim(-1);
  for (long i = 0; i < in[0].lines(); i++) rms_norm(in[0].line(i, room), weight, eps, count, out[0] + i * count);
}

void run_linear(const Inputs& in, const Outputs& out) {
  Floats lines, weights, biases;
  const int count = in[0].lines(), num_out = in[1].dim(0);
  multiply_transposed(in[0].all(lines), in[1].all(weights), out[0], count, num_out, in[1].dim(1));
  if (in.size() < 3) return;
  const float* bias = in[2].all(biases);
  for (long line = 0; line < count; line++) {
    for (int i = 0; i < num_out; i++) out[0][line * num_out + i] += bias[i];
  }
}

void run_swiglu(const Inputs& in, const Outputs& out) {
  Floats gates, others;
  const long count = in[0].dim(-1);
  for (long line = 0; line < in[0].lines(); line++) {
    const float *gate = in[0].line(line, gates), *x = in[1].line(line, others);
    float* y = out[0] + line * count;
    for (long i = 0; i < count; i++) y[i] = gate[i] * sigmoid(gate[i]) * x[i];
  }
}

// in: x [batch, heads, tokens, dim], frequencies [half], maybe offsets [batch] or [1] (int32).
void run_rope(const Inputs& in, const Outputs& out, float scale, int offset) {
  Floats room, angles;
  std::vector<int> places;
  const float* frequency = in[1].all(angles);
  const int* offsets = in.size() > 2 ? in[2].all(places) : nullptr;
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
void run_attention(const Inputs& in, const Outputs& out, float scale, bool causal) {
  Floats key_room, value_room, room;
  std::vector<char> mask_room;
  const float *all_keys = in[1].all(key_room), *all_values = in[2].all(value_room);
  const char* mask = in.size() > 3 ? in[3].all(mask_room) : nullptr;
  const int heads = in[0].dim(1), tokens = in[0].dim(2), groups = in[1].dim(1), shared = heads / groups;
  const long num_keys = in[1].dim(2);
  const int value_dim = in[2].dim(3), at_once = queries_at_once(shared, num_keys);
  for (int pair = 0; pair < in[0].dim(0) * groups; pair++) {  // of a row and a key head
    const int row = pair / groups;
    const long first = long(pair) * shared;  // of the heads of all rows
    const Keys keys{num_keys, in[1].dim(3), value_dim, all_keys + pair * num_keys * in[1].dim(3),
                    all_values + pair * num_keys * value_dim};
    const auto query = [&](int head, int at) { return in[0].line((first + head) * tokens + at, room); };
    const auto seen = [&](int at) { return causal ? num_keys - tokens + at + 1 : num_keys; };
    const auto allowed = [&](int, int at) -> const char* {
      return mask ? mask + ((in[3].dim(0) > 1 ? long(row) * tokens : 0) + at) * num_keys : nullptr;
    };
    const auto to = [&](int head, int at) { return out[0] + ((first + head) * tokens + at) * value_dim; };
    for (int start = 0; start < tokens; start += at_once) {
      attend(keys, shared, start, std::min(start + at_once, tokens), scale, query, seen, allowed, to);
    }
  }
}

std::vector<mx::array> arrays_in(void* const* objects, int count) {
  std::vector<mx::array> arrays;
  for (int i = 0; i < count; i++) arrays.push_back(array_in(objects[i]));
  return arrays;
}

template <typename F>
int guarded(F&& make_it) noexcept {
  try {
    make_it();
    return 0;
  } catch (...) {
    return 1;
  }
}

}  // namespace

// Of each: blank arrays for what comes out, then arrays that go in. All return 0, or 1 if it failed.
extern "C" {

// Whether the object's array is what Python sees: its buffer, its size, its last extent.
int pippin_is_array(void* object, const void* buffer, long size, int last) {
  const mx::array& x = array_in(object);
  return x.data<void>() == buffer && long(x.size()) == size && x.shape(-1) == last;
}

// Before the first product.
void pippin_use_sgemm(const Sgemm* slot) { sgemm = slot; }

// x weight^T + bias, which may be null.
int pippin_linear(void* out, void* x, void* weight, void* bias) {
  return guarded([&] {
    std::vector<mx::array> inputs{array_in(x), array_in(weight)};
    if (bias) inputs.push_back(array_in(bias));
    mx::Shape shape = inputs[0].shape();
    shape.back() = inputs[1].shape(0);
    make("Linear", std::move(inputs), {shape}, &out, run_linear);
  });
}

int pippin_attention(void* out, void* const* in, int num_in, float scale, int causal) {
  return guarded([&] {
    std::vector<mx::array> inputs = arrays_in(in, num_in);
    mx::Shape shape = inputs[0].shape();
    shape.back() = inputs[2].shape(-1);
    make("AttentionOfChunk", std::move(inputs), {shape}, &out,
         [=](const Inputs& i, const Outputs& o) { run_attention(i, o, scale, causal); });
  });
}

// in: q, k, v, g, beta, state; out: y and states.
int pippin_gated_delta(void* const* out, int num_out, void* const* in, int gate_per_channel) {
  return guarded([&] {
    std::vector<mx::array> inputs = arrays_in(in, 6);
    std::vector<mx::Shape> shapes(num_out, inputs[5].shape());
    shapes[0] = inputs[2].shape();
    make("GatedDelta", std::move(inputs), std::move(shapes), out, [=](const Inputs& i, const Outputs& o) {
      run_delta(i, o, gate_per_channel);
    });
  });
}

// out: what the output product reads, the convolution's state, states.
int pippin_delta_layer(void* const* out, int num_out, void* const* in, int num_in, int key_heads, int key_dim,
                       float eps) {
  return guarded([&] {
    std::vector<mx::array> inputs = arrays_in(in, num_in);
    std::vector<mx::Shape> shapes(num_out, inputs[5].shape());
    shapes[0] = inputs[1].shape();
    shapes[1] = inputs[4].shape();
    make("DeltaLayer", std::move(inputs), std::move(shapes), out, [=](const Inputs& i, const Outputs& o) {
      run_layer(i, o, key_heads, key_dim, eps);
    });
  });
}

int pippin_rms_norm(void* out, void* x, void* weight, float eps) {
  return guarded([&] {
    std::vector<mx::array> inputs{array_in(x)};
    if (weight) inputs.push_back(array_in(weight));
    const mx::Shape shape = inputs[0].shape();
    make("NormOfLines", std::move(inputs), {shape}, &out,
         [=](const Inputs& i, const Outputs& o) { run_rms_norm(i, o, eps); });
  });
}

// silu(gate) * x, of one shape
int pippin_swiglu(void* out, void* gate, void* x) {
  return guarded([&] {
    const mx::Shape shape = array_in(x).shape();
    make("Swiglu", {array_in(gate), array_in(x)}, {shape}, &out, run_swiglu);
  });
}

int pippin_rope(void* out, void* x, void* frequencies, void* offsets, float scale, int offset) {
  return guarded([&] {
    std::vector<mx::array> inputs{array_in(x), array_in(frequencies)};
    if (offsets) inputs.push_back(array_in(offsets));
    const mx::Shape shape = inputs[0].shape();
    make("Rotation", std::move(inputs), {shape}, &out,
         [=](const Inputs& i, const Outputs& o) { run_rope(i, o, scale, offset); });
  });
}
}
