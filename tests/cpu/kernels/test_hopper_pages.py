"""Schedule hopper's forward over a cache in pages, as Triton compiles it: results, boxes, mutants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.evaluate.check_attention import PackedCase, in_pages, packed_case
from flashgen.inputs.features import Features
from flashgen.kernels.descriptors import descriptor_of, take_pages
from flashgen.kernels.launch import launch
from flashgen.ptx import FaultsFound
from flashgen.reference import cases
from flashgen.reference.attention import judge
from tests.executed import Load, assert_right, compiled, loads
from tests.makers import each, hopper, make_spec

__all__ = ["loads"]

VARIANTS: dict[str, tuple[Any, ...]] = {
    "gpt-oss": (64, "causal", hopper(), {"window": True, "sink": True}),
    "causal": (128, "causal", hopper(128, 128, order="longest_first"), {}),
    "no mask": (128, "none", hopper(192, 64, 3), {}),
    "Gemma 2": (256, "causal", hopper(128, 64), {"window": True, "softcap": True}),
    "Llama 4": (128, "causal", hopper(192, 64), {"chunk": True}),
    "slopes of a sequence": (64, "causal", hopper(192, 32, 3), {"alibi": True}),
    "a padded head dim": (96, "causal", hopper(192, 64), {}),
}


@pytest.mark.parametrize("name", each(VARIANTS))
def test_every_variant_is_right(name: str) -> None:
    dim, mask, config, features = VARIANTS[name]
    assert_right(make_spec("bfloat16", dim, mask, varlen=True, paged=True, **features), config)


def test_gpt_oss_is_right() -> None:
    dim, mask, config, features = VARIANTS["gpt-oss"]
    few = packed_case([(133, 71), (1, 64)], heads=4, kv_heads=2, page_size=16, varied=True)
    spec = make_spec("bfloat16", dim, mask, varlen=True, paged=True, **features)
    assert_right(spec, config, [few])


@pytest.mark.slow("a kernel of wide heads")
def test_latent_heads_and_half_precision() -> None:
    spec = make_spec("float16", 192, "none", head_dim_v=128, varlen=True, paged=True)
    assert_right(spec, hopper())


SPEC = make_spec("bfloat16", 64, "causal", varlen=True, paged=True)
CONFIG = hopper(128, 64)
LENGTHS = [(100, 100), (0, 5), (1, 31), (7, 0), (129, 200)]


def ran(page_size: int, broken: tuple[str, str] = ("", "")) -> float:
    """The largest error, in units of its limit, of SPEC over LENGTHS in pages whose unused slots
    are NaN. Behind a sequence's last page the table has numbers of no page.
    """
    case, q, k, v, features = inputs(page_size)
    pool_k, pool_v, given = in_pages(k, v, features, case, 0)
    assert given.sequences is not None
    table = given.sequences.block_table
    assert table is not None
    for row, (_, keys) in enumerate(LENGTHS):
        table[row, -(-keys // page_size) :] = 1 << 29
    return badness(case, q, k, v, features, (pool_k, pool_v, given), broken)


def inputs(page_size: int) -> tuple[PackedCase, Tensor, Tensor, Tensor, Features]:
    case = packed_case(LENGTHS, heads=2, kv_heads=2, page_size=page_size)
    features = cases.make_features(SPEC, case, 0, "cpu")
    return case, *cases.make_inputs(SPEC, case, 0, "cpu"), features


def badness(
    case: PackedCase, q: Tensor, k: Tensor, v: Tensor, features: Features,
    paged: tuple[Tensor, Tensor, Features], broken: tuple[str, str] = ("", ""),
) -> float:  # fmt: skip
    """The largest error of the kernel over these pages, in units of its limit."""
    scale, diagonal = case.scale(SPEC.head_dim), case.diagonal(SPEC)
    o, lse = launch(
        compiled(SPEC, CONFIG, 0, *broken), SPEC, CONFIG, q, *paged[:2],
        scale=scale, diagonal=diagonal, features=paged[2],
    )  # fmt: skip
    return judge(o, lse, q, k, v, scale=scale, diagonal=diagonal, features=features).badness


@pytest.mark.parametrize(("page_size", "rows"), each([(256, 64), (8, 8), (32, 32), (64, 64)], 4))
def test_pages_smaller_and_larger_than_a_tile(
    page_size: int, rows: int, loads: dict[int, list[Load]]
) -> None:
    """A box is of one page, and of 64 rows at most."""
    assert ran(page_size) <= 1.0
    boxes = {box for of_block in loads.values() for _, box, _ in of_block}
    assert boxes == {(1, 1, 1, 64, 64), (1, 1, 1, rows, 64)}, "Q's rows, and boxes of keys"


def test_keys_and_values_of_one_pool() -> None:
    """Pages as vLLM has them: those of K and V in turn, so that their rows lie two pages apart."""
    case, q, k, v, features = inputs(16)
    pool_k, pool_v, given = in_pages(k, v, features, case, 0)
    both = torch.stack([pool_k.transpose(1, 2), pool_v.transpose(1, 2)], 1)
    keys, values = (both[:, n].transpose(1, 2) for n in (0, 1))
    assert keys.stride(0) == 2 * 16 * keys.stride(2)
    assert badness(case, q, k, v, features, (keys, values, given)) <= 1.0


def test_which_pools_have_descriptors() -> None:
    pool = torch.empty(10, 16, 2, 64).transpose(1, 2)
    assert take_pages(pool)
    assert take_pages(torch.empty(10, 2, 16, 64)), "heads before slots"
    assert not take_pages(pool[:, :, :4]), "a page smaller than a box"
    apart = torch.empty(10, 16 * 2 * 64 + 8)[:, : 16 * 2 * 64].view(10, 16, 2, 64).transpose(1, 2)
    assert not take_pages(apart), "pages that begin within a row"
    far = torch.empty(1 << 27, 2, 16, 64, device="meta")
    assert not take_pages(far), "rows beyond 31 bits"


def test_the_place_of_a_key_in_its_page() -> None:
    pool = torch.zeros(40, 16, 2, 64, dtype=torch.bfloat16).transpose(1, 2)
    made = descriptor_of(pool, 16, 64, gluon=True, packed=True)
    page, slot, keys = 33, 5, 11
    row = page * (pool.stride(0) // pool.stride(2)) + keys
    at = (1 << 30, row, 1, (1 << 30) - keys + slot, 0)
    place = sum(i * step for i, step in zip(at, made.strides, strict=True)) * 2 % 2**64
    assert place == pool[page, 1, slot].data_ptr() - pool.data_ptr()
    assert all(i < n for i, n in zip(at, made.shape, strict=True))


MUTANTS: dict[str, tuple[str, str]] = {
    "the table is read behind its last page": ("mask=key < seq_k, other=0", "mask=key >= 0, other=0"),
    "a page is full": ("gl.maximum(seq_k - (key - slot), 0)", "(seq_k * 0 + 4096)"),
    "the slot is 0": ("(1 << 30) - size + slot", "(1 << 30) - size + slot * 0"),
    "a page's last key is lost": ("gl.maximum(seq_k - (key - slot), 0)", "gl.maximum(seq_k - (key - slot) - 1, 0)"),
    "the page before": ("found[n] * rows_of_page", "(found[n] - 1) * rows_of_page"),
    "pages of another sequence": ("batch.to(gl.int64) * stride_table", "(batch * 0).to(gl.int64) * stride_table"),
    "one page for the whole tile": ("gl.load(table + (key >> page_bits)", "gl.load(table + (start >> page_bits)"),
    "another place of the ring": ("(stage * CHUNKS + column)", "((stage ^ 1) * CHUNKS + column)"),
    "boxes in another order": ("* BOXES + n)", "* BOXES + (n ^ 1))"),
    "heads of K are heads of Q": ("row, head, (1 << 30) - size + slot", "row, head * 0, (1 << 30) - size + slot"),
    "fewer bytes are awaited": ("BOXES * CHUNKS * desc.block_type.nbytes", "desc.block_type.nbytes"),
}  # fmt: skip


OF_LARGE_PAGES = {"the slot is 0"}


@pytest.mark.parametrize("mutant", each(MUTANTS, 20))
def test_a_broken_text_is_found(mutant: str) -> None:
    try:
        assert not ran(256 if mutant in OF_LARGE_PAGES else 16, MUTANTS[mutant]) <= 1.0
    except FaultsFound:
        return
