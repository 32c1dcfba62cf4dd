// libcudart.so.13: the entry points of the runtime API that torch calls. torch's own kernels are
// recorded by their names, and compute nothing.
#include "recorder.h"

#include "cuda_runtime_api.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <mutex>

using namespace recording;

namespace {

constexpr double COPY_S = 2e-6, FILL_S = 1.5e-6, EVENT_S = 0.5e-6;  // what each takes at least
constexpr double TORCH_KERNEL_S = 3e-6;                             // a guess: they are not timed
constexpr double BANDWIDTH = 4.3e12;                                // bytes a second
constexpr size_t LARGE = 1 << 22;  // device memory is not filled or copied beyond: it would be touched

thread_local cudaError_t last_error = cudaSuccess;
std::mutex mutex;
std::map<const void *, std::string> torch_kernels;

cudaError_t result(int error) {
  if (!error) error = lost();
  if (error) last_error = static_cast<cudaError_t>(error);
  return static_cast<cudaError_t>(error);
}

u64 handle(const void *pointer) { return reinterpret_cast<u64>(pointer); }

// Waits for the device; an error if a capture forbids it.
cudaError_t wait_for_device(const char *function) {
  call(function);
  if (int error = forbidden_in_capture(function)) return result(error);
  wait_until(device_is_done(current_device));
  return result(synchronized());
}

}  // namespace

// ---- errors and versions

API cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = static_cast<cudaError_t>(lost());
  return error;
}

API cudaError_t cudaPeekAtLastError() { return last_error; }

API const char *cudaGetErrorString(cudaError_t error) {
  const char *text = sentence(error);
  return text ? text : "an error that is not modelled";
}

API const char *cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

API cudaError_t cudaDriverGetVersion(int *version) {
  *version = 13000;
  return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

// ---- devices

API cudaError_t cudaGetDeviceCount(int *count) {
  initialize();
  *count = device_is_gone() ? 0 : static_cast<int>(devices().size());
  return *count ? cudaSuccess : result(cudaErrorNoDevice);
}

API cudaError_t cudaGetDevice(int *device) {
  *device = current_device;
  return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= static_cast<int>(devices().size())) return result(cudaErrorInvalidDevice);
  make_current(device);
  return result(OK);
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int number) {
  const Device &device = devices().at(number);
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "%s", device.name.c_str());
  for (int i = 0; i < 16; ++i) properties->uuid.bytes[i] = static_cast<char>(16 * physical(number) + i);
  properties->totalGlobalMem = device.memory_bytes;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = device.shared_per_block;
  properties->sharedMemPerMultiprocessor = device.shared_per_sm;
  properties->regsPerBlock = properties->regsPerMultiprocessor = device.registers_per_sm;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->major = device.major;
  properties->minor = device.minor;
  properties->textureAlignment = 512;
  properties->multiProcessorCount = device.sms;
  properties->l2CacheSize = static_cast<int>(device.l2_bytes);
  properties->maxThreadsPerMultiProcessor = device.threads_per_sm;
  properties->maxBlocksPerMultiProcessor = device.blocks_per_sm;
  properties->memoryBusWidth = device.memory_bus_bits;
  properties->unifiedAddressing = properties->concurrentKernels = 1;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int number) {
  const Device &device = devices().at(number);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = device.shared_per_block; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = device.shared_per_sm; break;
    case cudaDevAttrMultiProcessorCount: *value = device.sms; break;
    case cudaDevAttrComputeCapabilityMajor: *value = device.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = device.minor; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrClockRate: *value = device.clock_khz; break;
    case cudaDevAttrMemoryClockRate: *value = device.memory_clock_khz; break;
    default: *value = 1;
  }
  return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
  *can = 0;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int number) {
  snprintf(text, size, "0000:%02x:00.0", physical(number) + 1);
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

API cudaError_t cudaDeviceSynchronize() { return wait_for_device("cudaDeviceSynchronize"); }

// ---- memory

API cudaError_t cudaMalloc(void **address, size_t size) {
  make_current(current_device);
  call("cudaMalloc");
  if (int error = forbidden_in_capture("cudaMalloc")) return result(error);
  return result(allocate(current_device, size, reinterpret_cast<u64 *>(address)));
}

API cudaError_t cudaFree(void *address) {
  make_current(current_device);
  if (!address) return result(OK);
  call("cudaFree");
  if (int error = forbidden_in_capture("cudaFree")) return result(error);
  return result(release(handle(address)));
}

API cudaError_t cudaMallocAsync(void **address, size_t size, cudaStream_t) {
  call("cudaMallocAsync");
  return result(allocate(current_device, size, reinterpret_cast<u64 *>(address)));
}

API cudaError_t cudaFreeAsync(void *address, cudaStream_t) { return result(release(handle(address))); }

API cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
  u64 bytes[2];
  memory_left(current_device, &bytes[0], &bytes[1]);
  *left = bytes[0];
  *total = bytes[1];
  return result(OK);
}

API cudaError_t cudaHostAlloc(void **address, size_t size, unsigned) {
  call("cudaHostAlloc");
  return posix_memalign(address, 4096, size ? size : 1) ? result(OUT_OF_MEMORY) : cudaSuccess;
}

API cudaError_t cudaFreeHost(void *address) {
  free(address);
  return cudaSuccess;
}

API cudaError_t cudaHostRegister(void *, size_t, unsigned) { return cudaSuccess; }
API cudaError_t cudaHostUnregister(void *) { return cudaSuccess; }

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
  memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -2;
  if (!is_device(handle(pointer))) return cudaSuccess;
  attributes->type = cudaMemoryTypeDevice;
  attributes->device = device_of(handle(pointer));
  attributes->devicePointer = const_cast<void *>(pointer);
  return cudaSuccess;
}

namespace {

void copy(void *to, const void *from, size_t size) {
  if (size > LARGE && is_device(handle(to)) && is_device(handle(from))) return;
  memcpy(host_view(handle(to)), host_view(handle(from)), size);
}

cudaError_t copy_later(void *to, const void *from, size_t size, cudaStream_t stream) {
  call("cudaMemcpyAsync");
  if (captured(handle(stream))) return cudaSuccess;
  enqueue(current_device, COPY_S + 2.0 * size / BANDWIDTH);
  copy(to, from, size);
  return result(OK);
}

}  // namespace

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  return copy_later(to, from, size, stream);
}

API cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t stream) {
  return copy_later(to, from, size, stream);
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind) {
  if (cudaError_t error = wait_for_device("cudaMemcpy")) return error;
  copy(to, from, size);
  return result(OK);
}

API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                  size_t height, cudaMemcpyKind, cudaStream_t stream) {
  call("cudaMemcpy2DAsync");
  if (captured(handle(stream))) return cudaSuccess;
  for (size_t i = 0; i < height; ++i)
    copy(static_cast<char *>(to) + i * to_pitch, static_cast<const char *>(from) + i * from_pitch, width);
  enqueue(current_device, COPY_S + 2.0 * width * height / BANDWIDTH);
  return result(OK);
}

API cudaError_t cudaMemset(void *to, int value, size_t size) {
  memset(host_view(handle(to)), value, size);
  return result(OK);
}

API cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
  call("cudaMemsetAsync");
  if (captured(handle(stream))) return cudaSuccess;
  enqueue(current_device, FILL_S + size / BANDWIDTH);
  if (size < LARGE) memset(host_view(handle(to)), value, size);
  return result(OK);
}

// ---- streams

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
  static u64 next = 0x2000;
  std::lock_guard<std::mutex> guard(mutex);
  *stream = reinterpret_cast<cudaStream_t>(next += 16);
  return cudaSuccess;
}

API cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

API cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) {
  *priority = 0;
  return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return result(forbidden_in_capture("cudaStreamQuery", handle(stream)));
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (int error = forbidden_in_capture("cudaStreamSynchronize", handle(stream))) return result(error);
  return wait_for_device("cudaStreamSynchronize");
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void *argument) {
  function(argument);
  return cudaSuccess;
}

// ---- captures and graphs

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return result(begin_capture(handle(stream), mode));
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  *mode = static_cast<cudaStreamCaptureMode>(exchange_capture_mode(*mode));
  return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
  *status = static_cast<cudaStreamCaptureStatus>(capture_status(handle(stream), nullptr));
  return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id,
                                         cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                         const cudaGraphEdgeData **edges, size_t *count) {
  u64 found = 0;
  *status = static_cast<cudaStreamCaptureStatus>(capture_status(handle(stream), &found));
  if (id) *id = found;
  if (graph) *graph = nullptr;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  u64 made = 0;
  int error = end_capture(handle(stream), &made);
  *graph = error ? nullptr : reinterpret_cast<cudaGraph_t>(made);
  return result(error);
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  u64 nodes = nodes_of(handle(graph));
  Line("replay").number("nodes", nodes).write();
  for (u64 i = 0; i < nodes; ++i) enqueue(current_device, kernel_seconds("", 1));
  return result(OK);
}

API cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *, size_t *count) {
  *count = nodes_of(handle(graph));
  return cudaSuccess;
}

API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t *, cudaGraphEdgeData *, size_t *count) {
  *count = 0;
  return cudaSuccess;
}

API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char *, unsigned) { return cudaSuccess; }

// ---- events

namespace {
struct Event {
  double second = 0;
};
Event *event_of(cudaEvent_t event) { return reinterpret_cast<Event *>(event); }
}  // namespace

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return result(OK);
}

API cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (captured(handle(stream))) return cudaSuccess;
  enqueue(current_device, EVENT_S);
  event_of(event)->second = device_is_done(current_device);
  return result(OK);
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

API cudaError_t cudaEventQuery(cudaEvent_t) {
  call("cudaEventQuery");
  return result(forbidden_in_capture("cudaEventQuery"));
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  call("cudaEventSynchronize");
  if (int error = forbidden_in_capture("cudaEventSynchronize")) return result(error);
  wait_until(event_of(event)->second);
  return result(synchronized());
}

API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  *milliseconds = static_cast<float>((event_of(to)->second - event_of(from)->second) * 1e3);
  return result(OK);
}

// ---- torch's own kernels, which its libraries register when they are loaded

API void **__cudaRegisterFatBinary(void *) {
  static void *binary;
  return &binary;
}
API void __cudaRegisterFatBinaryEnd(void **) {}
API void __cudaUnregisterFatBinary(void **) {}
API char __cudaInitModule(void **) { return 1; }
API void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}

API void __cudaRegisterFunction(void **, const char *host, char *, const char *name, int, void *, void *, void *, void *,
                                int *) {
  std::lock_guard<std::mutex> guard(mutex);
  torch_kernels[host] = name;
}

namespace {

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

cudaError_t launch_of_torch(const void *function, cudaStream_t stream, void **arguments) {
  if (quiet()) return cudaSuccess;
  if (lost()) return result(OK);
  std::string name;
  {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = torch_kernels.find(function);
    if (found != torch_kernels.end()) name = found->second;
  }
  bool is_captured = captured(handle(stream));
  Line("torch_kernel").text("name", name).number("captured", is_captured).write();
  double seconds = TORCH_KERNEL_S;
  if (name.find("spin_kernel") != std::string::npos)  // torch.cuda._sleep: its argument is cycles
    seconds = *static_cast<int64_t *>(arguments[0]) / (devices()[current_device].clock_khz * 1e3);
  if (!is_captured) enqueue(current_device, seconds);
  return result(OK);
}

}  // namespace

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t *>(stream) = last.stream;
  return cudaSuccess;
}

API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void *>(function));
  return cudaSuccess;
}

API cudaError_t cudaLaunchKernel(const void *function, dim3, dim3, void **arguments, size_t, cudaStream_t stream) {
  return launch_of_torch(function, stream, arguments);
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t function, dim3, dim3, void **arguments, size_t, cudaStream_t stream) {
  return launch_of_torch(function, stream, arguments);
}

API cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3, dim3, void **arguments, size_t,
                                            cudaStream_t stream) {
  return launch_of_torch(function, stream, arguments);
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
  return launch_of_torch(function, config->stream, arguments);
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 10 * devices()[current_device].major;
  attributes->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}

API cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *, int, size_t) {
  *count = 2;
  return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *, int, size_t, unsigned) {
  *count = 2;
  return cudaSuccess;
}

API cudaError_t cudaGetSymbolAddress(void **address, const void *) {
  return result(allocate(current_device, 4096, reinterpret_cast<u64 *>(address)));
}

API cudaError_t cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }

// ---- entry points of the driver

API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult *found) {
  static void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  *function = dlsym(driver, name);
  if (found) *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
