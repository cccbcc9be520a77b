// Threads that share one task at a time. Knows nothing of it.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <pthread.h>
#include <system_error>
#include <thread>
#include <utility>

// A task is cut into blocks, and each thread that is awake takes the next one. A thread that the system does not let run is not
// waited for.
class Pool {
 public:
  using Body = std::function<void(long from, long to)>;

  // Never freed: threads may be in it when the process ends.
  static Pool& shared() { return *slot(); }

  // Once per process; the caller is one of the threads. Where the system allows fewer, these do. A child
  // that is forked has none of the others.
  static void start(int threads) {
    for (; slot()->threads_ < threads; slot()->threads_++) {
      try {
        std::thread([pool = slot()] { pool->work(); }).detach();
      } catch (const std::system_error&) {
        break;
      }
    }
    pthread_atfork(nullptr, nullptr, [] { slot() = new Pool; });
  }

  // `body` of all of [0, count), in blocks; by the caller alone where others are at work already. If it
  // throws, in whichever thread, no more blocks are started, and the first exception is thrown here.
  void run(long count, long block, const Body& body) {
    if (threads_ < 2 || count <= block) return body(0, count);
    const std::unique_lock<std::mutex> own(free_, std::try_to_lock);
    if (!own) return body(0, count);
    failed_ = false;
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
    open_ = 0;                                  // from now on no thread joins ...
    while (inside_) std::this_thread::yield();  // ... and those who are finish their block
    if (failed_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  static Pool*& slot() {
    static Pool* pool = new Pool;
    return pool;
  }

  void take_blocks() {
    for (long from; (from = next_.fetch_add(block_)) < count_;) {
      try {
        (*body_)(from, std::min(from + block_, count_));
      } catch (...) {
        if (!failed_.exchange(true)) failure_ = std::current_exception();
        next_ = count_;
      }
    }
  }

  // A step is one task after the other, and to wake a thread takes as long as many of them.
  void wait_for_more_than(unsigned long seen) {
    for (int i = 0; i < LOOKS; i++) {
      if (round_ != seen) return;
      relax();
      if (i % 8 == 7) std::this_thread::yield();
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
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;  // of the thread that failed first; read once no thread is inside
  const Body* body_ = nullptr;
  long count_ = 0, block_ = 0;
};
