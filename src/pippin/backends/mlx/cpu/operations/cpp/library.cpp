// Operations for mlx's graphs on a CPU, as Python calls them. What they compute is in runs.h and draft_head.h.
//
// No exception leaves here.

#include "draft_head.h"

namespace {

using Arrays = std::vector<mx::array>;
using Shapes = std::vector<mx::Shape>;

template <typename F>
int guarded(F&& work) noexcept {
  try {
    work();
    return 0;
  } catch (...) {
    return 1;
  }
}

Arrays arrays_in(void* const* objects, int count) {
  Arrays arrays;
  for (int i = 0; i < count; i++) arrays.push_back(array_in(objects[i]));
  return arrays;
}

// One node that makes arrays of the shapes which `shapes_of` has for what goes in. They are of float32 where `dtypes`
// has no other type.
template <typename F>
int add(const char* name, void* const* out, void* const* in, int num_in, const F& shapes_of, Kernel kernel,
        std::vector<mx::Dtype> dtypes = {}, size_t in_place = 0) {
  return guarded([&] {
    Arrays inputs = arrays_in(in, num_in);
    Shapes shapes = shapes_of(inputs);
    dtypes.resize(shapes.size(), mx::float32);
    auto node = std::make_shared<Operation>(name, std::move(kernel), in_place);
    const Arrays made = mx::array::make_arrays(std::move(shapes), dtypes, node, inputs);
    for (size_t i = 0; i < made.size(); i++) array_in(out[i]) = made[i];
  });
}

Shapes like_the_first(const Arrays& in) { return {in[0].shape()}; }

mx::Shape ending_in(mx::Shape shape, int last) {
  shape.back() = last;
  return shape;
}

}  // namespace

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

// Before all else: how many threads compute. Returns 0, or 1 if it failed.
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

// ---- operations: blank arrays for what comes out, arrays that go in. All return 0, or 1 if it failed. ----------

// Of each layer x * weight^T + bias. in: as run_linear has them; `num_out`: outputs of each layer.
int pippin_linear(void* const* out, int count, void* const* in, int num_in, const int* num_out) {
  std::vector<int> sizes(num_out, num_out + count);
  const auto shapes = [&](const Arrays& in) {
    Shapes found;
    for (const int size : sizes) found.push_back(ending_in(in[0].shape(), size));
    return found;
  };
  return add("Linear", out, in, num_in, shapes,
             [sizes](const Inputs& i, const Outputs& o) { run_linear(i, o, sizes); });
}

int pippin_attention(void* const* out, int, void* const* in, int num_in, float scale, int causal) {
  const auto shapes = [](const Arrays& in) { return Shapes{ending_in(in[0].shape(), in[2].shape(-1))}; };
  return add("AttentionOfChunk", out, in, num_in, shapes,
             [=](const Inputs& i, const Outputs& o) { run_attention(i, o, scale, causal); });
}

// in: keys and values by KV layer and segment; `numbers`: as read_contents has them.
int pippin_kv_table(void* const* out, int, void* const* in, int num_in, const int* numbers) {
  return guarded([&] {
    auto node = std::make_shared<MakeKVTable>(read_contents(numbers));
    array_in(out[0]) = mx::array(mx::Shape{1}, mx::uint64, node, arrays_in(in, num_in));
  });
}

// in: RowInput lists them; out: as run_row_attention has them.
int pippin_row_attention(void* const* out, int, void* const* in, int num_in, float scale, int place, int window) {
  const auto shapes = [](const Arrays& in) {
    const mx::Shape keys = in[TAIL_KEYS].shape(), values = in[TAIL_VALUES].shape();
    return Shapes{keys, values, ending_in(in[ROW_QUERIES].shape(), values.back())};
  };
  const auto run = [=](const Inputs& i, const Outputs& o) { run_row_attention(i, o, {place, window, scale}); };
  return add("AttentionOfRows", out, in, num_in, shapes, run, {}, 2);
}

// in: DeltaInput lists them; out: as run_layer has them.
int pippin_delta_layer(void* const* out, int num_out, void* const* in, int num_in, int key_heads, int key_dim,
                       float eps) {
  const auto shapes = [=](const Arrays& in) {
    Shapes found{in[Z].shape(), in[CONV_STATE].shape(), in[STATE].shape()};
    const bool verifies = in.size() == VERIFY_INPUTS;
    for (int n = 0; n < num_out - 3; n++) found.push_back(in[verifies ? KEPT_QKV + n : STATE].shape());
    return found;
  };
  return add("DeltaLayer", out, in, num_in, shapes,
             [=](const Inputs& i, const Outputs& o) { run_layer(i, o, key_heads, key_dim, eps); });
}

// in: HeadInput lists them; out: as run_draft_head has them.
int pippin_draft_head(void* const* out, int, void* const* in, int num_in, int num_wrong, int num_ids, float eps,
                      float rope_scale) {
  const auto shapes = [](const Arrays& in) {
    return Shapes{{in[NOISE].shape(0), in[NOISE].shape(1)}, in[KEYS].shape(), in[VALUES].shape()};
  };
  const auto run = [=](const Inputs& i, const Outputs& o) {
    run_draft_head(i, o, {num_wrong, num_ids, eps, rope_scale});
  };
  return add("DraftHead", out, in, num_in, shapes, run, {mx::int32});
}

int pippin_rms_norm(void* const* out, int, void* const* in, int num_in, float eps) {
  return add("NormOfLines", out, in, num_in, like_the_first,
             [=](const Inputs& i, const Outputs& o) { run_rms_norm(i, o, eps); });
}

// silu(gate) * x, of one shape
int pippin_swiglu(void* const* out, int, void* const* in, int num_in) {
  return add("Swiglu", out, in, num_in, like_the_first, run_swiglu);
}

int pippin_rope(void* const* out, int, void* const* in, int num_in, float scale, int offset) {
  return add("Rotation", out, in, num_in, like_the_first,
             [=](const Inputs& i, const Outputs& o) { run_rope(i, o, scale, offset); });
}

// in: as run_choose has them.
int pippin_choose(void* const* out, int, void* const* in, int num_in) {
  const auto shapes = [](const Arrays& in) { return Shapes{{in[0].shape(0)}}; };
  return add("Choose", out, in, num_in, shapes, run_choose, {mx::int32});
}
}
