"""A kept call of attention() or decode(): nothing but two tensors, one launch, and the arguments of Triton's launcher."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import flashgen
from flashgen.kernels import bound_call
from tests.driver.events import Call, Launch, Recording, TensorMap, TorchKernel


def kept(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Make the call until its launch is bound."""
    for _ in range(3):
        flashgen.attention(q, k, v, causal=True)


ALIVE: list[torch.Tensor] = []
"""All tensors of this file: a tensor map is known by its address, which a freed tensor would pass on."""


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["plain", "hopper"])
def tensors(request: pytest.FixtureRequest) -> list[torch.Tensor]:
    """Of a plain kernel with descriptors, and of one of schedule hopper; of a length of their own."""
    made = [torch.empty(2, 8, 520, 128, device="cuda", dtype=request.param) for _ in range(3)]
    ALIVE.extend(made)
    return made


def test_it_waits_for_nothing_and_allocates_o_and_lse_alone(
    tensors: list[torch.Tensor], recording: Recording
) -> None:
    kept(*tensors)
    calls, before = len(recording.of(Call)), torch.cuda.memory_allocated()
    foreign = len(recording.of(TorchKernel))
    torch.cuda.reset_peak_memory_stats()
    o, lse = flashgen.attention(*tensors, causal=True, return_lse=True)
    assert recording.of(Call)[calls:] == []
    assert recording.of(TorchKernel)[foreign:] == []
    assert torch.cuda.memory_allocated() - before == o.nbytes + lse.nbytes
    assert torch.cuda.max_memory_allocated() - before == o.nbytes + lse.nbytes


def test_tensor_maps_are_encoded_once_for_an_address(
    tensors: list[torch.Tensor], recording: Recording
) -> None:
    kept(*tensors)
    flashgen.attention(*tensors, causal=True)
    known = len(recording.of(TensorMap))
    flashgen.attention(*tensors, causal=True)
    assert len(recording.of(TensorMap)) == known
    q, k, v = tensors
    o = flashgen.attention(k, q, v, causal=True)  # new addresses for two arguments
    new = {each.address for each in recording.of(TensorMap)[known:]}
    assert new - {o.data_ptr()} == {
        q.data_ptr(),
        k.data_ptr(),
    }  # some kernels store O by a map, too


def test_a_map_of_freed_memory_serves_the_next_tensor_there(recording: Recording) -> None:
    """It holds address and layout, which are the new tensor's, too."""
    addresses, calls = set(), 16  # the allocator has other free blocks, too
    for _ in range(calls):
        q, k, v = (
            torch.empty(2, 8, 512, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        addresses.add(q.data_ptr())
        flashgen.attention(q, k, v, causal=True)
    assert len(addresses) < calls
    for launch in recording.of(Launch):
        assert launch.broken == ""


def test_maps_are_dropped_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_call, "MOST_MAPS", 2)
    made: list[torch.Tensor] = []
    maps = bound_call._Maps(lambda tensor: tensor, lambda tensor: made.append(tensor) or [1])
    for _ in range(5):
        maps(torch.empty(4096, device="cuda"))
    held = [torch.empty(4096, device="cuda") for _ in range(5)]
    for tensor in held:
        maps(tensor)
    assert len(maps.known) <= 2


def in_turn(*factors: tuple[Any, ...]) -> list[tuple[tuple[int, ...], tuple[Any, ...]]]:
    """Each choice of one value of each factor, after the places of the values."""
    places = itertools.product(*(range(len(values)) for values in factors))
    return list(zip(places, itertools.product(*factors), strict=True))


SLOW_HEADS = pytest.mark.slow(
    "make -f tests/sessions.mk test-driver-short has each head dim, and each choice of what else is passed"
)
SLOW = pytest.mark.slow(
    "make -f tests/sessions.mk test-driver-short has every pair of dtype, mask and head dim"
)


@pytest.mark.parametrize(
    ("dtype", "causal", "head_dim"),
    [
        pytest.param(*each, marks=() if sum(places) % 2 == 0 else SLOW)
        for places, each in in_turn(
            (torch.bfloat16, torch.float16, torch.float32), (False, True), (64, 128)
        )
    ],
)
def test_it_hands_over_what_triton_hands_over(
    recording: Recording,
    monkeypatch: pytest.MonkeyPatch,
    head_dim: int,
    causal: bool,
    dtype: torch.dtype,
) -> None:
    shapes = [(2, 8, 512, head_dim), (2, 4, 512, head_dim), (2, 4, 512, head_dim)]
    q, k, v = (torch.empty(shape, device="cuda", dtype=dtype) for shape in shapes)
    for _ in range(4):  # by Triton, directly, and twice by the bound launch
        flashgen.attention(q, k, v, causal=causal)
    monkeypatch.setenv("FLASHGEN_DIRECT", "0")
    flashgen.attention(q, k, v, causal=causal)
    launches = recording.of(Launch)
    assert len(launches) == 5
    assert len(set(launches)) <= 2  # O and LSE may lie at two addresses in turn
    assert launches[-1] in launches[:-1]


@pytest.mark.parametrize(
    ("head_dim", "brought"),
    [
        pytest.param(*each, marks=() if sum(places) % 2 == 0 else SLOW_HEADS)
        for places, each in in_turn(
            (64, 128), (("sinks",), ("alibi_slopes",), ("sinks", "alibi_slopes"))
        )
    ],
)
def test_so_it_does_with_numbers_of_heads(
    recording: Recording, monkeypatch: pytest.MonkeyPatch, brought: tuple[str, ...], head_dim: int
) -> None:
    shapes = [(2, 8, 512, head_dim), (2, 4, 512, head_dim), (2, 4, 512, head_dim)]
    q, k, v = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    given: dict[str, Any] = {name: torch.zeros(8, device="cuda") for name in brought}
    for number in range(5):
        if number == 4:
            monkeypatch.setenv("FLASHGEN_DIRECT", "0")
        calls = len(recording.of(Call))
        flashgen.attention(q, k, v, causal=True, **given)
        if number == 3:
            assert recording.of(Call)[calls:] == []
    launches = recording.of(Launch)
    assert len(launches) == 5
    assert len(set(launches)) <= 2  # O and LSE may lie at two addresses in turn
    assert launches[-1] in launches[:-1]


@pytest.mark.parametrize("heads_bring", [(), ("sinks", "alibi_slopes")], ids=["plain", "per head"])
@pytest.mark.parametrize("batch", [1, 256])
def test_a_kept_decode_hands_over_what_triton_hands_over(
    recording: Recording, monkeypatch: pytest.MonkeyPatch, batch: int, heads_bring: tuple[str, ...]
) -> None:
    """Of several splits, which are merged, and of one."""
    q = torch.empty(batch, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.empty(batch, 8, 1024, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    lengths = torch.full((batch,), 1024, dtype=torch.int32, device="cuda")
    given: dict[str, Any] = {name: torch.zeros(8, device="cuda") for name in heads_bring}
    names = []
    for number in range(5):
        if number == 4:
            monkeypatch.setenv("FLASHGEN_DIRECT", "0")
        begin = len(recording.of(Launch))
        calls = len(recording.of(Call))
        flashgen.decode(q, k, v, lengths=lengths, **given)
        names.append(recording.of(Launch)[begin:])
        if number == 3:
            assert recording.of(Call)[calls:] == []
    assert {len(each) for each in names} == {2 if batch == 1 else 1}
    assert names[-1] in names[2:-1] or names[-1] in names[:2]
