"""Schedule hopper's backward as Triton compiles it: its barriers, its rows, its gradients."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from flashgen.evaluate.check import check_loaded
from flashgen.kernels.descriptors import descriptor_of
from flashgen.kernels.loader import load_text
from flashgen.kernels.render import render
from flashgen.kernels.signature import compile_signature
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.vocabulary import SHORT_DTYPE, Direction
from tests.executed import (
    Load,
    assert_found,
    assert_right,
    case,
    compiled,
    far_below_zero,
    loads,  # noqa: F401  # a fixture
)
from tests.makers import each, make_config, make_spec

DIRECTIONS: tuple[Direction, ...] = ("backward_dkv", "backward_fused", "backward_dq")


def hopper(
    direction: Direction, walked: int = 64, stages: int = 2, warps: int = 8, order: str = "plain"
) -> KernelConfig:
    """A config by what its programs walk."""
    owned = 16 * warps
    br, bc = (owned, walked) if direction == "backward_dq" else (walked, owned)
    return make_config(
        br,
        bc,
        num_warps=warps,
        num_stages=stages,
        schedule="hopper",
        loads="descriptor",
        order=order,
    )


def next_s(walked: int = 64, stages: int = 2) -> KernelConfig:
    """S of the next tile is issued before dQ of this one leaves."""
    return replace(hopper("backward_fused", walked, stages), next_s=True)


def shared_keys(stages: int = 2) -> KernelConfig:
    """For head dims above 128: both consumers share 64 keys."""
    return replace(hopper("backward_dkv", 64, stages), bc=64)


def spec_of(
    direction: Direction, mask: str = "none", dims: tuple[int, int] = (64, 64), dtype="bfloat16"
) -> AttentionSpec:
    return make_spec(dtype, dims[0], mask, head_dim_v=dims[1], direction=direction)


VARIANTS = [
    ("bfloat16", (64, 64), 64, 2),
    ("float16", (64, 64), 128, 3),
    ("bfloat16", (128, 128), 64, 2),
    ("bfloat16", (96, 96), 64, 2),
    ("bfloat16", (40, 72), 64, 3),
]


@pytest.mark.parametrize(
    ("dtype", "dims", "walked", "stages", "direction", "mask"),
    each(
        [
            (*variant, direction, mask)
            for variant in VARIANTS
            for direction in DIRECTIONS
            for mask in ("causal", "none")
        ]
    ),
)
def test_every_variant_is_right(
    direction: Direction, dtype: str, dims: tuple[int, int], walked: int, stages: int, mask: str
) -> None:
    assert_right(spec_of(direction, mask, dims, dtype), hopper(direction, walked, stages))


def test_heads_that_share_keys() -> None:
    cases = [case(130, 200, heads=4, kv=2), case(200, 70, "top_left", batch=2)]
    assert_right(spec_of("backward_dkv", "causal"), hopper("backward_dkv"), cases)


ORDERS_OF_PRODUCTS: list[tuple[Direction, str, tuple[int, int], KernelConfig]] = [
    ("backward_fused", "float16", (192, 128), shared_keys(3)),
    ("backward_fused", "bfloat16", (64, 64), next_s(128)),
    ("backward_fused", "float16", (40, 72), next_s(64, 3)),
    ("backward_fused", "bfloat16", (256, 256), shared_keys()),
    ("backward_dkv", "bfloat16", (256, 256), shared_keys()),
    ("backward_dq", "bfloat16", (256, 256), hopper("backward_dq")),
    ("backward_dq", "float16", (192, 128), hopper("backward_dq", 32, 3)),
]


@pytest.mark.parametrize(
    ("direction", "dtype", "dims", "config", "mask"),
    each([(*way, mask) for mask in ("causal", "none") for way in ORDERS_OF_PRODUCTS]),
)
def test_every_order_of_products_is_right(
    direction: Direction, dtype: str, dims: tuple[int, int], config: KernelConfig, mask: str
) -> None:
    spec = spec_of(direction, mask, dims, dtype)
    assert why_illegal(spec, config, TARGETS["nvidia_h200"]) is None
    result = check_loaded(compiled(spec, config), spec, config)
    assert result.passed, result


@pytest.mark.parametrize(
    ("walked", "order"), each(itertools.product([32, 64], ["plain", "longest_first"]))
)
def test_three_consumers_of_rows(walked: int, order: str) -> None:
    assert_right(spec_of("backward_dq", "causal"), hopper("backward_dq", walked, 3, 12, order))


KINDS: list[tuple[Direction, int, KernelConfig]] = [
    ("backward_fused", 64, next_s()),
    *((direction, 64, hopper(direction)) for direction in DIRECTIONS),
    ("backward_fused", 256, shared_keys()),
    ("backward_dkv", 256, shared_keys()),
    ("backward_dkv", 64, hopper("backward_dkv", 128)),
    ("backward_dq", 256, hopper("backward_dq")),
]


@pytest.mark.parametrize(
    ("direction", "dim", "config", "mask", "alignment"),
    each(
        [
            (*kind, *mask)
            for mask in (("causal", "top_left"), ("causal", "bottom_right"), ("none", ""))
            for kind in KINDS
        ]
    ),
)
def test_one_to_five_tiles(
    direction: Direction, dim: int, config: KernelConfig, mask: str, alignment: str
) -> None:
    """Every number of uses of a place of the rings, and every remainder."""
    spec = spec_of(direction, mask, (dim, dim))
    walked, owned = [1, 63, 64, 65, 128, 191, 257, 320], [1, 193]
    kernel = compiled(spec, config)
    for seed, lengths in enumerate(itertools.product(walked, owned)):
        sq, sk = lengths[::-1] if direction == "backward_dq" else lengths
        cases = [case(sq, sk, alignment or "bottom_right", heads=2, kv=1 + seed % 2)]
        result = check_loaded(kernel, spec, config, seed=seed, cases=cases)
        assert result.passed, result


def test_rows_are_loaded_once_for_each_head_from_the_first_that_sees_a_key(
    loads: dict[int, list[Load]],  # noqa: F811
) -> None:
    assert_right(
        spec_of("backward_dkv", "causal"), hopper("backward_dkv"), [case(256, 256, heads=2, kv=1)]
    )
    walks = []
    for _, copied in sorted(loads.items()):
        k, v, *_ = [at[2] for _, _, at in copied]
        assert k == v
        of_q, of_do = (
            [at[2] for base, _, at in copied[2:] if base == x]
            for x in list(dict.fromkeys(base for base, *_ in copied[2:]))[:2]
        )
        assert of_q == of_do
        walks.append((k, of_q))
    assert walks == [(0, [0, 64, 128, 192] * 2), (128, [128, 192] * 2)]


@pytest.mark.parametrize("order", each(["longest_first", "plain"], 2))
def test_keys_are_loaded_once_up_to_the_last_that_a_row_sees(
    order: str,
    loads: dict[int, list[Load]],  # noqa: F811
) -> None:
    spec, config = spec_of("backward_dq", "causal"), hopper("backward_dq", order=order)
    assert_right(spec, config, [case(256, 256)])
    walks = []
    for _, copied in sorted(loads.items()):
        rows = [at[2] for _, _, at in copied[:4]]
        assert rows == [rows[0]] * 2 + [rows[0] + 64] * 2
        of_k, of_v = (
            [at[2] for base, _, at in copied[4:] if base == x]
            for x in list(dict.fromkeys(base for base, *_ in copied[4:]))[:2]
        )
        assert of_k == of_v
        walks.append((rows[0], of_k))
    expected = [(0, [0, 64]), (128, [0, 64, 128, 192])]
    assert walks == (expected[::-1] if order == "longest_first" else expected)


@pytest.mark.parametrize(
    ("direction", "dim", "config", "mask"),
    each([(*kind, mask) for mask in ("none", "causal") for kind in KINDS]),
)
def test_scores_far_below_zero(
    direction: Direction, dim: int, config: KernelConfig, mask: str
) -> None:
    spec = spec_of(direction, mask, (dim, dim))
    for gradient in far_below_zero(compiled(spec, config), spec, config):
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize(
    ("dim", "config", "old", "new"),
    [
        (64, hopper("backward_fused"), "first_key + 64 > seq_k", "first_key > seq_k"),
        *each([(256, shared_keys(), "key_start + BC > seq_k", "key_start > seq_k")]),
    ],
)
def test_a_ragged_end_that_is_not_masked_is_found(
    dim: int, config: KernelConfig, old: str, new: str
) -> None:
    spec = spec_of("backward_fused", dims=(dim, dim))
    found = far_below_zero(compiled(spec, config, 0, old, new), spec, config)
    assert not all(bool(gradient.isfinite().all()) for gradient in found)


@pytest.mark.slow("a kernel; schedule blackwell and packed sequences have such keys")
def test_keys_that_no_row_sees_have_no_gradient() -> None:
    """More keys than queries, aligned at the top: the last tile's rows begin past the end."""
    spec, config = spec_of("backward_fused", "causal"), hopper("backward_fused")
    assert_right(spec, config, [case(70, 300, "top_left")])


# Triton puts a fence where a text lacks it, and a barrier between the warps of a partition, so texts
# without one are no mutants. Mutants of the PTX are in tests/cpu/ptx.
DONE = "                dk = warpgroup_mma_wait(1 if NEXT_S else 0, deps=(dk,))\n"
FREE = "                mbarrier.arrive(empty.index(stage), count=1)\n"
OF_KEYS = {
    "the producer waits for the wrong phase": ("phase ^ 1", "phase"),
    "the producer waits for no place": ("mbarrier.wait(empty.index(stage), phase ^ 1)", "pass"),
    "statistics before their place is free": (
        "            mbarrier.wait(empty.index(stage), phase ^ 1)\n"
        "            lse_smem.index(stage).store(lse_log2e)\n",
        "            lse_smem.index(stage).store(lse_log2e)\n"
        "            mbarrier.wait(empty.index(stage), phase ^ 1)\n"),
    "a place is given back before it is read": (DONE + FREE, FREE + DONE),
    "a place is never given back": (FREE, ""),
    "Q is not awaited": ("mbarrier.wait(q_full.index(stage), phase)", "pass"),
    "dO is not awaited": ("mbarrier.wait(do_full.index(stage), phase)", "pass"),
    "K and V are not awaited": ("    mbarrier.wait(kv_full.index(0), 0)\n", ""),
    "V is not counted": (
        "k_desc.block_type.nbytes + v_desc.block_type.nbytes", "k_desc.block_type.nbytes"),
    "one arrival empties": ("new_barriers(STAGES, WARPGROUPS)", "new_barriers(STAGES, 1)"),
    "the count starts anew with each head": (
        "        head_rows = (batch * heads + head)", "        nth = 0\n        head_rows = (batch * heads + head)"),
    "dS is written while it is read": ("ds_smem.index((nth & 1).to(gl.int32))", "ds_smem.index(0)"),
    "dS is read before it is whole": (
        "                fence_async_shared()\n                token = meet(token)\n",
        "                fence_async_shared()\n"),
    "K is overwritten while it is read": ("    token = meet(token)  # nobody reads K any more\n", ""),
    "dQ of the wrong columns": ("k_tile.slice(WARPGROUP * DQ_DIMS, DQ_DIMS, 1)",
        "k_tile.slice(0, DQ_DIMS, 1)"),
    "dQ of another head": ("        dq_ptr += head_size\n", ""),
    "dQ of the tile before": ("gl.to_tensor(row_start)", "gl.to_tensor(row_start - BR)"),
    "heads of dQ lie closer": ("gl.cdiv(seq_q, BR) * (BR * HEAD_DIM_PAD)", "seq_q * HEAD_DIM_PAD"),
    "dQ is not awaited": ("dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))", "dv, dq = warpgroup_mma_wait(2, deps=(dv, dq))"),
    "the diagonal is not seen": ("rows_in_tile & ~6, 0) >= first_rows", "rows_in_tile & ~6, 0) > first_rows"),
    "a lane's rows are another's": ("rows_in_tile & 6", "rows_in_tile & 2"),
    "the consumers' count starts anew with each head": (
        "        dq_ptr += head_size\n", "        dq_ptr += head_size\n        nth = nth * 0\n"),
    "a masked tile too few": ("gl.maximum(first_key + 63 - last, 0)", "gl.maximum(first_key - 1 - last, 0)"),
    "rows that see keys are passed over": ("gl.maximum(key_start - diagonal, 0) // BR", "gl.maximum(key_start + BR - diagonal, 0) // BR"),
    "rows that see nothing count": ('lse == float("-inf"), float("inf")', 'lse == float("-inf"), lse'),
    "dK without its scale": ("(dk * scale)", "dk"),
    "gradients of another consumer": ("dk_desc, key, k_smem.index(0).slice(64 * WARPGROUP", "dk_desc, key, k_smem.index(0).slice(64 * 0"),
}  # fmt: skip


OF_NEXT_S = {
    "Q of the next tile is not awaited": (
        "mbarrier.wait(q_full.index(following), (((nth + 1) // STAGES) & 1).to(gl.int32))", "pass"),
    "the first Q is not awaited": ("mbarrier.wait(q_full.index(0), 0)", "pass"),
    "S of the same tile again": ("following = ((nth + 1) % STAGES)", "following = (nth % STAGES)"),
    "nobody loads the Q after the last": (
        "seq_q)\n        load(q_desc, row, nth, None, q_full, q_smem)\n", "seq_q)\n"),
    "it is loaded while its place is in use": (
        "        mbarrier.wait(empty.index(stage), phase ^ 1)\n        row = at(of_q, kv_head, seq_q", "        row = at(of_q, kv_head, seq_q"),
    "S of the next tile is not finished": (
        "            s_t = warpgroup_mma_wait(0, deps=(s_t,))\n                nth", "            s_t = warpgroup_mma_wait(1, deps=(s_t,))\n                nth"),
    "a place is given back before it is read": (
        DONE + FREE, FREE + DONE),
    "dQ is not awaited": ("dq = warpgroup_mma_wait(2, deps=(dq,))", "dq = warpgroup_mma_wait(3, deps=(dq,))"),
    "dS is not fenced": ("                fence_async_shared()\n", ""),
    "dQ of the other half": ("    dq_ptr += WARPGROUP * (BR * DQ_DIMS)\n", ""),
    "columns of dQ in another order": ("permute((0, 4, 1, 3, 5, 2, 6))", "permute((0, 4, 1, 3, 5, 6, 2))"),
}  # fmt: skip


OF_SHARED_KEYS = {
    "P is read before it is whole": ("        token = meet(token)  # P is there\n", ""),
    "dS is read before it is whole": ("        token = meet(token)  # dS is there\n", ""),
    "P is written while it is read": ("p_smem.index(place ^ 1)", "p_smem.index(place)"),
    "P has one place": (
        "        p_smem.index(place ^ 1)", "        p_smem.index(0)"),
    "P is not fenced": (
        "        fence_async_shared()\n        dp = warpgroup_mma_wait", "        dp = warpgroup_mma_wait"),
    "dS is not fenced": (
        "        fence_async_shared()\n        token = meet(token)  # dS", "        token = meet(token)  # dS"),
    "the first P is not fenced": ("    fence_async_shared()\n    row_start", "    row_start"),
    "K and V are overwritten while they are read": (
        "any more.\n    token = meet(token)\n", "any more.\n"),
    "gradients are stored before they are whole": (
        "    fence_async_shared()\n    token = meet(token)\n    if", "    fence_async_shared()\n    if"),
    "gradients are not fenced": (
        "    fence_async_shared()\n    token = meet(token)\n    if", "    token = meet(token)\n    if"),
    "K and V are not awaited": ("    mbarrier.wait(kv_full.index(0), 0)\n", ""),
    "Q of the next tile is not awaited": ("        mbarrier.wait(q_full.index(following), phase)\n", ""),
    "dO of the next tile is not awaited": ("        mbarrier.wait(do_full.index(following), phase)\n", ""),
    "nobody loads the dO after the last": (
        "\n    load(do_desc, row, nth, None, do_full, do_smem)\n", "\n"),
    "a place is given back before it is read": (
        "        dk = warpgroup_mma_wait(2, deps=(dk,))\n        mbarrier.arrive(empty.index(stage), count=1)\n",
        "        mbarrier.arrive(empty.index(stage), count=1)\n        dk = warpgroup_mma_wait(2, deps=(dk,))\n"),
    "dQ is not awaited": ("warpgroup_mma_wait(1, deps=(dv, dq))", "warpgroup_mma_wait(2, deps=(dv, dq))"),
    "S is not awaited": ("s = warpgroup_mma_wait(1, deps=(s,))", "s = warpgroup_mma_wait(2, deps=(s,))"),
    "dP is not awaited": ("dp = warpgroup_mma_wait(0, deps=(dp,))", "dp = warpgroup_mma_wait(1, deps=(dp,))"),
    "one arrival empties": ("new_barriers(STAGES, WARPGROUPS)", "new_barriers(STAGES, 1)"),
    "the diagonal is not seen": (", 1) >= gl.expand_dims(keys, 0)", ", 1) > gl.expand_dims(keys, 0)"),
    "a masked tile too few": ("gl.maximum(key_start + BC - 1 - last, 0)", "gl.maximum(key_start - 1 - last, 0)"),
    "rows of the next head from the first on": ("            row_start = gl.to_tensor(first_row)\n", "            row_start = gl.to_tensor(0)\n"),
    "dQ of the rows above the diagonal": ("            dq_ptr += first_row * HEAD_DIM_PAD\n", ""),
    "dQ of the other half": (" + WARPGROUP * (BR * DIMS)", ""),
    "keys of the other consumer": ("keys += key_start + KEYS * WARPGROUP", "keys += key_start"),
    "columns of the other consumer": ("q_columns = q.slice(DIMS * WARPGROUP", "q_columns = q.slice(DIMS * 0"),
    "columns of K of the other consumer": ("k_columns = k.slice(DIMS * WARPGROUP", "k_columns = k.slice(DIMS * 0"),
    "dK without its scale": ("(dk * scale)", "dk"),
}  # fmt: skip


OF_64_ROWS_AT_ONCE = {
    "S is not awaited": ("s_t = warpgroup_mma_wait(1, deps=(s_t,))", "s_t = warpgroup_mma_wait(2, deps=(s_t,))"),
    "dP is not awaited": ("dp_t = warpgroup_mma_wait(1, deps=(dp_t,))", "dp_t = warpgroup_mma_wait(2, deps=(dp_t,))"),
    "dK is not awaited": (
        "dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))", "dv, dk = warpgroup_mma_wait(1, deps=(dv, dk))"),
    "dO is not awaited": ("if begin == 0:", "if begin == 1:"),
    "LSE of the first rows again": ("lse_smem.index(stage).slice(begin,", "lse_smem.index(stage).slice(0,"),
    "delta of the first rows again": ("delta_smem.index(stage).slice(begin,", "delta_smem.index(stage).slice(0,"),
    "the mask of the first rows again": ("row_start + begin + rows_in_tile", "row_start + rows_in_tile"),
    "statistics in order": ("(rows & ~14) + ((rows & 2) << 2) + ((rows & 12) >> 1)", "rows"),
}  # fmt: skip


OF_ONE_V = {
    "V is loaded while it is read": ("i, v_empty, v_full, v_smem)", "i, None, v_full, v_smem)"),
    "the producer waits for the wrong phase of V": ("i, v_empty, v_full", "i + 1, v_empty, v_full"),
    "V is given back before it is read": (
        "                dp = warpgroup_mma_wait(0, deps=(dp,))\n                mbarrier.arrive(v_empty.index(0), count=1)\n",
        "                mbarrier.arrive(v_empty.index(0), count=1)\n                dp = warpgroup_mma_wait(0, deps=(dp,))\n"),
    "V is never given back": ("mbarrier.arrive(v_empty.index(0), count=1)", "pass"),
    "V of the tile before": ("mbarrier.wait(v_full.index(v_stage), (nth & 1).to(gl.int32) if ONE_V else phase)", "pass"),
    "one arrival empties V": (
        "v_empty = new_barriers(1, WARPGROUPS)", "v_empty = new_barriers(1, 1)"),
    "Q of another consumer": ("again = WARPGROUP +", "again ="),
}  # fmt: skip


OF_ROWS = {
    "the first half of dP is not awaited": ("dp_first = warpgroup_mma_wait(1,", "dp_first = warpgroup_mma_wait(2,"),
    "the last half of dP is not awaited": ("dp_last = warpgroup_mma_wait(1,", "dp_last = warpgroup_mma_wait(2,"),
    "S is not awaited": ("s = warpgroup_mma_wait(2,", "s = warpgroup_mma_wait(3,"),
    "the first half of K again": ("k.slice(HALF, HALF, 0)", "k.slice(0, HALF, 0)"),
    "the first half of V again": ("v.slice(HALF, HALF, 0)", "v.slice(0, HALF, 0)"),
    "the producer waits for the wrong phase": ("phase ^ 1", "phase"),
    "the producer waits for no place": ("mbarrier.wait(empty.index(stage), phase ^ 1)", "pass"),
    "a place is given back before it is read": (
        "            dq = warpgroup_mma_wait(0, deps=(dq,))\n"
        "            mbarrier.arrive(empty.index(stage), count=1)\n",
        "            mbarrier.arrive(empty.index(stage), count=1)\n"
        "            dq = warpgroup_mma_wait(0, deps=(dq,))\n"),
    "a place is never given back": ("mbarrier.arrive(empty.index(stage), count=1)", "pass"),
    "K is not awaited": ("mbarrier.wait(k_full.index(stage), phase)", "pass"),
    "V is not awaited": ("mbarrier.wait(v_full.index(v_stage), (nth & 1).to(gl.int32) if ONE_V else phase)", "pass"),
    "Q and dO are not awaited": ("    mbarrier.wait(rows_full.index(WARPGROUP), 0)\n", ""),
    "dO is not counted": (
        "q_desc.block_type.nbytes + do_desc.block_type.nbytes", "q_desc.block_type.nbytes"),
    "one arrival empties": ("new_barriers(STAGES, WARPGROUPS)", "new_barriers(STAGES, 1)"),
    "dQ of another consumer": ("q_tile = q_smem.index(WARPGROUP)", "q_tile = q_smem.index(0)"),
    "the diagonal is not seen": ("<= gl.expand_dims(last_key", "< gl.expand_dims(last_key"),
    "a masked tile too few": ("first_row + last + 1, 0)", "first_row + last + BC, 0)"),
    "one tile too few": ("gl.cdiv(key_end, BC)", "key_end // BC"),
    "rows that see nothing count": ('lse == float("-inf"), float("inf")', 'lse == float("-inf"), lse'),
    "rows of another head": ("delta_ptr + head_rows", "delta_ptr"),
    "dQ without its scale": ("(dq * scale)", "dq"),
}  # fmt: skip


BROKEN: dict[str, tuple[Direction, int, KernelConfig, dict[str, tuple[str, str]]]] = {
    "fused": ("backward_fused", 64, hopper("backward_fused"), OF_KEYS),
    "next S": ("backward_fused", 64, next_s(), OF_NEXT_S),
    "shared keys": ("backward_fused", 256, shared_keys(), OF_SHARED_KEYS),
    "64 rows at once": ("backward_dkv", 64, hopper("backward_dkv", 128), OF_64_ROWS_AT_ONCE),
    "dQ": ("backward_dq", 64, hopper("backward_dq"), OF_ROWS),
    "one V": ("backward_dq", 256, hopper("backward_dq"), OF_ONE_V),
}


CASES = [
    case(128, 128, heads=4, kv=4),
    case(300, 60, heads=2),
    case(193, 256, heads=4, kv=2),
    case(129, 193, "top_left"),
]


@pytest.mark.parametrize(
    ("kernel", "mutant"),
    each([(name, mutant) for name, row in BROKEN.items() for mutant in row[3]], 120),
)
def test_a_broken_text_is_found(kernel: str, mutant: str) -> None:
    direction, dim, config, mutants = BROKEN[kernel]
    assert_found(spec_of(direction, "causal", (dim, dim)), config, mutants[mutant], CASES)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_signature_is_that_of_a_launch(direction: Direction) -> None:
    spec, config = spec_of(direction, "causal", (96, 64)), hopper(direction)
    types = compile_signature(spec, config, load_text(render(spec, config)).arg_names).types
    x = torch.zeros(2, 3, 100, 96, dtype=torch.bfloat16)
    own = {"q": (64, 128), "k": (64, 128), "do": (64, 64), "dq": (64, 128)}
    if direction != "backward_dq":
        own = {"q": (64, 128), "k": (128, 128), "dk": (64, 128), "dv": (64, 64)}
    for name, (rows, dim) in own.items():
        host = descriptor_of(x[..., :dim], rows, dim, gluon=True)
        text = f"tensordesc<{SHORT_DTYPE[spec.dtype]}{host.block_shape},{host.layout!r}>"
        assert types[f"{name}_desc"] == text
