// The GPUs that a program sees.
//
// RECORDING_CUDA_DEVICES holds keys of the table, separated by spaces ("h200 h200"; without it one
// "h200"). CUDA_VISIBLE_DEVICES chooses among them by number, as CUDA's does.
#include "recorder.h"

#include <cstdlib>
#include <sstream>

namespace recording {

namespace {

constexpr u64 GIB = 1ULL << 30, MIB = 1ULL << 20;

// The limits are those of tables "Technical Specifications per Compute Capability" of the CUDA C++
// Programming Guide; the rest is what such devices report.
const Device KNOWN[] = {
    {"h200", "NVIDIA H200", 9, 0, 132, 232448, 233472, 2048, 32, 65536, 1980000, 3201000, 6144,
     60 * MIB, 139 * GIB},
    // One of seven instances of an H200.
    {"mig", "NVIDIA H200 MIG 1g.18gb", 9, 0, 16, 232448, 233472, 2048, 32, 65536, 1980000, 3201000,
     768, 15 * MIB / 2, 16 * GIB},
    {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 232448, 233472, 2048, 32, 65536, 1980000, 2619000,
     5120, 50 * MIB, 79 * GIB},
    {"b200", "NVIDIA B200", 10, 0, 148, 232448, 233472, 2048, 32, 65536, 1850000, 3906250, 8192,
     126 * MIB, 178 * GIB},
    {"a100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 166912, 167936, 2048, 32, 65536, 1410000, 1593000,
     5120, 40 * MIB, 79 * GIB},
    // No table is of its architecture.
    {"rtx3090", "NVIDIA GeForce RTX 3090", 8, 6, 82, 101376, 102400, 1536, 16, 65536, 1695000,
     9751000, 384, 6 * MIB, 23 * GIB},
    {"rtx4090", "NVIDIA GeForce RTX 4090", 8, 9, 128, 101376, 102400, 1536, 24, 65536, 2520000,
     10501000, 384, 72 * MIB, 23 * GIB},
};

std::vector<int> visible() {
  std::istringstream keys(getenv("RECORDING_CUDA_DEVICES") ? getenv("RECORDING_CUDA_DEVICES") : "h200");
  int count = 0;
  for (std::string key; keys >> key;) ++count;
  std::vector<int> numbers;
  const char *chosen = getenv("CUDA_VISIBLE_DEVICES");
  if (!chosen) {
    for (int number = 0; number < count; ++number) numbers.push_back(number);
    return numbers;
  }
  std::istringstream words(chosen);
  for (std::string word; std::getline(words, word, ',');) {
    int number = word.empty() ? -1 : atoi(word.c_str());
    if (number < 0 || number >= count) break;  // CUDA ignores what follows an invalid one
    numbers.push_back(number);
  }
  return numbers;
}

std::vector<Device> read() {
  std::istringstream keys(getenv("RECORDING_CUDA_DEVICES") ? getenv("RECORDING_CUDA_DEVICES") : "h200");
  std::vector<Device> all, result;
  for (std::string key; keys >> key;)
    for (const Device &known : KNOWN)
      if (known.key == key) all.push_back(known);
  if (const char *mib = getenv("RECORDING_CUDA_MEMORY_MIB"))
    for (Device &device : all) device.memory_bytes = strtoull(mib, nullptr, 10) * MIB;
  for (int number : visible())
    if (number < static_cast<int>(all.size())) result.push_back(all[number]);
  return result;
}

}  // namespace

thread_local int current_device = 0;

const std::vector<Device> &devices() {
  static const std::vector<Device> found = read();
  return found;
}

int physical(int index) {
  static const std::vector<int> numbers = visible();
  return numbers.at(index);
}

}  // namespace recording
