"""The backward pass on a GPU: flashgen's choice, its untuned default, and the peers, in one run.

    python benchmarks/backward.py [--dtype bf16] [--head-dim 64] [--seq 4096] [--out FILE]
    python benchmarks/backward.py --smoke     every path with tiny sizes on a CPU; measures nothing

The setting, the contenders, the protocol and the file are those of forward.py, beside this one.
What is timed is torch.autograd.grad of one output: all kernels of a backward, and what is between
them. The error is that of the worst of dQ, dK and dV, in floors. TFLOP/s follow the convention of
the FlashAttention papers, 2.5 times the operations of the forward, whatever a contender recomputes.
Exit codes: as of forward.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import forward as shared
import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from flashgen import gradients, measure, reference
from flashgen.asked import check_scale, diagonal_of
from flashgen.errors import FlashgenError
from flashgen.features import PLAIN
from flashgen.gpu import Gpu
from flashgen.problem import flops
from flashgen.spec import Direction

PAPERS_FORWARDS = 2.5
"""Operations of a backward in those of its forward: five products instead of two."""

JUDGED_ELEMENTS = 1 << 25
"""Elements of S compared with float64 at once, at most, but for one head: the reference holds a
dozen of this size."""

DIRECTIONS: tuple[Direction, ...] = ("backward_delta", "backward_dkv", "backward_dq")

Pass = Callable[[], tuple[Tensor, ...]]


def run_case(
    case: shared.Case, gpu: Gpu | None, stopwatch: measure.Stopwatch, *, smoke: bool
) -> list[shared.Line]:
    """Run every contender's forward once, judge its gradients, then time its backward."""
    lines: dict[str, shared.Line] = {}
    racing: dict[str, measure.Run] = {}
    do = output_gradient(case)
    for contender in shared.contenders(case, smoke=smoke):
        if smoke and contender.name == "FlexAttention":
            continue  # has no backward on a CPU
        try:
            backward = backward_of(contender, case, do)
            floors = floors_of(backward(), case, do)
        except torch.AcceleratorError:  # the GPU's context is spoiled
            raise
        except (RuntimeError, ValueError) as error:  # how torch and its peers decline
            sentence = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            lines[contender.name] = shared.Line(
                name=contender.name, detail=sentence, status="unavailable"
            )
            continue
        right = floors <= reference.FLOORS_ACCEPTED
        lines[contender.name] = shared.Line(
            name=contender.name,
            detail=contender.detail,
            status="ok" if right else "wrong",
            floors=floors,
        )
        if right:
            racing[contender.name] = backward
    operations = PAPERS_FORWARDS * flops(case.spec, case.problem)
    shared.race(lines, racing, operations, gpu, stopwatch)
    return [told(line, case) for line in lines.values()]


def output_gradient(case: shared.Case) -> Tensor:
    """Standard normal dO of O's shape, the same for the same seed."""
    generator = torch.Generator(device=case.q.device).manual_seed(shared.SEED + 2)
    shape = (*case.q.shape[:3], case.spec.head_dim_v)
    drawn = torch.randn(shape, generator=generator, device=case.q.device)
    return drawn.to(case.q.dtype)


def backward_of(contender: shared.Contender, case: shared.Case, do: Tensor) -> Pass:
    """A contender's backward, ready to repeat: its forward has run."""
    with torch.enable_grad():
        leaves = tuple(x.detach().requires_grad_() for x in (case.q, case.k, case.v))
        o = contender.attention(*leaves)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, leaves, do, retain_graph=True)

    return backward


def floors_of(found: tuple[Tensor, ...], case: shared.Case, do: Tensor) -> float:
    """The error of the worst gradient in floors, over as many heads of the first sequence as fit in
    memory. The heads are not grouped, so each has its own gradients.
    """
    p = case.problem
    heads = max(1, min(p.heads, JUDGED_ELEMENTS // (p.seq_q * p.seq_k)))
    q, k, v, do, *found_ = (x[:1, :heads] for x in (case.q, case.k, case.v, do, *found))
    inputs = gradients.Inputs(
        q=q,
        k=k,
        v=v,
        do=do,
        dlse=torch.zeros(q.shape[:3], device=q.device),
        scale=check_scale(None, case.spec.head_dim),
        diagonal=diagonal_of(case.spec.causal, p.seq_q, p.seq_k),
        features=PLAIN,
    )
    return gradients.judge("backward_fused", tuple(found_), inputs).floors


def told(line: shared.Line, case: shared.Case) -> shared.Line:
    """The line with the kernels of flashgen's backward in the place of its forward's."""
    if not line.name.startswith("flashgen") or line.status == "unavailable":
        return line
    dispatcher = shared.dispatcher_of(line.name)
    kernels = []
    for direction in DIRECTIONS:
        why = dispatcher.explain(
            case.q, case.k, case.v, causal=case.spec.causal, direction=direction
        )
        if why.selection is None:
            return replace(line, detail="CPU tensors are served by torch")
        choice = why.selection.choice
        kernels.append(f"{choice.kernel}, {choice.source}, {why.selection.rung}")
    return replace(line, detail="; ".join(kernels))


if __name__ == "__main__":
    # What FlexAttention compiles would else free what a second backward needs.
    functorch_config.donated_buffer = False
    try:
        sys.exit(
            shared.main(
                sys.argv[1:],
                name="backward",
                description=(__doc__ or "").splitlines()[0],
                run_case=run_case,
            )
        )
    except FlashgenError as error:
        sys.exit(f"backward.py: {error}")
