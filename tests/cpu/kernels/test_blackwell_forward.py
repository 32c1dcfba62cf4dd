"""Schedule blackwell's forward as Triton compiles it for sm_100: its protocol, and its results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen.evaluate.check import check_loaded
from flashgen.kernels.launch import launch
from flashgen.schedules.config import KernelConfig
from tests.executed import assert_found, assert_right, case, compiled
from tests.makers import each, make_config, make_spec


def blackwell(
    br: int = 256, bc: int = 128, stages: int = 2, order: str = "plain", **more: Any
) -> KernelConfig:
    way: dict[str, Any] = {"schedule": "blackwell", "loads": "descriptor", "order": order}
    way |= {"exp2_by_fma": 4, "rescale_log2": 8} | more
    return make_config(br, bc, num_warps=br // 32, num_stages=stages, **way)


WALKS = {"persistent": True, "order": "grouped"}
VARIANTS = [
    ("bfloat16", (64, 64), blackwell(bc=64, stages=3), "causal"),
    ("bfloat16", (64, 64), blackwell(bc=64, **WALKS), "causal"),
    ("float16", (128, 128), blackwell(stages=4), "none"),
    ("bfloat16", (128, 128), blackwell(stages=3, persistent=True, order="longest_first"), "causal"),
    ("bfloat16", (96, 96), blackwell(exp2_by_fma=8), "causal"),
    ("bfloat16", (192, 128), blackwell(), "causal"),
    ("bfloat16", (192, 128), blackwell(bc=64, persistent=True), "none"),
    ("bfloat16", (256, 256), blackwell(128), "causal"),
    ("float16", (256, 256), blackwell(128, 64, 3, persistent=True), "none"),
    ("bfloat16", (200, 256), blackwell(128, 64, 4, exp2_by_fma=0, rescale_log2=0), "causal"),
]


@pytest.mark.parametrize(("dtype", "dims", "config", "mask"), each(VARIANTS))
def test_every_variant_is_right(
    dtype: str, dims: tuple[int, int], config: KernelConfig, mask: str
) -> None:
    assert_right(make_spec(dtype, dims[0], mask, head_dim_v=dims[1]), config)


@pytest.mark.parametrize(("dtype", "dims", "config", "mask"), each(VARIANTS))
def test_no_order_of_warps_and_copies_changes_the_result(
    dtype: str, dims: tuple[int, int], config: KernelConfig, mask: str
) -> None:
    """Twenty orders, each with every check; two heads share keys, and tiles are ragged."""
    spec = make_spec(dtype, dims[0], mask, head_dim_v=dims[1])
    kernel, found = compiled(spec, config), set()
    q, k, v = _qkv(130, 3 * config.bc + 1, *dims, dtype)
    for _ in range(20):
        o, lse = launch(kernel, spec, config, q, k, v, scale=0.1, diagonal=_diagonal(spec, q, k))
        found.add((o.view(torch.int16).numpy().tobytes(), lse.numpy().tobytes()))
    assert len(found) == 1


@pytest.mark.slow("a kernel, executed for four shapes")
def test_one_to_four_tiles_of_keys() -> None:
    """Each use of a place of the ring and of S, in both tiles of rows, with shared heads."""
    spec, config = make_spec("bfloat16", 64, "causal"), blackwell(bc=64)
    kernel = compiled(spec, config)
    for seed, (sq, sk) in enumerate([(1, 1), (130, 64), (257, 65), (33, 256)]):
        cases = [case(sq, sk, heads=2, kv=1)]
        result = check_loaded(kernel, spec, config, seed=seed, cases=cases)
        assert result.passed, result


@pytest.mark.slow("four kernels")
@pytest.mark.parametrize("lazy", [0, 8])
@pytest.mark.parametrize("br", [256, 128])
def test_a_maximum_that_grows_with_every_tile(br: int, lazy: int) -> None:
    """Scores rise by 4 in log2 from tile to tile: with rescale_log2 8, O waits for three of them."""
    dim = 64 if br == 256 else 256
    spec, config = make_spec("bfloat16", dim, "none"), blackwell(br, 64, rescale_log2=lazy)
    q, k, v = _qkv(br, 6 * 64, dim, dim, "bfloat16")
    rise = torch.arange(6).repeat_interleave(64).flip(0) * 4.0  # the last tile of keys is the first
    q[..., 0], k[..., 0] = 1.0, rise.to(torch.bfloat16)
    scale = 0.6931471805599453
    o, lse = launch(compiled(spec, config), spec, config, q, k, v, scale=scale, diagonal=None)
    scores = q.double() @ k.double().mT * scale
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-4, rtol=1e-5)
    expected = torch.softmax(scores, -1) @ v.double()
    torch.testing.assert_close(o.double(), expected, atol=2e-2, rtol=1e-2)


def test_rows_that_see_no_key() -> None:
    """More queries than keys: the first 140 rows, one whole tile of 128 among them."""
    spec, config = make_spec("bfloat16", 64, "causal"), blackwell(bc=64)
    q, k, v = _qkv(200, 60, 64, 64, "bfloat16")
    o, lse = launch(compiled(spec, config), spec, config, q, k, v, scale=0.125, diagonal=60 - 200)
    assert bool((o[:, :, :140] == 0).all())
    assert bool((lse[:, :, :140] == float("-inf")).all())
    assert bool(torch.isfinite(lse[:, :, 140:]).all())


def _qkv(sq: int, sk: int, dim: int, dim_v: int, dtype: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 2, sq, dim), (1, 1, sk, dim), (1, 1, sk, dim_v))
    return [torch.randn(x, generator=generator).to(getattr(torch, dtype)) for x in shapes]


def _diagonal(spec: Any, q: torch.Tensor, k: torch.Tensor) -> int | None:
    return k.shape[2] - q.shape[2] if spec.causal else None


KV = "mbarrier.wait(kv_empty.index(stage), parity ^ 1)"
MUTANTS = {
    "K and V do not wait for their place": (KV, "pass"),
    "loads wait for the wrong phase": ("parity ^ 1", "parity"),
    "K and V are not counted": ("mbarrier.expect(kv_full.index(stage), PIECES * k_desc.block_type.nbytes)", "pass"),
    "V is counted twice": (
        "mbarrier.expect(kv_full.index(stage), v_desc.block_type.nbytes)",
        "mbarrier.expect(kv_full.index(stage), 2 * v_desc.block_type.nbytes)"),
    "V in the place of K": ("stage = (2 * i + 1) % STAGES", "stage = (2 * i) % STAGES"),
    "K in another order than V": (
        "at(of_k, kv_head, tile_start, 0)", "at(of_k, kv_head, i * BC, 0)"),
    "Q of the first rows twice": ("row_start + 128 * w, 64 * piece)", "row_start, 64 * piece)"),
    "Q is not awaited": ("mbarrier.wait(q_full.index(w), turn)", "pass"),
    "K of the first tile is not awaited": (
        "        mbarrier.wait(kv_full.index(stage), parity)\n        for w", "        for w"),
    "V is not awaited": ("                mbarrier.wait(kv_full.index(stage), parity)\n                v =", "                v ="),
    "K is not awaited": ("                    mbarrier.wait(kv_full.index(stage), parity)", "                    pass"),
    "S is not announced": ("    tcgen05_commit(s_full.index(place))", "    pass"),
    "the first S is not multiplied": (
        "multiply_s(smem, result, w, stage, w if TWO else begin & 1, PIECES, COLUMNS)", "pass"),
    "K is given back before it is read": (
        "tcgen05_commit(kv_empty.index(stage))", "mbarrier.arrive(kv_empty.index(stage), count=1)"),
    "V is never given back": ("tcgen05_commit(kv_empty.index(v_stage))", "pass"),
    "P is multiplied before it is whole": ("mbarrier.wait(p_full.index(w), i & 1)", "pass"),
    "P of the tile before": ("p_full.index(w), i & 1", "p_full.index(w), i & 1 ^ 1"),
    "O is multiplied before it is rescaled": ("mbarrier.wait(o_ready.index(w), i & 1)", "pass"),
    "O of the first tile is not replaced": ("use_acc=i > begin", "use_acc=True"),
    "O is never a sum": ("use_acc=i > begin", "use_acc=False"),
    "O is written before it is done": ("mbarrier.wait(o_full.index(w), turn)", "pass"),
    "O is done before its last product": (
        "tcgen05_commit(o_full.index(w))", "mbarrier.arrive(o_full.index(w), count=1)"),
    "S is read before it is there": ("mbarrier.wait(s_full.index(place), parity)", "pass"),
    "S of the other rows": ("s = s_tmem.index(place)", "s = s_tmem.index(1 - place)"),
    "P is announced before it is stored": (
        "rescale_smem.index(place).store(rescale)",
        "mbarrier.arrive(p_full.index(place), count=1); rescale_smem.index(place).store(rescale)"),
    "P in the other half of S": ("p_tmem.slice(0, BC)", "p_tmem.slice(BC, BC)"),
    "the maximum never moves": ("moved = new_max - row_max > RESCALE_LOG2", "moved = new_max > 3e38"),
    "O is not told that the maximum moved": ("store(of_warps)", "store(of_warps * 0)"),
    "O is rescaled by the factor of other rows": (
        "rescale_smem.index(place).load", "rescale_smem.index(1 - place).load"),
    "O is not rescaled": ("range(HEAD_DIM_V_PAD // O_PART):\n                        o_part", "range(0):\n                        o_part"),
    "the sum is not rescaled": ("row_sum * rescale", "row_sum"),
    "the sum is not awaited": ("mbarrier.wait(sum_full.index(w), turn)", "pass"),
    "the diagonal is not seen": ("<= ends", "< ends"),
    "the mask of the tile before": ("start = (end - 1 - i) * BC", "start = (end - i) * BC"),
    "a masked tile too few": ("masked_end = end - full_tiles", "masked_end = end - full_tiles - 1"),
    "one tile too few": ("gl.cdiv(key_end, BC), 1)", "key_end // BC, 1)"),
    "the maximum starts infinite": ("-3.4028234663852886e38", 'float("-inf")'),
    "exp2 by FMA is not clamped": ("0fC2FE0000", "0fFF800000"),
    "exp2 by FMA loses its exponent": ("shl.b32 d, d, 23", "shl.b32 d, d, 22"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", each(MUTANTS, 40))
def test_a_broken_text_is_found(mutant: str) -> None:
    spec, config = make_spec("bfloat16", 64, "causal"), blackwell(bc=64, stages=2, rescale_log2=0)
    cases = [case(200, 60), case(256, 330, heads=2)]
    assert_found(spec, config, MUTANTS[mutant], cases)
