"""Memory of streams, on a device that is made up: zeros are shared, and counters are one's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.kernels import stream_memory
from flashgen.kernels.stream_memory import COUNTER, counter, forget_counters, shared_at, zeros


@dataclass
class Gpu:
    """Of each device one stream is current, which may be captured; `like` is a tensor there."""

    stream: int = 7
    capturing: bool = False
    made: list[Tensor] = field(default_factory=list)

    def like(self, number: int = 0) -> Any:
        def new_zeros(shape: Any, dtype: torch.dtype = torch.int64) -> Tensor:
            self.made.append(torch.zeros(shape, dtype=dtype))
            return self.made[-1]

        def new_full(shape: Any, value: int, dtype: torch.dtype) -> Tensor:
            self.made.append(torch.full(shape, value, dtype=dtype))
            return self.made[-1]

        return SimpleNamespace(
            device=torch.device("cuda", number), is_cuda=True, dtype=torch.int64,
            new_zeros=new_zeros, new_full=new_full,
        )  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    current = lambda device: SimpleNamespace(cuda_stream=made.stream)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    for name in ("_constants", "_counters", "_spare", "_every"):
        monkeypatch.setattr(stream_memory, name, {})
    return made


def addresses(*found: Tensor) -> set[int]:
    return {x.data_ptr() for x in found}


def test_launches_of_a_stream_count_with_one_counter_and_no_others_do(gpu: Gpu) -> None:
    first, again = counter(gpu.like()), counter(gpu.like())
    assert addresses(first) == addresses(again)
    assert (first.dtype, first.tolist()) == (torch.int32, [0] * COUNTER)
    elsewhere = counter(gpu.like(1))
    gpu.stream = 8
    assert len(addresses(first, elsewhere, counter(gpu.like()))) == 3


def test_each_launch_of_a_graph_has_a_counter_that_is_0_before(gpu: Gpu) -> None:
    """Which nothing sets to 0 at a replay, as long as there are some."""
    own = counter(gpu.like())
    gpu.capturing = True
    before = len(gpu.made)
    found = [counter(gpu.like()) for _ in range(stream_memory.SPARE_COUNTERS)]
    assert len(gpu.made) == before
    assert len(addresses(own, *found)) == 1 + len(found)
    assert not any(address % 16 for address in addresses(own, *found))
    assert not torch.stack(found).any()
    last = counter(gpu.like())
    assert addresses(last) == addresses(gpu.made[before])


def test_a_graph_that_is_captured_first_has_its_own_memory(gpu: Gpu) -> None:
    gpu.capturing = True
    assert addresses(counter(gpu.like())) == addresses(*gpu.made)
    assert addresses(zeros(3, gpu.like())) == addresses(gpu.made[-1])
    gpu.capturing = False
    assert not addresses(counter(gpu.like()), zeros(3, gpu.like())) & addresses(*gpu.made[:2])


def test_who_repeats_a_launch_knows_whose_memory_it_took(gpu: Gpu) -> None:
    counts, read = counter(gpu.like()), zeros(3, gpu.like())
    kept = {
        name: shared_at(x.untyped_storage().data_ptr())
        for name, x in (("counts", counts), ("read", read))
    }
    told = {name: (each.stream, each.written) for name, each in kept.items() if each}
    assert told == {"counts": (7, True), "read": (7, False)}
    assert shared_at(1) is None


def test_forgotten_counters_stay_in_memory_for_the_graphs_that_hold_them(gpu: Gpu) -> None:
    first = counter(gpu.like())
    first[0] = 5
    forget_counters()
    assert not counter(gpu.like()).any()
    assert shared_at(first.untyped_storage().data_ptr()) is not None
