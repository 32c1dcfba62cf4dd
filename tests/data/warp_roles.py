"""An attention-like loop whose warps have roles: one warp loads by TMA, two warpgroups multiply.

Written in Gluon for sm_90, to be compiled and never run: the weights are exp2 of the scores as they
are, without a maximum. Each warpgroup has 64 rows of Q in its registers' accumulators and walks all
tiles of K and V, which come through a ring of STAGES places, each with a barrier that says full and
one that says free. With UNEQUAL, the second warpgroup has twice the exp2 of the first.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(64)


@gluon.jit
def load_tiles(query, key, value, places, full, free, first_row, tiles, STAGES: gl.constexpr):
    """The loading warp: both Q tiles once, then K and V of each tile into the next place."""
    q_places, k_places, v_places = places
    mbarrier.expect(full.index(STAGES), 2 * query.block_type.nbytes)
    for half in gl.static_range(2):
        at = [first_row + half * ROWS, 0]
        tma.async_copy_global_to_shared(query, at, full.index(STAGES), q_places.index(half))
    for tile in range(tiles):
        place, turn = tile % STAGES, (tile // STAGES) & 1
        mbarrier.wait(free.index(place), turn ^ 1)
        ready = full.index(place)
        mbarrier.expect(ready, key.block_type.nbytes + value.block_type.nbytes)
        at = [tile * key.block_type.shape[0], 0]
        tma.async_copy_global_to_shared(key, at, ready, k_places.index(place))
        tma.async_copy_global_to_shared(value, at, ready, v_places.index(place))


@gluon.jit
def multiply(
    HALF: gl.constexpr, TWICE: gl.constexpr, out, places, full, free, first_row, tiles,
    KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup: rows first_row + 64 * HALF and the 63 after."""
    q_places, k_places, v_places = places
    scored: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16]
    )
    summed: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16]
    )
    weighted: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=summed, k_width=2)
    zero = gl.zeros([ROWS, KEYS], gl.float32, scored)
    result = gl.zeros([ROWS, DIM], gl.float32, summed)
    q = q_places.index(HALF)
    mbarrier.wait(full.index(STAGES), 0)
    for tile in range(tiles):
        place, turn = tile % STAGES, (tile // STAGES) & 1
        mbarrier.wait(full.index(place), turn)
        scores = warpgroup_mma(
            q, k_places.index(place).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        scores = warpgroup_mma_wait(0, deps=(scores,))
        weights = gl.exp2(scores)
        if TWICE:
            weights = gl.exp2(weights)
        weights = gl.convert_layout(weights.to(out.dtype), weighted)
        result = warpgroup_mma(weights, v_places.index(place), result, is_async=True)
        result = warpgroup_mma_wait(0, deps=(result,))
        mbarrier.arrive(free.index(place), count=1)
    q.store(result.to(out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [first_row + HALF * ROWS, 0], q)
    tma.store_wait(0)


@gluon.jit
def attend_by_roles(
    query, key, value, out, tiles,
    KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, UNEQUAL: gl.constexpr,
):  # fmt: skip
    """128 rows of Q against `tiles` tiles of KEYS rows of K and V; descriptors of fp16."""
    q_places = gl.allocate_shared_memory(query.dtype, [2, ROWS, DIM], query.layout)
    k_places = gl.allocate_shared_memory(key.dtype, [STAGES, KEYS, DIM], key.layout)
    v_places = gl.allocate_shared_memory(value.dtype, [STAGES, KEYS, DIM], value.layout)
    # The last of the full ones tells of Q.
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES + 1):
        mbarrier.init(full.index(place), count=1)
    for place in gl.static_range(STAGES):
        mbarrier.init(free.index(place), count=2)
    fence_async_shared()
    first_row = gl.program_id(0) * 2 * ROWS
    places = (q_places, k_places, v_places)
    gl.warp_specialize(
        [
            (multiply, (0, False, out, places, full, free, first_row, tiles, KEYS, DIM, STAGES)),
            (multiply, (1, UNEQUAL, out, places, full, free, first_row, tiles, KEYS, DIM, STAGES)),
            (load_tiles, (query, key, value, places, full, free, first_row, tiles, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )
