"""After vLLM's own warm-up, no step of a model makes Triton compile a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs

from tests.driver.events import Launch, Recording

pytest.importorskip("vllm", reason="needs vLLM's source: make -f tests/sessions.mk test-engines")

from tests.engines import vllm_engine as own

PAGES = 64


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The kernels that Triton was asked to compile, or to load from its cache."""
    found: list[str] = []
    with knobs.compilation.scope():
        knobs.compilation.listener = lambda **facts: found.append(facts["metadata"]["name"])
        yield found


def batches(speculated: int) -> Iterator[tuple[list[int], list[int]]]:
    """Of each sequence how many queries and how many keys: what a scheduler may ask of at most 8 sequences."""
    for count in range(1, 9):
        for new in range(1, speculated + 2):
            yield [new] * count, [100] * count
    for keys in (9, 1000, 1500, 5000, 19_999):
        yield [7], [keys]
        yield [1, 1, 5, 9], [50, keys, 300, keys]
        yield [1, 5], [keys, keys]
        yield [1 + speculated] * 3 + [9], [keys] * 4


@pytest.mark.parametrize(
    ("head_dim", "heads", "speculated", "of_layer"),
    [
        (128, (32, 8), 0, {}),
        (128, (32, 8), 4, {"per_layer_sliding_window": 1024}),
        (72, (9, 3), 2, {}),
        (128, (32, 8), 3, {"cache_dtype": "fp8"}),
        (64, (64, 8), 1, {"sinks": torch.zeros(64)}),
    ],
    ids=str,
)
def test_no_kernel_is_compiled_after_vllms_warm_up(
    head_dim: int,
    heads: tuple[int, int],
    speculated: int,
    of_layer: dict[str, Any],
    compiled: list[str],
    recording: Recording,
    tmp_path: Path,
) -> None:
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
    from vllm.v1.kv_cache_layout import KVCacheLayout

    own.start()
    model = own.MODEL | {
        "max_position_embeddings": 20_000, "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1], "head_dim": head_dim, "hidden_size": heads[0] * head_dim,
    }  # fmt: skip
    if "sinks" in of_layer:
        of_layer = {"sinks": of_layer["sinks"].cuda()}
    made = own.engine(tmp_path, device="cuda", model=model, speculated=speculated, **of_layer)
    made.allocate(KVCacheLayout.LBNHC, PAGES)
    registry = JitWarmupRegistry(made.config)
    with registry.activate():
        builder = made.builder()
    registry.warmup()
    assert compiled
    compiled.clear()
    recording.of(Launch)
    layer = made.layers["layers.0.attn"]
    launches = 0
    for lengths, keys in batches(speculated):
        table = torch.zeros(len(lengths), builder.pages, dtype=torch.int32, device="cuda")
        common = own.common_metadata(lengths, keys, table, torch.zeros(0, device="cuda"))
        metadata, tokens = builder.build(0, common), sum(lengths)
        for wide in (heads[0], heads[0] + 2 * heads[1]):  # Q by itself, and of a fused projection
            q = torch.zeros(tokens, wide, head_dim, dtype=torch.bfloat16, device="cuda")
            out = torch.empty(tokens, heads[0], head_dim, dtype=torch.bfloat16, device="cuda")
            layer.impl.forward(layer, q[:, : heads[0]], q, q, layer.kv_cache, metadata, output=out)
            launches += 1
    assert compiled == []
    assert len(recording.of(Launch)) >= launches


def test_no_kernel_is_compiled_for_encoders_after_vllms_warm_up(
    compiled: list[str], recording: Recording, tmp_path: Path
) -> None:
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
    from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec
    from vllm.v1.worker.utils import AttentionGroup

    own.start()
    model = own.MODEL | {"max_position_embeddings": 20_000}
    made = own.engine(tmp_path, device="cuda", model=model, kind="EncoderOnlyAttention")
    layer = made.layers["layers.0.attn"]
    for each in made.layers.values():  # as vLLM's worker does
        each.kv_cache = torch.empty(0, device="cuda")
    spec = EncoderOnlyAttentionSpec(
        block_size=own.PAGE, num_kv_heads=own.KV_HEADS, head_size=own.DIM, dtype=torch.bfloat16
    )
    group = AttentionGroup(layer.attn_backend, list(made.layers), spec, kv_cache_group_id=0)
    registry = JitWarmupRegistry(made.config)
    with registry.activate():
        group.create_metadata_builders(made.config, made.device)
    registry.warmup()
    assert compiled
    compiled.clear()
    wide = own.HEADS + 2 * own.KV_HEADS
    for lengths in ([1], [7, 300], [1, 1, 1500], [19_999], [3] * 8):
        tokens = sum(lengths)
        table = torch.zeros(len(lengths), 1, dtype=torch.int32, device="cuda")
        common = own.common_metadata(
            lengths, lengths, table, torch.zeros(tokens, device="cuda").long()
        )
        metadata = group.get_metadata_builder(0).build(0, common)
        projected = torch.empty(tokens, wide, own.DIM, dtype=torch.bfloat16, device="cuda")
        q, k, v = projected.split([own.HEADS, own.KV_HEADS, own.KV_HEADS], 1)
        layer.impl.forward(
            layer, q, k, v, layer.kv_cache, metadata, output=torch.empty_like(q.contiguous())
        )
    assert recording.of(Launch)
    assert compiled == []
