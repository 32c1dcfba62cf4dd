"""Builds the recording libcuda.so.1 and libcudart.so.13, and empty stand-ins of the other CUDA
libraries that torch is linked against.

    python build.py TORCH HEADERS OUT

TORCH: the folder of the CUDA build of torch; HEADERS: that of cuda_runtime_api.h of the same major
version; OUT: where the libraries go. The compiler is $CXX, or c++.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
DRIVER, RUNTIME = "libcuda.so.1", "libcudart.so.13"
DRIVER_PARTS = (
    "events devices memory time captures failures cubin tensor_map launch driver_api"
).split()

LOADED_BY_NAME = "libcurand.so.10 libcusparse.so.12 libcufft.so.12 libcublasLt.so.13".split()
"""Libraries that torch is linked against without needing a symbol of them."""

UNVERSIONED = {
    "nccl": "libnccl.so.2",
    "cuFile": "libcufile.so.0",
    "cusparseLt": "libcusparseLt.so.0",
    "nvshmem": "libnvshmem_host.so.3",
}
"""The library of symbols without a version, by how they begin."""

CUDNN = {"cudnnGetVersion": "return 99000;", "cudnnGetCudartVersion": "return 13000;"}
"""torch wants a cuDNN as new as the one it was compiled with: 9.19 in 2.11, 9.20 in 2.13."""

CUDNN_PROPERTY = """\
extern "C" int cudnnGetProperty(int which, int *value) {
  *value = which == 0 ? 9 : which == 1 ? 90 : 0;
  return 0;
}
"""


def main(torch: Path, headers: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    # crt/host_defines.h, which the headers include, comes with Triton.
    include = [f"-I{HERE}", f"-I{headers}", "-idirafter", str(_triton_include())]
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", *include]
    parts = [str(HERE / f"{name}.cpp") for name in DRIVER_PARTS]
    _compile([*flags, *parts, "-lpthread"], out / DRIVER)
    wanted = wanted_symbols(torch)
    runtime = str(HERE / "runtime_api.cpp")
    have = set(re.findall(r"^API [\w *]+?\**(\w+)\(", (HERE / "runtime_api.cpp").read_text(), re.M))
    missing = out / "runtime_missing.cpp"
    missing.write_text(_stand_ins(wanted.pop(RUNTIME) - have))
    _compile([*flags, runtime, str(missing), *_linked(out, RUNTIME)], out / RUNTIME)
    for library, names in wanted.items():
        source = out / "stand_in.cpp"
        text = _stand_ins(names)
        source.write_text(text + CUDNN_PROPERTY if library.startswith("libcudnn") else text)
        _compile([*flags, str(source), *_linked(out, library)], out / library)


def wanted_symbols(torch: Path) -> dict[str, set[str]]:
    """The symbols that torch's libraries need of each CUDA library, the driver's left out."""
    wanted: dict[str, set[str]] = defaultdict(set)
    for library in LOADED_BY_NAME:
        wanted[library] = set()
    for path in sorted((torch / "lib").glob("*.so")):
        listed = subprocess.run(
            ["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True
        )
        for line in listed.stdout.splitlines():
            name, _, version = line.split()[-1].partition("@")
            library = version.lstrip("@")
            if re.match(r"lib(cu|nccl|nvshmem|nvrtc)", library):
                wanted[library].add(name)
            elif library == "NVSHMEM":
                wanted["libnvshmem_host.so.3"].add(name)
            elif not library:
                for begin, of in UNVERSIONED.items():
                    if name.startswith(begin):
                        wanted[of].add(name)
    wanted["libcudnn.so.9"].discard("cudnnGetProperty")
    return wanted


def _stand_ins(names: set[str]) -> str:
    """Functions that record that they were called, and return 0."""
    text = 'extern "C" void recording_unmodelled(const char *);\n'
    for name in sorted(names):
        body = CUDNN.get(name, f'recording_unmodelled("{name}"); return 0;')
        text += f'extern "C" long {name}() {{ {body} }}\n'
    return text


def _linked(out: Path, library: str) -> list[str]:
    """Against the driver, with the version that symbols of this library have."""
    version = "NVSHMEM" if "nvshmem" in library else library
    script = out / "version.map"
    script.write_text(f"{version} {{ global: *; }};\n")
    return [f"-Wl,--version-script,{script}", f"-L{out}", f"-l:{DRIVER}"]


def _compile(arguments: list[str], out: Path) -> None:
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *arguments, "-o", str(out), f"-Wl,-soname,{out.name}"], check=True)


def _triton_include() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends/nvidia/include"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
