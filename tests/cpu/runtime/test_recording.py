"""recording(): what a program computes becomes a workload that tune takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flashgen import attention, attention_varlen, decode
from flashgen.runtime.recording import recording
from flashgen.tune import workloads


def test_calls_become_a_workload(tmp_path: Path) -> None:
    file = tmp_path / "workload.yaml"
    q = torch.randn(1, 4, 40, 64, dtype=torch.bfloat16)
    k = torch.randn(1, 2, 40, 64, dtype=torch.bfloat16)
    long = torch.randn(1, 4, 1200, 64, dtype=torch.bfloat16)
    grads = torch.randn(1, 2, 33, 32, requires_grad=True)
    tokens = torch.randn(9, 2, 32)
    bounds = torch.tensor([0, 3, 9], dtype=torch.int32)
    cache = torch.randn(1, 2, 128, 64, dtype=torch.bfloat16)
    with recording(file, "mine") as recorder:
        for _ in range(3):  # the third is a kept call otherwise
            attention(q, k, k, causal=True)
        attention(long, long, long, causal=True)
        attention(grads, grads, grads, softcap=5.0).sum().backward()
        attention_varlen(tokens, tokens, tokens, bounds, bounds, 6, 6)
        decode(q[:, :, :1], cache, cache)
        scaled_dot_product_attention(q, q, q, is_causal=True)
    assert recorder.count == 8
    assert recorder.others == {}
    found = workloads.load(file)
    assert found.name == "mine"
    named = {
        (p.spec.name, p.problem.seq_k, p.problem.heads // p.problem.kv_heads) for p in found.pieces
    }
    assert named == {
        ("fwd_bf16_d64_causal", 40, 1),
        ("fwd_bf16_d64_causal", 1200, 1),
        ("fwd_fp32_d32_softcap", 33, 1),
        ("bwd_delta_fp32_d32", 33, 1),
        ("bwd_dkv_fp32_d32_softcap", 33, 1),
        ("bwd_dq_fp32_d32_softcap", 33, 1),
        ("bwd_fused_fp32_d32_softcap", 33, 1),
        ("fwd_fp32_d32_varlen", 6, 1),
        ("decode_bf16_d64", 128, 2),
    }
    heaviest = found.pieces[0]
    assert (heaviest.spec.name, heaviest.weight) == ("fwd_bf16_d64_causal", 1200.0)


def test_a_layer_of_torch_is_recorded(tmp_path: Path) -> None:
    layer = torch.nn.MultiheadAttention(64, 2, batch_first=True)
    x = torch.randn(1, 40, 64)
    with recording(tmp_path / "workload.yaml") as recorder:
        layer(x, x, x, need_weights=False)
    assert recorder.count == 1
    assert "head_dim: 32" in recorder.text("mine")


def test_what_no_kernel_takes_is_counted_and_the_program_goes_on(tmp_path: Path) -> None:
    odd = torch.randn(1, 2, 8, 20)
    file = tmp_path / "workload.yaml"
    with (
        pytest.warns(UserWarning, match="of 1 calls 1 cannot be: the head_dim"),
        recording(file) as recorder,
    ):
        scaled_dot_product_attention(odd, odd, odd)
    assert (recorder.count, recorder.others.total()) == (0, 1)
    q = torch.randn(1, 2, 8, 64)
    attention(q, q, q)
    assert recorder.count == 0  # it has ended


def test_what_an_interrupted_program_called_is_kept(tmp_path: Path) -> None:
    q = torch.randn(1, 2, 8, 64, dtype=torch.bfloat16)
    file = tmp_path / "workload.yaml"

    def program() -> None:
        attention(q, q, q, causal=True)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), recording(file):
        program()
    assert workloads.load(file).pieces[0].spec.name == "fwd_bf16_d64_causal"


def test_a_program_without_attention_is_told(tmp_path: Path) -> None:
    file = tmp_path / "workload.yaml"
    with (
        pytest.warns(UserWarning, match="no attention was recorded"),
        recording(file),
    ):
        pass
    assert not file.exists()
