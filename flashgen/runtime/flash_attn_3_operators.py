"""adapters/flash_attn_3_operators.py, under its public name."""

import sys

from flashgen.runtime import adapters
from flashgen.runtime.adapters.flash_attn_3_operators import *  # noqa: F403 (what type checkers see)

sys.modules[__name__] = adapters.flash_attn_3_operators
