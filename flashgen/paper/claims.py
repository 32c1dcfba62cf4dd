"""The claims: a name, a sentence, where it stands in the papers, and the function that shows it.

Functions are named, not imported: each runs in a child process, because Triton reads
TRITON_INTERPRET once, when it is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashgen.errors import InvalidArgument

FA1, FA2 = "FlashAttention, arXiv 2205.14135", "FlashAttention-2, arXiv 2307.08691"

Process = Literal["interpreted", "compiled"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of the papers. shows: "module:function" of a function () -> Finding.

    process: with kernels interpreted on the CPU, or compiled, with a GPU if there is one.
    """

    name: str
    title: str
    sentence: str
    source: str
    shows: str
    process: Process = "interpreted"

    @property
    def command(self) -> str:
        """The command that shows it alone."""
        return f"flashgen paper {self.name}"


CLAIMS = (
    Claim(
        name="figure-2",
        title="FlashAttention moves a ninth of the bytes",
        sentence="For GPT-2 medium, forward and backward, standard attention moves 40.3 GB through "
        "HBM and FlashAttention 4.4 GB.",
        source=f"{FA1}, Figure 2, left: batch 64, 16 heads, N 1,024, d 64, on an A100",
        shows="flashgen.paper.traffic:figure_2",
    ),
    Claim(
        name="online-softmax",
        title="Softmax in one pass",
        sentence="A running maximum and a running sum, rescaled whenever the maximum grows, give "
        "the exact softmax tile by tile; and results over parts of the keys merge exactly.",
        source=f"{FA1}, section 3.1; {FA2}, section 2.3",
        shows="flashgen.paper.softmax:online",
    ),
    Claim(
        name="algorithms",
        title="Both algorithms are exact",
        sentence="Algorithm 1 of FlashAttention and Algorithm 1 of FlashAttention-2 compute exact "
        "attention: no approximation, only rounding.",
        source=f"{FA1}, Algorithm 1 and Theorem 1; {FA2}, Algorithm 1",
        shows="flashgen.paper.softmax:algorithms",
    ),
    Claim(
        name="accesses",
        title="HBM accesses over N and d",
        sentence="Standard attention needs accesses in O(N d + N^2); FlashAttention reads tiles "
        "into SRAM once and never writes a matrix of N^2 elements.",
        source=f"{FA1}, Theorem 2",
        shows="flashgen.paper.traffic:accesses",
    ),
    Claim(
        name="sram",
        title="More SRAM, fewer accesses",
        sentence="FlashAttention needs accesses in O(N^2 d^2 / M), where M is the size of SRAM.",
        source=f"{FA1}, Theorem 2",
        shows="flashgen.paper.traffic:sram",
    ),
    Claim(
        name="block-size",
        title="HBM accesses over the block size",
        sentence="A larger block of keys, B_c, means fewer passes over Q and O, and fewer accesses."
        " FlashAttention-2 walks keys inside, so its accesses depend on B_r instead.",
        source=f"{FA1}, Figure 2, middle; {FA2}, section 3.1",
        shows="flashgen.paper.traffic:block_size",
    ),
    Claim(
        name="plateau",
        title="Run time stops improving at 256",
        sentence="As B_c grows, run time falls with the accesses, until beyond 256 other costs "
        "such as arithmetic dominate.",
        source=f"{FA1}, Figure 2, middle",
        shows="flashgen.paper.timing:plateau",
        process="compiled",
    ),
    Claim(
        name="block-rule",
        title="The block rule beside tuned tiles",
        sentence="Algorithm 1 takes B_c = ceil(M / 4d), so that a block of each of Q, K, V and O "
        "fits in SRAM.",
        source=f"{FA1}, Algorithm 1, line 1",
        shows="flashgen.paper.timing:block_rule",
        process="compiled",
    ),
    Claim(
        name="memory",
        title="Memory linear in N",
        sentence="FlashAttention needs O(N) memory beyond inputs and output, standard attention "
        "O(N^2).",
        source=f"{FA1}, Theorem 1",
        shows="flashgen.paper.traffic:memory",
    ),
    Claim(
        name="decode",
        title="Splitting keys fills the GPU in decode",
        sentence="A query of one token has one tile of rows; splitting its keys over programs "
        "gives parallel work for few more bytes, and the parts merge exactly.",
        source=f"{FA2}, section 3.2, parallelism over the sequence; here over keys",
        shows="flashgen.paper.traffic:decode",
    ),
    Claim(
        name="dropout",
        title="Dropout stores no mask",
        sentence="The backward makes dropout's mask again from the state of the random generator, "
        "so no mask of N^2 elements is stored.",
        source=f"{FA1}, section 3.1 and Appendix B",
        shows="flashgen.paper.dropout:remade",
    ),
)


def named(names: list[str]) -> list[Claim]:
    """The claims of these names, in their order; all if there is none. Raises InvalidArgument."""
    known = {claim.name: claim for claim in CLAIMS}
    for name in names:
        if name not in known:
            raise InvalidArgument(f"CLAIM must be one of {', '.join(known)}: got {name!r}")
    return [known[name] for name in dict.fromkeys(names)] if names else list(CLAIMS)
