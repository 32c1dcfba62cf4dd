// What libcuda.so.1 and libcudart.so.13 of this folder share: devices, memory, time, captures, events.
//
// Both libraries record what a program does with a GPU, and check it by CUDA's rules. They compute
// nothing. libcuda.so.1 exports this namespace; libcudart.so.13 links against it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace recording {

using u64 = unsigned long long;

// Errors, equal in both APIs.
enum Error {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  OUT_OF_RESOURCES = 701,
  LAUNCH_FAILED = 719,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901,
  UNKNOWN = 999,
};
const char *sentence(int error);  // null for an error that is not in the list

// ---- events: one JSON object a line, in RECORDING_CUDA_LOG.<process id>

class Line {
 public:
  explicit Line(const char *event);
  Line &text(const char *key, const std::string &value);
  Line &number(const char *key, u64 value);
  template <class T>
  Line &numbers(const char *key, const std::vector<T> &values) {
    std::string list;
    for (const T &value : values) list += (list.empty() ? "" : ",") + std::to_string(value);
    return raw(key, "[" + list + "]");
  }
  Line &texts(const char *key, const std::vector<std::string> &values);
  void write() const;

 private:
  Line &raw(const char *key, const std::string &value);
  std::string line_;
};

bool quiet();                           // RECORDING_CUDA_QUIET: neither check nor record, to time the host
void fault(const std::string &broken);  // records that the program broke a rule of CUDA
void call(const char *function);        // records a call that a kept launch must not make

// ---- devices: RECORDING_CUDA_DEVICES names them, by the keys in devices.cpp

struct Device {
  std::string key, name;
  int major, minor, sms;
  int shared_per_block, shared_per_sm, threads_per_sm, blocks_per_sm, registers_per_sm;
  int clock_khz, memory_clock_khz, memory_bus_bits;
  u64 l2_bytes, memory_bytes;
};
const std::vector<Device> &devices();  // those that CUDA_VISIBLE_DEVICES leaves
int physical(int index);               // the number of a visible device among all
extern thread_local int current_device;
void make_current(int device);  // and its primary context, for this thread
void initialize();              // what cuInit does, and every call of the runtime API

// ---- memory: host code cannot touch it, and it ends. One address range for each device.

int allocate(int device, u64 size, u64 *address);
int release(u64 address);
bool is_device(u64 address);
int device_of(u64 address);
bool allocation_of(u64 address, u64 *begin, u64 *size);  // false for freed memory
void *host_view(u64 address);                            // where this library may read and write it
void memory_left(int device, u64 *left, u64 *total);

// ---- time: a device runs one thing after another; waiting for it takes real time

double device_is_done(int device);                // second of CLOCK_MONOTONIC
void enqueue(int device, double seconds);         // waits where the launch queue is full
void wait_until(double second);
double kernel_seconds(const std::string &name, u64 blocks);
void slow_down();  // halves the clock of all devices

// ---- captures

int begin_capture(u64 stream, int mode);
int end_capture(u64 stream, u64 *graph);
int capture_status(u64 stream, u64 *id);  // 0 none, 1 active, 2 broken
int exchange_capture_mode(int mode);
bool captured(u64 stream);                // counts one node, if the stream is being captured
u64 nodes_of(u64 graph);
int forbidden_in_capture(const char *function);              // an error if a capture forbids this
int forbidden_in_capture(const char *function, u64 stream);  // the same for one stream

// ---- failures that a test orders: RECORDING_CUDA_FAIL and recording_fail(), see failures.cpp

struct Ordered {
  int at_launch = OK;    // what the launch returns
  int later = OK;        // what everything returns from the next wait on
  bool hangs = false;    // the device never gets done
};
Ordered ordered(const std::string &kernel);
int lost();               // the error that all calls return, once the context is lost
void lose(int error);     // from the next wait on
int synchronized();       // a wait happens now: lost(), once what was ordered for later has come
bool device_is_gone();    // a device was lost in an earlier process

}  // namespace recording
