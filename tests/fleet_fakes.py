"""Devices and workers that a fleet takes for real ones."""

from __future__ import annotations

from typing import Any


def eight(_: dict[str, Any]) -> dict[str, Any]:
    return {"names": ["NVIDIA H200"] * 8}


def mixed(_: dict[str, Any]) -> dict[str, Any]:
    return {"names": ["NVIDIA H200", "NVIDIA L4", "NVIDIA H200"]}


def none(_: dict[str, Any]) -> dict[str, Any]:
    return {"names": []}


def broken(_: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError("driver too old")


WORKER = """
import os, pathlib, signal, sys, time
words = dict(zip(sys.argv[2::2], sys.argv[3::2]))
index, folder = int(words["--gpus"]), pathlib.Path(words["--out"])
behaviour = words["--do"].split(",")[index]
if behaviour == "hang":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
try:
    (folder / f"worker {index}").write_text(repr(sys.argv[1:]) + f" {os.getpid()}")
    print(f"hello of {index}", flush=True)
    if behaviour == "fail":
        print("flashgen: no luck [red] today", file=sys.stderr)
        sys.exit(1)
    if behaviour == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2 if behaviour == "end" else 100)
except KeyboardInterrupt:
    (folder / f"saved {index}").touch()
    time.sleep(0.2)  # a second interrupt would end this
    (folder / f"left {index}").touch()
    sys.exit(130)
print(f"done by {index}")
"""
"""Does what the word of --do at its index says."""
