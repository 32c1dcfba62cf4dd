"""Chunked attention (Llama 4): every kernel against float64, what is not read, broken kernels, the
public calls, and how many tiles the model counts.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.errors import InvalidArgument
from flashgen.estimate.trip_counts import grid
from flashgen.evaluate.sanitize import executed_cases
from flashgen.inputs.features import LARGEST_CHUNK
from flashgen.runtime import Dispatcher
from flashgen.runtime.varlen import attention_varlen
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem, flops
from flashgen.tune.hf_config import from_hf_config
from flashgen.tune.workloads import kernels_of
from tests.makers import make_config, make_spec
from tests.nasty_cases import nasty_cases
from tests.proving import alternating, mutant_passes, prove, sampled

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

H200 = TARGETS["nvidia_h200"]
DIRECTIONS = ("forward", "backward_dkv", "backward_dq", "backward_fused")


def of(direction: Any, **features: Any) -> AttentionSpec:
    return make_spec("bfloat16", 32, "causal", chunk=True, **features).for_direction(direction)


def seen(length: int, chunk: int, starts: Tensor) -> Tensor:
    """Who sees whom, (batch, 1, length, length), as the page on features has it."""
    place = torch.arange(length)
    number = torch.div(place - starts[:, None], chunk, rounding_mode="floor")
    same = number[:, :, None] == number[:, None, :]
    return (same & (place[None, :] <= place[:, None]))[:, None]


# Kernels, as tuning checks them

OTHERS = pytest.mark.slow("make test has every other one")


@pytest.mark.slow("test_pairs has each direction on fewer shapes")
@pytest.mark.parametrize(
    ("direction", "loads"), itertools.product(DIRECTIONS, ["pointer", "descriptor"])
)
def test_every_direction(direction: Any, loads: Any, seed: int) -> None:
    """Seven seeds in a row draw chunks of every size, before the first key and behind the last."""
    spec, config = of(direction), make_config(32, 16, loads=loads)
    cases = nasty_cases(32, 16)[:9]  # the tenth is as long as these together
    for number in range(7):
        prove(spec, config, seed + number, cases[number % 3 :: 3])


@pytest.mark.parametrize(
    ("direction", "features"),
    [
        pytest.param("forward", {"varlen": True}, marks=OTHERS),
        ("forward", {"varlen": True, "paged": True}),
        ("backward_dkv", {"varlen": True, "alibi": True}),
        pytest.param("backward_dq", {"varlen": True, "dropout": True}, marks=OTHERS),
        ("backward_fused", {"varlen": True}),
        pytest.param("backward_dbias", {"bias": "additive"}, marks=OTHERS),
        pytest.param("decode", {}, marks=OTHERS),
        ("decode", {"paged": True, "sink": True}),
        pytest.param("decode", {"leftpad": True, "indexed": True, "softcap": True}, marks=OTHERS),
        ("decode", {"paged": True, "kv_dtype": "int8", "kv_scales": "page"}),
    ],
    ids=str,
)
def test_packed_cached_and_with_others(direction: Any, features: Any, seed: int) -> None:
    if direction == "decode":
        spec = make_spec("bfloat16", 32, "causal", direction=direction, chunk=True, **features)
    else:
        spec = of(direction, **features)
    config = make_config(16, 32)
    for number in range(2):
        prove(spec, config, seed + number, executed_cases(spec, config)[number::2])


@pytest.mark.parametrize("options", [{"order": "longest_first"}, {"persistent": True, "order": "grouped"}], ids=str)  # fmt: skip
def test_orders_of_tiles(options: Any, seed: int) -> None:
    prove(of("forward"), make_config(16, 32, **options), seed)


# What the public calls do


def test_the_picture_of_the_page(dispatcher: Dispatcher) -> None:
    """transformers draws this for chunks of 3, and of one pad: V of unit vectors shows who is seen."""
    q = torch.zeros(2, 1, 5, 16)
    v = torch.eye(16)[:5].expand(2, 1, 5, 16)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    o = dispatcher.attention(q, q, v, causal=True, chunk=3, chunk_start=starts)
    found = [["".join("x" if p > 0 else "." for p in row[:5]) for row in x[0]] for x in o]
    assert found == [
        ["x....", "xx...", "xxx..", "...x.", "...xx"],
        ["x....", ".x...", ".xx..", ".xxx.", "....x"],
    ]


@pytest.mark.parametrize(("causal", "compiled"), alternating([True, "top_left"], [False, True]))
def test_attention_is_that_of_the_mask(dispatcher: Dispatcher, causal: Any, compiled: bool) -> None:
    """Forward and all gradients beside torch's own, of the same mask."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, heads, 70, 16, requires_grad=True) for heads in (4, 2, 2))
    starts = torch.tensor([-3, 29], dtype=torch.int32)
    call = (
        torch.compile(dispatcher.attention, backend="aot_eager")
        if compiled
        else dispatcher.attention
    )
    o = call(q, k, v, causal=causal, chunk=20, chunk_start=starts)
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen(70, 20, starts), enable_gqa=True
    )
    torch.testing.assert_close(o, want, rtol=1e-4, atol=1e-5)
    do = torch.randn_like(o)
    found = torch.autograd.grad(o, (q, k, v), do)
    for grad, wanted in zip(found, torch.autograd.grad(want, (q, k, v), do), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [True, "top_left"])
def test_positions_are_the_diagonals(dispatcher: Dispatcher, causal: Any) -> None:
    """Of fewer queries than keys: query i is at key i, or those of both end together."""
    torch.manual_seed(2)
    q, k, v = torch.randn(1, 2, 9, 16), torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16)
    o = dispatcher.attention(q, k, v, causal=causal, chunk=8)
    mask = seen(50, 8, torch.zeros(1, dtype=torch.int64))
    mask = mask[:, :, :9] if causal == "top_left" else mask[:, :, -9:]
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(o, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gradients", [False, True])
def test_other_chunks_are_not_read(dispatcher: Dispatcher, gradients: bool) -> None:
    """NaN in all queries, keys and gradients but those of the second chunk, of whole tiles."""
    torch.manual_seed(3)
    own, length, tile = slice(64, 128), 192, 64
    q, k, v, do = (torch.randn(1, 2, length, 16) for _ in range(4))
    starts = torch.tensor([tile], dtype=torch.int32)
    poisoned = []
    for x in (q, k, v, do):
        nan = torch.full_like(x, float("nan"))
        nan[:, :, own] = x[:, :, own]
        poisoned.append(nan)
    *inputs, grad = poisoned
    whole = [x[:, :, own].clone() for x in (q, k, v)]
    if gradients:
        inputs, whole = ([x.requires_grad_() for x in xs] for xs in (inputs, whole))
    o = dispatcher.attention(*inputs, causal=True, chunk=tile, chunk_start=starts)
    want = dispatcher.attention(*whole, causal=True)
    torch.testing.assert_close(o[:, :, own], want, rtol=1e-4, atol=1e-5)
    if gradients:
        found = torch.autograd.grad(o, inputs, grad)
        wanted = torch.autograd.grad(want, whole, do[:, :, own])
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one[:, :, own], other, rtol=1e-4, atol=1e-5)


def test_packed_chunks_are_those_of_each_sequence(dispatcher: Dispatcher) -> None:
    """And keys of other chunks are not read: NaN in them."""
    torch.manual_seed(4)
    lengths, chunk = (150, 0, 64), 64
    bounds = torch.tensor([0, 150, 150, 214], dtype=torch.int32)
    starts = torch.tensor([0, 5, 3], dtype=torch.int32)
    q, k, v = (torch.randn(214, 2, 16) for _ in range(3))
    o = attention_varlen(
        q, k, v, bounds, bounds, 150, 150, causal=True, chunk=chunk, chunk_start=starts
    )
    for number, length in enumerate(lengths):
        begin = int(bounds[number])
        one = slice(begin, begin + length)
        want = dispatcher.attention(
            *(x[one].transpose(0, 1)[None] for x in (q, k, v)), causal=True, chunk=chunk,
            chunk_start=starts[number : number + 1],
        )  # fmt: skip
        torch.testing.assert_close(o[one].transpose(0, 1)[None], want, rtol=1e-4, atol=1e-5)
    k[:64] = v[:64] = float("nan")
    again = attention_varlen(
        q, k, v, bounds, bounds, 150, 150, causal=True, chunk=chunk, chunk_start=starts
    )
    assert torch.equal(again[64:], o[64:])


@pytest.mark.parametrize("queries", [1, 3])
def test_decoding_reads_its_own_chunk(dispatcher: Dispatcher, queries: int) -> None:
    """Of several lengths, and pads; the keys before are NaN, of the first page even."""
    torch.manual_seed(5)
    lengths = torch.tensor([200, 70, 190], dtype=torch.int32)
    starts = torch.tensor([0, 1, -62], dtype=torch.int32)
    q, k, v = torch.randn(3, 4, queries, 16), torch.randn(3, 2, 256, 16), torch.randn(3, 2, 256, 16)
    o = dispatcher.decode(q, k, v, lengths=lengths, chunk=64, chunk_start=starts)
    for number, (length, start) in enumerate(zip(lengths.tolist(), starts.tolist(), strict=True)):
        mask = seen(length, 64, torch.tensor([start]))[0, :, -queries:]
        want = torch.nn.functional.scaled_dot_product_attention(
            q[number], k[number, :, :length], v[number, :, :length], attn_mask=mask, enable_gqa=True
        )
        torch.testing.assert_close(o[number], want, rtol=1e-4, atol=1e-5)
    k[0, :, :128] = v[0, :, :128] = float(
        "nan"
    )  # 197 to 199 are in the fourth chunk, of tiles of 64
    again = dispatcher.decode(q, k, v, lengths=lengths, chunk=64, chunk_start=starts)
    assert torch.equal(again, o)


def test_a_chunk_longer_than_all_keys_hides_nothing(dispatcher: Dispatcher) -> None:
    torch.manual_seed(6)
    q = torch.randn(1, 2, 40, 16)
    plain = dispatcher.attention(q, q, q, causal=True)
    for chunk in (40, 41, LARGEST_CHUNK):
        o = dispatcher.attention(q, q, q, causal=True, chunk=chunk)
        torch.testing.assert_close(o, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("start", [20, 20 - LARGEST_CHUNK])
def test_places_of_the_largest_chunk_fit_in_32_bits(dispatcher: Dispatcher, start: int) -> None:
    """Key 20 begins one; where chunk 0 begins far before the first key, as where it begins at key 20."""
    torch.manual_seed(7)
    q = torch.randn(1, 2, 40, 16)
    starts = torch.tensor([start], dtype=torch.int32)
    o = dispatcher.attention(q, q, q, causal=True, chunk=LARGEST_CHUNK, chunk_start=starts)
    want = torch.nn.functional.scaled_dot_product_attention(
        q, q, q, attn_mask=seen(40, LARGEST_CHUNK, starts)
    )
    torch.testing.assert_close(o, want, rtol=1e-4, atol=1e-5)


START = torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"chunk": 0}, "chunk must be a whole number of keys"),
        ({"chunk": -1}, "chunk must be a whole number of keys"),
        ({"chunk": 2.0}, "chunk must be a whole number of keys"),
        ({"chunk": True}, "chunk must be a whole number of keys"),
        ({"chunk": LARGEST_CHUNK + 1}, "chunk must be a whole number of keys"),
        ({"chunk_start": START}, "chunk_start needs chunk"),
        ({"chunk": 4, "causal": False}, "chunk needs mask causal"),
        ({"chunk": 4, "window": (3, 0)}, "chunk excludes window"),
        ({"chunk": 4, "chunk_start": START.long()}, "chunk_start must be int32 of shape"),
        ({"chunk": 4, "chunk_start": START.expand(2)}, "chunk_start must be int32 of shape"),
        ({"chunk": 4, "chunk_start": [0]}, "chunk_start must be a tensor"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(
    dispatcher: Dispatcher, given: dict[str, Any], message: str
) -> None:
    q = torch.randn(1, 2, 20, 16)
    with pytest.raises(InvalidArgument, match=message):
        dispatcher.attention(q, q, q, **{"causal": True} | given)
    if "window" not in given:
        with pytest.raises(InvalidArgument, match=message):
            dispatcher.decode(q[:, :, -1:], q, q, **given)


# Broken kernels

LEAST = "first_key -= (first_key - first_chunk + chunk) % chunk"
START_OF = "first_chunk = tl.load(chunk_start_ptr + batch) % chunk"
BEGIN = "key_begin = tl.maximum(first_begin, 0) // BC * BC"
FULL = "tl.cdiv(tl.maximum(last_begin, 0), BC) * BC"
ROWS = "last_begin + chunk - diagonal"
MUTANTS: dict[str, tuple[AttentionSpec, str, str]] = {
    f"{what} in {direction}": (of(direction, **(features or {})), line, broken)
    for direction, features, mutants in (
        ("forward", None, (
            ("first key by one", LEAST, LEAST + " - 1"),
            ("first key by minus one", LEAST, LEAST + " + 1"),
            ("chunks from key 0", START_OF, START_OF + " * 0"),
            ("start of the first sequence", "chunk_start_ptr + batch", "chunk_start_ptr + 0 * batch"),
            ("position without the diagonal", "first_key = rows + diagonal", "first_key = rows"),
            ("begins a tile late", BEGIN, "key_begin = tl.cdiv(tl.maximum(first_begin, 0), BC) * BC"),
            ("begins with its last row's chunk", BEGIN, BEGIN.replace("first", "last")),
            ("unmasked from the first row's chunk", FULL, FULL.replace("last", "first")),
            ("unmasked a tile early", FULL, FULL.replace("tl.cdiv(tl.maximum(last_begin, 0), BC)", "tl.maximum(last_begin, 0) // BC")),
            ("K not moved to the chunk", "k_base += key_begin.to(tl.int64) * stride_ks", "k_base += 0"),
            ("no mask", ">= first_key[:, None]", ">= 0 * first_key[:, None]"),
        )),
        ("backward_dq", None, (
            ("first key by one", LEAST, LEAST + " - 1"),
            ("begins a tile late", BEGIN, "key_begin = tl.cdiv(tl.maximum(first_begin, 0), BC) * BC"),
            ("unmasked from the first row's chunk", FULL, FULL.replace("last", "first")),
        )),
        ("backward_dkv", None, (
            ("first key by one", LEAST, LEAST + " - 1"),
            ("chunks from key 0", START_OF, START_OF + " * 0"),
            ("rows end a chunk early", ROWS, "last_begin - diagonal"),
            ("rows end a tile early", ROWS, ROWS + " - BR"),
            ("rows of the first key's chunk", "last_begin = key_end - 1", "last_begin = key_start"),
            ("rows without the diagonal", ROWS, "last_begin + chunk"),
        )),
        ("backward_fused", None, (
            ("no mask", "keys[:, None] >= first_key[None, :]", "keys[:, None] >= 0 * first_key[None, :]"),
        )),
        ("backward_dbias", {"bias": "additive"}, (
            ("first key by one", LEAST, LEAST + " - 1"),
            ("no mask", "keys[None, :] >= first_key", "keys[None, :] >= 0 * first_key"),
        )),
        ("forward", {"varlen": True}, (
            ("start of the first packed sequence", "chunk_start_ptr + batch", "chunk_start_ptr + 0 * batch"),
        )),
    )
    for what, line, broken in mutants
} | {
    f"{what} in decode": (make_spec("bfloat16", 32, "causal", direction="decode", chunk=True), line, broken)
    for what, line, broken in (
        ("first key by one", LEAST, LEAST + " - 1"),
        ("chunks from key 0", START_OF, START_OF + " * 0"),
        ("start of the first sequence", "chunk_start_ptr + batch", "chunk_start_ptr + 0 * batch"),
        ("begins a tile late", BEGIN, "key_begin = tl.cdiv(tl.maximum(first_begin, 0), BC) * BC"),
        ("begins with its last query's chunk", BEGIN, BEGIN.replace("first", "last")),
        ("unmasked from the first query's chunk", FULL, FULL.replace("last", "first")),
        ("position without the diagonal", "first_key = queries + diagonal", "first_key = queries"),
    )
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(MUTANTS))
def test_mutant_is_caught(name: str) -> None:
    """By what tuning checks, within the draws that have every size of a chunk."""
    spec, line, broken = MUTANTS[name]
    config = make_config(16, 16)
    draws = range(1, 8)
    assert not all(mutant_passes(spec, config, line, broken, seed=seed) for seed in draws)


# The model: which tiles are walked


@pytest.mark.parametrize("chunk", [1, 20, 33, 64, 500])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(64, 64), (70, 130), (130, 70), (1, 90)])
def test_trips_are_the_tiles_that_some_row_sees(
    seq_q: int, seq_k: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashgen.spec.problem.TUNED_CHUNK", chunk)
    problem = Problem(batch=1, heads=2, kv_heads=1, seq_q=seq_q, seq_k=seq_k)
    config, spec = make_config(32, 16), make_spec("bfloat16", 64, "causal", chunk=True)
    rows = torch.arange(seq_q + 64)[:, None] + seq_k - seq_q  # tiles of rows are whole
    keys = torch.arange(seq_k)[None, :]
    who = (keys <= rows) & (rows // chunk == keys // chunk)
    by_rows = grid(spec, config, problem, H200, loops=3)
    for start, trips in zip(range(0, seq_q, 32), by_rows[: len(by_rows) // 2], strict=True):
        tiles = [who[start : start + 32, key : key + 16] for key in range(0, seq_k, 16)]
        whole = [bool(tile.all()) and tile.shape[1] == 16 for tile in tiles]
        assert trips[1] == sum(whole)
        assert sum(trips) >= sum(bool(tile.any()) for tile in tiles)
        first = min((n for n, tile in enumerate(tiles) if tile.any()), default=0)
        last = max((n for n, tile in enumerate(tiles) if tile.any()), default=-1)
        assert sum(trips) == last + 1 - first
    dkv = grid(spec.for_direction("backward_dkv"), config, problem, H200, loops=1)
    for start, (trips,) in zip(range(0, seq_k, 16), dkv, strict=True):
        tiles = [who[row : row + 32, start : start + 16] for row in range(0, seq_q, 32)]
        assert trips >= 2 * sum(bool(tile.any()) for tile in tiles)
    pairs = int(who[:seq_q].sum())
    assert flops(spec, problem) == pytest.approx(4 * 64 * 2 * pairs)


@pytest.mark.parametrize(("queries", "tiles"), [(1, 19 - 12), (6, (18 - 12) + (19 - 12))])
def test_a_decode_counts_its_chunk(
    queries: int, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys 200 to 289, of tiles of 16; queries 0 to 3 are a tile of rows."""
    monkeypatch.setattr("flashgen.spec.problem.TUNED_CHUNK", 100)
    problem = Problem(batch=2, heads=8, kv_heads=2, seq_q=queries, seq_k=290)
    spec = make_spec("bfloat16", 64, "causal", direction="decode", chunk=True)
    blocks = grid(spec, make_config(16, 16), problem, H200, loops=3)
    assert sum(map(sum, blocks)) == 2 * 2 * tiles


def test_a_models_layers_with_chunks_are_tuned_as_such(tmp_path: Path) -> None:
    """Of 8 layers of Llama 4 every fourth sees all keys; of sequences in one chunk, all do."""
    config = {
        "model_type": "llama4_text", "num_attention_heads": 40, "num_key_value_heads": 8,
        "hidden_size": 5120, "head_dim": 128, "num_hidden_layers": 8, "torch_dtype": "bfloat16",
        "attention_chunk_size": 8192, "max_position_embeddings": 32768,
    }  # fmt: skip
    path = tmp_path / "config.json"
    for more, chunked in (
        ({}, 6), ({"no_rope_layers": [1, 0] * 4}, 4), ({"max_position_embeddings": 8192}, 0),
        ({"layer_types": ["chunked_attention"] * 3 + ["full_attention"] * 5}, 3),
    ):  # fmt: skip
        path.write_text(json.dumps(config | more))
        pieces = from_hf_config(path).pieces
        seq = pieces[0].problem.seq_k
        seen = {False: seq, True: min(seq, 8192)}
        of_seq = [p for p in pieces if p.problem.seq_k == seq]
        found = {p.spec.chunk: p.weight / seen[p.spec.chunk] for p in of_seq}
        assert found == {k: n for k, n in ((False, 8 - chunked), (True, chunked)) if n}


@pytest.mark.parametrize("interval", ["x", -1])
def test_an_interval_of_a_model_that_does_not_matter(tmp_path: Path, interval: object) -> None:
    config = {
        "num_attention_heads": 8, "head_dim": 64, "attention_chunk_size": 512,
        "no_rope_layer_interval": interval,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert from_hf_config(path).pieces


def test_a_step_of_a_model_with_chunks_keeps_its_mask() -> None:
    """decode() asks the table for a causal spec here, though one query sees all of its chunk."""
    (step,) = kernels_of(make_spec("bfloat16", 64, "causal", chunk=True), ["decode"])
    assert step == make_spec("bfloat16", 64, "causal", direction="decode", chunk=True)
