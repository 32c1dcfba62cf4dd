"""The generator of dropout: the published vectors, and the statistics of its masks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from flashgen.inputs.features import Features
from flashgen.runtime.eager.visibility import keep_mask, philox, random_words

# Counter, key and words of philox4x32-10, from the known-answer file of the authors' Random123.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def features(p: float, seed: int = 1, offset: int = 2) -> Features:
    return Features(dropout_p=p, rng=torch.tensor([seed, offset]))


def mask(p: float, *shape: int, seed: int = 1, offset: int = 2) -> torch.Tensor:
    return keep_mask(features(p, seed, offset), *shape)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    c0, c1, c2, c3 = torch.tensor(counter)
    k0, k1 = torch.tensor(key)
    assert [int(word) for word in philox((c0, c1, c2, c3), (k0, k1))] == words


def test_a_word_is_that_of_its_element_and_place() -> None:
    """The four words of a draw belong to the elements 8 rows and 8 keys apart, by definition."""
    seed, offset, seq_q, seq_k = -5, 2**40 + 7, 40, 52
    found = random_words(torch.tensor([seed, offset]), 2, 3, seq_q, seq_k)
    low = 0xFFFFFFFF
    for b, h, row, key in ((0, 0, 0, 0), (1, 2, 37, 51), (1, 0, 8, 23), (0, 1, 15, 7)):
        element = (
            ((b * 3 + h) * seq_q + row // 16 * 16 + row % 8) * seq_k + key // 16 * 16 + key % 8
        )
        numbers = (
            element & low,
            element >> 32,
            offset & low,
            offset >> 32,
            seed & low,
            seed >> 32 & low,
        )
        c0, c1, c2, c3, k0, k1 = torch.tensor(numbers)
        words = philox((c0, c1, c2, c3), (k0, k1))
        word = int(words[row // 8 % 2 * 2 + key // 8 % 2])
        assert int(found[b, h, row, key]) == word - 2**32 * (word >= 2**31)


def test_elements_beyond_32_bits_draw_anew() -> None:
    counters = torch.tensor([5, 5 + 2**32, 5 + 2**33])
    zero = torch.tensor(0)
    words = philox((counters & 0xFFFFFFFF, counters >> 32, zero, zero), (zero, zero))[0]
    assert len(set(words.tolist())) == 3


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_rate(p: float) -> None:
    kept = mask(p, 4, 4, 256, 256).double().mean()
    spread = math.sqrt(p * (1 - p) / (4 * 4 * 256 * 256))
    assert abs(float(kept) - (1 - p)) <= 5 * spread


def test_keep_scale_makes_the_mean_one() -> None:
    dropped = features(0.3)
    assert dropped.keep_scale * (1 - 0.3) == pytest.approx(1.0)
    assert features(1.0).keep_scale == 0.0
    assert not bool(mask(1.0, 1, 1, 64, 64).any())


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """In units of its spread for independent masks."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    both = (a * b).mean() / torch.sqrt(a.square().mean() * b.square().mean())
    return abs(float(both)) * math.sqrt(a.numel())


def test_neighbours_and_tiles_are_independent() -> None:
    kept = mask(0.5, 2, 2, 256, 256)
    for rows, keys in itertools.product((0, 1, 7, 8, 16, 64, 128), repeat=2):
        if rows or keys:
            a, b = kept[:, :, rows:, keys:], kept[:, :, : 256 - rows, : 256 - keys]
            assert correlation(a, b) < 5, (rows, keys)


def test_heads_batches_seeds_and_offsets_are_independent() -> None:
    kept = mask(0.5, 2, 2, 128, 128)
    assert correlation(kept[0], kept[1]) < 5
    assert correlation(kept[:, 0], kept[:, 1]) < 5
    for seed, offset in ((1, 3), (1, 2 + 2**32), (2, 2), (1 + 2**32, 2), (-1, 2)):
        assert correlation(kept, mask(0.5, 2, 2, 128, 128, seed=seed, offset=offset)) < 5
