"""Every backward kernel, and the features, against float64: one by one, and as a pass."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.evaluate import inputs
from flashgen.evaluate.check import compared, trial_of
from flashgen.inputs.features import PLAIN, Features
from flashgen.inputs.from_call import from_tensors
from flashgen.kernels.launch import Kernel, bind, launch
from flashgen.kernels.launch_backward import Backward, Delta
from flashgen.kernels.loader import load_kernel
from flashgen.kernels.render import HEADER_LINES, render
from flashgen.reference import cases as reference_cases
from flashgen.reference import gradients
from flashgen.reference.cases import CheckCase
from flashgen.runtime.eager import attention as eager
from flashgen.runtime.eager.visibility import keep_mask
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.defaults import default_config, default_spec
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from tests.makers import make_config, make_spec
from tests.nasty_cases import nasty_cases
from tests.proving import alternating, prove

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # log2(0) of rows that see nothing

DTYPES = ("float16", "bfloat16", "float32", "tf32")
MASKS = ("none", "causal")
GRADIENTS = ("backward_dkv", "backward_dq")
EVERYTHING: dict[str, Any] = {"bias": "additive", "alibi": True, "dropout": True}


def backward_config(direction: str, br: int, bc: int, **fields: Any) -> KernelConfig:
    if direction == "backward_delta":
        return make_config(br, 16, num_stages=1, **fields)
    return make_config(br, bc, **fields)


def spec_of(dtype: str, dims: tuple[int, int], mask: str, direction: Any) -> AttentionSpec:
    precision = {"precision": "tf32"} if dtype == "tf32" else {}
    name = "float32" if precision else dtype
    spec = make_spec(name, dims[0], mask, head_dim_v=dims[1], **precision)
    return spec.for_direction(direction)


def case(heads: tuple[int, int], seq: tuple[int, int], **options: str) -> CheckCase:
    problem = Problem(batch=2, heads=heads[0], kv_heads=heads[1], seq_q=seq[0], seq_k=seq[1])
    return CheckCase(problem=problem, **options)


FUSED = pytest.mark.slow("make test has it by descriptors")


@pytest.mark.parametrize("direction", GRADIENTS)
@pytest.mark.parametrize(("dtype", "mask"), alternating(DTYPES, MASKS))
def test_every_dtype(dtype: str, direction: Any, mask: str, seed: int) -> None:
    prove(spec_of(dtype, (32, 32), mask, direction), make_config(32, 16), seed)


@pytest.mark.parametrize(("direction", "mask"), alternating([*GRADIENTS, "backward_fused"], MASKS))
def test_descriptors(direction: Any, mask: str, seed: int) -> None:
    spec = make_spec("bfloat16", 40, mask, head_dim_v=24).for_direction(direction)
    prove(spec, make_config(16, 32, loads="descriptor"), seed)


@pytest.mark.parametrize(("loads", "mask"), alternating(["pointer", "descriptor"], MASKS))
@pytest.mark.parametrize("direction", [*GRADIENTS, "backward_fused"])
def test_s_ahead(direction: Any, mask: str, loads: str, seed: int) -> None:
    spec = make_spec("bfloat16", 40, mask, head_dim_v=24).for_direction(direction)
    prove(spec, make_config(16, 32, schedule="s_ahead", loads=loads), seed)


@pytest.mark.parametrize("direction", GRADIENTS)
def test_s_ahead_is_fa2_in_another_order(direction: Any) -> None:
    """The same statements, dP before P: so the same bits."""
    spec, texts = make_spec("float16", 64, "causal").for_direction(direction), []
    for way in ("fa2", "s_ahead"):
        rendered = render(spec, make_config(64, 64, schedule=way))  # type: ignore[arg-type]
        text = rendered.source.replace(rendered.text_name, "kernel")
        texts.append([line.strip() for line in text.splitlines()[HEADER_LINES:] if line.strip()])
    fa2, ahead = texts
    assert sorted(fa2) == sorted(ahead)
    of_a_tile = [line for line in ahead if " = tl.dot(" in line or " = tl.exp2(" in line][:3]
    assert [line.split()[0].removesuffix("_t") for line in of_a_tile] == ["s", "dp", "p"]


@pytest.mark.parametrize("mask", [pytest.param("none", marks=FUSED), "causal"])
def test_fused(mask: str, seed: int) -> None:
    spec = make_spec("float16", 40, mask).for_direction("backward_fused")
    prove(spec, make_config(32, 16), seed)


@pytest.mark.parametrize(("dim", "dtype"), alternating([16, 40, 256], ["bfloat16", "float32"]))
def test_delta(dim: int, dtype: str, seed: int) -> None:
    spec = make_spec(dtype, dim).for_direction("backward_delta")
    prove(spec, make_config(32, 16, num_stages=1), seed)


# Each head dim with another dtype, mask, group of heads, lengths and layout.
VARIED = [
    ("float16", (16, 16), "none", case((8, 1), (1, 37))),
    ("tf32", (24, 24), "causal", case((2, 2), (1, 1))),
    ("bfloat16", (40, 40), "causal", case((4, 2), (37, 51), layout="bshd")),
    ("float32", (64, 64), "none", case((6, 3), (33, 1), layout="sliced")),
    ("float32", (80, 80), "causal", case((3, 1), (50, 31))),
    ("float16", (96, 96), "causal", case((3, 3), (16, 32), layout="bshd")),
    ("bfloat16", (128, 64), "none", case((6, 2), (37, 51), layout="sliced")),
    ("float16", (192, 128), "causal", case((2, 1), (31, 17), alignment="top_left")),
    ("bfloat16", (256, 256), "causal", case((4, 2), (37, 51), layout="bshd")),
]


@pytest.mark.parametrize(("direction", "varied"), alternating(GRADIENTS, VARIED), ids=str)
def test_head_dims(
    direction: Any, varied: tuple[str, tuple[int, int], str, CheckCase], seed: int
) -> None:
    dtype, dims, mask, given = varied
    prove(spec_of(dtype, dims, mask, direction), make_config(32, 16), seed, [given])


@pytest.mark.slow("make test proves a sample of it")
@pytest.mark.parametrize("direction", GRADIENTS)
@pytest.mark.parametrize(
    "dims",
    [(d, d) for d in (16, 24, 32, 40, 64, 80, 96, 128, 192, 256)]
    + [(128, 64), (64, 128), (192, 128), (16, 256)],
    ids=str,
)
def test_every_combination(dims: tuple[int, int], direction: Any, seed: int) -> None:
    """Every dtype, mask and head dim: groups of 1, 2, 3 and 8 query heads, Sq below, at and above
    Sk, lengths of 1, of a tile and ragged, both alignments, all layouts.
    """
    cases = [
        case((2, 2), (1, 1)),
        case((8, 1), (1, 37), layout="bshd"),
        case((4, 2), (33, 1)),
        case((6, 3), (31, 50), alignment="top_left", layout="sliced"),
        case((3, 1), (50, 31), layout="bshd"),
        case((1, 1), (32, 32)),
    ]
    for dtype, mask in product(DTYPES, MASKS):
        prove(spec_of(dtype, dims, mask, direction), make_config(32, 16), seed, cases)


@pytest.mark.parametrize("direction", ["backward_delta", *GRADIENTS, "backward_dbias"])
def test_default_kernels_take_the_true_head_dims(direction: Any, seed: int, tmp_path: Path) -> None:
    bias: Any = {"bias": "additive"} if direction == "backward_dbias" else {}
    asked = make_spec("float16", 40, "causal", head_dim_v=56, **bias).for_direction(direction)
    spec, config = default_spec(asked), default_config(asked)
    kernel = kernel_of(spec, config, tmp_path)
    for number, given in enumerate(nasty_cases(32, 16)[-3:]):
        # Inputs are drawn for the spec that is asked; the kernel is that of the padded one.
        verdict = compared(bind(kernel, asked, config), trial_of(asked, given, seed + number))
        assert verdict.passed, (given, seed + number, verdict)


@pytest.mark.parametrize("wide", reference_cases.BIAS_SHAPES)
def test_gradient_of_a_bias_broadcast_in_any_dimension(wide: str) -> None:
    """The shape follows from the seed; 64 rows and 32 keys are what a tile of partial sums has."""
    shape = reference_cases.BIAS_SHAPES.index(wide)
    for mask, problem in (
        ("none", Problem(batch=2, heads=4, kv_heads=2, seq_q=37, seq_k=51)),
        ("causal", Problem(batch=1, heads=2, kv_heads=1, seq_q=64, seq_k=32)),
    ):
        spec = make_spec("float16", 16, mask, bias="additive").for_direction("backward_dbias")
        seed = 7 * random.SystemRandom().randrange(1 << 20) + shape
        prove(spec, make_config(64, 32), seed, [CheckCase(problem=problem, layout="sliced")])


def test_gradient_of_a_bias_with_all_features(seed: int) -> None:
    spec = make_spec("float32", 24, "causal", **EVERYTHING).for_direction("backward_dbias")
    prove(spec, make_config(16, 32), seed)


def kernel_of(spec: AttentionSpec, config: KernelConfig, folder: Path) -> Kernel:
    rendered = render(spec, config)
    path = folder / f"{rendered.name}.py"
    path.write_text(rendered.source)
    return load_kernel(path, rendered.text_name, rendered.name)


class Pass:
    """A forward and a backward, each kernel fed by those before it, as a training step runs them."""

    def __init__(self, folder: Path, spec: AttentionSpec, br: int = 32, bc: int = 16) -> None:
        self.folder, self.spec, self.br, self.bc = folder, spec, br, bc

    def bound(self, direction: Any) -> Any:
        spec = self.spec.for_direction(direction)
        config = backward_config(direction, self.br, self.bc)
        return bind(kernel_of(spec, config, self.folder), spec, config)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> tuple[Tensor, Tensor]:
        config = make_config(self.br, self.bc)
        kernel = kernel_of(self.spec, config, self.folder)
        return launch(kernel, self.spec, config, q, k, v, **call)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor | None, **call: Any
    ) -> dict[str, Tensor]:
        o, lse = self.forward(q, k, v, **call)
        delta = self.bound("backward_delta")(Delta(o=o, do=do, dlse=dlse))
        arguments = Backward(q=q, k=k, v=v, do=do, lse=lse, delta=delta, **call)
        found = {}
        for direction in GRADIENTS:
            results = self.bound(direction)(arguments)
            found |= dict(zip(gradients.OUTPUTS[direction], results, strict=True))
        return found


def draw(heads: int, kv: int, sq: int, sk: int, dim: int = 32, batch: int = 2) -> list[Tensor]:
    shapes = [(heads, sq, dim), (kv, sk, dim), (kv, sk, dim), (heads, sq, dim)]
    return [torch.randn((batch, *shape)) for shape in shapes]


@pytest.mark.parametrize(
    ("causal", "scale"), [(False, 0.2), (True, -0.2), (True, 0.2), ("top_left", 0.0)]
)
def test_a_pass_is_what_autograd_says(causal: Any, scale: float, tmp_path: Path) -> None:
    """Rows that see nothing (bottom-right, Sq > Sk) among them: their gradients are 0."""
    q, k, v, do = draw(4, 2, 45, 37)
    dlse = torch.randn(2, 4, 45)
    spec, _ = from_tensors(q, k, v, causal=causal)
    diagonal = None if causal is False else 0 if causal == "top_left" else 37 - 45
    found = Pass(tmp_path, spec)(q, k, v, do, dlse, scale=scale, diagonal=diagonal)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    o, lse = eager.attention(*leaves, scale=scale, diagonal=diagonal)
    seen = lse > float("-inf")
    loss = (o * do.double()).sum() + (lse[seen] * dlse.double()[seen]).sum()
    expected = torch.autograd.grad(loss, leaves)
    for name, gradient in zip(("dq", "dk", "dv"), expected, strict=True):
        torch.testing.assert_close(found[name].double(), gradient, rtol=2e-5, atol=2e-5)
    assert (found["dq"][~seen] == 0).all()


def test_gradients_come_in_any_strides(tmp_path: Path) -> None:
    """dO of a sum is one element expanded; dLSE too; both may be permuted."""
    q, k, v, do = draw(2, 2, 33, 20)
    run = Pass(tmp_path, make_spec("float32", 32))
    call: dict[str, Any] = {"scale": 0.2, "diagonal": None}
    ones, row = torch.ones(()).expand(do.shape), torch.ones(()).expand(2, 2, 33)
    found = run(q, k, v, ones, row, **call)
    expected = run(q, k, v, torch.ones(do.shape), torch.ones(2, 2, 33), **call)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    permuted = do.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert permuted.stride(3) != 1
    found = run(q, k, v, permuted, None, **call)
    expected = run(q, k, v, do, torch.zeros(2, 2, 33), **call)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_results_lie_in_memory_as_the_inputs_do(tmp_path: Path) -> None:
    q, k, v, do = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw(4, 2, 20, 20))
    found = Pass(tmp_path, make_spec("float32", 32))(q, k, v, do, None, scale=0.2, diagonal=None)
    for name, tensor in (("dq", q), ("dk", k), ("dv", v)):
        assert found[name].stride() == tensor.stride()


@pytest.mark.parametrize(("batch", "sq", "sk"), [(2, 0, 5), (2, 5, 0), (0, 5, 5)])
def test_empty_lengths(batch: int, sq: int, sk: int, tmp_path: Path) -> None:
    q, k, v, do = draw(2, 1, sq, sk, batch=batch)
    run = Pass(tmp_path, make_spec("float32", 32))
    found = run(q, k, v, do, None, scale=0.2, diagonal=None)
    for name, tensor in (("dq", q), ("dk", k), ("dv", v)):
        assert found[name].shape == tensor.shape
        assert (found[name] == 0).all()
    bias = torch.zeros(1, 1, sq, sk)
    spec = make_spec("float32", 32, bias="additive")
    call = Backward(
        q=q, k=k, v=v, do=do, lse=torch.zeros(batch, 2, sq), delta=torch.zeros(batch, 2, sq),
        scale=0.2, diagonal=None, features=Features(bias=bias),
    )  # fmt: skip
    (dbias,) = Pass(tmp_path, spec).bound("backward_dbias")(call)
    assert dbias.shape == bias.shape
    assert (dbias == 0).all()


def test_a_bias_of_the_most_negative_number_is_a_mask(tmp_path: Path) -> None:
    q, k, v, do = draw(2, 2, 20, 24)
    hidden = torch.rand(1, 1, 20, 24) < 0.4
    hidden[..., 3, :] = True
    least = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    results = []
    for bias in (least, ~hidden):
        features = Features(bias=bias)
        spec, _ = from_tensors(q, k, v, causal=False, features=features)
        run = Pass(tmp_path, spec)
        call: dict[str, Any] = {"scale": 0.2, "diagonal": None, "features": features}
        results.append([*run.forward(q, k, v, **call), *run(q, k, v, do, None, **call).values()])
    assert (results[0][0][:, :, 3] == 0).all()
    for added, boolean in zip(*results, strict=True):
        torch.testing.assert_close(added, boolean, rtol=1e-5, atol=1e-6)


def dropped(p: float, seed: int, offset: int) -> Features:
    return Features(dropout_p=p, rng=torch.tensor([seed, offset]))


@pytest.mark.parametrize(
    ("drawn", "tile"),
    alternating([(0, 0), (-3, 2**40 + 4), (2**62 + 9, 5)], [(16, 64), (64, 16), (32, 32)]),
)
def test_the_mask_depends_neither_on_the_tile_nor_on_the_kernel(
    drawn: tuple[int, int], tile: tuple[int, int], tmp_path: Path
) -> None:
    """With scores of 0 and V the identity, O is the mask; with dO the identity, dV its transpose."""
    (seed, offset), (br, bc) = drawn, tile
    size = 48
    q, k, _, _ = draw(2, 2, size, size, dim=size)
    identity = torch.eye(size).expand(2, 2, size, size).contiguous()
    features = dropped(0.3, seed, offset)
    spec, _ = from_tensors(q, k, identity, causal=False, features=features)
    run, call = Pass(tmp_path, spec, br, bc), {"scale": 0.0, "diagonal": None, "features": features}
    o, lse = run.forward(q, k, identity, **call)  # type: ignore[arg-type]
    kept = keep_mask(features, 2, 2, size, size)
    assert torch.equal(o > 0, kept)
    torch.testing.assert_close(lse, torch.full(lse.shape, float(size)).log())
    arguments = Backward(
        q=q, k=k, v=identity, do=identity, lse=lse, delta=torch.zeros_like(lse),
        scale=0.0, diagonal=None, features=features,
    )  # fmt: skip
    _, dv = run.bound("backward_dkv")(arguments)
    assert torch.equal(dv.transpose(-1, -2) > 0, kept)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropping_nothing_and_all(p: float, tmp_path: Path) -> None:
    q, k, v, do = draw(2, 2, 20, 20)
    call: dict[str, Any] = {"scale": 0.2, "diagonal": None}
    run = Pass(tmp_path, make_spec("float32", 32, dropout=True))
    found = run(q, k, v, do, None, features=dropped(p, 1, 2), **call)
    plain = Pass(tmp_path, make_spec("float32", 32))(q, k, v, do, None, **call)
    for name, gradient in found.items():
        expected = plain[name] if p == 0.0 else torch.zeros_like(gradient)
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


def test_a_new_offset_is_read_from_memory(tmp_path: Path) -> None:
    """As a CUDA graph needs it: the same launch, other numbers."""
    q, k, v, _ = draw(2, 2, 40, 40)
    features = dropped(0.5, 1, 2)
    run = Pass(tmp_path, make_spec("float32", 32, dropout=True))
    call: dict[str, Any] = {"scale": 0.2, "diagonal": None, "features": features}
    first, _ = run.forward(q, k, v, **call)
    assert features.rng is not None
    features.rng.add_(4)
    second, _ = run.forward(q, k, v, **call)
    assert not torch.equal(first, second)
    expected, _ = eager.attention(q, k, v, **call)
    torch.testing.assert_close(second, expected, rtol=1e-5, atol=1e-5)


def test_no_feature_is_the_plain_kernel() -> None:
    assert PLAIN.bias is PLAIN.slopes is PLAIN.rng is None
    q, k, v, _ = draw(2, 2, 4, 4)
    assert from_tensors(q, k, v, causal=True)[0] == make_spec("float32", 32, "causal")


@pytest.mark.parametrize("features", [{}, EVERYTHING], ids=["plain", "features"])
def test_what_is_measured_is_a_backward_of_real_probabilities(
    features: dict[str, Any], tmp_path: Path
) -> None:
    forward = make_spec("bfloat16", 32, "causal", **features)
    problem = Problem(batch=1, heads=2, kv_heads=2, seq_q=40, seq_k=40)
    o, call = inputs.make_backward(forward, problem, 3, "cpu", tmp_path)
    exact, lse = eager.attention(
        call.q, call.k, call.v, scale=call.scale, diagonal=call.diagonal, features=call.features
    )
    torch.testing.assert_close(call.lse, lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(o.float(), exact, rtol=2e-2, atol=2e-2)
    for direction in ("backward_delta", "backward_dq"):
        spec = forward.for_direction(direction)  # type: ignore[arg-type]
        config = backward_config(direction, 16, 16)
        given = Delta(o=o, do=call.do, dlse=None) if direction == "backward_delta" else call
        kernel = kernel_of(spec, config, tmp_path)
        results: Any = inputs.run_of(kernel, spec, config, given, tmp_path)()
        assert torch.isfinite(results if direction == "backward_delta" else results[0]).all()
