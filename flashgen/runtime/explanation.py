"""What explain() and explain_decode() answer, and the digest of what they choose from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from flashgen import paths, settings
from flashgen.inputs.features import named_tensors, tensors_of
from flashgen.inputs.from_call import check_scale
from flashgen.kernels.ds_runs import DsSizes
from flashgen.runtime import torch_modes
from flashgen.runtime.call import Call, check_plain, check_tensors, refuse_scale_gradient
from flashgen.runtime.decode import CacheArguments, Decoder, check_beside, check_call, decode_spec
from flashgen.runtime.few_blocks import ForwardLauncher
from flashgen.runtime.resolver import Resolver, forward_of, key, spec_of_call
from flashgen.runtime.selection import Selection, Served
from flashgen.runtime.ways import OF_WAYS
from flashgen.schedules.config import kernel_name
from flashgen.schedules.numeric_class import class_name
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from flashgen.spec.vocabulary import Direction
from flashgen.version import VERSION


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What would serve a call, from where and why; str() gives it as text.

    Args:
        spec: what the call asks for.
        selection: the kernel and its rung; None where torch serves, or nothing.
        skipped: a sentence for each better kernel that does not fit.
        hint: what would improve it.
        twin: the kernel for tensors that cannot have descriptors.
        tables: the folder of the tables that were read.
        way: of a kernel of the gradients of q, k and v, how those are computed.
        split: of a forward of few blocks, the kernels that run in place of the choice, and why.

    Examples:
        >>> import torch, flashgen
        >>> q = torch.randn(1, 2, 8, 64)
        >>> flashgen.explain(q, q, q).spec.name
        'fwd_fp32_d64'
    """

    spec: AttentionSpec
    selection: Selection | None  # None: CPU tensors, served by torch
    skipped: tuple[str, ...]
    hint: str | None
    twin: str | None = None  # the pointer twin that is launched in the choice's place
    tables: Path | None = None  # the folder that serves; None is the shipped one
    way: str | None = None
    split: str | None = None

    def __str__(self) -> str:
        if self.selection is None:
            return f"{self.spec.name}: CPU tensors are served by torch, with no kernel of flashgen"
        choice, lines = self.selection.choice, []
        timing = "" if choice.median_us is None else f", {choice.median_us:.1f} us"
        lines.append(f"{self.spec.name}: {choice.kernel} ({choice.source}{timing})")
        lines.append(f"  {self.selection.rung}: {self.selection.reason}")
        if self.spec.invariant:
            lines.append(f"  numeric class: {class_name(self.spec)}")
        if self.twin:
            lines.append(f"  its pointer twin runs: no descriptor takes these tensors: {self.twin}")
        lines += [f"  skipped {sentence}" for sentence in self.skipped]
        if self.split:
            lines.append(f"  {self.split}")
        if self.way:
            lines.append(f"  {self.way}")
        if self.tables:
            lines.append(f"  tables: {self.tables}")
        if self.hint:
            lines.append(f"  to improve it: {self.hint}")
        return "\n".join(lines)


def explain_call(
    resolver: Resolver, call: Call, q: Tensor, k: Tensor, v: Tensor, direction: Direction
) -> Explanation:
    """Which kernel attention() would run for a call, from where, and why; that of a backward
    direction too. Launches nothing. Raises InvalidArgument, naming the argument.
    """
    check_tensors(q=q, k=k, v=v)
    check_plain(k=k, v=v, **named_tensors(tensors_of(call.features)))
    q, k, v = torch_modes.autocast_all(q, k, v)
    refuse_scale_gradient(call.scale)
    call.scale_of(q)
    spec, problem = spec_of_call(call, q, k, v)
    spec = spec.for_direction(direction)
    if resolver.left_to_torch(q.device):
        return Explanation(spec=spec, selection=None, skipped=(), hint=None)
    found = resolver.ladder(spec, problem.seq_k, q.device)
    resolved = resolver.launchers.get(key(call, q, v, direction))
    launcher = resolved or resolver.made(spec, problem.seq_k, q.device)
    forward = forward_of(call, q, k, v)
    first, config = launcher.serves(forward)
    split = launcher.split(forward) if isinstance(launcher, ForwardLauncher) else None
    needs_twin = config != first.choice.config and split is None
    command = resolver.tune_command(spec, problem.seq_k, q.device)
    return Explanation(
        spec=spec,
        selection=first,
        skipped=found.skipped,
        hint=None if first.rung == "exact" else command,
        twin=kernel_name(first.choice.spec, config) if needs_twin else None,
        tables=_named_folder(resolver),
        way=_way(resolver, call, q, k, spec, problem) if direction in OF_WAYS else None,
        split=None if split is None else str(split),
    )


def _named_folder(resolver: Resolver) -> Path | None:
    return None if resolver.package == paths.SHIPPED_PACKAGE else resolver.folder


def _way(
    resolver: Resolver, call: Call, q: Tensor, k: Tensor, spec: AttentionSpec, problem: Problem
) -> str:
    ways = resolver.ways(spec, problem.seq_k, q.device)
    of = DsSizes.of(q, k, call.diagonal(q, k), call.features)
    most = settings.workspace_bytes()
    return ways.described(of, most, deterministic=call.deterministic)


def explain_cached(
    resolver: Resolver,
    decoder: Decoder,
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: CacheArguments,
) -> Explanation:
    """Which split kernel decode() would run for a call, as explain_call()."""
    cache = check_call(q, k, v, arguments)
    check_beside(call.features, q, cache)
    spec = decode_spec(call, q, cache)
    check_scale(call.scale, q.shape[3])
    if resolver.left_to_torch(q.device):
        return Explanation(spec=spec, selection=None, skipped=(), hint=None)
    found = decoder.ladder(spec, q, cache)
    command = resolver.tune_command(spec, cache.capacity, q.device)
    first = found.rungs[0]
    hint = None if first.rung == "exact" else command
    return Explanation(
        spec=spec, selection=first, skipped=found.skipped, hint=hint,
        tables=_named_folder(resolver),
    )  # fmt: skip


def digest_of_choices(folder: Path | None, served: Served) -> str:
    """sha256 of all that decides which kernel runs and what its text is, as Dispatcher.digest: the
    version, the tables, the kernels of the folder, every template, and the modules that hold the
    rules of the ladder.
    """
    tables = [
        (
            slug,
            served.archs[slug],
            [held[spec] for spec in sorted(held, key=lambda spec: spec.name)],
        )
        for slug, held in sorted(served.choices.items())
    ]
    text = repr((
        VERSION, tables, settings.served_gpu(), settings.workspace_bytes(), served.triton(),
        served.plain,
    ))  # fmt: skip
    found = hashlib.sha256(text.encode())
    kernels = sorted((folder / "kernels").glob("*.py")) if folder else []
    for path in (*kernels, *sorted(paths.templates_dir().glob("*.jinja")), *_rules()):
        content = path.read_bytes()
        found.update(f"{path.name} {len(content)}\n".encode() + content)
    return "sha256:" + found.hexdigest()


def _rules() -> list[Path]:
    """The modules from which ladder and text of a kernel follow, besides tables and templates: all
    of the folders that have some.
    """
    folders = ("inputs", "kernels", "runtime", "schedules", "spec")
    return [path for name in folders for path in sorted((paths.PACKAGE / name).rglob("*.py"))]
