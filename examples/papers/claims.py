"""The claims: a name, what it says in plain words, where it stands in the papers, and the function
that shows it.

Functions are named, not imported: each runs in a child process, because Triton reads
TRITON_INTERPRET once, when it is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from flashgen.errors import InvalidArgument

FA1, FA2 = "FlashAttention, arXiv 2205.14135", "FlashAttention-2, arXiv 2307.08691"

Process = Literal["interpreted", "compiled"]
Chapter = Literal[
    "Attention in tiles, exactly", "Why bytes decide", "Who does the work", "How long it takes"
]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of the papers. plain: what it is about, for a reader who does not know attention;
    shows: "module:function" of a function () -> Finding, or (Gpu) -> Finding where `of_gpu`.

    process: with kernels interpreted on the CPU, or compiled, with a GPU if there is one.
    """

    name: str
    chapter: Chapter
    title: str
    plain: str
    sentence: str
    source: str
    shows: str
    process: Process = "interpreted"
    of_gpu: bool = False

    @property
    def command(self) -> str:
        """The command that shows it alone."""
        return f"python examples/papers {self.name}"


_exactly = partial(Claim, chapter="Attention in tiles, exactly")
_bytes = partial(Claim, chapter="Why bytes decide")
_work = partial(Claim, chapter="Who does the work")
_time = partial(Claim, chapter="How long it takes")

CLAIMS: tuple[Claim, ...] = (
    _exactly(
        name="block-matmul",
        title="A matrix product, block by block",
        plain="Attention is two matrix products with a softmax between them. A product can be "
        "computed in blocks that fit into a small fast memory. Each block of the result needs one "
        "row of blocks and one column of blocks, and nothing else.",
        sentence="Q, K and V are split into blocks, loaded from slow HBM to fast SRAM, and the "
        "output is computed with respect to those blocks.",
        source=f"{FA1}, section 3.1",
        shows="examples.papers.tiles:block_matmul",
    ),
    _exactly(
        name="tile-softmax",
        title="Softmax of each tile by itself is wrong",
        plain="Softmax turns the scores of a query into weights that add up to 1. It divides by a "
        "sum over all keys. A tile of keys has only its own sum, so softmax cannot be computed "
        "tile by tile without correction.",
        sentence="Softmax couples columns of K, so a large softmax is decomposed with scaling.",
        source=f"{FA1}, section 3.1, Tiling",
        shows="examples.papers.tiles:tile_softmax",
    ),
    _exactly(
        name="online-softmax",
        title="Online softmax: right in one pass",
        plain="The correction: remember the largest score so far, m, and the sum so far, l. When a "
        "tile brings a larger score, multiply the sum and the output by a factor, and go on. After "
        "the last tile the result is exact.",
        sentence="A running maximum and a running sum, rescaled whenever the maximum grows, give "
        "the exact softmax tile by tile; and results over parts of the keys merge exactly.",
        source=f"{FA1}, section 3.1; {FA2}, section 2.3",
        shows="examples.papers.softmax:online",
    ),
    _exactly(
        name="scan",
        title="Merging works in any order",
        plain="Two results over different keys, each with its m and l, merge into one over both. "
        "Like a sum, the result does not depend on the order. So any number of processors can "
        "share the keys and merge in pairs.",
        sentence="The state (m, l, O) of two parts of the keys is merged by rescaling; the merge "
        "is associative.",
        source=f"{FA1}, section 3.1, algebraic aggregation; {FA2}, section 2.3.1",
        shows="examples.papers.scan:scan",
    ),
    _exactly(
        name="algorithms",
        title="Both algorithms are exact",
        plain="Other fast methods approximate attention. These do not: apart from rounding, the "
        "kernels compute what the textbook formula does. Their error is compared with that of "
        "float64, and with the least error that the number format allows.",
        sentence="Algorithm 1 of FlashAttention and Algorithm 1 of FlashAttention-2 compute exact "
        "attention: no approximation, only rounding.",
        source=f"{FA1}, Algorithm 1 and Theorem 1; {FA2}, Algorithm 1",
        shows="examples.papers.softmax:algorithms",
    ),
    _exactly(
        name="backward",
        title="The backward, by hand",
        plain="Training also needs gradients: how the loss changes with Q, K and V, given dO, how "
        "it changes with O. Five products compute them. The weights P are not stored; they are "
        "computed again from the scores and one number for each row.",
        sentence="dV = P^T dO, dP = dO V^T, D = rowsum(dO * O), dS = P * (dP - D), dQ = dS K and "
        "dK = dS^T Q, where dQ and dK are multiplied by the softmax scale.",
        source=f"{FA1}, Appendix B.2 and Algorithm 4; {FA2}, Algorithm 2",
        shows="examples.papers.gradients:backward",
    ),
    _exactly(
        name="dropout",
        title="Dropout stores no mask",
        plain="Dropout sets random weights to zero in training. The backward must drop the same "
        "ones. Instead of storing which, the kernel runs the random generator again from the same "
        "seed.",
        sentence="The backward makes dropout's mask again from the state of the random generator, "
        "so no mask of N^2 elements is stored.",
        source=f"{FA1}, section 3.1 and Appendix B",
        shows="examples.papers.dropout:remade",
    ),
    _bytes(
        name="memories",
        title="Fast memory is small, large memory is slow",
        plain="A GPU computes faster than its large memory can bring numbers. It has small "
        "memories beside the arithmetic that are ten times as fast and more. An algorithm is "
        "quick if it does much with each number that it brings near.",
        sentence="On an A100, 40 to 80 GB of HBM have 1.5 to 2.0 TB/s, and 192 KB of SRAM in each "
        "of 108 SMs about 19 TB/s together.",
        source=f"{FA1}, Figure 1 and section 2.1",
        shows="examples.papers.memories:hierarchy",
        of_gpu=True,
    ),
    _bytes(
        name="figure-2",
        title="FlashAttention moves a ninth of the bytes",
        plain="Standard attention writes all scores to HBM and reads them again, several times. "
        "For 1,024 keys that is far more than Q, K, V and O. FlashAttention keeps scores in fast "
        "memory and never writes them.",
        sentence="For GPT-2 medium, forward and backward, standard attention moves 40.3 GB through "
        "HBM and FlashAttention 4.4 GB.",
        source=f"{FA1}, Figure 2, left: batch 64, 16 heads, N 1,024, d 64, on an A100",
        shows="examples.papers.traffic:figure_2",
    ),
    _bytes(
        name="accesses",
        title="HBM accesses over N and d",
        plain="How many bytes move when sequences get longer, or vectors? Three kernels run at "
        "many sizes, and every byte is counted.",
        sentence="Standard attention needs accesses in O(N d + N^2); FlashAttention reads tiles "
        "into SRAM once and never writes a matrix of N^2 elements.",
        source=f"{FA1}, Theorem 2",
        shows="examples.papers.traffic:accesses",
    ),
    _bytes(
        name="sram",
        title="More SRAM, fewer accesses",
        plain="With more fast memory a block can be larger, and Q and O are passed over fewer "
        "times. The paper's theorem says how bytes fall with the size M of the fast memory.",
        sentence="FlashAttention needs accesses in O(N^2 d^2 / M), where M is the size of SRAM.",
        source=f"{FA1}, Theorem 2",
        shows="examples.papers.traffic:sram",
    ),
    _bytes(
        name="block-size",
        title="HBM accesses over the block size",
        plain="The same with the block's size chosen directly. FlashAttention-1 holds a block of "
        "keys and walks the rows; FlashAttention-2 holds a tile of rows and walks the keys. What "
        "it holds should be large.",
        sentence="A larger block of keys, B_c, means fewer passes over Q and O, and fewer accesses."
        " FlashAttention-2 walks keys inside, so its accesses depend on B_r instead.",
        source=f"{FA1}, Figure 2, middle; {FA2}, section 3.1",
        shows="examples.papers.traffic:block_size",
    ),
    _bytes(
        name="memory",
        title="Memory linear in N",
        plain="How much memory must be set aside beyond inputs and output? Standard attention "
        "stores a score and a weight for each pair of query and key, FlashAttention a few numbers "
        "for each row.",
        sentence="FlashAttention needs O(N) memory beyond inputs and output, standard attention "
        "O(N^2).",
        source=f"{FA1}, Theorem 1",
        shows="examples.papers.traffic:memory",
    ),
    _work(
        name="flops",
        title="Tiles do the same arithmetic",
        plain="FlashAttention saves bytes, not arithmetic: its forward does exactly as many "
        "operations. A causal mask, where a token sees only earlier ones, is different: tiles of "
        "later keys are left out, which saves almost half.",
        sentence="FlashAttention computes in O(N^2 d) operations, as standard attention does; with "
        "a causal mask about half of the blocks are skipped.",
        source=f"{FA1}, Theorem 1; {FA2}, section 3.1.1, Causal masking",
        shows="examples.papers.operations:flops",
    ),
    _work(
        name="non-matmul",
        title="FlashAttention-2, first change: fewer other operations",
        plain="GPUs have units for matrix products that are about 16 times as fast as the rest. "
        "So additions and exponentials outside products are costly. FlashAttention-2 divides O "
        "once, at the end, and not in every tile.",
        sentence="The algorithm is tweaked to reduce the number of operations that are not matrix "
        "products.",
        source=f"{FA2}, section 3.1",
        shows="examples.papers.operations:other",
        of_gpu=True,
    ),
    _work(
        name="parallelism",
        title="FlashAttention-2, second change: more programs",
        plain="A GPU has about a hundred processors (SMs). Long sequences come in small batches. "
        "Then there are fewer heads than SMs, and one program for each head leaves most SMs idle. "
        "FlashAttention-2 also splits the sequence.",
        sentence="Attention is parallelized over the sequence too, besides batch and heads, which "
        "raises occupancy when the sequence is long and the batch small.",
        source=f"{FA2}, section 3.2",
        shows="examples.papers.parallel:over_sequence",
        of_gpu=True,
    ),
    _work(
        name="split-q",
        title="FlashAttention-2, third change: warps own rows",
        plain="Inside a program, four groups of threads (warps) share a tile. If each takes some "
        "of the keys, their outputs must be added up through shared memory. If each takes some of "
        "the rows, its output is final.",
        sentence="Q is split across 4 warps in place of K and V, so that warps need not "
        "communicate, and fewer bytes pass through shared memory.",
        source=f"{FA2}, section 3.3 and Figure 3",
        shows="examples.papers.parallel:over_warps",
        process="compiled",
    ),
    _work(
        name="decode",
        title="Splitting keys fills the GPU in decode",
        plain="A language model writes one token at a time. One token has one row of scores, so "
        "rows cannot be shared out. The keys can be: each program takes a part, and the parts "
        "merge exactly.",
        sentence="A query of one token has one tile of rows; splitting its keys over programs "
        "gives parallel work for few more bytes, and the parts merge exactly.",
        source=f"{FA2}, section 3.2, parallelism over the sequence; here over keys",
        shows="examples.papers.traffic:decode",
    ),
    _time(
        name="plateau",
        title="Run time stops improving at 256",
        plain="Fewer bytes mean less time only while bytes are what the GPU waits for. With large "
        "blocks it waits for arithmetic.",
        sentence="As B_c grows, run time falls with the accesses, until beyond 256 other costs "
        "such as arithmetic dominate.",
        source=f"{FA1}, Figure 2, middle",
        shows="examples.papers.timing:plateau",
        process="compiled",
    ),
    _time(
        name="block-rule",
        title="The block rule beside tuned tiles",
        plain="The first paper chooses the block by a formula: fill the fast memory. This project "
        "searches for the fastest tile on each GPU instead. Here both stand side by side.",
        sentence="Algorithm 1 takes B_c = ceil(M / 4d), so that a block of each of Q, K, V and O "
        "fits in SRAM.",
        source=f"{FA1}, Algorithm 1, line 1",
        shows="examples.papers.timing:block_rule",
        process="compiled",
    ),
    _time(
        name="gpt-2",
        title="GPT-2 trains 3.5 times as fast: what attention explains",
        plain="The best-known figure of the paper compares training GPT-2 with Hugging Face's "
        "code. How much of it comes from attention? An estimate of one training step, with "
        "standard attention and with our kernels, says.",
        sentence="GPT-2 trains up to 3.5 times as fast as with Hugging Face, and 1.7 times as fast "
        "as with Megatron-LM.",
        source=f"{FA1}, Table 2 and Figure 2, left",
        shows="examples.papers.gpt2:training",
        process="compiled",
    ),
)


def named(names: list[str]) -> list[Claim]:
    """The claims of these names, in their order; all if there is none. Raises InvalidArgument."""
    known = {claim.name: claim for claim in CLAIMS}
    for name in names:
        if name not in known:
            raise InvalidArgument(f"CLAIM must be one of {', '.join(known)}: got {name!r}")
    return [known[name] for name in dict.fromkeys(names)] if names else list(CLAIMS)
