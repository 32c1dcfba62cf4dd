"""Precompile: compiles the kernels of a table before the first call.

Triton caches a compiled kernel under its text, the types and alignment of its arguments, its
options, the architecture, the Triton version and ptxas. Here kernels are compiled with exactly the
types of a launch with aligned tensors (kernels/signature.py), so that launch finds them. `flashgen
warmup` compiles into the user's own cache. `flashgen aot` writes to a folder, which the runtime
then offers to Triton under the same key (runtime/kernel_files.py). If anything in the key differs,
the binary is not found and Triton compiles as usual: nothing wrong is ever run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flashgen.errors import FlashgenError, GeneratedError, InvalidArgument
from flashgen.evaluate.build import cpu_count
from flashgen.evaluate.evaluator import triton_version
from flashgen.evaluate.payloads import COMPILE_ENV, COMPILE_LIMIT_S, ForArch, task
from flashgen.evaluate.workers.answers import Done
from flashgen.evaluate.workers.pool import Workers
from flashgen.files import temporary_folder, write_whole
from flashgen.runtime.choice import Choice, by_spec
from flashgen.runtime.few_blocks import WIDTHS, may_split
from flashgen.runtime.kernel_files import MANIFEST, SCHEMA
from flashgen.runtime.selection import Served, by_rows, first_kernels, ladder
from flashgen.schedules.config import KernelConfig, kernel_name
from flashgen.schedules.defaults import (
    WIDEST_DECODE,
    default_configs,
    featured_specs,
    other_half,
    plain_specs,
)
from flashgen.schedules.grid_rules import SPLIT_FLOPS
from flashgen.schedules.legality import why_illegal
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import masks_of
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import BUCKETS
from flashgen.table.entry import Entry
from flashgen.table.table import Table

SpecConfig = tuple[AttentionSpec, KernelConfig]


@dataclass(frozen=True, kw_only=True)
class Precompiled:
    """One kernel: Triton's keys, or why it has none. A default may not fit a small GPU.

    A decode kernel has two: for one split, O has another dtype than for several.
    """

    name: str
    keys: tuple[str, ...]
    failure: str = ""


def kernels_to_build(
    table: Table | None,
    gpu: Gpu,
    *,
    defaults: bool,
    features: Sequence[str] = (),
    head_dims: Sequence[int] = (),
) -> tuple[SpecConfig, ...]:
    """What calls on `gpu` launch first, by the ladder that serves them from `table`: of each spec
    with an entry at every length; with `defaults` also in the other 16-bit type, and the default
    kernels of specs without features; of `head_dims`, those without features; with `features`,
    FEATURE_WORDS, those of all these specs with the features on. Pointer twins are included.
    Without duplicates. Raises InvalidArgument for what is no set of features.
    """
    next(plain_specs()).with_features(features)  # raises for what is no set of features
    entries = (*table.executed, *table.entries) if table else ()
    served = Served(archs={}, choices={})
    if table is not None:
        slug = table.gpu.slug
        choices = by_spec(map(choice_of, entries))
        served = Served(archs={slug: table.gpu.arch}, choices={slug: choices})
    specs = dict.fromkeys(entry.spec for entry in entries)
    if defaults:
        specs |= dict.fromkeys(half for spec in specs if (half := other_half(spec)) is not None)
    specs |= dict.fromkeys(plain_specs(tuple(head_dims)))
    untuned = dict.fromkeys(plain_specs() if defaults else ())
    if features:
        with_features = (_with(spec, features) for spec in specs)
        specs |= dict.fromkeys(spec for spec in with_features if spec is not None)
        untuned |= dict.fromkeys(featured_specs(features))
    pairs = [pair for spec in specs for pair in _picked(served, gpu, spec)]
    pairs += [(spec, config) for spec in untuned for config in default_configs(spec)]
    split = [spec for spec in specs if spec.direction == "forward" and may_split(spec)]
    if gpu.arch in SPLIT_FLOPS:
        pairs += [pair for spec in split for pair in _split(served, gpu, spec)]
    early = [spec.for_direction("combine") for spec, config in pairs if config.pdl]
    found = (pair for merging in dict.fromkeys(early) for pair in _picked(served, gpu, merging))
    pairs += [(merging, replace(config, pdl=True)) for merging, config in found]
    legal = (pair for pair in pairs if why_illegal(*pair, gpu) is None)
    return tuple(dict.fromkeys(legal))


def _with(spec: AttentionSpec, features: Sequence[str]) -> AttentionSpec | None:
    """The spec with these features on; None where it cannot have them, or would never run: the
    fused backward is chosen by its time alone.
    """
    if spec.direction == "backward_fused" or spec.mask not in masks_of(features):
        return None
    try:
        return spec.with_features(features)
    except InvalidArgument:
        return None


def _picked(served: Served, gpu: Gpu, spec: AttentionSpec) -> Iterator[SpecConfig]:
    """The kernels that calls of a spec launch first, at any length and with any rows."""
    for bucket in BUCKETS:
        try:
            found = ladder(served, gpu.slug, gpu, spec, bucket.low)
        except (GeneratedError, InvalidArgument):  # not even a default kernel is legal there
            return
        for rows in (1, WIDEST_DECODE):
            rungs = sorted(found.rungs, key=lambda rung: by_rows(rung, rows))
            yield from first_kernels(replace(found, rungs=tuple(rungs)))


def _split(served: Served, gpu: Gpu, forward: AttentionSpec) -> Iterator[SpecConfig]:
    """The kernels that forwards of few blocks launch first."""
    decode, combine = forward.for_direction("decode"), forward.for_direction("combine")
    for bucket in BUCKETS:
        for rows in WIDTHS:
            found = ladder(served, gpu.slug, gpu, decode, bucket.low).rungs
            first = min(found, key=lambda rung: by_rows(rung, rows)).choice
            yield first.spec, first.config
    yield from _picked(served, gpu, combine)


def choice_of(entry: Entry) -> Choice:
    """The choice that generated/ makes of an entry."""
    return Choice(
        spec=entry.spec,
        bucket=entry.bucket,
        config=entry.config,
        source=entry.result.source,
        median_us=entry.result.median_us,
        tritons=entry.tritons,
    )


def precompile(
    pairs: Iterable[SpecConfig], gpu: Gpu, *, cache: Path | None = None, jobs: int | None = None
) -> Iterator[Precompiled]:
    """Compile kernels for `gpu` in parallel in child processes; yields each when it is done.

    cache: the folder for the binaries, in Triton's layout; Triton's own by default. Existing
    binaries are not compiled again. Raises ToolchainError if children cannot run.
    """
    pairs = list(pairs)
    env = COMPILE_ENV | ({} if cache is None else {"TRITON_CACHE_DIR": str(cache)})
    with Workers(min(jobs or cpu_count(), max(1, len(pairs))), env=env) as workers:
        answers = [
            workers.submit(
                task(
                    "flashgen.evaluate.tasks:precompile_one",
                    ForArch(spec=spec, config=config, arch=gpu.arch),
                    COMPILE_LIMIT_S,
                )
            )
            for spec, config in pairs
        ]
        for pair, waiting in zip(pairs, answers, strict=True):
            answer, name = waiting.result(), kernel_name(*pair)
            if isinstance(answer, Done):
                yield Precompiled(name=name, keys=tuple(answer.value["keys"]))
            else:
                yield Precompiled(name=name, keys=(), failure=str(answer))


def package(
    table: Table,
    pairs: Iterable[SpecConfig],
    out: Path,
    *,
    jobs: int | None = None,
    cache: Path | None = None,
) -> Iterator[Precompiled]:
    """Compile kernels into the folder `out`, for use with `FLASHGEN_AOT=OUT`. cache: a folder of
    Triton's, which may have some of them.

    out/<slug>/ holds Triton's metadata and binary of each kernel, and a manifest, which is written
    last: if it exists, so does all that it names. Kernels that do not compile are left out. Raises
    FlashgenError if the folder cannot be written, and the errors of precompile.
    """
    folder, kernels = out / table.gpu.slug, {}
    with contextlib.ExitStack() as stack:
        cache = cache or stack.enter_context(temporary_folder("aot"))
        for made in precompile(pairs, table.gpu, cache=cache, jobs=jobs):
            if made.keys:
                kernels[made.name] = [
                    {"key": key, "files": _kept(cache, made.name, key, folder)} for key in made.keys
                ]
            yield made
    manifest = {
        "schema": SCHEMA,
        "gpu": asdict(table.gpu)["name"],
        "arch": table.gpu.arch,
        "triton": triton_version(),
        "kernels": kernels,
    }
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def _kept(cache: Path, name: str, key: str, folder: Path) -> dict[str, str]:
    """Copy metadata and binary of a kernel's key out of Triton's cache; returns the sha256 of each
    file by its name.
    """
    found = [
        path
        for path in cache.rglob(f"{name[:150]}*")  # where Triton cuts a name
        if path.suffix in (".json", ".cubin", ".hsaco") and not path.name.startswith("__grp__")
    ]
    keys = {path: json.loads(path.read_text())["hash"] for path in found if path.suffix == ".json"}
    (home,) = {path.parent for path, of in keys.items() if of == key}
    files = sorted(path for path in found if path.parent == home)
    if len(files) != 2:
        raise FlashgenError(
            f"Triton must leave metadata and one binary of {name}: "
            f"got {', '.join(path.name for path in files)}"
        )
    kept = {}
    for path in files:
        content = path.read_bytes()
        write_whole(folder / key / path.name, content)
        kept[path.name] = hashlib.sha256(content).hexdigest()
    return kept
