"""Resolver: from tensors to the launcher of their spec, once per device, spec and bucket.

Later calls find it with one dictionary look-up. Nothing is ever timed here, so two ranks with one
table choose alike.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashgen import settings
from flashgen.errors import InvalidArgument
from flashgen.inputs.features import PLAIN, check_features
from flashgen.inputs.from_call import from_tensors
from flashgen.kernels import interpreter, launch
from flashgen.kernels.arguments import FAR_STRIDE, empty_like_layout
from flashgen.kernels.launch_forward import Forward
from flashgen.runtime.call import Call, Tensors, agree
from flashgen.runtime.few_blocks import ForwardLauncher, may_split
from flashgen.runtime.launcher import Launcher
from flashgen.runtime.selection import (
    Ladder,
    Selection,
    Served,
    by_rows,
    ladder,
    rows_together,
    tune_command,
)
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu, known_target
from flashgen.spec.problem import BUCKETS, Problem, bucket_of
from flashgen.spec.vocabulary import Direction

if TYPE_CHECKING:
    from flashgen.kernels.launch_backward import Backward
    from flashgen.runtime.ways import ChosenWay, Ways

logger = logging.getLogger("flashgen.runtime")

_LOW, _MIDDLE, _HIGH = (bucket.low for bucket in BUCKETS[1:])
_QUIET = ("backward_delta", "backward_dbias")
"""Directions too cheap to advise on."""


ResolverKey = tuple[object, ...]


class Resolver:
    """Finds launchers for the kernels of one generated package, which lies in a folder."""

    def __init__(self, package: str, served: Served, folder: Path | None = None) -> None:
        self.package = package
        self.folder = folder
        self.served = served
        self.launchers: dict[ResolverKey, Launcher] = {}
        """The cache of launchers by device, spec and bucket."""
        self._ways: dict[ResolverKey, Ways] = {}
        self._gpus: dict[torch.device, Gpu] = {}
        self._said: set[tuple[object, ...]] = set()
        self.advises = True
        """Whether it is said where a kernel comes from, and what would improve it."""

    def find(self, call: Call, q: Tensor, v: Tensor) -> Launcher | None:
        """The launcher of a forward, if its spec was resolved before."""
        if not isinstance(call.precision, str):
            return None  # it fits no key
        return self.launchers.get(key(call, q, v))

    def find_checked(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, tensors: Tensors = ()
    ) -> Launcher | None:
        """find() of arguments that certainly fit together; None where that is not so. Raises
        InvalidArgument for features that do not fit.
        """
        if not agree(q, k, v):
            return None
        launcher = self.find(call, q, v)
        if launcher is not None and call.features is not PLAIN:
            check_features(call.features_with(tensors), q, k)
        return launcher

    def launcher(
        self,
        direction: Direction,
        call: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensors: Tensors = (),
    ) -> Launcher:
        """The launcher of any direction and features, for tensors on a GPU or interpreted."""
        wanted = key(call, q, v, direction)
        found = self.launchers.get(wanted)
        if found is None:
            spec, problem = spec_of_call(call, q, k, v, tensors)
            found = self.launchers[wanted] = self.resolve(
                spec.for_direction(direction), problem.seq_k, q.device
            )
        return found

    def way(
        self, call: Call, backward: Backward, tensors: Tensors, *, deterministic: bool
    ) -> ChosenWay:
        """How dQ, dK and dV are computed: the fastest way by the tables. deterministic: dQ must be
        summed in one order. Raises InvalidArgument for a bad setting of the workspace.
        """
        from flashgen.runtime.ways import PAIR

        q, k, v = backward.q, backward.k, backward.v
        wanted = key(call, q, v, "backward_ds")
        if (ways := self._ways.get(wanted)) is None:
            spec, problem = spec_of_call(call, q, k, v, tensors)
            ways = self._ways[wanted] = self.ways(spec, problem.seq_k, q.device)
        if len(ways.times) < 2:
            return PAIR
        from flashgen.kernels.launch_ds import ds_sizes

        most = settings.workspace_bytes()
        return ways.chosen(ds_sizes(backward), most, deterministic=deterministic)

    def ways(self, spec: AttentionSpec, seq_k: int, device: torch.device) -> Ways:
        """What the tables say of the ways to compute the gradients of a spec."""
        from flashgen.runtime.ways import ways_of

        slug, gpu = self.served_as(device)
        held = self.served.choices.get(slug, {})
        return ways_of(spec, gpu, held.__contains__, lambda each: self.ladder(each, seq_k, device))

    def kept(
        self,
        spec: AttentionSpec,
        device: torch.device,
        size: object,
        make: Callable[[], Launcher],
    ) -> Launcher:
        """The launcher of a spec of a cache on a device; `make` makes it once. size: what else it
        depends on, such as the bucket.
        """
        wanted = (spec, device, size, *settings.serving())
        found = self.launchers.get(wanted)
        if found is None:
            found = self.launchers[wanted] = make()
        return found

    def resolve(self, spec: AttentionSpec, seq_k: int, device: torch.device) -> Launcher:
        """A new launcher of the ladder of a spec."""
        launcher = self.made(spec, seq_k, device)
        self.say(spec, launcher.selection, seq_k, device)
        return launcher

    def made(self, spec: AttentionSpec, seq_k: int, device: torch.device) -> Launcher:
        """resolve(), but nothing is said."""
        rungs = self.ladder(spec, seq_k, device).rungs
        if spec.direction != "forward" or not may_split(spec):
            return Launcher(self.package, rungs)
        kernels = functools.partial(self._split_kernels, spec, seq_k, device)
        return ForwardLauncher(self.package, rungs, self.served_as(device)[1], kernels)

    def _split_kernels(
        self, forward: AttentionSpec, seq_k: int, device: torch.device, rows: int
    ) -> tuple[Launcher, Launcher]:
        """The launchers of decode and combine of a forward with so many rows of a head of K."""
        spec, width = forward.for_direction("decode"), rows_together(rows)

        def make() -> Launcher:
            found = sorted(self.ladder(spec, seq_k, device).rungs, key=lambda x: by_rows(x, rows))
            return Launcher(self.package, tuple(found))

        decode = self.kept(spec, device, ("split", bucket_of(seq_k), width), make)
        return decode, self.merging(spec, device)

    def merging(self, spec: AttentionSpec, device: torch.device) -> Launcher:
        """The launcher that merges the splits of a spec."""
        combine = _combine_of(spec)
        make = functools.partial(self.made, combine, 1, device)
        return self.kept(combine, device, None, make)

    def ladder(self, spec: AttentionSpec, seq_k: int, device: torch.device) -> Ladder:
        """The kernels that may serve a spec, best first."""
        slug, gpu = self.served_as(device)
        return ladder(self.served, slug, gpu, spec, seq_k)

    def tune_command(self, spec: AttentionSpec, seq_k: int, device: torch.device) -> str:
        """The command that would improve a call; offline for the GPU that a CPU stands for."""
        return tune_command(spec, seq_k, None if device.type == "cuda" else settings.served_gpu())

    def say(
        self, spec: AttentionSpec, selection: Selection, seq_k: int, device: torch.device
    ) -> None:
        """Log once per spec and rung where its kernel comes from, and what would improve it."""
        if not self.advises:
            return
        command = self.tune_command(spec, seq_k, device)
        settings.configure_logging(logging.getLogger("flashgen"))
        if (spec, selection.rung) in self._said:
            return
        self._said.add((spec, selection.rung))
        if selection.rung == "exact":
            logger.info("%s: %s, %s", spec.name, selection.choice.kernel, selection.reason)
        elif spec.direction in _QUIET:
            logger.info("%s", selection.reason)
        else:
            logger.warning("%s. To improve it: %s", selection.reason, command)

    def left_to_torch(self, device: torch.device) -> bool:
        """Whether torch serves tensors of this device: the CPU's, unless they run the kernels of
        FLASHGEN_GPU in Triton's interpreter.
        """
        if device.type != "cpu":
            return False
        return not interpreter.active() or settings.served_gpu() is None

    def served_as(self, device: torch.device) -> tuple[str, Gpu]:
        """The slug whose table serves a device, and the Gpu whose limits hold."""
        wanted = settings.served_gpu()
        if wanted is not None and wanted not in self.served.archs:
            wanted = known_target(wanted).slug
        if device.type != "cuda":
            if wanted is None or device.type != "cpu":
                raise InvalidArgument(f"q must be on a GPU or on the CPU: got device {device}")
            return wanted, known_target(wanted)
        gpu = self._gpus.get(device) or launch.device_gpu(device.index or 0)
        self._gpus[device] = gpu
        return wanted or gpu.slug, gpu

    def all_addressed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """addressed() of each."""
        if addressable(q) and addressable(k) and addressable(v):
            return q, k, v
        return self.addressed(q, "q"), self.addressed(k, "k"), self.addressed(v, "v")

    def addressed(self, x: Tensor, name: str) -> Tensor:
        """x, copied if no kernel can address it, which is logged once. The copy has the
        dimension order of x in memory, so results have the layout they would have for x.
        """
        x = x.resolve_neg()
        if addressable(x):
            return x
        if x.numel() > 0 and ("copy", name) not in self._said:
            self._said.add(("copy", name))
            logger.warning("%s is copied: no kernel can address its strides %s", name, x.stride())
        return empty_like_layout(x, x.shape[3]).copy_(x)


@functools.lru_cache(maxsize=1024)
def _combine_of(spec: AttentionSpec) -> AttentionSpec:
    """The spec that merges the splits of a decode; cached, because all specs are validated."""
    return spec.for_direction("combine")


def addressable(x: Tensor) -> bool:
    """Whether the kernels can address x: a contiguous last dimension, rows near enough, and no lazy
    negation.
    """
    strides = x.stride()
    return strides[3] == 1 and strides[2] < FAR_STRIDE and not x.is_neg()


def forward_of(call: Call, q: Tensor, k: Tensor, v: Tensor, tensors: Tensors = ()) -> Forward:
    """The launch of a forward."""
    return Forward(
        q=q, k=k, v=v, scale=call.scale_of(q), diagonal=call.diagonal(q, k),
        features=call.features_with(tensors),
    )  # fmt: skip


def spec_of_call(
    call: Call, q: Tensor, k: Tensor, v: Tensor, tensors: Tensors = ()
) -> tuple[AttentionSpec, Problem]:
    """from_tensors() of a call. Raises InvalidArgument, naming the argument."""
    features = call.features_with(tensors)
    return from_tensors(q, k, v, causal=call.causal, precision=call.precision, features=features)


def key(call: Call, q: Tensor, v: Tensor, direction: Direction = "forward") -> ResolverKey:
    """Cache key of a launcher: its device, its spec, and its bucket as the number of bounds at or
    below seq_k. Packed sequences have the bucket of the longest.
    """
    seq_k, features = v.shape[2], call.features
    bucket = (seq_k >= _LOW) + (seq_k >= _MIDDLE) + (seq_k >= _HIGH)
    found = (
        direction, q.device, q.dtype, q.shape[3], v.shape[3], call.causal is not False, bucket,
        call.precision, *settings.serving(),
    )  # fmt: skip
    if features is PLAIN:
        return found
    packed = features.sequences
    return (*found, *features.key, None if packed is None else bucket_of(packed.max_k))
