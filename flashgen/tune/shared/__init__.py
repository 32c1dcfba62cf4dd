"""What the workers of one run share: outcomes, and which worker evaluates what.

storage opens Optuna's storages, run tracks the living workers, claims distributes the work, and
evaluator combines them.
"""

from flashgen.tune.shared.claims import Answer, Claim, Page, State, Unit
from flashgen.tune.shared.run import Ledger
from flashgen.tune.shared.storage import Pace, StorageError

__all__ = ["Answer", "Claim", "Ledger", "Pace", "Page", "State", "StorageError", "Unit"]
