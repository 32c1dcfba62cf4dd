"""A PostgreSQL of a test's own: a temporary folder, a free port, gone with the test."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

USER, PASSWORD = "flashgen", "correct horse"  # a password that a URL must escape
START_LIMIT_S = 300.0  # on a machine that does much else
PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)


def programs() -> Path | None:
    """The folder of initdb and postgres: on PATH, or where Debian puts the newest version."""
    found = shutil.which("initdb")
    if found and shutil.which("postgres"):
        return Path(found).parent
    versions = glob.glob("/usr/lib/postgresql/*/bin/initdb")
    newest = max(versions, key=lambda path: float(path.split("/")[4]), default=None)
    return Path(newest).parent if newest else None


@dataclass
class Postgres:
    """A server that listens on 127.0.0.1."""

    bin: Path
    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    def url(self, database: str, *, user: str = USER, password: str = PASSWORD) -> str:
        secret = password.replace(" ", "%20")
        return f"postgresql+psycopg://{user}:{secret}@127.0.0.1:{self.port}/{database}"

    def connect(self, database: str = "postgres") -> psycopg.Connection[Any]:
        return psycopg.connect(
            host="127.0.0.1", port=self.port, user=USER, password=PASSWORD, dbname=database,
            autocommit=True,
        )  # fmt: skip

    def create(self, database: str) -> str:
        """Make a database; its URL."""
        with self.connect() as connection:
            connection.execute(f'CREATE DATABASE "{database}"')  # type: ignore[call-overload]
        return self.url(database)

    def start(self) -> None:
        """Start, and wait until it answers. It ends with the thread that calls this."""
        settings = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "off",
            "max_connections": 60,
            "logging_collector": "off",
        }
        flags = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.bin / "postgres", "-D", self.folder / "data", *flags],
                cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log, **_unprivileged(),
            )  # fmt: skip
        end = time.monotonic() + START_LIMIT_S
        while True:
            try:
                self.connect().close()
                return
            except psycopg.OperationalError:
                if self.process.poll() is not None or time.monotonic() > end:
                    self.stop()
                    raise RuntimeError((self.folder / "log").read_text()[-2000:]) from None
                time.sleep(0.02)

    def stop(self) -> None:
        """End at once, as a crash would."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(START_LIMIT_S)
            self.process = None


@contextlib.contextmanager
def running() -> Iterator[Postgres]:
    """A fresh cluster that runs. programs() must have found some."""
    found = programs()
    assert found is not None
    # Not pytest's tmp_path: nobody but its owner may enter that.
    folder = Path(tempfile.mkdtemp(prefix="flashgen-postgres-"))
    server = Postgres(found, folder, free_port())
    try:
        initialize(server)
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def initialize(server: Postgres) -> None:
    secret = server.folder / "password"
    secret.write_text(PASSWORD)
    if os.geteuid() == 0:
        owner = pwd.getpwnam(_account())
        for path in (server.folder, secret):
            os.chown(path, owner.pw_uid, owner.pw_gid)
    subprocess.run(
        [
            server.bin / "initdb", "-D", server.folder / "data", "-U", USER, "-E", "UTF8",
            "--locale=C", "-A", "scram-sha-256", f"--pwfile={secret}", "--no-sync",
        ],
        cwd="/", check=True, capture_output=True, **_unprivileged(),
    )  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _account() -> str:
    """Whom root lets run the server, which refuses to run as root."""
    known = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in known else "nobody"


def _unprivileged() -> dict[str, Any]:
    """How Popen starts a server: not as root, and gone when this process is."""
    fields: dict[str, Any] = {"preexec_fn": _die_with_parent}
    if os.geteuid() == 0:
        owner = pwd.getpwnam(_account())
        fields |= {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
    return fields


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGQUIT)
