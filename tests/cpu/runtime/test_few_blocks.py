"""Which forwards of few blocks are split, and that their launches are kept and repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.inputs.features import PLAIN, features_of
from flashgen.runtime import Dispatcher
from flashgen.runtime.call import Call
from flashgen.runtime.few_blocks import ForwardLauncher, every_kernel
from flashgen.runtime.launcher import _Steps
from flashgen.runtime.resolver import forward_of
from flashgen.runtime.varlen import attention_varlen
from flashgen.schedules.grid_rules import SPLIT_FLOPS, least_forward_us, split_forward_us
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem
from tests.cpu.runtime.test_call_cache_decode import chain
from tests.launches import Written, dispatcher
from tests.makers import make_config, make_spec
from tests.serving import make_current

BF16 = torch.bfloat16
Make = Callable[[Dispatcher], tuple[torch.Tensor, ...]]


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=BF16)


def chunk(
    *, pages: bool, sequences: int = 1, queries: int = 128, keys: int = 32768, spare: int = 0
) -> Make:
    """A call of attention_varlen(): the last queries of as many sequences, and spare places."""
    q = zeros(sequences * queries + spare, 8, 128)
    bounds_q = torch.arange(sequences + 1, dtype=torch.int32) * queries
    bounds_k = torch.arange(sequences + 1, dtype=torch.int32) * keys
    k, table, used = zeros(sequences * keys, 2, 128), None, None
    if pages:
        table = torch.arange(sequences * keys // 16, dtype=torch.int32).view(sequences, -1)
        k, used = k.view(-1, 16, 2, 128), torch.full((sequences,), keys, dtype=torch.int32)

    def call(own: Dispatcher) -> tuple[torch.Tensor, ...]:
        return attention_varlen(
            q, k, k, bounds_q, None if pages else bounds_k, queries, keys, seqused_k=used,
            block_table=table, causal=True, return_lse=True,
        )  # fmt: skip

    return call


Q, K = zeros(1, 8, 128, 128), zeros(1, 2, 32768, 128)
CALLS: dict[str, Make] = {
    "dense": lambda own: own.attention(Q, K, K, causal=True, return_lse=True),
    "a window": lambda own: own.attention(Q, K, K, window=(8191, 0), return_lse=True),
    "packed": chunk(pages=False),
    "pages": chunk(pages=True),
    "two sequences": chunk(pages=True, sequences=2),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_repeat_is_launched_as_the_first_call_was(
    name: str, driver: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = dispatcher(monkeypatch)
    make_current(monkeypatch, own)
    runs: list[int] = []
    made: list[Any] = []
    run = _Steps.run
    monkeypatch.setattr(_Steps, "run", lambda *given: (runs.append(len(made)), run(*given))[1])
    for _ in range(4):
        before = len(driver.launches)
        results = CALLS[name](own)
        launches = driver.launches[before:]
        assert len(launches) == 2, [each[0] for each in launches]
        made.append(chain(launches, results))
    assert made[1:] == [made[0]] * 3
    assert runs == [0, 0, 1, 1]  # the third call repeats what the second bound
    kernels = [function[0].split("_")[0] for function, *_ in made[0]]
    assert kernels == ["decode", "combine"]


def test_places_of_no_sequence_are_no_parts(
    driver: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be so many that parts of them all would not fit the memory."""
    own = dispatcher(monkeypatch)
    make_current(monkeypatch, own)
    for spare, kernels in ((128, 2), (129, 1)):
        before = len(driver.launches)
        chunk(pages=True, spare=spare)(own)
        assert len(driver.launches) - before == kernels


def test_a_warm_up_launches_every_kernel(driver: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    own = dispatcher(monkeypatch)
    make_current(monkeypatch, own)
    with every_kernel():
        for _ in range(2):
            chunk(pages=True, queries=1)(own)
    names = [function[0] for function, *_ in driver.launches]
    assert len(names) == 18  # twice the forward and three pairs, and the pair of the call itself
    assert {name.split("_")[0] for name in names} == {"fwd", "decode", "combine"}
    assert {name.split("_br")[1][:2] for name in names if name.startswith("decode")} == {"16", "64"}
    for queries in (1, 3, 20, 128, 1000):
        chunk(pages=True, queries=queries)(own)
    assert {function[0] for function, *_ in driver.launches} == set(names)
    assert len(driver.launches) == 18 + 2 * 4 + 1


def split_of(own: Dispatcher, q: tuple[int, ...], k: tuple[int, ...], **options: Any) -> Any:
    """Which split serves a causal call of these shapes, if any."""
    x, y = (zeros(shape[3]).expand(shape) for shape in (q, k))
    features = features_of(causal=True, **options) if options else PLAIN
    call = Call(causal=True, features=features)
    launcher = own.resolver.launcher("forward", call, x, y, y)
    assert isinstance(launcher, ForwardLauncher)
    return launcher.split(forward_of(call, x, y, y))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "keys", "splits"),
    [
        (8, 8, 128, 8192, 16),
        (8, 1, 128, 32768, 16),
        (32, 8, 64, 131072, 8),
        (32, 32, 64, 8192, 8),
        (8, 8, 128, 512, 0),  # a second launch would take as long
        (32, 8, 512, 32768, 0),  # 128 blocks for 132 SMs
        (32, 8, 2048, 32768, 0),
    ],
)
def test_the_rule_on_an_h200(
    heads: int, kv_heads: int, queries: int, keys: int, splits: int, driver: Written,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    found = split_of(dispatcher(monkeypatch), (1, heads, queries, 128), (1, kv_heads, keys, 128))
    assert (found.splits if found else 0) == splits


def test_a_window_divides_the_keys_that_queries_see(
    driver: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = dispatcher(monkeypatch)
    whole = split_of(own, (1, 8, 128, 128), (1, 8, 131072, 128))
    window = split_of(own, (1, 8, 128, 128), (1, 8, 131072, 128), window=(8063, 0))
    short = split_of(own, (1, 8, 128, 128), (1, 8, 8192, 128))
    assert window.splits == short.splits
    assert window.us == pytest.approx(short.us)
    assert window.us < whole.us / 2


SPEC, CONFIG = make_spec("bfloat16", 128, "causal"), make_config(64, 64, blocks_per_sm=2)
PROBLEM = Problem(batch=1, heads=8, kv_heads=8, seq_q=128, seq_k=8192)


def test_no_time_is_expected_of_a_gpu_that_is_not_known() -> None:
    decode = SPEC.for_direction("decode")
    for slug, gpu in TARGETS.items():
        known = split_forward_us(decode, CONFIG, PROBLEM, gpu) is not None
        assert known == (gpu.arch in SPLIT_FLOPS), slug
    h200 = TARGETS["nvidia_h200"]
    unknown = replace(h200, clock_mhz=None)
    assert split_forward_us(decode, CONFIG, PROBLEM, unknown) is None
    assert least_forward_us(SPEC, CONFIG, PROBLEM, unknown, 1.0) is None
    assert (
        split_forward_us(make_spec("bfloat16", 32, direction="decode"), CONFIG, PROBLEM, h200)
        is None
    )


def test_a_forward_whose_window_is_short_is_not_split(
    driver: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (1, 8, 128, 128), (1, 8, 131072, 128)
    assert split_of(dispatcher(monkeypatch), *sizes, window=(511, 0)) is None
