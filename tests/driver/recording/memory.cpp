// Device memory: a sparse file in memory for each device. The program sees its addresses, and a
// segmentation fault where host code touches them; this library sees the same bytes elsewhere.
#include "recorder.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace recording {

namespace {

constexpr u64 BASE = 0x7a0000000000ULL, SPAN = 1ULL << 38;  // of one device: 256 GiB
constexpr u64 GRAIN = 512, PAGE = 2ULL << 20;               // sizes and addresses of cudaMalloc
constexpr u64 RESERVED = 1ULL << 30;                        // what a context takes for itself

struct Arena {
  char *view = nullptr;
  u64 next = 0, used = 0;
  std::map<u64, u64> live;            // address -> size
  std::multimap<u64, u64> freed;      // size -> address
};

std::mutex mutex;
std::map<int, Arena> arenas;  // by the number of the visible device

u64 base_of(int device) { return BASE + SPAN * device; }

Arena &arena_of(int device) {
  Arena &arena = arenas[device];
  if (arena.view) return arena;
  int file = static_cast<int>(syscall(SYS_memfd_create, "recording", 0));
  void *at = reinterpret_cast<void *>(base_of(device));
  void *view = MAP_FAILED;
  if (file >= 0 && ftruncate(file, SPAN) == 0 &&
      mmap(at, SPAN, PROT_NONE, MAP_SHARED | MAP_FIXED_NOREPLACE | MAP_NORESERVE, file, 0) == at)
    view = mmap(nullptr, SPAN, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (view == MAP_FAILED) {
    perror("recording CUDA: memory");
    abort();
  }
  close(file);
  arena.view = static_cast<char *>(view);
  arena.next = base_of(device);
  return arena;
}

}  // namespace

bool is_device(u64 address) {
  return address >= BASE && address < BASE + SPAN * devices().size();
}

int device_of(u64 address) { return static_cast<int>((address - BASE) / SPAN); }

int allocate(int device, u64 size, u64 *address) {
  std::lock_guard<std::mutex> guard(mutex);
  Arena &arena = arena_of(device);
  size = size ? (size + GRAIN - 1) / GRAIN * GRAIN : GRAIN;
  if (arena.used + size + RESERVED > devices()[device].memory_bytes) return OUT_OF_MEMORY;
  auto same = arena.freed.find(size);
  if (same != arena.freed.end()) {
    *address = same->second;
    arena.freed.erase(same);
  } else {
    *address = (arena.next + PAGE - 1) / PAGE * PAGE;
    if (*address + size > base_of(device) + SPAN) return OUT_OF_MEMORY;
    arena.next = *address + size;
  }
  arena.live[*address] = size;
  arena.used += size;
  return OK;
}

int release(u64 address) {
  if (!address) return OK;
  std::lock_guard<std::mutex> guard(mutex);
  Arena *arena = is_device(address) ? &arena_of(device_of(address)) : nullptr;
  auto found = arena ? arena->live.find(address) : std::map<u64, u64>::iterator();
  if (!arena || found == arena->live.end()) {
    fault("memory that is not allocated was freed");
    return INVALID_VALUE;
  }
  auto [begin, size] = *found;
  arena->used -= size;
  madvise(arena->view + (begin - base_of(device_of(begin))), size, MADV_REMOVE);  // reads as zeros
  arena->freed.insert({size, begin});
  arena->live.erase(found);
  return OK;
}

bool allocation_of(u64 address, u64 *begin, u64 *size) {
  if (!is_device(address)) return false;
  std::lock_guard<std::mutex> guard(mutex);
  Arena &arena = arena_of(device_of(address));
  auto after = arena.live.upper_bound(address);
  if (after == arena.live.begin()) return false;
  auto found = std::prev(after);
  if (address >= found->first + found->second) return false;
  if (begin) *begin = found->first;
  if (size) *size = found->second;
  return true;
}

void *host_view(u64 address) {
  if (!is_device(address)) return reinterpret_cast<void *>(address);
  std::lock_guard<std::mutex> guard(mutex);
  int device = device_of(address);
  return arena_of(device).view + (address - base_of(device));
}

void memory_left(int device, u64 *left, u64 *total) {
  std::lock_guard<std::mutex> guard(mutex);
  *total = devices()[device].memory_bytes;
  *left = *total - RESERVED - arena_of(device).used;
}

}  // namespace recording
