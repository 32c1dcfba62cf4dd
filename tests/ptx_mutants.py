"""Mutants of PTX: one change to a compiled program that breaks it, and the check that finds it.

A row is a change by regular expression; it makes a mutant of every place that its pattern matches.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from unittest.mock import patch

from flashgen.evaluate import executed, sanitize
from flashgen.ptx import triton_kernel
from flashgen.ptx.execute import Loaded, execute
from flashgen.ptx.machine import LaunchInputs
from flashgen.ptx.text import parse
from flashgen.reference.cases import CheckCase
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from tests import blackwell
from tests.tutorials import TUTORIALS

SEEDS = range(4)
"""Orders of time in which a mutant runs, until a check finds it."""

TMA, STAGES, HOPPER, BLACKWELL = "TMA", "stages", "hopper", "blackwell"


def _hopper() -> None:
    spec = AttentionSpec(
        direction="forward", dtype="bfloat16", head_dim=64, head_dim_v=64, mask="causal"
    )
    config = KernelConfig(
        br=128, bc=128, num_warps=8, num_stages=2, schedule="hopper", loads="descriptor",
        order="longest_first",
    )  # fmt: skip
    problem = Problem(batch=1, heads=1, kv_heads=1, seq_q=128, seq_k=500)
    sanitize.sanitize(spec, config, "sm_90", cases=[CheckCase(problem=problem)])


SUBJECTS: dict[str, Callable[[], object]] = {
    TMA: lambda: TUTORIALS["persistent matmul with TMA"](target="sm_90"),
    STAGES: lambda: TUTORIALS["matmul in stages"](target="sm_80"),
    HOPPER: _hopper,
    BLACKWELL: lambda: blackwell.attention(keys=512),
}
"""Programs whose mutants are made: each is run once, to know its text, its launch and its result."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A program that is right: its text, a launch of it, and what its buffers hold at the end."""

    text: str
    launch: LaunchInputs
    expected: tuple[bytes, ...]

    def run(self, loaded: Loaded, seed: int) -> str:
        """The checks that find something, "wrong result", "remark", or "" if nothing is wrong."""
        launch = copied(self.launch)
        report = execute(loaded, launch, seed=seed)
        if report.findings:
            return "+".join(sorted(report.checks()))
        if tuple(buffer.content.tobytes() for buffer in launch.buffers) != self.expected:
            return "wrong result"
        return "remark" if report.remarks else ""


def copied(launch: LaunchInputs) -> LaunchInputs:
    """A launch on copies of its buffers."""
    return replace(
        launch, buffers=[replace(each, content=each.content.copy()) for each in launch.buffers]
    )


@cache
def subject(name: str) -> Subject:
    """A program as it is compiled."""
    seen: list[tuple[str, LaunchInputs]] = []
    texts: list[str] = []

    def loaded_text(text: str) -> Loaded:
        texts.append(text)
        return loaded(text)

    def executing(program: Loaded, launch: LaunchInputs, **options: object) -> object:
        seen.append((texts[-1], copied(launch)))
        return execute(program, launch, **options)  # type: ignore[arg-type]

    loaded = triton_kernel.loaded_text
    users = (triton_kernel, executed)
    patches = [patch.object(user, "loaded_text", loaded_text) for user in users]
    patches += [patch.object(user, "execute", executing) for user in users]
    try:
        for each in patches:
            each.start()
        SUBJECTS[name]()
    finally:
        patch.stopall()
    text, launch = seen[0]
    final = copied(launch)
    report = execute(Loaded(parse(text)), final)
    assert not report.findings
    assert not report.remarks
    return Subject(
        text=text,
        launch=launch,
        expected=tuple(each.content.tobytes() for each in final.buffers),
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """A change to a subject. pattern and replacement: as of re.sub. found: what finds its mutants, in
    one order of time or another: checks, "remark", "wrong result".
    """

    subject: str
    what: str
    pattern: str
    replacement: str
    found: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A row at one of the places that its pattern matches."""

    row: Row
    place: int

    @property
    def name(self) -> str:
        """Subject, change and place."""
        return f"{self.row.subject}: {self.row.what} #{self.place}"

    @property
    def survives(self) -> bool:
        """Whether it breaks nothing."""
        _, places = SURVIVORS.get((self.row.subject, self.row.what), ("", frozenset()))
        return self.place in places


def mutants(row: Row) -> list[Mutant]:
    """A row at every place."""
    matches = re.finditer(row.pattern, subject(row.subject).text)
    return [Mutant(row=row, place=place) for place, _ in enumerate(matches)]


def mutated(mutant: Mutant) -> str:
    """The text of its subject with the one change of a mutant."""
    text = subject(mutant.row.subject).text
    found = list(re.finditer(mutant.row.pattern, text))[mutant.place]
    return text[: found.start()] + found.expand(mutant.row.replacement) + text[found.end() :]


def found_by(mutant: Mutant) -> str:
    """What finds a mutant in the first order of time that shows it: checks joined by "+", "wrong
    result", "remark"; "" if it survives.
    """
    loaded = Loaded(parse(mutated(mutant)))
    found = (subject(mutant.row.subject).run(loaded, seed) for seed in SEEDS)
    return next((each for each in found if each), "")


_MMA = r"(wgmma\.mma_async\S* \{[^}]*\}), (%rd\d+), (%rd\d+), (\S+), 1, 1, 0, 0;"
_LOAD = r"(cp\.async\.bulk\.tensor\.\dd\.shared::cta\S* \[%r\d+)\], \[(%rd\d+), \{(%r\d+), (%r\d+)(.*?)\}\]"
_STORE = r"(cp\.async\.bulk\.tensor\.\dd\.global\S*) \[(%rd\d+), \{(%r\d+), (%r\d+)(.*?)\}\], \[(%r\d+)\]"
_WAIT = r"mbarrier\.try_wait\.parity\.shared::cta\.b64 complete, \[(%r\d+)\], (%r\d+);"
_ALWAYS = r"mbarrier.try_wait.parity.shared::cta.b64 complete, [\1], "
_TENSOR = r"(tcgen05\.mma\S* \[ %r\d+ \+ 0 \]), (%rd\d+), (%rd\d+), (%r\d+), (%p\d+);"
_FROM_P = r"(tcgen05\.mma\S* \[ %r\d+ \+ 0 \]), \[ (%r\d+) \+ (\d+) \], (%rd\d+), (%r\d+), (%p\d+);"
_STAGE = r"(cp\.async\.cg\S* \[ %r\d+) \+ 0 \], \[ (%rd\d+) \+ 0 \]"

_ROWS = (
    (TMA, "a barrier dropped", r"bar\.sync\s+0;", "", "initcheck, racecheck"),
    (TMA, "a proxy fence dropped", r"fence\.proxy\.async\S*;", "", "racecheck"),
    (TMA, "the fence of wgmma dropped", r"wgmma\.fence\S*;", "", "remark"),
    (TMA, "a wait for wgmma one group late", r"(wgmma\.wait_group\S*) 1;", r"\1 2;", "racecheck"),
    (TMA, "the last wait for wgmma one group late", r"(wgmma\.wait_group\S*) 0;", r"\1 1;", "synccheck"),
    (TMA, "a commit of wgmma dropped", r"wgmma\.commit_group\S*;", "", "racecheck, synccheck"),
    (TMA, "a wait for a store one group late", r"(cp\.async\.bulk\.wait_group\S*)\s+0;", r"\1 1;", "racecheck, synccheck"),
    (TMA, "a commit of a store dropped", r"cp\.async\.bulk\.commit_group;", "", "racecheck, synccheck"),
    (TMA, "an mbarrier of two arrivals", r"(mbarrier\.init\S* \[%r\d+\]), 1;", r"\1, 2;", "synccheck"),
    (TMA, "an mbarrier that is not made", r"@%p\d+ mbarrier\.init\S* \[%r\d+\], 1;", "", "synccheck"),
    (TMA, "half of the bytes expected", r"(expect_tx\S* _, \[%r\d+\]), 24576;", r"\1, 12288;", "synccheck"),
    (TMA, "twice the bytes expected", r"(expect_tx\S* _, \[%r\d+\]), 24576;", r"\1, 49152;", "synccheck"),
    (TMA, "an arrival without its bytes", r"mbarrier\.arrive\.expect_tx\S* (_, \[%r\d+\]), 24576;", r"mbarrier.arrive.shared::cta.b64 \1;", "racecheck, synccheck"),
    (TMA, "an arrival dropped", r"@%p\d+ mbarrier\.arrive\.expect_tx[^;]*;", "", "synccheck"),
    (TMA, "a wait for an mbarrier dropped", _WAIT, "setp.eq.s32 complete, 0, 0;", "racecheck, synccheck"),
    (TMA, "a phase that is always 0", _WAIT, _ALWAYS + "0;", "synccheck"),
    (TMA, "a phase that is always 1", _WAIT, _ALWAYS + "1;", "synccheck"),
    (TMA, "coordinates of a load exchanged", _LOAD, r"\1], [\2, {\4, \3}]", "wrong result"),
    (TMA, "a load of the place before", _LOAD, r"\1], [\2, {\3, \3}]", "wrong result"),
    (TMA, "a load to the next 1024 bytes", _LOAD, r"\1+1024], [\2, {\3, \4}]", "initcheck, racecheck"),
    (TMA, "a load to a place that is not aligned", _LOAD, r"\1+64], [\2, {\3, \4}]", "memcheck"),
    (TMA, "a load that is not issued", r"@%p\d+ cp\.async\.bulk\.tensor\.2d\.shared::cta[^;]*;", "", "synccheck"),
    (TMA, "a load by every lane", r"@%p\d+ (cp\.async\.bulk\.tensor\.2d\.shared::cta[^;]*;)", r"\1", "synccheck"),
    (TMA, "coordinates of a store exchanged", _STORE, r"\1 [\2, {\4, \3}], [\6]", "racecheck"),
    (TMA, "a store of another place", _STORE, r"\1 [\2, {\3, \4}], [\6+1024]", "memcheck"),
    (TMA, "a store that is not issued", r"@%p\d+ cp\.async\.bulk\.tensor\.2d\.global[^;]*;", "", "wrong result"),
    (TMA, "fragments stored to another place", r"(stmatrix\S* \[%r\d+)\]", r"\1+16]", "initcheck"),
    (TMA, "operands of a product exchanged", _MMA, r"\1, \3, \2, \4, 1, 1, 0, 0;", "wrong result"),
    (TMA, "B with another major dimension", _MMA, r"\1, \2, \3, \4, 1, 1, 0, 1;", "wrong result"),
    (TMA, "B with its sign changed", _MMA, r"\1, \2, \3, \4, 1, -1, 0, 0;", "wrong result"),
    (TMA, "a sum that begins anew", _MMA, r"\1, \2, \3, 0, 1, 1, 0, 0;", "wrong result"),
    (TMA, "a descriptor of half the swizzle", r"((?:or|add\.s)\.?(?:b)?64[^;]*), 46116862933052948(\d+);", rf"\1, {0x80000040000100};", "wrong result"),
    (TMA, "a descriptor of half the stride", r"(or\.b64[^;]*), 46116862933\d+;", rf"\1, {0x4000002000010000};", "wrong result"),
    (TMA, "a descriptor of the next 16 bytes", r"(or\.b64[^;]*), 4611686293305294848;", r"\1, 4611686293305294849;", "wrong result"),
    (STAGES, "a barrier dropped", r"bar\.sync\s+0;", "", "racecheck"),
    (STAGES, "a wait one group late", r"cp\.async\.wait_group\s+2;", "cp.async.wait_group 3;", "racecheck"),
    (STAGES, "a wait dropped", r"cp\.async\.wait_group\s+\d;", "", "racecheck"),
    (STAGES, "a commit dropped", r"cp\.async\.commit_group;", "", "racecheck"),
    (STAGES, "a copy that is not issued", r"cp\.async\.cg[^;]*;", "", "initcheck, wrong result"),
    (STAGES, "a copy to the next 16 bytes", _STAGE, r"\1 + 16 ], [ \2 + 0 ]", "initcheck, memcheck, racecheck"),
    (STAGES, "a copy to bytes that are not aligned", _STAGE, r"\1 + 8 ], [ \2 + 0 ]", "memcheck"),
    (STAGES, "a copy from the next 16 bytes", _STAGE, r"\1 + 0 ], [ \2 + 16 ]", "memcheck, wrong result"),
    (STAGES, "B not transposed", r"(ldmatrix\S*)\.trans(\S*)", r"\1\2", "wrong result"),
    (STAGES, "a fragment of the next 16 bytes", r"(ldmatrix[^\[]*\[%r\d+)\]", r"\1+16]", "wrong result"),
    (STAGES, "a fragment outside of shared memory", r"(ldmatrix[^\[]*\[%r\d+)\]", r"\1+262144]", "memcheck"),
    (STAGES, "a product of another accumulator", r"(mma\.sync\S* \{[^}]*\}, \{[^}]*\}, \{[^}]*\}), \{ (%r\d+), (%r\d+)", r"\1, { \3, \2", "wrong result"),
    (HOPPER, "a barrier of a warpgroup dropped", r"bar\.sync\s+[02], 128;", "", "racecheck"),
    (HOPPER, "a turn of another count", r"bar\.sync (8|9), 256;", r"bar.sync \1, 128;", "synccheck"),
    (HOPPER, "a turn handed over to the wrong barrier", r"bar\.arrive 8, 256;", "bar.arrive 9, 256;", "synccheck"),
    (HOPPER, "a turn not handed over", r"bar\.arrive (8|9), 256;", "", "synccheck"),
    (HOPPER, "a wait for wgmma one group late", r"wgmma\.wait_group\S* 1;", "wgmma.wait_group.sync.aligned 2;", "synccheck"),
    (HOPPER, "a wait for wgmma dropped", r"wgmma\.wait_group\S* 0;", "", "synccheck"),
    (HOPPER, "a commit of wgmma dropped", r"wgmma\.commit_group\S*;", "", "synccheck"),
    (HOPPER, "an mbarrier of one arrival", r"(mbarrier\.init\S* \[%r\d+\]), 2;", r"\1, 1;", "racecheck, synccheck"),
    (HOPPER, "an mbarrier of two arrivals", r"(mbarrier\.init\S* \[%r\d+\]), 1;", r"\1, 2;", "synccheck"),
    (HOPPER, "a stage that is not given back", r"@%p\d+ mbarrier\.arrive\.expect_tx\S* _, \[%r\d+\], 0;", "", "synccheck"),
    (HOPPER, "a wait for an mbarrier dropped", _WAIT, "setp.eq.s32 complete, 0, 0;", "racecheck, synccheck"),
    (HOPPER, "a phase that is always 0", _WAIT, _ALWAYS + "0;", "synccheck"),
    (HOPPER, "a phase that is always 1", _WAIT, _ALWAYS + "1;", "racecheck, synccheck"),
    (HOPPER, "half of the bytes expected", r"(expect_tx\S* _, \[%r\d+\]), 16384;", r"\1, 8192;", "synccheck"),
    (HOPPER, "coordinates of a load exchanged", _LOAD, r"\1], [\2, {\4, \3\5}]", "wrong result"),
    (HOPPER, "registers beyond the pool", r"(setmaxnreg\.inc\S*)\s+240;", r"\1 256;", "synccheck"),
    (HOPPER, "registers that are kept", r"setmaxnreg\.dec\S*\s+24;", "", "synccheck"),
    (HOPPER, "a proxy fence dropped", r"fence\.proxy\.async\S*;", "", "racecheck"),
    (HOPPER, "a store that nobody waits for", r"cp\.async\.bulk\.wait_group\S*\s+0;", "", "synccheck"),
    (BLACKWELL, "a wait for stored columns dropped", r"tcgen05\.wait::st\S*;", "", "racecheck"),
    (BLACKWELL, "a wait for loaded columns dropped", r"tcgen05\.wait::ld\S*;", "", "racecheck"),
    (BLACKWELL, "a commit dropped", r"@%p\d+ tcgen05\.commit[^;]*;", "", "synccheck"),
    (BLACKWELL, "an arrival dropped", r"@%p\d+ mbarrier\.arrive\.shared[^;]*;", "", "synccheck"),
    (BLACKWELL, "a wait for an mbarrier dropped", _WAIT, "setp.eq.s32 complete, 0, 0;", "initcheck, racecheck, synccheck"),
    (BLACKWELL, "a phase that is always 0", _WAIT, _ALWAYS + "0;", "racecheck, synccheck"),
    (BLACKWELL, "a phase that is always 1", _WAIT, _ALWAYS + "1;", "initcheck, racecheck, synccheck"),
    (BLACKWELL, "an mbarrier of two arrivals", r"(mbarrier\.init\S* \[%r\d+\]), 1;", r"\1, 2;", "synccheck"),
    (BLACKWELL, "a barrier of a warpgroup dropped", r"bar\.sync\s+[023], 128;", "", "initcheck, memcheck, racecheck, synccheck"),
    (BLACKWELL, "a proxy fence dropped", r"fence\.proxy\.async\S*;", "", "racecheck"),
    (BLACKWELL, "half of the columns", r"tcgen05\.alloc(\S* \[%r\d+\]), 512;", r"tcgen05.alloc\1, 256;", "memcheck"),
    (BLACKWELL, "columns that are kept", r"@%p\d+ tcgen05\.dealloc[^;]*;", "", "synccheck"),
    (BLACKWELL, "half of the columns given back", r"(tcgen05\.dealloc[^;]*), 512;", r"\1, 256;", "memcheck"),
    (BLACKWELL, "a product by every lane", r"@%p\d+ (tcgen05\.mma[^;]*;)", r"\1", "synccheck"),
    (BLACKWELL, "a product that is not issued", r"@%p\d+ tcgen05\.mma[^;]*;", "", "initcheck, wrong result"),
    (BLACKWELL, "operands of a product exchanged", _TENSOR, r"\1, \3, \2, \4, \5;", "wrong result"),
    (BLACKWELL, "a sum that begins anew", _TENSOR, r"\1, \2, \3, \4, 0;", "wrong result"),
    (BLACKWELL, "P of the next column", _FROM_P, r"\1, [ \2 + 1\3 ], \4, \5, \6;", "racecheck, wrong result"),
    (BLACKWELL, "a descriptor of half the swizzle", r"((?:or|add)\.[bs]64[^;]*), 461175666204947(\d+);", rf"\1, {0x8000404000010000};", "wrong result"),
    (BLACKWELL, "a descriptor of half the stride", r"(or\.b64[^;]*), 4611756662049472512;", rf"\1, {0x4000402000010000};", "wrong result"),
    (BLACKWELL, "a descriptor of wgmma", r"(or\.b64[^;]*), 4611756662049472512;", r"\1, 4611686293305294848;", "memcheck"),
    (BLACKWELL, "a product of half the rows", r"(mov\.b32\s+%r\d+), 136316048;", rf"\1, {136316048 - (4 << 24)};", "wrong result"),
    (BLACKWELL, "B along N", r"(mov\.b32\s+%r\d+), 136316048;", rf"\1, {136316048 | 1 << 16};", "wrong result"),
    (BLACKWELL, "columns of the next place loaded", r"(tcgen05\.ld[^\[]*\[%r\d+) \+ 0\]", r"\1 + 1]", "racecheck, wrong result"),
    (BLACKWELL, "columns of the next place stored", r"(tcgen05\.st[^\[]*\[%r\d+) \+ 0\]", r"\1 + 1]", "racecheck, wrong result"),
    (BLACKWELL, "half of the bytes expected", r"(expect_tx\S* _, \[%r\d+\]), 16384;", r"\1, 8192;", "synccheck"),
    (BLACKWELL, "coordinates of a load exchanged", _LOAD, r"\1], [\2, {\4, \3\5}]", "wrong result"),
    (BLACKWELL, "a sum that ends early", r"(tcgen05\.mma\S* \[ %r\d+ \+ 0 \], [^,]*, [^,]*, %r\d+), %p\d+;", r"\1, 0;", "wrong result"),
)  # fmt: skip

_IMPLIED = "another barrier or wait orders the same accesses"
_COVERED = "the next wait of the warp covers the same accesses"
_PHASE = "that is the phase there, which is awaited once or an even number of times"
_OBJECTS = "both proxies see an mbarrier that was made before a barrier"
_ZERO = "both coordinates are 0 there"
_FIRST = "the first product of a sum begins anew"

SURVIVORS: dict[tuple[str, str], tuple[str, frozenset[int]]] = {
    (name, what): (why, frozenset(places))
    for name, what, why, places in (
        (TMA, "a barrier dropped", _IMPLIED, (0, 3, 4, 5, 6, 7, 8, 10, 11)),
        (STAGES, "a barrier dropped", _IMPLIED, (0,)),
        (STAGES, "a commit dropped", "A's copies fall in B's group, awaited at the same time", (0,)),
        (HOPPER, "a barrier of a warpgroup dropped", _IMPLIED, (0, 1, 2, 3, 4, 6, 7, 9)),
        (HOPPER, "a wait for an mbarrier dropped", _IMPLIED, (6, 7)),
        (HOPPER, "a phase that is always 0", _PHASE, (0, 1, 4, 5, 11)),
        (HOPPER, "a phase that is always 1", _PHASE, (8, 12)),
        (HOPPER, "coordinates of a load exchanged", _ZERO, (0, 5)),
        (HOPPER, "a proxy fence dropped", _OBJECTS, (0,)),
        (BLACKWELL, "a wait for stored columns dropped", _COVERED, (0, 2, 4, 5, 6, 8, 9, 10)),
        (BLACKWELL, "a wait for loaded columns dropped", _COVERED, (4, 5, 6, 8, 9, 10, 12, 13, 14)),
        (BLACKWELL, "a wait for an mbarrier dropped", _IMPLIED, (9, 10, 11, 15, 25, 26)),
        (BLACKWELL, "a phase that is always 0", _PHASE, (0, 1, 4, 5, 6, 7, 16, 17, 18)),
        (BLACKWELL, "a phase that is always 1", _PHASE, (10, 11, 25, 26)),
        (BLACKWELL, "a barrier of a warpgroup dropped", _IMPLIED, (*range(1, 18), 19, 21, 22, 23, *range(25, 31), *range(32, 38), 39)),
        (BLACKWELL, "a proxy fence dropped", _OBJECTS, (0,)),
        (BLACKWELL, "a sum that begins anew", _FIRST, (0, 4, 8, 12)),
        (BLACKWELL, "coordinates of a load exchanged", _ZERO, (0, 1, 3)),
        (BLACKWELL, "a sum that ends early", _FIRST, (0, 4, 16, 28)),
    )
}  # fmt: skip
"""Places whose mutants break nothing, and why; of Triton 3.7.1."""

ROWS = tuple(
    Row(subject=name, what=what, pattern=pattern, replacement=replacement, found=frozenset(found.split(", ")))
    for name, what, pattern, replacement, found in _ROWS
)  # fmt: skip
