"""The oracle on a GPU: kernels as rendered, and attention() as served, against float64."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashgen.evaluate import check
from flashgen.evaluate.check_attention import tile_cases
from flashgen.inputs.from_call import check_scale, diagonal_of
from flashgen.kernels.descriptors import takes_descriptor
from flashgen.kernels.launch import device_gpu, launch
from flashgen.kernels.loader import load_kernel
from flashgen.kernels.render import render
from flashgen.reference import attention as reference
from flashgen.reference import cases as reference_cases
from flashgen.reference.cases import CheckCase
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.defaults import default_config
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import CheckResult
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from tests.makers import make_spec
from tests.nasty_cases import nasty_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"
    ),
]

MASKS = ("none", "causal")
ORDINARY = KernelConfig(br=64, bc=32, num_warps=4, num_stages=2)


def checked(spec: AttentionSpec, config: KernelConfig, seed: int = 1) -> CheckResult:
    """The oracle over the nasty shapes of this tile. Skips what this GPU cannot run."""
    reason = why_illegal(spec, config, device_gpu())
    if reason is not None:
        pytest.skip(f"not on this GPU: {reason}")
    cases = (*tile_cases(spec, config), *nasty_cases(config.br, config.bc))
    result = check.check_kernel(
        render(spec, config), spec, config, device="cuda", seed=seed, cases=cases
    )
    assert result.where == "gpu"
    return result


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fa2(dtype: str, head_dim: int, mask: str) -> None:
    result = checked(make_spec(dtype, head_dim, mask), ORDINARY)
    assert result.passed, result.detail


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_float32(head_dim: int, precision: str, mask: str) -> None:
    config = replace(ORDINARY, br=32, bc=32)
    result = checked(make_spec("float32", head_dim, mask, precision=precision), config)
    assert result.passed, result.detail


@pytest.mark.parametrize("mask", MASKS)
def test_head_dim_of_v_may_differ(mask: str) -> None:
    result = checked(make_spec("bfloat16", 192, mask, head_dim_v=128), ORDINARY)
    assert result.passed, result.detail


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("schedule", ["fa2", "s_ahead"])
def test_descriptors(schedule: str, head_dim: int, mask: str) -> None:
    order = "longest_first" if mask == "causal" else "plain"
    config = KernelConfig(
        br=128, bc=64, num_warps=8, num_stages=2, schedule=schedule, loads="descriptor", order=order
    )  # type: ignore[arg-type]
    result = checked(make_spec("bfloat16", head_dim, mask), config)
    assert result.passed, result.detail


@pytest.mark.parametrize("mask", MASKS)
def test_s_ahead_with_pointers(mask: str) -> None:
    result = checked(make_spec("float16", 64, mask), replace(ORDINARY, schedule="s_ahead"))
    assert result.passed, result.detail


@pytest.mark.parametrize("mask", MASKS)
def test_fa1(mask: str) -> None:
    result = checked(make_spec("bfloat16", 64, mask), replace(ORDINARY, schedule="fa1"))
    assert result.passed, result.detail


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("float16", "ieee"), ("bfloat16", "ieee"), ("float32", "ieee"), ("float32", "tf32")],
)
def test_every_default_kernel(dtype: str, precision: str, head_dim: int, mask: str) -> None:
    spec = make_spec(dtype, head_dim, mask, precision=precision)
    result = checked(spec, default_config(spec))
    assert result.passed, result.detail


# As served


def served(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool | str,
    *,
    heads: slice = slice(None),
) -> reference.Comparison:
    """attention() of the shipped package on these tensors; the heads named are compared."""
    from generated.dispatcher import attention

    o, lse = attention(q, k, v, causal=causal, return_lse=True)
    assert o.shape == (*q.shape[:3], v.shape[3])
    scale, diagonal = check_scale(None, q.shape[3]), diagonal_of(causal, q.shape[2], k.shape[2])
    q, k, v, o, lse = (x[:, heads] for x in (q, k, v, o, lse))
    return reference.judge(o, lse, q, k, v, scale=scale, diagonal=diagonal)


SERVED = [
    Problem(batch=2, heads=4, kv_heads=4, seq_q=512, seq_k=512),
    Problem(batch=1, heads=8, kv_heads=2, seq_q=129, seq_k=2049),
    Problem(batch=1, heads=4, kv_heads=1, seq_q=300, seq_k=257),
    Problem(batch=1, heads=2, kv_heads=2, seq_q=1, seq_k=4097),
    Problem(batch=1, heads=1, kv_heads=1, seq_q=130, seq_k=16400),
]
LAYOUTS = ("bhsd", "bshd", "sliced")


@pytest.mark.parametrize(("problem", "layout"), list(itertools.product(SERVED, LAYOUTS)), ids=str)
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_attention(head_dim: int, causal: bool | str, problem: Problem, layout: str) -> None:
    spec = make_spec("bfloat16", head_dim, "causal" if causal else "none")
    q, k, v = reference_cases.make_inputs(
        spec, CheckCase(problem=problem, layout=layout), seed=7, device="cuda"
    )
    verdict = served(q, k, v, causal)
    assert verdict.passed, verdict


def test_unaligned_tensors_are_served() -> None:
    """A base 2 bytes off a 16-byte boundary can have no descriptor: the pointer twin runs."""
    parts = []
    for number in range(3):
        generator = torch.Generator(device="cuda").manual_seed(number)
        flat = torch.randn(1 + 4 * 300 * 128, generator=generator, device="cuda").bfloat16()
        parts.append(flat[1:].view(1, 4, 300, 128))
    assert not takes_descriptor(parts[0])
    verdict = served(*parts, True)
    assert verdict.passed, verdict


def test_scattered_last_dimension_is_copied_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    spec = make_spec("float16", 64)
    problem = Problem(batch=1, heads=2, kv_heads=2, seq_q=65, seq_k=65)
    q, k, v = reference_cases.make_inputs(spec, CheckCase(problem=problem), seed=3, device="cuda")
    k = k.transpose(2, 3).contiguous().transpose(2, 3)
    with caplog.at_level(logging.WARNING, "flashgen.runtime"):
        verdicts = [served(q, k, v, False) for _ in range(2)]
    assert all(verdict.passed for verdict in verdicts), verdicts
    assert sum("copied" in record.message for record in caplog.records) <= 1


@pytest.mark.parametrize(("seq_q", "seq_k"), [(0, 5), (5, 0), (0, 0)])
def test_empty_sequences(seq_q: int, seq_k: int) -> None:
    from generated.dispatcher import attention

    q = torch.randn(2, 3, seq_q, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(2, 3, seq_k, 64, device="cuda", dtype=torch.bfloat16)
    o, lse = attention(q, k, k, causal=True, return_lse=True)
    assert (o.shape, lse.shape) == (q.shape, q.shape[:3])
    assert bool((o == 0).all())
    assert bool((lse == float("-inf")).all())


@pytest.mark.parametrize("causal", [False, True])
def test_offsets_beyond_31_bits(causal: bool) -> None:
    """K and V of 2.3e9 elements each: the last head lies where a 32-bit offset does not reach."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    heads, seq_k = 17, 1 << 20
    generator = torch.Generator(device="cuda").manual_seed(5)

    def draw(seq: int) -> torch.Tensor:
        shape = (1, heads, seq, 128)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    verdict = served(draw(64), draw(seq_k), draw(seq_k), causal, heads=slice(heads - 1, None))
    assert verdict.passed, verdict


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize("schedule", ["fa2", "s_ahead"])
def test_a_kernel_run_twice_agrees_to_the_bit(
    schedule: str, num_warps: int, head_dim: int, mask: str, tmp_path: Path
) -> None:
    """Products in tensor memory of 4 and 8 warps, of which Triton had some that raced
    (flashgen/compile/known_bugs.py).
    """
    spec = make_spec("bfloat16", head_dim, mask)
    rows, keys = 16 * num_warps, 32 if head_dim == 256 else 64
    config = KernelConfig(
        br=rows, bc=keys, num_warps=num_warps, num_stages=2, schedule=schedule, loads="descriptor"
    )
    if reason := why_illegal(spec, config, device_gpu()):
        pytest.skip(f"not on this GPU: {reason}")
    shape = (2, 8, 2000, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    rendered = render(spec, config)
    path = tmp_path / f"{rendered.name}.py"
    path.write_text(rendered.source)
    kernel, scale = (
        load_kernel(path, rendered.text_name, rendered.name),
        check_scale(None, head_dim),
    )
    diagonal = 0 if mask == "causal" else None
    first, *others = (
        launch(kernel, spec, config, q, k, v, scale=scale, diagonal=diagonal) for _ in range(20)
    )
    for again in others:
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_two_runs_agree_to_the_bit() -> None:
    from generated.dispatcher import attention

    q = torch.randn(2, 4, 1000, 128, device="cuda", dtype=torch.bfloat16)
    first, second = (attention(q, q, q, causal=True, return_lse=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
