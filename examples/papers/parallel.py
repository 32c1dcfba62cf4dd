"""Who does what: programs over the sequence, and warps over the rows or the keys of a tile."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from examples.papers import forms, runs
from examples.papers.finding import EXACT, Finding, Row, charted, check, line, powers, tabled
from flashgen.files import temporary_folder
from flashgen.reference.attention import max_abs
from flashgen.report.charts import Limit, Scale
from flashgen.spec.gpu import Gpu

TOKENS, HEADS = 16384, 32
"""The FlashAttention-2 paper's setting: batch times N is 16,384, a model width of 2,048; d 64."""
BR, BC, D, WARPS = 128, 64, 64, 4


def busy(programs: int, sms: int) -> float:
    """The share of SMs that have work on average, if each runs one program at a time."""
    return programs / (math.ceil(programs / sms) * sms)


def over_sequence(gpu: Gpu) -> Finding:
    """Programs of FlashAttention-1 and 2 over N, and the share of SMs that they keep busy."""
    counted, expected = [], []
    for n in powers(128, 512):
        runs_of = (
            runs.forward("fa1", 64, 64, n, D),
            runs.forward("fa2", BR, BC, n, D),
            runs.backward("backward_dkv", BR, BC, n, D),
        )
        counted.append([run.programs for run in runs_of])
        expected.append([1, n // BR, n // BC])
    lengths = powers(512, TOKENS)
    programs = {
        "FlashAttention-1": {n: TOKENS // n * HEADS for n in lengths},
        "FlashAttention-2": {n: TOKENS // n * HEADS * (n // BR) for n in lengths},
    }
    at = tuple(map(float, lengths))
    shares = {
        name: {n: 100 * busy(count, gpu.sms) for n, count in of.items()}
        for name, of in programs.items()
    }
    longest = {name: of[TOKENS] for name, of in shares.items()}
    return Finding(
        checks=(
            check(
                "counted",
                "programs of one head: 1 in FlashAttention-1; N / B_r in the forward of "
                "FlashAttention-2, N / B_c in its backward for dK and dV",
                counted == expected,
            ),
            check(
                "closed form",
                f"one sequence of {TOKENS:,} tokens: {HEADS} programs keep "
                f"{longest['FlashAttention-1']:.0f} % of the {gpu.sms} SMs busy, "
                f"{programs['FlashAttention-2'][TOKENS]:,} keep "
                f"{longest['FlashAttention-2']:.0f} %",
                longest["FlashAttention-2"] > max(80.0, longest["FlashAttention-1"]),
            ),
        ),
        figures=(
            charted(
                how=("closed form",),
                title="Programs over the length of a sequence",
                caption=f"{TOKENS:,} tokens in all, {HEADS} heads, B_r {BR}: longer sequences "
                "are fewer. A program runs on one SM; the dashed line is the number of SMs.",
                x=Scale(name="N, keys", at=at),
                y=Scale(name="programs"),
                lines=tuple(line(name, of) for name, of in programs.items()),
                limits=(Limit(y=float(gpu.sms), name=f"{gpu.sms} SMs"),),
            ),
            charted(
                how=("closed form",),
                title="SMs that have work",
                caption=f"{gpu.name}, one program on an SM at a time. Programs run in waves of "
                f"{gpu.sms}; the last wave may be small.",
                x=Scale(name="N, keys", at=at),
                y=Scale(name="SMs busy, %", log=False, low=0.0),
                lines=tuple(line(name, of) for name, of in shares.items()),
            ),
        ),
        notes=(
            "The paper calls this occupancy. FlashAttention-1 gives each head to one program; "
            "FlashAttention-2 gives it to as many as it has tiles of rows, which need nothing of "
            "each other.",
        ),
    )


@dataclass(kw_only=True)
class Shared:
    """Shared memory that counts the bytes which pass through it, as elements of a type."""

    bytes: int = 0

    def passed(self, tensor: Tensor, element: int) -> Tensor:
        """The tensor, read or written once."""
        self.bytes += tensor.numel() * element
        return tensor


def _tiles(k: Tensor, v: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """K and V by tiles of BC keys."""
    count = k.shape[0] // BC
    return k.chunk(count), v.chunk(count)


def by_rows(q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> Tensor:
    """Attention of one tile of rows over tiles of BC keys; each warp owns rows (split-Q)."""
    outputs = []
    for rows in q.chunk(WARPS):
        highest = torch.full((rows.shape[0],), -torch.inf, dtype=q.dtype)
        total, o = torch.zeros_like(highest), torch.zeros_like(rows)
        for keys, values in zip(*_tiles(k, v), strict=True):
            s = shared.passed(rows, 2) @ shared.passed(keys, 2).T
            risen = torch.maximum(highest, s.amax(1))
            factor, p = torch.exp(highest - risen), torch.exp(s - risen[:, None])
            total = factor * total + p.sum(1)
            o = factor[:, None] * o + p @ shared.passed(values, 2)
            highest = risen
        outputs.append(o / total[:, None])
    return torch.cat(outputs)


def by_keys(q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> Tensor:
    """The same; each warp owns keys of a tile (split-K), and parts of O are added up."""
    highest = torch.full((q.shape[0],), -torch.inf, dtype=q.dtype)
    total, o = torch.zeros_like(highest), torch.zeros_like(q)
    for keys, values in zip(*_tiles(k, v), strict=True):
        s = [shared.passed(q, 2) @ shared.passed(of_warp, 2).T for of_warp in keys.chunk(WARPS)]
        maxima = torch.stack([shared.passed(each.amax(1), 4) for each in s])
        for _ in range(WARPS):  # each warp reads all maxima
            shared.passed(maxima, 4)
        risen = torch.maximum(highest, maxima.amax(0))
        factor = torch.exp(highest - risen)
        total, o, highest = factor * total, factor[:, None] * o, risen
        for scores, of_warp in zip(s, values.chunk(WARPS), strict=True):
            p = torch.exp(scores - risen[:, None])
            part = shared.passed(p @ shared.passed(of_warp, 2), 4)  # written
            sums = shared.passed(p.sum(1), 4)
            o, total = o + shared.passed(part, 4), total + shared.passed(sums, 4)  # and read
    return o / total[:, None]


def over_warps() -> Finding:
    """Bytes through shared memory of both ways to split a tile, and those of a compiled kernel."""
    n = 256
    of = runs.head(n, D, rows=BR)
    q, k, v = (x[0, 0].double() for x in (of.q, of.k, of.v))
    exact = (q @ k.T).softmax(-1) @ v
    rows, keys = Shared(), Shared()
    error = max(max_abs(by_rows(q, k, v, rows) - exact), max_abs(by_keys(q, k, v, keys) - exact))
    tiles = n // BC
    expected = forms.shared_by_rows(WARPS, BR, BC, D), forms.shared_by_keys(WARPS, BR, BC, D)
    read, written = compiled_traffic()
    parts = 2 * WARPS * BR * D * forms.ROW
    return Finding(
        checks=(
            check("computed", f"both ways compute attention, error {error:.1e}", error < EXACT),
            check(
                "counted",
                "both counts equal their closed forms, to the byte",
                (rows.bytes, keys.bytes) == (tiles * expected[0], tiles * expected[1]),
            ),
            check(
                "counted",
                f"split-K moves {keys.bytes / rows.bytes:.1f} times the bytes of split-Q",
                keys.bytes > 2 * rows.bytes,
            ),
            check(
                "machine code",
                f"a kernel of this project, compiled for sm_80, reads {read:,} bytes in each "
                f"tile of keys, as split-Q does, and has {written} stores to it",
                (read, written) == (expected[0], 0),
            ),
        ),
        figures=(
            tabled(
                how=("counted", "closed form"),
                title="Bytes through shared memory, for one tile of keys",
                caption=f"{WARPS} warps, B_r {BR}, B_c {BC}, d {D}, 16-bit Q, K and V, float32 "
                "parts of O.",
                columns=("way", "Q", "K and V", "parts of O", "maxima, sums", "KiB"),
                rows=(
                    _row("split-Q", BR * D * 2, 4 * WARPS * BC * D, 0, expected),
                    _row("split-K", WARPS * BR * D * 2, 4 * BC * D, parts, expected[::-1]),
                ),
            ),
        ),
        notes=(
            "Split-Q: each warp owns rows of Q and needs all of K and V. Its part of O is final, "
            "so warps exchange nothing. Split-K: each warp owns keys, and its part of O must be "
            "added to those of the others through shared memory, in every tile.",
            "Not counted: copying K and V from HBM to shared memory, the same for both.",
        ),
    )


def _row(name: str, q: int, kv: int, parts: int, both: tuple[int, int]) -> Row:
    total = both[0]
    cells = (q, kv, parts, total - q - kv - parts, total)
    return Row(
        name=name, cells=tuple(f"{each / 1024:.0f}" for each in cells), bar=total / max(both)
    )


def compiled_traffic() -> tuple[int, int]:
    """Bytes that the warps of a forward kernel read from shared memory for matrix products and
    write to it, in one trip of its main loop, from the machine code for an A100.

    Raises ToolchainError if cuobjdump is missing.
    """
    import triton

    from flashgen.compile.compiler import cache_file, compile_kernel
    from flashgen.compile.loops import main_bodies
    from flashgen.compile.sass import disassemble

    spec = runs.spec_of(D)
    config = replace(runs.config_of(BR, BC), num_stages=2)  # K and V are copied by LDGSTS
    with temporary_folder("paper") as cache:
        compiled = compile_kernel(runs.rendered(spec, config), spec, config, "sm_80", cache=cache)
        file = cache_file(compiled.digest, "sm_80", triton.__version__, cache, "cubin")
        body = main_bodies(disassemble(file.read_bytes()))[0]
    read = sum(16 * 32 for each in body if each.base == "LDSM" and each.opcode.endswith(".4"))
    written = sum(1 for each in body if each.base == "STS")
    return read * WARPS, written
