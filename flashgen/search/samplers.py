"""Samplers by name: which Proposer a method asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flashgen.search.method import Method
from flashgen.search.points import Point
from flashgen.search.propose import P, Proposer


def proposer_for(
    method: Method,
    legal: Sequence[P],
    point_of: Callable[[P], Point],
    guesses: Sequence[float | None] | None = None,
) -> Proposer[P]:
    """The proposer of this method, for any but `exhaustive`.

    guesses: another model's opinion of each of `legal`, lower is better, above 0; auto alone heeds
    it. Raises InvalidArgument where the sampler does not apply, ToolchainError where a package is
    missing.
    """
    if method.sampler == "auto":
        from flashgen.search.auto import AutoProposer

        return AutoProposer(legal, point_of, method.seed, guesses)
    from flashgen.search.library import OptunaProposer

    return OptunaProposer(legal, point_of, method)
