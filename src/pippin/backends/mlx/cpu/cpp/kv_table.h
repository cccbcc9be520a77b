// Where decode rows' keys and values lie, as one small array: a graph that reads it is the same for
// any rows.
#pragma once

#include "attention.h"
#include "graph.h"

// Columns of a segment.
struct Span {
  int segment;
  long start, count;
};

// A segment in one layer: of each head all columns.
struct Segment {
  Keys first_head;

  Keys at(int head, const Span& span) const {
    Keys found = first_head.behind(head * first_head.count + span.start);
    found.count = span.count;
    return found;
  }
};

struct SharedSpan {
  Span span;
  std::vector<int> rows;
};

// Of the layers that have one window.
struct WindowClass {
  int num_segments;
  std::vector<SharedSpan> together;                    // what several rows read at once
  std::vector<std::vector<Span>> own;                  // by row, in token order: what it reads by itself
  std::vector<std::vector<std::pair<int, int>>> among;  // by row: of `together`, and its place there
};

struct LayerKV {
  const WindowClass* lies;
  std::vector<Segment> segments;
};

// The contents of a table, but for the arrays.
struct Contents {
  std::vector<WindowClass> classes;
  std::vector<int> class_of_layer;
};

struct KVTable {
  Contents contents;
  std::vector<LayerKV> layers;  // by KV cache
  std::vector<Memory> held;
};

template <typename T>
T& of_row(std::vector<T>& by_row, int row) {
  if (row >= int(by_row.size())) by_row.resize(row + 1);
  return by_row[row];
}

// As `make_kv_table` in rows/mains.py writes them.
inline Contents read_contents(const int* numbers) {
  const auto next = [&] { return *numbers++; };
  Contents contents;
  contents.classes.resize(next());
  for (WindowClass& lies : contents.classes) {
    lies.num_segments = next();
    for (int left = next(); left > 0; left--) {
      const int segment = next(), start = next(), count = next();
      const Span span{segment, start, count};
      std::vector<int> rows(next());
      for (int& row : rows) row = next();
      if (rows.size() == 1) {
        of_row(lies.own, rows[0]).push_back(span);
        continue;
      }
      for (int place = 0; place < int(rows.size()); place++) {
        of_row(lies.among, rows[place]).push_back({int(lies.together.size()), place});
      }
      lies.together.push_back({span, std::move(rows)});
    }
  }
  contents.class_of_layer.resize(next());
  for (int& number : contents.class_of_layer) number = next();
  return contents;
}

// Gives one number: the address of a KVTable, which lives as long as the array.
class MakeKVTable : public mx::Primitive {
 public:
  explicit MakeKVTable(Contents contents)
      : Primitive(mx::default_stream(mx::default_device())), contents_(std::move(contents)) {}

  // in: by layer and segment keys and values, [heads, columns, dim].
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto kv_table = std::make_shared<KVTable>();
    kv_table->contents = contents_;
    auto next = inputs.begin();
    const auto side = [&]() -> const mx::array& {
      const mx::array& x = *next++;
      if (!x.flags().row_contiguous) throw std::runtime_error("a segment of rows does not lie side by side");
      kv_table->held.push_back(x.data_shared_ptr());
      return x;
    };
    for (const int number : contents_.class_of_layer) {
      const WindowClass& lies = kv_table->contents.classes[number];
      LayerKV layer{&lies, {}};
      for (int segment = 0; segment < lies.num_segments; segment++) {
        const mx::array &keys = side(), &values = side();
        layer.segments.push_back(
            {{keys.shape(1), keys.shape(2), values.shape(2), keys.data<float>(), values.data<float>()}});
      }
      kv_table->layers.push_back(std::move(layer));
    }
    mx::array& out = outputs[0];
    out.set_data(mx::allocator::Data(
        mx::allocator::allocator().malloc(out.nbytes()),
        [kv_table](mx::allocator::Buffer buffer) { mx::allocator::allocator().free(buffer); }));
    *out.data<const KVTable*>() = kv_table.get();
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("operations for CPUs run on CPUs");
  }

  const char* name() const override { return "TableOfRows"; }

 private:
  Contents contents_;
};
