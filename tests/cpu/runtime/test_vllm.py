"""vLLM's attention backend, with fakes of vLLM; tests/engines/test_vllm.py has its own classes."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.errors import InvalidArgument
from flashgen.runtime import few_blocks
from flashgen.runtime import vllm as plugin
from flashgen.runtime.adapters import paged
from tests import vllm_fakes as fakes
from tests.paged_steps import expected

ROOT = Path(__file__).resolve().parents[3]
PAGE, DIM, HEADS, KV_HEADS = 16, 32, 4, 2


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    fakes.install(monkeypatch)
    import flashgen.runtime.adapters.vllm_backend as module

    return module


def test_the_plugin_has_a_name_of_its_own(backend: ModuleType) -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points["vllm.general_plugins"] == {"flashgen": "flashgen.runtime.adapters.vllm:register"}
    plugin.register()
    member = fakes.AttentionBackendEnum["FLASHGEN"]
    plugin.register()  # vLLM loads plugins in every process, and again in the same one
    assert fakes.AttentionBackendEnum["FLASHGEN"] is member
    module, _, name = member.get_path().rpartition(".")
    assert (module, getattr(backend, name).get_name()) == (backend.__name__, "FLASHGEN")
    function, arguments = member.__reduce_ex__(2)
    fakes.AttentionBackendEnum.__members__.clear()  # as a spawned process, which unpickles it
    assert function(*arguments).get_path() == member.get_path()


def test_a_vllm_that_takes_no_such_name_is_warned_of_and_serves(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: str) -> None:
        raise ValueError("FLASHGEN is no backend")

    registry = sys.modules["vllm.v1.attention.backends.registry"]
    monkeypatch.setattr(registry, "register_backend", refuse)
    plugin.register()
    assert "is no attention backend of this one: ValueError: FLASHGEN is" in caplog.text


def test_what_it_takes(backend: ModuleType) -> None:
    found = backend.FlashgenBackend
    assert [dim for dim in (8, 16, 20, 80, 128, 512, 520) if found.supports_head_size(dim)] == [
        16, 80, 128, 512,
    ]  # fmt: skip
    assert found.supported_dtypes == [torch.float16, torch.bfloat16]
    assert {"auto", "bfloat16", "fp8", "fp8_e4m3"} <= {*found.supported_kv_cache_dtypes}
    assert backend.FlashgenMetadataBuilder.requires_block_table_width
    assert not found.supports_compute_capability(SimpleNamespace(major=7))
    assert found.supports_compute_capability(SimpleNamespace(major=8))
    assert found.get_supported_kernel_block_sizes() == [16, 32, 64, 128, 256]
    assert not found.forward_includes_kv_cache_update  # it is a call of its own
    assert not found.supports_device_cpu_query_lens_mismatch()
    with pytest.raises(InvalidArgument, match="attn_type must be"):
        backend.FlashgenImpl(1, 16, 1.0, attn_type="mamba")
    with pytest.raises(InvalidArgument, match="sliding_window must be None in cross attention"):
        backend.FlashgenImpl(1, 16, 1.0, attn_type="encoder_decoder", sliding_window=8)
    assert all(found.supports_attn_type(each) for each in fakes.AttentionType)


Batch = list[tuple[int, int]]
"""Of each sequence how many queries, and how many keys with them."""


def make_builder(
    backend: ModuleType,
    dtype: torch.dtype = torch.bfloat16,
    speculated: int = 0,
    warms: bool = False,
    diffuses: bool = False,
) -> Any:
    config = SimpleNamespace(
        speculated=speculated, kernel_config=SimpleNamespace(enable_jit_warmup=warms),
        model_config=SimpleNamespace(
            dtype=torch.bfloat16, is_diffusion=diffuses, max_model_len=4096
        ),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )  # fmt: skip
    return backend.FlashgenMetadataBuilder(
        SimpleNamespace(dtype=dtype), [], config, torch.device("cpu"), block_table_width=8
    )


def serve(
    backend: ModuleType, batch: Batch, causal: bool, speculated: int = 0, **options: Any
) -> tuple[Tensor, ...]:
    """q, O of the backend, and the keys and values of each sequence: what vLLM does in a step, over shuffled pages."""
    generator = torch.Generator().manual_seed(len(batch))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.bfloat16)

    pages = [-(-keys // PAGE) for _, keys in batch]
    order = torch.randperm(sum(pages) + 1, generator=generator).int()
    table = torch.zeros(len(batch), max(pages), dtype=torch.int32)
    cache = torch.full((len(order), KV_HEADS, PAGE, 2 * DIM), torch.nan, dtype=torch.bfloat16)
    narrow = "kv_cache_dtype" in options
    if narrow:
        cache = cache.to(torch.float8_e4m3fn).view(torch.uint8)
    impl = backend.FlashgenImpl(HEADS, DIM, 0.2, KV_HEADS, **options)
    tokens = sum(queries for queries, _ in batch)
    new_k, new_v, known = draw(tokens, KV_HEADS, DIM), draw(tokens, KV_HEADS, DIM), []
    slots: list[int] = []
    for number, (queries, keys) in enumerate(batch):
        begin = sum(pages[:number])
        table[number, : pages[number]] = order[begin : begin + pages[number]]
        places = [int(table[number, j // PAGE]) * PAGE + j % PAGE for j in range(keys)]
        old_k, old_v = draw(keys - queries, KV_HEADS, DIM), draw(keys - queries, KV_HEADS, DIM)
        impl.do_kv_cache_update(
            fakes.Layer(), old_k, old_v, cache, torch.tensor(places[: keys - queries])
        )
        own = slice(len(slots), len(slots) + queries)
        known.append((torch.cat([old_k, new_k[own]]), torch.cat([old_v, new_v[own]])))
        slots += places[keys - queries :]
    impl.do_kv_cache_update(fakes.Layer(), new_k, new_v, cache, torch.tensor([*slots, -1]))
    starts = torch.tensor([0, *(queries for queries, _ in batch)]).cumsum(0).int()
    common = SimpleNamespace(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor([keys for _, keys in batch]).int(), causal=causal,
        num_actual_tokens=tokens, max_query_len=max(q for q, _ in batch),
        max_seq_len=max(k for _, k in batch), block_table_tensor=table,
    )  # fmt: skip
    builder = make_builder(backend, cache.dtype, speculated)
    q, out = draw(tokens + 3, HEADS, DIM), torch.full((tokens + 3, HEADS, DIM), 7.0).bfloat16()
    found = impl.forward(
        fakes.Layer(), q, new_k, new_v, cache, builder.build(0, common), output=out
    )
    assert found is out
    assert (out[tokens:] == 7).all()  # padding
    return q, out, known


def eighths(x: Tensor, scale: float) -> Tensor:
    """X as a cache of 8 bits holds it."""
    return (x / scale).to(torch.float8_e4m3fn).double() * scale


@pytest.mark.parametrize(
    ("batch", "causal", "options"),
    [
        ([(1, 1), (1, 40), (1, 33)], True, {}),
        ([(17, 17), (5, 40)], True, {}),
        ([(1, 20), (1, 50), (9, 9), (4, 31)], True, {}),
        ([(1, 20), (9, 30)], False, {}),
        ([(1, 60), (9, 40)], True, {"sliding_window": 12}),
        (
            [(1, 60), (9, 40)],
            True,
            {"logits_soft_cap": 3.0, "sinks": torch.tensor([0.5, 1, 2, -1])},
        ),
        ([(1, 60), (9, 40)], True, {"alibi_slopes": [0.5, 0.25, 0.1, 0.05]}),
        ([(1, 20), (0, 7), (1, 50)], True, {}),
        ([(0, 7), (1, 50), (0, 1)], True, {}),
        ([(0, 7), (0, 50)], True, {}),
        ([(1, 20), (0, 7), (1, 50)], True, {"kv_cache_dtype": "fp8"}),
        ([(3, 40), (0, 33), (3, 17)], True, {"speculated": 2}),
        ([(3, 40), (3, 33), (3, 17)], True, {"speculated": 2}),
        ([(3, 40), (3, 33), (1, 17), (2, 5), (9, 9)], True, {"speculated": 2}),
        (
            [(1, 40), (1, 20), (9, 29), (4, 4)],
            True,
            {"kv_cache_dtype": "fp8", "sliding_window": 12},
        ),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_step_of_a_model(
    backend: ModuleType, batch: Batch, causal: bool, options: dict[str, Any]
) -> None:
    q, out, known = serve(backend, batch, causal, **options)
    begin = 0
    for (queries, _), (k, v) in zip(batch, known, strict=True):
        own = slice(begin, begin + queries)
        if "kv_cache_dtype" in options:
            k, v = (eighths(x, scale) for x, scale in ((k, 0.05), (v, 0.03)))
        want = expected(q[own], k, v, 0.2, causal, options)
        torch.testing.assert_close(out[own].double(), want, rtol=0.02, atol=0.02)
        begin += queries


def test_decodes_and_prefills_have_their_own_operators(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for name in ("paged_decode", "paged_prefill"):
        operator = getattr(paged, name)

        def recorded(out: Tensor, *x: Any, n: str = name, f: Any = operator, **named: Any) -> None:
            seen.append((n, len(out)))
            f(out, *x, **named)

        monkeypatch.setattr(paged, name, recorded)
    serve(backend, [(1, 20), (1, 50), (9, 9), (4, 31)], True)
    serve(backend, [(1, 20), (1, 50)], True)
    serve(backend, [(2, 20)], True)
    serve(backend, [(3, 20), (3, 50), (2, 9), (4, 31)], True, speculated=2)
    assert seen == [
        ("paged_decode", 2), ("paged_prefill", 13), ("paged_decode", 2), ("paged_prefill", 2),
        ("paged_decode", 6), ("paged_prefill", 6),
    ]  # fmt: skip


def metadata(
    backend: ModuleType, lengths: list[int], tokens: int, speculated: int, **changes: Any
) -> Any:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    given = {
        "query_start_loc": starts, "query_start_loc_cpu": starts, "causal": True,
        "num_actual_tokens": tokens, "seq_lens": None, "max_query_len": max(lengths),
        "max_seq_len": 9, "block_table_tensor": None,
    }  # fmt: skip
    common = SimpleNamespace(**given | changes)
    return make_builder(backend, speculated=speculated).build(0, common)


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": torch.tensor([0.5, 1, 2, -1])},
        {"sliding_window": 4},
        {"logits_soft_cap": 3.0, "alibi_slopes": [0.5, 0.25, 0.1, 0.05]},
    ],
    ids=str,
)
def test_encoders_see_the_keys_of_their_step_alone(
    backend: ModuleType, options: dict[str, Any]
) -> None:
    """One-token sequences among them, which a decoder's batch would have as decodes, and padding."""
    lengths = [1, 9, 1, 20]
    impl = backend.FlashgenImpl(
        HEADS, DIM, 0.2, KV_HEADS, attn_type=fakes.AttentionType.ENCODER_ONLY, **options
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths) + 3, heads, DIM, generator=generator).bfloat16()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    found = metadata(backend, lengths, sum(lengths), 0, causal=False)
    empty = torch.empty(0)
    impl.do_kv_cache_update(fakes.Layer(), k, v, empty, empty)
    out = impl.forward(fakes.Layer(), q, k, v, empty, found, output=torch.full_like(q, 7))
    for rows in torch.arange(sum(lengths)).split(lengths):
        want = expected(q[rows], k[rows], v[rows], 0.2, False, options)
        torch.testing.assert_close(out[rows].double(), want, rtol=0.02, atol=0.02)
    assert (out[sum(lengths) :] == 7).all()


def test_cross_attention_reads_what_the_encoder_left(backend: ModuleType) -> None:
    """More queries than keys, too: the bottom-right diagonal means nothing there."""
    impl = backend.FlashgenImpl(
        HEADS, DIM, 0.2, KV_HEADS, attn_type=fakes.AttentionType.ENCODER_DECODER
    )
    keys, lengths = [20, 9, 5], [1, 1, 12]
    cache = torch.full((6, KV_HEADS, PAGE, 2 * DIM), torch.nan).bfloat16()
    table = torch.tensor([[3, 1], [5, 0], [2, 0]], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    known = []
    for row, count in zip(table.tolist(), keys, strict=True):
        k, v = torch.randn(2, count, KV_HEADS, DIM, generator=generator).bfloat16()
        slots = torch.tensor([row[j // PAGE] * PAGE + j % PAGE for j in range(count)])
        impl.do_kv_cache_update(fakes.Layer(), k, v, cache, slots)
        known.append((k, v))
    q = torch.randn(sum(lengths), HEADS, DIM, generator=generator).bfloat16()
    found = metadata(
        backend, lengths, len(q), 0, causal=False, seq_lens=torch.tensor(keys).int(),
        max_seq_len=20, block_table_tensor=table,
    )  # fmt: skip
    out = impl.forward(fakes.Layer(), q, None, None, cache, found, output=torch.empty_like(q))
    for rows, (k, v) in zip(torch.arange(len(q)).split(lengths), known, strict=True):
        want = expected(q[rows], k, v, 0.2, False, {})
        torch.testing.assert_close(out[rows].double(), want, rtol=0.02, atol=0.02)


def test_diffusion_language_models_are_refused_when_the_engine_starts(backend: ModuleType) -> None:
    with pytest.raises(InvalidArgument, match="attention_backend must be another than FLASHGEN"):
        make_builder(backend, diffuses=True)


def test_each_kind_of_layer_warms_up_once(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = make_builder(backend, warms=True, speculated=2)
    monkeypatch.setattr(builder, "pages", 256)  # capacities of several buckets
    cache = torch.zeros(2, KV_HEADS, PAGE, 2 * DIM).bfloat16()
    layers: dict[str, tuple[Tensor, dict[str, Any]]] = {
        "first": (cache, {}),
        "again": (cache, {}),
        "sunk": (cache, {"sinks": torch.zeros(HEADS)}),
        "paged": (torch.zeros(1, KV_HEADS, 2 * PAGE, 2 * DIM).bfloat16(), {}),
        "narrow": (torch.zeros(cache.shape, dtype=torch.uint8), {"kv_cache_dtype": "fp8"}),
        "cross": (cache, {"attn_type": "encoder_decoder"}),
        "encoder": (torch.empty(0), {"attn_type": "encoder_only"}),
    }
    for name, (held, options) in layers.items():
        layer = SimpleNamespace(
            impl=backend.FlashgenImpl(HEADS, DIM, 0.2, KV_HEADS, **options), kv_cache=held,
            _k_scale=torch.ones(()), _v_scale=torch.ones(()),
        )  # fmt: skip
        builder.vllm_config.compilation_config.static_forward_context[name] = layer
        builder.layer_names.append(name)
    (kernel,) = fakes.VllmJitKernel.registered
    keys = kernel.get_warmup_keys()
    asked = {"group": HEADS // KV_HEADS, "head_dim": DIM, "queries": 3}
    sizes = dict.fromkeys(("first", "sunk", "paged", "narrow", "cross"), PAGE) | {"paged": 2 * PAGE}
    assert [(key.layer, key.case) for key in keys if key.layer != "encoder"] == [
        (name, case)
        for name, page in sizes.items()
        for case in paged.warmups(**asked, capacity=256 * page, narrow=name == "narrow")
    ]
    seen: list[tuple[str, Any]] = []
    warm_up, varlen = paged.warm_up, paged.attention_varlen

    def warmed(*given: Any, causal: bool) -> None:
        assert few_blocks._every_kernel.get()
        seen.append((key.layer, causal))
        warm_up(*given, causal=causal)

    def encoded(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
        if key.layer == "encoder":
            seen.append((key.layer, (q.shape[1], k.shape[1], v.shape[1])))
        return varlen(q, k, v, *rest, **options)

    monkeypatch.setattr(backend, "warm_up", warmed)
    monkeypatch.setattr(paged, "attention_varlen", encoded)
    for key in keys:
        kernel.compile(key)
    assert set(seen) == {
        *((name, name != "cross") for name in sizes),
        ("encoder", (HEADS, KV_HEADS, KV_HEADS)),
    }  # fmt: skip
    assert not cache.any()


def test_a_layer_lies_on_its_device_and_is_invariant_where_vllm_is(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    impl = backend.FlashgenImpl(2, 16, 1.0, alibi_slopes=[0.5, 0.25])
    cache = torch.arange(2 * 2 * PAGE * 32.0).view(2, 2, PAGE, 32)
    assert torch.equal(torch.cat(impl.pools(cache), -1), cache.transpose(1, 2))  # K is first
    made = impl.paged_layer(torch.device("meta"))
    assert made.alibi_slopes.device.type == "meta"
    assert not made.invariant
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert impl.paged_layer(torch.device("meta")).invariant


def test_a_padded_graph_has_as_many_decodes_as_were_captured(backend: ModuleType) -> None:
    found = metadata(backend, [3, 3, 0, 0], 12, speculated=2)
    assert (found.decodes, found.queries, found.prefills) == (4, 3, 0)
    assert (found.max_q, found.max_k) == (3, 9)
    found = metadata(backend, [1, 1, 1], 4, speculated=0)  # tokens padded, sequences not
    assert (found.decodes, found.queries, found.prefills) == (3, 1, 0)


def test_an_empty_sequence_before_a_prefill(backend: ModuleType) -> None:
    found = metadata(backend, [2, 0, 7], 9, speculated=2)
    assert (found.decodes, found.prefills, found.starts.tolist()) == (0, 3, [0, 2, 2, 9])


def test_warm_up_is_registered_where_vllm_wants_it(backend: ModuleType) -> None:
    make_builder(backend)
    assert fakes.VllmJitKernel.registered == []
    make_builder(backend, warms=True)
    assert len(fakes.VllmJitKernel.registered) == 1


def test_a_profiling_run_and_what_is_refused(backend: ModuleType) -> None:
    impl = backend.FlashgenImpl(1, 16, 1.0)
    x = torch.ones(3, 1, 16)
    assert (impl.forward(None, x, x, x, x, None, output=torch.ones_like(x)) == 0).all()
    for name in ("output_scale", "output_block_scale"):
        with pytest.raises(InvalidArgument, match="output_scale must be None"):
            impl.forward(None, x, x, x, x, None, output=x, **{name: x})
    builder = make_builder(backend)
    with pytest.raises(InvalidArgument, match="causal must be one bool"):
        builder.build(0, SimpleNamespace(causal=torch.ones(1)))
    with pytest.raises(InvalidArgument, match="no cascade attention: got 16"):
        builder.build(16, SimpleNamespace(causal=True))


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3"])
def test_a_cache_of_e4m3_needs_a_gpu_that_writes_it_and_is_never_invariant(
    dtype: str, backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def why(kv_dtype: str, capability: int) -> str | None:
        sm, rest = SimpleNamespace(to_int=lambda: capability), (16, False, False, False, False)
        found = backend.FlashgenBackend.supports_combination(
            64, torch.bfloat16, kv_dtype, *rest, sm
        )
        assert found is None or isinstance(found, str)
        return found

    assert why(dtype, 89) is None
    assert why(dtype, 88) == f"kv_cache_dtype {dtype} needs compute capability 8.9"
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert why(dtype, 89) == f"kv_cache_dtype {dtype} has no batch invariance"
    assert why("auto", 80) is None
