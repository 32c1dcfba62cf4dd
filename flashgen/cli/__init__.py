"""The flashgen command: arguments in, one call each, exit codes out.

0 done, 1 failed, 2 usage, 3 no GPU where one was asked for, 130 interrupted with everything saved.
Modules that import torch or optuna are imported by the command that needs them: --help is quick.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated, NoReturn

import typer

from flashgen import __version__
from flashgen.cli import bench, build, explain, prove, tables, tune
from flashgen.cli.options import COMMAND_LINE
from flashgen.errors import FlashgenError

__all__ = ["app", "main"]

INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it

app = typer.Typer(
    name="flashgen",
    help="Triton attention kernels: tuned for a GPU, proven, and served from a readable table.",
    epilog="--debug, anywhere on the line, shows the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _versions(asked: bool) -> None:
    if asked:
        print(f"flashgen {__version__}, Triton {importlib.metadata.version('triton')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="The versions of flashgen and of Triton.",
            callback=_versions,
            is_eager=True,
        ),
    ] = False,
) -> None:
    pass


for _command in (
    tune.tune,
    tables.generate,
    tables.show,
    explain.explain,
    prove.verify,
    prove.calibrate,
    tables.targets,
    tables.report,
    build.warmup,
    build.aot,
    bench.bench,
):
    app.command()(_command)

_tables = typer.Typer(no_args_is_help=True, help="Compare and merge tables of one GPU.")
_tables.command()(tables.diff)
_tables.command()(tables.merge)
app.add_typer(_tables, name="table")


def main(arguments: list[str]) -> NoReturn:
    """Run one command and exit. What went wrong is one line on stderr; --debug shows where."""
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    COMMAND_LINE.set(tuple(arguments))
    try:
        app(arguments, prog_name="flashgen")
    except SystemExit as ended:  # Typer turns KeyboardInterrupt into this code, and says nothing
        if ended.code == INTERRUPTED:
            saved = "; what was found is saved, and the same command goes on"
            _leave(
                f"interrupted{saved if arguments[:1] in (['tune'], ['bench']) else ''}", INTERRUPTED
            )
        raise
    except FlashgenError as error:
        if debug:
            raise
        _leave(str(error), error.exit_code)
    except Exception as error:
        if debug:
            raise
        _leave(f"a bug, {type(error).__name__}: {error}; again with --debug shows where", 1)
    sys.exit(0)


def _leave(sentence: str, code: int) -> NoReturn:
    print(f"flashgen: {sentence}", file=sys.stderr)
    sys.exit(code)
