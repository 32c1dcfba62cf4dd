"""Programs in processes of their own, with the events that they leave."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.driver import events


def run(
    program: str, tmp_path: Path, **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[events.Event]]:
    """A program, and the events of it and its children."""
    return command(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], tmp_path, **environment
    )


def command(
    words: list[str], tmp_path: Path, **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[events.Event]]:
    """A command, and the events of it and its children."""
    env = os.environ | {"RECORDING_CUDA_LOG": str(tmp_path / "log")} | environment
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        env=env,
    )
    logs = sorted(tmp_path.glob("log.*"))
    return done, [event for log in logs if log.suffix != ".lost" for event in events.read(log)]
