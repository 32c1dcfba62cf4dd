"""Schedule hopper's forward as Triton compiles it: its barriers, its order of tiles, its results."""

from __future__ import annotations

import itertools

import pytest
import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend

from flashgen.evaluate.check import check_loaded
from flashgen.kernels.descriptors import descriptor_of
from flashgen.kernels.launch import launch
from flashgen.kernels.loader import load_text
from flashgen.kernels.render import render
from flashgen.kernels.signature import compile_signature
from flashgen.schedules.config import KernelConfig
from flashgen.spec.vocabulary import SHORT_DTYPE
from tests.executed import (
    Load,
    assert_bits_of,
    assert_found,
    assert_right,
    case,
    compiled,
    loads,  # noqa: F401  # a fixture
)
from tests.makers import each, hopper, make_config, make_spec

VARIANTS = [
    ("bfloat16", (64, 64), hopper(), "causal"),
    ("bfloat16", (64, 64), hopper(192, 32, 3), "none"),
    ("bfloat16", (128, 128), hopper(128, 128), "causal"),
    ("bfloat16", (256, 256), hopper(128, 64), "none"),
    ("bfloat16", (96, 96), hopper(192, 64), "causal"),
    ("bfloat16", (192, 192), hopper(128, 32), "none"),
    ("bfloat16", (192, 128), hopper(128, 64), "causal"),
    ("float16", (64, 64), hopper(128, 64, 4), "none"),
]


@pytest.mark.parametrize(("dtype", "dims", "config", "mask"), each(VARIANTS))
def test_every_variant_is_right(
    dtype: str, dims: tuple[int, int], config: KernelConfig, mask: str
) -> None:
    assert_right(make_spec(dtype, dims[0], mask, head_dim_v=dims[1]), config)


@pytest.mark.parametrize(
    ("config", "mask", "alignment"),
    each(
        [
            (config, *mask)
            for config in (hopper(), hopper(192, 32, 3, "plain"), hopper(128, 32, 2))
            for mask in (("causal", "top_left"), ("causal", "bottom_right"), ("none", ""))
        ],
    ),
)
def test_one_to_five_tiles_of_keys(config: KernelConfig, mask: str, alignment: str) -> None:
    """Every number of uses of a place of the ring, and every remainder."""
    spec, bc = make_spec("bfloat16", 64, mask), config.bc
    lengths = [1, bc - 1, bc, bc + 1, 2 * bc, 3 * bc - 1, 4 * bc + 1, 5 * bc]
    kernel = compiled(spec, config)
    for seed, (sk, sq) in enumerate(itertools.product(lengths, (1, config.br + 65))):
        cases = [case(sq, sk, alignment or "bottom_right", heads=2)]
        result = check_loaded(kernel, spec, config, seed=seed, cases=cases)
        assert result.passed, result


@pytest.mark.parametrize("order", ["plain", "longest_first"])
def test_tiles_are_loaded_once_each_from_the_last_that_is_seen(
    order: str,
    loads: dict[int, list[Load]],  # noqa: F811
) -> None:
    spec, config = make_spec("bfloat16", 64, "causal"), hopper(order=order)
    assert_right(spec, config, [case(384, 384)])
    walks = []
    for _, copied in sorted(loads.items()):
        (q, _, first), (_, _, second) = copied[:2]
        assert second[2] == first[2] + 64
        of_k, of_v = ([at[2] for base, _, at in copied if base == x] for x in _keys(copied, q))
        assert of_k == of_v
        walks.append((first[2], of_k))
    expected = [(row, list(range(row + 64, -1, -64))) for row in (0, 128, 256)]
    assert walks == (expected[::-1] if order == "longest_first" else expected)


def _keys(copied: list[Load], q: int) -> list[int]:
    """The addresses of K and V: what is copied after Q, and before O is stored."""
    return list(dict.fromkeys(base for base, *_ in copied if base != q))[:2]


def test_rows_that_see_no_key() -> None:
    """More queries than keys: the first 100 rows, one whole tile among them where br is 64."""
    spec, config = make_spec("bfloat16", 64, "causal"), hopper()
    q, k, v = (torch.randn(1, 1, n, 64, dtype=torch.bfloat16) for n in (200, 60, 60))
    o, lse = launch(compiled(spec, config), spec, config, q, k, v, scale=0.125, diagonal=60 - 200)
    assert bool((o[:, :, :140] == 0).all())
    assert bool((lse[:, :, :140] == float("-inf")).all())
    assert bool(torch.isfinite(lse[:, :, 140:]).all())


INVARIANT = [
    (64, hopper(128, 64), "none"),
    (128, hopper(192, 64), "causal"),
    (128, hopper(128, 64, 3), "none"),
    (64, hopper(192, 64, 2, "grouped", persistent=True), "causal"),
]


@pytest.mark.parametrize(("dim", "config", "mask"), each(INVARIANT))
def test_segments_give_the_bits_of_a_plain_kernel_of_the_class(
    dim: int, config: KernelConfig, mask: str
) -> None:
    """One of them persistent: a program has several tiles."""
    spec = make_spec("bfloat16", dim, mask, invariant=True)
    assert_right(spec, config)
    assert_bits_of(make_config(64, 64, num_warps=4, num_stages=2), spec, config)


LOOP_K = "                s = warpgroup_mma_wait(1, deps=(s,))\n"
FREE_K = "                release(k_empty.index(stage))\n"
LOOP_V = "                acc = warpgroup_mma_wait(0, deps=(acc,))\n"
FREE_V = "                release(v_empty.index(before))\n"
MUTANTS = {
    "producer waits for the wrong phase": ("phase ^ 1", "phase"),
    "producer waits for no place of K": (
        "i, k_empty, k_full, k_smem)", "i, None, k_full, k_smem)"),
    "producer waits for no place of V": (
        "i - 1, v_empty, v_full, v_smem)", "i - 1, None, v_full, v_smem)"),
    "K is given back before it is read": (LOOP_K + FREE_K, FREE_K + LOOP_K),
    "V is given back before it is read": (LOOP_V + FREE_V, FREE_V + LOOP_V),
    "K is never given back": (FREE_K, ""),
    "V is never given back": (FREE_V, ""),
    "V is not awaited": ("                mbarrier.wait(v_full.index(before), phase_before)\n", ""),
    "K is not awaited": ("                mbarrier.wait(k_full.index(stage), phase)\n", ""),
    "V of the wrong phase": ("(i - 1) % STAGES, phase", "(i - 1) % STAGES, (i // STAGES) & 1"),
    "V of the wrong tile": ("phase_before = (i - 1) % STAGES", "phase_before = i % STAGES"),
    "the last V of the wrong phase": ("v_full.index(stage), phase)", "v_full.index(stage), phase ^ 1)"),
    "one arrival empties": ("new_barriers(STAGES, WARPGROUPS)", "new_barriers(STAGES, 1)"),
    "Q is not awaited": ("        mbarrier.wait(q_full.index(w), q_phase)\n", ""),
    "no first turn": ('row_max = turn(row_max, "arrive", 0)', "pass"),
    "no last turn": ('row_max = turn(row_max, "sync", 0)', "pass"),
    "turns are never passed on": (
        'row_max = turn(row_max, "arrive", (w + 1) % WARPGROUPS)', "pass"),
    "K in another order than V": (
        "load(v_desc, at(of_k, kv_head, start), i - 1", "load(v_desc, at(of_k, kv_head, i * BC - BC), i - 1"),
    "the diagonal is not seen": (" <= limits", " < limits"),
    "a lane's keys are another's": ("keys & 6", "keys & 2"),
    "a mask for no tile but the first": ("else i < walked + masked_tiles", "else i < 1"),
    "the mask of the tile before": ("else end - 1 - i", "else end - i"),
    "a masked tile too few": (
        "masked_tiles = gl.maximum(key_tiles - full_tiles, 1)",
        "masked_tiles = gl.maximum(key_tiles - full_tiles - 1, 1)"),
    "one tile too few": ("gl.cdiv(key_end, BC), 1)", "key_end // BC, 1)"),
    "the maximum starts infinite": ("-3.4028234663852886e38", 'float("-inf")'),
    "O of another warpgroup": ("else q_smem.index(w)", "else q_smem.index(0)"),
    "a sum that is not rescaled": ("row_sum * gl.expand_dims(scale, 1)", "row_sum"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", each(MUTANTS, 14))
def test_a_broken_text_is_found(mutant: str) -> None:
    spec, config = make_spec("bfloat16", 64, "causal"), hopper(128, 32, 2)
    cases = [case(200, 60), case(128, 256, heads=4), case(129, 193, "top_left")]
    assert_found(spec, config, MUTANTS[mutant], cases)


@pytest.mark.parametrize("way", [hopper(192, 64, 2, "grouped", persistent=True), hopper(192, 64)])
def test_the_signature_is_that_of_a_launch(way: KernelConfig) -> None:
    """Triton keeps binaries by the text of their arguments' types; the order is the kernel's."""
    spec, config = make_spec("bfloat16", 96, "causal"), way
    types = compile_signature(spec, config, load_text(render(spec, config)).arg_names).types
    x = torch.zeros(2, 3, 100, 96, dtype=torch.bfloat16)
    for name, rows in {"q": 64, "k": 64, "v": 64, "o": 64}.items():
        host = descriptor_of(x, rows, 128, gluon=True)
        element = SHORT_DTYPE[spec.dtype]
        assert types[f"{name}_desc"] == f"tensordesc<{element}{host.block_shape},{host.layout!r}>"
        asked = native_specialize_impl(CUDABackend, host, False, True, True)
        assert asked[0] == types[f"{name}_desc"]
