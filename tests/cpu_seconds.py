"""python tests/cpu_seconds.py LIMIT COMMAND...: run shell commands until one fails, and print the CPU time of all.

CPU time is user and system time, children included. It is compared with LIMIT seconds, and no failure: a slow
machine takes longer.
"""

from __future__ import annotations

import resource
import subprocess
import sys


def main(limit: str, *commands: str) -> int:
    code = 0
    for command in commands:
        print(command, flush=True)
        code = subprocess.run(command, shell=True).returncode
        if code:
            break
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime
    verdict = "" if seconds <= int(limit) else ": MORE than allowed"
    print(f"{seconds:.0f} CPU-seconds, children included, of {limit}{verdict}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
