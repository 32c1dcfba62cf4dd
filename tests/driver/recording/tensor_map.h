// Tensor maps: what the page of cuTensorMapEncodeTiled in the CUDA driver API demands of them.
#pragma once

#include "recorder.h"

#include "cuda.h"

namespace recording {

struct TensorMap {
  CUtensorMapDataType type;
  unsigned rank;
  u64 address;
  const cuuint64_t *sizes, *strides;  // strides in bytes, of all dimensions but the innermost
  const cuuint32_t *box, *element_strides;
  CUtensorMapInterleave interleave;
  CUtensorMapSwizzle swizzle;
  CUtensorMapFloatOOBfill fill;
};

// Writes the map, which says nothing to hardware: its address and a mark, then what was given.
int encode(CUtensorMap *map, const TensorMap &given);

bool is_tensor_map(const unsigned char *bytes);   // whether encode() wrote these 128 bytes
u64 address_of_map(const unsigned char *bytes);   // of the tensor it describes

}  // namespace recording
