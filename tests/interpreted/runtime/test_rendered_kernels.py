"""Kernels that no table names: rendered in memory when they are first needed."""

from __future__ import annotations

import linecache
import logging
import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from flashgen import block_mask, paths
from flashgen.errors import InvalidArgument
from flashgen.kernels.render import render
from flashgen.runtime import Dispatcher, kernel_files
from tests import programs
from tests.serving import serve

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Q = torch.randn(1, 1, 5, 16, generator=torch.Generator().manual_seed(0))
BIAS = torch.zeros(5, 5)
SEES_ALL = block_mask.from_boolean(torch.ones(5, 5, dtype=torch.bool))
"""No table has an entry for block masks, so that no text for them ships."""
EXACT = torch.nn.functional.scaled_dot_product_attention(Q, Q, Q)

CALL = """
import torch
from flashgen import block_mask
from generated.dispatcher import attention
q = torch.randn(1, 1, 5, 16, generator=torch.Generator().manual_seed(0))
o = attention(q, q, q, block_mask=block_mask.from_boolean(torch.ones(5, 5, dtype=torch.bool)))
torch.testing.assert_close(
    o, torch.nn.functional.scaled_dot_product_attention(q, q, q), rtol=1e-5, atol=1e-5
)
"""


@pytest.fixture(autouse=True)
def nothing_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(kernel_files, "_rendered", {})
    monkeypatch.delenv("FLASHGEN_KEEP_KERNELS", raising=False)


def call(dispatcher: Dispatcher) -> torch.Tensor:
    return dispatcher.attention(Q, Q, Q, block_mask=SEES_ALL)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = (record.getMessage() for record in caplog.records)
    return [message for message in messages if "was rendered" in message]


def test_a_kernel_is_rendered_once_for_all_dispatchers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flashgen.runtime")
    for _ in range(2):
        torch.testing.assert_close(call(serve(monkeypatch)), EXACT, rtol=1e-5, atol=1e-5)
    (message,) = said(caplog)
    assert "was rendered from attention_fwd.py.jinja" in message


def test_the_interpreter_reads_the_text_after_linecache_was_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dispatcher = serve(monkeypatch)
    choice = dispatcher.explain(Q, Q, Q, block_mask=SEES_ALL).selection.choice
    loaded = kernel_files.rendered(choice.spec, choice.config)
    linecache.clearcache()
    torch.testing.assert_close(call(dispatcher), EXACT, rtol=1e-5, atol=1e-5)
    text = render(choice.spec, choice.config).source
    assert loaded.fn.__code__.co_filename not in text
    linecache.checkcache()
    function = loaded.fn
    held = linecache.getlines(function.__code__.co_filename, function.__globals__)
    assert "".join(held) == text


def test_an_error_in_a_kernel_shows_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback reads linecache with the module's globals, whose loader outlives a cleared cache."""
    dispatcher = serve(monkeypatch)
    choice = dispatcher.explain(Q, Q, Q, softcap=1e4).selection.choice
    function = kernel_files.rendered(choice.spec, choice.config).fn
    linecache.clearcache()
    code = function.__code__
    line = linecache.getline(code.co_filename, code.co_firstlineno, function.__globals__)
    assert line.startswith("@triton.jit(")


def test_many_threads_render_one_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each has a dispatcher of its own, so that no launcher is shared."""
    caplog.set_level(logging.INFO, "flashgen.runtime")
    count = 32
    dispatchers = [serve(monkeypatch) for _ in range(count)]
    together, loaded = threading.Barrier(count), []

    def work(dispatcher: Dispatcher) -> None:
        choice = dispatcher.explain(Q, Q, Q, block_mask=SEES_ALL).selection.choice
        together.wait()
        loaded.append(kernel_files.rendered(choice.spec, choice.config))

    threads = [threading.Thread(target=work, args=(each,)) for each in dispatchers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loaded) == count
    assert len(set(map(id, loaded))) == 1
    assert len(said(caplog)) == 1
    # Triton's interpreter runs one kernel of a process at a time.
    torch.testing.assert_close(call(dispatchers[0]), EXACT, rtol=1e-5, atol=1e-5)


ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "PYTHONPATH": str(paths.ROOT),
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "TRITON_INTERPRET": "1",
    "FLASHGEN_GPU": "nvidia_h200",
}


def test_four_processes_at_once_with_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    """Forks of one that has imported the dispatcher and has rendered nothing."""
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    program = f"import sys\nsys.dont_write_bytecode = True\n{CALL}"
    environment = ENVIRONMENT | {"HOME": str(home)}
    with ThreadPoolExecutor(4) as threads:
        running = [
            threads.submit(programs.run, ["-c", program], cwd=tmp_path, env=environment)
            for _ in range(4)
        ]
    for done in running:
        assert done.result().returncode == 0, done.result().stderr
    assert list(home.rglob("*")) == []


def test_without_a_home(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALL],
        cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("*")) == []


class TestKeptKernels:
    def test_a_copy_is_written_and_never_read(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        folder = tmp_path / "a" / "kept"
        monkeypatch.setenv("FLASHGEN_KEEP_KERNELS", str(folder))
        dispatcher = serve(monkeypatch)
        call(dispatcher)
        choice = dispatcher.explain(Q, Q, Q, block_mask=SEES_ALL).selection.choice
        (file,) = folder.iterdir()
        assert file.read_text() == render(choice.spec, choice.config).source
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        file.write_text("raise SystemExit")
        monkeypatch.setattr(kernel_files, "_rendered", {})
        torch.testing.assert_close(call(serve(monkeypatch)), EXACT, rtol=1e-5, atol=1e-5)
        assert file.read_text() == render(choice.spec, choice.config).source

    def test_a_folder_of_others_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("FLASHGEN_KEEP_KERNELS", str(tmp_path))
        tmp_path.chmod(0o755)
        with pytest.raises(InvalidArgument, match=r"with mode 0700: .* and mode 0755"):
            call(serve(monkeypatch))
        tmp_path.chmod(0o700)
        monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
        with pytest.raises(InvalidArgument, match="FLASHGEN_KEEP_KERNELS must name a folder of"):
            call(serve(monkeypatch))

    def test_a_folder_that_is_a_file_is_a_sentence(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("FLASHGEN_KEEP_KERNELS", str(tmp_path / "file"))
        with pytest.raises(InvalidArgument, match="that can be written"):
            call(serve(monkeypatch))


def test_explain_renders_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flashgen.runtime")
    dispatcher = serve(monkeypatch)
    assert "the default kernel serves" in str(dispatcher.explain(Q, Q, Q, bias=BIAS, softcap=30.0))
    assert "bwd_dkv" in str(dispatcher.explain(Q, Q, Q, direction="backward_dkv"))
    assert said(caplog) == []
