// Tasks on XLA's thread pool, for the native kernels.
#ifndef PALLAS_KERNELS_NATIVE_TASKS_H_
#define PALLAS_KERNELS_NATIVE_TASKS_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace pallas_kernels {

// Calls work(next) on the calling thread and on whichever pool threads are free; work takes numbers below
// `num_tasks` from the counter until there are none. The caller never waits for a thread that has not begun, so
// a busy pool costs time only.
template <typename Work>
void run_tasks(xla::ffi::ThreadPool pool, int64_t num_tasks, const Work& work) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable done;
    int working = 0;
    bool closed = false;
  };
  auto shared = std::make_shared<Shared>();  // outlives the call: a thread may look at it afterwards
  const int64_t others = std::min<int64_t>(pool.num_threads(), num_tasks) - 1;
  for (int64_t i = 0; i < others; ++i) {
    pool.Schedule([shared, &work] {
      {
        std::lock_guard<std::mutex> lock(shared->mutex);
        if (shared->closed) return;  // `work` may be gone
        shared->working += 1;
      }
      work(shared->next);
      std::lock_guard<std::mutex> lock(shared->mutex);
      shared->working -= 1;
      shared->done.notify_one();
    });
  }
  work(shared->next);
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->closed = true;
  shared->done.wait(lock, [&] { return shared->working == 0; });
}

}  // namespace pallas_kernels

#endif  // PALLAS_KERNELS_NATIVE_TASKS_H_
