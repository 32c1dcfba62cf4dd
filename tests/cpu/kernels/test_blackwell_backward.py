"""Schedule blackwell's backward as Triton compiles it for sm_100: its protocol, its gradients."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from flashgen.evaluate.check import check_loaded
from flashgen.kernels.launch import bind
from flashgen.kernels.launch_backward import Backward
from flashgen.runtime.eager import attention as eager
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.vocabulary import Direction
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

DIRECTIONS: tuple[Direction, ...] = ("backward_dkv", "backward_dq", "backward_fused")


def blackwell(stages: int = 2, by_fma: int = 0, order: str = "plain") -> KernelConfig:
    way = {"schedule": "blackwell", "loads": "descriptor", "order": order, "exp2_by_fma": by_fma}
    return make_config(128, 128, num_warps=8, num_stages=stages, **way)


def wide(stages: int = 2, order: str = "plain") -> KernelConfig:
    """Of dQ where a head dim is padded to 256: 64 keys a tile, V in one place."""
    return replace(blackwell(stages, order=order), bc=64)


def wide_keys(stages: int = 2, by_fma: int = 0) -> KernelConfig:
    """Of dK and dV where a head dim is padded to 256: 64 rows a tile."""
    return replace(blackwell(stages, by_fma), br=64)


def spec_of(
    direction: Direction, mask: str, dims: tuple[int, int] = (64, 64), dtype: str = "bfloat16"
) -> AttentionSpec:
    return make_spec(dtype, dims[0], mask, head_dim_v=dims[1], direction=direction)


VARIANTS = [
    ("backward_dkv", "bfloat16", (64, 64), "causal", blackwell(4)),
    ("backward_dq", "bfloat16", (64, 64), "causal", blackwell(3, order="longest_first")),
    ("backward_dkv", "bfloat16", (128, 128), "none", blackwell()),
    ("backward_dq", "bfloat16", (128, 128), "none", blackwell()),
    ("backward_dkv", "float16", (96, 96), "causal", blackwell(by_fma=8)),
    ("backward_dq", "float16", (96, 96), "causal", blackwell(by_fma=8)),
    ("backward_dkv", "float16", (64, 64), "none", blackwell(3)),
    ("backward_dq", "float16", (64, 64), "none", blackwell(4)),
    ("backward_dkv", "bfloat16", (40, 72), "none", blackwell(3)),
    ("backward_dq", "bfloat16", (40, 72), "none", blackwell(3)),
    ("backward_dkv", "bfloat16", (128, 128), "causal", blackwell()),
    ("backward_dq", "bfloat16", (128, 128), "causal", blackwell(order="longest_first")),
    ("backward_dq", "bfloat16", (256, 256), "causal", wide(order="longest_first")),
    ("backward_dq", "float16", (192, 128), "none", wide(3)),
    ("backward_dkv", "bfloat16", (256, 256), "causal", wide_keys()),
    ("backward_dkv", "float16", (192, 200), "none", wide_keys(by_fma=8)),
    ("backward_dkv", "float16", (192, 128), "causal", wide_keys()),
    ("backward_dkv", "bfloat16", (192, 128), "none", wide_keys(by_fma=4)),
    ("backward_fused", "bfloat16", (64, 64), "causal", blackwell(4)),
    ("backward_fused", "bfloat16", (128, 128), "none", blackwell()),
    ("backward_fused", "float16", (96, 96), "causal", blackwell(by_fma=8)),
    ("backward_fused", "float16", (64, 64), "none", blackwell(3)),
    ("backward_fused", "bfloat16", (40, 72), "none", blackwell()),
    ("backward_fused", "bfloat16", (128, 128), "causal", blackwell()),
]


@pytest.mark.parametrize(("direction", "dtype", "dims", "mask", "config"), each(VARIANTS))
def test_every_variant_is_right(
    direction: Direction, dtype: str, dims: tuple[int, int], mask: str, config: KernelConfig
) -> None:
    spec = spec_of(direction, mask, dims, dtype)
    assert why_illegal(spec, config, TARGETS["nvidia_b200"]) is None
    assert_right(spec, config)


@pytest.mark.parametrize(("direction", "dtype", "dims", "mask", "config"), each(VARIANTS))
def test_no_order_of_warps_and_copies_changes_the_result(
    direction: Direction, dtype: str, dims: tuple[int, int], mask: str, config: KernelConfig
) -> None:
    """Twenty orders, each with every check; two heads share keys, and tiles are ragged. A
    fused kernel adds in one order here: the executor runs block after block.
    """
    spec = spec_of(direction, mask, dims, dtype)
    kernel, found = compiled(spec, config), set()
    length = 200 if direction == "backward_fused" else 290
    call = call_of(spec, sq=length, sk=length)
    for _ in range(20):
        gradients = bind(kernel, spec, config)(call)
        found.add(b"".join(x.view(torch.int16).numpy().tobytes() for x in gradients))
    assert len(found) == 1


def call_of(spec: AttentionSpec, sq: int, sk: int) -> Backward:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, spec.dtype)
    q, k, v, do = (
        torch.randn(1, heads, length, dim, generator=generator).to(dtype)
        for heads, length, dim in (
            (2, sq, spec.head_dim), (1, sk, spec.head_dim), (1, sk, spec.head_dim_v),
            (2, sq, spec.head_dim_v),
        )
    )  # fmt: skip
    diagonal = sk - sq if spec.causal else None
    o, lse = eager.attention(q.double(), k.double(), v.double(), scale=0.1, diagonal=diagonal)
    delta = (o * do).sum(-1).float()
    return Backward(
        q=q, k=k, v=v, do=do, lse=lse.float(), delta=delta, scale=0.1, diagonal=diagonal
    )


@pytest.mark.parametrize(
    ("direction", "mask", "alignment"),
    each(
        itertools.chain.from_iterable(
            [(direction, "causal", "top_left"), (direction, "none", "bottom_right")]
            for direction in DIRECTIONS
        )
    ),
)
def test_one_to_four_tiles(direction: Direction, mask: str, alignment: str) -> None:
    """Every number of uses of a place of the rings, with shared heads."""
    spec, config = spec_of(direction, mask), blackwell()
    kernel = compiled(spec, config)
    for seed, lengths in enumerate([(1, 1), (128, 129), (129, 65), (385, 130), (300, 300)]):
        sq, sk = lengths[::-1] if direction == "backward_dq" else lengths
        cases = [case(sq, sk, alignment, heads=2, kv=1)]
        result = check_loaded(kernel, spec, config, seed=seed, cases=cases)
        assert result.passed, result


@pytest.mark.parametrize("direction", each(("backward_dkv", "backward_fused")))
def test_rows_are_loaded_once_for_each_head_from_the_first_that_sees_a_key(
    direction: Direction,
    loads: dict[int, list[Load]],  # noqa: F811
) -> None:
    """Two heads share keys, and the last rows of one are followed by the first of the next."""
    assert_right(spec_of(direction, "causal"), blackwell(), [case(256, 256, heads=2, kv=1)])
    assert walks_of(loads) == [(0, [0, 128] * 2), (128, [128] * 2)]


@pytest.mark.parametrize("order", each(["longest_first", "plain"], 2))
def test_keys_are_loaded_once_up_to_the_last_that_a_row_sees(
    order: str,
    loads: dict[int, list[Load]],  # noqa: F811
) -> None:
    assert_right(spec_of("backward_dq", "causal"), blackwell(order=order), [case(200, 200)])
    expected = [(0, [0]), (128, [0, 128])]
    assert walks_of(loads) == (expected[::-1] if order == "longest_first" else expected)


def walks_of(loads: dict[int, list[Load]]) -> list[tuple[int, list[int]]]:  # noqa: F811
    """Of each block, where its own two tiles lie, and those of the two tensors that it walks."""
    found = []
    for _, copied in sorted(loads.items()):
        (first, second), walked = [at[2] for _, _, at in copied[:2]], copied[2:]
        assert first == second
        bases = list(dict.fromkeys(base for base, *_ in walked))[:2]  # then what is stored
        of_one, of_other = ([at[2] for base, _, at in walked if base == x] for x in bases)
        assert of_one == of_other
        found.append((first, of_one))
    return found


@pytest.mark.parametrize(
    ("direction", "mask"), each(itertools.product(DIRECTIONS, ["none", "causal"]))
)
def test_scores_far_below_zero(direction: Direction, mask: str) -> None:
    """Keys and rows past the end have score 0, far above those that a row sees."""
    spec, config = spec_of(direction, mask), blackwell()
    for gradient in far_below_zero(compiled(spec, config), spec, config):
        assert bool(gradient.isfinite().all())


@pytest.mark.slow("two kernels")
@pytest.mark.parametrize(
    ("direction", "broken"),
    [
        ("backward_dq", ("full_tiles = seq_k // BC", "full_tiles = key_tiles")),
        ("backward_fused", ("key_start + BC > seq_k", "key_start > seq_k")),
    ],
)
def test_a_ragged_end_that_is_not_masked_is_found(
    direction: Direction, broken: tuple[str, str]
) -> None:
    spec, config = spec_of(direction, "none"), blackwell()
    kernel = compiled(spec, config, 0, *broken)
    found = far_below_zero(kernel, spec, config)
    assert not all(bool(gradient.isfinite().all()) for gradient in found)


# Triton puts a fence where a text lacks it, so texts without one are no mutants. Nor is one in which
# LSE is not awaited: S was multiplied of the Q that came with it.
WAIT_Q = "mbarrier.wait(q_full.index(stage), parity)"
WAIT_DO = "mbarrier.wait(do_full.index(stage), parity)"
WAIT_S = "mbarrier.wait(s_full.index(place), (i >> 1) & 1 if TWO_S else i & 1)"
OF_KEYS = {
    "nothing waits for its place": ("mbarrier.wait(empty.index(stage), parity ^ 1)", "pass"),
    "statistics before their place is free": (
        "            mbarrier.wait(empty.index(stage), parity ^ 1)\n            lse_smem.index(stage).store(lse)\n",
        "            lse_smem.index(stage).store(lse)\n            mbarrier.wait(empty.index(stage), parity ^ 1)\n"),
    "loads wait for the wrong phase": ("parity ^ 1", "parity"),
    "V is not counted": ("k_desc.block_type.nbytes + v_desc.block_type.nbytes", "k_desc.block_type.nbytes"),
    "K and V are not awaited": ("    mbarrier.wait(kv_full.index(0), 0)\n", ""),
    "Q is not awaited": ("                " + WAIT_Q + "\n                q =", "                q ="),
    "dO is not awaited": (WAIT_DO, "pass"),
    "the first dO is not awaited": ("mbarrier.wait(do_full.index(0 if ONE_SUM else stage), 0 if ONE_SUM else parity)", "pass"),
    "S is not announced": ("tcgen05_commit(s_full.index((i + 1) & 1))", "pass"),
    "S in the place of P": ("s_tmem.index((i + 1) & 1)", "s_tmem.index(i & 1)"),
    "dP is not announced": ("            tcgen05_commit(dp_full.index(0))", "            pass"),
    "Q and dO are given back before they are read": (
        "tcgen05_commit(empty.index(this))", "mbarrier.arrive(empty.index(this), count=1)"),
    "Q and dO are never given back": ("tcgen05_commit(empty.index(this))", "pass"),
    "P is multiplied before it is whole": ("mbarrier.wait(p_full.index(0), i & 1)", "pass"),
    "one warpgroup's P is enough": ("p_full = new_barriers(1, 2)", "p_full = new_barriers(1, 1)"),
    "dS is multiplied before it is whole": ("mbarrier.wait(ds_full.index(0), i & 1)", "pass"),
    "dS of the tile before": ("mbarrier.wait(ds_full.index(0), i & 1)", "mbarrier.wait(ds_full.index(0), i & 1 ^ 1)"),
    "S is read before it is there": (WAIT_S, "pass"),
    "dP is read before it is there": ("mbarrier.wait(dp_full.index(0), parity)", "pass"),
    "P of both halves in one": ("operand.slice(BR * w, HALF)", "operand.slice(0, HALF)"),
    "P of one half in the other's S": ("p_tmem.slice(BR * w", "p_tmem.slice(HALF * w"),
    "rows of the other half": ("second.slice(HALF * w, HALF, 0)", "second.slice(HALF * (1 - w), HALF, 0)"),
    "dK begins anew": ("accumulate(dk_tmem, dp_tmem, q, i)", "accumulate(dk_tmem, dp_tmem, q, 0)"),
    "dV does not begin": ("accumulate(dv_tmem, s_tmem.index(place), do, i)", "accumulate(dv_tmem, s_tmem.index(place), do, 1)"),
    "gradients are stored before they are done": ("    mbarrier.wait(done.index(0), 0)\n", ""),
    "LSE of the other half": ("lse_smem.index(stage).slice(HALF * w", "lse_smem.index(stage).slice(HALF * (1 - w)"),
    "delta of another place": ("delta_smem.index(stage),", "delta_smem.index(0),"),
    "delta with its sign": ("store(-delta)", "store(delta)"),
    "the diagonal is not seen": ("seen = rows >= ", "seen = rows > "),
    "the mask of the other half": ("keys - last - HALF * w", "keys - last"),
    "a masked tile too few": ("gl.maximum(key_start + BC - 1 - last, 0)", "gl.maximum(key_start - last, 0)"),
    "rows that see keys are passed over": ("gl.maximum(key_start - last, 0) // BR * BR", "gl.maximum(key_start + BR - last, 0) // BR * BR"),
    "no tile of rows": ("// BR * BR, last_tile)", "// BR * BR, seq_q)"),
    "dK without its scale": ("found *= factor", "pass"),
    "rows that see nothing count": ('lse == float("-inf"), lse, lse', 'lse == float("-inf"), -lse, lse'),
}  # fmt: skip
OF_ROWS = {
    "nothing waits for its place": ("mbarrier.wait(empty.index(stage), parity ^ 1)", "pass"),
    "K and V are given back before they are read": ("tcgen05_commit(empty.index(this))", "mbarrier.arrive(empty.index(this), count=1)"),
    "Q is not awaited": ("    mbarrier.wait(q_full.index(0), 0)\n", ""),
    "dO is not awaited": ("    mbarrier.wait(do_full.index(0), 0)\n", ""),
    "K is not awaited": ("            mbarrier.wait(k_full.index(stage), parity)", "            pass"),
    "V is not awaited": ("mbarrier.wait(v_full.index(0 if ONE_V else stage), (i + 1) & 1 if ONE_V else parity)", "pass"),
    "S in the place of dS": ("s_tmem.index((i + 1) & 1)", "s_tmem.index(i & 1)"),
    "S is announced to the wrong tile": ("s_full.index((i + 1) & 1)", "s_full.index(i & 1)"),
    "dS is multiplied before it is whole": ("mbarrier.wait(ds_full.index(0), i & 1)", "pass"),
    "one warpgroup's dS is enough": ("ds_full = new_barriers(1, 2)", "ds_full = new_barriers(1, 1)"),
    "dP is read before it is there": ("mbarrier.wait(dp_full.index(0), i & 1)", "pass"),
    "S is read before it is there": ("mbarrier.wait(s_full.index(i & 1), (i >> 1) & 1)", "pass"),
    "keys of the other half": ("k.slice(HALF * w, HALF, 0)", "k.slice(HALF * (1 - w), HALF, 0)"),
    "dQ begins anew": ("use_acc=(i > 0) | (w > 0)", "use_acc=w > 0"),
    "dQ is stored before it is done": ("    mbarrier.wait(done.index(0), 0)\n", ""),
    "half of dQ is not awaited": ("mbarrier.wait(half_stored.index(0), 0)", "pass"),
    "dQ of the other half": ("dq_tmem.slice(DIMS // 2 * w,", "dq_tmem.slice(DIMS // 2 * (1 - w),"),
    "the diagonal is not seen": ("<= ends", "< ends"),
    "the mask of the other half": ("seq_k - 1) - HALF * w", "seq_k - 1)"),
    "a masked tile too few": ("row_start + last + 1, 0), seq_k) // BC", "row_start + last + BC, 0), seq_k) // BC"),
    "one tile too few": ("gl.cdiv(key_end, BC), 1)", "key_end // BC, 1)"),
    "dQ without its scale": ("load(DQ_REGS) * scale", "load(DQ_REGS)"),
    "rows that see nothing count": ('lse == float("-inf"), lse, lse', 'lse == float("-inf"), -lse, lse'),
}  # fmt: skip
OF_FUSED = {
    "dQ is not announced": ("tcgen05_commit(dq_full.index(0))", "pass"),
    "dQ is announced to the load": ("tcgen05_commit(dq_full.index(0))", "tcgen05_commit(empty.index(this))"),
    "dQ is read before it is there": ("mbarrier.wait(dq_full.index(0), i & 1)", "pass"),
    "dQ of the tile before": ("mbarrier.wait(dq_full.index(0), i & 1)", "mbarrier.wait(dq_full.index(0), i & 1 ^ 1)"),
    "dQ is given back before it is read": (
        "            dq = dq_tmem.load(REGS)\n            mbarrier.arrive(dq_read.index(0), count=1)\n",
        "            mbarrier.arrive(dq_read.index(0), count=1)\n            dq = dq_tmem.load(REGS)\n"),
    "dQ is never given back": ("mbarrier.arrive(dq_read.index(0), count=1)", "pass"),
    "dP in the place of a dQ that nobody has read": ("mbarrier.wait(dq_read.index(0), i & 1)", "pass"),
    "dS is multiplied before it is whole": ("mbarrier.wait(ds_full.index(0), i & 1)", "pass"),
    "one warpgroup's dS is enough": ("ds_full = new_barriers(1, 2)", "ds_full = new_barriers(1, 1)"),
    "dS in the place of the other half": ("ds_smem.slice(HALF * w", "ds_smem.slice(HALF * (1 - w)"),
    "both parts of dS in one place": ("ds_smem.slice(HALF * w + PART * part", "ds_smem.slice(HALF * w"),
    "dS before dP is there": ("mbarrier.wait(dp_full.index(0), parity)", "pass"),
    "dS with its sides changed": ("ds_smem.permute((1, 0))", "ds_smem"),
    "dQ adds up over tiles": ("dq_tmem, use_acc=False", "dq_tmem, use_acc=True"),
    "dK begins anew": ("dk_tmem, use_acc=i > 0", "dk_tmem, use_acc=False"),
    "both parts of P in one place": ("p_tmem.slice(BR * w + PART * part", "p_tmem.slice(BR * w"),
    "LSE of the first part for both": ("lse_smem.index(stage).slice(HALF * w + PART * part", "lse_smem.index(stage).slice(HALF * w"),
    "delta of the first part for all": ("delta_smem.slice(column", "delta_smem.slice(0"),
    "the mask of the first part for both": ("rows_in_half + PART * part", "rows_in_half"),
    "the first rows get dQ of those that see a key": ("at += first_row * HEAD_DIM_PAD", "pass"),
    "every tile's dQ in one": ("at += TILE", "at += 0"),
    "dQ of another head": ("batch * heads + kv_head * group", "batch * heads + kv_head * group + 1"),
    "rows of dQ too near": ("row * 4", "row * 2"),
    "columns of dQ too near": ("four * 512", "four * 256"),
    "dQ of the last keys alone": (
        'gl.atomic_add(gl.expand_dims(gl.expand_dims(at, 1), 2) + in_row, dq, sem="relaxed")',
        "gl.store(gl.expand_dims(gl.expand_dims(at, 1), 2) + in_row, dq)"),
    "Q and dO are given back before they are read": (
        "tcgen05_commit(empty.index(this))", "mbarrier.arrive(empty.index(this), count=1)"),
    "the diagonal is not seen": ("seen = rows >= ", "seen = rows > "),
    "gradients are stored before they are done": ("    mbarrier.wait(done.index(0), 0)\n", ""),
}  # fmt: skip
BROKEN = {"backward_dkv": OF_KEYS, "backward_dq": OF_ROWS, "backward_fused": OF_FUSED}
MUTANTS = [(direction, name) for direction, found in BROKEN.items() for name in found]
# Giving dO back before dP has read it is no mutant: dO of the next tile but one waits for a place of
# Q, which the sum after that dP gives back.
OF_ONE_SUM = {
    "V is not counted": ("k_desc.block_type.nbytes + v_desc.block_type.nbytes", "k_desc.block_type.nbytes"),
    "K is not counted": ("expect(kv_full.index(0), k_desc.block_type.nbytes)", "expect(kv_full.index(0), 0)"),
    "V is not loaded": ("            tma_load(v_desc, key, kv_full.index(0), v_smem)\n", ""),
    "dO before its place is free": ("mbarrier.wait(do_empty.index(0), i & 1 ^ 1)", "pass"),
    "dO is never given back by dP": (
        "tcgen05_commit(dp_full.index(0))\n                    tcgen05_commit(do_empty.index(0))",
        "tcgen05_commit(dp_full.index(0))"),
    "dO is given back before dV has read it": (
        "                tcgen05_commit(do_empty.index(0))\n            tcgen05_commit(empty",
        "                mbarrier.arrive(do_empty.index(0), count=1)\n            tcgen05_commit(empty"),
    "dO is never given back by dV": (
        "                tcgen05_commit(do_empty.index(0))\n            tcgen05_commit(empty", "            tcgen05_commit(empty"),
    "dO of dP is not awaited": ("mbarrier.wait(do_full.index(0), (i + 1) & 1)", "pass"),
    "dO of dV is not awaited": ("mbarrier.wait(do_full.index(0), i & 1)", "pass"),
    "X is multiplied before it is whole": ("mbarrier.wait(ds_full.index(place), (i >> 1) & 1)", "pass"),
    "one warpgroup's X is enough": ("ds_full = new_barriers(S_PLACES, 2)", "ds_full = new_barriers(S_PLACES, 1)"),
    "X is announced in one place": ("ds_full.index(place)", "ds_full.index(0)"),
    "S in the place of X": ("s_tmem.index((i + 1) & 1)", "s_tmem.index(i & 1)"),
    "dP is read before it is there": ("mbarrier.wait(dp_full.index(0), parity)", "pass"),
    "X of one half in the other's S": ("p_tmem.slice(BR * w", "p_tmem.slice(HALF * w"),
    "dV is made of Q": ("accumulate(dk_tmem, s_tmem.index(place), do, i)", "accumulate(dk_tmem, s_tmem.index(place), q, i)"),
    "both blocks sum dK": ("of_dk = pid % 2 == 0", "of_dk = pid % 2 >= 0"),
    "both blocks sum dV": ("of_dk = pid % 2 == 0", "of_dk = pid % 2 == 2"),
    "tiles of keys are passed over": ("pid = pid // 2", "pass"),
    "dV with the scale of dK": ("        if of_dk:  # the compiler", "        if True:  # the compiler"),
    "half of the gradient is not awaited": ("mbarrier.wait(half_stored.index(0), 0)", "pass"),
    "the gradient is stored before it is done": ("    mbarrier.wait(done.index(0), 0)\n", ""),
    "the sum begins anew": ("sum_tmem, use_acc=(i > 0) | (w > 0)", "sum_tmem, use_acc=w > 0"),
    "the other half of the gradient": ("dk_tmem.slice(HEAD_DIM_PAD // 2 * w,", "dk_tmem.slice(HEAD_DIM_PAD // 2 * (1 - w),"),
}  # fmt: skip
OF_ONE_V = {
    "V is not awaited": ("mbarrier.wait(v_full.index(0 if ONE_V else stage), (i + 1) & 1 if ONE_V else parity)", "pass"),
    "V before its place is free": ("mbarrier.wait(v_empty.index(0), i & 1 ^ 1)", "pass"),
    "V is given back before it is read": ("tcgen05_commit(v_empty.index(0))", "mbarrier.arrive(v_empty.index(0), count=1)"),
    "V is never given back": ("tcgen05_commit(v_empty.index(0))", "pass"),
}  # fmt: skip


@pytest.mark.parametrize(("direction", "mutant"), each(MUTANTS))
def test_a_broken_text_is_found(direction: Direction, mutant: str) -> None:
    spec, config = spec_of(direction, "causal"), blackwell()
    cases = [case(390, 200, heads=2), case(70, 200, "top_left")]
    if direction == "backward_dq":
        cases = [case(200, 390), case(200, 60)]
    assert_found(spec, config, BROKEN[direction][mutant], cases)


@pytest.mark.parametrize("mutant", each(OF_ONE_V))
def test_a_broken_text_with_one_place_of_v_is_found(mutant: str) -> None:
    spec = spec_of("backward_dq", "none", (192, 128))
    assert_found(spec, wide(), OF_ONE_V[mutant], [case(100, 290)])


@pytest.mark.parametrize("mutant", each(OF_ONE_SUM))
def test_a_broken_text_that_sums_dk_or_dv_is_found(mutant: str) -> None:
    spec, cases = spec_of("backward_dkv", "causal", (256, 256)), [case(330, 150, heads=2, kv=1)]
    assert_found(spec, wide_keys(), OF_ONE_SUM[mutant], cases)
