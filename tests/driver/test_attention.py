"""flashgen.attention() on the recording driver, from the call to the launch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.driver.events import Launch, Load, TensorMap, of
from tests.driver.programs import run


def test_torch_and_triton_run_on_the_recording_driver() -> None:
    assert torch.version.cuda is not None
    assert torch.cuda.get_device_name(0) == "NVIDIA H200"
    assert torch.zeros(8, device="cuda").sum().item() == 0


CALLS = """
    import torch, flashgen
    q = torch.empty(2, 8, 2048, {head_dim}, device="cuda", dtype=torch.float16)
    k, v = torch.empty_like(q), torch.empty_like(q)
    for _ in range(4):  # by Triton, then directly, then the bound launch
        flashgen.attention(q, k, v, causal=True)
    print(*(x.data_ptr() for x in (q, k, v)))
"""


@pytest.mark.parametrize(
    "head_dim",
    [64, pytest.param(128, marks=pytest.mark.slow("the same with head dim 64 is quick"))],
)
def test_attention_launches_one_kernel_of_as_many_parameters_as_its_cubin_declares(
    tmp_path: Path, head_dim: int
) -> None:
    """In a process of its own, which has loaded no kernel before."""
    done, found = run(CALLS.format(head_dim=head_dim), tmp_path)
    assert done.returncode == 0, done.stderr
    loaded, launches = of(Load, found), of(Launch, found)
    assert len(loaded) == 1
    assert len(launches) == 4
    for launch in launches:
        assert launch.kernel == loaded[0].kernel
        assert tuple(len(each) // 2 for each in launch.parameters) == loaded[0].parameter_sizes
        assert launch.broken == ""
    maps = of(TensorMap, found)
    assert {each.sizes for each in maps} == {(head_dim, 2048, 8, 2)}
    assert set(map(int, done.stdout.split())) < {each.address for each in maps}
