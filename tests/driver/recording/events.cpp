// Writes events, one JSON object a line.
#include "recorder.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <unistd.h>

namespace recording {

namespace {

std::mutex mutex;

// The log of this process; after a fork the child opens its own.
FILE *log_file() {
  static FILE *file = nullptr;
  static pid_t owner = 0;
  if (owner != getpid()) {
    owner = getpid();
    file = nullptr;
    if (const char *path = getenv("RECORDING_CUDA_LOG")) {
      file = fopen((std::string(path) + "." + std::to_string(owner)).c_str(), "a");
      if (file) setvbuf(file, nullptr, _IOLBF, 1 << 16);
    }
  }
  return file;
}

std::string quoted(const std::string &text) {
  std::string result = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (static_cast<unsigned char>(c) >= 32) result += c;
  }
  return result + "\"";
}

}  // namespace

Line::Line(const char *event) : line_("{\"event\":" + quoted(event)) {}

Line &Line::raw(const char *key, const std::string &value) {
  line_ += "," + quoted(key) + ":" + value;
  return *this;
}

Line &Line::text(const char *key, const std::string &value) { return raw(key, quoted(value)); }

Line &Line::number(const char *key, u64 value) { return raw(key, std::to_string(value)); }

Line &Line::texts(const char *key, const std::vector<std::string> &values) {
  std::string list;
  for (const auto &value : values) list += (list.empty() ? "" : ",") + quoted(value);
  return raw(key, "[" + list + "]");
}

void Line::write() const {
  if (quiet()) return;
  std::lock_guard<std::mutex> guard(mutex);
  if (FILE *file = log_file()) fprintf(file, "%s}\n", line_.c_str());
}

bool quiet() {
  static const bool is_quiet = getenv("RECORDING_CUDA_QUIET") != nullptr;
  return is_quiet;
}

void fault(const std::string &broken) {
  Line("fault").text("broken", broken).write();
  if (getenv("RECORDING_CUDA_LOUD")) fprintf(stderr, "recording CUDA: %s\n", broken.c_str());
}

void call(const char *function) {
  if (!quiet()) Line("call").text("function", function).write();
}

const char *sentence(int error) {
  switch (error) {
    case OK: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case NOT_INITIALIZED: return "initialization error";
    case NO_DEVICE: return "no CUDA-capable device is detected";
    case INVALID_DEVICE: return "invalid device ordinal";
    case INVALID_IMAGE: return "device kernel image is invalid";
    case INVALID_CONTEXT: return "invalid device context";
    case INVALID_HANDLE: return "invalid resource handle";
    case NOT_FOUND: return "named symbol not found";
    case NOT_READY: return "device not ready";
    case ILLEGAL_ADDRESS: return "an illegal memory access was encountered";
    case OUT_OF_RESOURCES: return "too many resources requested for launch";
    case LAUNCH_FAILED: return "unspecified launch failure";
    case CAPTURE_UNSUPPORTED: return "operation not permitted when stream is capturing";
    case CAPTURE_INVALIDATED: return "operation failed due to a previous error during capture";
    case UNKNOWN: return "unknown error";
    default: return nullptr;
  }
}

}  // namespace recording

// The symbols that build.py defines for libraries that are not modelled call this.
API void recording_unmodelled(const char *function) {
  recording::Line("unmodelled").text("function", function).write();
}

// A test writes where something begins.
API void recording_mark(const char *text) { recording::Line("mark").text("text", text).write(); }
