// A launch of a kernel from a cubin: checked, recorded, and put on the device's queue.
#pragma once

#include "cubin.h"

namespace recording {

struct Launch {
  unsigned grid[3], block[3];
  unsigned cluster;  // blocks; 0 where the launch names none
  bool pdl;  // may start before the kernel in front of it ends
  unsigned dynamic_shared;
  u64 stream;
};

// What cuLaunchKernelEx returns. It reads as many bytes of each parameter as the cubin declares.
int launch(const Kernel &kernel, const Launch &launch, void **parameters);

}  // namespace recording
