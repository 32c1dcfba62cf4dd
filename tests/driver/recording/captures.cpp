// Stream captures: which are active, how many nodes they have, and what breaks them.
//
// Programming Guide, "CUDA Graphs": a capture in mode global forbids unsafe calls of every thread,
// one in mode thread-local those of its own, one in mode relaxed none; a wait for a captured stream
// is never allowed. A forbidden call fails, and breaks the capture.
#include "recorder.h"

#include <map>
#include <mutex>
#include <sys/syscall.h>
#include <unistd.h>

namespace recording {

namespace {

enum Mode { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };

struct Capture {
  int mode;
  long thread;
  u64 id;
  bool broken;
  u64 nodes;
};

std::mutex mutex;
std::map<u64, Capture> active;  // by stream
std::map<u64, u64> nodes;       // by graph
u64 ids = 0;
thread_local int thread_mode = GLOBAL;

constexpr u64 GRAPHS = 0x9000;  // handles of graphs are numbers above this

long thread() { return syscall(SYS_gettid); }

bool forbids(const Capture &capture) {
  if (thread_mode == RELAXED || capture.mode == RELAXED) return false;
  bool own = capture.thread == thread();
  if (thread_mode == THREAD_LOCAL || capture.mode == THREAD_LOCAL) return own;
  return true;
}

int break_capture(Capture &capture, const char *function) {
  capture.broken = true;
  fault(std::string(function) + " during a capture");
  return CAPTURE_UNSUPPORTED;
}

}  // namespace

int exchange_capture_mode(int mode) {
  int before = thread_mode;
  thread_mode = mode;
  return before;
}

int begin_capture(u64 stream, int mode) {
  std::lock_guard<std::mutex> guard(mutex);
  if (stream <= 2) fault("the default stream was captured");
  if (stream <= 2 || active.count(stream)) return CAPTURE_UNSUPPORTED;
  active[stream] = {mode, thread(), ++ids, false, 0};
  return OK;
}

int capture_status(u64 stream, u64 *id) {
  std::lock_guard<std::mutex> guard(mutex);
  auto found = active.find(stream);
  if (found == active.end()) return 0;
  if (id) *id = found->second.id;
  return found->second.broken ? 2 : 1;
}

int end_capture(u64 stream, u64 *graph) {
  std::lock_guard<std::mutex> guard(mutex);
  auto found = active.find(stream);
  if (found == active.end()) return CAPTURE_INVALIDATED;
  Capture capture = found->second;
  active.erase(found);
  *graph = GRAPHS + capture.id;
  nodes[*graph] = capture.nodes;
  Line("capture").number("nodes", capture.nodes).number("broken", capture.broken).write();
  return capture.broken ? CAPTURE_INVALIDATED : OK;
}

bool captured(u64 stream) {
  std::lock_guard<std::mutex> guard(mutex);
  auto found = active.find(stream);
  if (found == active.end()) return false;
  ++found->second.nodes;
  return true;
}

u64 nodes_of(u64 graph) {
  std::lock_guard<std::mutex> guard(mutex);
  return nodes[graph];
}

int forbidden_in_capture(const char *function) {
  std::lock_guard<std::mutex> guard(mutex);
  for (auto &[stream, capture] : active)
    if (forbids(capture)) return break_capture(capture, function);
  return OK;
}

int forbidden_in_capture(const char *function, u64 stream) {
  std::lock_guard<std::mutex> guard(mutex);
  auto found = active.find(stream);
  return found == active.end() ? OK : break_capture(found->second, function);
}

}  // namespace recording
