"""Registers the operators, and loads the dispatcher that serves them: for a process that runs a
program exported elsewhere.
"""

from flashgen.runtime import folders
from flashgen.runtime.custom_ops import attention_backward, attention_forward

__all__ = ["attention_backward", "attention_forward"]

folders.current()
