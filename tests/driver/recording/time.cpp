// The time of devices: what is queued on a device, on any stream, runs one after another.
//
// A kernel takes RECORDING_CUDA_US microseconds (5) and RECORDING_CUDA_US_PER_BLOCK (0) for each of
// its blocks on an SM; twice as long after slow_down(). The clock is CLOCK_MONOTONIC: who waits for
// the device sleeps.
#include "recorder.h"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <time.h>

namespace recording {

namespace {

constexpr size_t QUEUE = 1022;      // launches that the queue of a device holds
constexpr double LATENCY_S = 3e-6;  // from a launch to its begin, where the device is idle

struct Queue {
  double done = 0;
  std::deque<double> pending;  // when each entry ends
};

std::mutex mutex;
std::map<int, Queue> queues;
std::atomic<int> slower{1};

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

double variable(const char *name, double otherwise) {
  const char *value = getenv(name);
  return value ? atof(value) : otherwise;
}

}  // namespace

double device_is_done(int device) {
  std::lock_guard<std::mutex> guard(mutex);
  return std::fmax(queues[device].done, now());
}

void wait_until(double second) {
  for (double left; (left = second - now()) > 0;) {
    timespec time{static_cast<time_t>(left), static_cast<long>(std::fmod(left, 1.0) * 1e9)};
    nanosleep(&time, nullptr);
  }
}

void enqueue(int device, double seconds) {
  double room = 0;
  {
    std::lock_guard<std::mutex> guard(mutex);
    auto &pending = queues[device].pending;
    while (!pending.empty() && pending.front() <= now()) pending.pop_front();
    if (pending.size() >= QUEUE) room = pending[pending.size() - QUEUE];
  }
  wait_until(room);
  std::lock_guard<std::mutex> guard(mutex);
  Queue &queue = queues[device];
  queue.done = std::fmax(queue.done, now() + LATENCY_S) + slower * seconds;
  queue.pending.push_back(queue.done);
}

void slow_down() { slower = 2; }

double kernel_seconds(const std::string &, u64 blocks) {
  static const double fixed_us = variable("RECORDING_CUDA_US", 5);
  static const double block_us = variable("RECORDING_CUDA_US_PER_BLOCK", 0);
  return (fixed_us + block_us * blocks / devices()[current_device].sms) * 1e-6;
}

}  // namespace recording
