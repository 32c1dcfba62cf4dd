"""What the model classes of transformers declare about their attention, and which of them are
refused. transformers itself checks neither for an implementation that is registered.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

from flashgen.errors import InvalidArgument

NAMES = ("flashgen", "FlashGen")
"""Both are registered. transformers 5 takes every name with "flash" in it for a build of the
package flash-attn: its vision models then pack their batches, and some models (HRM) refuse it. They
need the second name.
"""

NEEDS_MASK = (
    "Aimv2TextConfig", "PegasusXConfig", "Phi4MultimodalVisionConfig", "VideoPrismTextConfig",
)  # fmt: skip
"""Configurations of models whose layers have the wrong is_causal: False in a decoder, and True in
an encoder of images."""

DECLARATIONS = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")
"""A class that declares none of them was written for eager's masks alone."""

WEIGHTS = (
    "output_attentions must not be True: flashgen returns no attention weights; "
    'use attn_implementation="eager"'
)


def check_class(model: type) -> None:
    """Raise InvalidArgument for a class of models whose module chooses the class of its attention
    by the name of the implementation, from a table of its own.
    """
    module = sys.modules[model.__module__]
    for name, table in vars(module).items():
        if isinstance(table, dict) and isinstance(table.get("eager"), type):
            raise InvalidArgument(
                f'attn_implementation must be "eager" for {model.__name__}, which takes its '
                f"attention from a table of its own ({name}): flashgen is not in it"
            )


def check_mask(config: type) -> None:
    """Raise InvalidArgument if the models of a class of configurations compute their own attention:
    they would add up a boolean mask.
    """
    if (name := _name_if_own_attention(config)) is not None:
        raise InvalidArgument(
            f'attn_implementation must be "eager" for {name}, which calls no attention of '
            "transformers but computes its own: it would add up flashgen's boolean mask"
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _name_if_own_attention(config: type) -> str | None:
    return _computes_its_own(config)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def needs_eager_mask(config: type) -> bool:
    """Whether the models of a class of configurations are right with eager's mask alone, which is
    there even where a causal flag would do.
    """
    return _needs_eager_mask(config)


@functools.cache
def _needs_eager_mask(config: type) -> bool:
    return _written_for_eager(_models_of(config))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def follows_mask_alone(attention: type) -> bool:
    """Whether is_causal of this class of attention modules says nothing: the model has eager's
    masks, and where it has none, all keys are seen.
    """
    return _follows_mask_alone(attention)


@functools.cache
def _follows_mask_alone(attention: type) -> bool:
    module = sys.modules.get(attention.__module__)
    return module is not None and _written_for_eager(_models_in(module))


def refuse_weights(model: nn.Module) -> None:
    """Have a model raise InvalidArgument where it is called with output_attentions=True. Most
    classes return Nones there, and say nothing.
    """
    hooks = model._forward_pre_hooks.values()
    if any(getattr(hook, "func", None) is _refuse_weights for hook in hooks):
        return
    names = list(inspect.signature(type(model).forward).parameters)[1:]  # all but self
    position = names.index("output_attentions") if "output_attentions" in names else None
    hook = functools.partial(_refuse_weights, position)
    model.register_forward_pre_hook(hook, with_kwargs=True)


def check_continuous_batching(every: Any) -> None:
    """Have the models of a class that flashgen cannot serve in generate_batch and its like raise
    InvalidArgument where it begins: its thread would log a later refusal, and leave empty lists.
    """
    begins = getattr(every, "init_continuous_batching", None)
    if begins is None:
        return

    @functools.wraps(begins)
    def checked(self: Any, *arguments: Any, **options: Any) -> Any:
        named = getattr(self.config, "_attn_implementation", None)
        if named == NAMES[1]:
            raise InvalidArgument(
                f'generate_batch must have attn_implementation="{NAMES[0]}": got "{named}", which '
                "transformers does not take for an attention without masks"
            )
        if named == NAMES[0] and getattr(self.config, "attention_chunk_size", None):
            raise InvalidArgument(
                "generate_batch must have a model without chunks, attention_chunk_size: the cache "
                "of transformers keeps windows of them; use generate()"
            )
        return begins(self, *arguments, **options)

    every.init_continuous_batching = checked


def _refuse_weights(
    position: int | None, model: Any, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    given = options.get("output_attentions")
    if position is not None and len(arguments) > position:
        given = arguments[position]
    if given is None:
        given = getattr(model.config, "output_attentions", False)
    if given and _uses_flashgen(model.config):
        raise InvalidArgument(WEIGHTS)


def _uses_flashgen(config: Any) -> bool:
    """Whether a configuration or a sub-configuration of it names an implementation of ours."""
    if getattr(config, "_attn_implementation", None) in NAMES:
        return True
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
    return any(_uses_flashgen(part) for part in parts if part is not None)


@functools.cache
def _computes_its_own(config: type) -> str | None:
    """The name of the model that a class of configurations belongs to, if it calls no attention
    that is registered. transformers refuses such a model "sdpa", but no name that it does not know.
    """
    models = list(_models_of(config))
    flags = (*DECLARATIONS, "_supports_attention_backend")
    for model in models:
        if any(getattr(model, flag, False) for flag in flags):
            return None
        if hasattr(sys.modules[model.__module__], "ALL_ATTENTION_FUNCTIONS"):
            return None
    names = [model.__name__ for model in models]
    return min(names, key=lambda name: (name.endswith("PreTrainedModel"), len(name)), default=None)


def _written_for_eager(models: Iterable[type]) -> bool:
    """Whether there are models, and none of them declares another implementation than eager."""
    declared = [any(getattr(model, flag, False) for flag in DECLARATIONS) for model in models]
    return bool(declared) and not any(declared)


def _models_of(config: type) -> Iterator[type]:
    """The models that take a class of configurations, or its nearest base that has any: those of
    the modeling modules of its package. MODEL_MAPPING has none of a sub-configuration.
    """
    for base in config.__mro__:
        package = base.__module__.rpartition(".")[0]
        found = [
            model
            for name, module in list(sys.modules.items())
            if name == base.__module__ or (package and name.startswith(f"{package}.modeling_"))
            for model in _models_in(module)
            if getattr(model, "config_class", None) is base
        ]
        if found:
            yield from found
            return


def _models_in(module: ModuleType) -> Iterator[type]:
    """The classes of models that a module defines."""
    from transformers import PreTrainedModel

    for model in list(vars(module).values()):
        if getattr(model, "__module__", None) != module.__name__:
            continue
        if isinstance(model, type) and issubclass(model, PreTrainedModel):
            yield model
