"""What child processes of gpu_quarter.py do: measure and check items, or compile ahead.

Checks, rounds and times are those of flashgen's own evaluator, called in this process; cases are
those of flashgen bench.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.quarter.experiments import OWN_SCHEDULES, Item, held_out, pairs_of
from benchmarks.quarter.lines import Line, read
from flashgen import settings
from flashgen.bench import race
from flashgen.bench.case import BenchCase, make_inputs
from flashgen.bench.contenders import dispatchers, flashgen_and_torch, sdpa_deterministic
from flashgen.bench.ladder import LadderSteps
from flashgen.bench.record import provenance
from flashgen.bench.run import SMOKE_TARGET, copy_gbs, matmul_tflops, place_of
from flashgen.errors import NoGpuError
from flashgen.evaluate import inputs, measure, payloads, tasks
from flashgen.evaluate.build import cpu_count
from flashgen.evaluate.evaluator import Request
from flashgen.evaluate.offline import sound
from flashgen.evaluate.workers.child import Unrecoverable
from flashgen.kernels.launch import device_gpu
from flashgen.kernels.render import render
from flashgen.runtime.kernel_files import binaries, offer
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import CheckResult, Outcome, Source, Stage, Status, Timing
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import known_target
from flashgen.spec.records import record_of
from flashgen.tune.precompile import precompile

WARM_S, SAMPLE_S, LOAD_US = 0.15, 0.12, 30_000.0
"""Of a contender of a round, in place of a final round's 2 s and 1 s; the passes are as many."""
LOWEST = 19
UNFIT = (Status.ILLEGAL, Status.COMPILE_ERROR, Status.OUT_OF_RESOURCES, Status.WRONG)
PEERS = ("flashgen", "SDPA cuDNN", "SDPA flash", "SDPA flash, deterministic")


def begin(payload: Line) -> Line:
    """What the file and its reader must know of the device."""
    found = place(**payload)
    return {"about": found.about, "gpu": asdict(found.gpu), "first_line": found.first_line}


def measured(payload: Line) -> Line:
    """What the line of an item says. Raises Unrecoverable if the context is lost."""
    item = record_of(Item, payload.pop("item"))
    return place(**payload).measured(item)


def ahead(payload: Line) -> Line:
    """Compile what is launched, but for what Triton's cache has."""
    os.nice(LOWEST)
    offer_carried()
    gpu = device_gpu(0)
    list(precompile(pairs_of(payload["only"], gpu), gpu, jobs=max(1, cpu_count() - 1)))
    return {}


def offer_carried() -> None:
    """Put the kernels that are carried into Triton's cache, which finds them by their keys."""
    carried = settings.aot_folder()
    for name in binaries(carried) if carried else ():
        offer(name)


@functools.cache
def place(out: str, tiny: bool) -> Place:
    """The device of this process."""
    if torch.cuda.is_available():
        offer_carried()
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    return Place(Path(out), tiny)


class Place:
    """The device, and what is done on it. Without a GPU only what Triton's interpreter runs is
    done, and no time is kept.
    """

    def __init__(self, out: Path, tiny: bool) -> None:
        self.on_gpu, self.tiny, self.out = torch.cuda.is_available(), tiny, out
        if not (self.on_gpu or self.tiny):
            raise NoGpuError("torch sees no GPU here: --tiny tries the program without one")
        torch.backends.cuda.enable_cudnn_sdp(not self.tiny)  # a driver that records has none
        self.bench = place_of(0, smoke=not self.on_gpu)
        self.gpu = self.bench.gpu or known_target(SMOKE_TARGET)
        self.device = self.bench.device
        self.budgets = {True: measure.BUDGETS["final"]}
        self.budgets[False] = replace(self.budgets[True], warm_s=WARM_S, sample_s=SAMPLE_S)
        vars(measure)["LOAD_US"] = LOAD_US
        carried = settings.aot_folder()
        facts = map(Outcome.from_json, read(carried.with_name("facts.jsonl")) if carried else ())
        self.facts = {(o.gpu, o.spec, o.problem, o.config, o.stage): o for o in facts}
        self.frozen = {item.key: line for item, line in held_out(self.gpu).items()}
        self.dispatchers = dispatchers()
        served, folder = self.dispatchers[0].served, self.out / "kernels"
        self.ladder = LadderSteps(gpu=self.gpu, served=served, evaluator=None, folder=folder)
        self.about: Line = {"kind": "about", "tiny": self.tiny} | provenance(
            self.bench.gpu, command="gpu_quarter.py run", dtype="bfloat16",
            tables=self.dispatchers[0].digest(), conditions=self.bench.conditions(),
        )  # fmt: skip
        self.checked: set[tuple[AttentionSpec | None, KernelConfig]] = set()
        self.cached: Counter[bool] = Counter()
        if self.on_gpu:
            from triton import knobs

            knobs.compilation.listener = lambda **fact: self.cached.update([fact["cache_hit"]])

    @property
    def first_line(self) -> str:
        """Where this runs, and of which Triton the carried kernels are."""
        carried, folder = "none are carried, all are compiled here", settings.aot_folder()
        for file in folder.glob("*/manifest.json") if folder else ():
            held = json.loads(file.read_text())
            same = "" if held["triton"] == self.about["triton"] else ", and compiled anew"
            carried = f"{len(held['kernels'])} are carried, of Triton {held['triton']}{same}"
        where = self.gpu.name if self.on_gpu else "no GPU, nothing is measured"
        return f"{where}; Triton {self.about['triton']}; kernels: {carried}"

    def measured(self, item: Item) -> Line:
        """What an item's line says. Raises Unrecoverable if the context is lost."""
        self.cached.clear()
        measure.BUDGETS["final"] = self.budgets[item.full]
        found: Line = {"status": "ok"}
        try:
            if self.on_gpu or item.kind in ("check", "case"):
                found |= getattr(self, f"_{item.kind}")(item)
        except Exception as error:  # torch, Triton and the driver each raise classes of their own
            self._still_answers(error)
            raise
        return found | {"compiled": self.cached[False]}

    def _tried(self, do: Callable[[Item], Line], item: Item) -> tuple[Line, str]:
        """What the line says, or why there is none. Raises Unrecoverable if the context is lost."""
        try:
            return do(item), ""
        except Exception as error:  # as in measured()
            self._still_answers(error)
            return {}, str(error)

    def _still_answers(self, error: Exception) -> None:
        """Raise Unrecoverable if the device does not."""
        try:
            tasks.device_answers({"device": self.device})
        except NoGpuError:
            raise Unrecoverable from error.__cause__ or error

    def _floors(self, item: Item) -> Line:
        rates = {"cuBLAS, TFLOP/s": matmul_tflops("bfloat16", self.bench)}
        return {"rows": rates | {"copy, GB/s": copy_gbs(self.bench)}}

    def _host(self, item: Item) -> Line:
        from benchmarks import dispatch_overhead

        dispatch_overhead.BATCHES = 2 if self.tiny else 200
        return {"rows": {f"{e.name}, us": e.median_us for e in dispatch_overhead.costs()}}

    def _varlen(self, item: Item) -> Line:
        """Torch's FlashAttention-2 over packed sequences, forward and backward."""
        assert item.spec is not None
        call = inputs.make_forward(item.spec, item.problem, 0, self.device)
        of, every = call.features.sequences, (call.q, call.k, call.v)
        q, k, v = (x[0].transpose(0, 1).detach().requires_grad_() for x in every)
        ends = (of.q_begins, of.k_begins, of.max_q, of.max_k)

        def forward() -> Any:
            of_torch = torch.ops.aten._flash_attention_forward
            return of_torch(q, k, v, *ends, 0.0, item.spec.causal, False, scale=call.scale)[0]

        o = forward()
        do = torch.randn_like(o)
        runs = {
            "torch varlen forward, us": torch.no_grad()(forward),
            "backward, us": lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True),
        }
        free = measure.Ceiling(operations=0.0, peak_tflops=None)
        raced = measure.interleave(
            list(runs.values()), stopwatch=self.bench.stopwatch, ceilings=[free, free]
        )
        return {"rows": dict(zip(runs, (each.timing.median_us for each in raced), strict=True))}

    def _check(self, item: Item) -> Line:
        spec, config = item.spec, item.configs[0]
        if not self.on_gpu and not config.interpretable:
            return {}
        asked = payloads.Check(
            spec=spec, config=config, device=self.device, arch=self.gpu.arch, seed=0
        )
        result = CheckResult(**tasks.check_one(asdict(asked)))
        status = Status.OK if result.passed else Status.WRONG
        self.checked.add((spec, config))
        held = result if sound(result) else None  # a file has no number that is not finite
        outcome = self.outcome("check", item, config, status=status, check=held)
        return {"status": status.value, "outcomes": [outcome]}

    def _launches(self, item: Item) -> Any:
        return payloads.Launches(
            spec=item.spec, problem=item.problem, device=self.device, seed=0, cache=str(self.out),
            l2_bytes=self.gpu.l2_bytes, peak_tflops=self.gpu.peak_tflops,
        )  # fmt: skip

    def _rough(self, item: Item) -> Line:
        config, frozen = item.configs[0], self.frozen.get(item.key)
        asked = payloads.Measure(launches=self._launches(item), config=config, effort="rough")
        found = {"timing": record_of(Timing, tasks.measure_one(asdict(asked)))}
        found |= {"estimate": record_of(Timing, frozen["estimate"])} if frozen else {}
        return {"outcomes": [self.outcome("rough", item, config, **found)]}

    def _round(self, item: Item) -> Line:
        """The fastest is compared with float64, unless it was. If the round fails, it is repeated
        without those that fail by themselves.
        """
        failed: dict[str, str] = {}
        configs = [c for c in item.configs if self._fits(item, c)]
        final = payloads.Final(launches=self._launches(item), configs=tuple(configs))
        try:
            found = tasks.measure_round(asdict(final))
        except Exception as error:  # as in measured()
            self._still_answers(error)
            alone = {c: self._tried(self._rough, replace(item, configs=(c,)))[1] for c in configs}
            failed = {config.label: why for config, why in alone.items() if why}
            configs = [config for config, why in alone.items() if not why]
            if not configs:
                raise
            found = tasks.measure_round(asdict(replace(final, configs=tuple(configs))))
        sdpa_us = found["sdpa"] and found["sdpa"]["median_us"]
        timings = [record_of(Timing, each) for each in found["timings"]]
        outcomes = [
            self.outcome("final", item, config, timing=timing, passes_us=us, sdpa_us=sdpa_us)
            for config, timing, us in zip(configs, timings, found["passes"], strict=True)
        ]
        line = {"failed": failed, "conditions": found["conditions"], "outcomes": outcomes}
        medians = [timing.median_us for timing in timings]
        best = configs[medians.index(min(medians))].kernel
        if (item.spec, best) not in self.checked:
            # The times stay, but without a check nothing enters a table.
            checked, why = self._tried(self._check, replace(item, configs=(best,)))
            outcomes += checked.get("outcomes", ())
            failed |= {best.label: why} if why else {}
        return line

    def _case(self, item: Item) -> Line:
        """As flashgen bench has it, without the contenders of which nothing new is expected."""
        case = BenchCase(direction=item.direction, spec=item.spec, problem=item.problem)
        every = flashgen_and_torch(case, *self.dispatchers, smoke=not self.on_gpu)
        contenders = [
            each
            for each in (*every, *sdpa_deterministic(case), *self.ladder.contenders(case))
            if each.name in (("flashgen", "SDPA math") if self.tiny else PEERS)
            or any(word in each.name for word in OWN_SCHEDULES)
        ]
        x = make_inputs(case, self.device)
        with torch.no_grad():
            found, during = race.run_case(case, x, contenders, self.bench)
        sizes = {"spec": asdict(case.spec), "problem": asdict(case.problem)}
        ran = {"key": case.key, "direction": case.direction, "lines": [asdict(e) for e in found]}
        return {"case": ran | sizes | {"run": 0, "during": during and asdict(during)}}

    def _fits(self, item: Item, config: KernelConfig) -> bool:
        """Whether nothing is known against a kernel from before."""
        facts = (self._fact(item, config, stage) for stage in ("timed", "check"))
        return all(fact is None or fact.status not in UNFIT for fact in facts)

    def _fact(self, item: Item, config: KernelConfig, stage: Stage) -> Outcome | None:
        return self.facts.get((self.gpu.slug, item.spec, item.problem, config, stage))

    def outcome(self, stage: Stage, item: Item, config: KernelConfig, **found: Any) -> Line:
        """An outcome as a log has it, with the estimate and the facts that were prepared."""
        if fact := self._fact(item, config, "timed"):
            told = ("registers", "shared_bytes", "spill_bytes")
            found = {name: getattr(fact, name) for name in told} | {"estimate": fact.timing} | found
        source: Source = "measured" if self.on_gpu else "untimed"
        asked = Request(
            stage=stage, spec=item.spec, problem=item.problem, gpu=self.gpu.slug, source=source
        )
        status, digest = found.pop("status", Status.OK), render(item.spec, config).digest
        return asked.outcome(config, status, digest=digest, **found).to_json()
