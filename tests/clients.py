"""Writes the tables of docs/clients.md: what works with which program, by the tests that there are.

    python -m tests.clients            the table
    python -m tests.clients --reasons  why there is a no
    python -m tests.clients --tests    the tests behind each yes and each refused
    python -m tests.clients --ran      with what they ran
    python -m tests.docs_output clients.md  all four, into the page
    python -m tests.clients --run PLACE...  run those below these places of tests/, as RUNS has it from then on

A cell names its test, "file::function", below tests/. It is an error if there is no such test, if one
behind a "refused" expects no error, if one is always skipped, or if it has not run and passed by --run: make -f
tests/sessions.mk clients runs all.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from flashgen.errors import FlashgenError
from tests.engines import sources

HERE = Path(__file__).resolve().parent
RUNS = HERE / "data" / "client_runs.json"
"""The tests that ran, and with which torch and Triton: those whose cases passed, but for skipped ones."""
COLUMNS = ("forward", "training", "packed", "compile", "graphs", "cache")


@dataclass(frozen=True)
class Yes:
    """A test that compares what the program gets, or of graphs records what it launches."""

    test: str


@dataclass(frozen=True)
class Refused:
    """A test that expects the error."""

    test: str


@dataclass(frozen=True)
class No:
    """Neither; why, in a sentence."""

    why: str


Cell = Yes | Refused | No


@dataclass(frozen=True, kw_only=True)
class Client:
    """A program that calls attention, its version that tests have, and a cell for each of COLUMNS."""

    name: str
    version: str
    cells: tuple[Cell, ...]

    def __post_init__(self) -> None:
        if len(self.cells) != len(COLUMNS):
            raise FlashgenError(f"{self.name} has {len(self.cells)} cells of {len(COLUMNS)}")


def pinned(package: str) -> str:
    """The version in constraints.txt."""
    text = (HERE.parent / "constraints.txt").read_text()
    (version,) = re.findall(rf"^{package}==(\S+)$", text, re.MULTILINE)
    return str(version)


NO_CACHE = No("it has no caches: earlier keys are handed over with the new ones")
AN_ENGINE = No("it is an engine for inference")
NOT_TESTED = No("no test has it")
SDPA, TORCH, HOOK = "interpreted/runtime/test_sdpa.py", "cpu/runtime/test_torch_flash.py", "driver/test_torch_flash.py"  # fmt: skip
MODELS, PACKING = "interpreted/runtime/test_transformers.py", "cpu/runtime/test_transformers_packing.py"  # fmt: skip
GENERATES = "cpu/runtime/test_transformers_cpu.py::test_continuous_batching_generates_what_each_prompt_alone_does"
DIFFUSERS, BIASES = "interpreted/runtime/test_diffusers.py", "cpu/runtime/test_xformers.py"
FA2, FA3, FA4 = (f"cpu/runtime/test_flash_attn{number}.py" for number in ("", "_3", "_4"))
OPS3 = "cpu/runtime/test_flash_attn_3_operators.py"
VLLM, SGLANG = "engines/test_vllm.py", "engines/test_sglang.py"
GRAPHS, PAGED = Yes("driver/test_clients.py::test_a_capture_is_whole"), "driver/test_paged_operators.py"  # fmt: skip
ONE_GRAPH = Yes("cpu/runtime/test_compiled_clients.py::test_a_call_is_one_graph")
OPERATORS = Yes("cpu/runtime/test_paged.py::test_torch_compile_keeps_the_operators_whole")


def clients() -> tuple[Client, ...]:
    """All of them."""
    return (
        Client(
            name="torch's `scaled_dot_product_attention`, imported", version=pinned("torch"),
            cells=(
                Yes(f"{SDPA}::test_it_is_torchs_function"), Yes(f"{SDPA}::test_it_is_torchs_function"),
                No("it has no packed sequences, and nested tensors are left to torch"),
                Yes(f"{SDPA}::test_it_compiles"), GRAPHS, NO_CACHE,
            ),
        ),
        Client(
            name="torch's flash attention, registered", version=pinned("torch"),
            cells=(
                Yes(f"{TORCH}::test_the_operators_compute_what_math_computes"),
                Yes(f"{TORCH}::test_the_operators_compute_what_math_computes"),
                Yes(f"{TORCH}::test_packed_sequences_and_windows"),
                Yes(f"{HOOK}::test_compiled_calls_run_on_flashgen"),
                Yes(f"{HOOK}::test_a_capture_is_whole"), NOT_TESTED,
            ),
        ),
        Client(
            name="transformers", version=pinned("transformers"),
            cells=(
                Yes(f"{MODELS}::test_a_model_trains_as_with_eager"),
                Yes(f"{MODELS}::test_a_model_trains_as_with_eager"),
                Yes(f"{PACKING}::test_a_model_trains_as_with_eager"),
                Yes(f"{PACKING}::test_a_compiled_model_trains_as_with_eager"), NOT_TESTED,
                Yes(f"{MODELS}::test_generation_with_a_cache_is_eagers"),
            ),
        ),
        Client(
            name="transformers, `generate_batch`", version=pinned("transformers"),
            cells=(
                Yes(GENERATES), No("it generates"), Yes(GENERATES), NOT_TESTED, NOT_TESTED, Yes(GENERATES),
            ),
        ),
        Client(
            name="diffusers", version=pinned("diffusers"),
            cells=(
                Yes(f"{DIFFUSERS}::test_a_call_is_as_of_native"),
                Yes(f"{DIFFUSERS}::test_a_model_with_masks_trains_as_with_native"),
                No("it hands over masks in place of packed sequences"),
                Yes(f"{DIFFUSERS}::test_the_model_is_one_graph"), GRAPHS, NO_CACHE,
            ),
        ),
        Client(
            name="flash_attn 2", version=_flash_attn(),
            cells=(
                Yes(f"{FA2}::test_flash_attn_func"),
                Yes(f"{FA2}::test_head_dims_between_those_of_kernels_are_padded"),
                Yes(f"{FA2}::test_head_dims_between_those_of_kernels_are_padded"),
                Yes(f"{FA2}::test_torch_compile_traces_what_is_derived"), GRAPHS,
                Yes(f"{FA2}::test_with_kvcache_appends_rotates_and_attends"),
            ),
        ),
        Client(
            name="FlashAttention 3, `flash_attn_interface`", version="its names",
            cells=(
                Yes(f"{FA3}::test_dense_and_packed"), Yes(f"{FA3}::test_gradients"),
                Yes(f"{FA3}::test_dense_and_packed"), ONE_GRAPH, GRAPHS,
                Yes(f"{FA3}::test_a_cache_and_new_keys"),
            ),
        ),
        Client(
            name="FlashAttention 3, `torch.ops.flash_attn_3`", version="its schemas",
            cells=(
                Yes(f"{OPS3}::test_a_batch_and_its_gradients"), Yes(f"{OPS3}::test_a_batch_and_its_gradients"),
                Yes(f"{OPS3}::test_packed_sequences_and_their_gradients"), NOT_TESTED, NOT_TESTED,
                Yes(f"{OPS3}::test_a_cache"),
            ),
        ),
        Client(
            name="FlashAttention 4, `flash_attn.cute`", version="its names",
            cells=(
                Yes(f"{FA4}::test_dense_and_packed"),
                Yes(f"{FA4}::test_gradients_of_a_sink_of_another_dtype"),
                Yes(f"{FA4}::test_dense_and_packed"), ONE_GRAPH, GRAPHS,
                Yes(f"{FA4}::test_keys_in_pages"),
            ),
        ),
        Client(
            name="xformers", version=sources.XFORMERS,
            cells=(
                Yes("engines/test_xformers.py::test_a_batch"), Yes("engines/test_xformers.py::test_a_batch"),
                Yes("engines/test_xformers.py::test_packed_sequences"), ONE_GRAPH, GRAPHS,
                Yes("engines/test_xformers.py::test_packed_sequences"),
            ),
        ),
        Client(
            name="vLLM", version=sources.VLLM,
            cells=(
                Yes(f"{VLLM}::test_requests_by_vllms_scheduler_in_every_layout"), AN_ENGINE,
                Yes(f"{VLLM}::test_requests_by_vllms_scheduler_in_every_layout"), OPERATORS,
                Yes(f"{PAGED}::test_a_decode_can_be_captured"),
                Yes(f"{VLLM}::test_requests_by_vllms_scheduler_in_every_layout"),
            ),
        ),
        Client(
            name="vLLM, encoder layers", version=sources.VLLM,
            cells=(
                Yes(f"{VLLM}::test_encoder_only_layers"), AN_ENGINE,
                Yes(f"{VLLM}::test_encoder_only_layers"), NOT_TESTED, NOT_TESTED,
                No("the keys of an encoder are in no cache"),
            ),
        ),
        Client(
            name="vLLM, cross attention", version=sources.VLLM,
            cells=(
                Yes(f"{VLLM}::test_cross_attention"), AN_ENGINE, Yes(f"{VLLM}::test_cross_attention"),
                OPERATORS, Yes(f"{PAGED}::test_a_decode_can_be_captured"),
                Yes(f"{VLLM}::test_cross_attention"),
            ),
        ),
        everywhere(
            "vLLM, context parallelism", sources.VLLM,
            f"{VLLM}::test_a_configuration_that_it_lacks_is_no_engine",
        ),
        Client(
            name="SGLang", version=sources.SGLANG,
            cells=(
                Yes(f"{SGLANG}::test_prompts_chunks_and_decodes_as_sglangs_own_backend"), AN_ENGINE,
                Yes(f"{SGLANG}::test_prompts_chunks_and_decodes_as_sglangs_own_backend"), OPERATORS,
                Yes(f"{SGLANG}::test_a_graph_reads_the_same_memory_at_every_replay"),
                Yes(f"{SGLANG}::test_prompts_chunks_and_decodes_as_sglangs_own_backend"),
            ),
        ),
        everywhere(
            "SGLang, speculation", sources.SGLANG, f"{SGLANG}::test_what_a_runner_may_not_ask"
        ),
        Client(
            name="`kernels` of the Hugging Face Hub", version=pinned("kernels"),
            cells=(
                Yes("cpu/table/test_export_hf_kernel.py::test_get_local_kernel_loads_it"),
                *(No("the folder has the functions above, which no test calls through it"),) * 5,
            ),
        ),
    )  # fmt: skip


def everywhere(name: str, version: str, test: str) -> Client:
    """A program that is refused as a whole."""
    return Client(name=name, version=version, cells=(Refused(test),) * len(COLUMNS))


def _flash_attn() -> str:
    """The version whose own tests run on ours."""
    (version,) = set(re.findall(r"flash_attn-([\d.]+)\.tar", (HERE / "sessions.mk").read_text()))
    return str(version)


def check(cell: Cell) -> None:
    """Raise FlashgenError unless a cell's test is there and can say what the cell says."""
    if isinstance(cell, No):
        return
    file, _, name = cell.test.partition("::")
    found = _functions(HERE / file).get(name)
    if found is None:
        raise FlashgenError(f"tests/clients.py names a test that is not there: {cell.test}")
    text = ast.unparse(found)
    if "mark.skip(" in text:
        raise FlashgenError(f"a test of tests/clients.py is always skipped: {cell.test}")
    if isinstance(cell, Refused) and "pytest.raises(" not in text:
        raise FlashgenError(f"a test of a refusal expects no error: {cell.test}")
    if cell.test not in runs():
        raise FlashgenError(f"a test has not run: {cell.test}; make -f tests/sessions.mk clients")


def runs() -> dict[str, str]:
    """What RUNS holds: by test, with what it ran."""
    found: dict[str, str] = json.loads(RUNS.read_text()) if RUNS.exists() else {}
    return found


class Outcomes:
    """A pytest plugin: of each test function, whether its cases passed."""

    def __init__(self) -> None:
        self.found: dict[str, set[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of one case."""
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.partition("[")[0].removeprefix("tests/")
            self.found.setdefault(name, set()).add(report.outcome)


def run(rows: Sequence[Client], places: Sequence[str]) -> int:
    """Run the tests that cells name below these places, in this environment, and note in RUNS those that passed;
    those that did not are no longer in it.
    """
    import torch
    import triton

    named = {cell.test for row in rows for cell in row.cells if not isinstance(cell, No)}
    chosen = sorted(each for each in named if each.startswith(tuple(places)))
    outcomes = Outcomes()
    status = pytest.main(
        ["-q", "-p", "no:cacheprovider", *(str(HERE / x) for x in chosen)], [outcomes]
    )
    passed = {
        test for test in chosen if outcomes.found.get(test, set()) - {"skipped"} == {"passed"}
    }
    torch_ = torch.__version__.partition("+")[0]
    kept = {test: ran for test, ran in runs().items() if test in named and test not in chosen}
    kept |= dict.fromkeys(passed, f"torch {torch_}, Triton {triton.__version__}")
    RUNS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    missing = [each for each in chosen if each not in passed]
    print("\n".join(f"did not pass: {each}" for each in missing))
    return int(status) or bool(missing)


def ran(rows: Sequence[Client]) -> Iterator[str]:
    """The lines of a table of what the tests ran with."""
    named = {cell.test for row in rows for cell in row.cells if not isinstance(cell, No)}
    counts = Counter(with_ for test, with_ in runs().items() if test in named)
    yield from _header("tests", "ran with")
    yield from (_row(str(count), with_) for with_, count in counts.most_common())


@functools.cache
def _functions(file: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _reasons(rows: Sequence[Client]) -> list[str]:
    """The sentences of all noes, each once."""
    return list(dict.fromkeys(c.why for row in rows for c in row.cells if isinstance(c, No)))


def table(rows: Sequence[Client]) -> Iterator[str]:
    """Its lines."""
    reasons = _reasons(rows)
    yield from _header("client", "tested version", *COLUMNS)
    for row in rows:
        for cell in row.cells:
            check(cell)
        words = (
            f"no [{reasons.index(cell.why) + 1}]"
            if isinstance(cell, No)
            else type(cell).__name__.lower()
            for cell in row.cells
        )
        yield _row(row.name, row.version, *words)


def why_not(rows: Sequence[Client]) -> Iterator[str]:
    """The lines of a table of the noes."""
    yield from _header("no", "why")
    for number, sentence in enumerate(_reasons(rows), 1):
        yield _row(f"[{number}]", sentence)


def tests(rows: Sequence[Client]) -> Iterator[str]:
    """The lines of a table of all tests that are named."""
    yield from _header("client", "tests, below `tests/`")
    for row in rows:
        named: dict[str, list[str]] = {}
        for column, cell in zip(COLUMNS, row.cells, strict=True):
            if not isinstance(cell, No):
                named.setdefault(cell.test, []).append(column)
        shown = (
            f"`{test}`" if len(columns) == len(COLUMNS) else f"{', '.join(columns)}: `{test}`"
            for test, columns in named.items()
        )
        yield _row(row.name, "; ".join(shown))


def _header(*titles: str) -> tuple[str, str]:
    return _row(*titles), _row(*("---",) * len(titles))


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str]) -> int:
    """Print a table; the exit code."""
    if arguments[:1] == ["--run"]:
        return run(clients(), arguments[1:])
    prints = {(): table, ("--reasons",): why_not, ("--tests",): tests, ("--ran",): ran}
    shown = prints.get(tuple(arguments))
    if shown is None:
        print(
            f"unknown: {' '.join(arguments)}; see the text above tests/clients.py", file=sys.stderr
        )
        return 2
    print("\n".join(shown(clients())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
