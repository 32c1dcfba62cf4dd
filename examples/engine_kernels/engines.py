"""Attention kernels of vLLM 0.33.0 and SGLang 0.5.23: what may be chosen, which lines of the
installed files choose it, a call of the engine's own host function, and how many trips the kernel's
loop does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

Point = Mapping[str, int]

PAGE = 16
SEGMENTS, FEW_PROGRAMS = 16, 128
"""vLLM's Triton backend: how many parts of a sequence a decode makes, and up to how many programs
without parts."""
SPLITS, SPLIT_OF = 8, 32
"""SGLang: the default of --triton-attention-num-kv-splits, and what a split is a multiple of."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A batch of one layer, causal, bfloat16. queries, keys: of each sequence how many, the keys
    with those of the queries.
    """

    heads: int
    kv_heads: int
    dim: int
    queries: Sequence[int]
    keys: Sequence[int]

    @property
    def group(self) -> int:
        """The query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def least_bytes(self) -> int:
        """What a launch must read and write: Q, O, and K and V once."""
        return 4 * self.dim * (self.heads * sum(self.queries) + self.kv_heads * sum(self.keys))


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """q (tokens, heads, dim); k and v (pages, PAGE, kv_heads, dim); table (sequences, most pages)
    int32, the pages of each sequence.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor


def inputs(work: Work, *, filled: bool) -> Inputs:
    """Tensors on the CPU, in pages of a random order; filled: with random values, not as found."""
    made = torch.Generator().manual_seed(0)
    counts = [math.ceil(keys / PAGE) for keys in work.keys]

    def values(*shape: int) -> Tensor:
        if filled:
            return torch.randn(shape, generator=made).bfloat16()
        return torch.empty(shape, dtype=torch.bfloat16)

    pages = torch.randperm(sum(counts), generator=made).int().split(counts)
    return Inputs(
        q=values(sum(work.queries), work.heads, work.dim),
        k=values(sum(counts), PAGE, work.kv_heads, work.dim),
        v=values(sum(counts), PAGE, work.kv_heads, work.dim),
        table=torch.nn.utils.rnn.pad_sequence(pages, batch_first=True),
    )


def contiguous(pages: Tensor, table: Tensor, work: Work) -> Tensor:
    """(all keys, kv_heads, dim): the keys of each sequence, one sequence after the other."""
    rows = (pages[row.long()].flatten(0, 1) for row in table)
    return torch.cat([row[:keys] for row, keys in zip(rows, work.keys, strict=True)])


def starts(lengths: Sequence[int]) -> Tensor:
    """(sequences + 1) int32: where each sequence starts, and where the last ends."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def call_vllm(module: ModuleType, work: Work, given: Inputs) -> Tensor:
    """O (tokens, heads, dim) by vLLM's host function, with the scratch of its Triton backend."""
    out, parts = torch.empty_like(given.q), (*given.q.shape[:2], SEGMENTS)
    module.unified_attention(
        q=given.q, k=given.k, v=given.v, out=out, cu_seqlens_q=starts(work.queries),
        max_seqlen_q=max(work.queries), seqused_k=torch.tensor(work.keys, dtype=torch.int32),
        max_seqlen_k=max(work.keys), softmax_scale=work.dim**-0.5, causal=True,
        window_size=(-1, -1), block_table=given.table, softcap=0, q_descale=None, k_descale=None,
        v_descale=None, seq_threshold_3D=FEW_PROGRAMS // work.kv_heads,
        num_par_softmax_segments=SEGMENTS, softmax_segm_output=torch.empty(*parts, work.dim),
        softmax_segm_max=torch.empty(parts), softmax_segm_expsum=torch.empty(parts),
    )  # fmt: skip
    return out


def call_sglang_decode(module: ModuleType, work: Work, given: Inputs) -> Tensor:
    """O (tokens, heads, dim) by SGLang's host function of decode, which knows where each key is."""
    out, batch = torch.empty_like(given.q), len(work.keys)
    places = (given.table[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1).int()
    module.decode_attention_fwd(
        given.q, given.k.flatten(0, 1), given.v.flatten(0, 1), out, starts(work.keys),
        torch.cat([row[:keys] for row, keys in zip(places, work.keys, strict=True)]),
        torch.empty(batch, work.heads, SPLITS, work.dim), torch.empty(batch, work.heads, SPLITS),
        torch.full((batch,), SPLITS, dtype=torch.int32), SPLITS, work.dim**-0.5, 1.0, 1.0,
    )  # fmt: skip
    return out


def call_sglang_prefill(module: ModuleType, work: Work, given: Inputs) -> Tensor:
    """O (tokens, heads, dim) by SGLang's host function of a prefill without a cache."""
    out = torch.empty_like(given.q)
    k, v = (contiguous(pages, given.table, work) for pages in (given.k, given.v))
    lengths = torch.tensor(work.queries, dtype=torch.int32)
    module.context_attention_fwd(
        given.q, k, v, out, starts(work.queries)[:-1], lengths, max(work.queries)
    )
    return out


def _tiles_of_rows(rows: int, work: Work) -> list[tuple[int, int | None]]:
    """Of each of vLLM's tiles of rows its sequence and its number there, None beyond the last. It
    launches up to one more for each sequence than there are.
    """
    first = [start // rows + number for number, start in enumerate(starts(work.queries).tolist())]
    return [
        (sequence, tile if tile * rows < queries else None)
        for sequence, queries in enumerate(work.queries)
        for tile in range(first[sequence + 1] - first[sequence])
    ]


def _seen(tile: int, sequence: int, point: Point, work: Work) -> int:
    """How many keys vLLM's tile of rows reads."""
    queries, keys = work.queries[sequence], work.keys[sequence]
    last = tile * (point["BLOCK_M"] // work.group) + (point["BLOCK_M"] - 1) // work.group
    return min(keys - queries + last + 1, keys)


def trips_vllm_prefill(point: Point, work: Work) -> list[int]:
    """Trips of each program in launch order: tiles of rows, then KV heads."""
    trips = [
        0 if tile is None else math.ceil(_seen(tile, sequence, point, work) / point["TILE_SIZE"])
        for sequence, tile in _tiles_of_rows(point["BLOCK_M"] // work.group, work)
    ]
    return trips * work.kv_heads


def trips_vllm_decode(point: Point, work: Work) -> list[int]:
    """Trips of each program in launch order: tiles of rows, KV heads, parts of the sequence."""
    trips: list[int] = []
    for segment in range(SEGMENTS):
        of_head = []
        for sequence, tile in _tiles_of_rows(point["BLOCK_M"] // work.group, work):
            length = math.ceil(work.keys[sequence] / (SEGMENTS * point["TILE_SIZE"]))
            seen = 0 if tile is None else _seen(tile, sequence, point, work)
            left = math.ceil(seen / point["TILE_SIZE"]) - segment * length
            of_head.append(max(0, min(length, left)))
        trips += of_head * work.kv_heads
    return trips


def trips_sglang_decode(point: Point, work: Work) -> list[int]:
    """Trips of each program in launch order: sequences, tiles of heads, splits."""
    trips: list[int] = []
    for split in range(SPLITS):
        for keys in work.keys:
            length = math.ceil(math.ceil(keys / SPLITS) / SPLIT_OF) * SPLIT_OF
            trips.append(math.ceil(max(0, min(length, keys - split * length)) / point["BLOCK_N"]))
    of_split = len(work.keys)
    tiles = math.ceil(work.heads / min(point["BLOCK_H"], work.group))
    return [
        trip
        for split in range(SPLITS)
        for trip in trips[split * of_split : (split + 1) * of_split] * tiles
    ]


def trips_sglang_prefill(point: Point, work: Work) -> list[int]:
    """Trips of each program in launch order: sequences, heads, tiles of rows."""
    rows = point["BLOCK_M"]
    return [
        math.ceil(min((tile + 1) * rows, queries) / point["BLOCK_N"])
        if tile * rows < queries
        else 0
        for tile in range(math.ceil(max(work.queries) / rows))
        for _ in range(work.heads)
        for queries in work.queries
    ]


@dataclass(frozen=True, kw_only=True)
class EngineKernel:
    """A kernel as it stands in an installed package.

    module, kernel: where it is; others: what the host function launches besides. values: what is
    searched; beside num_warps and num_stages, constexpr arguments of the kernel. edits: texts of
    the file, each there once, and what replaces them; a name between braces is one of the point,
    `group`, `dim`, `capability` or `why`. call: calls the host function. trips: those of each
    program, from the constexpr arguments of the launch. tile: which of these are rows and keys of a
    tile. check: a small Work with several tiles in each direction.
    """

    module: str
    kernel: str
    others: tuple[str, ...] = ()
    values: Mapping[str, tuple[int, ...]]
    edits: tuple[tuple[str, str], ...]
    call: Callable[[ModuleType, Work, Inputs], Tensor]
    trips: Callable[[Point, Work], list[int]]
    tile: tuple[str, str]
    check: Work


_VLLM = "vllm.v1.attention.ops.triton_unified_attention"
_SGLANG = "sglang.kernels.ops.attention."
_FOR = "torch.cuda.get_device_capability(q.device) == {capability}"

KERNELS = {
    "vllm-prefill": EngineKernel(
        module=_VLLM,
        kernel="kernel_unified_attention",
        others=("reduce_segments",),
        values={
            "BLOCK_M": (16, 32, 64, 128),
            "TILE_SIZE": (16, 32, 64, 128),
            "num_warps": (4, 8),
            "num_stages": (2, 3, 4),
        },
        edits=(
            (
                "    # Ideally we would launch with kernel with:\n",
                """\
    # {why}
    tuned_prefill = (
        head_size == {dim}
        and num_queries_per_kv == {group}
        and q.element_size() == k.element_size() == 2
        and max_seqlen_q > MAX_3D_QUERY_LEN
        and not is_batch_invariant
        and """
                + _FOR
                + """
    )
    if tuned_prefill:
        BLOCK_M, launch_num_warps, launch_num_stages = {BLOCK_M}, {num_warps}, {num_stages}
        BLOCK_Q = BLOCK_M // num_queries_per_kv

    # Ideally we would launch with kernel with:
""",
            ),
            (
                "    # USE_TD requires BLOCK_SIZE % TILE_SIZE == 0 (enforced by a\n",
                """\
    if tuned_prefill:
        TILE_SIZE_PREFILL = {TILE_SIZE}

    # USE_TD requires BLOCK_SIZE % TILE_SIZE == 0 (enforced by a
""",
            ),
        ),
        call=call_vllm,
        trips=trips_vllm_prefill,
        tile=("BLOCK_M", "TILE_SIZE"),
        check=Work(heads=8, kv_heads=2, dim=128, queries=(70, 9), keys=(300, 70)),
    ),
    "vllm-decode": EngineKernel(
        module=_VLLM,
        kernel="kernel_unified_attention",
        others=("reduce_segments",),
        values={
            "TILE_SIZE": (16, 32, 64, 128),
            "num_warps": (1, 2, 4, 8),
            "num_stages": (2, 3, 4, 5),
        },
        edits=(
            (
                "    launch_kwargs: dict[str, int] = {}\n",
                """\
    # {why}
    if (
        use_3d
        and head_size == {dim}
        and num_queries_per_kv == {group}
        and q.element_size() == k.element_size() == 2
        and """
                + _FOR
                + """
    ):
        tile_size = TILE_SIZE_DECODE = {TILE_SIZE}
        launch_num_warps, launch_num_stages = {num_warps}, {num_stages}

    launch_kwargs: dict[str, int] = {}
""",
            ),
        ),
        call=call_vllm,
        trips=trips_vllm_decode,
        tile=("BLOCK_M", "TILE_SIZE"),
        check=Work(heads=8, kv_heads=2, dim=128, queries=(1, 1, 1), keys=(2100, 70, 1)),
    ),
    "sglang-decode": EngineKernel(
        module=_SGLANG + "decode_attention",
        kernel="_fwd_grouped_kernel_stage1",
        others=("_fwd_kernel_stage2",),
        values={
            "BLOCK_N": (16, 32, 64, 128),
            "num_warps": (1, 2, 4, 8),
            "num_stages": (2, 3, 4, 5),
        },
        edits=(
            (
                "    if tune_mla:\n",
                """\
    # {why}
    if (
        Lk == Lv == {dim}
        and kv_group_num == {group}
        and q.element_size() == k_buffer.element_size() == 2
        and """
                + _FOR
                + """
    ):
        BLOCK, num_warps, num_stages = {BLOCK_N}, {num_warps}, {num_stages}

    if tune_mla:
""",
            ),
        ),
        call=call_sglang_decode,
        trips=trips_sglang_decode,
        tile=("BLOCK_H", "BLOCK_N"),
        check=Work(heads=8, kv_heads=2, dim=128, queries=(1, 1, 1), keys=(1100, 70, 1)),
    ),
    "sglang-prefill": EngineKernel(
        module=_SGLANG + "prefill_attention",
        kernel="_fwd_kernel",
        values={
            "BLOCK_M": (64, 128),
            "BLOCK_N": (32, 64, 128),
            "num_warps": (4, 8),
            "num_stages": (1, 2, 3, 4),
        },
        edits=(
            (
                "    grid = (batch, head, triton.cdiv(max_input_len, BLOCK))\n",
                "    BLOCK_M = BLOCK_N = BLOCK\n",
            ),
            (
                "    num_warps = 4 if Lk <= 64 else 8\n",
                """\
    num_warps, num_stages = 4 if Lk <= 64 else 8, 1
    # {why}
    if (
        Lk == {dim}
        and q.element_size() == k.element_size() == 2
        and """
                + _FOR
                + """
    ):
        BLOCK_M, BLOCK_N = {BLOCK_M}, {BLOCK_N}
        num_warps, num_stages = {num_warps}, {num_stages}
    grid = (batch, head, triton.cdiv(max_input_len, BLOCK_M))
""",
            ),
            ("        BLOCK_M=BLOCK,\n", "        BLOCK_M=BLOCK_M,\n"),
            ("        BLOCK_N=BLOCK,\n", "        BLOCK_N=BLOCK_N,\n"),
            ("        num_stages=1,\n", "        num_stages=num_stages,\n"),
        ),
        call=call_sglang_prefill,
        trips=trips_sglang_prefill,
        tile=("BLOCK_M", "BLOCK_N"),
        check=Work(heads=2, kv_heads=1, dim=128, queries=(300, 70), keys=(300, 70)),
    ),
}
