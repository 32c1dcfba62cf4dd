"""SGLang's attention backend with the classes of SGLang 0.5.23: its registry, pools, layers, batches and its own
backend by torch, in Triton's interpreter.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from flashgen.errors import InvalidArgument
from tests.paged_steps import expected

pytest.importorskip(
    "sglang", reason="needs SGLang's source: make -f tests/sessions.mk test-engines"
)


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """torchvision, which SGLang imports and no test uses: its wheels pin another torch."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return MagicMock(name=spec.name, __path__=[], __spec__=spec, __version__="0.0")

    def exec_module(self, module: Any) -> None:
        pass


sys.meta_path.insert(0, Absent())

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

from flashgen.runtime import sglang as plugin  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
HEADS, KV_HEADS, DIM, SIZE, CONTEXT, SCALE = 4, 2, 32, 256, 96, 0.2


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_h200")


def test_the_plugin_registers_a_name() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points["sglang.srt.plugins"] == {"flashgen": "flashgen.runtime.adapters.sglang:register"}
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    load_plugins()
    plugin.register()  # and again
    assert ATTENTION_BACKEND_CHOICES.count("flashgen") == 1
    made = ATTENTION_BACKENDS["flashgen"](runner(MHATokenToKVPool, 1))
    assert type(made).__name__ == "FlashgenAttnBackend"


def test_an_older_sglang_is_told_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.choices", None)  # type: ignore[arg-type]
    plugin.register()
    (record,) = caplog.records
    assert record.getMessage().startswith("flashgen needs SGLang 0.5.23")


def runner(pool: type, page: int, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """What SGLang's model runner has of pools: layer 0 has all keys, layer 1 a window."""
    given: dict[str, Any] = {
        "size": SIZE, "page_size": page, "dtype": dtype, "head_num": KV_HEADS, "head_dim": DIM,
        "device": "cpu", "enable_memory_saver": False,
    }  # fmt: skip
    if pool is SWAKVPool:
        given |= {
            "size_swa": SIZE // 2,
            "swa_attention_layer_ids": [1],
            "full_attention_layer_ids": [0],
        }
    else:
        given |= {"layer_num": 2}
    return SimpleNamespace(
        **{
            "page_size": page, "use_mla_backend": False, "device": "cpu", "kv_index_translator": None,
            "req_to_token_pool": ReqToTokenPool(4, CONTEXT, "cpu", enable_memory_saver=False),
            "token_to_kv_pool": pool(**given), "spec_algorithm": SpeculativeAlgorithm.NONE,
            "server_args": SimpleNamespace(dllm_algorithm=None), "model": torch.nn.Module(),
        }
        | changes
    )  # fmt: skip


class Served:
    """Requests over the pools of a runner, in pages of no order."""

    def __init__(self, made: Any, window: int = -1) -> None:
        self.runner = made
        self.generator = torch.Generator().manual_seed(made.page_size)
        page, table = made.page_size, made.req_to_token_pool.req_to_token
        order = 1 + torch.randperm(SIZE // page - 1, generator=self.generator)
        held = CONTEXT // page
        self.rows = torch.tensor([3, 1])
        for number, row in enumerate(self.rows.tolist()):
            pages = order[number * held : (number + 1) * held]
            table[row] = (pages[:, None] * page + torch.arange(page)).flatten().int()
        if isinstance(made.token_to_kv_pool, SWAKVPool):
            held = -(-48 // page) * page  # slots of a sequence, of which tests use 43
            used = table[self.rows, :held].flatten().long()
            mapping = torch.zeros(SIZE + page + 1, dtype=torch.int64)
            pages = 1 + torch.randperm(SIZE // 2 // page, generator=self.generator)
            slots = (pages[:, None] * page + torch.arange(page)).flatten()
            mapping[used] = slots[: len(used)]
            made.token_to_kv_pool.full_to_swa_index_mapping = mapping
        self.layers = [
            RadixAttention(HEADS, DIM, SCALE, KV_HEADS, layer_id=0),
            RadixAttention(HEADS, DIM, SCALE, KV_HEADS, layer_id=1, sliding_window_size=window),
        ]

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).bfloat16()

    def batch(self, mode: Any, new: list[int], keys: list[int]) -> Any:
        table = self.runner.req_to_token_pool.req_to_token
        slots = torch.cat([
            table[row, end - n : end]
            for row, n, end in zip(self.rows.tolist(), new, keys, strict=True)
        ])  # fmt: skip
        lengths = torch.tensor(keys)
        return ForwardBatch(
            forward_mode=mode, batch_size=len(new), input_ids=torch.zeros(sum(new)),
            req_pool_indices=self.rows, seq_lens=lengths, seq_lens_cpu=lengths,
            out_cache_loc=slots.long(), seq_lens_sum=sum(keys), extend_seq_lens=torch.tensor(new),
            extend_seq_lens_cpu=new, extend_prefix_lens=lengths - torch.tensor(new),
        )  # fmt: skip


def step(served: Served, backend: Any, other: Any, batch: Any, tokens: int, **options: Any) -> None:
    """One step of both layers, compared with SGLang's own backend over a pool of its own."""
    for each in (backend, other):
        each.init_forward_metadata(batch)
    decode = batch.forward_mode.is_decode()
    for layer in served.layers:
        q, k, v = (served.draw(tokens, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
        run = backend.forward_decode if decode else backend.forward_extend
        found = run(q.flatten(1), k, v, layer, batch, **options)
        run = other.forward_decode if decode else other.forward_extend
        want = run(q.flatten(1), k, v, layer, batch)
        assert found.shape == want.shape
        torch.testing.assert_close(found.float(), want.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("page", [1, 4, 16, 32])
@pytest.mark.parametrize("pool", [MHATokenToKVPool, SWAKVPool])
def test_prompts_chunks_and_decodes_as_sglangs_own_backend(pool: type, page: int) -> None:
    served = Served(runner(pool, page), window=15)
    backend = plugin._backend(served.runner)
    plain = runner(MHATokenToKVPool, page)  # that backend reads no windowed pool by its own slots
    plain.req_to_token_pool = served.runner.req_to_token_pool
    other = TorchNativeAttnBackend(plain)
    for mode, new, keys in (
        (ForwardMode.EXTEND, [13, 40], [13, 40]),
        (ForwardMode.MIXED, [9, 1], [22, 41]),
        (ForwardMode.DECODE, [1, 1], [23, 42]),
        (ForwardMode.DECODE, [1, 1], [24, 43]),
    ):
        step(served, backend, other, served.batch(mode, new, keys), sum(new))


def test_sinks_soft_caps_and_rows_of_padding() -> None:
    served = Served(runner(MHATokenToKVPool, 4))
    backend = plugin._backend(served.runner)
    sinks, layer = torch.tensor([0.5, 1, 2, -1]), served.layers[0]
    layer.logit_cap = 3.0
    batch = served.batch(ForwardMode.EXTEND, [7, 11], [7, 11])
    backend.init_forward_metadata(batch)
    q, k, v = (served.draw(18, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    padded = torch.cat([q, torch.full((2, HEADS, DIM), torch.nan).bfloat16()])
    o = backend.forward_extend(padded.flatten(1), k, v, layer, batch, sinks=sinks)
    assert (o[18:] == 0).all()
    options = {"sinks": sinks, "logit_soft_cap": 3.0, "logits_soft_cap": 3.0}
    for rows in (slice(7), slice(7, 18)):
        want = expected(q[rows], k[rows], v[rows], SCALE, True, options)
        torch.testing.assert_close(o[rows].double(), want.flatten(1), rtol=0.02, atol=0.02)


def test_a_pool_of_8_bits_with_scales() -> None:
    served = Served(runner(MHATokenToKVPool, 16, torch.float8_e4m3fn), window=15)
    backend = plugin._backend(served.runner)
    for layer in served.layers:
        layer.k_scale, layer.v_scale = torch.tensor([0.05]), torch.tensor([0.03])
    for mode, new, keys in (
        (ForwardMode.EXTEND, [13, 40], [13, 40]),
        (ForwardMode.DECODE, [1, 1], [14, 41]),
    ):
        batch = served.batch(mode, new, keys)
        backend.init_forward_metadata(batch)
        for layer in served.layers:
            q, k, v = (served.draw(sum(new), n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
            before = k.clone()
            o = backend.forward_extend(q.flatten(1), k, v, layer, batch)
            assert torch.equal(k, before)
            options = {"sliding_window": 16} if layer.layer_id else {}
            table = served.runner.req_to_token_pool.req_to_token
            begin = 0
            for row, n, end in zip(served.rows.tolist(), new, keys, strict=True):
                slots = table[row, :end].long()
                held_k = served.runner.token_to_kv_pool.get_key_buffer(layer.layer_id)[slots]
                held_v = served.runner.token_to_kv_pool.get_value_buffer(layer.layer_id)[slots]
                own = slice(begin, begin + n)
                torch.testing.assert_close(
                    held_k[-n:].float() * 0.05, k[own].float(), rtol=0.07, atol=0.01
                )
                want = expected(
                    q[own], held_k.double() * 0.05, held_v.double() * 0.03, SCALE, True, options
                )
                torch.testing.assert_close(o[own].double(), want.flatten(1), rtol=0.02, atol=0.02)
                begin += n


@pytest.mark.parametrize("pool", [MHATokenToKVPool, SWAKVPool])
def test_a_graph_reads_the_same_memory_at_every_replay(pool: type) -> None:
    served = Served(runner(pool, 4), window=15)
    backend = plugin._backend(served.runner)
    backend.init_cuda_graph_state(4, 4)
    where = []
    for keys in ([20, 33], [21, 34]):
        batch = served.batch(ForwardMode.DECODE, [1, 1], keys)
        eager = plugin._backend(served.runner)
        eager.init_forward_metadata(batch)
        backend.init_forward_metadata_out_graph(batch, in_capture=not where)
        found, wanted = backend.forward_metadata, eager.forward_metadata
        assert torch.equal(found.full.table, wanted.full.table)
        assert found.full.lengths.tolist() == keys
        held = [found.full.table, found.full.lengths]
        if pool is SWAKVPool:
            assert torch.equal(found.windowed.table, wanted.windowed.table)
            assert torch.equal(found.windowed_slots, wanted.windowed_slots)
            held += [found.windowed.table, found.windowed_slots]
        where.append([x.data_ptr() for x in held])
    assert where[0] == where[1]
    # Graphs of prompts leave attention out, and have its metadata made as without graphs ...
    assert not backend.use_captured_forward_metadata_for_breakable_cuda_graph
    # ... or are refused where the first is captured.
    with pytest.raises(InvalidArgument, match="must be DECODE: got EXTEND"):
        backend.init_forward_metadata_out_graph(served.batch(ForwardMode.EXTEND, [2, 2], [4, 4]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_mla_backend": True}, "use_mla_backend must be False"),
        ({"page_size": 12}, "page_size must be a power of two: got 12"),
        ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "the unified memory pool must be off"),
        ({"spec_algorithm": SpeculativeAlgorithm.EAGLE}, "speculative_algorithm must be None: got EAGLE"),
        ({"spec_algorithm": SpeculativeAlgorithm.NGRAM}, "speculative_algorithm must be None: got NGRAM"),
        ({"server_args": SimpleNamespace(dllm_algorithm="LowConfidence")}, "dllm_algorithm must be None"),
        ({"model": torch.nn.ModuleList([RadixAttention(HEADS, DIM, SCALE, KV_HEADS, layer_id=0, is_cross_attention=True)])}, "is_cross_attention must be False"),
    ],
)  # fmt: skip
def test_what_a_runner_may_not_ask(changes: dict[str, Any], message: str) -> None:
    """Refused where SGLang makes the backend, after it has loaded the model and before the first request."""
    with pytest.raises(InvalidArgument, match=message):
        plugin._backend(runner(MHATokenToKVPool, 4, **changes))


def test_what_a_layer_or_a_batch_may_not_ask() -> None:
    served = Served(runner(MHATokenToKVPool, 4))
    backend = plugin._backend(served.runner)
    with pytest.raises(InvalidArgument, match="got TARGET_VERIFY; flashgen has no speculation"):
        backend.init_forward_metadata(served.batch(ForwardMode.TARGET_VERIFY, [2, 2], [4, 4]))
    batch = served.batch(ForwardMode.DECODE, [1, 1], [4, 4])
    backend.init_forward_metadata(batch)
    for field, value in (
        ("is_cross_attention", True),
        ("attn_type", AttentionType.DECODER_BIDIRECTIONAL),
        ("xai_temperature_len", 8),
    ):
        layer = RadixAttention(HEADS, DIM, SCALE, KV_HEADS, layer_id=0)
        setattr(layer, field, value)
        with pytest.raises(InvalidArgument, match=field):
            backend.forward_decode(served.draw(2, HEADS * DIM), None, None, layer, batch)
    layer = RadixAttention(
        HEADS, DIM, SCALE, KV_HEADS, layer_id=0, attn_type=AttentionType.ENCODER_ONLY
    )
    batch = served.batch(ForwardMode.EXTEND, [6, 6], [6, 6])
    backend.init_forward_metadata(batch)
    q, k, v = (served.draw(12, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    o = backend.forward_extend(q.flatten(1), k, v, layer, batch)
    want = expected(q[:6], k[:6], v[:6], SCALE, False, {})
    torch.testing.assert_close(o[:6].double(), want.flatten(1), rtol=0.02, atol=0.02)
