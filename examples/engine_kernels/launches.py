"""Loads a patched copy of an installed module, calls the engine's host function, and records the
launch of one kernel: interpreted, or compiled for a GPU that is not there.

The functions `estimate` and `check` take and return JSON: they run in child processes.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import importlib.util
import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from engines import KERNELS, EngineKernel, Inputs, Point, Work, contiguous, inputs

from flashgen.errors import InvalidArgument, NoEstimate
from flashgen.kernels.interpreter import prepare

ACCEPTED = 1.05
"""How near to flashgen's limits of errors a kernel may be. SGLang's prefill normalizes P before it
rounds it: the rms of its errors is 1.155 of an ideally rounded kernel's, where flashgen allows
1.15."""

REPEATED = (1.0, 1.5, 2.5)
"""Times the products of a tile that a loop may compute: with more warps than a small S has parts,
all do S twice, or four times."""


def installed(name: str) -> Path:
    """The file of a module of the installed package, which is not run."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise InvalidArgument(f"{name} must be installed: pip install --no-deps its package")
    return Path(spec.origin)


def patched(kernel: EngineKernel, text: str, values: dict[str, Any]) -> str:
    """The text of the module with the choice of `values`, for what they name besides."""
    for old, new in kernel.edits:
        if text.count(old) != 1:
            raise InvalidArgument(
                f"{kernel.module} must have this line once, as the release that examples/"
                f"engine_kernels was written for: {old.strip()!r}"
            )
        for name, value in values.items():
            new = new.replace(f"{{{name}}}", str(value))
        text = text.replace(old, new)
    return text


def choice(point: Point, work: Work, capability: tuple[int, int], why: str) -> dict[str, Any]:
    """The values of a patch: for which layers and GPUs it chooses what, and the reason it gives."""
    known = {"dim": work.dim, "group": work.group, "capability": capability, "why": why}
    return {**point, **known}


def module_of(kernel: EngineKernel, text: str, capability: tuple[int, int]) -> ModuleType:
    """A module of this text, which believes that it runs on such a GPU."""
    prepare()  # repairs the interpreter's bfloat16, where it is in use
    filename = f"<{kernel.module}, patched>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    module = ModuleType(kernel.module)
    module.__file__ = filename
    exec(compile(text, filename, "exec"), module.__dict__)
    if hasattr(module, "_is_cuda"):  # SGLang's, which decide at import
        vars(module).update(_is_cuda=True, CUDA_CAPABILITY=capability)
    torch.cuda.get_device_capability = lambda device=None: capability
    return module


@dataclass(kw_only=True)
class StandIn:
    """Stands for a Triton kernel of a module, and keeps what its host function launches: the
    arguments by name, the grid, and what Triton compiled. Without a target it is interpreted.
    """

    kernel: Any
    compiles: bool
    arguments: dict[str, Any] = field(default_factory=dict)
    grid: tuple[int, ...] = ()
    compiled: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **named: Any) -> None:
            self.grid = grid
            self.arguments = dict(zip(self.kernel.arg_names, args, strict=False)) | named
            if self.compiles:
                self.compiled = self.kernel.warmup(*args, grid=grid, **named)
            else:
                self.kernel[grid](*args, **named)

        return launch

    @property
    def numbers(self) -> dict[str, int]:
        """The arguments that are whole numbers, num_warps and num_stages among them."""
        given = {name: n for name, n in self.arguments.items() if type(n) is int}
        if self.compiled is not None:
            given |= {n: getattr(self.compiled.metadata, n) for n in ("num_warps", "num_stages")}
        return given


class Ignored:
    """Stands for a kernel that is not of interest."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **named: None


class Target:
    """Stands for Triton's driver of a GPU: Triton compiles for it, and nothing is launched."""

    def __init__(self, arch: str) -> None:
        from flashgen.compile.compiler import target_of

        self._target = target_of(arch)

    def get_current_target(self) -> Any:
        """What Triton compiles for."""
        return self._target

    def get_current_device(self) -> int:
        """The number of the device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The number of the stream."""
        return 0


@contextmanager
def recorded(kernel: EngineKernel, module: ModuleType, arch: str | None) -> Iterator[StandIn]:
    """The kernel of a module, recorded while it is launched: compiled for arch, or interpreted."""
    stand_in = StandIn(kernel=getattr(module, kernel.kernel), compiles=arch is not None)
    stands = {kernel.kernel: stand_in}
    if arch is not None:
        import triton

        triton.runtime.driver.set_active(Target(arch))
        stands |= dict.fromkeys(kernel.others, Ignored())
    before = {name: vars(module)[name] for name in stands}
    vars(module).update(stands)
    try:
        yield stand_in
    finally:
        vars(module).update(before)


def launched(
    kernel: EngineKernel,
    point: Point | None,
    work: Work,
    *,
    capability: tuple[int, int],
    arch: str | None,
    given: Inputs,
) -> tuple[StandIn, torch.Tensor]:
    """The launch of a point, or of the kernel's own default, and O.

    Raises InvalidArgument if the patch does not make the engine choose the point.
    """
    text = installed(kernel.module).read_text()
    if point is not None:
        text = patched(kernel, text, choice(point, work, capability, "tuned"))
    module = module_of(kernel, text, capability)
    with recorded(kernel, module, arch) as stand_in:
        out = kernel.call(module, work, given)
    chosen = {name: stand_in.numbers.get(name) for name in point or {}}
    if chosen != dict(point or {}):
        raise InvalidArgument(f"the engine must choose {dict(point or {})}: it launched {chosen}")
    return stand_in, out


def estimate(payload: dict[str, Any]) -> dict[str, Any]:
    """Compile the launch of a point for a GPU and estimate it: {kernel, point, work, target} ->
    {found: us, numbers: what was launched}. Point None is the engine's own choice.
    """
    from flashgen.estimate import estimate_cubin
    from flashgen.spec.gpu import known_target

    kernel, work = KERNELS[payload["kernel"]], Work(**payload["work"])
    gpu = known_target(payload["target"])
    stand_in, _ = launched(
        kernel, payload["point"], work,
        capability=divmod(gpu.capability, 10), arch=gpu.arch, given=inputs(work, filled=False),
    )  # fmt: skip
    numbers, built = stand_in.numbers, stand_in.compiled
    trips = kernel.trips(numbers, work)
    demand_one_tile(kernel, built.asm["cubin"], numbers, work)
    timing = estimate_cubin(
        built.asm["cubin"],
        arch=gpu.arch,
        num_warps=numbers["num_warps"],
        shared_bytes=built.metadata.shared,
        blocks=[(n,) for n in trips],
        target=gpu,
        least_bytes=work.least_bytes,
    )
    named = {name: numbers[name] for name in kernel.values}
    return {"found": round(timing.median_us, 1), "numbers": named}


def demand_one_tile(kernel: EngineKernel, cubin: bytes, numbers: Point, work: Work) -> None:
    """Raise NoEstimate unless the machine code has one main loop, which does a tile a trip."""
    from flashgen.compile.loops import main_bodies
    from flashgen.compile.sass import disassemble

    loops = [sum(i.matrix_flops for i in body) for body in main_bodies(disassemble(cubin))]
    rows, columns = (numbers[name] for name in kernel.tile)
    tile = 4.0 * rows * columns * work.dim
    shares = [numbers["num_warps"] * flops / tile for flops in loops]
    if len(shares) != 1 or min(abs(shares[0] - share) for share in REPEATED) > 0.1:
        raise NoEstimate(f"the main loops must do one tile a trip: they do {shares}")


def check(payload: dict[str, Any]) -> dict[str, Any]:
    """Interpret the launch of a point and the default's, and compare both with float64: {kernel,
    point, work, target} -> {found: whether the point passes, errors: floors and rms of both}. The
    batch is a small one with the heads of a KV head and the head dim of `work`.
    """
    from dataclasses import replace

    from flashgen.spec.gpu import known_target

    kernel, asked = KERNELS[payload["kernel"]], Work(**payload["work"])
    heads = kernel.check.kv_heads * asked.group
    work = replace(kernel.check, heads=heads, dim=asked.dim)
    given = inputs(work, filled=True)
    capability = divmod(known_target(payload["target"]).capability, 10)
    of = {"capability": capability, "arch": None, "given": given}
    outputs = (launched(kernel, point, work, **of)[1] for point in (payload["point"], None))
    found = [judged(out, work, given) for out in outputs]
    return {"found": found[0].badness <= ACCEPTED, "errors": [[x.floors, x.rms] for x in found]}


def judged(out: torch.Tensor, work: Work, given: Inputs) -> Any:
    """The errors of O (tokens, heads, dim) beside float64, in units of rounding."""
    from flashgen.reference.attention import attention, compared, max_abs, pooled, rounded_attention

    rows = [x.split(list(work.queries)) for x in (out, given.q)]
    keys = [contiguous(x, given.table, work).split(list(work.keys)) for x in (given.k, given.v)]
    found = []
    for of_sequence in zip(*rows, *keys, strict=True):
        o, q, k, v = (x.transpose(0, 1)[None] for x in of_sequence)
        asked = {"scale": work.dim**-0.5, "diagonal": k.shape[2] - q.shape[2]}
        exact, _ = attention(q.double(), k.double(), v.double(), **asked)
        ideal, _ = rounded_attention(q, k, v, precision="ieee", **asked)
        found.append(compared(o, exact, ideal, max_abs(v)))
    return pooled(found)
