"""Closed forms of the bytes that attention kernels load and store and of the operations that they
do, for one head.

n: queries, as many as keys; d: the head dim of Q, K and V; br, bc: the tile. Elements of Q, K, V
and O have 16 bits, row statistics are float32. Sources: Algorithms 0, 1, 3 and 4 of the
FlashAttention paper (arXiv 2205.14135), Algorithm 1 of the FlashAttention-2 paper (arXiv
2307.08691), and this project's templates.
"""

from __future__ import annotations

from examples.papers.counter import Traffic
from flashgen.spec.vocabulary import padded

ELEMENT, ROW = 2, 4
"""Bytes of an element of Q, K, V and O, and of a row's statistic."""


def keys_seen(n: int, br: int, bc: int, causal: bool = False) -> int:
    """The keys that all tiles of rows read together, by whole tiles of keys."""
    ends = (min(start + br, n) for start in range(0, n, br))
    return sum(min(-(-end // bc) * bc, n) if causal else n for end in ends)


def rows_seen(n: int, br: int, bc: int, causal: bool = False) -> int:
    """The rows that all tiles of keys read together, by whole tiles of rows."""
    return sum(n - (start // br * br if causal else 0) for start in range(0, n, bc))


def fa2(n: int, d: int, br: int, bc: int, causal: bool = False) -> Traffic:
    """FlashAttention-2's forward: Q and O pass once, K and V once a tile of rows."""
    nd, walked = n * d * ELEMENT, keys_seen(n, br, bc, causal) * d * ELEMENT
    return {"q": (nd, 0), "k": (walked, 0), "v": (walked, 0), "o": (0, nd), "lse": (0, ROW * n)}


def fa1(n: int, d: int, br: int, bc: int, causal: bool = False) -> Traffic:
    """FlashAttention-1's forward as flashgen writes it: K and V pass once, Q, O and the statistics
    once a tile of keys. O is float32 there (acc), with padded columns, and rounded into o at last.
    """
    nd, seen = n * d * ELEMENT, rows_seen(n, br, bc, causal)
    state = ROW * padded(d) * (seen + n), ROW * padded(d) * (seen + n)
    statistic = ROW * (seen + n), ROW * (seen + n)
    return {
        "q": (seen * d * ELEMENT, 0),
        "k": (nd, 0),
        "v": (nd, 0),
        "acc": state,
        "sum": statistic,
        "max": statistic,
        "o": (0, nd),
        "lse": (0, ROW * n),
    }


def delta(n: int, d: int) -> Traffic:
    """The backward's row sums of dO * O."""
    nd = n * d * ELEMENT
    return {"o": (nd, 0), "do": (nd, 0), "delta": (0, ROW * n)}


def dq(n: int, d: int, br: int, bc: int, causal: bool = False) -> Traffic:
    """The backward's dQ: a program owns a tile of rows and walks the keys."""
    nd, walked = n * d * ELEMENT, keys_seen(n, br, bc, causal) * d * ELEMENT
    once = dict.fromkeys(("q", "do"), (nd, 0))
    rows = dict.fromkeys(("lse", "delta"), (ROW * n, 0))
    return {**once, **rows, "k": (walked, 0), "v": (walked, 0), "dq": (0, nd)}


def dkv(n: int, d: int, br: int, bc: int, causal: bool = False) -> Traffic:
    """The backward's dK and dV: a program owns a tile of keys and walks the rows."""
    nd, seen = n * d * ELEMENT, rows_seen(n, br, bc, causal)
    walked = dict.fromkeys(("q", "do"), (seen * d * ELEMENT, 0))
    rows = dict.fromkeys(("lse", "delta"), (ROW * seen, 0))
    return {"k": (nd, 0), "v": (nd, 0), **walked, **rows, "dk": (0, nd), "dv": (0, nd)}


def fused(n: int, d: int, br: int, bc: int, causal: bool = False) -> Traffic:
    """The backward in one kernel: dkv, and dQ added in float32 by atomics."""
    added = ROW * d * rows_seen(n, br, bc, causal)
    return dkv(n, d, br, bc, causal) | {"dq": (added, added)}


def decode(n: int, d: int, splits: int, rows: int) -> Traffic:
    """A decode whose `rows` query heads share K and V: each split reads Q and its own keys, and
    writes O in float32 if there are several. Every split has keys.
    """
    nd, o = n * d * ELEMENT, rows * d * (ELEMENT if splits == 1 else ROW * splits)
    return {
        "q": (splits * rows * d * ELEMENT, 0),
        "k": (nd, 0),
        "v": (nd, 0),
        "lengths": (4 * splits, 0),
        "o": (0, o),
        "lse": (0, ROW * splits * rows),
    }


def combine(d: int, splits: int, rows: int) -> Traffic:
    """The kernel that merges the splits of a decode: it reads O and LSE of each once."""
    return {
        "part_o": (ROW * splits * rows * d, 0),
        "part_lse": (ROW * splits * rows, 0),
        "o": (0, rows * d * ELEMENT),
        "lse": (0, ROW * rows),
    }


def total(traffic: Traffic) -> int:
    """All bytes of a kernel, loaded and stored."""
    return sum(loaded + stored for loaded, stored in traffic.values())


def standard(
    n: int, d: int, *, backward: bool = False, mask: bool = False, dropout: bool = False
) -> int:
    """Standard attention, S and P in memory: Algorithm 0, and with `backward` Algorithm 3.

    mask: an additive mask, added by a kernel of its own. dropout: a kernel of its own, whose mask
    takes a byte an element. Every kernel reads and writes each of its tensors once.
    """
    # Passes over (n, n): S written, read, P written, read; the mask reads and writes S; dropout
    # reads P and writes it with the mask, half an element. The backward: P, dP twice, P, dS three
    # times; dropout reads dP and the mask, and writes dP.
    wide = 4 + 2 * mask + 2.5 * dropout + (7 + 2.5 * dropout) * backward
    narrow = 4 + 8 * backward  # Q, K, V, O; dO and V, dO, K, Q in, dQ, dK, dV out
    return round(ELEMENT * (wide * n * n + narrow * n * d))


def algorithm1(n: int, d: int, bc: int) -> int:
    """The FlashAttention paper's Algorithm 1 as printed: O of 16 bits, l and m float32."""
    tiles = -(-n // bc)
    return ELEMENT * n * d * (3 + 3 * tiles) + 2 * ROW * n * (2 * tiles + 1)


def algorithm4(n: int, d: int, bc: int) -> int:
    """Its Algorithm 4, the backward, as printed: dQ zeroed, and a tile of keys reads Q, O, dO, dQ,
    l and m, and writes dQ. dK and dV of a tile stay on chip.
    """
    tiles = -(-n // bc)
    return ELEMENT * n * d * (4 + 5 * tiles + 1) + 2 * ROW * n * tiles


def lean_algorithms(n: int, d: int, bc: int) -> int:
    """Algorithms 1 and 4 by a careful implementation: no read of the zeros in O and dQ, D computed
    once, row statistics left out.
    """
    tiles = -(-n // bc)
    forward = 2 + tiles + tiles + (tiles - 1)
    backward = 4 + 2 * tiles + tiles + (tiles - 1) + 1
    return ELEMENT * n * d * (forward + backward)


def matrix_flops(n: int, d: int, br: int, bc: int, causal: bool = False, products: int = 2) -> int:
    """The operations of matrix products by tiles: two for each pair of a row and a key that a tile
    holds, for each element of a head, in each of `products`. Tiles divide n.
    """
    return 2 * products * d * br * keys_seen(n, br, bc, causal)


def other_flops_fa2(n: int, d: int, bc: int) -> int:
    """All other floating-point operations of FlashAttention-2's forward; tiles divide n."""
    tiles = n // bc
    scores = 5 * n * n  # maximum, times scale, minus maximum, exp2, sum
    rows = 6 * n * tiles + 4 * n  # maximum and sum of a row; LSE and 1 / sum at the end
    return scores + rows + n * d * (tiles + 1)  # O is rescaled once a tile, and divided at the end


def other_flops_fa1(n: int, d: int, bc: int) -> int:
    """The same of FlashAttention-1's forward as flashgen writes it: O is rescaled, added to and
    divided in every tile. As printed, P V is rescaled too.
    """
    tiles = n // bc
    return 5 * n * n + 7 * n * tiles + 3 * n + 3 * n * d * tiles


def shared_by_rows(warps: int, br: int, bc: int, d: int) -> int:
    """Bytes that pass through shared memory in one tile of keys where each warp owns rows (split-Q,
    FlashAttention-2): it reads its rows of Q, and all of K and V.
    """
    return ELEMENT * d * (br + 2 * bc * warps)


def shared_by_keys(warps: int, br: int, bc: int, d: int) -> int:
    """The same where each warp owns keys (split-K, FlashAttention-1): it reads its keys of K and V
    and all of Q, and writes its part of O with a maximum and a sum of each row (float32), which are
    read once to be added. Maxima are read by every warp before.
    """
    inputs = ELEMENT * d * (br * warps + 2 * bc)
    parts = 2 * ROW * br * warps * (d + 1)
    return inputs + parts + ROW * br * warps * (1 + warps)
