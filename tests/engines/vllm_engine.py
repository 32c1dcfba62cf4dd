"""vLLM's own classes as far as they go without its compiled extensions: a platform that asks backends as its CUDA one
does, configurations of a small model, layers, caches and the scheduler.
"""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

HEADS, KV_HEADS, DIM, PAGE, SCALE = 4, 2, 32, 16, 0.2
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HEADS * DIM,
    "intermediate_size": 256, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": DIM, "num_hidden_layers": 2, "vocab_size": 1000, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip


def start(capability: tuple[int, int] = (9, 0)) -> None:
    """Load vLLM with a platform of CPU tensors that takes backends for GPUs, and its plugins."""
    for name in (
        "_C",
        "_C_stable_libtorch",
        "_moe_C_stable_libtorch",
    ):  # what its CUDA platform imports
        sys.modules.setdefault(f"vllm.{name}", ModuleType(f"vllm.{name}"))
    import vllm.platforms as platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability, UnspecifiedPlatform

    class Interpreted(UnspecifiedPlatform):
        device_type = "cpu"
        dispatch_key = "CPU"
        device_name = "interpreted"
        get_attn_backend_cls = classmethod(CudaPlatformBase.get_attn_backend_cls.__func__)

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*capability)

    platforms._current_platform = Interpreted()
    from vllm.plugins import load_general_plugins

    load_general_plugins()


@dataclass(kw_only=True)
class Engine:
    """A configuration of vLLM, and the layers that were made with it."""

    config: Any
    layers: dict[str, Any]

    @property
    def spec(self) -> Any:
        """What vLLM's layers say of their cache."""
        return next(iter(self.layers.values())).get_kv_cache_spec(self.config)

    def builder(self) -> Any:
        """The builder of metadata, as vLLM's worker makes it."""
        from vllm.v1.worker.utils import AttentionGroup

        first = next(iter(self.layers.values()))
        group = AttentionGroup(
            backend=first.attn_backend, layer_names=list(self.layers), kv_cache_spec=self.spec,
            kv_cache_group_id=0,
        )  # fmt: skip
        group.create_metadata_builders(self.config, self.device, kernel_block_size=PAGE)
        return group.get_metadata_builder()

    @property
    def device(self) -> torch.device:
        return torch.device(self.config.device_config.device)

    def allocate(self, layout: Any, blocks: int) -> None:
        """Give the layers caches in a layout, by vLLM's own allocation."""
        from vllm.v1.worker.utils import allocate_kv_cache

        config = self.cache_config(blocks, layout)
        caches = allocate_kv_cache(config, self.device, layout)
        for name, layer in self.layers.items():
            layer.kv_cache = caches[name]

    def cache_config(self, blocks: int, layout: Any = None) -> Any:
        from vllm.v1.kv_cache_interface import (
            KVCacheConfig,
            KVCacheGroupSpec,
            KVCacheTensor,
            compute_layout_strides,
        )

        tensors = []
        if layout is not None:
            names = list(self.layers)
            of_layer, of_block, *_ = compute_layout_strides(self.spec, blocks, len(names), layout)
            tensors = [
                KVCacheTensor(
                    size=len(names) * blocks * self.spec.page_size_bytes, layers=names,
                    layer_stride=of_layer, block_stride=of_block,
                )
            ]  # fmt: skip
        groups = [KVCacheGroupSpec(list(self.layers), self.spec)]
        return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


def engine(
    folder: Path,
    *,
    device: str = "cpu",
    cache_dtype: str = "auto",
    speculated: int = 0,
    backend: str = "FLASHGEN",
    warms: bool = True,
    budget: int = 64,
    model: dict[str, Any] = MODEL,
    kind: str = "Attention",
    **of_layer: Any,
) -> Engine:
    """An engine of two layers, as vLLM would configure it. budget: tokens of a step; kind: the class of the layers;
    of_layer: its arguments.
    """
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KernelConfig,
        ModelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.config.attention import AttentionConfig
    from vllm.model_executor.layers import attention

    (folder / "config.json").write_text(json.dumps(model))
    longest = model["max_position_embeddings"]
    speculative = None
    if speculated:
        speculative = SpeculativeConfig(
            method="ngram", num_speculative_tokens=speculated, prompt_lookup_max=2
        )
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=longest
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=longest,
            enable_chunked_prefill=True, is_encoder_decoder=False, watermark=0.0,
        ),
        cache_config=CacheConfig(block_size=PAGE, cache_dtype=cache_dtype, enable_prefix_caching=False),
        device_config=DeviceConfig(device=device),
        attention_config=AttentionConfig(backend=backend),
        kernel_config=KernelConfig(enable_jit_warmup=warms),
        speculative_config=speculative,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config), torch.device(device):
            layers = {
                f"layers.{number}.attn": getattr(attention, kind)(
                    model["num_attention_heads"], model["head_dim"], SCALE,
                    num_kv_heads=model["num_key_value_heads"], cache_config=config.cache_config,
                    prefix=f"layers.{number}.attn", **of_layer,
                )
                for number in range(2)
            }  # fmt: skip
    finally:
        torch.set_default_dtype(before)
    return Engine(config=config, layers=layers)


def scheduler(made: Engine, blocks: int) -> Any:
    """vLLM's scheduler over so many blocks."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.structured_output import StructuredOutputManager

    made.config.cache_config.num_gpu_blocks = blocks
    register_all_kvcache_specs(made.config)
    return Scheduler(
        vllm_config=made.config, kv_cache_config=made.cache_config(blocks), block_size=PAGE,
        structured_output_manager=StructuredOutputManager(made.config),
    )  # fmt: skip


def common_metadata(
    lengths: list[int], keys: list[int], table: Tensor, slots: Tensor, **changes: Any
) -> Any:
    """vLLM's metadata of a batch: of each sequence how many queries, how many keys with them."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    device = table.device
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    given = {
        "query_start_loc": starts.to(device), "query_start_loc_cpu": starts,
        "seq_lens": torch.tensor(keys, dtype=torch.int32, device=device),
        "num_reqs": len(lengths), "num_actual_tokens": sum(lengths), "max_query_len": max(lengths),
        "max_seq_len": max(keys), "block_table_tensor": table, "slot_mapping": slots,
    }  # fmt: skip
    return CommonAttentionMetadata(**given | changes)


def ref_paged_attn(**arguments: Any) -> Tensor:
    """vLLM's own reference, from its tests, beside the vllm package."""
    import vllm

    file = Path(vllm.__file__).parents[1] / "ref_paged_attn.py"
    module = ast.parse(file.read_text())
    wanted = next(x for x in module.body if getattr(x, "name", None) == "ref_paged_attn")
    made: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([wanted], []), str(file), "exec"), made)
    return made["ref_paged_attn"](**arguments)  # type: ignore[no-any-return]
