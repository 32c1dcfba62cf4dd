"""CUDA graphs: a capture of a call holds its launches and nothing that a capture forbids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flashgen
from tests.driver.cases import tensors
from tests.driver.events import Capture, Fault, Launch, Recording, Replay, of
from tests.driver.programs import run


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The graph of a call, which was made before: compiling and loading are not for a capture."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def attention(**options: object) -> Callable[[], object]:
    q, k, v = tensors(2, 8, 512, 128)
    return lambda: flashgen.attention(q, k, v, causal=True, **options)  # type: ignore[call-overload]


def decode(batch: int) -> Callable[[], object]:
    q, *_ = tensors(batch, 8, 1, 128)
    k, v, *_ = tensors(batch, 8, 1024, 128)
    lengths = torch.full((batch,), 1024, dtype=torch.int32, device="cuda")
    return lambda: flashgen.decode(q, k, v, lengths=lengths)


def training() -> Callable[[], object]:
    q, k, v = (x.requires_grad_() for x in tensors(2, 8, 512, 128))
    do = torch.empty_like(q)

    def step() -> object:
        o = flashgen.attention(q, k, v, causal=True)
        return torch.autograd.grad(o, (q, k, v), do)

    return step


def packed(paged: bool) -> Callable[[], object]:
    q, k, v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in tensors(2, 8, 512, 128))
    bounds = torch.tensor([0, 512, 1024], dtype=torch.int32, device="cuda")
    pages: dict[str, torch.Tensor] = {}
    if paged:
        k, v = (x.view(16, 64, 8, 128) for x in (k, v))
        table = torch.arange(16, dtype=torch.int32, device="cuda").view(2, 8)
        pages = {"block_table": table, "seqused_k": bounds[1:] - bounds[:-1]}
    of_keys = None if paged else bounds
    return lambda: flashgen.attention_varlen(
        q, k, v, bounds, of_keys, 512, 512, causal=True, **pages
    )


CALLS: dict[str, tuple[Callable[[], Callable[[], object]], int]] = {
    "attention": (attention, 1),
    "attention with a window": (lambda: attention(window=(64, 0)), 1),
    "decode, several splits": (lambda: decode(1), 2),
    "decode, one split": (lambda: decode(256), 1),
    "packed": (lambda: packed(False), 1),
    "packed over pages": (lambda: packed(True), 1),
    "training": (training, 4),  # O; delta; dK and dV; dQ
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("before", [1, 3, 5], ids=["seen once", "kept", "repeated"])
def test_a_capture_is_whole(recording: Recording, name: str, before: int) -> None:
    make, launches = CALLS[name]
    call = make()
    for _ in range(before):
        call()
    graph = captured(call)
    (capture,) = recording.of(Capture)
    assert not capture.broken
    assert len([each for each in recording.of(Launch) if each.captured]) == launches
    assert capture.nodes >= launches
    graph.replay()
    assert [each.nodes for each in recording.of(Replay)] == [capture.nodes]


WAITS = """
    import torch, flashgen
    q, k, v = (torch.empty(2, 8, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    flashgen.attention(q, k, v)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        flashgen.attention(q, k, v)
        torch.cuda.current_stream().synchronize()
"""


def test_a_graph_that_waits_is_found(tmp_path: Path) -> None:
    """The recording driver breaks a capture as CUDA does: or the tests above prove nothing."""
    done, found = run(WAITS, tmp_path)
    assert "not permitted when stream is capturing" in done.stderr
    assert [each.broken for each in of(Fault, found)] == ["cudaStreamSynchronize during a capture"]
    assert [each.broken for each in of(Capture, found)] == [True]
