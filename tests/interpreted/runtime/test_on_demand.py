"""Kernels rendered when they are first asked for, and kept in the user's cache."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.errors import ToolchainError
from flashgen.runtime import Dispatcher
from tests.serving import serve

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Q = torch.randn(1, 1, 5, 16, generator=torch.Generator().manual_seed(0))
BIAS = torch.zeros(5, 5)


def ask(dispatcher: Dispatcher) -> torch.Tensor:
    """A combination: each feature alone has a kernel in generated/."""
    return dispatcher.attention(Q, Q, Q, bias=BIAS, softcap=1e4)


def rendered(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_a_kernel_is_rendered_once_and_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flashgen.runtime")
    for _ in range(2):  # the second dispatcher finds the file
        found = ask(serve(monkeypatch, tmp_path))
        (file,) = rendered(tmp_path)
        before = file.stat().st_mtime_ns
    assert file.stat().st_mtime_ns == before
    said = [r.getMessage() for r in caplog.records if "rendered to" in r.getMessage()]
    assert len(said) == 1
    assert str(file) in said[0]
    torch.testing.assert_close(
        found, torch.nn.functional.scaled_dot_product_attention(Q, Q, Q), rtol=1e-5, atol=1e-5
    )


def test_a_file_that_is_not_whole_is_written_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ask(serve(monkeypatch, tmp_path))
    (file,) = rendered(tmp_path)
    text = file.read_text()
    file.write_text(text[:100])
    ask(serve(monkeypatch, tmp_path))
    assert file.read_text() == text
    assert rendered(tmp_path) == [file]


def test_without_jinja2_the_command_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dispatcher = serve(monkeypatch, tmp_path)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "flashgen.kernels.render", raising=False)
    monkeypatch.delattr("flashgen.kernels.render", raising=False)
    with pytest.raises(
        ToolchainError,
        match=r"pip install 'jinja2>=3.1'.*generate --feature bias --feature softcap$",
    ):
        ask(dispatcher)
    assert rendered(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ToolchainError, match="XDG_CACHE_HOME"):
        ask(serve(monkeypatch, blocked))


def test_each_feature_alone_needs_no_jinja2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dispatcher = serve(monkeypatch, tmp_path)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "flashgen.kernels.render", raising=False)
    monkeypatch.delattr("flashgen.kernels.render", raising=False)
    asked: list[dict[str, Any]] = [
        {"bias": BIAS},
        {"bias": BIAS == 0},
        {"alibi_slopes": torch.ones(1)},
        {"dropout_p": 0.5},
        {"window": (1, 1)},
        {"softcap": 1.0},
        {"sinks": torch.zeros(1)},
    ]
    for features in asked:
        q = Q.clone().requires_grad_()
        dispatcher.attention(q, Q, Q, **features).sum().backward()
        assert torch.isfinite(q.grad).all()
    table = torch.zeros(1, 2, dtype=torch.int32)
    pool, length = Q.transpose(1, 2).clone(), torch.full((1,), 4, dtype=torch.int32)
    dispatcher.decode(Q[:, :, :1], pool[:, :4], pool[:, :4], lengths=length, block_table=table)
    dispatcher.decode(Q[:, :, :1], Q, Q, lengths=length)
    assert rendered(tmp_path) == []


def test_explain_says_that_it_will_be_rendered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dispatcher = serve(monkeypatch, tmp_path)
    text = str(dispatcher.explain(Q, Q, Q, bias=BIAS, softcap=30.0))
    assert "rendered when first asked for" in text
    assert rendered(tmp_path) == []
    assert "bwd_dkv" in str(dispatcher.explain(Q, Q, Q, direction="backward_dkv"))
