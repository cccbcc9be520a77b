// Threads that share one task at a time. Knows nothing of it.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <pthread.h>
#include <thread>

// A task is cut into blocks that whoever is awake takes. A thread that the system does not let run is not
// waited for.
class Pool {
 public:
  using Body = std::function<void(long from, long to)>;

  // Never freed: threads may be in it when the process ends.
  static Pool& shared() { return *slot(); }

  // Once per process; the caller is one of the threads. A child that is forked has none of the others.
  static void start(int threads) {
    for (int i = 1; i < threads; i++) std::thread([pool = slot()] { pool->work(); }).detach();
    slot()->threads_ = threads;
    pthread_atfork(nullptr, nullptr, [] { slot() = new Pool; });
  }

  // `body` of all of [0, count), in blocks; by the caller alone where others are at work already.
  void run(long count, long block, const Body& body) {
    if (threads_ < 2 || count <= block || !free_.try_lock()) return body(0, count);
    body_ = &body;
    count_ = count;
    block_ = block;
    next_ = 0;
    open_ = ++round_;
    if (asleep_) {
      std::lock_guard<std::mutex> hold(mutex_);
      wake_.notify_all();
    }
    take_blocks();
    open_ = 0;                                  // from now on nobody comes in ...
    while (inside_) std::this_thread::yield();  // ... and those who are finish their block
    free_.unlock();
  }

 private:
  static Pool*& slot() {
    static Pool* pool = new Pool;
    return pool;
  }

  void take_blocks() {
    for (long from; (from = next_.fetch_add(block_)) < count_;) {
      (*body_)(from, std::min(from + block_, count_));
    }
  }

  // A step is one task after the other, and to wake a thread takes as long as many of them.
  void wait_for_more_than(unsigned long seen) {
    for (int i = 0; i < LOOKS; i++) {
      if (round_ != seen) return;
      relax();
    }
    std::unique_lock<std::mutex> hold(mutex_);
    ++asleep_;
    wake_.wait(hold, [&] { return round_ != seen; });
    --asleep_;
  }

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
  }

  void work() {
    for (unsigned long seen = 0;;) {
      wait_for_more_than(seen);
      seen = round_;
      ++inside_;
      if (open_ == seen) take_blocks();
      --inside_;
    }
  }

  static constexpr int LOOKS = 2000;  // some 40 to 100 microseconds

  int threads_ = 1;
  std::mutex free_, mutex_;
  std::condition_variable wake_;
  std::atomic<unsigned long> round_{0};
  std::atomic<unsigned long> open_{0};  // the round that may be worked on
  std::atomic<int> inside_{0}, asleep_{0};
  std::atomic<long> next_{0};
  const Body* body_ = nullptr;
  long count_ = 0, block_ = 0;
};
