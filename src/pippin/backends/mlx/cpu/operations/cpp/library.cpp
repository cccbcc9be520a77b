// Operations for mlx's graphs on a CPU, as Python calls them. What they compute is in runs.h and draft_head.h.
//
// No exception leaves here.

#include "draft_head.h"

namespace {

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
  bool is_array = false;
  guarded([&] {
    const mx::array& x = array_in(object);
    is_array = x.data<void>() == buffer && long(x.size()) == size && x.shape(-1) == last;
  });
  return is_array;
}

// Before all else: how many threads compute.
int pippin_start(int threads) {
  return guarded([&] { Pool::start(threads); });
}

// Whether an operation failed while mlx computed it, and then why, as text of at most `size` bytes.
int pippin_take_failure(char* text, long size) { return Failures::take(text, size); }

// Lets a thread that submits work run further ahead of mlx's, by so many tasks of ten dispatches each, or no
// further again if negative. mlx blocks it when it is some 50 nodes ahead, and has nothing to do when they are done.
int pippin_run_ahead(int tasks) {
  return guarded([&] {
    const mx::Stream stream = mx::default_stream(mx::default_device());
    for (; tasks > 0; tasks--) mx::scheduler::notify_task_completion(stream);
    for (; tasks < 0; tasks++) mx::scheduler::notify_new_task(stream);
  });
}

// So many outputs' weights are packed side by side.
int pippin_panel() { return PANEL; }

// Of each of `count` layers x weight^T + bias. `in` are their weights as panels.h has them, and their
// biases, which may be null.
int pippin_linear(void* const* out, int count, void* x, void* const* in, const int* num_out) {
  return guarded([&] {
    std::vector<mx::array> inputs{array_in(x)};
    std::vector<mx::Shape> shapes(count, inputs[0].shape());
    std::vector<LinearLayer> layers;
    for (int i = 0; i < count; i++) {
      void *panels = in[2 * i], *bias = in[2 * i + 1];
      inputs.push_back(array_in(panels));
      if (bias) inputs.push_back(array_in(bias));
      layers.push_back({num_out[i], bias != nullptr});
      shapes[i].back() = num_out[i];
    }
    make("Linear", std::move(inputs), std::move(shapes), out,
         [layers = std::move(layers)](const Inputs& i, const Outputs& o) { run_linear(i, o, layers); });
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

// in: keys and values by KV layer and segment; `numbers`: as read_contents has them.
int pippin_kv_table(void* out, void* const* in, int num_in, const int* numbers) {
  return guarded([&] { list_rows(out, arrays_in(in, num_in), numbers); });
}

// in: RowInput lists them; out: as run_row_attention has them.
int pippin_row_attention(void* const* out, void* const* in, int num_in, float scale, int place, int window) {
  return guarded([&] {
    std::vector<mx::array> inputs = arrays_in(in, num_in);
    std::vector<mx::Shape> shapes{inputs[TAIL_KEYS].shape(), inputs[TAIL_VALUES].shape(), inputs[ROW_QUERIES].shape()};
    shapes[2].back() = inputs[TAIL_VALUES].shape(-1);
    make("AttentionOfRows", std::move(inputs), std::move(shapes), out,
         [=](const Inputs& i, const Outputs& o) { run_row_attention(i, o, {place, window, scale}); }, mx::float32, 2);
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

// in and out: as run_draft_layer has them.
int pippin_draft_layer(void* const* out, int num_out, void* const* in, int key_heads, int key_dim, float eps) {
  return guarded([&] {
    std::vector<mx::array> inputs = arrays_in(in, 14);
    std::vector<mx::Shape> shapes;
    for (const int like : {1, 4, 5, 10, 11, 12}) shapes.push_back(inputs[like].shape());
    shapes.resize(num_out);
    make("DraftLayer", std::move(inputs), std::move(shapes), out, [=](const Inputs& i, const Outputs& o) {
      run_draft_layer(i, o, key_heads, key_dim, eps);
    });
  });
}

// in: HeadInput lists them; out: as run_draft_head has them.
int pippin_draft_head(void* const* out, void* const* in, int num_wrong, int num_ids, float eps, float rope_scale) {
  return guarded([&] {
    std::vector<mx::array> inputs = arrays_in(in, HEAD_INPUTS);
    std::vector<mx::Shape> shapes{{inputs[NOISE].shape(0), inputs[NOISE].shape(1)}, inputs[KEYS].shape(),
                                  inputs[VALUES].shape()};
    make("DraftHead", std::move(inputs), std::move(shapes), out,
         [=](const Inputs& i, const Outputs& o) { run_draft_head(i, o, {num_wrong, num_ids, eps, rope_scale}); },
         std::vector<mx::Dtype>{mx::int32, mx::float32, mx::float32});
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

// in: as run_choose has them.
int pippin_choose(void* out, void* logits, void* choices, void* keys) {
  return guarded([&] {
    std::vector<mx::array> inputs{array_in(logits), array_in(choices), array_in(keys)};
    const mx::Shape shape{inputs[0].shape(0)};
    make("Choose", std::move(inputs), {shape}, &out, run_choose, mx::int32);
  });
}
}
