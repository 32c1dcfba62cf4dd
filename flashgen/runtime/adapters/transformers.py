"""flashgen as an attention implementation of Hugging Face transformers.

    from flashgen.runtime import transformers

    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flashgen")

The mask function is registered with it: without one the library hands the attention no mask, and
padding is attended to in silence. Chunks (Llama 4) come as the position of the first one, sliding
windows and packed sequences as a mask that is made if a model reads it: what lies outside is not
read. Windows of padded batches come in masks.
"""

from __future__ import annotations

import functools
import sys
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor

from flashgen.errors import ToolchainError
from flashgen.runtime.adapters import transformers_models as models
from flashgen.runtime.adapters.transformers_attention import attention_forward
from flashgen.runtime.adapters.transformers_masks import chunk_start_of
from flashgen.runtime.adapters.transformers_models import NAMES, NEEDS_MASK
from flashgen.runtime.adapters.transformers_packing import sequence_mask, traced_mask

__all__ = ["NAMES", "attention_forward", "register"]

NEEDS_CAUSAL_MASK = ("num_kv_shared_layers", "use_bidirectional_attention")
"""Fields of a configuration with which no causal flag replaces a mask. Before layers that share
keys Gemma 4 drops all queries but the last ones (logits_to_keep), and the flag would take the first
that is left for the first of all. Layers of a bidirectional Gemma say is_causal=False even where
PaliGemma makes its mask causal.
"""


def register() -> None:
    """Make attn_implementation="flashgen" known to transformers, its masks included.

    Returns:
        None.

    Raises:
        ToolchainError: if transformers is not installed, or a package that it imports fails.

    Examples:
        >>> import flashgen.runtime
        >>> flashgen.runtime.transformers.register()  # doctest: +SKIP
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask, sdpa_mask
    except (ImportError, OSError, RuntimeError) as error:
        raise ToolchainError(_why_no_transformers(error)) from error

    def mask(*arguments: Any, config: Any = None, **options: Any) -> Tensor | None:
        """Boolean masks, True where a query may attend; none where is_causal says it all; of
        chunked attention, where chunk 0 of each sequence begins, int32 (batch, 1, 1, 1); of packed
        sequences and windows a SequenceMask; and what eager takes for models that are written for
        nothing else.
        """
        models.check_mask(type(config))
        made: Tensor | None
        if models.needs_eager_mask(type(config)):
            made = eager_mask(*arguments, config=config, **options)
            return made
        if type(config).__name__ in NEEDS_MASK:
            options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        needed = any(getattr(config, name, False) for name in NEEDS_CAUSAL_MASK)
        if needed:
            options["allow_is_causal_skip"] = False
        if not arguments and (start := chunk_start_of(**options)) is not None:
            return start
        if not (arguments or needed):
            says = traced_mask if torch.compiler.is_compiling() else sequence_mask
            if (said := says(config=config, **options)) is not None:
                return said
        made = sdpa_mask(*arguments, config=config, **options)
        return made

    for name in NAMES:
        AttentionInterface.register(name, attention_forward)
        AttentionMaskInterface.register(name, mask)
    _be_no_flash_attn()
    _check_models()


def _why_no_transformers(error: BaseException) -> str:
    """In one sentence, which names the package at fault."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    frames = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    names = [getattr(error, "name", None) or "", *reversed(frames)]
    packages = [name.partition(".")[0] for name in names]
    about = ("", "flashgen", "importlib", "torch", "transformers", "_frozen_importlib")
    others = [
        name for name in packages if name not in about and name not in sys.stdlib_module_names
    ]
    if not others:
        return (
            "transformers with AttentionMaskInterface is needed: pip install 'transformers>=4.57'"
        )
    return (
        f"transformers must import here, and its import of {others[0]} fails: install a version of "
        f"{others[0]} that fits torch {torch.__version__}, or remove it ({error})"
    )


def _be_no_flash_attn() -> None:
    """Have transformers 5 load and check "flashgen" as any other implementation. For every name
    with "flash" in it, it imports a build of flash-attn, replaces it by the builds that a model
    lists, and refuses chunked masks of more keys than a chunk has.
    """
    from transformers import masking_utils, modeling_utils

    for module in (masking_utils, modeling_utils):
        requested = getattr(module, "is_flash_attention_requested", None)
        if requested is not None and not hasattr(requested, "knows_flashgen"):
            module.is_flash_attention_requested = _without_flashgen(requested)  # type: ignore[attr-defined]


def _without_flashgen(asks: Any) -> Any:
    """The function is_flash_attention_requested, which then answers no for "flashgen"."""

    @functools.wraps(asks)
    def requested(
        config: Any = None, requested_attention_implementation: str | None = None, **options: Any
    ) -> bool:
        named = requested_attention_implementation
        if named in NAMES or getattr(config, "_attn_implementation", None) in NAMES:
            return False
        return bool(asks(config, named, **options))

    requested.knows_flashgen = True  # type: ignore[attr-defined]
    return requested


def _check_models() -> None:
    """Have each model that is made with an implementation of ours be checked, and refuse to return
    attention weights, and by continuous batching what its cache has not.
    """
    import transformers

    every: Any = transformers.PreTrainedModel
    chooses = every.get_correct_attn_implementation
    if hasattr(chooses, "knows_flashgen"):
        return

    @functools.wraps(chooses)
    def chosen(self: Any, requested: str | None, *arguments: Any, **options: Any) -> str:
        if requested in NAMES:
            models.check_class(type(self))
            models.refuse_weights(self)
        return str(chooses(self, requested, *arguments, **options))

    chosen.knows_flashgen = True  # type: ignore[attr-defined]
    every.get_correct_attn_implementation = chosen
    models.check_continuous_batching(transformers.GenerationMixin)
