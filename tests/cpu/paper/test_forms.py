"""The closed forms give the papers' figures."""

from __future__ import annotations

import pytest

from examples.papers import forms

HEADS, N, D = 1024, 1024, 64


def gigabytes(of_a_head: int) -> float:
    return of_a_head * HEADS / 1e9


def test_the_figures_of_figure_2() -> None:
    standard = forms.standard(N, D, backward=True, mask=True, dropout=True)
    assert gigabytes(standard) == pytest.approx(40.265, abs=1e-3)  # printed: 40.3
    lean = forms.lean_algorithms(N, D, 256)
    assert gigabytes(lean) == pytest.approx(4.429, abs=1e-3)  # printed: 4.4
    assert gigabytes(forms.standard(N, D, backward=True)) == pytest.approx(25.233, abs=1e-3)


@pytest.mark.parametrize(
    ("bc", "own", "printed"),
    [(16, 45.0, 27.3), (64, 12.0, 7.12), (256, 3.71, 2.09), (1024, 1.65, 0.83)],
)
def test_accesses_over_the_block_size(bc: int, own: float, printed: float) -> None:
    assert gigabytes(forms.total(forms.fa1(N, D, min(64, bc), bc))) == pytest.approx(own, rel=5e-3)
    assert gigabytes(forms.algorithm1(N, D, bc)) == pytest.approx(printed, rel=5e-3)


def test_the_bound_is_approached_from_above() -> None:
    factors = [
        forms.total(forms.fa1(n, D, 64, 256)) / (n * n * D * D / (4 * D * 256))
        for n in (256, 1024, 4096, 1 << 16)
    ]
    assert factors == sorted(factors, reverse=True)
    assert 40 < factors[-1] < 41.5


def test_a_causal_mask_walks_about_half() -> None:
    assert forms.keys_seen(N, 128, 128, True) == 128 * 36  # 8 tiles of rows: 1 + 2 + ... + 8
    assert forms.keys_seen(256, 64, 128, True) == 2 * 128 + 2 * 256  # whole tiles of keys
    assert forms.rows_seen(N, 128, 128, True) == 128 * 36


def test_a_causal_mask_saves_half_of_the_operations_but_for_the_diagonal() -> None:
    whole = forms.matrix_flops(N, D, 128, 128)
    assert whole == 4 * N * N * D
    assert forms.matrix_flops(N, D, 128, 128, causal=True) == whole * 36 // 64
    assert forms.matrix_flops(N, D, 128, 128, products=7) == 14 * N * N * D


def test_operations_outside_products_on_two_tiles_by_hand() -> None:
    # N 2, d 1, tiles of one key: 4 scores of 5 operations; rows and O of 2 tiles, and the end.
    assert forms.other_flops_fa2(2, 1, 1) == 4 * 5 + 2 * (2 * 6 + 4) + 2 * (2 + 1)
    assert forms.other_flops_fa1(2, 1, 1) == 4 * 5 + 2 * (2 * 7 + 3) + 2 * 2 * 3


def test_bytes_through_shared_memory_by_hand() -> None:
    # 2 warps, 2 rows, 2 keys, d 1, 2 bytes: Q once, K and V twice.
    assert forms.shared_by_rows(2, 2, 2, 1) == 2 * 2 + 2 * 2 * 2 * 2
    # Q twice, K and V once; parts of O and sums (4 bytes) written and read; maxima written, read by both.
    parts, maxima = 2 * 2 * 2 * 4, 2 * 2 * 4
    assert (
        forms.shared_by_keys(2, 2, 2, 1) == 2 * 2 * 2 + 2 * 2 * 2 + 2 * parts + maxima + 2 * maxima
    )
