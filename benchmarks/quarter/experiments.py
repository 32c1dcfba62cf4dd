"""The experiments of gpu_quarter.py, as data: what is compared, in which order, for how long.

Nothing here names a kernel that does not exist yet. A *way* is a set of the fields of KernelConfig
that are no sizes, and every legal way is compared. So what becomes legal is measured; until then
its seconds go to the next experiment.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from flashgen import paths
from flashgen.bench.contenders import served_directions
from flashgen.runtime.generated_tables import served_from
from flashgen.runtime.selection import first_kernels, ladder
from flashgen.schedules.base import BY_KEYS
from flashgen.schedules.config import KernelConfig, config_of
from flashgen.schedules.defaults import default_config, default_spec
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import Outcome
from flashgen.schedules.space import legal_configs, likely_order, seed_configs, tuned_default
from flashgen.search.decide import median_us
from flashgen.spec.attention import AttentionSpec, spec_of
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import Problem, bucket_of, bytes_moved, problem_of, workload
from flashgen.spec.vocabulary import Mask
from flashgen.table.table import Table
from flashgen.table.table_file import load_with_evidence

Lines = Sequence[dict[str, Any]]
Direction = Literal["forward", "backward"]

SIZES = ("br", "bc", "num_warps", "num_stages", "split_keys", "maxnreg", "exp2_by_fma")
OWN_SCHEDULES = ("hopper", "blackwell", "ampere")
"""Those whose ways are compared; what a table or a search would take besides stands beside them."""
MOST_BYTES = 12e9
"""Of a cache: 80 GB hold the three copies that exist while its pages are made."""
HELD_OUT = Path(__file__).parents[1] / "results" / "held_out.jsonl"
"""Random legal configs of random specs and lengths, and what was estimated of them on 28 November
2026, before anything ran: 20 each of forward, backward and decode for an H100 and for an H200."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One measurement.

    kind: floors (cuBLAS and a copy), check (of a kernel, against float64), round (of configs, in
    alternation, beside torch), case (of flashgen bench: spec is the forward's), rough (of a kernel,
    by itself), varlen (torch's packed attention), host (Python's time). full: a round with all the
    samples of a final round.
    """

    kind: str
    spec: AttentionSpec | None = None
    problem: Problem | None = None
    configs: tuple[KernelConfig, ...] = ()
    direction: Direction = "forward"
    full: bool = False

    @property
    def key(self) -> str:
        """What it measures, in one line."""
        names = hashlib.sha256(" ".join(c.label for c in self.configs).encode()).hexdigest()[:8]
        what = [self.spec.name, self.problem.label, names] if self.spec and self.problem else []
        kind = f"{self.direction} case" if self.kind == "case" else self.kind + " full" * self.full
        return " ".join([kind, *what])


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A name, its seconds, and its items on a GPU, given the lines so far."""

    name: str
    seconds: float
    items: Callable[[Gpu, Lines], Iterator[Item]]


def ways(spec: AttentionSpec, gpu: Gpu) -> list[KernelConfig]:
    """A legal config of each way of our own schedules, in the orders of tiles that suit the mask:
    the tile that the table has, if it is legal, else the likeliest.
    """
    held = {_sizes(entry.config) for entry in table_of(gpu).everything if entry.spec == spec}
    tiles = {sizes[:3] for sizes in held}

    def far(config: KernelConfig) -> tuple[bool, bool]:
        return _sizes(config) not in held, _sizes(config)[:3] not in tiles

    orders = {"longest_first" if spec.causal and spec.direction not in BY_KEYS else "plain"}
    orders.add(likely_order(spec))  # of gradients under a mask, two
    found: dict[tuple[Any, ...], KernelConfig] = {}
    for config in sorted(legal(spec, gpu), key=far):
        if config.schedule in OWN_SCHEDULES and config.order in orders:
            found.setdefault(_way(config), config)
    return list(found.values())


def _way(config: KernelConfig) -> tuple[Any, ...]:
    return tuple(getattr(config, each.name) for each in fields(config) if each.name not in SIZES)


def _sizes(config: KernelConfig) -> tuple[Any, ...]:
    return config.schedule, *(getattr(config, name) for name in SIZES)


@functools.cache
def legal(spec: AttentionSpec, gpu: Gpu) -> tuple[KernelConfig, ...]:
    """All legal configs, once."""
    return legal_configs(spec, gpu, on_gpu=True)


@functools.cache
def table_of(gpu: Gpu) -> Table:
    """The shipped table of a GPU, or an empty one."""
    path = paths.shipped_table(gpu.slug)
    return load_with_evidence(path) if path.exists() else Table(gpu=gpu)


def rivals(spec: AttentionSpec, gpu: Gpu, seq: int) -> list[KernelConfig]:
    """What a search on this GPU has to beat: the executed entry, the entry, the default."""
    table, bucket = table_of(gpu), bucket_of(seq)
    executed = [entry for entry in table.executed if entry.key == (spec, bucket)]
    entries = (*executed, table.find(spec, bucket))
    configs = [entry.config for entry in entries if entry] + [tuned_default(spec, gpu)]
    return [config for config in configs if why_illegal(spec, config, gpu) is None]


def seeds(spec: AttentionSpec, gpu: Gpu, most: int = 3) -> list[KernelConfig]:
    """What a search tries first of all other schedules, descriptors before pointers."""
    found = [c for c in seed_configs(spec, gpu, on_gpu=True) if c.schedule not in OWN_SCHEDULES]
    return sorted(found, key=lambda config: config.loads != "descriptor")[:most]


def a_round(
    spec: AttentionSpec, problem: Problem, gpu: Gpu, more: Sequence[KernelConfig] = ()
) -> Item:
    """A round of the rivals, each way, and more configs."""
    configs = (*rivals(spec, gpu, problem.seq_k), *ways(spec, gpu), *more)
    return Item(kind="round", spec=spec, problem=problem, configs=tuple(dict.fromkeys(configs)))


def rounds(forward: AttentionSpec, seq: int, gpu: Gpu, most: int = 0) -> Iterator[Item]:
    """Rounds of dK and dV, and of dQ, with some seeds."""
    for direction in ("backward_dkv", "backward_dq"):
        spec = forward.for_direction(direction)  # type: ignore[arg-type]
        yield a_round(spec, workload(spec, seq), gpu, seeds(spec, gpu, most))


def dense(
    *dims: tuple[int, int] | int, masks: Sequence[Mask] = ("none", "causal")
) -> list[AttentionSpec]:
    """Forward specs in bfloat16."""
    both = [(dim, dim) if isinstance(dim, int) else dim for dim in dims]
    return [
        AttentionSpec(dtype="bfloat16", head_dim=dim, head_dim_v=dim_v, mask=mask)
        for dim, dim_v in both
        for mask in masks
    ]


def a_case(spec: AttentionSpec, seq: int, direction: Direction) -> Item:
    """A case of flashgen bench."""
    return Item(kind="case", spec=spec, problem=workload(spec, seq), direction=direction)


def check(spec: AttentionSpec, config: KernelConfig) -> Item:
    """Compare a kernel with float64."""
    return Item(kind="check", spec=spec, problem=workload(spec, 1024), configs=(config,))


HOST = {
    "fwd_bf16_d64_causal": 16, "fwd_bf16_d64_causal_window": 16, "fwd_bf16_d64_causal_alibi": 16,
    "decode_bf16_d64_paged": 8192, "decode_bf16_d64_window_paged": 8192,
    "decode_bf16_d64_sink_paged": 8192, "combine_bf16_d64": 1,
}  # fmt: skip
"""What dispatch_overhead.py calls, with the number of keys; besides, it launches a default."""


def kernels(item: Item, gpu: Gpu) -> Iterator[tuple[AttentionSpec, KernelConfig]]:
    """What an item launches; of a case, what its contenders choose among."""
    if item.kind == "host":
        plain = default_spec(spec_of("fwd_bf16_d64"))
        yield plain, default_config(plain)
        served = served_from(paths.shipped_generated_dir())
        for name, seq in HOST.items():
            yield from first_kernels(ladder(served, gpu.slug, gpu, spec_of(name), seq))
    if item.spec is None or item.problem is None:
        return
    yield from ((item.spec, config.kernel) for config in item.configs)
    if item.spec.direction == "decode":
        merging = item.spec.for_direction("combine")
        for pdl in dict.fromkeys(config.pdl for config in item.configs):
            yield merging, replace(tuned_default(merging), pdl=pdl)
    backward = served_directions("both" if item.direction == "backward" else "forward")
    for direction in backward if item.kind == "case" else ():
        spec = item.spec.for_direction(direction)
        found = (*rivals(spec, gpu, item.problem.seq_k), *ways(spec, gpu), default_config(spec))
        yield from ((spec, config.kernel) for config in found)


FEATURES = ("window", "sink", "softcap", "alibi", "chunk")
LONG = ("window", "chunk")
"""They see only a part of the keys, so that they need many."""
PAGES = "fwd_bf16_d128_causal_varlen_paged"

RIGHT = (
    "fwd_bf16_d128_causal", "bwd_ds_bf16_d128_causal", "bwd_dq_of_ds_bf16_d128_causal",
    *(f"fwd_bf16_d128_causal_{word}" for word in FEATURES), "fwd_bf16_d128_causal_varlen",
    PAGES,
    "bwd_dkv_bf16_d128_causal", "bwd_dq_bf16_d128_causal", "fwd_bf16_d64",
    "bwd_fused_bf16_d64", "bwd_dkv_bf16_d128_causal_varlen", "bwd_dq_bf16_d128_causal_varlen",
    "bwd_dkv_bf16_d64_causal_varlen", "bwd_dq_bf16_d64_causal_varlen",
    "decode_bf16_d128", "decode_bf16_d128_paged",
)  # fmt: skip
"""The newest first: an H200 has run schedule hopper without features, and found it right."""


def _right(gpu: Gpu, lines: Lines) -> Iterator[Item]:
    """Two configs of each way, the newest first, which has more than its defaults in its label."""
    for name in RIGHT:
        spec = spec_of(name)
        mine = sorted(ways(spec, gpu), key=lambda config: -len(config.label))
        alike = [[c for c in legal(spec, gpu) if _way(c) == _way(way)][:2] for way in mine]
        for config in list(chain(*alike)) or seeds(spec, gpu, 2):
            yield check(spec, config)


def _forward(gpu: Gpu, lines: Lines) -> Iterator[Item]:
    for seq in (512, 1024, 2048, 4096):
        for spec in dense(128, 64):
            yield a_round(spec, workload(spec, seq), gpu)
    for spec in dense(128, 64):
        yield a_case(spec, 8192, "forward")


def _packed(gpu: Gpu, lines: Lines) -> Iterator[Item]:
    (plain,) = dense(128, masks=("causal",))
    spec = replace(plain, varlen=True)
    for seq in (8192, 4096, 2048, 1024, 512):
        problem = replace(workload(spec, seq), batch=8)
        forward = a_round(spec, problem, gpu, seeds(spec, gpu))
        yield from (forward, replace(forward, kind="varlen", configs=()))
        for item in rounds(spec, seq, gpu, 3):
            yield replace(item, problem=problem)


def _decode(gpu: Gpu, lines: Lines) -> Iterator[Item]:
    """Rounds of decode, each for 1, 4, 16 and as many sequences as fit, and several numbers of
    splits.
    """
    flat = spec_of("decode_bf16_d128")
    for seq in (8192, 32768, 131072):
        for spec in (flat, replace(flat, paged=True)):
            tiles = seeds(spec, gpu, 2)
            fit = [replace(tile, blocks_per_sm=blocks) for tile in tiles for blocks in (1, 3, 6)]
            fit += [replace(fit[0], pdl=True)]
            every = (replace(workload(spec, seq), batch=batch) for batch in (64, 16))
            problem = next(each for each in every if bytes_moved(spec, each) <= MOST_BYTES)
            yield a_round(spec, problem, gpu, fit)


def _head_dims(gpu: Gpu, lines: Lines) -> Iterator[Item]:
    for seq in (4096, 16384):
        for spec in dense(256, 192, (192, 128), 96):
            yield a_round(spec, workload(spec, seq), gpu)
            yield from rounds(spec, seq, gpu)
            yield a_case(spec, seq, "backward")


def _features(gpu: Gpu, lines: Lines) -> Iterator[Item]:
    (plain,) = dense(128, masks=("causal",))
    specs = {word: replace(plain, **{word: True}) for word in FEATURES} | {"paged": spec_of(PAGES)}
    for word, spec in specs.items():
        problem = workload(spec, 16384 if word in LONG else 8192)
        yield a_round(spec, problem, gpu, seeds(spec, gpu, 4))
    for word in ("window", "softcap"):
        yield from rounds(specs[word], 16384 if word in LONG else 8192, gpu, 2)


def held_out(gpu: Gpu) -> dict[Item, dict[str, Any]]:
    """Random configs, and what was estimated of them before anything ran."""
    found = {}
    for text in HELD_OUT.read_text().splitlines() if HELD_OUT.exists() else ():
        line = json.loads(text)
        if line["gpu"] == gpu.slug:
            config, problem = config_of(line["config"]), problem_of(line["problem"])
            item = Item(
                kind="rough", spec=spec_of(line["spec"]), problem=problem, configs=(config,)
            )
            found[item] = line
    return found


def _last(gpu: Gpu, lines: Lines) -> Iterator[Item]:
    """Final rounds of what was faster than all rivals, and spot checks in float16."""
    entries = [each for each in table_of(gpu).everything if each.spec.dtype == "float16"]
    for entry in [each for each in entries if each.bucket.low == 4096][::7]:
        yield check(entry.spec, entry.config)
    for line in lines:
        finals = [Outcome.from_json(each) for each in line["outcomes"] if line["kind"] == "round"]
        timed = [each for each in finals if each.timing]
        best = min(timed, key=lambda each: median_us(each.timing), default=None)
        held = rivals(best.spec, gpu, best.problem.seq_k) if best else []
        if best and best.config not in held:
            item = Item(kind="round", spec=best.spec, problem=best.problem, full=True)
            yield replace(item, configs=(best.config, *held))


EXPERIMENTS = tuple(
    Experiment(name=name, seconds=seconds, items=items)
    for name, seconds, items in (
        ("floors", 15, lambda *_: iter([Item(kind="floors")])),
        ("right", 40, _right),
        ("backward", 60, lambda *_: (a_case(s, 8192, "backward") for s in dense(128, 64, 256))),
        ("forward", 80, _forward),
        ("packed", 60, _packed),
        ("decode", 50, _decode),
        ("head dims", 70, _head_dims),
        ("features", 50, _features),
        ("host", 25, lambda *_: iter([Item(kind="host")])),
        ("held out", 60, lambda gpu, _: iter(held_out(gpu))),
        ("last", 60, _last),
    )
)


def chosen(only: Sequence[str] | None) -> list[Experiment]:
    """The experiments of these names, or all."""
    return [each for each in EXPERIMENTS if not only or each.name in only]


def items_of(only: Sequence[str] | None, gpu: Gpu) -> list[Item]:
    """Their items that do not depend on results."""
    return [item for experiment in chosen(only) for item in experiment.items(gpu, [])]


def pairs_of(only: Sequence[str] | None, gpu: Gpu) -> list[tuple[AttentionSpec, KernelConfig]]:
    """What these launch, in their order."""
    return list(dict.fromkeys(p for item in items_of(only, gpu) for p in kernels(item, gpu)))
