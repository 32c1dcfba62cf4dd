"""Dispatcher: attention() for tensors, on the kernels of one generated package.

A spec is resolved once per device and bucket into a launcher; later calls find it with one
dictionary look-up. Nothing is ever timed here, so two ranks with one table choose alike.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from flashgen import interpreter, launch, settings
from flashgen.choice import Choice
from flashgen.config import kernel_name
from flashgen.errors import InvalidArgument
from flashgen.gpu import Gpu, known_target
from flashgen.runtime import cpu
from flashgen.runtime.launcher import Launcher
from flashgen.runtime.select import Selection, Served, ladder, tune_command
from flashgen.spec import BUCKETS, AttentionSpec, check_scale, diagonal_of, from_tensors

logger = logging.getLogger("flashgen.runtime")

_LOW, _MIDDLE, _HIGH = (bucket.low for bucket in BUCKETS[1:])
Causal = bool | Literal["top_left", "bottom_right"]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What would serve a call, from where and why; str() gives it as text."""

    spec: AttentionSpec
    selection: Selection | None  # None: CPU tensors, served by torch
    skipped: tuple[str, ...]
    hint: str | None
    twin: str | None = None  # the pointer twin that is launched in the choice's place

    def __str__(self) -> str:
        if self.selection is None:
            return f"{self.spec.name}: CPU tensors are served by torch, with no kernel of flashgen"
        choice, lines = self.selection.choice, []
        timing = "" if choice.median_us is None else f", {choice.median_us:.1f} us"
        lines.append(f"{self.spec.name}: {choice.kernel} ({choice.source}{timing})")
        lines.append(f"  {self.selection.rung}: {self.selection.reason}")
        if self.twin:
            lines.append(f"  its pointer twin runs: no descriptor takes these tensors: {self.twin}")
        lines += [f"  skipped {sentence}" for sentence in self.skipped]
        if self.hint:
            lines.append(f"  to improve it: {self.hint}")
        return "\n".join(lines)


class Dispatcher:
    """Serves attention from `package`.kernels by the choices of `package`.table."""

    def __init__(
        self,
        *,
        package: str,
        archs: Mapping[str, str],
        choices: Mapping[str, tuple[Choice, ...]],
        defaults: tuple[Choice, ...],
    ) -> None:
        self._package = package
        self._served = Served(archs=archs, choices=choices, defaults=defaults)
        self._launchers: dict[tuple[object, ...], Launcher] = {}
        self._gpus: dict[torch.device, Gpu] = {}
        self._said: set[tuple[object, ...]] = set()

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: Causal = ..., scale: float | None = ...,
        precision: str = ..., return_lse: Literal[False] = ...,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: Causal = ..., scale: float | None = ...,
        precision: str = ..., return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: Causal = False,
        scale: float | None = None,
        precision: str = "ieee",
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Exact attention, softmax(scale * Q K^T) V.

        q (batch, heads, seq_q, head_dim), k (batch, kv_heads, seq_k, head_dim) and v (batch,
        kv_heads, seq_k, head_dim_v), float16, bfloat16 or float32, in any strides; kv_heads divides
        heads. causal: True or "bottom_right" (the last query sees the last key), "top_left", or
        False. scale: 1/sqrt(head_dim) unless given. precision: how float32 is multiplied, "ieee" or
        "tf32". Returns O (batch, heads, seq_q, head_dim_v), with return_lse also LSE (batch, heads,
        seq_q), float32, natural logarithm. A query with no key to attend has O = 0 and LSE = -inf.
        Raises InvalidArgument, a ValueError, naming the argument.
        """
        launcher = self.lookup(q, v, causal is not False, precision) if _agree(q, k, v) else None
        if launcher is None:
            launcher = self._resolve(q, k, v, causal, precision)
        number = check_scale(scale, q.shape[3])
        diagonal = diagonal_of(causal, q.shape[2], k.shape[2])
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise InvalidArgument(
                "q, k and v must not require gradients, which flashgen does not compute yet: "
                "call under torch.no_grad(), or detach them"
            )
        if launcher is None:
            o, lse = cpu.attention(q, k, v, causal=causal, scale=number, return_lse=return_lse)
            return o if lse is None else (o, lse)
        if not (_addressable(q) and _addressable(k) and _addressable(v)):
            q, k, v = self._addressed(q, "q"), self._addressed(k, "k"), self._addressed(v, "v")
        o, lse = launcher(q, k, v, number, diagonal)
        return (o, lse) if return_lse else o

    def lookup(self, q: Tensor, v: Tensor, causal: bool, precision: str) -> Launcher | None:
        """The launcher of a resolved spec, or None: the hot path, a tuple and one look-up."""
        return self._launchers.get(_key(q, v, causal, precision))

    def explain(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: Causal = False, precision: str = "ieee"
    ) -> Explanation:
        """Which kernel attention() would run for these tensors, from where, and why. Launches
        nothing.
        """
        spec, problem = from_tensors(q, k, v, causal=causal, precision=precision)
        if q.device.type == "cpu" and not self._interprets():
            return Explanation(spec=spec, selection=None, skipped=(), hint=None)
        slug, gpu = self._served_as(q.device)
        found = ladder(self._served, slug, gpu, spec, problem.seq_k)
        resolved = self.lookup(q, v, causal is not False, precision)
        first, config = (resolved or Launcher(self._package, found.rungs)).serves(q, k, v)
        return Explanation(
            spec=spec,
            selection=first,
            skipped=found.skipped,
            hint=None if first.rung == "exact" else _tune_command(spec, problem.seq_k, q.device),
            twin=None if config == first.choice.config else kernel_name(first.choice.spec, config),
        )

    def digest(self) -> str:
        """sha256 of all that decides which kernel runs: equal on two ranks, they choose alike on
        equal GPUs.
        """
        text = repr(
            (
                sorted(self._served.archs.items()),
                sorted(self._served.choices.items()),
                self._served.defaults,
            )
        )
        return "sha256:" + hashlib.sha256((text + repr(settings.served_gpu())).encode()).hexdigest()

    def _resolve(
        self, q: Tensor, k: Tensor, v: Tensor, causal: Causal, precision: str
    ) -> Launcher | None:
        """The launcher of a call not met before, kept for the next; None where torch serves.

        Raises InvalidArgument for tensors that no kernel takes.
        """
        spec, problem = from_tensors(q, k, v, causal=causal, precision=precision)
        if q.device.type == "cpu" and not self._interprets():
            return None
        slug, gpu = self._served_as(q.device)
        found = ladder(self._served, slug, gpu, spec, problem.seq_k)
        launcher = Launcher(self._package, found.rungs)
        self._launchers[_key(q, v, spec.causal, precision)] = launcher
        self._say(spec, launcher.selection, _tune_command(spec, problem.seq_k, q.device))
        return launcher

    def _say(self, spec: AttentionSpec, selection: Selection, command: str) -> None:
        """Once per spec and rung: where its kernel comes from, and what would improve it."""
        settings.configure_logging(logging.getLogger("flashgen"))
        if (spec, selection.rung) in self._said:
            return
        self._said.add((spec, selection.rung))
        if selection.rung == "exact":
            logger.info("%s: %s, %s", spec.name, selection.choice.kernel, selection.reason)
        else:
            logger.warning("%s. To improve it: %s", selection.reason, command)

    def _interprets(self) -> bool:
        """Whether CPU tensors run the kernels of FLASHGEN_GPU in Triton's interpreter."""
        return interpreter.active() and settings.served_gpu() is not None

    def _served_as(self, device: torch.device) -> tuple[str, Gpu]:
        """The slug whose table serves a device, and the Gpu whose limits hold."""
        wanted = settings.served_gpu()
        if wanted is not None and wanted not in self._served.archs:
            wanted = known_target(wanted).slug
        if device.type != "cuda":
            if wanted is None:
                raise InvalidArgument(f"q must be on a GPU or on the CPU: got device {device}")
            return wanted, known_target(wanted)
        gpu = self._gpus.get(device) or launch.device_gpu(device.index or 0)
        self._gpus[device] = gpu
        return wanted or gpu.slug, gpu

    def _addressed(self, x: Tensor, name: str) -> Tensor:
        """x, copied if no kernel can address it, which is said once."""
        if _addressable(x):
            return x
        if ("copy", name) not in self._said:
            self._said.add(("copy", name))
            logger.warning("%s is copied: no kernel can address its strides %s", name, x.stride())
        return x.contiguous()


def _tune_command(spec: AttentionSpec, seq_k: int, device: torch.device) -> str:
    """What would improve a call; offline for the GPU that a CPU stands for."""
    return tune_command(spec, seq_k, None if device.type == "cuda" else settings.served_gpu())


def _agree(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether three tensors surely fit together: what a call of a resolved spec must still check.

    False asks from_tensors, which judges the odd cases and names what is wrong.
    """
    a, b, c = q.shape, k.shape, v.shape
    return (
        len(a) == len(b) == len(c) == 4
        and a[0] == b[0] == c[0]
        and b[1] == c[1]
        and b[1] > 0
        and a[1] % b[1] == 0
        and b[2] == c[2]
        and a[3] == b[3]
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
    )


def _addressable(x: Tensor) -> bool:
    """Whether the kernels can address x: a contiguous last dimension, and rows near enough.

    Within a tile of at most 256 rows they count elements in 32 bits.
    """
    return x.stride(3) == 1 and x.stride(2) < (1 << 31) // 256


def _key(q: Tensor, v: Tensor, causal: bool, precision: str) -> tuple[object, ...]:
    """What a launcher depends on. The bucket is told by how many bounds seq_k reaches."""
    seq_k = v.shape[2]
    bucket = (seq_k >= _LOW) + (seq_k >= _MIDDLE) + (seq_k >= _HIGH)
    return (q.device, q.dtype, q.shape[3], v.shape[3], causal, bucket, precision)
