"""Machine code of other libraries: their wheels from PyPI, taken apart. CPU only, runs nothing.

A wheel is installed by pip into a folder that git ignores, and it must have the hash that stands
here. Its shared library holds a cubin for each source file and architecture; Triton's cuobjdump
takes them out. What a kernel computes follows from the template arguments in its name:
mainloop_fwd_sm90_tma_gmma_ws.hpp and mainloop_bwd_sm90_tma_gmma_ws.hpp in hopper/ of
Dao-AILab/flash-attention say in which order they stand.

To add a peer, add a row to PEERS.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.duel import Cell
from flashgen.compile import sass
from flashgen.compile.sass import Listing
from flashgen.errors import ToolchainError

ARCH = "sm_90a"
DECODE = "decode"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A wheel on PyPI: sha256 is that of the file, library the shared object inside it."""

    package: str
    version: str
    sha256: str
    library: str

    @property
    def label(self) -> str:
        """As pip names it."""
        return f"{self.package}=={self.version}"


FA3_FWD = Peer(
    package="fa3-fwd",
    version="0.0.3",
    sha256="44d26c6cfc69dde5a0f9c6bebbccbb96ed20e97bc8b9ddda638b0bf62e91b93d",
    library="fa3_fwd/_C.abi3.so",
)
XFORMERS = Peer(
    package="xformers",
    version="0.0.32.post2",
    sha256="3d1fefe0006eb00a730b3b197ff41aab085f1209b50419baab6152445f09e508",
    library="xformers/flash_attn_3/_C.so",
)
PEERS = {"forward": FA3_FWD, "backward": XFORMERS, DECODE: FA3_FWD}
"""Whose kernel each direction has; that of decode packs the queries of a group, and splits keys."""


def pattern_of(cell: Cell) -> re.Pattern[str]:
    """What the plain name of a cell's kernel matches, with groups br and bc, the rows of Q and K in
    a tile, and threads of the warps that multiply: in bfloat16, fixed lengths, no feature, one
    block a cluster.

    Flags of the forward, in order: causal, local, softcap, varlen, paged, append, Qv, P in
    registers, overlap within a warpgroup, packed groups, split, V by columns. Of the backward:
    causal, local, softcap, varlen, deterministic, and three that swap operands.
    """
    direction, dim, mask = cell
    causal, split = str(mask == "causal").lower(), str(direction == DECODE).lower()
    what, dim_v = "Fwd", f"{dim}, "
    flags = rf"{causal}, (false, ){{6}}\w+, \w+, {split}, {split}, false>"
    if direction == "backward":
        what, dim_v, flags = "Bwd", "", rf"{causal}, (false, ){{4}}"
    tile = (
        rf"tuple<1, 1, 1>, tuple<(?P<br>\d+), (?P<bc>\d+), {dim}>, {dim_v}bfloat16_t, float, Sm90"
    )
    last = rf"CollectiveEpilogue{what}<.*?, (?P<threads>\d+), (true|false)"
    return re.compile(rf"CollectiveMainloop{what}Sm90<[\d, ]+{tile}, {flags}.*?{last}")


def plain_name(mangled: str) -> str:
    """The name of a C++ function without its namespaces; "" for what is none. By the libstdc++ that
    torch needs, too.
    """
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.argtypes, demangle.restype = [ctypes.c_char_p] + [ctypes.c_void_p] * 3, ctypes.c_char_p
    name = (demangle(mangled.encode(), None, None, None) or b"").decode()
    return re.sub(r"\bC<(\d+)>", r"\1", re.sub(r"\w+::", "", name)).replace(" >", ">")


def fetch(peer: Peer, folder: Path) -> Path:
    """The peer's shared library in `folder`. Raises ToolchainError if pip cannot install it, or its
    hash is another one.
    """
    home = folder / f"{peer.package}-{peer.version}"
    return installed(home, [f"{peer.label} --hash=sha256:{peer.sha256}"]) / peer.library


def installed(home: Path, wheels: Sequence[str]) -> Path:
    """The folder `home` with these wheels and nothing that they need, filled by pip if it is not
    there. wheels: as in a file of requirements. Raises ToolchainError if pip cannot.
    """
    if home.exists():
        return home
    part, asked = (home.with_name(home.name + suffix) for suffix in (".part", ".txt"))
    shutil.rmtree(part, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    asked.write_text("\n".join(wheels) + "\n")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-compile", "--only-binary", ":all:", "--target", str(part)]
    done = subprocess.run([*command, "-r", str(asked)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ToolchainError(f"pip could not install {wheels[0]}: {done.stderr.strip()[-200:]}")
    part.rename(home)
    return home


def listing_of(cell: Cell, folder: Path) -> tuple[dict[str, int], Listing]:
    """The groups of pattern_of in the name of a cell's kernel, and its machine code. Raises
    ToolchainError if the library does not have it.
    """
    peer, pattern = PEERS[cell[0]], pattern_of(cell)
    for cubin, mangled, name in _kernels(fetch(peer, folder)):
        if found := pattern.search(name):
            sizes = {group: int(value) for group, value in found.groupdict().items()}
            return sizes, listing_in(cubin, mangled)
    raise ToolchainError(f"{peer.label} has no kernel of {cell}")


@functools.cache
def _kernels(library: Path) -> list[tuple[Path, str, str]]:
    """The kernels of a library: the files of their cubins, their names, and the plain ones."""
    folder = library.parent / "cubins"
    if not folder.exists():
        folder.mkdir()
        _cuobjdump("-xelf", ARCH, str(library.resolve()), folder=folder)
    files = sorted(folder.glob("*.cubin"))
    return [(file, name, plain_name(name)) for file in files for name in entry_points(file)]


def entry_points(cubin: Path) -> list[str]:
    """The kernels of a cubin: each has a section of code with its name."""
    names = re.findall(rb"\.text\.(\w+)", cubin.read_bytes())
    return [name.decode() for name in dict.fromkeys(names)]


def listing_in(cubin: Path, name: str) -> Listing:
    """The machine code of one kernel of a cubin that holds several."""
    text = _cuobjdump("-sass", "-fun", name, str(cubin))
    _, _, usage = _cuobjdump("-res-usage", str(cubin)).partition(f"Function {name}:")
    return sass.parse(f"{usage}\n{text}" if "REG:" in usage else text)


def _cuobjdump(*arguments: str, folder: Path | None = None) -> str:
    command = [str(sass.cuobjdump()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    if done.returncode != 0:
        raise ToolchainError(f"cuobjdump failed: {done.stderr.strip()[-200:]}")
    return done.stdout + done.stderr
