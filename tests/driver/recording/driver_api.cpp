// libcuda.so.1: the entry points of the driver API that torch and Triton call.
#include "cubin.h"
#include "launch.h"
#include "recorder.h"
#include "tensor_map.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <set>

using namespace recording;

namespace {

std::mutex mutex;
std::set<Module *> modules;
std::set<Kernel *> kernels;

std::atomic<bool> initialized{false};
thread_local bool has_context = false;

// The primary context of a device is a number above this.
constexpr u64 CONTEXTS = 0x1000;
CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(CONTEXTS + device); }
int device_of_context(CUcontext context) { return static_cast<int>(reinterpret_cast<u64>(context) - CONTEXTS); }

CUresult result(int error) { return static_cast<CUresult>(error); }

// The kernel of a handle; null if it is none.
Kernel *kernel_of(CUfunction handle) {
  auto kernel = reinterpret_cast<Kernel *>(handle);
  if (quiet()) return kernel;
  std::lock_guard<std::mutex> guard(mutex);
  return kernels.count(kernel) ? kernel : nullptr;
}

}  // namespace

void recording::initialize() { initialized = true; }

void recording::make_current(int device) {
  initialize();
  current_device = device;
  has_context = true;
}

// ---- errors, version, devices

API CUresult cuInit(unsigned) {
  initialize();
  return result(device_is_gone() ? NO_DEVICE : OK);
}

API CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

API CUresult cuGetErrorString(CUresult error, const char **text) {
  static thread_local char other[32];
  *text = sentence(error);
  if (!*text) {
    snprintf(other, sizeof other, "error %d", static_cast<int>(error));
    *text = other;
  }
  return CUDA_SUCCESS;
}

API CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }

API CUresult cuDeviceGetCount(int *count) {
  if (!initialized) return CUDA_ERROR_NOT_INITIALIZED;
  *count = device_is_gone() ? 0 : static_cast<int>(devices().size());
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int index) {
  if (!initialized) return CUDA_ERROR_NOT_INITIALIZED;
  if (index < 0 || index >= static_cast<int>(devices().size())) return CUDA_ERROR_INVALID_DEVICE;
  *device = index;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice number) {
  if (!initialized) return CUDA_ERROR_NOT_INITIALIZED;
  const Device &device = devices().at(number);
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 49152; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = device.shared_per_block; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = device.shared_per_sm; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = device.registers_per_sm; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = device.sms; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = device.clock_khz; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = device.memory_clock_khz; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = device.memory_bus_bits; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = device.major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = device.minor; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = device.threads_per_sm; break;
    default: *value = 1;
  }
  return CUDA_SUCCESS;
}

// ---- contexts: only the primary one of each device

API CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = has_context ? context_of(current_device) : nullptr;
  return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context) {
  has_context = context != nullptr;
  if (has_context) current_device = device_of_context(context);
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *device) {
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  *device = current_device;
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = context_of(device);
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) {
  *flags = 0;
  *active = has_context;
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetLimit(size_t *value, CUlimit) {
  *value = 1 << 20;
  return CUDA_SUCCESS;
}

API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }

API CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
  if (!is_device(address)) return CUDA_ERROR_INVALID_VALUE;
  if (!quiet() && !allocation_of(address, nullptr, nullptr)) {
    fault("cuPointerGetAttribute of freed memory");
    return CUDA_ERROR_INVALID_VALUE;
  }
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: memcpy(value, &address, sizeof address); break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *static_cast<unsigned *>(value) = CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int *>(value) = device_of(address); break;
    default: memset(value, 0, 8);
  }
  return CUDA_SUCCESS;
}

// ---- modules and functions

API CUresult cuModuleLoadData(CUmodule *handle, const void *bytes) {
  if (lost()) return result(lost());
  if (!has_context) {
    fault("a module was loaded without a context");
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  std::unique_ptr<Module> module = parse_cubin(bytes);
  if (!module) {
    fault("a module is no cubin");
    return CUDA_ERROR_INVALID_IMAGE;
  }
  std::lock_guard<std::mutex> guard(mutex);
  for (auto &[name, kernel] : module->kernels) {
    kernels.insert(kernel.get());
    std::vector<int> sizes;
    for (const Parameter &parameter : kernel->parameters) sizes.push_back(parameter.size);
    Line("load")
        .text("kernel", name)
        .number("device", current_device)
        .number("registers", kernel->registers)
        .number("local_bytes", kernel->local_bytes)
        .number("static_shared", kernel->static_shared)
        .number("threads_that_fit", kernel->threads_that_fit())
        .numbers("parameter_sizes", sizes)
        .write();
  }
  modules.insert(module.get());
  *handle = reinterpret_cast<CUmodule>(module.release());
  return CUDA_SUCCESS;
}

API CUresult cuModuleLoad(CUmodule *handle, const char *path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), {}};
  if (bytes.empty()) return CUDA_ERROR_FILE_NOT_FOUND;
  return cuModuleLoadData(handle, bytes.data());
}

API CUresult cuModuleLoadDataEx(CUmodule *handle, const void *bytes, unsigned, CUjit_option *, void **) {
  return cuModuleLoadData(handle, bytes);
}

API CUresult cuModuleUnload(CUmodule handle) {
  std::lock_guard<std::mutex> guard(mutex);
  auto module = reinterpret_cast<Module *>(handle);
  if (!modules.count(module)) return CUDA_ERROR_INVALID_HANDLE;
  for (auto &[name, kernel] : module->kernels) kernel->unloaded = true;  // a launch of it is a fault
  return CUDA_SUCCESS;
}

API CUresult cuModuleGetFunction(CUfunction *handle, CUmodule from, const char *name) {
  std::lock_guard<std::mutex> guard(mutex);
  auto &found = reinterpret_cast<Module *>(from)->kernels;
  auto kernel = found.find(name);
  if (kernel == found.end()) return CUDA_ERROR_NOT_FOUND;
  *handle = reinterpret_cast<CUfunction>(kernel->second.get());
  return CUDA_SUCCESS;
}

API CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction handle) {
  Kernel *kernel = kernel_of(handle);
  if (!kernel) return CUDA_ERROR_INVALID_HANDLE;
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = kernel->registers; break;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = kernel->local_bytes; break;
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = kernel->threads_that_fit(); break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = kernel->static_shared; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}

API CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  Kernel *kernel = kernel_of(handle);
  if (!kernel) return CUDA_ERROR_INVALID_HANDLE;
  if (attribute >= CU_FUNC_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;  // of newer drivers: Triton 3.9 tries one
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    if (value + kernel->static_shared > devices()[current_device].shared_per_block) {
      fault("dynamic shared memory of " + kernel->name + " above the device's limit");
      return CUDA_ERROR_INVALID_VALUE;
    }
    kernel->dynamic_shared_limit = value;
  }
  return CUDA_SUCCESS;
}

API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

API CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction, const CUlaunchConfig *) {
  *count = devices()[current_device].sms;
  return CUDA_SUCCESS;
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction, int, size_t) {
  *count = 1;
  return CUDA_SUCCESS;
}

// ---- tensor maps

API CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *sizes,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *element_strides,
    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
    CUtensorMapFloatOOBfill fill) {
  return result(encode(map, {type, rank, reinterpret_cast<u64>(address), sizes, strides, box, element_strides,
                             interleave, swizzle, fill}));
}

// ---- launches

API CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction handle, void **parameters, void **) {
  Kernel *kernel = kernel_of(handle);
  if (lost()) return result(lost());
  if (!kernel || !has_context) {
    fault("launch of no kernel, or without a context");
    return CUDA_ERROR_INVALID_HANDLE;
  }
  unsigned cluster = 0;
  bool pdl = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute &attribute = config->attrs[i];
    if (attribute.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) cluster = attribute.value.clusterDim.x;
    if (attribute.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
      pdl = attribute.value.programmaticStreamSerializationAllowed;
  }
  return result(launch(*kernel,
                       {{config->gridDimX, config->gridDimY, config->gridDimZ},
                        {config->blockDimX, config->blockDimY, config->blockDimZ},
                        cluster,
                        pdl,
                        config->sharedMemBytes,
                        reinterpret_cast<u64>(config->hStream)},
                       parameters));
}

API CUresult cuLaunchKernel(CUfunction kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                            unsigned bz, unsigned shared, CUstream stream, void **parameters, void **extra) {
  CUlaunchConfig config{};
  config.gridDimX = gx, config.gridDimY = gy, config.gridDimZ = gz;
  config.blockDimX = bx, config.blockDimY = by, config.blockDimZ = bz;
  config.sharedMemBytes = shared;
  config.hStream = stream;
  return cuLaunchKernelEx(&config, kernel, parameters, extra);
}

API CUresult cuLaunchCooperativeKernel(CUfunction kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                       unsigned by, unsigned bz, unsigned shared, CUstream stream, void **parameters) {
  return cuLaunchKernel(kernel, gx, gy, gz, bx, by, bz, shared, stream, parameters, nullptr);
}

// ---- captures and waiting

API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = static_cast<CUstreamCaptureStatus>(capture_status(reinterpret_cast<u64>(stream), nullptr));
  return CUDA_SUCCESS;
}

API CUresult cuCtxSynchronize() {
  call("cuCtxSynchronize");
  if (int error = forbidden_in_capture("cuCtxSynchronize")) return result(error);
  wait_until(device_is_done(current_device));
  return result(synchronized());
}
