"""Fetches the Python sources of inference engines and of xformers: python -m tests.engines.sources .venv/engines

Their wheels pin other versions of torch, and have extensions that need a GPU. What tests import of them needs neither.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from pathlib import Path

VLLM, SGLANG, XFORMERS = "0.33.0", "0.5.23", "0.0.35"
VLLM_SHA256 = "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"
REFERENCE = "tests/kernels/attention/test_triton_unified_attention.py"
HERE = Path(__file__).parent


def pip(*words: str) -> str:
    command = [sys.executable, "-m", "pip", *words, "--disable-pip-version-check"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def vllm(folder: Path) -> None:
    """The source distribution, from where pip finds it: pip itself would build it, which takes a CUDA compiler."""
    name = f"vllm-{VLLM}"
    link = re.search(
        rf"Found link (\S+/{re.escape(name)}\.tar\.gz)", pip("index", "versions", "vllm", "-vv")
    )
    if link is None:
        sys.exit(f"no package index has {name}.tar.gz")
    file = folder / f"{name}.tar.gz"
    file.write_bytes(urllib.request.urlopen(link[1], timeout=300).read())
    if hashlib.sha256(file.read_bytes()).hexdigest() != VLLM_SHA256:
        sys.exit(f"{file} is not the {name} that the tests were written for")
    with tarfile.open(file) as archive:
        for member in archive.getmembers():
            path = member.name.removeprefix(f"{name}/")
            if path == REFERENCE:
                path = "ref_paged_attn.py"
            elif not re.match(r"vllm(\.egg-info/|/.*\.(py|json)$)", path):
                continue
            if member.isfile():
                member.name = path
                archive.extract(member, folder / "vllm", filter="data")
    file.unlink()


def wheel(folder: Path, name: str, version: str) -> None:
    """The Python of a wheel, without its extensions."""
    pip("download", "--quiet", "--no-deps", "--dest", str(folder), f"{name}=={version}")
    (file,) = folder.glob(f"{name}-*.whl")
    with zipfile.ZipFile(file) as archive:
        python = [each for each in archive.namelist() if not each.endswith(".so")]
        archive.extractall(folder / name, python)
    file.unlink()


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    pip(
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(folder / "needed"),
        "-r",
        str(HERE / "requirements.txt"),
    )
    vllm(folder)
    wheel(folder, "sglang", SGLANG)
    wheel(folder, "xformers", XFORMERS)


if __name__ == "__main__":
    main()
