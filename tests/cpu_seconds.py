"""python tests/cpu_seconds.py [--of SECONDS] COMMAND...: run shell commands until one fails, and print the CPU time of all.

CPU time is user and system time, children included. It is compared with SECONDS, and no failure: a slow machine takes
longer. All commands share one folder of what tests compile and search for (tests/conftest.py).
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile


def main(*commands: str) -> int:
    code, limit = 0, ""
    if commands[0] == "--of":
        _, limit, *rest = commands
        commands = tuple(rest)
    with tempfile.TemporaryDirectory(prefix="flashgen-tests-") as shared:
        env = {"TESTS_CACHE": shared} | os.environ
        for command in commands:
            print(command, flush=True)
            code = subprocess.run(command, shell=True, env=env).returncode
            if code:
                break
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime
    verdict = f", of {limit}" if limit else ""
    verdict += ": MORE than allowed" if limit and seconds > int(limit) else ""
    print(f"{seconds:.0f} CPU-seconds, children included{verdict}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
