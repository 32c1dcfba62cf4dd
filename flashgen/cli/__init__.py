"""The flashgen command: parses arguments, makes one call each, returns exit codes.

0 done, 1 failed, 2 wrong usage, 3 --gpu without a GPU, 130 interrupted with everything saved. The
commands import torch and optuna themselves, so --help is quick.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import inspect
import io
import os
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from flashgen import __version__
from flashgen.cli import bench, build, compare, explain, prove, tables, tune
from flashgen.cli.options import COMMAND_LINE
from flashgen.errors import FlashgenError, printable
from flashgen.paths import install_command_after

__all__ = ["app", "main"]

INTERRUPTED = 130  # 128 plus the number of SIGINT, as in shells


def _without_python_types(params: list[Any], ctx: Any) -> list[Any]:
    """Parameters whose help names no Python type: nothing for a flag, <str>... for list[str]."""
    for each in params:
        if getattr(each, "is_flag", False):
            each.metavar = ""
        elif "list[" in (label := each.display_type(ctx)):
            plain = label.replace("list[", "").replace("]>", ">...").lower()
            each.display_type = lambda _, plain=plain: plain
    return params


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_python_types(super().get_params(ctx), ctx)


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_python_types(super().get_params(ctx), ctx)


app = typer.Typer(
    name="flashgen",
    cls=_Group,
    help="Triton attention kernels: tuned per GPU, verified, and served from a readable table.",
    epilog="--debug, anywhere in the command, shows the traceback of an error. "
    "flashgen --install-completion lets the shell complete commands, options and GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _versions(shown: bool) -> None:
    if shown:
        print(f"flashgen {__version__}, Triton {importlib.metadata.version('triton')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the versions of flashgen and Triton.",
            callback=_versions,
            is_eager=True,
        ),
    ] = False,
) -> None:
    pass


def _summary(command: Callable[..., None]) -> str:
    """The first clause of a command's docstring, on one line: the list of commands wraps it."""
    paragraph = " ".join((command.__doc__ or "").split("\n\n")[0].split())
    summary = re.split(r"(?<=[.;])\s", paragraph)[0].rstrip(".;")
    return summary if summary.endswith("?") else f"{summary}."


def _help(command: Callable[..., None]) -> str:
    """A command's docstring, its prose in whole paragraphs, which a terminal of any width wraps."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(
        each if each.startswith("flashgen ") else " ".join(each.split()) for each in paragraphs
    )


for _command in (
    tune.tune,
    compare.compare,
    tables.generate,
    tables.show,
    explain.explain,
    prove.verify,
    prove.sanitize,
    prove.try_kernel,
    prove.calibrate,
    tables.targets,
    tables.report,
    build.warmup,
    build.aot,
    bench.bench,
    tables.export,
    explain.doctor,
):
    name = "try" if _command is prove.try_kernel else None
    app.command(name, help=_help(_command), short_help=_summary(_command), cls=_Command)(_command)

_tables = typer.Typer(cls=_Group, no_args_is_help=True, help="Compare and merge tables.")
_tables.command(short_help=_summary(tables.diff), cls=_Command)(tables.diff)
_tables.command(short_help=_summary(tables.merge), cls=_Command)(tables.merge)
app.add_typer(_tables, name="table")


def main(arguments: list[str]) -> NoReturn:
    """Run one command and exit. An error is one line on stderr; --debug adds the traceback."""
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    COMMAND_LINE.set(tuple(arguments))
    _open_streams()
    try:
        try:
            app(arguments, prog_name="flashgen")
        finally:
            sys.stdout.flush()
    except SystemExit as ended:  # Typer turns KeyboardInterrupt into this code silently
        if ended.code == INTERRUPTED:
            saved = "; what was tried is kept, and the same command goes on"
            _leave(
                f"interrupted{saved if arguments[:1] in (['tune'], ['bench']) else ''}", INTERRUPTED
            )
        raise
    except FlashgenError as error:
        if debug:
            raise
        _leave(str(error), error.exit_code)
    except BrokenPipeError:  # of `flashgen show ... | head`: who reads has seen enough
        _discard_output()
        sys.exit(1)
    except OSError as error:
        if debug or error.strerror is None:
            raise
        _discard_output()
        where = "standard output" if error.filename is None else str(error.filename)
        space = "free some space, or " if error.errno == errno.ENOSPC else ""
        _leave(f"{where} cannot be used ({error.strerror}): {space}name another place", 1)
    except Exception as error:
        if debug:
            raise
        if isinstance(error, ModuleNotFoundError) and (command := install_command_after(error)):
            _leave(f"this needs {error.name}: {command}", 1)
        _leave(f"a bug, {type(error).__name__}: {error}; see --debug", 1)
    sys.exit(0)


def _leave(sentence: str, code: int) -> NoReturn:
    print(printable(f"flashgen: {sentence}"), file=sys.stderr)
    sys.exit(code)


def _open_streams() -> None:
    """Give descriptors 0 to 2 a file if a shell closed them: else the next file that is opened
    takes the number, and what is printed is written into it. Without standard output, exit.
    """
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, mode))  # noqa: SIM115 - until the process ends
            if stream == "stdout":
                _leave("standard output is closed: send it to a file or to /dev/null", 1)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names that its encoding lacks are escaped
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Send what is still to be printed nowhere: it cannot be written."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
