"""The parts of vLLM that flashgen's backend imports, as small modules: for tests without vLLM, whose wheel pins another
torch.
"""

from __future__ import annotations

import sys
from enum import Enum, StrEnum
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor


class AttentionType(StrEnum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(Enum):
    UNIFORM_BATCH = 2


class AttentionBackend:
    pass


class AttentionImpl:
    pass


class AttentionMetadata:
    pass


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.layer_names, self.vllm_config = layer_names, vllm_config

    def _init_reorder_batch_threshold(
        self, threshold: int, *, supports_spec_as_decode: bool
    ) -> None:
        assert supports_spec_as_decode
        self.reorder_batch_threshold = max(threshold, 1 + self.vllm_config.speculated)


class VllmJitKernel:
    registered: ClassVar[list[VllmJitKernel]] = []

    def register_warmup(self) -> None:
        self.registered.append(self)


class AttentionBackendEnum:
    """No Enum, for those cannot forget a member that was registered."""

    __members__: ClassVar[dict[str, Any]] = {}

    def __class_getitem__(cls, name: str) -> Any:
        return cls.__members__[name]


def register_backend(name: str, class_path: str) -> None:
    AttentionBackendEnum.__members__[name] = SimpleNamespace(get_path=lambda: class_path)


def split_decodes_and_prefills(
    common: Any, decode_threshold: int, require_uniform: bool
) -> tuple[int, int, int, int]:
    assert require_uniform
    lengths = common.query_start_loc_cpu.diff().tolist()
    decodes = 0
    if lengths[0] <= decode_threshold:
        others = [length not in (lengths[0], 0) for length in lengths]
        decodes = others.index(True) if any(others) else len(lengths)
    tokens = int(common.query_start_loc_cpu[decodes])
    if decodes == len(lengths):
        tokens = common.num_actual_tokens
    return decodes, len(lengths) - decodes, tokens, common.num_actual_tokens - tokens


def triton_reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    kv_cache_dtype: str, k_scale: Tensor, v_scale: Tensor,
) -> None:  # fmt: skip
    if kv_cache_dtype == "auto":
        k_scale = v_scale = torch.ones(())
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            page, at = divmod(slot, key_cache.shape[1])
            key_cache[page, at] = (key[token] / k_scale).to(key_cache.dtype)
            value_cache[page, at] = (value[token] / v_scale).to(value_cache.dtype)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put them where `import vllm` finds them."""
    AttentionBackendEnum.__members__.clear()
    VllmJitKernel.registered.clear()
    base = "vllm.v1.attention"
    here = sys.modules[__name__]
    for name in (
        "vllm", "vllm.v1", base, f"{base}.backend", f"{base}.backends", f"{base}.backends.registry",
        f"{base}.backends.utils", f"{base}.ops", f"{base}.ops.triton_reshape_and_cache_flash",
        "vllm.model_executor", "vllm.model_executor.warmup", "vllm.model_executor.warmup.jit_warmup",
    ):  # fmt: skip
        module = ModuleType(name)
        vars(module).update({k: v for k, v in vars(here).items() if not k.startswith("__")})
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "flashgen.runtime.adapters.vllm_backend", raising=False)


class Layer:
    """A layer whose keys and values are multiplied by scales that 8 bits can hold."""

    _k_scale, _v_scale = torch.tensor(0.05), torch.tensor(0.03)
