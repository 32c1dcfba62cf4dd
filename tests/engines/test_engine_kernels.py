"""examples/engine_kernels with the kernels of vLLM 0.33.0 and SGLang 0.5.23: interpreted, counted, compiled, patched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine_examples import FOLDER, engines, launches

pytest.importorskip("vllm", reason="needs vLLM's source: make -f tests/sessions.mk test-engines")
pytest.importorskip(
    "sglang", reason="needs SGLang's source: make -f tests/sessions.mk test-engines"
)

LLAMA = {"heads": 32, "kv_heads": 8, "dim": 128}
OTHERS = {
    "vllm-prefill": {"BLOCK_M": 64, "TILE_SIZE": 64},
    "vllm-decode": {"TILE_SIZE": 64},
    "sglang-decode": {"BLOCK_N": 64},
    "sglang-prefill": {"BLOCK_M": 64, "BLOCK_N": 128},
}
OWN = {
    "vllm-prefill": {"BLOCK_M": 16, "TILE_SIZE": 32},
    "vllm-decode": {"TILE_SIZE": 16},
    "sglang-decode": {"BLOCK_N": 32},
    "sglang-prefill": {"BLOCK_M": 128, "BLOCK_N": 128},
}
"""What the engines choose on an H200."""


def point_of(name: str) -> dict[str, int]:
    return OTHERS[name] | {"num_warps": 8, "num_stages": 2}


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", torch.cuda.get_device_capability)


@pytest.mark.parametrize("name", OTHERS)
def test_a_tile_is_right_and_does_the_trips_that_are_estimated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    from flashgen.kernels.interpreter import prepare

    prepare()
    kernel, dots = engines.KERNELS[name], []
    dot = InterpreterBuilder.create_dot
    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda *args: dots.append(0) or dot(*args)
    )
    given = engines.inputs(kernel.check, filled=True)
    for point, tile in ((None, OWN[name]), (point_of(name), OTHERS[name])):
        dots.clear()
        recorder, out = launches.launched(
            kernel, point, kernel.check, capability=(9, 0), arch=None, given=given
        )
        assert {axis: recorder.numbers[axis] for axis in tile} == tile
        assert launches.judged(out, kernel.check, given).badness <= launches.ACCEPTED
        assert len(dots) == 2 * sum(kernel.trips(recorder.numbers, kernel.check))


@pytest.mark.parametrize("name", OTHERS)
def test_the_engine_keeps_its_choice_for_other_layers_and_gpus(name: str) -> None:
    kernel, point = engines.KERNELS[name], point_of(name)
    text = launches.installed(kernel.module).read_text()
    for work, capability in (
        (replace(kernel.check, dim=64), (9, 0)),
        (kernel.check, (8, 0)),
        (replace(kernel.check, heads=16), (9, 0)),
    ):
        if name == "sglang-prefill" and work.heads == 16:
            continue  # its tiles hold rows of one head
        values = launches.choice(point, kernel.check, (9, 0), "tuned")
        module = launches.module_of(kernel, launches.patched(kernel, text, values), capability)
        with launches.recorded(kernel, module, None) as recorder:
            recorder.kernel = Silent(recorder.kernel)
            kernel.call(module, work, engines.inputs(work, filled=False))
        tile = {axis: recorder.numbers[axis] for axis in OWN[name]}
        before = (
            dict.fromkeys(tile, 64)
            if name == "sglang-prefill" and capability < (9, 0)
            else OWN[name]
        )
        assert tile == before


class Silent:
    """A kernel that launches nothing."""

    def __init__(self, kernel: object) -> None:
        self.arg_names = kernel.arg_names  # type: ignore[attr-defined]

    def __getitem__(self, grid: object) -> object:
        return lambda *args, **named: None


def test_the_program_tunes_and_git_applies_what_it_writes(tmp_path: Path) -> None:
    words = ("sglang-decode", "--trials", "2", "--record", "record.json", "--out", "tuned.patch")
    done = subprocess.run(
        [sys.executable, FOLDER / "tune.py", *words], cwd=tmp_path, capture_output=True, text=True,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "The engine's choice: {'BLOCK_N': 32, 'num_warps': 4, 'num_stages': 2}" in done.stdout
    answers = json.loads((tmp_path / "record.json").read_text())
    assert sum(key.startswith("check") for key in answers) >= 1

    sys.path.insert(0, str(FOLDER))
    import tune

    kernel = engines.KERNELS["sglang-decode"]
    work = engines.Work(**LLAMA, queries=[1], keys=[4096])
    patch = tune.diff("sglang-decode", point_of("sglang-decode"), work, "nvidia_h200", "tuned")
    copy = tmp_path / Path(*kernel.module.split(".")).with_suffix(".py")
    copy.parent.mkdir(parents=True)
    text = launches.installed(kernel.module).read_text()
    copy.write_text(text)
    subprocess.run(["git", "apply", "-p0"], cwd=tmp_path, input=patch, text=True, check=True)
    values = launches.choice(point_of("sglang-decode"), work, (9, 0), "tuned")
    assert copy.read_text() == launches.patched(kernel, text, values) != text
