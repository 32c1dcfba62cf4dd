"""adapters/torch.py, under its public name."""

import sys

from flashgen.runtime import adapters
from flashgen.runtime.adapters.torch import *  # noqa: F403 (what type checkers see)

sys.modules[__name__] = adapters.torch
