// Where decode rows' keys and values lie, as one small array: a graph that reads it is the same for
// any rows. Knows no arithmetic.
#pragma once

#include "graph.h"

// One side of a cohort in one layer: [lines, heads, tokens, dim], the last axis side by side.
struct Side {
  const float* data = nullptr;
  long line_step = 0, head_step = 0, token_step = 0;

  const float* at(int line, int head) const { return data + line * line_step + head * head_step; }
};

struct CohortKV {
  Side keys, values;
  std::vector<int> stored;  // of each line: how many tokens are its own
  Side shared_keys, shared_values;
  long num_shared = 0;  // tokens before those of every line
};

struct Home {
  int cohort, line;
};

class KVTable {
 public:
  std::vector<Home> homes;                        // by row; cohort -1: it has none
  std::vector<std::vector<int>> rows;             // by cohort: of each line, or -1
  std::vector<std::vector<CohortKV>> layers;  // by KV cache, by cohort

  // The array is held; what does not lie as it should is copied, once it was computed. The copy may run
  // after this table is gone: it holds what it reads and what it writes.
  Side add(const mx::array& x, bool dense, mx::Stream stream) {
    const long dim = x.shape(-1);
    const bool lies = (dim < 2 || x.strides(-1) == 1) && (!dense || x.shape(2) < 2 || x.strides(2) == dim);
    if (lies) {
      held_.push_back(x.data_shared_ptr());
      return {x.data<float>(), x.strides(0), x.strides(1), x.strides(2)};
    }
    copies_.push_back(std::make_shared<std::vector<float>>(x.size()));
    float* to = copies_.back()->data();
    auto copy = [from = View(x), held = x.data_shared_ptr(), kept = copies_.back()] {
      std::vector<float> room;
      const float* all = from.all(room);
      std::copy(all, all + from.size(), kept->data());
    };
    mx::cpu::get_command_encoder(stream).dispatch(
        [copy = std::move(copy)] { Failures::catch_all("ListOfRows", copy); });
    return {to, x.shape(1) * x.shape(2) * dim, x.shape(2) * dim, dim};
  }

 private:
  std::vector<Memory> held_;
  std::vector<std::shared_ptr<std::vector<float>>> copies_;
};

// The contents of a table, but for the arrays: see `Operations.kv_table`.
struct Contents {
  int num_layers;
  std::vector<std::vector<int>> rows;      // by cohort, of each line
  std::vector<std::vector<int>> stored;    // by layer and cohort, of each line
  std::vector<bool> shares;                // by layer and cohort
};

inline Contents read_contents(const int* numbers) {
  Contents contents{*numbers++, {}, {}, {}};
  const int num_cohorts = *numbers++;
  for (int cohort = 0; cohort < num_cohorts; cohort++) {
    const int lines = *numbers++;
    contents.rows.emplace_back(numbers, numbers + lines);
    numbers += lines;
  }
  for (int i = 0; i < contents.num_layers * num_cohorts; i++) {
    const long lines = contents.rows[i % num_cohorts].size();
    contents.shares.push_back(*numbers++);
    contents.stored.emplace_back(numbers, numbers + lines);
    numbers += lines;
  }
  return contents;
}

// Gives one number: the address of a KVTable, which lives as long as the array.
class MakeKVTable : public mx::Primitive {
 public:
  explicit MakeKVTable(Contents contents)
      : Primitive(mx::default_stream(mx::default_device())), contents_(std::move(contents)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto kv_table = std::make_shared<KVTable>();
    kv_table->rows = contents_.rows;
    const int num_cohorts = contents_.rows.size();
    for (int cohort = 0; cohort < num_cohorts; cohort++) {
      for (int line = 0; line < int(contents_.rows[cohort].size()); line++) {
        const int row = contents_.rows[cohort][line];
        if (row < 0) continue;
        if (row >= int(kv_table->homes.size())) kv_table->homes.resize(row + 1, {-1, -1});
        kv_table->homes[row] = {cohort, line};
      }
    }
    auto next = inputs.begin();
    for (int i = 0; i < contents_.num_layers * num_cohorts; i++) {
      if (i % num_cohorts == 0) kv_table->layers.emplace_back();
      CohortKV cohort;
      cohort.keys = kv_table->add(*next++, false, stream());
      cohort.values = kv_table->add(*next++, false, stream());
      cohort.stored = contents_.stored[i];
      if (contents_.shares[i]) {
        cohort.num_shared = next->shape(2);
        cohort.shared_keys = kv_table->add(*next++, true, stream());
        cohort.shared_values = kv_table->add(*next++, true, stream());
      }
      kv_table->layers.back().push_back(std::move(cohort));
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

  const char* name() const override { return "ListOfRows"; }

 private:
  Contents contents_;
};

inline void list_rows(void* blank, std::vector<mx::array> inputs, const int* numbers) {
  auto node = std::make_shared<MakeKVTable>(read_contents(numbers));
  array_in(blank) = mx::array(mx::Shape{1}, mx::uint64, node, std::move(inputs));
}
