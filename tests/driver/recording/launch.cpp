#include "launch.h"

#include "tensor_map.h"

#include <cstring>

namespace recording {

namespace {

constexpr double FOREVER_S = 1e9;

u64 count(const unsigned extent[3]) { return u64{extent[0]} * extent[1] * extent[2]; }

std::string hex(const unsigned char *bytes, int size) {
  static const char *digits = "0123456789abcdef";
  std::string text;
  for (int i = 0; i < size; ++i) text += {digits[bytes[i] >> 4], digits[bytes[i] & 15]};
  return text;
}

std::string broken_by_parameter(const Parameter &parameter, const unsigned char *bytes) {
  std::string which = "parameter " + std::to_string(parameter.ordinal);
  if (parameter.size == 8) {
    u64 address;
    memcpy(&address, bytes, sizeof address);
    if (!is_device(address)) return "";
    if (!allocation_of(address, nullptr, nullptr)) return which + " points to freed memory";
    if (device_of(address) != current_device) return which + " points to another device's memory";
  }
  if (parameter.size == 128) {
    if (!is_tensor_map(bytes)) return which + " is no tensor map";
    u64 address = address_of_map(bytes);
    if (!allocation_of(address, nullptr, nullptr)) return which + " is a tensor map of freed memory";
    if (device_of(address) != current_device) return which + " maps another device's memory";
  }
  return "";
}

// The error of a launch that breaks a rule, and the rules.
int broken_rules(const Kernel &kernel, const Launch &launch, void **parameters, std::string *broken) {
  int error = OK;
  auto demand = [&](bool holds, const std::string &rule, int otherwise = INVALID_VALUE) {
    if (holds) return;
    *broken += (broken->empty() ? "" : "; ") + rule;
    if (!error) error = otherwise;
  };
  const Device &device = devices()[current_device];
  int threads = static_cast<int>(count(launch.block)), fit = kernel.threads_that_fit();
  int shared = static_cast<int>(launch.dynamic_shared);
  demand(threads <= fit, std::to_string(threads) + " threads do not fit, " + std::to_string(fit) + " do", OUT_OF_RESOURCES);
  demand(!kernel.required_threads || threads == kernel.required_threads, "threads must be .reqntid");
  demand(shared <= kernel.dynamic_shared_limit, "dynamic shared memory above the kernel's limit");
  demand(shared + kernel.static_shared <= device.shared_per_block, "shared memory above the device's limit");
  demand(launch.grid[0] >= 1 && launch.grid[1] >= 1 && launch.grid[2] >= 1, "the grid is empty");
  demand(launch.grid[0] <= 2147483647u && launch.grid[1] <= 65535 && launch.grid[2] <= 65535, "the grid is too large");
  demand(!launch.cluster || launch.grid[0] % launch.cluster == 0, "the grid must be a multiple of the cluster");
  for (const Parameter &parameter : kernel.parameters) {
    auto bytes = static_cast<const unsigned char *>(parameters[parameter.ordinal]);
    std::string rule = bytes ? broken_by_parameter(parameter, bytes) : "a parameter is null";
    demand(rule.empty(), rule);
  }
  return error;
}

void record(const Kernel &kernel, const Launch &launch, void **parameters, bool captured, const std::string &broken) {
  std::vector<std::string> values;
  for (const Parameter &parameter : kernel.parameters) {
    auto bytes = static_cast<const unsigned char *>(parameters[parameter.ordinal]);
    values.push_back(bytes ? hex(bytes, parameter.size) : "");
  }
  Line("launch")
      .text("kernel", kernel.name)
      .number("device", current_device)
      .number("stream", launch.stream)
      .numbers("grid", std::vector<unsigned>(launch.grid, launch.grid + 3))
      .number("threads", count(launch.block))
      .number("cluster", launch.cluster)
      .number("pdl", launch.pdl)
      .number("dynamic_shared", launch.dynamic_shared)
      .number("registers", kernel.registers)
      .texts("parameters", values)
      .number("captured", captured)
      .text("broken", broken)
      .write();
}

using Executor = void (*)(const void *kernel, const unsigned *grid, unsigned dynamic_shared, int count,
                          const int *sizes, void **parameters);
Executor executor = nullptr;

// Hands a launch to the program's executor, if it named one.
void execute(const Kernel &kernel, const Launch &launch, void **parameters) {
  if (!executor) return;
  std::vector<int> sizes;
  std::vector<void *> values;
  for (const Parameter &parameter : kernel.parameters) {
    sizes.push_back(parameter.size);
    values.push_back(parameters[parameter.ordinal]);
  }
  executor(&kernel, launch.grid, launch.dynamic_shared, static_cast<int>(sizes.size()), sizes.data(), values.data());
}

// Reads each declared byte of the parameters, as a driver does when it copies them.
void touch(const Kernel &kernel, void **parameters) {
  static thread_local unsigned char copy[128];
  for (const Parameter &parameter : kernel.parameters)
    memcpy(copy, parameters[parameter.ordinal], parameter.size <= 128 ? parameter.size : 128);
  asm volatile("" : : "r"(copy) : "memory");
}

}  // namespace

int launch(const Kernel &kernel, const Launch &launch, void **parameters) {
  if (quiet()) {
    touch(kernel, parameters);
    return OK;
  }
  if (kernel.unloaded) {
    fault("launch of " + kernel.name + ", whose module was unloaded");
    return INVALID_HANDLE;
  }
  std::string broken;
  int error = broken_rules(kernel, launch, parameters, &broken);
  bool is_captured = captured(launch.stream);
  record(kernel, launch, parameters, is_captured, broken);
  if (error) {
    fault("launch of " + kernel.name + ": " + broken);
    return error;
  }
  Ordered failure = ordered(kernel.name);
  if (failure.at_launch) return failure.at_launch;
  if (failure.later) lose(failure.later);
  if (is_captured) return OK;
  execute(kernel, launch, parameters);
  enqueue(current_device, failure.hangs ? FOREVER_S : kernel_seconds(kernel.name, count(launch.grid)));
  return OK;
}

}  // namespace recording

// The function that computes launches from now on; null for none. A kernel is its CUfunction.
API void recording_execute(recording::Executor to) { recording::executor = to; }

// Where the memory lies that holds an address of a device, for the executor; null where none does.
API void *recording_view(recording::u64 address, recording::u64 *begin, recording::u64 *size) {
  return recording::allocation_of(address, begin, size) ? recording::host_view(*begin) : nullptr;
}
