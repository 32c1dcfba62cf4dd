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
import os
import sys
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from flashgen import settings
from flashgen.errors import InvalidArgument, ToolchainError
from flashgen.inputs.tensors import broadcasts
from flashgen.runtime import api, folders, torch_modes
from flashgen.runtime.adapters import transformers_models as models
from flashgen.runtime.adapters.sdpa import attend, why_torch_serves
from flashgen.runtime.adapters.transformers_models import NAMES
from flashgen.runtime.adapters.transformers_packing import (
    SequenceMask,
    captured,
    sequence_mask,
    traced_attention,
    traced_mask,
)
from flashgen.runtime.call import Causal
from flashgen.runtime.varlen import attention_varlen

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Where the sequences of a packed batch are."""

OF_PAGES = ("read_index", "write_index", "block_table", "logits_indices", "logits_processor_args")
"""What continuous batching hands over besides, for its cache and for the model."""

IGNORED = (
    "position_ids", "sliding_window", "seq_idx", "num_items_in_batch", "logits_to_keep",
    "use_cache", "output_hidden_states", "output_router_logits", "grid_thw", "return_dict",
)  # fmt: skip
"""Arguments that change no score: masks have the positions and the window, models do the rest."""

NEEDS_CAUSAL_MASK = ("num_kv_shared_layers", "use_bidirectional_attention")
"""Fields of a configuration with which no causal flag replaces a mask. Before layers that share
keys Gemma 4 drops all queries but the last ones (logits_to_keep), and the flag would take the first
that is left for the first of all. Layers of a bidirectional Gemma say is_causal=False even where
PaliGemma makes its mask causal.
"""

NEEDS_MASK = (
    "Aimv2TextConfig", "PegasusXConfig", "Phi4MultimodalVisionConfig", "VideoPrismTextConfig",
)  # fmt: skip
"""Configurations of models whose layers have the wrong is_causal: False in a decoder, and True in
an encoder of images."""

HIDDEN = -1e4
"""What hides a key where it is added to a score: models take the least number of their dtype."""

INSTEAD = {"cache": "sdpa"}
"""The implementation that has an argument that is refused, where "eager" has not."""


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
        if not arguments and (start := _chunk_start(**options)) is not None:
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


def _chunk_start(
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    allow_is_causal_skip: bool = True,
    **_: Any,
) -> Tensor | None:
    """Where chunk 0 of each sequence begins among the keys, int32 (batch, 1, 1, 1), if a mask is
    that of chunks under a causal mask and nothing else; else None.

    The masks of transformers are closures: that of chunks holds the number of pads, where chunk 0
    begins. Queries see no pad before them, for it is of another chunk, and none behind them.
    """
    if torch.compiler.is_compiling() or not allow_is_causal_skip or not isinstance(q_offset, int):
        return None
    if kv_offset + kv_length != q_offset + q_length:  # the last query is not at the last key
        return None
    from transformers.masking_utils import causal_mask_function

    parts = captured(mask_function).get("mask_functions")
    if not isinstance(parts, tuple) or len(parts) != 2 or parts[1] is not causal_mask_function:
        return None
    if not parts[0].__qualname__.startswith("chunked_overlay."):
        return None
    pads = captured(parts[0]).get("left_padding")
    if not isinstance(pads, Tensor):
        return None
    if attention_mask is not None:
        begins = attention_mask.bool()[:, 1:] & ~attention_mask.bool()[:, :-1]
        inner = begins.sum(1) + attention_mask.bool()[:, 0]
        if bool((inner > 1).any()):  # pads between tokens
            return None
    return (pads - kv_offset).int()[:, None, None, None]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    deterministic: bool | None = None,
    invariant: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """What a model's attention layer calls. query (batch, heads, seq_q, head_dim), key and value
    (batch, kv_heads, seq_k, head_dim); attention_mask (batch or 1, heads or 1, seq_q, seq_k) as the
    mask function made it, or None: of chunks, where chunk 0 begins, their size being
    module.config.attention_chunk_size. softcap caps the scores (Gemma 2); s_aux (heads,) are
    attention sinks (gpt-oss); position_bias, broadcastable to (batch, heads, seq_q, seq_k), is
    added to them, and differentiable (T5). Of a packed batch cu_seq_lens_q, cu_seq_lens_k,
    max_length_q and max_length_k say where its sequences are, as
    DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes them: then the causal mask,
    sliding_window and chunks are those of each sequence, and an attention_mask that hides or shows
    anything else is refused. Without them position_ids that begin anew say it, as the mask function
    finds them. deterministic: as in
    the flash attention of transformers, the gradients' bits repeat if it is True, or if it is None
    and the environment variable FLASH_ATTENTION_DETERMINISTIC is 1. invariant, or
    FLASHGEN_INVARIANT=1: the bits of a row are those of its sequence alone, which may be padded to
    the left.

    Returns O (batch, seq_q, heads, head_dim) and no weights. Raises InvalidArgument, naming the
    argument, for every other one that is not None, unless it is one of IGNORED.
    """
    if type(others.get("cache")).__name__ == "PagedAttentionCache":
        key, value = _with_cache(module, key, value, others)
        if attention_mask is not None and not isinstance(attention_mask, SequenceMask):
            raise _refused("attention_mask", "in generate_batch")
        attention_mask = None  # it is of the new tokens alone
    packed = others.get("cu_seq_lens_q") is not None
    _check_others(others, packed)
    if deterministic is None:
        deterministic = os.getenv("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"
    sinks = None if s_aux is None else s_aux.float()
    if packed:
        _check_packed(module, query, key, position_bias, is_causal)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "softcap": softcap}
    options |= {"sinks": sinks, "deterministic": deterministic}
    config: Any = getattr(module, "config", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if isinstance(attention_mask, SequenceMask) and torch.compiler.is_compiling():
        if not packed or chunk is not None:
            bounds = others.get("cu_seq_lens_q")
            return _in_graph(
                query, key, value, attention_mask, bounds, position_bias, invariant,
                *options.values(),
            ), None  # fmt: skip
        attention_mask = None  # nothing can read it, and the bounds say where sequences are
    if packed:
        if attention_mask is not None:
            options |= _chunks_of(attention_mask, others, chunk, causal=bool(is_causal))
        causal = bool(is_causal)
        return _packed(
            query, key, value, others, causal=causal, invariant=invariant, **options
        ), None
    if isinstance(attention_mask, SequenceMask):
        return _by_sequences(
            query, key, value, attention_mask, position_bias, invariant=invariant, **options
        ), None
    causal = bool(is_causal) and not (
        attention_mask is None and models.follows_mask_alone(type(module))
    )
    return _by_mask(
        query, key, value, attention_mask, position_bias, causal=causal, chunk=chunk,
        invariant=invariant, **options,
    ), None  # fmt: skip


def _with_cache(
    module: nn.Module, key: Tensor, value: Tensor, others: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The keys and values of all sequences of a continuous batch, packed, (1, kv_heads, tokens,
    head_dim), into whose pages these new ones are written; others get their bounds.
    """
    cache = others.pop("cache")
    key, value = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=others
    )
    for name in OF_PAGES:
        others.pop(name, None)
    return key, value


def _by_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    position_bias: Tensor | None,
    *,
    causal: bool,
    chunk: int | None,
    invariant: bool,
    **options: Any,
) -> Tensor:
    """O (batch, seq_q, heads, head_dim) of a mask that is there, or of none."""
    if invariant or settings.invariant():
        return _invariant(query, key, value, mask, causal=causal, bias=position_bias, **options)
    if mask is not None:
        _check_mask(mask)
    if mask is not None and _is_chunk_start(mask):
        options |= {"chunk": chunk, "chunk_start": mask.flatten()}
        o: Tensor = folders.current().attention(
            query, key, value, causal=True, bias=position_bias, **options
        )
        return o.transpose(1, 2).contiguous()
    # A mask says all; a single query, of decoding, sees every key.
    causal = causal and mask is None and query.shape[2] > 1
    scores = *query.shape[:3], key.shape[2]
    for name, x in (("attention_mask", mask), ("position_bias", position_bias)):
        if x is not None and not broadcasts(x.shape, scores):
            raise InvalidArgument(f"{name} must be broadcastable to {scores}: got {tuple(x.shape)}")
    bias = _biased(position_bias, mask)
    if options["softcap"] or options["sinks"] is not None or (causal and bias is not None):
        # torch has no function of these, so that they go to kernels, or to the reference.
        diagonal: Causal = "top_left" if causal else False
        bias = None if bias is None else torch_modes.autocast(bias)
        o = folders.current().attention(query, key, value, causal=diagonal, bias=bias, **options)
    else:
        o = attend(
            query, key, value, attn_mask=bias, dropout_p=options["dropout_p"], is_causal=causal,
            scale=options["scale"], enable_gqa=True, deterministic=options["deterministic"],
        )  # fmt: skip
    return o.transpose(1, 2).contiguous()


def _by_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: SequenceMask,
    position_bias: Tensor | None,
    *,
    invariant: bool,
    **options: Any,
) -> Tensor:
    """O (batch, seq_q, heads, head_dim) of what a mask says, or of the mask where kernels do not
    take that.
    """
    if _served(mask, query, key, value, position_bias):
        return _in_sequences(mask, query, key, value, invariant=invariant, **options)
    return _by_mask(
        query, key, value, mask.whole(), position_bias, causal=False, chunk=None,
        invariant=invariant, **options,
    )  # fmt: skip


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _in_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: SequenceMask,
    bounds: Tensor | None,
    position_bias: Tensor | None,
    invariant: bool,
    *options: Any,
) -> Tensor:
    """_by_sequences() where torch compiles, as one function of the graph: it looks at fields of the
    mask, and at whether something before it read the mask. bounds: where sequences end, too.
    """
    if bounds is not None:
        if mask.made is not None:
            raise _refused("attention_mask", "with cu_seq_lens_q")
        mask = mask.within(bounds)
    names = "scale", "dropout_p", "softcap", "sinks", "deterministic"
    given = dict(zip(names, options, strict=True))
    return _by_sequences(query, key, value, mask, position_bias, invariant=invariant, **given)


def _invariant(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, **options: Any
) -> Tensor:
    """O (batch, seq_q, heads, head_dim) of an invariant layer: keys count from the first that is no
    padding. Raises InvalidArgument for a mask that is not causal, but for padding to the left.
    """
    rows, o = query.shape[2], None
    if mask is None:
        options["causal"] = "top_left" if causal and rows > 1 else False
        o = api.attention(query, key, value, invariant=True, **options)
    else:
        pads, lengths = _padded_left(mask, rows)
        if not bool(pads.any()) and bool((lengths == key.shape[2]).all()):
            o = api.attention(query, key, value, causal=True, invariant=True, **options)
    if o is None:
        if options.pop("dropout_p"):
            raise InvalidArgument("dropout must be 0 in an invariant layer: got more")
        options.pop("deterministic")
        o = api.decode(
            query, key, value, lengths=lengths, cache_leftpad=pads, invariant=True, **options
        )
    found: Tensor = o.transpose(1, 2).contiguous()
    return found


def _served(
    mask: SequenceMask, query: Tensor, key: Tensor, value: Tensor, position_bias: Tensor | None
) -> bool:
    """Whether kernels take these tensors with what a mask says. Nothing may have read it, for who
    reads it may change it; a model may have dropped queries; packed sequences have no bias.
    """
    if mask.made is not None or position_bias is not None or torch_modes.transformed():
        return False
    rows = mask.shape[0], mask.shape[2]
    if any((x.shape[0], x.shape[2]) != rows for x in (query, key, value)):
        return False
    return why_torch_serves(query, key, value) is None


def _in_sequences(
    mask: SequenceMask,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    invariant: bool,
    **options: Any,
) -> Tensor:
    """O (batch, seq, heads, head_dim) of what a mask says."""
    if mask.numbers is None:
        assert mask.window is not None
        o = folders.current().attention(
            query, key, value, causal=True, window=(mask.window - 1, 0), invariant=invariant,
            **options,
        )  # fmt: skip
        found: Tensor = o.transpose(1, 2).contiguous()
        return found
    if torch_modes.traced(query):
        return traced_attention(mask, query, key, value, invariant=invariant, **options)
    bounds, longest = mask.packed
    given = dict(zip(BOUNDS, (bounds, bounds, longest, longest), strict=True))
    given["sliding_window"] = mask.window
    return _packed(query, key, value, given, causal=True, invariant=invariant, **options)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _padded_left(mask: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """How many keys of each sequence are padding, and where its last key ends, int32 (batch,), of a
    causal mask (batch, 1, seq_q, seq_k). Raises InvalidArgument for any other.
    """
    if mask.dtype is torch.bool and mask.ndim == 4 and mask.shape[1] == 1:
        keys = torch.arange(mask.shape[3], device=mask.device)
        seen = mask[:, 0, -1]
        ends = torch.where(seen, keys + 1, 0).amax(1)
        pads = torch.where(seen, keys, ends[:, None]).amin(1)
        last = torch.arange(rows, device=mask.device) + (ends - rows)[:, None]  # of each query
        own = (keys >= pads[:, None, None]) & (keys <= last[..., None])
        token = (last >= pads[:, None])[..., None]
        if not bool(((mask[:, 0] ^ own) & token).any()):
            return pads.int(), ends.int()
    raise InvalidArgument(
        "attention_mask must be causal, with padding to the left alone, in an invariant layer"
    )


def _check_others(others: dict[str, Any], packed: bool) -> None:
    """Raise InvalidArgument for an argument that is not understood and not None."""
    for name, given in others.items():
        if given is None or name in IGNORED or (packed and name in BOUNDS):
            continue
        if name == "output_attentions":
            if given is False:
                continue
            raise InvalidArgument(models.WEIGHTS)
        raise _refused(name)


def _check_mask(mask: Tensor) -> None:
    """Raise InvalidArgument for what is no mask of transformers."""
    if mask.ndim != 4:
        raise InvalidArgument(
            "attention_mask must have 4 dimensions, (batch, heads, seq_q, seq_k): got "
            f'{tuple(mask.shape)}; use attn_implementation="eager"'
        )
    if mask.dtype is not torch.bool and not mask.is_floating_point() and not _is_chunk_start(mask):
        raise InvalidArgument(f"attention_mask must be bool or floating: got {mask.dtype}")


def _is_chunk_start(mask: Tensor) -> bool:
    return mask.dtype is torch.int32 and mask.shape[1:] == (1, 1, 1)


def _check_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    position_bias: Tensor | None,
    is_causal: bool | None,
) -> None:
    """Raise InvalidArgument if the bounds of a packed batch do not say all: is_causal must be true
    of the layer, for there may be no mask, and all queries must be there.
    """
    if position_bias is not None:
        raise _refused("position_bias", "with cu_seq_lens_q")
    config = getattr(module, "config", None)
    needs_mask = type(config).__name__ in NEEDS_MASK or models.follows_mask_alone(type(module))
    if is_causal is None and (needs_mask or getattr(config, "use_bidirectional_attention", False)):
        raise _refused("cu_seq_lens_q")
    if getattr(config, "num_kv_shared_layers", 0) and query.shape[2] != key.shape[2]:
        raise InvalidArgument(
            "logits_to_keep must be 0 with cu_seq_lens_q: this model drops queries, and the bounds "
            "count all of them"
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _chunks_of(
    mask: Tensor, others: dict[str, Any], size: int | None, *, causal: bool
) -> dict[str, Any]:
    """The chunks that the mask of a packed batch has, as attention_varlen takes them; size: of a
    chunk, if the layer may have them. Raises InvalidArgument unless the mask is that of the bounds,
    with a window and with chunks if the layer has them.
    """
    bounds = others["cu_seq_lens_k"]
    if _is_chunk_start(mask):
        return {"chunk": size, "chunk_start": (mask.flatten() - bounds[:-1]).int()}
    key = causal, others.get("sliding_window"), bounds.data_ptr(), bounds._version
    if _known.get(mask, (None,))[0] != key:
        found = _chunk_of_mask(mask, others, size, causal=causal)
        _known[mask] = key, found
    chunk = _known[mask][1]
    return {} if chunk is None else {"chunk": chunk}


_known: Any = WeakTensorKeyDictionary()
"""Masks of packed batches that were read, and their chunks: all layers are handed the same few."""


def _chunk_of_mask(
    mask: Tensor, others: dict[str, Any], size: int | None, *, causal: bool
) -> int | None:
    """None where the mask is that of the bounds and the window; the size where it is that of
    chunks, too. As _chunks_of.
    """
    cu, window = others["cu_seq_lens_q"], others.get("sliding_window")
    total, possible = int(cu[-1]), []
    of_bounds = mask.ndim == 4 and (mask.shape[0], *mask.shape[2:]) == (1, total, total)
    if of_bounds and torch.equal(cu, others["cu_seq_lens_k"]):
        places = torch.arange(total, device=mask.device)
        sequences = torch.searchsorted(cu[1:].to(places), places, right=True)
        runs: dict[int | None, Tensor] = {None: sequences}
        if size is not None:  # the first token of each chunk
            runs[size] = places - (places - cu.to(places)[sequences]) % size
        if isinstance(mask, SequenceMask) and mask.made is None:
            if causal and mask.window == window:
                possible = [each for each, own in runs.items() if _hides(mask, own, sequences)]
        else:
            possible = _shown(mask, runs, sequences, window, causal=causal)
    if not possible:
        raise _refused(
            "attention_mask", "with cu_seq_lens_q, but a causal one of windows or chunks"
        )
    return possible[0]


def _hides(mask: SequenceMask, runs: Tensor, sequences: Tensor) -> bool:
    """Whether within the sequences a mask that nobody made has runs of tokens where the numbers of
    these (tokens,) are equal.
    """
    numbers = torch.zeros_like(runs) if mask.numbers is None else mask.numbers[0]
    differ = numbers.diff().ne(0) != runs.diff().ne(0)
    return not bool((differ & sequences.diff().eq(0)).any())


def _shown(
    mask: Tensor,
    runs: dict[int | None, Tensor],
    sequences: Tensor,
    window: int | None,
    *,
    causal: bool,
) -> list[int | None]:
    """Those of runs, by their names, of which a mask shows each token its own, within a window."""
    possible, places = list(runs), torch.arange(len(sequences), device=mask.device)
    # Of many tokens the mask alone fills much of the memory.
    for rows in places.split(1024):  # type: ignore[no-untyped-call]
        own = sequences[rows, None] == sequences
        wanted = own & (rows[:, None] >= places) if causal else own
        if window is not None:
            wanted = wanted & ((rows[:, None] - places).abs() < window)
        part = mask[:, :, rows]
        possible = [
            each
            for each in possible
            if _shows(part, wanted & (runs[each][rows, None] == runs[each]), own)
        ]
    return possible


def _shows(mask: Tensor, wanted: Tensor, own: Tensor) -> bool:
    """Whether a mask shows the wanted keys alone, among a sequence's own; it adds nothing there."""
    shown = mask if mask.dtype is torch.bool else mask > HIDDEN
    adds = mask.dtype is not torch.bool and bool((mask[shown] != 0).any())
    return not adds and not bool(((shown & own) != wanted).any())


def _refused(name: str, where: str = "") -> InvalidArgument:
    return InvalidArgument(
        f"{name} must not be given{where and ' '}{where}: this model passes it to its attention, "
        "and flashgen does not know what it changes; "
        f'use attn_implementation="{INSTEAD.get(name, "eager")}"'
    )


def _biased(position_bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """What is added to the scores, or the mask alone. Gradients flow to the position bias."""
    if position_bias is None or mask is None:
        return mask if position_bias is None else position_bias
    if mask.dtype is not torch.bool:
        return position_bias + mask
    return torch.where(mask, position_bias, -torch.inf)


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    others: dict[str, Any],
    *,
    causal: bool,
    **options: Any,
) -> Tensor:
    """attention_varlen of a packed batch: O (batch, seq_q, heads, head_dim)."""
    for name in BOUNDS:
        if others.get(name) is None:
            raise InvalidArgument(f"{name} must be given with cu_seq_lens_q: got None")
    for named, x in (("key", key), ("value", value)):
        if x.shape[0] != query.shape[0]:
            raise InvalidArgument(
                f"{named} must have the batch size of query, {query.shape[0]}: got {x.shape[0]}"
            )
    window = others.get("sliding_window")
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    cu_q, cu_k, max_q, max_k = (others[name] for name in BOUNDS)
    o: Tensor = attention_varlen(
        q,
        k,
        v,
        cu_q,
        cu_k,
        max_q,
        max_k,
        causal=causal,
        window=None if window is None else (window - 1, window - 1),
        **options,
    )
    return o.reshape(query.shape[0], query.shape[2], *o.shape[1:]).contiguous()
