"""Runs flashgen's kernels on one head in the interpreter, counted and checked against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from examples.papers.counter import Counter
from flashgen.inputs.cache import Cache
from flashgen.kernels.launch import Kernel, bind
from flashgen.kernels.launch_backward import Backward, Delta
from flashgen.kernels.launch_cache import Combine, Decode
from flashgen.kernels.launch_forward import Forward
from flashgen.kernels.loader import load_text
from flashgen.kernels.render import Rendered, digest_of, in_place, render
from flashgen.reference.attention import judge
from flashgen.runtime.eager.attention import attention
from flashgen.schedules.base import TILES, Loads
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.vocabulary import Direction

GROUP = 4
"""Query heads of a decode that share K and V."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """The inputs of one head: (1, 1, n, d), or (1, GROUP, 1, d) for the q of a decode."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def scale(self) -> float:
        """1 / sqrt(d)."""
        return 1.0 / math.sqrt(self.q.shape[3])


def head(
    n: int, d: int, *, rows: int | None = None, heads: int = 1, dtype: str = "float16"
) -> Head:
    """Random inputs, the same at every call; rows: the number of queries, n if None."""
    draw = torch.Generator().manual_seed(n * d)

    def normal(heads: int, length: int) -> Tensor:
        return torch.randn(1, heads, length, d, generator=draw).to(getattr(torch, dtype))

    return Head(q=normal(heads, rows or n), k=normal(1, n), v=normal(1, n))


def spec_of(
    d: int, *, direction: Direction = "forward", causal: bool = False, dtype: str = "float16"
) -> AttentionSpec:
    """Plain attention of head dim d."""
    made = AttentionSpec(
        dtype=dtype,  # type: ignore[arg-type]
        head_dim=d,
        head_dim_v=d,
        mask="causal" if causal else "none",
    )
    return made.for_direction(direction)


def config_of(br: int, bc: int, *, schedule: str = "fa2", loads: Loads = "pointer") -> KernelConfig:
    """A tile; the interpreter ignores warps and stages."""
    return KernelConfig(br=br, bc=bc, num_warps=4, num_stages=1, schedule=schedule, loads=loads)


def rendered(spec: AttentionSpec, config: KernelConfig, bc: int | None = None) -> Rendered:
    """A kernel. bc: a tile that no config has, put into its text."""
    made = render(spec, config)
    if bc is None or bc == config.bc:
        return made
    numbers = dict(made.constants) | {"BC": bc}
    text = in_place(replace(made, constants=tuple(numbers.items())))
    digest = digest_of(text)
    return replace(
        made, text_name=made.name, source=text, digest=digest, text_digest=digest, constants=()
    )


def kernel_of(spec: AttentionSpec, config: KernelConfig, bc: int | None = None) -> Kernel:
    """The kernel, loaded."""
    return load_text(rendered(spec, config, bc))


def forward(
    schedule: str,
    br: int,
    bc: int,
    n: int,
    d: int,
    *,
    causal: bool = False,
    loads: Loads = "pointer",
    dtype: str = "float16",
) -> Counter:
    """One head's forward. bc may be larger than a config allows."""
    spec = spec_of(d, causal=causal, dtype=dtype)
    config = config_of(br, min(bc, TILES[-1]), schedule=schedule, loads=loads)
    of, diagonal = head(n, d, dtype=dtype), 0 if causal else None
    call = Forward(q=of.q, k=of.k, v=of.v, scale=of.scale, diagonal=diagonal)
    with Counter(kernel="forward") as counter:
        o, lse = bind(kernel_of(spec, config, bc), spec, config)(call)
    counter.verdict = judge(o, lse, of.q, of.k, of.v, scale=of.scale, diagonal=diagonal)
    return counter


def backward(
    direction: Direction, br: int, bc: int, n: int, d: int, *, causal: bool = False
) -> Counter:
    """One head's run of one kernel of the backward, on the exact O, LSE and delta."""
    spec = spec_of(d, direction=direction, causal=causal)
    config = config_of(br, TILES[0] if direction == "backward_delta" else bc)
    of, diagonal = head(n, d), 0 if causal else None
    do = head(n, d + 1).q[..., :d].contiguous()
    wide, lse = attention(of.q, of.k, of.v, scale=of.scale, diagonal=diagonal)
    o = wide.to(of.q.dtype)
    delta = (o.float() * do.float()).sum(-1)
    plan = bind(kernel_of(spec, config), spec, config)
    with Counter(kernel=direction) as counter:
        if direction == "backward_delta":
            plan(Delta(o=o, do=do, dlse=None))
        else:
            q, k, v, scale = of.q, of.k, of.v, of.scale
            plan(
                Backward(q=q, k=k, v=v, do=do, lse=lse, delta=delta, scale=scale, diagonal=diagonal)
            )
    return counter


def decode(splits: int, n: int, d: int) -> tuple[Counter, Counter | None]:
    """One token of GROUP query heads over a cache of n keys in `splits` parts; and the kernel that
    merges them, where there is more than one.
    """
    spec = spec_of(d, direction="decode")
    config = config_of(16, 64)
    of = head(n, d, rows=1, heads=GROUP)
    cache = Cache(k=of.k, v=of.v, lengths=torch.tensor([n], dtype=torch.int32))
    plan = bind(kernel_of(spec, config), spec, config)
    with Counter(kernel="decode") as counter:
        parts = plan(Decode(q=of.q, cache=cache, scale=of.scale, sms=1, splits=splits))
    o, lse, merger = parts.o, parts.lse, None
    if not parts.whole:
        merge, config = spec.for_direction("combine"), replace(config, bc=16)
        plan = bind(kernel_of(merge, config), merge, config)
        with Counter(kernel="combine") as merger:
            o, lse = plan(Combine(parts=parts, q=of.q))
    counter.verdict = judge(o, lse, of.q, of.k, of.v, scale=of.scale, diagonal=None)
    return counter, merger
