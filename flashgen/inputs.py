"""What is timed: the tensors and features of a spec and a problem, and launches ready to repeat."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.asked import check_scale, diagonal_of
from flashgen.block_mask import BlockMask
from flashgen.config import KernelConfig
from flashgen.features import Features, Fp8, window_of
from flashgen.problem import TUNED_DOCUMENT, TUNED_WINDOW, Problem
from flashgen.render import render
from flashgen.sequences import Sequences, from_bounds
from flashgen.space import tuned_default
from flashgen.spec import AttentionSpec
from flashgen.stopwatch import Run

if TYPE_CHECKING:
    from torch import Tensor

    from flashgen.launch_backward import Backward

PAGE_SIZE = 16
"""Keys to a page: the smallest that serving engines use by default."""


def make_inputs(
    spec: AttentionSpec, problem: Problem, seed: int, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal q (B, H, Sq, d), k (B, Hkv, Sk, d), v (B, Hkv, Sk, d_v), the same for the
    same seed. For a spec with varlen packed, B sequences of equal lengths: (1, H, B * Sq, d) and so
    on, heads inside the sequence as projections leave them; keys in pages, (pages, Hkv, PAGE_SIZE,
    d) and so on.
    """
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(heads: int, seq: int, dim: int, pages: bool = False) -> Tensor:
        shape = (problem.batch, heads, seq, dim)
        if spec.varlen:
            shape = (1, problem.batch * seq, heads, dim)
        if pages:
            shape = (problem.batch * -(-seq // PAGE_SIZE), PAGE_SIZE, heads, dim)
        drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        drawn = drawn.to(getattr(torch, spec.operand_dtype))
        return drawn.transpose(1, 2) if spec.varlen else drawn

    pages = spec.varlen and spec.paged
    return (
        normal(problem.heads, problem.seq_q, spec.head_dim),
        normal(problem.kv_heads, problem.seq_k, spec.head_dim, pages),
        normal(problem.kv_heads, problem.seq_k, spec.head_dim_v, pages),
    )


def make_features(spec: AttentionSpec, problem: Problem, seed: int, device: str) -> Features:
    """The spec's features: a bias or mask shared by batches and heads, slopes by head, a tenth
    dropped, a window of TUNED_WINDOW keys, Gemma 2's cap of 50, sinks by head; packed sequences of
    equal lengths; documents of TUNED_DOCUMENT tokens under a causal mask.
    """
    import torch

    generator = torch.Generator(device=device).manual_seed(seed + 1)
    bias = None
    if spec.bias != "none":
        shape = (1, 1, problem.seq_q, problem.seq_k)
        bias = torch.randn(shape, generator=generator, device=device)
        bias = bias > -1.0 if spec.bias == "boolean" else bias.to(getattr(torch, spec.dtype))
    return Features(
        bias=bias,
        slopes=torch.rand(problem.heads, generator=generator, device=device)
        if spec.alibi
        else None,
        dropout_p=0.1 if spec.dropout else 0.0,
        rng=torch.tensor([seed, 0], device=device) if spec.dropout else None,
        window=window_of((TUNED_WINDOW, TUNED_WINDOW), causal=spec.causal) if spec.window else None,
        softcap=50.0 if spec.softcap else 0.0,
        sinks=torch.randn(problem.heads, generator=generator, device=device) if spec.sink else None,
        fp8=ones_of_fp8(spec, problem, device) if spec.fp8 else None,
        sequences=_equal_sequences(spec, problem, seed, device) if spec.varlen else None,
        block_mask=_documents(problem, device) if spec.block_mask else None,
    )


def _documents(problem: Problem, device: str) -> BlockMask:
    import torch

    from flashgen.masking import document

    of_q, of_k = (
        torch.arange(length, device=device) // TUNED_DOCUMENT
        for length in (problem.seq_q, problem.seq_k)
    )
    return document(of_q, of_k, causal=True)


def _equal_sequences(spec: AttentionSpec, problem: Problem, seed: int, device: str) -> Sequences:
    """As many as the problem has batches, each of its lengths; their pages in a random order."""
    import torch

    number = torch.arange(problem.batch + 1, dtype=torch.int32, device=device)
    table = None
    if spec.paged:
        each = -(-problem.seq_k // PAGE_SIZE)
        generator = torch.Generator().manual_seed(seed)
        table = torch.randperm(problem.batch * each, generator=generator).int().to(device)
        table = table.view(problem.batch, each)
    return from_bounds(
        number * problem.seq_q,
        number * problem.seq_k,
        problem.seq_q,
        problem.seq_k,
        block_table=table,
        page_size=PAGE_SIZE,
    )


def ones_of_fp8(spec: AttentionSpec, problem: Problem, device: str) -> Fp8:
    """Factors of 1 for all heads: their values change no time."""
    import torch

    one = torch.ones(1, 1, device=device).expand(problem.batch, problem.kv_heads)
    return Fp8(q_descale=one, k_descale=one, v_descale=one, dtype=spec.dtype)


def make_backward(
    spec: AttentionSpec, problem: Problem, seed: int, device: str, folder: Path
) -> tuple[Tensor, Backward]:
    """O and the rest of what the backward kernels of a spec read, O and LSE by its default forward
    kernel, which is written to `folder`.

    Made-up ones would not do: LSE decides the size of P, and so what the matrix unit multiplies.
    """
    import torch

    from flashgen import launch
    from flashgen.launch_backward import Backward

    forward = spec.for_direction("forward")
    config = tuned_default(forward)
    rendered = render(forward, config)
    path = folder / f"{rendered.name}.py"
    path.write_text(rendered.source)
    kernel = launch.load_kernel(path, rendered.name)
    q, k, v = make_inputs(spec, problem, seed, device)
    scale = check_scale(None, spec.head_dim)
    diagonal = diagonal_of(spec.causal, problem.seq_q, problem.seq_k)
    features = make_features(spec, problem, seed, device)
    o, lse = launch.launch(
        kernel, forward, config, q, k, v, scale=scale, diagonal=diagonal, features=features
    )
    generator = torch.Generator(device=device).manual_seed(seed + 2)
    do = torch.randn(o.shape, generator=generator, device=device).to(o.dtype)
    call = Backward(
        q=q,
        k=k,
        v=v,
        do=do,
        lse=lse,
        delta=(o.float() * do.float()).sum(-1),
        scale=scale,
        diagonal=diagonal,
        features=features,
    )
    return o, call


def backward_run(
    kernel: Any, spec: AttentionSpec, config: KernelConfig, o: Tensor, call: Backward
) -> Run:
    """A launch of a backward kernel on what make_backward made, ready to repeat."""
    from flashgen.launch_backward import bind_backward, bind_delta

    if spec.direction == "backward_delta":
        return functools.partial(bind_delta(kernel, spec, config), o, call.do, None)
    return functools.partial(bind_backward(kernel, spec, config), call)
