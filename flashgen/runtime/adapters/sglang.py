"""flashgen in SGLang: the plugin that registers adapters/sglang_backend.py.

SGLang calls register() in each of its processes, by the entry point in pyproject.toml. This module
loads nothing of SGLang before that.
"""

from __future__ import annotations

import logging
from typing import Any

from flashgen.errors import one_line

logger = logging.getLogger("flashgen.runtime")

NAME = "flashgen"


def register() -> None:
    """Make flashgen an attention backend of SGLang, for --attention-backend flashgen.

    Returns:
        None.

    Raises:
        Nothing: what SGLang raises is logged as one warning, without a traceback.

    Examples:
        >>> import flashgen.runtime
        >>> flashgen.runtime.sglang.register()  # doctest: +SKIP
    """
    try:
        from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.server_args import add_attention_backend_choices

        register_attention_backend(NAME)(_backend)
        if NAME not in ATTENTION_BACKEND_CHOICES:
            add_attention_backend_choices([NAME])
    except Exception as error:  # importing these modules runs much of SGLang
        logger.warning(
            "flashgen needs SGLang 0.5.23, and is no attention backend of this one: %s",
            one_line(error),
        )


def _backend(runner: Any) -> Any:
    """The backend of a model runner."""
    from flashgen.runtime.adapters.sglang_backend import FlashgenAttnBackend

    return FlashgenAttnBackend(runner)
