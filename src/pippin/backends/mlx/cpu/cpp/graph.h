// Nodes of ours in mlx's graphs: a node is a function of views to buffers. Knows no arithmetic.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/device.h"
#include "mlx/primitives.h"
#include "mlx/scheduler.h"
#include "mlx/stream.h"

namespace mx = mlx::core;

// An input while it is computed with. Its last axis is walked in lines.
class View {
 public:
  explicit View(const mx::array& x)
      : data_(x.data<char>()), shape_(x.shape()), strides_(x.strides()),
        dtype_(x.dtype()), item_(x.itemsize()), size_(x.size()), dense_(x.flags().row_contiguous) {}

  mx::Dtype dtype() const { return dtype_; }
  long size() const { return size_; }
  int dim(int axis) const { return shape_[axis < 0 ? axis + int(shape_.size()) : axis]; }
  int axes() const { return shape_.size(); }
  long lines() const { return size_ / std::max(dim(-1), 1); }

  template <typename T>
  const T* data() const {
    return reinterpret_cast<const T*>(data_);
  }

  // All of it in order; copied unless it lies so. Not for several threads at once.
  template <typename T = float>
  const T* all() const {
    if (dense_) return data<T>();
    ordered_.resize(size_ * item_);
    T* const ordered = reinterpret_cast<T*>(ordered_.data());
    for (long line = 0; line < lines(); line++) copy_line(line, ordered + line * dim(-1));
    return ordered;
  }

  // One line of the last axis; copied to `room` unless its numbers lie side by side.
  const float* line(long index, std::vector<float>& room) const {
    if (strides_.back() == 1) return reinterpret_cast<const float*>(data_ + offset(index) * item_);
    room.resize(dim(-1));
    copy_line(index, room.data());
    return room.data();
  }

 private:
  long offset(long line) const {
    if (dense_) return line * shape_.back();
    long at = 0;
    for (int axis = axes() - 2; axis >= 0; axis--) {
      at += line % shape_[axis] * strides_[axis];
      line /= shape_[axis];
    }
    return at;
  }

  template <typename T>
  void copy_line(long index, T* to) const {
    const T* from = reinterpret_cast<const T*>(data_) + offset(index);
    for (int i = 0; i < dim(-1); i++) to[i] = from[i * strides_.back()];
  }

  const char* data_;
  mx::Shape shape_;
  mx::Strides strides_;
  mx::Dtype dtype_;
  long item_, size_;
  bool dense_;
  mutable std::vector<char> ordered_;
};

using Inputs = std::vector<View>;
using Outputs = std::vector<float*>;
using Kernel = std::function<void(const Inputs&, const Outputs&)>;

// The memory of an array, alive as long as this.
using Memory = std::remove_cvref_t<decltype(std::declval<mx::array>().data_shared_ptr())>;

// What failed in mlx's own threads, where an exception would end the process, until Python asks.
class Failures {
 public:
  // Whether all went well.
  template <typename F>
  static bool catch_all(const char* name, const F& work) noexcept {
    try {
      work();
      return true;
    } catch (const std::exception& error) {
      note(name, error.what());
    } catch (...) {
      note(name, "unknown");
    }
    return false;
  }

  // The first since the last call.
  static std::optional<std::string> take() {
    std::lock_guard<std::mutex> hold(mutex());
    if (!*first()) return std::nullopt;
    const std::string text = first();
    *first() = '\0';
    return text;
  }

 private:
  static constexpr size_t LONGEST = 256;

  static void note(const char* name, const char* what) noexcept {
    std::lock_guard<std::mutex> hold(mutex());
    if (!*first()) std::snprintf(first(), LONGEST, "%s: %s", name, what);
  }

  static char* first() {
    static char text[LONGEST];
    return text;
  }

  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
};

class Operation : public mx::Primitive {
 public:
  // `in_place`: so many outputs are written where the first inputs lie, even if others hold these.
  Operation(const char* name, Kernel kernel, size_t in_place = 0)
      : Primitive(mx::default_stream(mx::default_device())), name_(name), kernel_(std::move(kernel)),
        in_place_(in_place) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Inputs in(inputs.begin(), inputs.end());
    Outputs out;
    std::vector<Memory> held;
    std::vector<std::pair<void*, size_t>> own;  // what is no number if this fails
    for (size_t i = 0; i < outputs.size(); i++) {
      if (i < in_place_ && inputs[i].flags().row_contiguous) {
        outputs[i].copy_shared_buffer(inputs[i]);
        held.push_back(inputs[i].data_shared_ptr());
      } else {
        outputs[i].set_data(mx::allocator::malloc(outputs[i].nbytes()));
        own.emplace_back(outputs[i].data<void>(), outputs[i].nbytes());
      }
      out.push_back(outputs[i].data<float>());
    }
    mx::cpu::get_command_encoder(stream()).dispatch([name = name_, kernel = kernel_, in = std::move(in),
                                                     out = std::move(out), held = std::move(held),
                                                     own = std::move(own)] {
      if (Failures::catch_all(name, [&] { kernel(in, out); })) return;
      for (auto [data, nbytes] : own) std::memset(data, 0xff, nbytes);  // NaN, and as int32 -1
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("operations for CPUs run on CPUs");
  }

  const char* name() const override { return name_; }

 private:
  const char* name_;
  Kernel kernel_;
  size_t in_place_;
};
