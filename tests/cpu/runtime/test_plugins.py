"""The plugins of vLLM and SGLang in released versions of both, by stand-ins for what each version lacks, and where
an engine raises anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum, EnumMeta
from types import ModuleType
from typing import Any

import pytest

from flashgen.runtime import sglang, vllm

VLLM = "vllm.v1.attention.backends.registry"
SGLANG = (
    "sglang.srt.arg_groups.choices",
    "sglang.srt.layers.attention.attention_registry",
    "sglang.srt.server_args",
)


def install(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> None:
    """Put a module with these names where an import finds it, in packages that are empty otherwise."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        package = ".".join(parts[:end])
        if end == len(parts) or not isinstance(sys.modules.get(package), ModuleType):
            module = ModuleType(package)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, package, module)
    vars(sys.modules[name]).update(names)


def registry_of_vllm(takes_names: bool) -> dict[str, Any]:
    """vLLM's registry: until 0.31 it stores any key and has members of its own alone, whose lookup raises a class
    of its own choice.
    """
    stored: dict[Any, str] = {}

    class Meta(EnumMeta):
        def __getitem__(cls, name: str) -> Any:
            try:
                return super().__getitem__(name)
            except KeyError:
                raise ValueError(f"Unknown backend {name!r}.\nValid ones: {[*cls]}") from None  # type: ignore[var-annotated]

    class AttentionBackendEnum(Enum, metaclass=Meta):
        FLASH_ATTN = "a.path"
        CUSTOM = None

    def register_backend(backend: Any, class_path: str) -> None:
        if takes_names and isinstance(backend, str):
            member: Any = object.__new__(AttentionBackendEnum)
            member._name_, member._value_ = backend, class_path
            AttentionBackendEnum._member_map_[backend] = member
        stored[backend] = class_path

    return {"AttentionBackendEnum": AttentionBackendEnum, "register_backend": register_backend}


def vllm_of(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """What the plugin finds in a vLLM of this version."""
    number = tuple(map(int, version.split(".")))
    install(monkeypatch, "vllm.v1.attention.backends")
    if number < (0, 11, 1):  # no registry
        return
    if number < (0, 14):  # in another package
        install(monkeypatch, "vllm.attention.backends.registry", **registry_of_vllm(False))
        return
    install(monkeypatch, VLLM, **registry_of_vllm(number >= (0, 32)))


@pytest.mark.parametrize(
    "version",
    ["0.9.2", "0.11.0", "0.11.2", "0.13.0", "0.18.1", "0.22.1", "0.25.1", "0.28.0", "0.31.0"],
)
def test_an_older_vllm_logs_one_line_and_goes_on(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm_of(monkeypatch, version)
    vllm.register()
    assert_one_line(caplog, "flashgen needs vLLM 0.33")


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_a_vllm_that_takes_names_has_the_backend(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm_of(monkeypatch, version)
    for _ in range(2):  # vLLM loads plugins in every process, and again in the same one
        vllm.register()
    assert caplog.records == []
    assert sys.modules[VLLM].AttentionBackendEnum["FLASHGEN"].value == vllm.BACKEND


def sglang_of(monkeypatch: pytest.MonkeyPatch, version: str) -> tuple[list[str], dict[str, Any]]:
    """What the plugin finds in a SGLang of this version: its choices, and its backends by name."""
    number = tuple(map(int, version.split(".")))
    choices, backends = ["triton"], {}
    install(monkeypatch, "sglang.srt")
    listed = {"ATTENTION_BACKEND_CHOICES": choices, "add_attention_backend_choices": choices.extend}
    if number >= (0, 5):
        install(monkeypatch, "sglang.srt.server_args", **listed)
    if number >= (0, 5, 3):

        def register_attention_backend(name: str) -> Callable[[Any], Any]:
            return lambda made: backends.setdefault(name, made)

        install(monkeypatch, SGLANG[1], register_attention_backend=register_attention_backend)
    if number >= (0, 5, 21):
        install(monkeypatch, SGLANG[0], **listed)
    return choices, backends


@pytest.mark.parametrize(
    "version", ["0.4.6", "0.5.2", "0.5.3", "0.5.8", "0.5.10", "0.5.12", "0.5.15", "0.5.19"]
)
def test_an_older_sglang_logs_one_line_and_goes_on(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choices, backends = sglang_of(monkeypatch, version)
    sglang.register()
    assert_one_line(caplog, "flashgen needs SGLang 0.5.23")
    assert (choices, backends) == (["triton"], {})


@pytest.mark.parametrize("version", ["0.5.21", "0.5.22", "0.5.23"])
def test_a_newer_sglang_has_the_backend(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choices, backends = sglang_of(monkeypatch, version)
    for _ in range(2):
        sglang.register()
    assert caplog.records == []
    assert (choices, list(backends)) == (["triton", "flashgen"], ["flashgen"])


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


ANYTHING = (
    ImportError("torch.ops lacks\nthis"), AttributeError("x"), KeyError("x"), TypeError("x"), ValueError("x"),
    RuntimeError("CUDA error\n\nat line 3"), AssertionError(), NotImplementedError(), OSError(2, "no file"),
    LookupError("\x1b[31m"), MemoryError(), SyntaxError("x", ("f", 1, 1, "text", 1, 2)), Unprintable(),
    ValueError("long " * 1000),
)  # fmt: skip


class Raising(ModuleType):
    """A module that raises where a name is looked up, as an import that runs the engine's code may."""

    def __init__(self, error: Exception) -> None:
        super().__init__("raising")
        self.__dict__["error"] = error

    def __getattr__(self, name: str) -> Any:
        raise self.error


@pytest.mark.parametrize("error", ANYTHING, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["import", "register_backend", "AttentionBackendEnum"])
def test_whatever_vllm_raises_is_one_line(
    where: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    vllm_of(monkeypatch, "0.33.0")
    if where == "import":
        monkeypatch.setitem(sys.modules, VLLM, Raising(error))
    elif where == "register_backend":
        monkeypatch.setattr(sys.modules[VLLM], where, raising(error))
    else:
        monkeypatch.setattr(sys.modules[VLLM], where, Raising(error))
    vllm.register()
    assert_one_line(caplog, "flashgen needs vLLM 0.33", name_of(error, where == "import"))


@pytest.mark.parametrize("error", ANYTHING, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "where", [*SGLANG, "register_attention_backend", "add_attention_backend_choices"]
)
def test_whatever_sglang_raises_is_one_line(
    where: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    choices, _ = sglang_of(monkeypatch, "0.5.23")
    if where in SGLANG:
        monkeypatch.setitem(sys.modules, where, Raising(error))
    else:
        module = SGLANG[1] if where.startswith("register") else SGLANG[2]
        monkeypatch.setattr(sys.modules[module], where, raising(error))
    sglang.register()
    assert_one_line(caplog, "flashgen needs SGLang 0.5.23", name_of(error, where in SGLANG))
    assert choices == ["triton"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_program_without_the_engine_goes_on(
    engine: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, engine, None)  # type: ignore[arg-type]
    {"vllm": vllm, "sglang": sglang}[engine].register()
    assert_one_line(caplog, "flashgen needs ")


def name_of(error: Exception, imported: bool) -> str:
    """The name of its class; `from module import name` makes an ImportError of an AttributeError."""
    hidden = imported and isinstance(error, AttributeError)
    return "ImportError" if hidden else type(error).__name__


def raising(error: Exception) -> Callable[..., Any]:
    """A function of any arguments that raises."""

    def function(*_: Any, **__: Any) -> Any:
        raise error

    return function


def assert_one_line(caplog: pytest.LogCaptureFixture, start: str, reason: str = "") -> None:
    """One short printable line of a warning, without a traceback."""
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith(start)
    assert message.isprintable()
    assert len(message) < 300
    assert reason in message
    assert record.levelname == "WARNING"
    assert record.exc_info is None
