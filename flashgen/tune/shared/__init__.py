"""Ledger: what the workers of one run know together, and who of them is at what.

storage reaches Optuna's storages, workers knows who lives, claims shares the outcomes out, and run
holds them together.
"""

from flashgen.tune.shared.claims import Answer, Claim, Page, State, Unit
from flashgen.tune.shared.run import Ledger
from flashgen.tune.shared.storage import Pace, StorageError

__all__ = ["Answer", "Claim", "Ledger", "Pace", "Page", "State", "StorageError", "Unit"]
