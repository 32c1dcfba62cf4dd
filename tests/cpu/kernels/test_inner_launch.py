"""Triton's function around its C launcher, read as each version writes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashgen.kernels import inner_launch

META = [{"swizzle": 3}, {"swizzle": 2}]


def of_3_7(metadata: Any, places: Any) -> Callable[..., Any]:
    launcher, tensordesc_indices, tensordesc_meta = "C", places, metadata
    return lambda *given: (launcher, tensordesc_indices, tensordesc_meta, given)


def of_3_9(metadata: Any, places: Any) -> Callable[..., Any]:
    launcher, relevant_paths, tensordesc_meta = "C", places, metadata
    return lambda *given: (launcher, relevant_paths, tensordesc_meta, given)


@pytest.mark.parametrize(("made", "places"), [(of_3_7, {4, 1}), (of_3_9, {1: {}, 4: {}})])
def test_descriptors_are_encoded_by_their_places(made: Any, places: Any) -> None:
    launch, encoders = inner_launch._unwrapped(made(META, places))
    assert launch == "C"
    assert [(place, x.keywords["metadata"]) for place, x in encoders.items()] == [
        (1, META[0]), (4, META[1])
    ]  # fmt: skip
    assert all(("_" in x.keywords) == (made is of_3_9) for x in encoders.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "launch",
    [
        of_3_7(None, {1}),
        of_3_9([None], {1: {}}),  # lowered to a pointer
        of_3_9(META, {1: {}}),
        of_3_9(META, {1: {}, 4: {0: {}}}),  # in a tuple
        lambda *given: given,
    ],
)
def test_what_is_unknown_is_left_to_triton(launch: Any) -> None:
    assert inner_launch._unwrapped(launch) == (None, {})
