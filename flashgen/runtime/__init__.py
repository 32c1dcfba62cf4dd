"""The serving half of flashgen: picks a kernel of generated/ for a call and launches it.

Imports neither jinja2 nor optuna nor yaml, touches no GPU and writes no file when imported.
"""

from flashgen.runtime.dispatcher import Dispatcher
from flashgen.runtime.explanation import Explanation

__all__ = ["Dispatcher", "Explanation"]
