"""Which folder of generated kernels serves: the shipped one, FLASHGEN_GENERATED, flashgen.use()."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashgen
from flashgen import paths
from flashgen.errors import GeneratedError
from flashgen.runtime import Dispatcher, api, autograd, custom_ops, folders, sdpa
from flashgen.table import emit

ROOT = Path(__file__).resolve().parents[3]
Q = torch.zeros(1, 1, 4, 32)


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_current", None)
    monkeypatch.setattr(folders, "_loaded", dict(folders._loaded))
    monkeypatch.setattr(autograd, "served", dict(autograd.served))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `flashgen generate --out` left in a folder, without the kernels."""
    out = tmp_path_factory.mktemp("other")
    shipped = paths.shipped_generated_dir()
    (out / "generated" / "kernels").mkdir(parents=True)
    for file in (*shipped.glob("*.py"), shipped / "kernels" / "__init__.py"):
        shutil.copy(file, out / "generated" / file.relative_to(shipped))
    return out


def test_the_shipped_folder_has_one_dispatcher() -> None:
    import generated.dispatcher

    shipped = folders.current()
    assert shipped is folders.dispatcher_in(ROOT / "generated")
    assert shipped is generated.dispatcher._dispatcher
    assert shipped.passes is custom_ops._passes_of("flashgen._generated")
    assert flashgen.digest() == generated.dispatcher.digest()
    assert str(flashgen.explain(Q, Q, Q)).count("tables:") == 0


def test_use_is_followed_by_functions_imported_before(
    other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[object] = []
    attention = Dispatcher.attention

    def recording(self: Dispatcher, *args: object, **kwargs: object) -> object:
        called.append(self)
        return attention(self, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(Dispatcher, "attention", recording)
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_h200")
    monkeypatch.setattr("flashgen.runtime.resolver.Resolver.left_to_torch", lambda *_: False)
    for named in (other, other / "generated", str(other)):
        flashgen.use(named)
        used = folders.dispatcher_in(other / "generated")
        assert folders.current() is used
        assert api.attention.__name__ == "attention"
        with FakeTensorMode():
            api.attention(torch.zeros(1, 1, 4, 32), *[torch.zeros(1, 1, 4, 32)] * 2)
            sdpa.scaled_dot_product_attention(*[torch.zeros(1, 1, 4, 32)] * 3)
        assert called == [used, used]
        called.clear()
        assert f"tables: {other / 'generated'}" in str(flashgen.explain(Q, Q, Q))
    flashgen.use(None)
    assert folders.current() is folders.dispatcher_in(ROOT / "generated")


def test_graphs_name_their_folder(other: Path) -> None:
    shipped = folders.current()
    flashgen.use(other)
    used = folders.current()
    assert isinstance(used, Dispatcher)
    assert custom_ops._passes_of(used.resolver.package) is used.passes
    assert folders.current() is used  # a graph of the shipped tables follows use()
    flashgen.use(None)
    assert custom_ops._passes_of(used.resolver.package) is used.passes
    assert custom_ops._passes_of("flashgen._generated_of_another_process") is shipped.passes


def test_compiled_code_follows_use(other: Path) -> None:
    packages: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        packages.extend(node.args[-1] for node in graph.graph.nodes if "attention" in node.name)
        return graph.forward

    flashgen.use(None)
    compiled = torch.compile(lambda q: api.attention(q, q, q), backend=backend, fullgraph=True)
    compiled(Q), compiled(Q)
    flashgen.use(other)
    compiled(Q)
    used = folders.current()
    assert isinstance(used, Dispatcher)
    assert packages == [paths.SHIPPED_PACKAGE, used.resolver.package]


def test_the_variable_names_a_folder(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_GENERATED", str(other))
    assert folders.current() is folders.dispatcher_in(other / "generated")
    monkeypatch.setenv("FLASHGEN_GENERATED", str(other / "nowhere"))
    monkeypatch.setattr(folders, "_current", None)
    with pytest.raises(GeneratedError, match="nowhere must be a folder that flashgen generated"):
        folders.current()


def test_a_folder_of_another_schema_or_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """Before anything of it is imported."""
    text = (ROOT / "generated" / "__init__.py").read_text()
    shipped = folders.current()
    for found, sentence in (
        ("raise SystemExit('imported')\n", "its __init__.py does not say so"),
        (text.replace("SCHEMA = 2", "SCHEMA = 99"), "must have schema 2, and it has schema 99"),
        (text.replace("SCHEMA = 2", ""), "must have schema 2, and it has no schema: run flashgen"),
        (text + "\nassert False\n", "cannot be loaded (AssertionError: "),
    ):
        (tmp_path / "__init__.py").write_text(found)
        with pytest.raises(GeneratedError, match=re.escape(sentence)):
            flashgen.use(tmp_path)
        assert folders.current() is shipped


def test_a_folder_on_the_path_serves_by_its_own_dispatcher(
    other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(other))
    for name in [name for name in sys.modules if name.split(".")[0] == "generated"]:
        monkeypatch.delitem(sys.modules, name)
    theirs = importlib.import_module("generated.dispatcher")
    assert theirs._dispatcher is folders.dispatcher_in(other / "generated")
    assert theirs._dispatcher is not folders.current()
    assert f"tables: {other / 'generated'}" not in str(flashgen.explain(Q, Q, Q))


def test_the_emitted_schema_is_the_one_that_is_read() -> None:
    assert emit.plan({})[Path("__init__.py")].endswith(f"\nSCHEMA = {folders.SCHEMA}\n")


FORKS = """
import os, signal, threading, time
from flashgen.kernels import interpreter, loader
from flashgen.runtime import folders, kernel_files

inside, load = threading.Event(), folders._load

def slow(*arguments):
    inside.set()
    time.sleep(0.5)
    return load(*arguments)

def held(lock):
    with lock:
        inside.set()
        time.sleep(0.5)

folders._load = slow
for work in (
    folders.current,
    lambda: held(kernel_files._loading),
    lambda: held(loader._executing),
    lambda: held(interpreter._lock),
):
    inside.clear()
    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        folders.current()
        for lock in (kernel_files._loading, loader._executing, interpreter._lock):
            with lock:
                pass
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, work
    thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_while_another_thread_loads_leaves_a_child_that_loads() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], cwd=ROOT, timeout=300)
    assert done.returncode == 0
