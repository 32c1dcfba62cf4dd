"""A kernel that nobody here wrote and that runs on GPUs: FlashAttention-3's forward for sm_80, of
which xformers' wheel has PTX.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from triton import knobs

from flashgen.ptx.execute import Loaded, execute
from flashgen.ptx.findings import Report
from flashgen.ptx.machine import LaunchInputs
from flashgen.ptx.memory import Buffer
from flashgen.ptx.text import parse
from tests.ptx_snippets import Array, aligned

WHEEL = "xformers==0.0.32.post2"
LIBRARY, MODULE = "xformers/flash_attn_3/_C.so", "_C.140.sm_80.ptx"
ENTRY = re.compile(r"^\.entry \w*4arch4Sm80(?:ELb0){4}\w*SingleTileScheduler\w*\(", re.MULTILINE)
"""float16, head dim 96, tiles of 128 by 64, neither causal nor local nor split, packed GQA."""

D, BYTES_OF_PARAMETER, SHARED_BYTES = 96, 1048, 56 << 10


@pytest.fixture(scope="module")
def text(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The kernel's PTX, fetched once and kept in pytest's cache."""
    assert pytestconfig.cache is not None
    kept = pytestconfig.cache.mkdir("peers") / f"{WHEEL}-{MODULE}"
    if not kept.exists():
        folder = tmp_path_factory.mktemp("wheel")
        fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, WHEEL]
        if subprocess.run(fetch, check=False, capture_output=True).returncode:
            pytest.skip(f"pip cannot fetch {WHEEL}")
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            library = Path(archive.extract(LIBRARY, folder))
        dump = [knobs.nvidia.cuobjdump.path, "--extract-ptx", MODULE, library]
        subprocess.run(dump, check=True, capture_output=True, cwd=folder)
        kept.write_text((folder / MODULE).read_text())
    return only_kernel(kept.read_text())


def only_kernel(module: str) -> str:
    """A module with the one kernel that ENTRY matches."""
    (wanted,) = ENTRY.finditer(module)
    starts = [found.start() for found in re.finditer(r"^\.entry ", module, re.MULTILINE)]
    end = min((at for at in starts if at > wanted.start()), default=len(module))
    return module[: starts[0]] + module[wanted.start() : end]


def divider(divisor: int) -> tuple[int, int, int]:
    """cutlass::FastDivmod: a divisor, a multiplier and a shift; 1 has neither."""
    if divisor == 1:
        return 1, 0, 0
    shift = 31 + (divisor - 1).bit_length()
    return divisor, ((1 << shift) + divisor - 1) // divisor, shift - 32


def parameter(at: dict[str, int], seq_q: int, seq_k: int, heads: int, kv_heads: int) -> bytes:
    """FlashAttnFwdSm80::Params: shapes and strides of the main loop, then those of the epilogue,
    of contiguous tensors (heads, length, D) of one batch. Packed shapes have a KV head's group.
    """
    held, group = bytearray(BYTES_OF_PARAMETER), heads // kv_heads
    of_q, of_k = seq_q * D, seq_k * D
    packed = (of_q, D, group * of_q, heads * of_q)

    def put(offset: int, form: str, *values: float) -> None:
        struct.pack_into(f"<{form}", held, offset, *values)

    put(0, "Q4i3q", at["q"], seq_q, D, heads, 1, D, of_q, heads * of_q)
    put(48, "5i4x4q", group, seq_q, D, kv_heads, 1, *packed)
    put(104, "Q4i3q", at["k"], seq_k, D, kv_heads, 1, D, of_k, kv_heads * of_k)
    put(152, "Qi4x3q", at["v"], D, D, of_k, kv_heads * of_k)
    put(356, "3I", *divider(group))
    put(368, "f", D**-0.5 * 1.4426950408889634)
    put(544, "Q5i4x4q", at["out"], seq_q, D, heads, 1, 1, D, of_q, heads * of_q, 0)
    put(608, "6i5q", group, seq_q, D, kv_heads, 1, 1, *packed, 0)
    put(752, "Q3q", at["lse"], seq_q, heads * seq_q, 0)
    put(784, "5i4x4q", group, seq_q, kv_heads, 1, 1, seq_q, group * seq_q, heads * seq_q, 0)
    put(904, "3I", *divider(group))
    return bytes(held)


def attention(
    text: str, seq_q: int, seq_k: int, heads: int, kv_heads: int, seed: int
) -> tuple[Sequence[Array], Sequence[Array], Report]:
    """Output and log-sum-exp as the kernel leaves them, in float64, and the report."""
    rng = np.random.default_rng(0)
    shapes = {"q": (heads, seq_q), "k": (kv_heads, seq_k), "v": (kv_heads, seq_k)}
    arrays = {n: rng.standard_normal((*shape, D)).astype(np.float16) for n, shape in shapes.items()}
    arrays["out"] = np.zeros_like(arrays["q"])
    arrays["lse"] = np.zeros((heads, seq_q), np.float32)
    buffers = {
        name: Buffer(
            name=name, address=0x100000 * (n + 1), content=aligned(array), end=array.nbytes
        )
        for n, (name, array) in enumerate(arrays.items())
    }
    places = {name: buffer.address for name, buffer in buffers.items()}
    launch = LaunchInputs(
        grid=(-(-seq_q * heads // kv_heads // 128), kv_heads, 1),
        parameters=[parameter(places, seq_q, seq_k, heads, kv_heads)],
        buffers=list(buffers.values()),
        shared_bytes=SHARED_BYTES,
    )
    report = execute(Loaded(parse(text)), launch, seed=seed)
    found = [
        buffers[n].content[: arrays[n].nbytes].view(arrays[n].dtype).reshape(arrays[n].shape)
        for n in ("out", "lse")
    ]
    q, k, v = (arrays[name].astype(np.float64) for name in "qkv")
    k, v = (np.repeat(each, heads // kv_heads, 0) for each in (k, v))
    powers = np.exp(q @ k.transpose(0, 2, 1) * D**-0.5)
    total = powers.sum(-1)
    return found, [powers @ v / total[..., None], np.log(total)], report


@pytest.mark.slow("fetches a wheel of 117 MB")
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_whole_tiles_are_right_and_have_no_finding(text: str, heads: int, seed: int) -> None:
    found, expected, report = attention(text, 128, 192, heads, 1, seed)
    assert list(report.lines()) == []
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=1e-3)


@pytest.mark.slow("fetches a wheel of 117 MB")
def test_the_rest_of_a_tile_is_read_and_nobody_wrote_it(text: str) -> None:
    """Rows behind the end of Q and K are not copied; what they give is masked or not stored."""
    found, expected, report = attention(text, 200, 300, 4, 2, 0)
    assert report.checks() == {"initcheck"}
    assert all(each.instruction.opcode.startswith("ldmatrix") for each in report.findings)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=1e-3)
