"""Where a run evaluates: a Place for each GPU product, by what the options name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flashgen.compile.known_bugs import warnings_here
from flashgen.errors import NoGpuError
from flashgen.estimate.estimate import estimable
from flashgen.estimate.sm import clock
from flashgen.evaluate import pools
from flashgen.evaluate.build import cpu_count
from flashgen.evaluate.pools import Children, Pools
from flashgen.evaluate.workers.answers import Pool, WorkerLost
from flashgen.evaluate.workers.crew import Crew
from flashgen.spec.gpu import OFFLINE_TARGET, TARGETS, Gpu, known_target
from flashgen.tune import devices

ALL = "all"
"""Names all known targets, or all GPUs."""

Say = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class TuningTarget:
    """A GPU product to tune for, and who evaluates: without pools.device, offline."""

    gpu: Gpu
    pools: Pools


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Where to tune. gpu: require a GPU; target: a slug, or ALL, to tune for offline; gpus: as
    devices.chosen has it; none of them: a GPU if there is one. jobs: child processes that compile
    and interpret; None: one a core.
    """

    gpu: bool = False
    target: str | None = None
    gpus: str | None = None
    jobs: int | None = None


@contextlib.contextmanager
def opened(wanted: TargetOptions, say: Say) -> Iterator[tuple[TuningTarget, ...]]:
    """The places of this host, closed at the end; says which, and why nothing is measured.

    Raises NoGpuError, InvalidArgument and ToolchainError.
    """
    targets, found = choose(wanted, say)
    with contextlib.ExitStack() as stack:
        jobs = jobs_of(wanted, found)
        cpu = crew([Children(jobs)] * jobs, say)
        stack.callback(cpu.close)
        there = [TuningTarget(gpu=gpu, pools=Pools(cpu=cpu)) for gpu in targets]
        for gpu, indices in by_product(found).items():
            gpus = crew([pools.Device(index) for index in indices], say)
            stack.callback(gpus.close)
            there.append(TuningTarget(gpu=gpu, pools=Pools(cpu=cpu, device=gpus)))
        yield tuple(there)


def jobs_of(wanted: TargetOptions, found: Mapping[int, Gpu]) -> int:
    """How many child processes compile and interpret beside these devices. A core is for each child
    that launches: a late launch would show in short kernels' times.
    """
    return wanted.jobs or max(1, cpu_count() - len(found))


def by_product(found: Mapping[int, Gpu]) -> dict[Gpu, list[int]]:
    """The indices of the devices of each product."""
    return {gpu: [n for n, own in found.items() if own == gpu] for gpu in found.values()}


def crew(seats: Sequence[Pool], say: Say) -> Crew:
    """These seats as one pool, which says if some are lost."""

    def lost(_: Pool, error: WorkerLost) -> None:
        if made.size:  # otherwise the run ends with this
            say(f"Going on without it: {error}")

    made = Crew(seats, on_loss=lost)
    return made


def choose(wanted: TargetOptions, say: Say) -> tuple[tuple[Gpu, ...], dict[int, Gpu]]:
    """What `wanted` names on this host: targets to tune for offline, and devices by their index.
    Says which, and why nothing is measured.
    """
    if wanted.gpus is not None:
        found = devices.chosen(wanted.gpus, devices.devices())
        for gpu, indices in by_product(found).items():
            numbers = ", ".join(map(str, indices))
            say(f"Tuning for {gpu.name} ({gpu.slug}), measuring on GPU {numbers}.")
            warn(gpu, say)
        return (), found
    if wanted.target is None:
        from flashgen.kernels.launch import device_gpu

        try:
            gpu = device_gpu(0, instead=devices.in_place_of("--gpu"))
        except NoGpuError:
            if wanted.gpu:
                raise
        else:
            say(f"Tuning for {gpu.name} ({gpu.slug}), measuring on it.")
            warn(gpu, say)
            return (), {0: gpu}
    why = "--target uses no GPU" if wanted.target else "there is no GPU here"
    return offline_targets(wanted.target, why, say), {}


def offline_targets(target: str | None, why: str, say: Say) -> tuple[Gpu, ...]:
    """The GPUs that a word of --target names; says that nothing is measured, and why."""
    if target == ALL:
        clock()  # raises without numba
        blind = ", ".join(gpu.slug for gpu in TARGETS.values() if not estimable(gpu.arch))
        say(
            f"Tuning offline for all {len(TARGETS)} known GPUs: the results are estimates, or for "
            f"{blind} chosen by rule; nothing is measured."
        )
        return tuple(TARGETS.values())
    gpu = known_target(target or OFFLINE_TARGET)
    result = "the results are estimates"
    if estimable(gpu.arch):
        clock()  # raises without numba
    else:
        result = f"the estimator does not know {gpu.arch}, so configs are chosen by rule"
    say(
        f"Tuning offline for {gpu.name} ({gpu.slug}): {result}; nothing is measured, because {why}."
    )
    warn(gpu, say)
    return (gpu,)


def warn(gpu: Gpu, say: Say) -> None:
    """Say what is known to be wrong with this Triton on the GPU."""
    for warning in warnings_here(gpu.arch):
        say(f"Warning: {warning}")
