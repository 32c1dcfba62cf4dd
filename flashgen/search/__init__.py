"""Search: which config is the fastest of a specification, found with few evaluations."""

from flashgen.search.staged import search

__all__ = ["search"]
