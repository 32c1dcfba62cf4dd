"""What a config costs a search without a GPU: seconds of one core to compile and estimate it."""

from __future__ import annotations

import random
import resource
from pathlib import Path

import pytest

from flashgen.compile.compiler import CompileFailed, compile_kernel
from flashgen.errors import NoEstimate
from flashgen.estimate.estimate import estimate
from flashgen.estimate.replay import cached_replay
from flashgen.kernels.render import render
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.space import legal_configs
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS, Gpu
from flashgen.spec.problem import workload
from tests.makers import make_spec

MOST_S = 1.5


def cpu_s() -> float:
    """Of this process and of the ptxas and cuobjdump that it waited for."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in both)


def compile_and_estimate(spec: AttentionSpec, config: KernelConfig, gpu: Gpu, cache: Path) -> bool:
    try:
        built = compile_kernel(render(spec, config), spec, config, gpu.arch, cache=cache)
        estimate(cached_replay(built, gpu, cache), spec, config, workload(spec, 4096), gpu)
    except (CompileFailed, NoEstimate):
        return False
    return True


@pytest.mark.slow("measures time, which a busy machine spoils")
def test_a_config_takes_a_second_and_a_half_of_a_core_at_most(tmp_path: Path) -> None:
    """The mean of a sample; one of many instructions takes longer. The first loads Triton and numba."""
    drawn = [
        (spec, config, gpu)
        for gpu in (TARGETS["nvidia_a100_sxm4_80gb"], TARGETS["nvidia_h200"])
        for spec in (make_spec("bfloat16", 64), make_spec("bfloat16", 128, mask="causal"))
        for config in random.Random(0).sample(legal_configs(spec, gpu), 5)
    ]
    compile_and_estimate(*drawn[0], tmp_path)
    began = cpu_s()
    estimated = sum(compile_and_estimate(*each, tmp_path) for each in drawn[1:])
    assert estimated > 10
    assert (cpu_s() - began) / len(drawn[1:]) <= MOST_S
