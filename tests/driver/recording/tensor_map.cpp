#include "tensor_map.h"

#include <cstring>

namespace recording {

namespace {

constexpr u64 MARK = 0x7a7a7a7a00000000ULL;

int element_bytes(CUtensorMapDataType type) {
  // U8 U16 U32 I32 U64 I64 F16 F32 F64 BF16 F32_FTZ TF32 TF32_FTZ
  static const int bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  return static_cast<size_t>(type) < sizeof bytes / sizeof *bytes ? bytes[type] : 1;
}

u64 most_inner_bytes(CUtensorMapSwizzle swizzle) {
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_32B: return 32;
    case CU_TENSOR_MAP_SWIZZLE_64B: return 64;
    case CU_TENSOR_MAP_SWIZZLE_128B: return 128;
    default: return 1u << 30;
  }
}

u64 last_byte(const TensorMap &map) {
  u64 offset = map.sizes[0] * element_bytes(map.type);
  for (unsigned i = 1; i < map.rank; ++i) offset += map.strides[i - 1] * (map.sizes[i] - 1);
  return offset;
}

std::string broken_rules(const CUtensorMap *to, const TensorMap &map) {
  std::string broken;
  auto demand = [&](bool holds, const std::string &rule) {
    if (!holds) broken += (broken.empty() ? "" : "; ") + rule;
  };
  demand(reinterpret_cast<u64>(to) % 64 == 0, "the map must be aligned to 64 bytes");
  demand(map.address % 16 == 0, "globalAddress must be aligned to 16 bytes");
  demand(map.rank >= 1 && map.rank <= 5, "the rank must be from 1 to 5");
  if (!broken.empty()) return broken;
  for (unsigned i = 0; i < map.rank; ++i) {
    demand(map.sizes[i] >= 1 && map.sizes[i] <= 1ULL << 32, "globalDim must be from 1 to 2^32");
    demand(map.box[i] >= 1 && map.box[i] <= 256, "boxDim must be from 1 to 256");
    demand(map.element_strides[i] >= 1 && map.element_strides[i] <= 8, "elementStrides must be from 1 to 8");
  }
  for (unsigned i = 0; i + 1 < map.rank; ++i)
    demand(map.strides[i] % 16 == 0 && map.strides[i] < 1ULL << 40,
           "globalStrides must be multiples of 16 below 2^40");
  if (map.interleave == CU_TENSOR_MAP_INTERLEAVE_NONE) {
    u64 inner = static_cast<u64>(map.box[0]) * element_bytes(map.type);
    demand(inner <= most_inner_bytes(map.swizzle), "the inner box must fit the swizzle");
    demand(inner % 16 == 0, "the inner box must be a multiple of 16 bytes");
  }
  demand(!map.fill || map.type >= CU_TENSOR_MAP_DATA_TYPE_FLOAT16, "only floats can be filled with NaN");
  u64 begin = 0, size = 0;
  bool live = allocation_of(map.address, &begin, &size);
  demand(live, "globalAddress must be live device memory");
  // CUDA does not check this. Places in packed sequences (flashgen/kernels/descriptors.py) count modulo 2^64 bytes: only
  // coordinates say where a box lies.
  bool packed = map.rank == 5 && map.strides[3] >= 1ULL << 34;
  demand(!live || packed || map.address + last_byte(map) <= begin + size, "the tensor must lie in its allocation");
  return broken;
}

}  // namespace

int encode(CUtensorMap *to, const TensorMap &map) {
  if (!quiet()) {
    std::string broken = broken_rules(to, map);
    std::vector<u64> sizes(map.sizes, map.sizes + map.rank), strides(map.strides, map.strides + map.rank - 1);
    std::vector<int> box(map.box, map.box + map.rank);
    Line("tensor_map")
        .number("type", map.type)
        .number("address", map.address)
        .numbers("sizes", sizes)
        .numbers("strides", strides)
        .numbers("box", box)
        .number("swizzle", map.swizzle)
        .number("fill", map.fill)
        .text("broken", broken)
        .write();
    if (!broken.empty()) {
      fault("cuTensorMapEncodeTiled: " + broken);
      return INVALID_VALUE;
    }
  }
  memset(to, 0, sizeof *to);
  unsigned rank = map.rank;
  u64 words[16] = {map.address, MARK | rank, static_cast<u64>(map.swizzle) << 32 | map.type};
  for (unsigned i = 0; i < rank; ++i) words[3 + i] = map.sizes[i];
  for (unsigned i = 0; i + 1 < rank; ++i) words[8 + i] = map.strides[i];
  for (unsigned i = 0; i < rank; ++i) words[12] |= static_cast<u64>(map.box[i] - 1) << 8 * i;
  memcpy(to, words, sizeof *to);
  return OK;
}

bool is_tensor_map(const unsigned char *bytes) {
  u64 word;
  memcpy(&word, bytes + 8, sizeof word);
  return (word & ~0xffffffffULL) == MARK;
}

u64 address_of_map(const unsigned char *bytes) {
  u64 address;
  memcpy(&address, bytes, sizeof address);
  return address;
}

}  // namespace recording
