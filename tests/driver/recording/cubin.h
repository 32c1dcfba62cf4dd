// What a cubin says of its kernels, and the handles that stand for them.
#pragma once

#include "recorder.h"

#include <map>
#include <memory>

namespace recording {

struct Parameter {
  int ordinal, offset, size;
};

struct Kernel {
  std::string name;
  std::vector<Parameter> parameters;  // in their order
  int registers = 0, local_bytes = 0, static_shared = 0;
  int max_threads = 0, required_threads = 0;  // .maxntid and .reqntid; 0 where the cubin has none
  int dynamic_shared_limit = 49152;           // until the program raises it
  bool unloaded = false;
  int threads_that_fit() const;  // a block's, by its registers and what the cubin says
};

struct Module {
  std::map<std::string, std::unique_ptr<Kernel>> kernels;
};

// The kernels of a cubin; null if these bytes are none.
std::unique_ptr<Module> parse_cubin(const void *bytes);

}  // namespace recording
