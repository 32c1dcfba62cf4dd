"""examples/gpt2/train.py at a size a CPU can train: the curves of all three attentions are one."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.serving import record_directions, serve

pytest.importorskip("transformers")

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "gpt2" / "train.py"
TINY = "--layers 2 --heads 2 --width 32 --vocabulary 256 --length 32 --batch 1 --rate 3e-3"

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow("trains three models: three seconds")
def test_the_three_loss_curves_agree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched = record_directions(monkeypatch)
    serve(monkeypatch)
    spec = importlib.util.spec_from_file_location("train_gpt2", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_gpt2", script)
    spec.loader.exec_module(script)
    file, drawing = tmp_path / "new" / "runs.json", tmp_path / "drawn" / "runs.png"
    options = f"{TINY} --steps 30 --device cpu --attention eager sdpa flashgen"
    script.main([*options.split(), "--json", str(file), "--plot", str(drawing)])
    record = json.loads(file.read_text())
    assert record["device"] == "cpu"
    assert record["options"]["layers"] == 2
    runs = {run["attention"]: run for run in record["runs"]}
    eager = runs["eager"]["losses"]
    assert len(eager) == 30
    assert eager[-1] < eager[0] - 1.0  # it learns
    for name in ("sdpa", "flashgen"):
        assert max(abs(a - b) for a, b in zip(runs[name]["losses"], eager, strict=True)) < 1e-3
        assert abs(runs[name]["validation_loss"] - runs["eager"]["validation_loss"]) < 1e-3
    assert launched.count("backward_dkv") == launched.count("backward_dq") == 2 * 30
    assert drawing.read_bytes().startswith(b"\x89PNG")
