"""Lengths never specialize: one compilation per alignment class of the strides, and no more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from flashgen.inputs.features import Features
from flashgen.inputs.packed import from_bounds
from flashgen.kernels import launch, launch_backward, loader
from flashgen.kernels.render import render
from flashgen.reference import gradients
from flashgen.reference.cases import CheckCase
from flashgen.spec.problem import Problem
from tests.makers import each, make_config, make_spec

LENGTHS = (1, 15, 16, 17, 1000)


class CompileOnlyDriver:
    """Stands for an H200: Triton compiles for it and is never asked to launch."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class CompileOnly:
    """A kernel that is compiled, not launched, when it is called."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.kernel.warmup(*args, grid=grid, **options)

    @property
    def compilations(self) -> int:
        return len(self.kernel.device_caches[0][0])


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", CompileOnlyDriver())


@pytest.mark.parametrize(
    ("head_dim", "loads", "classes"),
    [
        (64, "pointer", 1),  # every stride of a contiguous tensor is a multiple of 16
        (40, "pointer", 2),  # head and batch strides are one for even lengths only
        (64, "descriptor", 1),
    ],
)
def test_compilations_over_lengths(
    h200: None, tmp_path: Path, head_dim: int, loads: str, classes: int
) -> None:
    spec, config = make_spec(head_dim=head_dim, mask="causal"), make_config(loads=loads)
    rendered = render(spec, config)
    path = tmp_path / f"{rendered.name}.py"
    path.write_text(rendered.source)
    kernel = CompileOnly(loader.load_kernel(path, rendered.text_name, rendered.name))
    for seq in LENGTHS:
        q, k, v = (torch.zeros((1, 2, seq, head_dim), dtype=torch.bfloat16) for _ in range(3))
        launch.launch(kernel, spec, config, q, k, v, scale=0.1, diagonal=0)
    assert kernel.compilations == classes


@pytest.mark.parametrize("paged", [False, True])
def test_compilations_over_bounds(h200: None, tmp_path: Path, paged: bool) -> None:
    """One whether the ends are a view behind the first element, or a tensor of their own."""
    spec, config = make_spec(head_dim=64, mask="causal", varlen=True, paged=paged), make_config()
    rendered = render(spec, config)
    path = tmp_path / f"{rendered.name}.py"
    path.write_text(rendered.source)
    kernel = CompileOnly(loader.load_kernel(path, rendered.text_name, rendered.name))
    for seq in LENGTHS:
        q, k, v = (torch.zeros((1, seq, 2, 64)).bfloat16().transpose(1, 2) for _ in range(3))
        cu, used = torch.tensor([0, seq, seq]).int(), torch.tensor([1, 0]).int()
        table = torch.zeros((2, seq), dtype=torch.int32) if paged else None
        for seqused in (None, used):
            packed = from_bounds(
                cu, cu, seq, seq, seqused_q=seqused, seqused_k=seqused, block_table=table,
                page_size=16,
            )  # fmt: skip
            launch.launch(
                kernel, spec, config, q, k, v, scale=0.1, diagonal=0,
                features=Features(sequences=packed),
            )  # fmt: skip
    assert kernel.compilations == 1


@pytest.mark.parametrize(
    ("direction", "features"),
    each(
        [
            ("backward_dkv", {"dropout": True, "alibi": True}),
            ("backward_delta", {}),
            ("backward_dq", {}),
            ("backward_dq", {"window": True, "softcap": True}),
            ("backward_dkv", {"window": True}),
            ("backward_dbias", {"bias": "additive"}),
        ],
        3,
    ),
)
def test_backward_compilations_over_lengths(
    h200: None, tmp_path: Path, direction: Any, features: dict[str, Any]
) -> None:
    """One for each class of the bias's strides: here they are multiples of 16."""
    spec = make_spec(head_dim=16, mask="causal", **features).for_direction(direction)
    delta = direction == "backward_delta"
    config = make_config(16, 16, num_stages=1 if delta else 2)
    rendered = render(spec, config)
    path = tmp_path / f"{rendered.name}.py"
    path.write_text(rendered.source)
    kernel = CompileOnly(loader.load_kernel(path, rendered.text_name, rendered.name))
    for seq in LENGTHS:
        problem = Problem(batch=1, heads=2, kv_heads=1, seq_q=seq, seq_k=seq)
        inputs = gradients.make_inputs(spec, CheckCase(problem=problem), 0, "cpu")
        rows = torch.zeros(1, 2, seq)
        if delta:
            do = inputs.do.contiguous()
            launch.bind(kernel, spec, config)(launch_backward.Delta(o=do, do=do, dlse=None))
            continue
        bias = torch.zeros(1, 2, seq, 1024, dtype=torch.bfloat16)[..., :seq]
        call = launch_backward.Backward(
            q=inputs.q, k=inputs.k, v=inputs.v, do=inputs.do.contiguous(), lse=rows, delta=rows,
            scale=0.1, diagonal=0, features=replace(inputs.features, bias=bias if features.get("bias") else None),
        )  # fmt: skip
        launch.bind(kernel, spec, config)(call)
    assert kernel.compilations == 1
