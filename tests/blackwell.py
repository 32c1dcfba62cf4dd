"""An attention forward for sm_100 in Gluon, written for these tests: a schedule by hand, whose
compiled program uses most of tcgen05. It never ran on a GPU.

A block has 256 rows of Q, two tiles of 128. The default partition rescales O in tensor memory, two
softmax partitions turn S into P, one warp issues the products, one loads. Tensor memory has S and O
of both tiles; P lies in the first half of its S.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    get_tmem_reg_layout,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashgen import ptx

BC, STAGES, CHUNK = 128, 3, 32


@gluon.jit
def exp2_by_polynomial(x):
    # The whole part by adding 1.5 * 2^23 rounded down, 2^rest by a cubic (relative error 9e-5).
    return gl.inline_asm_elementwise(
        "{ .reg .f32 u, v; .reg .b64 c, w, f, p, m, n, k; .reg .b32 d, e, q, r; "
        "max.f32 u, $2, 0fC2FE0000; max.f32 v, $3, 0fC2FE0000; mov.b64 c, {u, v}; "
        "mov.b64 m, 0x4B4000004B400000; mov.b64 n, 0xCB400000CB400000; "
        "add.rm.ftz.f32x2 w, c, m; add.rn.ftz.f32x2 f, w, n; mov.b64 k, 0xBF800000BF800000; "
        "fma.rn.ftz.f32x2 f, f, k, c; "
        "mov.b64 m, 0x3D9DD5623D9DD562; mov.b64 n, 0x3E691BBD3E691BBD; "
        "fma.rn.ftz.f32x2 p, f, m, n; mov.b64 n, 0x3F31F32D3F31F32D; fma.rn.ftz.f32x2 p, p, f, n; "
        "mov.b64 n, 0x3F8000003F800000; fma.rn.ftz.f32x2 p, p, f, n; "
        "mov.b64 {d, e}, w; mov.b64 {q, r}, p; shl.b32 d, d, 23; shl.b32 e, e, 23; "
        "add.s32 q, q, d; add.s32 r, r, e; mov.b32 $0, q; mov.b32 $1, r; }",
        "=f,=f,f,f", [x], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def load_warp(q_desc, k_desc, v_desc, smem, bars, where, tiles):
    q_smem, kv_smem = smem
    q_full, kv_full, kv_empty = bars
    q_row, kv_row = where
    stages: gl.constexpr = kv_smem.shape[0]
    turn = 0
    for t in range(tiles):
        for which in gl.static_range(2):
            stage, phase = turn % stages, (turn // stages) & 1
            mbarrier.wait(kv_empty.index(stage), phase ^ 1)
            mbarrier.expect(kv_full.index(stage), k_desc.block_type.nbytes)
            at = [kv_row + t * k_desc.block_shape[0], 0]
            if which == 0:
                tma.async_copy_global_to_shared(
                    k_desc, at, kv_full.index(stage), kv_smem.index(stage)
                )
                if t == 0:
                    for w in gl.static_range(2):
                        mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
                        tma.async_copy_global_to_shared(
                            q_desc, [q_row + 128 * w, 0], q_full.index(w), q_smem.index(w)
                        )
            else:
                tma.async_copy_global_to_shared(
                    v_desc, at, kv_full.index(stage), kv_smem.index(stage)
                )
            turn += 1


@gluon.jit
def product_warp(smem, tmem, bars, tiles):
    q_smem, kv_smem = smem
    s_tmem, o_tmem = tmem
    q_full, kv_full, kv_empty, s_full, p_full, o_ready, o_full = bars
    stages: gl.constexpr = kv_smem.shape[0]
    keys: gl.constexpr = kv_smem.shape[1]
    p_layout: gl.constexpr = TensorMemoryLayout((128, keys), col_stride=1)
    mbarrier.wait(kv_full.index(0), 0)
    for w in gl.static_range(2):
        mbarrier.wait(q_full.index(w), 0)
        tcgen05_mma(
            q_smem.index(w), kv_smem.index(0).permute((1, 0)), s_tmem.index(w), use_acc=False
        )
        tcgen05_commit(s_full.index(w))
    tcgen05_commit(kv_empty.index(0))
    for t in range(tiles):
        more = t + 1 < tiles
        v_turn, k_turn = 2 * t + 1, 2 * t + 2
        v_stage, k_stage = v_turn % stages, k_turn % stages
        mbarrier.wait(kv_full.index(v_stage), (v_turn // stages) & 1)
        mbarrier.wait(kv_full.index(k_stage), (k_turn // stages) & 1, pred=more)
        for w in gl.static_range(2):
            mbarrier.wait(o_ready.index(w), t & 1)
            mbarrier.wait(p_full.index(w), t & 1)
            whole = s_tmem.index(w)._reinterpret(q_smem.dtype, [128, 2 * keys], p_layout)
            tcgen05_mma(
                whole.slice(0, keys), kv_smem.index(v_stage), o_tmem.index(w), use_acc=t > 0
            )
            tcgen05_mma(
                q_smem.index(w), kv_smem.index(k_stage).permute((1, 0)), s_tmem.index(w),
                use_acc=False, pred=more,
            )  # fmt: skip
            tcgen05_commit(s_full.index(w), pred=more)
        tcgen05_commit(kv_empty.index(v_stage))
        tcgen05_commit(kv_empty.index(k_stage), pred=more)
    for w in gl.static_range(2):
        tcgen05_commit(o_full.index(w))


@gluon.jit
def softmax_warps(
    W: gl.constexpr, CHUNK: gl.constexpr, tmem, stats, bars, scale_log2e, lse_ptr, tiles
):
    s_tmem, _ = tmem
    alpha_smem, sum_smem = stats
    s_full, p_full, a_full, a_empty = bars
    keys: gl.constexpr = s_tmem.shape[2]
    chunk_layout: gl.constexpr = TensorMemoryLayout((128, CHUNK), col_stride=1)
    regs: gl.constexpr = get_tmem_reg_layout(gl.float32, (128, CHUNK), chunk_layout, 4)
    p_regs: gl.constexpr = get_tmem_reg_layout(gl.bfloat16, (128, CHUNK), chunk_layout, 4)
    rows: gl.constexpr = gl.SliceLayout(1, regs)
    p_layout: gl.constexpr = TensorMemoryLayout((128, keys), col_stride=1)
    s_place = s_tmem.index(W)
    p_place = s_place._reinterpret(gl.bfloat16, [128, 2 * keys], p_layout).slice(0, keys)
    row_max = gl.full([128], float("-inf"), gl.float32, rows)
    row_sum = gl.zeros([128], gl.float32, rows)
    for t in range(tiles):
        mbarrier.wait(s_full.index(W), t & 1)
        s = ()
        new_max = row_max
        for c in gl.static_range(keys // CHUNK):
            part = s_place.slice(c * CHUNK, CHUNK).load(regs) * scale_log2e
            s += (part,)
            new_max = gl.maximum(new_max, gl.max(part, 1))
        alpha = gl.exp2(row_max - new_max)
        mbarrier.wait(a_empty.index(W), (t & 1) ^ 1)
        alpha_smem.index(W).store(alpha)
        mbarrier.arrive(a_full.index(W), count=1)
        row_sum, row_max = row_sum * alpha, new_max
        for c in gl.static_range(keys // CHUNK):
            x = s[c] - gl.expand_dims(new_max, 1)
            if c == 0:
                p = exp2_by_polynomial(x)
            else:
                p = gl.exp2(x)
            p_place.slice(c * CHUNK, CHUNK).store(gl.convert_layout(p.to(gl.bfloat16), p_regs))
            row_sum += gl.sum(p, 1)
        mbarrier.arrive(p_full.index(W), count=1)
    mbarrier.wait(a_empty.index(W), (tiles & 1) ^ 1)
    sum_smem.index(W).store(row_sum)
    mbarrier.arrive(a_full.index(W), count=1)
    gl.store(
        lse_ptr + 128 * W + gl.arange(0, 128, rows),
        (row_max + gl.log2(row_sum)) * 0.6931471805599453,
    )


@gluon.jit
def correction_warps(CHUNK: gl.constexpr, o_desc, tmem, stats, bars, q_smem, q_row, tiles):
    _, o_tmem = tmem
    alpha_smem, sum_smem = stats
    a_full, a_empty, o_ready, o_full = bars
    width: gl.constexpr = o_tmem.shape[2]
    chunk_layout: gl.constexpr = TensorMemoryLayout((128, CHUNK), col_stride=1)
    regs: gl.constexpr = get_tmem_reg_layout(gl.float32, (128, CHUNK), chunk_layout, 4)
    rows: gl.constexpr = gl.SliceLayout(1, regs)
    for w in gl.static_range(2):
        mbarrier.wait(a_full.index(w), 0)
        mbarrier.arrive(a_empty.index(w), count=1)
        mbarrier.arrive(o_ready.index(w), count=1)
    for t in range(1, tiles):
        for w in gl.static_range(2):
            mbarrier.wait(a_full.index(w), t & 1)
            alpha = alpha_smem.index(w).load(rows)
            mbarrier.arrive(a_empty.index(w), count=1)
            for c in gl.static_range(width // CHUNK):
                place = o_tmem.index(w).slice(c * CHUNK, CHUNK)
                place.store(place.load(regs) * gl.expand_dims(alpha, 1))
            mbarrier.arrive(o_ready.index(w), count=1)
    for w in gl.static_range(2):
        mbarrier.wait(a_full.index(w), tiles & 1)
        inverse = 1.0 / sum_smem.index(w).load(rows)
        mbarrier.wait(o_full.index(w), 0)
        for c in gl.static_range(width // CHUNK):
            part = o_tmem.index(w).slice(c * CHUNK, CHUNK).load(regs) * gl.expand_dims(inverse, 1)
            q_smem.index(w).slice(c * CHUNK, CHUNK, dim=1).store(part.to(gl.bfloat16))
        fence_async_shared()
        gl.barrier()
        tma.async_copy_shared_to_global(o_desc, [q_row + 128 * w, 0], q_smem.index(w))
    tma.store_wait(0)


@gluon.jit
def barriers(count: gl.constexpr):
    found = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(found.index(i), count=1)
    return found


@gluon.jit
def forward(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, scale_log2e, seq_q, seq_k,
    D: gl.constexpr, STAGES: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    keys: gl.constexpr = k_desc.block_shape[0]
    q_row = gl.program_id(1) * seq_q + gl.program_id(0) * 256
    kv_row = gl.program_id(1) * seq_k
    tiles = gl.cdiv(seq_k, keys)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 128, D], q_desc.layout)
    kv_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, keys, D], k_desc.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    stats = (
        gl.allocate_shared_memory(gl.float32, [2, 128], flat),
        gl.allocate_shared_memory(gl.float32, [2, 128], flat),
    )
    s_layout: gl.constexpr = TensorMemoryLayout((128, keys), col_stride=1)
    o_layout: gl.constexpr = TensorMemoryLayout((128, D), col_stride=1)
    tmem = (
        allocate_tensor_memory(gl.float32, [2, 128, keys], s_layout),
        allocate_tensor_memory(gl.float32, [2, 128, D], o_layout),
    )
    kv_full, kv_empty = barriers(STAGES), barriers(STAGES)
    q_full, s_full, p_full, a_full = barriers(2), barriers(2), barriers(2), barriers(2)
    a_empty, o_ready, o_full = barriers(2), barriers(2), barriers(2)
    fence_async_shared()
    smem, of_softmax = (q_smem, kv_smem), (s_full, p_full, a_full, a_empty)
    lse_ptr += q_row
    gl.warp_specialize(
        [
            (
                correction_warps,
                (
                    CHUNK,
                    o_desc,
                    tmem,
                    stats,
                    (a_full, a_empty, o_ready, o_full),
                    q_smem,
                    q_row,
                    tiles,
                ),
            ),
            (softmax_warps, (0, CHUNK, tmem, stats, of_softmax, scale_log2e, lse_ptr, tiles)),
            (softmax_warps, (1, CHUNK, tmem, stats, of_softmax, scale_log2e, lse_ptr, tiles)),
            (
                product_warp,
                (smem, tmem, (q_full, kv_full, kv_empty, s_full, p_full, o_ready, o_full), tiles),
            ),
            (
                load_warp,
                (q_desc, k_desc, v_desc, smem, (q_full, kv_full, kv_empty), (q_row, kv_row), tiles),
            ),
        ],
        [4, 4, 1, 1],
        [192, 192, 24, 24],
    )


def attention(*, keys: int = 256, width: int = 64, target: str = "sm_100", seed: int = 0) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the kernel makes of one block of 256 rows of Q, and what torch says. Raises FaultsFound."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, width, generator=generator).bfloat16() for n in (256, keys, keys))
    out, lse = torch.zeros(256, width, dtype=torch.bfloat16), torch.zeros(256)
    layout = gl.NVMMASharedLayout.get_default_for([128, width], gl.bfloat16)
    described = [
        TensorDescriptor(each, list(each.shape), list(each.stride()), [128, width], layout)
        for each in (q, k, v, out)
    ]
    scale = width**-0.5
    ptx.launch(
        forward, (1, 1), *described, lse, scale * 1.4426950408889634, 256, keys,
        D=width, STAGES=STAGES, CHUNK=CHUNK, target=target, seed=seed,
    )  # fmt: skip
    scores = q.double() @ k.double().T * scale
    expected = torch.cat([torch.softmax(scores, 1) @ v.double(), scores.logsumexp(1)[:, None]], 1)
    return torch.cat([out.float(), lse[:, None]], 1), expected.float()
