// Failures that a test orders, by RECORDING_CUDA_FAIL or recording_fail(): "KIND@TEXT", several
// separated by spaces. They happen at launches of kernels whose name contains TEXT, with "KIND@TEXT#N"
// only from the Nth on.
//
//   resources  the launch returns that it needs too many resources
//   memory     the launch returns that memory ran out
//   illegal    the kernel accesses memory illegally: everything fails from the next wait on
//   hang       the kernel never ends
//   slow       the clock of all devices drops to half, for good
//   lost       the device is lost: everything fails from the next wait on, and new processes whose
//              RECORDING_CUDA_LOG is the same find no device
#include "recorder.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <unistd.h>

namespace recording {

namespace {

struct Order {
  std::string kind, text;
  long from = 1, seen = 0;
};

std::mutex mutex;
std::vector<Order> orders;
bool have_read = false;
std::atomic<int> lost_by{OK}, lost_soon{OK};

void read(const char *text) {
  orders.clear();
  have_read = true;
  std::istringstream words(text ? text : "");
  for (std::string word; words >> word;) {
    size_t at = word.find('@'), number = word.find('#');
    Order order;
    order.kind = word.substr(0, at);
    if (at != std::string::npos) order.text = word.substr(at + 1, number - at - 1);
    if (number != std::string::npos) order.from = atol(word.c_str() + number + 1);
    orders.push_back(order);
  }
}

std::string marker() {
  const char *log = getenv("RECORDING_CUDA_LOG");
  return log ? std::string(log) + ".lost" : "";
}

}  // namespace

Ordered ordered(const std::string &kernel) {
  std::lock_guard<std::mutex> guard(mutex);
  if (!have_read) read(getenv("RECORDING_CUDA_FAIL"));
  Ordered result;
  for (Order &order : orders) {
    if (kernel.find(order.text) == std::string::npos || ++order.seen < order.from) continue;
    Line("ordered").text("kind", order.kind).text("kernel", kernel).write();
    if (order.kind == "resources") result.at_launch = OUT_OF_RESOURCES;
    if (order.kind == "memory") result.at_launch = OUT_OF_MEMORY;
    if (order.kind == "illegal") result.later = ILLEGAL_ADDRESS;
    if (order.kind == "hang") result.hangs = true;
    if (order.kind == "slow") slow_down();
    if (order.kind == "lost") {
      result.later = UNKNOWN;
      if (FILE *file = fopen(marker().c_str(), "w")) fclose(file);
    }
  }
  return result;
}

int lost() { return lost_by; }

void lose(int error) { lost_soon = error; }

int synchronized() {
  if (lost_soon) lost_by = lost_soon.load();
  return lost_by;
}

bool device_is_gone() { return !marker().empty() && access(marker().c_str(), F_OK) == 0; }

}  // namespace recording

API void recording_fail(const char *text) {
  std::lock_guard<std::mutex> guard(recording::mutex);
  recording::read(text);
}
