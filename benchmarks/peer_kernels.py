"""Machine code of other libraries: their wheels from PyPI, taken apart. CPU only, runs nothing.

A wheel is installed by pip into a folder that git ignores, and it must have the hash that stands
here. Its shared library holds a cubin for each source file and architecture; Triton's cuobjdump
takes them out. What a kernel computes follows from its mangled name, which lists the template
arguments of FlashAttention-3's classes: mainloop_fwd_sm90_tma_gmma_ws.hpp and
mainloop_bwd_sm90_tma_gmma_ws.hpp in hopper/ of Dao-AILab/flash-attention say in which order.

To add a peer, add a row to PEERS; to compare another kernel of one, add a row to KERNELS.
"""

from __future__ import annotations

import functools
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashgen.compile import sass
from flashgen.compile.sass import Listing
from flashgen.errors import ToolchainError
from flashgen.spec.vocabulary import Mask

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
PEERS = (FA3_FWD, XFORMERS)


@dataclass(frozen=True, kw_only=True)
class PeerKernel:
    """A kernel to compare with. direction: forward, backward or decode (queries of a group packed,
    keys split).
    """

    peer: Peer
    direction: str
    head_dim: int
    mask: Mask

    def matches(self, made_of: TemplateArguments) -> bool:
        """Whether it is this kernel: fixed lengths, no feature, one block a cluster."""
        split = self.direction == DECODE
        return (
            made_of.backward == (self.direction == "backward")
            and made_of.head_dim == made_of.head_dim_v == self.head_dim
            and made_of.causal == (self.mask == "causal")
            and made_of.packed == made_of.split == split
            and made_of.plain
        )


KERNELS = tuple(
    PeerKernel(peer=peer, direction=direction, head_dim=dim, mask=mask)
    for peer, direction in ((FA3_FWD, "forward"), (XFORMERS, "backward"), (FA3_FWD, DECODE))
    for dim in (64, 128, 256)
    for mask in ("none", "causal")
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TemplateArguments:
    """What the name of a kernel tells.

    br and bc: rows of Q and of K in a tile. threads: of the warps that multiply. plain: in
    bfloat16, without clusters, variable lengths, pages, windows or softcap, not deterministic.
    """

    backward: bool
    br: int
    bc: int
    head_dim: int
    head_dim_v: int
    threads: int
    causal: bool
    packed: bool
    split: bool
    plain: bool


_FORWARD = re.compile(
    r"FlashAttnFwdSm90.*?tuple(?P<shapes>.*?)ELi(?P<dim_v>\d+)E(?P<type>\w+?)fNS_4arch4Sm90E"
    r"(?P<flags>(?:Lb[01]E){12}).*?CollectiveEpilogueFwd.*?Li(?P<threads>\d+)ELb"
)
_BACKWARD = re.compile(
    r"FlashAttnBwdSm90.*?tuple(?P<shapes>.*?)(?P<type>NS_\w+?_t)EfNS_4arch4Sm90E"
    r"(?P<flags>(?:Lb[01]E){8}).*?CollectiveEpilogueBwdI.*?Li(?P<threads>\d+)ELb"
)
_NUMBER = re.compile(r"NS\w_(?:1C)?ILi(\d+)EE|S(\w)_(?![1I])")


def template_arguments(name: str) -> TemplateArguments | None:
    """What the mangled name of a kernel tells; None for kernels of other types."""
    match = _FORWARD.search(name) or _BACKWARD.search(name)
    if match is None:
        return None
    # What each flag means, in order. Forward: causal, local, softcap, varlen, paged, append, Qv,
    # P in registers, overlap within a warpgroup, packed groups, split, V by columns. Backward:
    # causal, local, softcap, varlen, deterministic, and three that swap operands.
    flags = [flag == "1" for flag in re.findall(r"Lb([01])E", match["flags"])]
    backward = match.re is _BACKWARD
    cluster, (br, bc, dim) = _shapes(match["shapes"])
    special = flags[1:5] if backward else (*flags[1:7], flags[11])
    return TemplateArguments(
        backward=backward,
        br=br,
        bc=bc,
        head_dim=dim,
        head_dim_v=dim if backward else int(match["dim_v"]),
        threads=int(match["threads"]),
        causal=flags[0],
        packed=not backward and flags[9],
        split=not backward and flags[10],
        plain=not any(special) and cluster == [1, 1, 1] and "bfloat16" in match["type"],
    )


FIRST_NUMBER = 8
"""The place of the first number among a mangled name's substitutions: it is written S8_ again."""


def _shapes(text: str) -> list[list[int]]:
    """The numbers of each tuple. One that was written before is named by its place."""
    places: dict[int, int] = {}
    place, found = FIRST_NUMBER, []
    for one in re.split(r"NS\w_IJ", text):
        numbers = []
        for literal, again in _NUMBER.findall(one):
            if literal:
                places[place] = int(literal)
                place += 1
            numbers.append(int(literal) if literal else places[int(again, 36)])
        found.append(numbers)
        place += 1  # the tuple has a place of its own
    return found


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


def listing_of(kernel: PeerKernel, folder: Path) -> tuple[TemplateArguments, Listing]:
    """A kernel's template arguments and machine code. Raises ToolchainError if the library does not
    have it.
    """
    found = [
        (arguments, cubin, name)
        for cubin, name in _names(fetch(kernel.peer, folder))
        if (arguments := template_arguments(name)) and kernel.matches(arguments)
    ]
    if not found:
        raise ToolchainError(f"{kernel.peer.label} has no kernel {kernel}")
    arguments, cubin, name = found[0]
    return arguments, listing_in(cubin, name)


@functools.cache
def _names(library: Path) -> tuple[tuple[Path, str], ...]:
    """The kernels of a library, each with the file of its cubin."""
    folder = library.parent / "cubins"
    if not folder.exists():
        folder.mkdir()
        _cuobjdump("-xelf", ARCH, str(library.resolve()), folder=folder)
    files = sorted(folder.glob("*.cubin"))
    return tuple((file, name) for file in files for name in entry_points(file.read_bytes()))


def entry_points(elf: bytes) -> Iterator[str]:
    """The kernels of a cubin: the names of its sections of code."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", elf, 0x3A)
    names_at = struct.unpack_from("<Q", elf, table + of_names * size + 0x18)[0]
    for number in range(count):
        start = names_at + struct.unpack_from("<I", elf, table + number * size)[0]
        section = elf[start : elf.index(b"\0", start)].decode()
        if section.startswith(".text."):
            yield section.removeprefix(".text.")


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
