// Operations for mlx's graphs on a CPU, as Python calls them: each adds one node to the graph and returns its
// arrays. What they compute is in runs.h and draft_head.h. All take float32 alone, which the caller sees to.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "draft_head.h"
#include "mlx/compile.h"

namespace {

namespace nb = nanobind;
using namespace nb::literals;
using Arrays = std::vector<mx::array>;
using Shapes = std::vector<mx::Shape>;
using MaybeArray = std::optional<mx::array>;

// Arrays of these shapes, of float32 where `dtypes` has no other type.
Arrays add(const char* name, const Arrays& in, Shapes shapes, Kernel kernel, std::vector<mx::Dtype> dtypes = {},
           size_t in_place = 0) {
  dtypes.resize(shapes.size(), mx::float32);
  auto node = std::make_shared<Operation>(name, std::move(kernel), in_place);
  return mx::array::make_arrays(std::move(shapes), dtypes, node, in);
}

mx::array add_one(const char* name, const Arrays& in, mx::Shape shape, Kernel kernel, mx::Dtype dtype = mx::float32) {
  return add(name, in, {std::move(shape)}, std::move(kernel), {dtype})[0];
}

Arrays with(Arrays arrays, const MaybeArray& last) {
  if (last) arrays.push_back(*last);
  return arrays;
}

mx::Shape ending_in(mx::Shape shape, int last) {
  shape.back() = last;
  return shape;
}

mx::array norm_of_lines(const mx::array& x, const MaybeArray& weight, float eps) {
  const auto run = [=](const Inputs& i, const Outputs& o) { run_rms_norm(i, o, eps); };
  return add_one("NormOfLines", with({x}, weight), x.shape(), run);
}

// silu(gate) * x, of one shape
mx::array swiglu(const mx::array& gate, const mx::array& x) {
  return add_one("Swiglu", {gate, x}, x.shape(), run_swiglu);
}

// x [B, H, T, D], frequencies [half of the channels that are turned], offset a number or int32 [B] or [1]
mx::array rope(const mx::array& x, const mx::array& frequencies, const std::variant<int, mx::array>& offset,
               float scale) {
  const int* known = std::get_if<int>(&offset);
  const int start = known ? *known : 0;
  const Arrays in = with({x, frequencies}, known ? MaybeArray() : std::get<mx::array>(offset));
  return add_one("Rotation", in, x.shape(), [=](const Inputs& i, const Outputs& o) { run_rope(i, o, scale, start); });
}

// Of each layer x * weight^T + bias. `weights`: as run_linear has them; `num_outputs`: of each layer.
Arrays linear(const mx::array& x, Arrays weights, const std::vector<int>& num_outputs) {
  Shapes shapes;
  for (const int size : num_outputs) shapes.push_back(ending_in(x.shape(), size));
  weights.insert(weights.begin(), x);
  return add("Linear", weights, std::move(shapes),
             [=](const Inputs& i, const Outputs& o) { run_linear(i, o, num_outputs); });
}

// queries [B, Hq, S, D], keys [B, Hkv, L, D], values [B, Hkv, L, Dv], mask bool [B or 1, 1, S, L]. `causal`: the last
// query sees all keys, each before it one less.
mx::array attention(const mx::array& queries, const mx::array& keys, const mx::array& values, float scale,
                    const MaybeArray& mask, bool causal) {
  return add_one("AttentionOfChunk", with({queries, keys, values}, mask), ending_in(queries.shape(), values.shape(-1)),
                 [=](const Inputs& i, const Outputs& o) { run_attention(i, o, scale, causal); });
}

// Keys and values by KV layer and segment; `numbers`: as read_contents has them.
mx::array kv_table(const Arrays& arrays, const std::vector<int>& numbers) {
  return mx::array(mx::Shape{1}, mx::uint64, std::make_shared<MakeKVTable>(read_contents(numbers.data())), arrays);
}

// A token of each row and drafts behind it, over its tail and what the KV table has: the tails with the columns, in the
// same memory, and what is read. in: as RowInput lists them.
Arrays row_attention(const Arrays& in, float scale, int place, int window) {
  const mx::Shape keys = in[TAIL_KEYS].shape(), values = in[TAIL_VALUES].shape();
  const auto run = [=](const Inputs& i, const Outputs& o) { run_row_attention(i, o, {place, window, scale}); };
  return add("AttentionOfRows", in, {keys, values, ending_in(in[ROW_QUERIES].shape(), values.back())}, run, {}, 2);
}

// What the output product reads, the convolution's state, and states; or where rows verify drafts the state behind the
// input token and what is kept of the drafts. in: as DeltaInput lists them.
Arrays delta_layer(const Arrays& in, int key_heads, int key_dim, float eps, int num_made) {
  Shapes shapes{in[Z].shape(), in[CONV_STATE].shape(), in[STATE].shape()};
  const bool verifies = in.size() == VERIFY_INPUTS;
  for (int n = 0; n < num_made - 3; n++) shapes.push_back(in[verifies ? KEPT_QKV + n : STATE].shape());
  return add("DeltaLayer", in, std::move(shapes),
             [=](const Inputs& i, const Outputs& o) { run_layer(i, o, key_heads, key_dim, eps); });
}

// Drafts int32 [rows, n], and the rings after them: keys and values. in: as HeadInput lists them.
Arrays draft_head(const Arrays& in, int num_wrong, int num_ids, float eps, float rope_scale) {
  const auto run = [=](const Inputs& i, const Outputs& o) {
    run_draft_head(i, o, {num_wrong, num_ids, eps, rope_scale});
  };
  const mx::Shape drafts{in[NOISE].shape(0), in[NOISE].shape(1)};
  return add("DraftHead", in, {drafts, in[KEYS].shape(), in[VALUES].shape()}, run, {mx::int32});
}

// A token for each row, int32 [rows], of logits [rows, vocabulary]; the others as run_choose has them.
mx::array choose_tokens(const mx::array& logits, const mx::array& choices, const mx::array& keys) {
  return add_one("Choose", {logits, choices, keys}, {logits.shape(0)}, run_choose, mx::int32);
}

// mlx blocks a thread that is some 50 nodes ahead of its own, and has nothing to do when they are done. Lets it run
// ahead by so many tasks of ten dispatches more, or no further again if negative.
void run_ahead(int tasks) {
  const mx::Stream stream = mx::default_stream(mx::default_device());
  for (; tasks > 0; tasks--) mx::scheduler::notify_task_completion(stream);
  for (; tasks < 0; tasks++) mx::scheduler::notify_new_task(stream);
}

}  // namespace

NB_MODULE(pippin_operations, m) {
  m.attr("PANEL") = PANEL;  // so many outputs' weights are packed side by side
  // Before all else: how many threads compute.
  m.def("start", &Pool::start);
  // Functions are compiled from now on, in this process, and no kernel is fused, for which mlx would call g++.
  m.def("compile_without_fusing", [] { mx::set_compile_mode(mx::CompileMode::no_fuse); });
  m.def("run_ahead", &run_ahead);
  // Why an operation failed while mlx computed it, since the last call.
  m.def("take_failure", &Failures::take);
  m.def("rms_norm", &norm_of_lines, "x"_a, "weight"_a.none(), "eps"_a);
  m.def("swiglu", &swiglu);
  m.def("rope", &rope);
  m.def("linear", &linear);
  m.def("attention", &attention, "queries"_a, "keys"_a, "values"_a, "scale"_a, "mask"_a.none(), "causal"_a);
  m.def("kv_table", &kv_table);
  m.def("row_attention", &row_attention);
  m.def("delta_layer", &delta_layer);
  m.def("draft_head", &draft_head);
  m.def("choose", &choose_tokens);
}
