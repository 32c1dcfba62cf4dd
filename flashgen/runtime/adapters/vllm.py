"""flashgen in vLLM: the plugin that registers adapters/vllm_backend.py.

vLLM calls register() in each of its processes, by the entry point in pyproject.toml. This module
loads nothing of vLLM before that.
"""

from __future__ import annotations

import logging
from typing import Any

from flashgen.errors import one_line

logger = logging.getLogger("flashgen.runtime")

NAME = "FLASHGEN"
BACKEND = "flashgen.runtime.adapters.vllm_backend.FlashgenBackend"


def register() -> None:
    """Make flashgen vLLM's attention backend FLASHGEN, for --attention-backend.

    vLLM calls this unguarded in every process. In a vLLM that takes no such backend it only logs
    one line.

    Returns:
        None.

    Raises:
        Nothing: what vLLM raises is logged as one warning, without a traceback.

    Examples:
        >>> import flashgen.runtime
        >>> flashgen.runtime.vllm.register()  # doctest: +SKIP
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        if NAME in AttentionBackendEnum.__members__:
            return
        register_backend(NAME, BACKEND)
        # An enum is pickled by its value. A spawned process unpickles its configuration before
        # vLLM loads plugins there, and would not know this one.
        AttentionBackendEnum[NAME].__reduce_ex__ = lambda _: (_member, ())
    except Exception as error:  # of any class: an unknown name is a ValueError until vLLM 0.31
        logger.warning(
            "flashgen needs vLLM 0.33, and is no attention backend of this one: %s", one_line(error)
        )


def _member() -> Any:
    """The member of vLLM's enum, in any process."""
    register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[NAME]
