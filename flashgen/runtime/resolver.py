"""Resolver: from tensors to the launcher of their spec, once per device, spec and bucket.

Later calls find it with one dictionary look-up. Nothing is ever timed here, so two ranks with one
table choose alike.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from flashgen import settings
from flashgen.errors import InvalidArgument
from flashgen.kernels import interpreter, launch
from flashgen.kernels.arguments import empty_like_layout
from flashgen.runtime.call import Call
from flashgen.runtime.launcher import Launcher
from flashgen.runtime.selection import (
    Ladder,
    Selection,
    Served,
    ladder,
    prefers_fused,
    tune_command,
)
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import PLAIN, Features, key_of
from flashgen.spec.from_call import from_tensors
from flashgen.spec.gpu import Gpu, known_target
from flashgen.spec.problem import BUCKETS, bucket_of
from flashgen.spec.vocabulary import Direction

logger = logging.getLogger("flashgen.runtime")

_LOW, _MIDDLE, _HIGH = (bucket.low for bucket in BUCKETS[1:])
_QUIET = ("backward_delta", "backward_dbias")
"""Directions too cheap to advise on."""


class Resolver:
    """Finds launchers for the kernels of one generated package."""

    def __init__(self, package: str, served: Served) -> None:
        self.package = package
        self.served = served
        self.plain: dict[tuple[object, ...], Launcher] = {}
        """Forward launchers without features, by key(): what the hot path looks into."""
        self._others: dict[tuple[object, ...], Launcher] = {}
        self._fused: dict[tuple[object, ...], bool] = {}
        self._gpus: dict[torch.device, Gpu] = {}
        self._said: set[tuple[object, ...]] = set()
        self.advises = True
        """Whether it is said where a kernel comes from, and what would improve it."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool | str, precision: str
    ) -> Launcher | None:
        """The launcher of a forward without features that is not cached yet; None if torch
        serves. Raises InvalidArgument for tensors that no kernel supports.
        """
        spec, problem = from_tensors(q, k, v, causal=causal, precision=precision)
        if self.left_to_torch(q.device):
            return None
        launcher = self._resolve(spec, problem.seq_k, q.device)
        self.plain[key(q, v, spec.causal, precision)] = launcher
        return launcher

    def launcher(
        self,
        direction: Direction,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Call,
        features: Features,
    ) -> Launcher:
        """The launcher of any direction and features, for tensors on a GPU or interpreted."""
        if direction == "forward" and features is PLAIN:  # those that attention() finds
            found = self.plain.get(key(q, v, call.causal is not False, call.precision))
            found = found or self.forward(q, k, v, call.causal, call.precision)
            assert found is not None  # torch serves no tensor that comes here
            return found
        wanted = (direction, *key_of(features), *_key_of(q, v, call, features))
        found = self._others.get(wanted)
        if found is None:
            spec, problem = from_tensors(
                q, k, v, causal=call.causal, precision=call.precision, features=features
            )
            spec = spec.for_direction(direction)
            found = self._resolve(spec, problem.seq_k, q.device)
            self._others[wanted] = found
        return found

    def knows(self, q: Tensor, v: Tensor, call: Call, features: Features) -> bool:
        """Whether such a forward was resolved before, so its spec is valid."""
        if not isinstance(call.precision, str):
            return False  # and no key
        if features is PLAIN:
            return key(q, v, call.causal is not False, call.precision) in self.plain
        wanted = ("forward", *key_of(features), *_key_of(q, v, call, features))
        return wanted in self._others

    def prefers_fused(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, features: Features
    ) -> bool:
        """Whether the tables have the fused backward as faster than the two kernels it replaces."""
        wanted = (*key_of(features), *_key_of(q, v, call, features))
        if wanted not in self._fused:
            spec, problem = from_tensors(
                q, k, v, causal=call.causal, precision=call.precision, features=features
            )
            fused, dkv, dq = (
                self.ladder(spec.for_direction(direction), problem.seq_k, q.device).rungs[0]
                for direction in ("backward_fused", "backward_dkv", "backward_dq")
            )
            self._fused[wanted] = prefers_fused(fused, dkv, dq)
        return self._fused[wanted]

    def _resolve(self, spec: AttentionSpec, seq_k: int, device: torch.device) -> Launcher:
        launcher = Launcher(self.package, self.ladder(spec, seq_k, device).rungs)
        self.say(spec, launcher.selection, seq_k, device)
        return launcher

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


def addressable(x: Tensor) -> bool:
    """Whether the kernels can address x: a contiguous last dimension, rows near enough, and no lazy
    negation.

    Within a tile of at most 256 rows they count elements in 32 bits.
    """
    strides = x.stride()
    return strides[3] == 1 and strides[2] < (1 << 31) // 256 and not x.is_neg()


def key(q: Tensor, v: Tensor, causal: bool, precision: str) -> tuple[object, ...]:
    """Cache key of a launcher. The bucket index is the number of bounds at or below seq_k."""
    seq_k = v.shape[2]
    bucket = (seq_k >= _LOW) + (seq_k >= _MIDDLE) + (seq_k >= _HIGH)
    return (
        q.device, q.dtype, q.shape[3], v.shape[3], causal, bucket, precision, *settings.serving(),
    )  # fmt: skip


def _key_of(q: Tensor, v: Tensor, call: Call, features: Features) -> tuple[object, ...]:
    found = key(q, v, call.causal is not False, call.precision)
    # The length of packed sequences is that of the longest.
    return found if (packed := features.sequences) is None else (*found, bucket_of(packed.max_k))
