"""vLLM's attention backend with the classes of vLLM 0.33: its layers, caches, scheduler, metadata, reference and warm-up."""

from __future__ import annotations

import argparse
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flashgen.errors import InvalidArgument
from tests.paged_steps import expected

pytest.importorskip("vllm", reason="needs vLLM's source: make -f tests/sessions.mk test-engines")

from tests.engines import vllm_engine as own

own.start()

from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

BLOCKS = 24


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_h200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))  # vLLM's writer asks


def test_vllm_takes_the_name_from_its_command_line() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    words = ["--model", "m", "--attention-backend", "flashgen"]
    found: argparse.Namespace = parser.parse_args(words)
    from vllm.config.attention import AttentionConfig

    assert AttentionConfig(backend=found.attention_backend).backend.name == "FLASHGEN"


def test_a_spawned_process_knows_the_name() -> None:
    """It unpickles its configuration before vLLM loads plugins there."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    content = pickle.dumps(AttentionBackendEnum["FLASHGEN"])
    program = f"import pickle; print(pickle.loads({content!r}).get_path())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "flashgen.runtime.adapters.vllm_backend.FlashgenBackend", (
        done.stderr
    )


def test_vllm_chooses_it_for_a_layer(tmp_path: Path) -> None:
    made = own.engine(tmp_path)
    layer = made.layers["layers.0.attn"]
    assert type(layer.impl).__name__ == "FlashgenImpl"
    assert layer.backend.name == "FLASHGEN"
    builder = made.builder()
    assert builder.pages == 512 // own.PAGE


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mla": True}, "MLA not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "fp8", "capability": (8, 0)}, "kv_cache_dtype fp8 needs compute capability 8.9"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
        ({"use_adaptive_verification": True}, "device-cpu query lens mismatch not supported"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales not supported"),
        ({}, None),
        ({"attn_type": "encoder"}, None),
        ({"attn_type": "encoder_only"}, None),
        ({"attn_type": "encoder_decoder"}, None),
        ({"use_batch_invariant": True}, None),
        ({"kv_cache_dtype": "fp8", "has_sink": True, "has_sliding_window": True}, None),
    ],
    ids=str,
)  # fmt: skip
def test_what_vllm_is_told_of_what_it_lacks(changes: dict[str, Any], reason: str | None) -> None:
    from vllm.platforms.interface import DeviceCapability

    from flashgen.runtime.adapters.vllm_backend import FlashgenBackend

    given = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
        "use_mla": False, "has_sink": False, "use_sparse": False, "use_mm_prefix": False,
        "use_per_head_quant_scales": False, "attn_type": "decoder",
    } | changes  # fmt: skip
    capability = DeviceCapability(*given.pop("capability", (9, 0)))
    found = FlashgenBackend.validate_configuration(device_capability=capability, **given)
    assert len(found) == (reason is not None)
    assert reason is None or found[0].startswith(reason)


@pytest.mark.parametrize("asked", ["use_dcp", "use_pcp"])
def test_a_configuration_that_it_lacks_is_no_engine(asked: str) -> None:
    """vLLM asks where it makes the layers, and names what is not supported."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    given = AttentionSelectorConfig(
        head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, **{asked: True}
    )
    with pytest.raises(ValueError, match=f"{asked[4:].upper()} not supported"):
        current_platform.get_attn_backend_cls(AttentionBackendEnum["FLASHGEN"], given, 4)


class Requests:
    """Requests that vLLM's scheduler serves, with random queries, keys and values in place of a model."""

    def __init__(self, made: own.Engine, prompts: list[int], new: int) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self.made = made
        self.scheduler = own.scheduler(made, BLOCKS)
        self.builder = made.builder()
        self.blocks: dict[str, list[int]] = {}
        self.generator = torch.Generator().manual_seed(0)
        for number, length in enumerate(prompts):
            parameters = SamplingParams(max_tokens=new, ignore_eos=True)
            parameters.update_from_generation_config({}, 1)
            self.scheduler.add_request(Request(str(number), [1] * length, parameters, None))

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.bfloat16)

    def steps(self) -> Iterator[tuple[list[int], list[int], Tensor]]:
        """Of each step how many queries and keys its sequences have, decodes first, and their block table."""
        from vllm.v1.outputs import ModelRunnerOutput

        while self.scheduler.has_unfinished_requests():
            step = self.scheduler.schedule()
            known = {}
            for each in step.scheduled_new_reqs:
                self.blocks[each.req_id] = list(each.block_ids[0])
                known[each.req_id] = each.num_computed_tokens
            cached = step.scheduled_cached_reqs
            for name, computed, blocks in zip(
                cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
            ):
                self.blocks[name] += [] if blocks is None else list(blocks[0])
                known[name] = computed
            queries = step.num_scheduled_tokens
            names = sorted(
                queries, key=lambda name: queries[name]
            )  # vLLM's workers put decodes first
            table = torch.zeros(len(names), self.builder.pages, dtype=torch.int32)
            for row, name in enumerate(names):
                table[row, : len(self.blocks[name])] = torch.tensor(self.blocks[name])
            lengths = [queries[name] for name in names]
            yield lengths, [known[name] + queries[name] for name in names], table
            sampled = [[2] if known[n] + queries[n] >= self.prompt(n) else [] for n in names]
            output = ModelRunnerOutput(
                req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=sampled,
            )  # fmt: skip
            self.scheduler.update_from_output(step, output)

    def prompt(self, name: str) -> int:
        return int(self.scheduler.requests[name].num_prompt_tokens)

    def serve(
        self, lengths: list[int], keys: list[int], table: Tensor, **changes: Any
    ) -> Iterator[Any]:
        """The queries and O of each layer, whose new keys are written first."""
        slots = torch.tensor([
            int(table[row, at // own.PAGE]) * own.PAGE + at % own.PAGE
            for row, (n, end) in enumerate(zip(lengths, keys, strict=True)) for at in range(end - n, end)
        ])  # fmt: skip
        common = own.common_metadata(lengths, keys, table, slots, **changes)
        metadata = self.builder.build(0, common)
        tokens = sum(lengths)
        for layer in self.made.layers.values():
            q = self.draw(tokens, own.HEADS, own.DIM)
            k, v = (self.draw(tokens, own.KV_HEADS, own.DIM) for _ in range(2))
            layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, slots)
            out = torch.full_like(q, 7)
            layer.impl.forward(layer, q, k, v, layer.kv_cache, metadata, output=out)
            yield layer, q, out


def pools(layer: Any) -> tuple[Tensor, Tensor]:
    k, v = (x.contiguous() for x in layer.impl.pools(layer.kv_cache))
    if k.element_size() == 1:
        return k.float() * layer._k_scale, v.float() * layer._v_scale
    return k.float(), v.float()


def agree(
    served: Iterator[Any], lengths: list[int], keys: list[int], table: Tensor, **options: Any
) -> None:
    """Raise AssertionError unless O is that of vLLM's reference."""
    for layer, q, out in served:
        k, v = pools(layer)
        want = own.ref_paged_attn(
            query=q.float(), key_cache=k, value_cache=v, query_lens=lengths, kv_lens=keys,
            block_tables=table, scale=own.SCALE, **options,
        )  # fmt: skip
        torch.testing.assert_close(out.float(), want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_requests_by_vllms_scheduler_in_every_layout(layout: Any, tmp_path: Path) -> None:
    """Prompts in chunks beside decodes, until all requests are done."""
    made = own.engine(tmp_path, budget=24)
    made.allocate(layout, BLOCKS)
    requests = Requests(made, [37, 5, 18], new=3)
    seen = []
    for lengths, keys, table in requests.steps():
        agree(requests.serve(lengths, keys, table), lengths, keys, table)
        seen.append(tuple(lengths))
    assert any(1 in step and max(step) > 1 for step in seen)
    assert any(set(step) == {1} for step in seen)


def batch(lengths: list[int], keys: list[int], pages: int) -> Tensor:
    """A block table with blocks in no order."""
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).int().tolist()
    table = torch.zeros(len(keys), pages, dtype=torch.int32)
    for row, end in enumerate(keys):
        held = -(-end // own.PAGE)
        table[row, :held] = torch.tensor([order.pop() for _ in range(held)])
    return table


@pytest.mark.parametrize(
    ("of_layer", "options"),
    [
        ({"per_layer_sliding_window": 20}, {"sliding_window": 20}),
        ({"logits_soft_cap": 3.0}, {"soft_cap": 3.0}),
        ({"cache_dtype": "fp8"}, {}),
        ({"cache_dtype": "fp8", "per_layer_sliding_window": 20}, {"sliding_window": 20}),
    ],
    ids=str,
)
@pytest.mark.parametrize("speculated", [0, 3])
def test_features_and_speculation(
    of_layer: dict[str, Any], options: dict[str, Any], speculated: int, tmp_path: Path
) -> None:
    """Decodes with as many new tokens as are verified, one that has fewer, and a prompt."""
    made = own.engine(tmp_path, speculated=speculated, **of_layer)
    made.allocate(KVCacheLayout.LBNHC, BLOCKS)
    for layer in made.layers.values():
        layer._k_scale.fill_(0.03)
        layer._v_scale.fill_(0.02)
    requests = Requests(made, [], new=1)
    most = requests.builder.reorder_batch_threshold
    assert most == 1 + speculated
    lengths, keys = [most, most, max(1, most - 1), 40], [60, 37, 23, 49]
    table = batch(lengths, keys, requests.builder.pages)
    for layer in made.layers.values():
        filled = torch.randn(
            BLOCKS * own.PAGE, 2, own.KV_HEADS, own.DIM, generator=requests.generator
        )
        k, v = filled.bfloat16().unbind(1)
        layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, torch.arange(len(k)))
    agree(requests.serve(lengths, keys, table), lengths, keys, table, **options)


def test_a_padded_graph_of_speculation(tmp_path: Path) -> None:
    """Two sequences in the graph of four: what the others have is of no key."""
    made = own.engine(tmp_path, speculated=2)
    made.allocate(KVCacheLayout.LBNHC, BLOCKS)
    requests = Requests(made, [], new=1)
    lengths, keys = [3, 3, 0, 0], [40, 21, 0, 0]
    table = batch(lengths, keys, requests.builder.pages)
    metadata = requests.builder.build(
        0, own.common_metadata(lengths, keys, table, torch.zeros(0), num_actual_tokens=12)
    )
    assert (metadata.decodes, metadata.queries, metadata.prefills) == (4, 3, 0)
    layer = made.layers["layers.0.attn"]
    k, v = requests.draw(BLOCKS * own.PAGE, 2, own.KV_HEADS, own.DIM).unbind(1)
    layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, torch.arange(len(k)))
    q = requests.draw(12, own.HEADS, own.DIM)
    out = layer.impl.forward(layer, q, k, v, layer.kv_cache, metadata, output=torch.full_like(q, 7))
    assert (out[6:] == 0).all()
    k_pool, v_pool = pools(layer)
    want = own.ref_paged_attn(
        query=q[:6].float(), key_cache=k_pool, value_cache=v_pool, query_lens=[3, 3],
        kv_lens=[40, 21], block_tables=table, scale=own.SCALE,
    )  # fmt: skip
    torch.testing.assert_close(out[:6].float(), want, rtol=0.02, atol=0.02)


def test_sinks_and_alibi(tmp_path: Path) -> None:
    """Which vLLM's reference does not have."""
    sinks, slopes = torch.tensor([0.5, 1, 2, -1]), [0.5, 0.25, 0.1, 0.05]
    for given in ({"sinks": sinks}, {"alibi_slopes": slopes}):
        made = own.engine(tmp_path, **given)
        made.allocate(KVCacheLayout.LBNHC, BLOCKS)
        requests = Requests(made, [], new=1)
        lengths, keys = [1, 30], [17, 30]
        table = batch(lengths, keys, requests.builder.pages)
        layer = made.layers["layers.0.attn"]
        k, v = requests.draw(BLOCKS * own.PAGE, 2, own.KV_HEADS, own.DIM).unbind(1)
        layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, torch.arange(len(k)))
        for layer, q, out in requests.serve(lengths, keys, table):
            k_pool, v_pool = pools(layer)
            begin = 0
            for row, (n, end) in enumerate(zip(lengths, keys, strict=True)):
                held = table[row].long()
                k, v = (x[held].flatten(0, 1)[:end] for x in (k_pool, v_pool))
                want = expected(q[begin : begin + n], k, v, own.SCALE, True, given)
                found = out[begin : begin + n].double()
                torch.testing.assert_close(found, want, rtol=0.02, atol=0.02)
                begin += n
            break


def test_encoder_only_layers(tmp_path: Path) -> None:
    """vLLM's own class of them, whose builder and metadata it makes of flashgen's."""
    from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec
    from vllm.v1.worker.utils import AttentionGroup

    made = own.engine(tmp_path, kind="EncoderOnlyAttention", warms=False)
    layer = made.layers["layers.0.attn"]
    spec = EncoderOnlyAttentionSpec(
        block_size=own.PAGE, num_kv_heads=own.KV_HEADS, head_size=own.DIM, dtype=torch.bfloat16
    )
    group = AttentionGroup(layer.attn_backend, list(made.layers), spec, kv_cache_group_id=0)
    group.create_metadata_builders(made.config, made.device)
    lengths = [1, 30, 1, 17]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), heads, own.DIM, generator=generator).bfloat16()
        for heads in (own.HEADS, own.KV_HEADS, own.KV_HEADS)
    )
    common = own.common_metadata(
        lengths, lengths, torch.zeros(4, 1, dtype=torch.int32), torch.zeros(len(q)).long()
    )
    metadata = group.get_metadata_builder(0).build(common_prefix_len=0, common_attn_metadata=common)
    with torch.inference_mode():
        out = layer.impl.forward(
            layer, q, k, v, torch.empty(0), metadata, output=torch.empty_like(q)
        )
    for rows in torch.arange(len(q)).split(lengths):
        want = expected(q[rows], k[rows], v[rows], own.SCALE, False, {})
        torch.testing.assert_close(out[rows].double(), want, rtol=0.02, atol=0.02)


def test_cross_attention(tmp_path: Path) -> None:
    """A request that decodes, whose encoder's keys the cache has, and two new ones, whose keys come with this step."""
    made = own.engine(tmp_path, kind="CrossAttention", warms=False)
    made.allocate(KVCacheLayout.LBNHC, BLOCKS)
    layer, builder = made.layers["layers.0.attn"], made.builder()
    held, lengths = [40, 21, 7], [1, 1, 4]
    table = batch([1, 1, 1], held, builder.pages)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(lengths), own.HEADS, own.DIM, generator=generator).bfloat16()
    k, v = torch.randn(2, sum(held), own.KV_HEADS, own.DIM, generator=generator).bfloat16()
    slots = [int(table[0, j // own.PAGE]) * own.PAGE + j % own.PAGE for j in range(held[0])]
    layer.impl.do_kv_cache_update(
        layer, k[: held[0]], v[: held[0]], layer.kv_cache, torch.tensor(slots)
    )
    common = own.common_metadata(
        lengths, [9, 1, 4], table, torch.zeros(len(q)).long(),
        encoder_seq_lens=torch.tensor(held).int(), encoder_seq_lens_cpu=np.array(held, np.int32),
        seq_lens_cpu_upper_bound=torch.tensor([9, 1, 4]),
    )  # fmt: skip
    metadata = builder.build(0, common)
    new = slice(held[0], None)
    with torch.inference_mode():
        out = layer.impl.forward(
            layer, q, k[new], v[new], layer.kv_cache, metadata, output=torch.empty_like(q)
        )
    keys = torch.arange(len(k)).split(held)
    for rows, own_keys in zip(torch.arange(len(q)).split(lengths), keys, strict=True):
        want = expected(q[rows], k[own_keys], v[own_keys], own.SCALE, False, {})
        torch.testing.assert_close(out[rows].double(), want, rtol=0.02, atol=0.02)


def test_a_common_prefix_is_refused(tmp_path: Path) -> None:
    builder = own.engine(tmp_path).builder()
    with pytest.raises(InvalidArgument, match="no cascade attention"):
        builder.build(16, None)


def test_vllms_registry_warms_up_each_kind_of_layer_once(tmp_path: Path) -> None:
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

    made = own.engine(tmp_path, speculated=2)
    made.allocate(KVCacheLayout.LBHNC, BLOCKS)
    registry = JitWarmupRegistry(made.config)
    with registry.activate():
        made.builder()
    assert len(registry) == 1
    (kernel,) = registry._registrations
    keys = kernel.get_warmup_keys()
    assert {key.layer for key in keys} == {"layers.0.attn"}
    before = [layer.kv_cache.clone() for layer in made.layers.values()]
    registry.warmup()
    for layer, held in zip(made.layers.values(), before, strict=True):
        assert torch.equal(layer.kv_cache, held)
