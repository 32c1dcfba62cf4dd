"""Bytes of HBM that kernels ask for, counted in the interpreter and equal to closed forms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from examples.papers import forms, runs
from examples.papers import standard as standard_attention
from examples.papers.charts import Line
from examples.papers.counter import Counter, Traffic
from examples.papers.finding import (
    Check,
    Figure,
    Finding,
    How,
    Row,
    charted,
    check,
    line,
    powers,
    tabled,
)
from flashgen.report.charts import Scale

HEADS = 64 * 16
"""Batch 64 with 16 heads each, of the FlashAttention paper's Figure 2."""
N, D = 1024, 64
BR, BC = 128, 64
"""The tile of FlashAttention-2 in charts over other things."""
MEMORY_FORMS = (
    "bytes are 4 N^2 (S and P) in standard attention, 4 N d + 12 N (O in float32, l, m, LSE) in "
    "FlashAttention-1, 4 N (LSE) in FlashAttention-2"
)
BLOCK = 256
"""The block of keys of FlashAttention-1 in them: the paper's in Figure 2."""


def gigabytes(of_a_head: float) -> float:
    """Bytes of one head as GB of the whole setting."""
    return of_a_head * HEADS / 1e9


def _agree(counted: Iterable[tuple[Traffic | int, Traffic | int]], what: str) -> Check:
    """Whether every count is equal to its closed form."""
    pairs = list(counted)
    equal = sum(found == form for found, form in pairs)
    return check(
        "counted",
        f"{what}: {equal} of {len(pairs)} counts equal their closed forms, to the byte",
        equal == len(pairs),
    )


@functools.cache
def _standard(n: int, d: int) -> tuple[int, int]:
    """Bytes of standard attention's forward, and of its tensors beyond Q, K, V and O."""
    of = runs.head(n, d)
    found = standard_attention.run(of.q[0, 0], of.k[0, 0], of.v[0, 0])
    return found.counter.bytes, found.extra


def _fa1(n: int, d: int) -> Counter:
    return runs.forward("fa1", min(64, n), min(BLOCK, n), n, d)


def _fa2(n: int, d: int) -> Counter:
    return runs.forward("fa2", min(BR, n), BC, n, d)


def accesses() -> Finding:
    """Standard, FA-1 and FA-2 over N at d 64, and over d at N 512."""
    lengths, dims = powers(128, 2048), powers(16, 128)
    over_n, pairs = _over([(n, D) for n in lengths], lambda n, d: n)
    over_d, more = _over([(512, d) for d in dims], lambda n, d: d)
    least = forms.total(forms.fa2(2048, D, BR, BC))
    times = forms.standard(2048, D) / least
    return Finding(
        checks=(
            _agree([*pairs, *more], "three kernels over N and d"),
            check(
                "closed form",
                f"at N 2,048 standard attention moves {times:.1f} times as many bytes",
                times > 3,
            ),
        ),
        figures=(
            _over_figure("Forward of one head, over N", "N, keys", lengths, over_n, "d 64."),
            _over_figure("Forward of one head, over d", "d, elements", dims, over_d, "N 512."),
            tabled(
                how=("counted",),
                title="Bytes of FlashAttention-2, by tensor",
                caption="Forward of one head, N 1,024, d 64, tiles of 128 rows and 64 keys. K and "
                "V are loaded once for each of the 8 tiles of rows.",
                columns=("tensor", "loaded", "stored"),
                rows=[(name, f"{n:,}", f"{m:,}") for name, (n, m) in _fa2(N, D).traffic.items()],
            ),
        ),
        notes=("All three grow with N^2 here, because the tile stays the same.",),
    )


def _over(
    shapes: list[tuple[int, int]], x: Callable[[int, int], int]
) -> tuple[tuple[Line, ...], list[tuple[Traffic | int, Traffic | int]]]:
    """The three kernels at these (n, d): lines in MB, and counts with their closed forms."""
    points: dict[str, list[tuple[float, float]]] = {}
    pairs: list[tuple[Traffic | int, Traffic | int]] = []
    for n, d in shapes:
        fa1, fa2, (wide, _) = _fa1(n, d), _fa2(n, d), _standard(n, d)
        pairs.append((wide, forms.standard(n, d)))
        pairs.append((fa1.traffic, forms.fa1(n, d, min(64, n), min(BLOCK, n))))
        pairs.append((fa2.traffic, forms.fa2(n, d, min(BR, n), BC)))
        found = {
            "standard": wide,
            "FlashAttention-1, B_c 256": fa1.bytes,
            "FlashAttention-2, B_r 128": fa2.bytes,
        }
        for name, count in found.items():
            points.setdefault(name, []).append((x(n, d), count / 1e6))
    return tuple(line(name, of) for name, of in points.items()), pairs


def _over_figure(
    title: str, name: str, at: tuple[int, ...], lines: tuple[Line, ...], where: str
) -> Figure:
    return charted(
        title=title,
        caption=f"{where} Lower is better. Both axes are logarithmic.",
        x=Scale(name=name, at=at),
        y=Scale(name="HBM accesses, MB"),
        lines=lines,
    )


def sram() -> Finding:
    """FA-1 with B_c = M / 4d, over N, d and M."""
    points: dict[int, list[tuple[float, float]]] = {}
    pairs: list[tuple[Traffic | int, Traffic | int]] = []
    ratios = []
    for d in (32, 64, 128):
        for n in (256, 512):
            for m in powers(8192, 32768):
                bc = m // (4 * d)
                if bc > n:
                    continue
                run = runs.forward("fa1", min(64, bc), bc, n, d)
                pairs.append((run.traffic, forms.fa1(n, d, min(64, bc), bc)))
                bound = n * n * d * d / m
                points.setdefault(d, []).append((bound / 1e3, run.bytes / 1e6))
                ratios.append(run.bytes / bound)
    ends = [x for of in points.values() for x, _ in of]
    lines = [line(f"d {d}", sorted(of), scattered=True) for d, of in points.items()]
    form = line(
        "40 N^2 d^2 / M bytes", [(x, 40 * x / 1e3) for x in (min(ends), max(ends))], closed=True
    )
    far = forms.total(forms.fa1(1 << 16, 64, 64, 256)) / ((1 << 32) * 64 * 64 / 65536)
    return Finding(
        checks=(
            _agree(pairs, "FlashAttention-1 over N, d and M"),
            check(
                "counted", f"all {len(ratios)} counts lie above 40 N^2 d^2 / M", min(ratios) > 40
            ),
            check("closed form", f"at N 65,536 the factor has come down to {far:.2f}", far < 42),
        ),
        figures=(
            charted(
                how=("counted", "closed form"),
                title="Accesses over N^2 d^2 / M",
                caption="One head; N 256 and 512, M 8,192 to 32,768 elements, B_c = M / 4d. "
                "Different d, N and M fall on one line. The longer the sequence, the nearer it "
                "comes to the dashed bound.",
                x=Scale(name="N^2 d^2 / M, thousands"),
                y=Scale(name="HBM accesses, MB"),
                lines=(*lines, form),
            ),
        ),
        notes=(
            "Why 40: there are N / B_c = 4 N d / M blocks of keys. For each, this project's kernel "
            "reads Q, 2 bytes an element, and reads and writes O in float32, 8 bytes. With a "
            "16-bit O, as the algorithm is printed, the factor is 24.",
        ),
    )


def block_size() -> Finding:
    """FA-1 over B_c, FA-2 over B_r, at the setting of Figure 2."""
    blocks, tiles = powers(32, 1024), powers(16, 256)
    fa1 = {bc: runs.forward("fa1", min(64, bc), bc, N, D) for bc in blocks}
    fa2 = {br: runs.forward("fa2", br, 256, N, D) for br in tiles}
    narrow = runs.forward("fa2", 64, 64, N, D).bytes
    pairs: list[tuple[Traffic | int, Traffic | int]] = [
        *((run.traffic, forms.fa1(N, D, min(64, bc), bc)) for bc, run in fa1.items()),
        *((run.traffic, forms.fa2(N, D, br, 256)) for br, run in fa2.items()),
    ]
    printed = {bc: gigabytes(forms.algorithm1(N, D, bc)) for bc in blocks}
    lines = (
        line("FlashAttention-1, counted", {bc: gigabytes(run.bytes) for bc, run in fa1.items()}),
        line("Algorithm 1 with 16-bit O, closed form", printed, closed=True),
    )
    over_rows = {br: gigabytes(run.bytes) for br, run in fa2.items()}
    falling = [run.bytes for run in fa1.values()]
    return Finding(
        checks=(
            _agree(pairs, "both kernels over their block"),
            check(
                "counted",
                f"accesses of FlashAttention-1 fall at every step, to "
                f"{gigabytes(falling[-1]):.2f} GB at 1,024",
                falling == sorted(falling, reverse=True),
            ),
            check(
                "counted",
                "those of FlashAttention-2 are the same at B_c 64 and 256",
                narrow == fa2[64].bytes,
            ),
        ),
        figures=(
            charted(
                how=("counted", "closed form"),
                title="FlashAttention-1 over B_c",
                caption="Forward, batch 64, 16 heads, N 1,024, d 64: counted at one head, times "
                "1,024. This project's kernel keeps O in float32, the printed one in 16 bits.",
                x=Scale(name="B_c, keys in a block", at=blocks),
                y=Scale(name="HBM accesses, GB"),
                lines=lines,
            ),
            charted(
                title="FlashAttention-2 over B_r",
                caption="The same sizes, B_c 256. Q and O pass once, K and V once for each "
                "tile of rows.",
                x=Scale(name="B_r, rows in a tile", at=tiles),
                y=Scale(name="HBM accesses, GB"),
                lines=(line("FlashAttention-2, counted", over_rows),),
            ),
        ),
        notes=("B_c 512 and 1,024 fit no tuned config; they are put into the kernel's text.",),
    )


def figure_2() -> Finding:
    """Forward and backward at GPT-2 medium's attention: counted at one head, times 1,024."""
    of, do = runs.head(N, D), runs.head(N, D, rows=N + 1).q[0, 0, :N].contiguous()
    standard: dict[str, int] = {}
    pairs: list[tuple[Traffic | int, Traffic | int]] = []
    variants = {
        "as Algorithms 0 and 3": (False, 0.0),
        "with a mask": (True, 0.0),
        "with dropout": (False, 0.1),
        "with mask and dropout": (True, 0.1),
    }
    for name, (mask, dropped) in variants.items():
        run = standard_attention.run(
            of.q[0, 0], of.k[0, 0], of.v[0, 0], do, mask=mask, dropped=dropped
        )
        standard[name] = run.counter.bytes
        form = forms.standard(N, D, backward=True, mask=mask, dropout=dropped > 0)
        pairs.append((run.counter.bytes, form))
    flash: dict[str, int] = {}
    for causal in (False, True):
        found = {
            "forward": runs.forward("fa2", 128, 128, N, D, causal=causal),
            "delta": runs.backward("backward_delta", 128, 128, N, D),
            "dkv": runs.backward("backward_dkv", 128, 128, N, D, causal=causal),
            "dq": runs.backward("backward_dq", 128, 128, N, D, causal=causal),
        }
        tile = (N, D, 128, 128, causal)
        expected = (forms.fa2(*tile), forms.delta(N, D), forms.dkv(*tile), forms.dq(*tile))
        pairs += zip((run.traffic for run in found.values()), expected, strict=True)
        name = f"flashgen, 128 x 128{', causal' if causal else ''}"
        flash[name] = sum(run.bytes for run in found.values())
    printed = forms.algorithm1(N, D, BLOCK) + forms.algorithm4(N, D, BLOCK)
    lean = forms.lean_algorithms(N, D, BLOCK)
    rows = [
        *((f"standard, {name}", count, "counted") for name, count in standard.items()),
        *((name, count, "counted") for name, count in flash.items()),
        ("Algorithms 1 and 4 as printed, B_c 256", printed, "closed form"),
        ("the same, without needless reads", lean, "closed form"),
    ]
    most = max(count for _, count, _ in rows)
    full, ours = gigabytes(standard["with mask and dropout"]), gigabytes(lean)
    return Finding(
        checks=(
            _agree(pairs, "standard attention and four kernels of flashgen"),
            _near("standard attention with mask and dropout", "counted", full, 40.3),
            _near("FlashAttention without needless reads", "closed form", ours, 4.4),
        ),
        figures=(
            tabled(
                how=("counted", "closed form"),
                title="GB moved, forward and backward",
                caption="Batch 64, 16 heads, N 1,024, d 64, 16-bit elements: counted at one "
                "head, times 1,024.",
                columns=("attention", "GB", "how"),
                rows=tuple(
                    Row(name=name, cells=(f"{gigabytes(count):.2f}", how), bar=count / most)
                    for name, count, how in rows
                ),
            ),
        ),
        notes=(
            "The paper prints 40.3 GB and does not say what was run. Standard attention with mask "
            "and dropout, as in its authors' benchmark, moves as much.",
            "Needless reads are those of zeros in O and dQ, of O for every block of the backward, "
            "and of row statistics. flashgen's backward walks its tiles twice, once for dQ and "
            "once for dK and dV, so that results do not vary from run to run.",
        ),
    )


def _near(what: str, how: How, found: float, printed: float) -> Check:
    off = abs(found / printed - 1)
    return check(
        how, f"{what}: {found:.3f} GB, {off:.1%} from the {printed} GB printed", off < 0.01
    )


def memory() -> Finding:
    """Bytes of tensors beyond Q, K, V and O that a forward of one head is given."""
    lengths = powers(128, 2048)
    extra: dict[str, list[tuple[float, float]]] = {}
    agree = []
    for n in lengths:
        found = {
            "standard": _standard(n, D)[1],
            "FlashAttention-1": _fa1(n, D).extra,
            "FlashAttention-2": _fa2(n, D).extra,
        }
        expected = (4 * n * n, 4 * n * D + 12 * n, 4 * n)
        agree += list(zip(found.values(), expected, strict=True))
        for name, size in found.items():
            extra.setdefault(name, []).append((n, size / 1024))
    return Finding(
        checks=(_agree(agree, MEMORY_FORMS),),
        figures=(
            charted(
                title="Memory beyond Q, K, V and O",
                caption="Forward of one head, d 64, 16-bit elements. For twice the keys "
                "standard attention needs four times the memory, FlashAttention twice.",
                x=Scale(name="N, keys", at=lengths),
                y=Scale(name="memory, KiB"),
                lines=tuple(line(name, of) for name, of in extra.items()),
            ),
        ),
    )


def decode() -> Finding:
    """One token over 1,024 keys, in 1 to 16 splits."""
    splits = powers(1, 16)
    pairs: list[tuple[Traffic | int, Traffic | int]] = []
    programs, moved, passed = [], [], True
    for count in splits:
        run, merging = runs.decode(count, N, D)
        pairs.append((run.traffic, forms.decode(N, D, count, runs.GROUP)))
        if merging is not None:
            pairs.append((merging.traffic, forms.combine(D, count, runs.GROUP)))
        assert run.verdict is not None
        passed = passed and run.verdict.passed
        programs.append((count, run.programs))
        moved.append((count, (run.bytes + (merging.bytes if merging else 0)) / 1024))
    over_n = []
    for n in powers(256, 4096):
        run, _ = runs.decode(1, n, D)
        pairs.append((run.traffic, forms.decode(n, D, 1, runs.GROUP)))
        over_n.append((n, run.bytes / 1024))
    more = moved[-1][1] / moved[0][1] - 1
    at = tuple(map(float, splits))
    return Finding(
        checks=(
            _agree(pairs, "decode and the kernel that merges"),
            check("computed", "every number of splits is within two floors of float64", passed),
            check(
                "counted",
                f"16 programs instead of one, for {more:.0%} more bytes",
                more < 0.2 and programs[0][1] == 1 and programs[-1][1] == 16,
            ),
        ),
        figures=(
            charted(
                title="Programs that run in parallel",
                caption="One token of 4 query heads that share K and V, 1,024 keys, d 64.",
                x=Scale(name="splits of the keys", at=at),
                y=Scale(name="programs"),
                lines=(line("programs", programs),),
            ),
            charted(
                title="Bytes, those of merging included",
                caption="K and V pass once, whatever the splits. Only parts of O are written "
                "and read again.",
                x=Scale(name="splits of the keys", at=at),
                y=Scale(name="HBM accesses, KiB", log=False, low=0.0),
                lines=(line("decode and merging", moved),),
            ),
            charted(
                title="Bytes of one token over N",
                caption="One split. Each key and value is read once, so bytes grow with N.",
                x=Scale(name="N, keys", at=tuple(x for x, _ in over_n)),
                y=Scale(name="HBM accesses, KiB"),
                lines=(line("decode", over_n),),
            ),
        ),
    )
