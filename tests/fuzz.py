"""Bad input for everything that flashgen reads: files, command lines and public calls.

A case is a target and a number, from which all of it follows: python -m tests.fuzz TARGET NUMBER repeats one, and
python -m tests.fuzz TARGET FIRST COUNT many. A mutator changes valid input in one to four places. It knows JSON, and
YAML by its scalars, so most cases get past the parser.

A case fails on an exception that is no FlashgenError, on output that is accepted and cannot be read back, on ESC in a
message, and on a file outside of the case's own folder.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flashgen
from flashgen import cli, paths
from flashgen.bench.case import BenchCase
from flashgen.bench.race import RaceResult
from flashgen.bench.record import BenchRecord
from flashgen.compile.compiler import FACTS, Compiled, cache_file, recall
from flashgen.compile.verdict import judge
from flashgen.errors import MOST_SHOWN, FlashgenError
from flashgen.estimate import replay as replays
from flashgen.estimate.estimate import estimate_cubin, time_of
from flashgen.estimate.replay import Replay
from flashgen.estimate.sm import Usage
from flashgen.evaluate.quarantine import Quarantine, _record
from flashgen.files import write_whole
from flashgen.ptx.execute import Loaded, execute
from flashgen.ptx.machine import LaunchInputs as PtxLaunch
from flashgen.ptx.memory import Buffer
from flashgen.ptx.text import parse as parse_ptx
from flashgen.report.html import write_report
from flashgen.runtime import flash_attn, flash_attn_3, flash_attn_4, kernel_files, xformers
from flashgen.schedules.outcome import Outcome, Status, Timing
from flashgen.search.log import Log, outcomes_of
from flashgen.spec.problem import BUCKETS, workload
from flashgen.table import emit
from flashgen.table.evidence import evidence_file, evidence_text
from flashgen.table.table import Table
from flashgen.table.table_file import dump, load_with_evidence, save
from flashgen.tune import hf_config, hf_fields, hf_kinds, hf_layers, hf_masks, workloads
from flashgen.tune.run_files import Session
from tests import cubins, xformers_biases
from tests.compiled import made_compiled, made_loop
from tests.ptx_snippets import kernel as ptx_kernel
from tests.tables import AHEAD, FA2, H200, SPEC, made_entry, made_run, made_table

HUGE = "9" * 5000
SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 2**31, 2**63, 10**400, 0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf"), "", "0",
    "a" * 5000, "\x1b[2J", "\x00", "\u202e", "\u0663", "\ud800", "a\nb", "../../planted", "/dev/zero", 'x", "y": z(',
    "__import__('os').system('exit 7')", "nvidia_h200", "sm_90", "sha256:" + "0" * 64, HUGE, f"b{HUGE}_h1_s1",
    f"br{HUGE}_bc64_w8_s2_fa2_ptr", "1/" + HUGE, [], {}, [[]], {"a": {}}, [0] * 70,
)  # fmt: skip
"""Values that stand where another should."""

WORDS = (
    b"0", b"-1", b"1e999", b"NaN", b"-Infinity", b".inf", HUGE.encode(), b"9" * 400, b"true", b"null", b"~", b"[]", b"{}",
    b"'", b'"', b"{", b"}", b"[", b"]", b",", b":", b"\n", b"- ", b"#", b"&a ", b"*a", b"!!python/name:os.system ", b"%",
    b"\x00", b"\x1b[2J", b"\xff\xfe", b"\xe2\x80\xae", b'"\\ud800"', b"\xd9\xa3", b"[" * 200, b"{a: " * 200, b"\\",
    b"[" * 30_000, b"? ", b"<<: ", b"|\n", b"=", b"0x10", b"1_000", b"!!int '3' ", b'!!str ',
)  # fmt: skip
"""Bytes that are put into a text, or in place of a word."""

_TOKEN = re.compile(rb"[\w.+/-]+|\"[^\"\n]*\"")


def mutated(draw: random.Random, text: bytes) -> bytes:
    """The text, changed in one to four places."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        text = draw.choice(_CHANGES)(draw, text)
    return text


def _token(draw: random.Random, text: bytes) -> bytes:
    found = list(_TOKEN.finditer(text))
    if not found:
        return text
    place = draw.choice(found)
    other = draw.choice((*WORDS, draw.choice(found)[0]))
    return text[: place.start()] + other + text[place.end() :]


def _line(draw: random.Random, text: bytes) -> bytes:
    lines = text.split(b"\n")
    here, there = draw.randrange(len(lines)), draw.randrange(len(lines))
    how = draw.randrange(4)
    if how == 0:
        del lines[here]
    elif how == 1:
        lines.insert(here, lines[there])
    elif how == 2:
        lines[here], lines[there] = lines[there], lines[here]
    else:
        lines[here] = b" " * draw.randrange(4) + lines[here]
    return b"\n".join(lines)


def _bytes(draw: random.Random, text: bytes) -> bytes:
    start = draw.randrange(len(text) + 1)
    end = min(len(text), start + draw.choice((0, 0, 1, 1, 3, 40)))
    new = draw.choice((b"", bytes([draw.randrange(256)]), draw.choice(WORDS)))
    return text[:start] + new + text[end:]


def _cut(draw: random.Random, text: bytes) -> bytes:
    return text[: draw.randrange(len(text) + 1)]


_CHANGES = (_token, _token, _token, _token, _line, _line, _bytes, _bytes, _cut)


def changed(draw: random.Random, record: Any) -> Any:
    """A JSON value with one to four values or keys changed."""
    record = copy.deepcopy(record)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        places = list(_places(record))
        if not places:
            return draw.choice(SCALARS)
        inside, key = draw.choice(places)
        how = draw.randrange(8)
        if how == 0:
            del inside[key]
        elif how == 1 and isinstance(inside, dict):
            inside[draw.choice(("new", "\x1b", "", "__class__"))] = copy.deepcopy(
                draw.choice(SCALARS)
            )
        elif how == 2:
            inside[key] = copy.deepcopy(draw.choice(places)[0])
        elif how == 3 and type(inside[key]) is float:
            inside[key] = draw.choice((-inside[key], 2 * inside[key], inside[key] / 3, "1"))
        else:
            inside[key] = copy.deepcopy(draw.choice(SCALARS))
    return record


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def text_of(draw: random.Random, record: Any) -> bytes:
    """A JSON text: of the changed value, or changed itself, or with arrays without end in it."""
    how = draw.randrange(10)
    if how < 7:
        return _json(changed(draw, record)).replace(b'"' + HUGE.encode() + b'"', HUGE.encode())
    if how < 9:
        return mutated(draw, _json(record))
    return _json(record).replace(b":", b":" + b"[" * draw.choice((100, 900, 100_000)), 1)


def _json(record: Any) -> bytes:
    text = json.dumps(record, ensure_ascii=random.Random(len(str(record))).random() < 0.9)
    return text.encode("utf-8", "surrogatepass")


def read(do: Callable[[], Any]) -> Any:
    """What `do` returns; None if it raises a FlashgenError, whose text must be printable."""
    try:
        return do()
    except FlashgenError as error:
        demand_short(str(error))
        return None


def demand_short(text: str) -> None:
    """A message echoes at most MOST_SHOWN characters of a value, of which it has a few."""
    demand_printable(text)
    assert len(text) < 5 * MOST_SHOWN, f"a message of {len(text)} characters: {text[:200]!r}"


def demand_printable(text: str) -> None:
    assert "\x1b" not in text, f"ESC reaches the terminal: {text[:200]!r}"


TABLE = made_table(
    made_entry(),
    made_entry(replace(SPEC, dtype="float16")),
    made_entry(bucket=BUCKETS[3], config=FA2, run="b"),
)
OUTCOME = Outcome(
    spec=SPEC,
    problem=workload(SPEC, 2048),
    config=AHEAD,
    stage="timed",
    status=Status.OK,
    source="estimated",
    gpu=H200.slug,
    triton="3.10",
    digest="sha256:" + "0" * 64,
    protocol=1,
    timing=Timing(median_us=10.5, low_us=10.0, high_us=11.0, samples=20, clock_mhz=1755.0),
    estimate=Timing(median_us=9.5, low_us=9.0, high_us=12.0),
    registers=168,
    spill_bytes=0,
    passes_us=(1.0, 2.0),
    detail="as found",
    created="2026-01-02T03:04:05Z",
)


def table(draw: random.Random, folder: Path) -> None:
    """A table and its evidence; an accepted one is written, read and emitted again."""
    source = dump(TABLE).encode()
    path = folder / "configs" / "nvidia_h200.yaml"
    write_whole(path, mutated(draw, source))
    if draw.random() < 0.5:
        lines = evidence_text(TABLE.entries).encode().splitlines()
        record = text_of(draw, json.loads(lines[0]))
        write_whole(evidence_file(path), record + b"\n" + mutated(draw, lines[1]))
        if draw.random() < 0.7:
            write_whole(path, source)
    found: Table | None = read(lambda: load_with_evidence(path))
    if found is None:
        return
    again = folder / "again" / "nvidia_h200.yaml"
    save(found, again)
    kept = load_with_evidence(again)
    assert dump(kept) == again.read_text()
    assert evidence_text(kept.entries) == evidence_text(found.in_order().entries)
    if draw.random() < 0.3:
        files = emit.plan({found.gpu.slug: found})
        tree = ast.parse(files[Path("tables", f"{found.gpu.slug}.py")])
        calls = {
            n.func.id
            for n in ast.walk(tree)
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        assert "__import__" not in calls


def log(draw: random.Random, folder: Path) -> None:
    """A log of outcomes, and the report made of it."""
    record = OUTCOME.to_json()
    path = folder / ".flashgen" / "nvidia_h200.jsonl"
    torn = draw.choice((b"\n", b"\n", b""))
    write_whole(path, _json(record) + b"\n" + text_of(draw, record) + torn)
    found = read(lambda: outcomes_of(path, demand_printable))
    for outcome in found or ():
        assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome
    if found and draw.random() < 0.2:
        read(lambda: write_report(TABLE, found, folder / "report.html", notice=demand_printable))

    def opened() -> None:
        with Log(path, gpu=H200.slug, triton="3.10", notice=demand_printable) as held:
            held.append(OUTCOME)

    read(opened)


def quarantine(draw: random.Random, folder: Path) -> None:
    record = _plain(_record(OUTCOME, Status.CRASHED))
    path = folder / "nvidia_h200.quarantine.jsonl"
    write_whole(path, text_of(draw, record) + b"\n" + _json(record) + draw.choice((b"\n", b"")))
    found = read(lambda: Quarantine(path, triton="3.10", notice=demand_printable))
    if found is not None:
        found.note(OUTCOME)
        demand_printable(str(found.reason(OUTCOME.digest, "estimated")))
        Quarantine(path, triton="3.10")


def session(draw: random.Random, folder: Path) -> None:
    path, request = folder / "nvidia_h200.session.json", {"trials": 60, "work": [[1, 2]]}
    begin = {"request": request, "run": made_run(), "table": TABLE}

    def begun() -> Session:
        return Session.begin(path, notice=demand_printable, **begin)  # type: ignore[arg-type]

    begun()
    write_whole(path, text_of(draw, json.loads(path.read_bytes())))
    found = read(begun)
    if found is not None:
        gpu = TABLE.gpu
        assert begun().found(gpu) == found.found(gpu)  # it resumes


def manifest(draw: random.Random, folder: Path) -> None:
    """A folder of binaries; what is offered to Triton's cache is what the manifest says."""
    import triton

    key, contents = "ab" * 32, {"k.json": b"{}", "k.cubin": b"ELF"}
    files = {name: _sha256(content) for name, content in contents.items()}
    record = {
        "schema": kernel_files.SCHEMA, "gpu": H200.name, "arch": H200.arch, "triton": triton.__version__,
        "kernels": {"k": [{"key": key, "files": files}]},
    }  # fmt: skip
    for name, content in contents.items():
        write_whole(
            folder / "aot" / "x" / key / name,
            mutated(draw, content) if draw.random() < 0.1 else content,
        )
    write_whole(folder / "aot" / "x" / kernel_files.MANIFEST, text_of(draw, record))
    kernel_files.binaries.cache_clear()
    with environment(FLASHGEN_AOT=str(folder / "aot")), triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder / "triton")
        read(lambda: kernel_files.offer("k"))
    kernel_files.binaries.cache_clear()
    for path in (folder / "triton").rglob("k.*"):
        assert _sha256(path.read_bytes()) in files.values()


def _sha256(content: bytes) -> str:
    import hashlib

    return hashlib.sha256(content).hexdigest()


def bench(draw: random.Random, folder: Path) -> None:
    """The times of an earlier run, and its mark; an accepted file is written and read again."""
    run = {"measured": True, "gpu": _plain(H200), "protocol": 2, "torch": "2.13"}
    case = BenchCase(direction="forward", spec=SPEC, problem=OUTCOME.problem)
    line = RaceResult(
        name="sdpa",
        group="sdpa",
        detail="",
        status="ok",
        timing=OUTCOME.timing,
        tflops=5.0,
        floors=0.5,
    )
    BenchRecord(folder, run).add(case, [line], [None, None, None])
    path, mark = folder / "bench.json", folder / "in_flight.json"
    write_whole(path, text_of(draw, json.loads(path.read_bytes())))
    if draw.random() < 0.3:
        write_whole(mark, text_of(draw, [case.key, "sdpa"]))

    def opened() -> BenchRecord:
        found = BenchRecord(folder, run)
        found.strike(case, "flashgen")
        return found

    found = read(opened)
    if found is not None:
        assert BenchRecord(folder, run).cases == found.cases


def compiled(draw: random.Random, folder: Path) -> None:
    """A cached compilation: it is judged, or compiled again."""
    kept = made_compiled(digest=OUTCOME.digest, spilling=((2, 9),), other_loops=(made_loop(),))
    named = kept.digest, kept.arch, kept.triton, folder
    write_whole(cache_file(*named, "json"), text_of(draw, {"facts": FACTS} | kept.to_json()))
    write_whole(cache_file(*named, "cubin"), b"ELF")
    found = recall(*named)
    if found is not None:
        assert Compiled.from_json(json.loads(json.dumps(found.to_json()))) == found
        demand_printable(judge(found, SPEC, AHEAD, H200)[1])
        assert found.spill_share >= 0


REPLAY = Replay(
    residents=2, phases=((0,), (1, 2)), cycles=((9.0, 8.0), (18.0, 15.5)), far_cycles=((9.5, 8.0), (19.0, 16.0)),
    lone_cycles=(8.0, 7.0), loaded_bytes=(4096.0, 0.0), usage=(Usage(matrix=0.5, exp2=0.5, issue=0.5, shared=0.5, memory=0.5),) * 2, block_flops=(2048, 0, 4096),
    block_work=(2048.0, 0.0, 4096.0), least_cycles=(4.0, 0.0, 4.0), equal_parts=(1, 1, 2), block_cycles=(3000.0, 3500.0), far_block_cycles=(3300.0, 3800.0), tile_cycles=300.0, firm=True,
)  # fmt: skip


def replay(draw: random.Random, folder: Path) -> None:
    """A cached replay: it is the base of an estimate, or made again."""
    kept = made_compiled(digest=OUTCOME.digest)
    path = replays._replay_file(kept, H200, folder)
    if draw.random() < 0.3:
        content = text_of(draw, {"made_by": replays._made_by(H200), "replay": REPLAY.to_json()})
    else:
        content = _json(
            {"made_by": replays._made_by(H200), "replay": changed(draw, REPLAY.to_json())}
        )
    write_whole(path, content)
    found = replays.recall_replay(kept, H200, folder)
    if found is not None:
        assert Replay.from_json(json.loads(json.dumps(found.to_json()))) == found
        read(lambda: time_of(found, [(3,) * len(found.block_flops)] * 9, H200))


PTX = ptx_kernel(
    """mov.u32 %r1, %tid.x; ld.param.u64 %d1, [p0]; mul.wide.u32 %d2, %r1, 4; add.s64 %d1, %d1, %d2;
ld.global.b32 {%r2}, [%d1+0]; mov.u32 %r3, smem; shl.b32 %r4, %r1, 2; add.u32 %r3, %r3, %r4;
st.shared.b32 [%r3], %r2; bar.sync 0; mov.u32 %r5, 0;
LOOP: add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 4; @%p1 bra LOOP;
fma.rn.f32 %r6, %r2, 0f3F800000, %r5; shfl.sync.bfly.b32 %r7|%p2, %r6, 1, 31, -1; selp.b32 %r8, %r6, %r7, !%p2;
cp.async.cg.shared.global [%r3], [%d1], 16; cp.async.commit_group; cp.async.wait_group 0;
st.global.b32 [%d1], %r8;""",
    1,
).encode()  # fmt: skip
MORE_PTX = (
    b".reg .b32 %q<99999999999>;", b".reg .b7 %q<2>;", b"{{{{{{", b"[[[[%d1]]]]", b"%r1, %r2, %r3, %r4", b"%nosuch.x",
    b"LOOP: bra LOOP;", b".shared .align 0 .b8 wide[99999999999999];", b".reqntid 99999999", b"-2147483649", b"0x", b".b128",
    b"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1}, %d1, %d2, 1, 1, 1, 0, 0;", b"mbarrier.init.shared.b64 [%r3], 1;",
    b"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 32;", b"brx.idx %r1, LOOP;", b".u64", b"div.s32 %r1, %r2, 0;",
)  # fmt: skip
"""Texts that are put into PTX."""


def ptx_text(draw: random.Random, folder: Path) -> None:
    """PTX text that is changed, read, and executed for some steps."""
    content = mutated(draw, PTX)
    for _ in range(draw.choice((0, 1, 1, 2))):
        places = [place.start() for place in re.finditer(rb"[ ,;\n]", content)] or [0]
        at = draw.choice(places)
        content = content[:at] + b" " + draw.choice(MORE_PTX) + content[at:]

    def executed() -> None:
        loaded = Loaded(parse_ptx(content.decode("utf-8", "replace")))
        memory = Buffer(
            name="p0", address=1 << 16, content=np.zeros(256, np.uint8), end=(1 << 16) + 256
        )
        given = [memory.address.to_bytes(8, "little")]
        made = PtxLaunch(grid=(2, 1, 1), parameters=given, buffers=[memory], shared_bytes=4096)
        for finding in execute(loaded, made, most_steps=20_000).findings:
            demand_short(str(finding))

    read(executed)


def cubin(draw: random.Random, folder: Path) -> None:
    """Machine code and arguments of estimate_cubin."""
    with triton_cache(folder / "triton"):
        made = compiled_cubin()
    code = _bytes(draw, made.code) if draw.random() < 0.5 else made.code
    given = made.geometry() | {"blocks": [(32,)] * 864, "target": "nvidia_a100_sxm4_40gb"}
    given |= {"tile_flops": [1e6], "least_bytes": 1e6}
    for name in draw.sample(sorted(given), draw.choice((0, 1, 1, 2))):
        given[name] = draw.choice(
            (*SCALARS, [(2**70,)], [[0.5]], [("3",)], 7, [7], {}, H200, [1, 2], [-1.0])
        )
    read(lambda: estimate_cubin(code, **given))


@functools.cache
def compiled_cubin() -> cubins.Cubin:
    return cubins.single_phase(64, 64, 4, 2)


@contextlib.contextmanager
def triton_cache(folder: Path) -> Iterator[None]:
    import triton

    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        yield


MODELS: tuple[dict[str, Any], ...] = (
    {
        "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "head_dim": 128,
        "num_hidden_layers": 32, "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "sliding_window": 4096,
        "attention_dropout": 0.1, "layer_types": ["sliding_attention", "full_attention"], "architectures": ["A"],
        "attn_logit_softcapping": 50.0, "no_rope_layers": [1, 0],
    },
    {
        "model_type": "x", "dtype": "float16",
        "text_config": {
            "num_attention_heads": 16, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "num_hidden_layers": 3, "max_position_embeddings": 1024, "attn_config": {"alibi": True},
        },
        "vision_config": {
            "num_attention_heads": 12, "hidden_size": 768, "num_hidden_layers": 2, "image_size": [224, 224],
            "patch_size": 16, "num_register_tokens": 4,
        },
    },
    {
        "model_type": "t5", "is_encoder_decoder": True, "encoder_attention_heads": 8, "decoder_attention_heads": 8,
        "d_model": 512, "d_kv": 64, "num_heads": 8, "num_layers": 6, "num_decoder_layers": 6, "dropout_rate": 0.1,
        "relative_attention_num_buckets": 32, "n_positions": 512, "sliding_window_pattern": 6,
        "no_rope_layer_interval": 4, "multi_query": False, "use_sliding_window": True,
    },
)  # fmt: skip

FIELDS = sorted(
    {name for names in hf_fields.ALIASES.values() for name in names}
    | set(
        re.findall(
            r'get\("(\w+)"', "".join(map(inspect.getsource, (hf_kinds, hf_layers, hf_masks)))
        )
    )
)
"""What the reader of configurations reads by name."""


def model(draw: random.Random, folder: Path) -> None:
    path, config = folder / "config.json", dict(draw.choice(MODELS))
    for field in draw.sample(FIELDS, draw.choice((0, 1, 2))):
        config[field] = draw.choice((512, [1, 0], [["x", 2]], {"a": 1}, True, -1, 0.5, "x", None))
    write_whole(path, text_of(draw, config))
    directions = draw.choice((("forward",), ("forward", "backward"), ("decode",)))
    found = read(lambda: hf_config.from_hf_config(path, directions=directions))
    if found is not None:
        demand_printable("\n".join((found.name, *found.notes)) if False else "")
        assert found.lines()


WORKLOAD = b"""name: a model
specs:
- {dtype: bfloat16, head_dim: 128, mask: causal, heads: 32, kv_heads: 8, directions: [forward, backward], seqs: [2048, 512]}
- {dtype: float16, head_dim: 64, head_dim_v: 128, mask: none, seqs: {512: 1.5, 8192: 2}, weight: 3, alibi: true}
"""


def workload_file(draw: random.Random, folder: Path) -> None:
    path = folder / "workload.yaml"
    write_whole(path, mutated(draw, WORKLOAD))
    found = read(lambda: workloads.load(path))
    if found is not None:
        demand_printable("\n".join(found.lines()))
        demand_printable(found.name)


COMMANDS: tuple[tuple[str, ...], ...] = (
    ("targets",), ("show", "nvidia_h200"), ("show", "nvidia_h200", "--json", "--feature", "window"),
    ("explain", "--head-dim", "128", "--seq", "2048", "--causal", "--target", "nvidia_h200"),
    ("explain", "--head-dim", "64x32", "--seq", "1", "--dtype", "fp32", "--direction", "decode", "--paged", "--kv", "fp8"),
    ("report", "nvidia_h200"), ("table", "diff", "OUT/configs/nvidia_h200.yaml", "OUT/configs/nvidia_h200.yaml"),
    ("table", "merge", "OUT/configs/nvidia_h200.yaml", "--out", "OUT/nvidia_h200.yaml"),
    ("tune", "--target", "nvidia_h200", "--head-dim", "64", "--seq", "512", "--trials", "4", "--dtype", "bf16"),
    ("tune", "--workload", "OUT/workload.yaml", "--seed", "3", "--sampler", "tpe", "--jobs", "1"),
    ("tune", "--hf-config", "OUT/config.json", "--time-budget", "60", "--max-regret", "0.1", "--gpus", "0"),
    ("tune", "--direction", "decode", "--feature", "window", "--kv", "int8", "--shard", "1/2"),
    ("generate", "--check"), ("aot", "--target", "nvidia_h200"), ("calibrate", "OUT/log.jsonl", "--plot", "OUT/p.png"),
    ("verify", "--target", "nvidia_h200"), ("bench", "--head-dim", "64", "--seq", "33", "--batch", "1", "--smoke"),
    ("warmup", "--jobs", "2"), ("--version",), ("explain", "--help"),
)  # fmt: skip
ARGUMENTS = (
    "", "-", "--", "-1", "0", "1", "2", "x", "nan", "inf", "1e999", HUGE, "9" * 400, "a" * 5000, "\x1b[2J", "\udcff", "é",
    "\u202e", "../../planted", "/dev/null", "/dev/full", "/nonexistent/a", "all", "0,1", "0,0", "--out", "--target", "--gpu",
    "--debug", "--causal", "--feature", "nvidia_h200", "64x64x64", "x".join(["64"] * 50), "1/0",
    "all", "cmaes", "backward_dbias", "OUT", "OUT/configs", "OUT/configs/nvidia_h200.yaml", "$(id)", "%s%n", "{0}", "\n",
)  # fmt: skip


def command(draw: random.Random, folder: Path) -> None:
    """A command line. What takes longer than milliseconds is replaced by programs()."""
    save(TABLE, folder / "configs" / "nvidia_h200.yaml")
    write_whole(folder / "workload.yaml", WORKLOAD)
    write_whole(folder / "config.json", json.dumps(MODELS[0]))
    write_whole(folder / "log.jsonl", _json(OUTCOME.to_json()) + b"\n")
    words = list(draw.choice(COMMANDS))
    for _ in range(draw.choice((0, 1, 1, 2, 4))):
        place = draw.randrange(len(words) + 1)
        words[place : place + draw.randrange(2)] = [draw.choice(ARGUMENTS)]
    if "--out" not in words:
        words += ["--out", "OUT"] if draw.random() < 0.8 else []
    words = [word.replace("OUT", str(folder)) for word in words]
    output, code = run(words)
    assert code in (0, 1, 2, 3), (words, code, output)
    assert "a bug, " not in output, (words, output)
    demand_printable(output)


def run(words: list[str]) -> tuple[str, object]:
    """What a command line prints, and its exit code."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            cli.main(words)
        except SystemExit as ended:
            return output.getvalue(), ended.code
        except FlashgenError as error:  # of --debug
            return str(error), 1
    raise AssertionError("the command line must end by SystemExit")


def call(draw: random.Random, folder: Path) -> None:
    """A public call on tensors of the CPU."""
    name, arguments, options = _base_call(draw)
    for _ in range(draw.choice((1, 1, 2, 3))):
        if draw.random() < 0.5 and arguments:
            place = draw.randrange(len(arguments))
            arguments[place] = _other(draw, arguments[place])
        else:
            key = draw.choice(sorted(options) or ["nothing"])
            options[key] = _other(draw, options.get(key))
    with contextlib.suppress(TypeError):  # Python's own word for an argument of another type
        read(lambda: getattr(flashgen, name)(*arguments, **options))


def drop_in(draw: random.Random, folder: Path) -> None:
    """A call of another package's function on tensors of the CPU: also with a bias of xformers whose fields are
    changed.
    """
    name, function, arguments = _base_drop_in(draw)
    parameters = inspect.signature(function).parameters.values()
    options = {p.name: p.default for p in parameters if p.default is not p.empty} | arguments
    numbers = {name for name, value in options.items() if isinstance(value, int | float)}
    for _ in range(draw.choice((1, 1, 2, 3))):
        key = draw.choice(sorted(options))
        # A flag or number that is a tensor has torch's own errors.
        options[key] = draw.choice(SCALARS) if key in numbers else _other(draw, options[key])
    if name == "xformers" and draw.random() < 0.7:
        bias, _ = xformers_biases.packed(draw.choice(list(xformers_biases.PACKED)), BIASES)
        parts = [each for each in (bias, bias.q_seqinfo, bias.k_seqinfo) if each is not None]
        for _ in range(draw.choice((0, 1, 1, 2))):
            fields = vars(draw.choice(parts))
            field = draw.choice(sorted(fields))
            if not field.endswith("_seqinfo"):
                fields[field] = _other(draw, fields[field])
        options["attn_bias"] = bias
    with contextlib.suppress(TypeError):  # Python's own word for an argument of another type
        read(lambda: function(**options))


BIASES = xformers_biases.StandIns()


def _base_drop_in(draw: random.Random) -> tuple[str, Callable[..., Any], dict[str, Any]]:
    """A valid call: the package's name, the function and its arguments."""
    q, k, v = torch.zeros(2, 3, 4, 16), torch.zeros(2, 5, 2, 16), torch.zeros(2, 5, 2, 16)
    tokens, keys = torch.zeros(1, 9, 4, 16), torch.zeros(1, 24, 4, 16)
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    dense = {"q": q, "k": k, "v": v}
    packed = {"q": torch.zeros(6, 4, 16)} | dict.fromkeys("kv", torch.zeros(6, 2, 16))
    packed |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 4, "max_seqlen_k": 4}
    cache = {"q": q, "k_cache": k, "v_cache": v.clone(), "cache_seqlens": ends[1:]}
    package = draw.choice((flash_attn, flash_attn_3, flash_attn_4, xformers))
    if package is xformers:
        given = {"query": tokens, "key": keys, "value": keys}
        return "xformers", xformers.memory_efficient_attention, given
    name = draw.choice(("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"))
    calls = {"flash_attn_func": dense, "flash_attn_varlen_func": packed}
    if package is flash_attn_4 and name not in calls:
        name = "flash_attn_func"
    return "flash_attn", getattr(package, name), dict(calls.get(name, cache))


def _base_call(draw: random.Random) -> tuple[str, list[Any], dict[str, Any]]:
    """A valid call: its name, arguments and options, which are all that it takes."""
    q, k, v = torch.zeros(2, 4, 3, 16), torch.zeros(2, 2, 5, 16), torch.zeros(2, 2, 5, 16)
    packed = torch.zeros(6, 4, 16), torch.zeros(6, 2, 16), torch.zeros(6, 2, 16)
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    calls: dict[str, list[Any]] = {
        "attention": [q, k, v],
        "explain": [q, k, v],
        "decode": [q, k, v],
        "explain_decode": [q, k, v],
        "attention_varlen": [*packed, ends, ends, 4, 4],
        "merge": [[(torch.zeros(2, 4, 3, 16), torch.zeros(2, 4, 3))] * 2],
        "append": [k, v, k.clone(), v.clone(), torch.zeros(2, dtype=torch.int32)],
        "use": [None],
    }
    name = draw.choice(list(calls))
    parameters = inspect.signature(getattr(flashgen, name)).parameters.values()
    return name, calls[name], {p.name: p.default for p in parameters if p.default is not p.empty}


def _other(draw: random.Random, value: Any) -> Any:
    """Something else in place of an argument."""
    tensors = (
        torch.zeros(()), torch.zeros(0), torch.zeros(2, 4, 3, 0), torch.zeros(2, 4, 3, 16), torch.zeros(2, 4, 3),
        torch.zeros(4), torch.zeros(2, dtype=torch.int32), torch.tensor([0, 2**31 - 1], dtype=torch.int32),
        torch.tensor([-1, -(2**31)], dtype=torch.int32), torch.full((2, 4, 3, 16), float("nan")), torch.zeros(1, 1, 3, 5),
        torch.zeros(2, 4, 3, 5, dtype=torch.bool), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 4, 3, 16).half(),
        torch.zeros(2, 4, 3, 16, dtype=torch.complex64), torch.zeros(2, 4, 3, 16).to_sparse(), torch.zeros(2, 4, 3, 24),
        torch.zeros(2, 4, 3, 16, device="meta"), torch.zeros(3, 4, 3, 16), torch.tensor([0, 6, 2], dtype=torch.int32),
    )  # fmt: skip
    if (
        isinstance(value, torch.Tensor)
        and value.ndim
        and not value.is_sparse
        and draw.random() < 0.4
    ):
        return draw.choice(
            (value.double(), value.long(), value[:0], value[..., :0], value.expand(*value.shape), value.flatten(),
             value.to(torch.float8_e4m3fn) if value.is_floating_point() else value, value.unsqueeze(0), value.mT if value.ndim > 1 else value,
             value.requires_grad_() if value.is_floating_point() else value, value.to(torch.bfloat16))
        )  # fmt: skip
    words = (
        "bottom_right",
        "top_left",
        "tf32",
        "ieee",
        (1, 1),
        (-1, 2**40),
        (None, None),
        [3],
        (0,),
        2**31,
        -(2**40),
    )
    if isinstance(value, bool | float):  # a flag or number that is a tensor has torch's own errors
        return draw.choice((*words, *SCALARS))
    return draw.choice((draw.choice(tensors), draw.choice(words), draw.choice(SCALARS), None))


def _plain(value: Any) -> Any:
    from dataclasses import asdict

    return json.loads(json.dumps(asdict(value)))


Target = Callable[[random.Random, Path], None]
TARGETS: dict[str, tuple[Target, int]] = {
    "table": (table, 60),
    "log": (log, 50),
    "quarantine": (quarantine, 35),
    "session": (session, 50),
    "manifest": (manifest, 40),
    "model": (model, 30),
    "workload": (workload_file, 30),
    "bench": (bench, 30),
    "compiled": (compiled, 30),
    "replay": (replay, 25),
    "ptx": (ptx_text, 40),
    "cubin": (cubin, 10),
    "command": (command, 35),
    "call": (call, 40),
    "drop_in": (drop_in, 30),
}
"""What reads the input, and how many cases make test has of it."""


@contextlib.contextmanager
def environment(**changes: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def programs() -> Iterator[None]:
    """The command line without what compiles, searches and measures: options arrive, nothing is done."""
    import flashgen.bench.run
    import flashgen.tune.precompile
    import flashgen.tune.tune
    import flashgen.tune.verify

    with pytest.MonkeyPatch.context() as patch:
        for place in ("tune.tune.tune", "bench.run.run"):
            patch.setattr(f"flashgen.{place}", lambda *_: None)
        for place in ("precompile", "package"):
            patch.setattr(flashgen.tune.precompile, place, lambda *_, **__: iter(()))
        patch.setattr("flashgen.tune.verify.verify", lambda *_: iter(()))
        patch.setattr("flashgen.report.charts.draw", lambda *_: None)
        yield


def cases(target: str, numbers: range) -> None:
    """Run these cases of a target. AssertionError names the first that fails, and how to repeat it."""
    do, _ = TARGETS[target]
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flashgen-fuzz-")))
        (home / "cwd").mkdir()
        stack.enter_context(contextlib.chdir(home / "cwd"))
        stack.enter_context(environment(HOME=str(home / "home"), TMPDIR=str(home / "tmp")))
        # matplotlib keeps a list of fonts, wherever its variable says.
        fonts = stack.enter_context(tempfile.TemporaryDirectory(prefix="flashgen-fuzz-fonts-"))
        stack.enter_context(environment(MPLCONFIGDIR=fonts))
        stack.enter_context(programs())
        (home / "tmp").mkdir()
        for number in numbers:
            folder = home / "case" / "out"
            folder.mkdir(parents=True)
            try:
                do(random.Random(f"{target} {number}"), folder)
                outside = [
                    p for p in home.rglob("*") if folder not in (p, *p.parents) and p.is_file()
                ]
                assert not outside, f"files outside of --out: {outside}"
            except BaseException as error:
                again = f"python -m tests.fuzz {target} {number}"
                raise AssertionError(
                    f"{type(error).__name__}: {str(error)[:500]}\nrepeat: {again}"
                ) from error
            shutil.rmtree(home / "case")


def main(arguments: list[str]) -> None:
    target, first, *count = arguments
    paths.shipped_configs_dir = lambda: Path("/nonexistent")  # type: ignore[assignment]
    cases(target, range(int(first), int(first) + int(*count or (1,))))


if __name__ == "__main__":
    main(sys.argv[1:])
