// Reads a cubin's ELF: sections .nv.info and .nv.info.KERNEL hold attributes, of which the names
// below are those that cuobjdump and nvdisasm print (EIATTR_...). An attribute has a byte for its
// format, one for its number, and two for its value, or in format 4 for the size of what follows.
#include "cubin.h"

#include <algorithm>
#include <cstring>
#include <elf.h>
#include <functional>

namespace recording {

namespace {

enum Attribute {
  MAX_THREADS = 0x05,
  REQUIRED_THREADS = 0x10,
  FRAME_SIZE = 0x11,
  KPARAM_INFO = 0x17,
  REGCOUNT = 0x2f,
};
constexpr int SIZED = 4;  // the format of attributes with a body

constexpr int SYSTEM_SHARED = 1024;  // of a block, on sm_80 and newer, counted in .nv.shared

template <class T>
T read(const unsigned char *at) {
  T value;
  memcpy(&value, at, sizeof value);
  return value;
}

using Visit = std::function<void(int attribute, const unsigned char *body, int size)>;

void attributes(const unsigned char *at, size_t size, const Visit &visit) {
  for (const unsigned char *end = at + size; at + 4 <= end;) {
    int length = at[0] == SIZED ? read<uint16_t>(at + 2) : 0;
    if (at[0] == SIZED) visit(at[1], at + 4, length);
    at += 4 + length;
  }
}

void attributes_of_kernel(Kernel &kernel, const unsigned char *section, size_t size) {
  attributes(section, size, [&](int attribute, const unsigned char *body, int) {
    if (attribute == KPARAM_INFO)
      kernel.parameters.push_back({read<uint16_t>(body + 4), read<uint16_t>(body + 6),
                                   static_cast<int>(read<uint32_t>(body + 8) >> 18)});
    if (attribute == MAX_THREADS)
      kernel.max_threads = read<int>(body) * read<int>(body + 4) * read<int>(body + 8);
    if (attribute == REQUIRED_THREADS) kernel.required_threads = read<int>(body);
  });
  std::sort(kernel.parameters.begin(), kernel.parameters.end(),
            [](const Parameter &a, const Parameter &b) { return a.ordinal < b.ordinal; });
}

class File {
 public:
  explicit File(const void *bytes) : bytes_(static_cast<const unsigned char *>(bytes)) {
    header_ = reinterpret_cast<const Elf64_Ehdr *>(bytes_);
    sections_ = reinterpret_cast<const Elf64_Shdr *>(bytes_ + header_->e_shoff);
  }
  bool valid() const { return memcmp(bytes_, ELFMAG, SELFMAG) == 0; }
  int count() const { return header_->e_shnum; }
  const Elf64_Shdr &section(int i) const { return sections_[i]; }
  const unsigned char *body(const Elf64_Shdr &section) const { return bytes_ + section.sh_offset; }
  std::string name(const Elf64_Shdr &section) const {
    return text(sections_[header_->e_shstrndx], section.sh_name);
  }
  std::string text(const Elf64_Shdr &strings, size_t at) const {
    return reinterpret_cast<const char *>(bytes_ + strings.sh_offset + at);
  }
  std::string symbol(unsigned number) const {
    for (int i = 0; i < count(); ++i) {
      if (sections_[i].sh_type != SHT_SYMTAB) continue;
      auto symbols = reinterpret_cast<const Elf64_Sym *>(body(sections_[i]));
      if (number < sections_[i].sh_size / sizeof(Elf64_Sym))
        return text(sections_[sections_[i].sh_link], symbols[number].st_name);
    }
    return "";
  }

 private:
  const unsigned char *bytes_;
  const Elf64_Ehdr *header_;
  const Elf64_Shdr *sections_;
};

}  // namespace

std::unique_ptr<Module> parse_cubin(const void *bytes) {
  File file(bytes);
  if (!file.valid()) return nullptr;
  auto module = std::make_unique<Module>();
  const std::string info = ".nv.info.", shared = ".nv.shared.";
  for (int i = 0; i < file.count(); ++i) {
    const auto &section = file.section(i);
    std::string name = file.name(section);
    if (name.rfind(info, 0) != 0) continue;
    auto kernel = std::make_unique<Kernel>();
    kernel->name = name.substr(info.size());
    attributes_of_kernel(*kernel, file.body(section), section.sh_size);
    module->kernels[kernel->name] = std::move(kernel);
  }
  auto find = [&](const std::string &name) -> Kernel * {
    auto found = module->kernels.find(name);
    return found == module->kernels.end() ? nullptr : found->second.get();
  };
  for (int i = 0; i < file.count(); ++i) {
    const auto &section = file.section(i);
    std::string name = file.name(section);
    if (name == ".nv.info")
      attributes(file.body(section), section.sh_size, [&](int attribute, const unsigned char *body, int size) {
        Kernel *kernel = size >= 8 ? find(file.symbol(read<uint32_t>(body))) : nullptr;
        if (kernel && attribute == REGCOUNT) kernel->registers = read<int>(body + 4);
        if (kernel && attribute == FRAME_SIZE) kernel->local_bytes = read<int>(body + 4);
      });
    Kernel *kernel = name.rfind(shared, 0) == 0 ? find(name.substr(shared.size())) : nullptr;
    if (kernel) kernel->static_shared = std::max(0, static_cast<int>(section.sh_size) - SYSTEM_SHARED);
  }
  if (module->kernels.empty()) return nullptr;
  return module;
}

int Kernel::threads_that_fit() const {
  // Registers are given to warps in units of 256, and each quarter of an SM has 16384 (Programming
  // Guide, "Compute Capabilities").
  int of_a_warp = std::max(256, ((registers + 7) / 8 * 8 * 32 + 255) / 256 * 256);
  int fit = std::min(1024, 16384 / of_a_warp * 4 * 32);
  if (max_threads) fit = std::min(fit, max_threads);
  if (required_threads) fit = std::min(fit, required_threads);
  return fit;
}

}  // namespace recording
