"""The parts of vLLM that flashgen's backend imports, as small modules: for tests without vLLM, whose wheel pins another
torch.
"""

from __future__ import annotations

import sys
from enum import Enum, StrEnum
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor


class AttentionType(StrEnum):
    DECODER = "decoder"
    ENCODER = "encoder"


class AttentionCGSupport(Enum):
    UNIFORM_SINGLE_TOKEN_DECODE = 1


class AttentionBackend:
    pass


class AttentionImpl:
    pass


class AttentionMetadata:
    pass


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.device = device


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    def get_path(self) -> str:
        return overrides.get(self, self.value)

    def is_overridden(self) -> bool:
        return self in overrides


overrides: dict[AttentionBackendEnum, str] = {}


def register_backend(backend: AttentionBackendEnum, class_path: str) -> None:
    overrides[backend] = class_path


def split_decodes_and_prefills(common: Any, decode_threshold: int) -> tuple[int, int, int, int]:
    lengths = common.query_start_loc.diff().tolist()
    decodes = (
        [length <= decode_threshold for length in lengths].index(False)
        if max(lengths) > 1
        else len(lengths)
    )
    tokens = int(common.query_start_loc[decodes])
    return decodes, len(lengths) - decodes, tokens, common.num_actual_tokens - tokens


def triton_reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    kv_cache_dtype: str, k_scale: Tensor, v_scale: Tensor,
) -> None:  # fmt: skip
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            page, at = divmod(slot, key_cache.shape[1])
            key_cache[page, at], value_cache[page, at] = key[token], value[token]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put them where `import vllm` finds them."""
    overrides.clear()
    base = "vllm.v1.attention"
    here = sys.modules[__name__]
    for name in (
        "vllm", "vllm.v1", base, f"{base}.backend", f"{base}.backends", f"{base}.backends.registry",
        f"{base}.backends.utils", f"{base}.ops", f"{base}.ops.triton_reshape_and_cache_flash",
    ):  # fmt: skip
        module = ModuleType(name)
        vars(module).update({k: v for k, v in vars(here).items() if not k.startswith("__")})
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "flashgen.runtime.vllm_backend", raising=False)


class Layer:
    _k_scale = _v_scale = torch.ones(())
