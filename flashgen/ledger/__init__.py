"""Ledger: what the workers of one run know together, and who of them is at what.

storage reaches Optuna's storages, workers knows who lives, claims shares the outcomes out, and run
holds them together.
"""

from flashgen.ledger.claims import Answer, Claim, Page, State, Unit
from flashgen.ledger.run import Ledger
from flashgen.ledger.storage import Pace, StorageError

__all__ = ["Answer", "Claim", "Ledger", "Pace", "Page", "State", "StorageError", "Unit"]
