"""Entries: what a search found, as a row of the table, and what is said of it."""

from __future__ import annotations

from flashgen.entry import Entry, Result, RunnerUp
from flashgen.outcome import Outcome
from flashgen.problem import Problem, bucket_of, flops
from flashgen.search.goal import Found
from flashgen.spec import SHORT_DTYPE, AttentionSpec


def entry_of(spec: AttentionSpec, problem: Problem, found: Found, run: str) -> Entry:
    """The row of the table. The winner was compiled and checked, so its facts are there."""
    winner = found.winner
    assert winner.registers is not None
    assert winner.shared_bytes is not None
    assert winner.check is not None
    timing = winner.timing
    default = found.default.timing
    return Entry(
        spec=spec,
        bucket=bucket_of(problem.seq_k),
        config=winner.config,
        digest=winner.digest,
        shared_bytes=winner.shared_bytes,
        registers=winner.registers,
        run=run,
        result=Result(
            source=winner.source,
            problem=problem,
            median_us=timing.median_us if timing else None,
            p20_us=timing.low_us if timing else None,
            p80_us=timing.high_us if timing else None,
            tflops=timing.tflops(flops(spec, problem)) if timing else None,
            default_us=default.median_us if default else None,
            sdpa_us=winner.sdpa_us,
            max_abs_err_floors=winner.check.floors,
            candidates=found.candidates,
            legal=found.legal,
            p_value=found.p_value,
            regret=0.0,
        ),
        runners_up=tuple(runner_up_of(outcome) for outcome in found.runners_up),
    )


def runner_up_of(outcome: Outcome) -> RunnerUp:
    """The row of a config that came next."""
    return RunnerUp(
        config=outcome.config,
        source=outcome.source,
        median_us=outcome.timing.median_us if outcome.timing else None,
        digest=outcome.digest,
    )


def title_of(spec: AttentionSpec, problem: Problem) -> str:
    """What is searched, in few words."""
    return f"{spec.name} seq {problem.seq_k}"


def sentence(entry: Entry, found: Found) -> str:
    """One line on a finished search."""
    result = entry.result
    words = [entry.config.label, result.source]
    if result.median_us is not None:
        words += [f"{result.median_us:.1f} us"]
    if result.speedup is not None:
        words += [f"{result.speedup:.2f} x default"]
    tried = f"{found.candidates} of {found.legal}"
    words += [
        f"all {found.legal} legal configs tried" if found.exhaustive else f"{tried} configs tried"
    ]
    return f"{title_of(entry.spec, result.problem)}: {', '.join(words)}"


def shared_sentence(old: Entry, new: Entry) -> str:
    """One line on a bucket that takes another one's kernel."""
    cost = f"for {new.result.regret:.2%} more time" if new.result.regret else "no slower"
    return (
        f"{title_of(new.spec, new.result.problem)}: {new.config.label} in the place of "
        f"{old.config.label}, {cost}: one kernel fewer"
    )


def explain_options(entry: Entry) -> str:
    """The options of `flashgen explain` for this entry."""
    spec = entry.spec
    dtype = "tf32" if spec.precision == "tf32" else SHORT_DTYPE[spec.dtype]
    dims = str(spec.head_dim)
    if spec.head_dim_v != spec.head_dim:
        dims += f"x{spec.head_dim_v}"
    causal = " --causal" if spec.causal else ""
    kernel = "" if spec.direction == "forward" else f" --direction {spec.direction}"
    kernel += spec.cache_options
    words = "".join(f" --feature {word}" for word in spec.feature_words)
    named = f"--dtype {dtype} --head-dim {dims} --seq {entry.result.problem.seq_k}"
    return f"{named}{causal}{kernel}{words}"
