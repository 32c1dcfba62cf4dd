"""Tune the attention kernels of vLLM 0.33.0 and SGLang 0.5.23 for a model and a GPU, without one.

    pip install --no-deps vllm==0.33.0 sglang==0.5.23      or their sources on PYTHONPATH
    python examples/engine_kernels/tune.py vllm-prefill --target nvidia_h100_80gb_hbm3

Both engines choose tiles by a fixed rule. This program takes the kernel as it stands in the
installed package, writes a choice into a copy of its file, and calls the engine's own host function
with it:

- in Triton's interpreter, on a small batch: O is compared with float64, beside that of the engine's
  own choice;
- compiled for the target: the time is estimated from the machine code and the trips of each
  program.

`minimize` of flashgen.search proposes the choices. The best is written as a unified diff of the
installed file, which `patch -p0` applies in the folder of site-packages. It is guarded by head dim,
query heads of a KV head, 16-bit types and compute capability: all else stays as it was. A gain
under a tenth writes nothing, because the estimates do not resolve it. No time here is measured.

    vllm-prefill    kernel_unified_attention, one program a tile of rows: BLOCK_M, TILE_SIZE
    vllm-decode     the same in 16 parts of each sequence: TILE_SIZE
    sglang-decode   _fwd_grouped_kernel_stage1: BLOCK_N
    sglang-prefill  _fwd_kernel, for prompts without a cache: BLOCK_M, BLOCK_N

and num_warps and num_stages of each. Lines that another release does not have are refused.
engines.py has the kernels, launches.py how they are recorded, interpreted and compiled;
benchmarks/results/engine_kernels.md has what was found for three GPUs, beside published times.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engines import KERNELS, Work
from launches import choice, installed, patched

from flashgen.errors import FlashgenError
from flashgen.evaluate.payloads import COMPILE_ENV, INTERPRET_ENV
from flashgen.evaluate.workers.answers import Done, Task
from flashgen.evaluate.workers.pool import Workers
from flashgen.files import write_whole
from flashgen.search import Budget, Minimum, ProductSpace, minimize
from flashgen.spec.gpu import known_target

WORTH = 0.9
"""The share of the default's time that a choice must stay under: docs/estimates.md."""

LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
"""Llama 3.1 8B's config.json."""


class Session:
    """Asks functions of launches.py in child processes, and records each answer."""

    def __init__(self, record: Path) -> None:
        self._record = record
        self._known = json.loads(record.read_text()) if record.exists() else {}
        # An empty list of devices: vLLM defines its Triton kernels where there is no GPU.
        self._workers = {
            "estimate": Workers(1, env=COMPILE_ENV),
            "check": Workers(1, env=INTERPRET_ENV),
        }

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *failure: object) -> None:
        for workers in self._workers.values():
            workers.__exit__(*failure)

    def ask(self, function: str, **payload: Any) -> dict[str, Any]:
        """The answer of a function of launches.py; {failed: why} if there is none."""
        key = f"{function} {json.dumps(payload)}"
        if key not in self._known:
            task = Task(function=f"launches:{function}", payload=payload, limit_s=120)
            answer = self._workers[function].submit(task).result()
            known = answer.value if isinstance(answer, Done) else {"failed": str(answer)}
            self._known[key] = known
            write_whole(self._record, json.dumps(self._known, indent=0))
        return self._known[key]


def tuned(
    session: Session,
    name: str,
    work: Work,
    target: str,
    trials: int,
    say: Callable[..., None] = print,
) -> tuple[dict[str, Any], Minimum]:
    """The default's {found: us, numbers}, and the best of so many choices of a kernel."""
    kernel, asked = KERNELS[name], {"kernel": name, "work": asdict(work), "target": target}
    default = session.ask("estimate", point=None, **asked)
    if "failed" in default:
        raise FlashgenError(f"the default of {name} has no estimate: {default['failed']}")

    def microseconds(point: dict[str, int]) -> float | None:
        # The interpreter knows no warps and no stages: one check a tile.
        tile = {**point, "num_warps": 4, "num_stages": 2}
        found = session.ask("check", point=tile, **asked)
        if found.get("found"):
            found = session.ask("estimate", point=dict(point), **asked)
            say(*map("{:>10}".format, (*point.values(), found.get("found", "failed"))))
        return found.get("found") or None

    space = ProductSpace(kernel.values)
    say(*map("{:>10}".format, (*kernel.values, "us")), "estimated")
    seeds = [default["numbers"]] if space.number(default["numbers"]) >= 0 else []
    return default, minimize(space, microseconds, Budget(trials=trials), seeds=seeds)


def diff(name: str, point: dict[str, int], work: Work, target: str, why: str) -> str:
    """The unified diff of the installed file that makes the engine choose a point on this GPU."""
    kernel, path = KERNELS[name], Path(*KERNELS[name].module.split(".")).with_suffix(".py")
    text = installed(kernel.module).read_text()
    capability = divmod(known_target(target).capability, 10)
    new = patched(kernel, text, choice(point, work, capability, why))
    lines = (x.splitlines(keepends=True) for x in (text, new))
    return "".join(difflib.unified_diff(*lines, str(path), str(path)))


def work_of(name: str, model: dict[str, Any], asked: argparse.Namespace) -> Work:
    """The batch of a layer of a model, from its config.json."""
    heads = model["num_attention_heads"]
    decodes = name.endswith("decode")
    keys = [asked.context] * asked.batch if decodes else [asked.prompt]
    return Work(
        heads=heads,
        kv_heads=model.get("num_key_value_heads") or heads,
        dim=model.get("head_dim") or model["hidden_size"] // heads,
        queries=[1] * len(keys) if decodes else keys,
        keys=keys,
    )


def main() -> None:
    """Tune one kernel, and write the diff."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernel", choices=KERNELS)
    parser.add_argument("--target", default="nvidia_h100_80gb_hbm3", help="the GPU's slug")
    parser.add_argument("--model", type=Path, help="a config.json; without it, Llama 3.1 8B's")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of a prefill")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a decode")
    parser.add_argument("--context", type=int, default=4096, help="keys of each")
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--record", type=Path, default=Path("engine_kernels.json"))
    parser.add_argument("--out", type=Path, help="the diff; KERNEL-TARGET.patch without it")
    asked = parser.parse_args()
    model = json.loads(asked.model.read_text()) if asked.model else LLAMA
    work = work_of(asked.kernel, model, asked)
    with Session(asked.record) as session:
        default, best = tuned(session, asked.kernel, work, asked.target, asked.trials)
    gain = f"{default['found']:.1f} us to {best.value:.1f} us"
    print("The engine's choice:", default["numbers"], "The best:", dict(best.point), gain)
    if best.value > WORTH * default["found"]:
        print("No diff: estimates do not resolve a gain under a tenth.")
        return
    why = f"flashgen, for {asked.target}: {gain}, estimated and not measured."
    out = asked.out or Path(f"{asked.kernel}-{asked.target}.patch")
    write_whole(out, diff(asked.kernel, best.point, work, asked.target, why))
    print("Written:", out)


if __name__ == "__main__":
    try:
        main()
    except FlashgenError as error:
        sys.exit(str(error))
