"""FlashAttention-2's own test suite, run against flashgen.runtime.flash_attn.

    make -f tests/sessions.mk test-flash-attn
    python -m tests.flash_attn_suite SDIST [--cases 20] [--seed 0] [pytest's options]

SDIST is the source distribution that pip downloads. Its test file is taken as it is, but for the
device where there is no GPU. The package `flash_attn` that it imports is made of flashgen's drop-in
and of the distribution's helpers for padding and rotary embedding. Of each test function, `cases`
of its hundreds of thousands of combinations are drawn, always the same ones for a seed.

Without a GPU the kernels of FLASHGEN_GPU run in Triton's interpreter, in float16 (its bfloat16 is
wrong) and on at most LONGEST keys; without FLASHGEN_GPU the CPU path runs, in both types. Cases with
dropout are left out: they read the dropped P, which flashgen refuses to make; so are caches of head
dims that are no multiple of 8, which it refuses because each step would copy the cache.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "flash_attn_suite"
HELPERS = "bert_padding.py", "layers/rotary.py", "ops/triton/rotary.py"

PACKAGE = "from flashgen.runtime.flash_attn import *\n"
INTERFACE = """def _get_block_size_n(device, head_dim, is_dropout, is_causal):
    raise AssertionError("only tests of dropout read the block size")
"""
DEVICES = {
    'torch.cuda.get_device_capability("cuda")': "(9, 0)",
    'torch.cuda.get_device_properties("cuda").total_memory': "2**40",
    'device="cuda"': 'device="cpu"',
    'device = "cuda"': 'device = "cpu"',
}
"""What the test file says of its GPU, and what it says where there is none."""

LONGEST = 512
"""Keys of a case without a GPU; the suite's longest would take minutes each."""
LENGTHS = "seqlen", "seqlen_q", "seqlen_k"

TOO_LONG = {"test_flash_attn_race_condition": "repeats one call 10,000 times, for races on a GPU"}


def unpack(sdist: Path) -> None:
    """Write the suite and the package `flash_attn` into FOLDER."""
    package = FOLDER / "flash_attn"
    with tarfile.open(sdist) as archive:
        top = archive.getnames()[0].split("/")[0]

        def text(name: str) -> str:
            file = archive.extractfile(f"{top}/{name}")
            assert file is not None, name
            return file.read().decode()

        tests = text("tests/test_flash_attn.py")
        written = {name: text(f"flash_attn/{name}") for name in HELPERS}
    if not torch.cuda.is_available():
        for old, new in DEVICES.items():
            assert old in tests, f"the suite has another way to find its GPU: {old} is missing"
            tests = tests.replace(old, new)
    written |= {"__init__.py": PACKAGE, "flash_attn_interface.py": INTERFACE}
    written |= {f"{folder}/__init__.py": "" for folder in ("layers", "ops", "ops/triton")}
    for name, content in written.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (FOLDER / "test_flash_attn.py").write_text(tests)


def runs_here(case: dict[str, Any]) -> bool:
    """Whether a combination of parameters can run on this machine, and has what flashgen makes."""
    cached = "new_kv" in case or case.get("paged_kv_block_size")
    if case.get("dropout_p") or (cached and case["d"] % 8):
        return False
    if torch.cuda.is_available():
        return True
    interpreted = "FLASHGEN_GPU" in os.environ
    longest = max((case[name] for name in LENGTHS if name in case), default=0)
    if longest > LONGEST:
        return False
    return not (interpreted and case.get("dtype") is torch.bfloat16)


class Sample:
    """A pytest plugin that draws the cases of each test function."""

    def __init__(self, cases: int, seed: int) -> None:
        self.cases = cases
        self.seed = seed

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize by drawn combinations in place of all."""
        marks = [mark for mark in metafunc.definition.own_markers if mark.name == "parametrize"]
        for mark in marks:
            metafunc.definition.own_markers.remove(mark)
        rows = [
            [self._row(mark.args[0], values) for values in mark.args[1]] for mark in marks
        ]  # fmt: skip
        drawn: list[dict[str, Any]] = []
        random_ = random.Random(f"{self.seed} {metafunc.function.__name__}")
        for _ in range(1000 * self.cases):
            case = dict(itertools.chain.from_iterable(random_.choice(row) for row in rows))
            if runs_here(case) and case not in drawn:
                drawn.append(case)
            if len(drawn) == self.cases:
                break
        names = list(drawn[0]) if drawn else [name for row in rows for name, _ in row[0]]
        metafunc.parametrize(",".join(names), [tuple(case[n] for n in names) for case in drawn])

    @staticmethod
    def _row(names: str, values: Any) -> list[tuple[str, Any]]:
        several = [name.strip() for name in names.split(",")]
        return list(zip(several, values if len(several) > 1 else [values], strict=True))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Skip what takes hours where nothing can race."""
        for item in items:
            reason = TOO_LONG.get(item.name.split("[")[0])
            if reason and not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=reason))


def main() -> int:
    """Unpack, and run; pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sdist", type=Path)
    parser.add_argument("--cases", type=int, default=20, help="drawn of each test function")
    parser.add_argument("--seed", type=int, default=0)
    args, options = parser.parse_known_args()
    unpack(args.sdist)
    if not torch.cuda.is_available():
        torch.cuda.device = contextlib.nullcontext  # its rotary kernel sets the current device
    sys.path.insert(0, str(FOLDER))
    return int(
        pytest.main(
            ["-q", "-p", "no:cacheprovider", "--rootdir", str(FOLDER), "-c", os.devnull,
             str(FOLDER / "test_flash_attn.py"), *options],
            plugins=[Sample(args.cases, args.seed)],
        )
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
