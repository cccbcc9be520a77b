// Room for numbers on their way, kept by each thread. Knows nothing of them.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

// Floats on a line of the cache, until the end of the scope. The first room that a task takes is the first
// one of the task before; what is in it means nothing.
class Scratch {
 public:
  explicit Scratch(long count) {
    Rooms& rooms = own_rooms();
    if (rooms.taken == rooms.all.size()) rooms.all.emplace_back();
    Room& room = rooms.all[rooms.taken];
    if (!room.data || room.size < count) room = Room(count);
    rooms.taken++;  // not before there is room: then nothing gives it back
    data_ = room.data.get();
  }

  ~Scratch() {
    Rooms& rooms = own_rooms();
    Room& room = rooms.all[--rooms.taken];
    if (room.size > MOST_KEPT) room = Room();
  }

  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  float* get() const { return data_; }
  float& operator[](long i) const { return data_[i]; }

 private:
  static constexpr long MOST_KEPT = 1 << 18;  // floats: a megabyte

  struct Room {
    Room() = default;
    explicit Room(long count) : size(count) {
      const size_t bytes = (count * sizeof(float) + 63) / 64 * 64;
      data.reset(static_cast<float*>(std::aligned_alloc(64, std::max<size_t>(bytes, 64))));
      if (!data) throw std::bad_alloc();
    }

    std::unique_ptr<float, void (*)(void*)> data{nullptr, std::free};
    long size = 0;
  };

  struct Rooms {
    std::vector<Room> all;
    size_t taken = 0;  // scopes end in the order in which they nest
  };

  static Rooms& own_rooms() {
    thread_local Rooms rooms;
    return rooms;
  }

  float* data_;
};

inline Scratch scratch(long count) { return Scratch(count); }
