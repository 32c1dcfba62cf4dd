"""Online softmax step by step, and the two algorithms against float64."""

from __future__ import annotations

import math

import torch

from examples.papers import runs
from examples.papers.finding import EXACT, Finding, charted, check, line, tabled
from examples.papers.scan import merging_error
from flashgen.reference.attention import FLOORS_ACCEPTED, judge, max_abs
from flashgen.report.charts import Limit, Scale

KEYS, TILE = 64, 8
LENGTHS = (16, 33, 64, 128, 256, 512)
TILES: dict[str, tuple[int, int]] = {"fa1": (16, 64), "fa2": (64, 16)}
"""B_r and B_c of each algorithm."""


def online() -> Finding:
    """One row of scores in tiles, in float64; then O of one query, and merged parts."""
    draw = torch.Generator().manual_seed(5)
    # Scores that tend to rise, so that the maximum does several times.
    s = torch.randn(KEYS, generator=draw, dtype=torch.float64)
    s += torch.linspace(0.0, 5.0, KEYS, dtype=torch.float64)
    v = torch.randn(KEYS, 16, generator=draw, dtype=torch.float64)
    highest, total = -math.inf, 0.0
    o, wrong = torch.zeros(16, dtype=torch.float64), torch.zeros(16, dtype=torch.float64)
    rows, online_lse, exact_lse, maxima, worst = [], [], [], [], 0.0
    for start in range(0, KEYS, TILE):
        tile, seen = s[start : start + TILE], s[: start + TILE]
        risen = max(highest, float(tile.max()))
        factor = math.exp(highest - risen)
        p = torch.exp(tile - risen)
        total = factor * total + float(p.sum())
        o = factor * o + p @ v[start : start + TILE]
        # As printed, diag(e^(m_old - m_new)) has the exponent -1: it divides.
        wrong = (wrong / factor if factor else wrong) + p @ v[start : start + TILE]
        highest = risen
        exact_sum = float(torch.exp(seen - seen.max()).sum())
        worst = max(worst, abs(total - exact_sum) / exact_sum)
        at = start + TILE
        maxima.append((float(at), highest))
        online_lse.append((float(at), highest + math.log(total)))
        exact_lse.append((float(at), float(seen.logsumexp(0))))
        cells = (f"{highest:.4f}", f"{factor:.4f}", f"{total:.6f}", f"{exact_sum:.6f}")
        rows.append((str(at), *cells))
    exact_o = s.softmax(0) @ v
    off = max_abs(o / total - exact_o)
    off_as_printed = max_abs(wrong / total - exact_o)
    merged = [merging_error(parts) for parts in (2, 3, 5)]
    return Finding(
        checks=(
            check(
                "computed",
                f"the sum l is right after every tile, relative error {worst:.1e}",
                worst < EXACT,
            ),
            check("computed", f"O is right after the last tile, error {off:.1e}", off < EXACT),
            check(
                "computed",
                f"2, 3 and 5 parts of the keys, merged: error {max(merged):.1e}",
                max(merged) < EXACT,
            ),
            check(
                "computed",
                f"a factor that divides gives a wrong O, off by {off_as_printed:.2g}",
                off_as_printed > 1e-3,
            ),
        ),
        figures=(
            charted(
                how=("computed",),
                title="The state after each tile",
                caption=f"{KEYS} scores in tiles of {TILE}. The maximum m only grows. Each "
                "mark is m + log(l) of the online softmax; it lies on the logarithm of the sum "
                "of e^S over the same keys.",
                x=Scale(name="keys seen", log=False, low=0.0, at=tuple(range(8, KEYS + 1, 8))),
                y=Scale(name="natural logarithm", log=False),
                lines=(
                    line("all keys so far at once", exact_lse, closed=True),
                    line("online, m + log(l)", online_lse, scattered=True),
                    line("running maximum m", maxima),
                ),
            ),
            tabled(
                how=("computed",),
                title="The same as numbers",
                caption="In float64. The factor is what l and O are multiplied by.",
                columns=("keys", "m", "factor", "l", "exact sum"),
                rows=tuple(rows),
            ),
        ),
        notes=(
            "The rule: m_new is the larger of m_old and the tile's maximum. l_new is "
            "e^(m_old - m_new) l_old plus the tile's sum of e^(S - m_new). O is rescaled likewise. "
            "The factor e^(m_old - m_new) is at most 1.",
            "The FlashAttention-2 paper prints this factor with the exponent -1, in Algorithm 1, "
            "line 10, and in section 2.3.1. As printed it divides; the last check shows that O is "
            "then wrong.",
        ),
    )


def algorithms() -> Finding:
    """Both schedules at several lengths, dtypes and masks; errors in floors."""
    lines, verdicts, rows = [], [], []
    for schedule, tile in TILES.items():
        for dtype, short in (("float16", "fp16"), ("bfloat16", "bf16")):
            for causal in (False, True):
                name = f"FlashAttention-{schedule[2]}, {short}{', causal' if causal else ''}"
                errors = []
                for n in LENGTHS:
                    run = runs.forward(schedule, *tile, n, 32, causal=causal, dtype=dtype)
                    assert run.verdict is not None
                    errors.append(run.verdict)
                floors = [verdict.floors for verdict in errors]
                verdicts += errors
                rows.append((name, *(f"{f:.2f}" for f in floors)))
                if not causal:
                    lines.append(line(name, zip(LENGTHS, floors, strict=True), scattered=True))
    broken = _floors_of_a_broken_kernel()
    checks = (
        check(
            "computed",
            f"{len(verdicts)} runs, two number formats, with and without a mask: at most "
            f"{max(verdict.floors for verdict in verdicts):.2f} floors of {FLOORS_ACCEPTED:g}",
            all(verdict.passed for verdict in verdicts),
        ),
        check(
            "computed",
            f"a kernel that does not rescale O has {broken:.0f} floors, and is rejected",
            broken > FLOORS_ACCEPTED,
        ),
    )
    return Finding(
        checks=checks,
        figures=(
            charted(
                how=("computed",),
                title="Error of O against float64",
                caption="A floor is the error of a kernel that rounds as little as its number "
                "format allows. This project accepts kernels with up to two. Marks of "
                "FlashAttention-1 lie under those of FlashAttention-2 where both are equal.",
                x=Scale(name="N, keys", at=LENGTHS),
                y=Scale(name="error, floors", log=False, low=0.0),
                lines=tuple(lines),
                limits=(Limit(y=FLOORS_ACCEPTED, name="accepted"),),
            ),
            tabled(
                how=("computed",),
                title="The same as numbers",
                caption="Error of O in floors, over N.",
                columns=("kernel", *map(str, LENGTHS)),
                rows=tuple(rows),
            ),
        ),
        notes=("Tiles of 16 x 64 and of 64 x 16, d 32. docs/numerics.md defines a floor.",),
    )


def _floors_of_a_broken_kernel() -> float:
    """The error of FlashAttention without the rescaling of O, which must be found."""
    of = runs.head(64, 32)
    s = (of.q.float() @ of.k.float().mT) * of.scale
    highest = s[..., :32].amax(-1, keepdim=True)
    risen = torch.maximum(highest, s[..., 32:].amax(-1, keepdim=True))
    first, second = torch.exp(s[..., :32] - highest), torch.exp(s[..., 32:] - risen)
    total = first.sum(-1, keepdim=True) + second.sum(-1, keepdim=True)
    o = (first @ of.v[:, :, :32].float() + second @ of.v[:, :, 32:].float()) / total
    lse = s.logsumexp(-1)
    return judge(o.to(of.q.dtype), lse, of.q, of.k, of.v, scale=of.scale, diagonal=None).floors
