"""vLLM's attention backend: with fakes of vLLM, and compared with the source of the release it is written for."""

from __future__ import annotations

import ast
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.errors import InvalidArgument
from flashgen.runtime import vllm as plugin
from tests import vllm_fakes as fakes

ROOT = Path(__file__).resolve().parents[3]
PAGE, DIM, HEADS, KV_HEADS = 16, 32, 4, 2


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    fakes.install(monkeypatch)
    import flashgen.runtime.vllm_backend as module

    return module


def test_the_plugin_takes_the_name_for_backends_of_others(backend: ModuleType) -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points["vllm.general_plugins"] == {"flashgen": "flashgen.runtime.vllm:register"}
    for _ in range(2):  # vLLM loads plugins in every process, and again in the same one
        plugin.register()
    custom = fakes.AttentionBackendEnum.CUSTOM
    module, _, name = custom.get_path().rpartition(".")
    assert (module, getattr(backend, name).get_name()) == (backend.__name__, "CUSTOM")


def test_another_plugins_backend_stays(backend: ModuleType) -> None:
    fakes.overrides[fakes.AttentionBackendEnum.CUSTOM] = "other.Backend"
    plugin.register()
    assert fakes.AttentionBackendEnum.CUSTOM.get_path() == "other.Backend"


@pytest.mark.parametrize("lacks", ["module", "register_backend", "CUSTOM", "is_overridden"])
def test_an_older_vllm_is_told_so_and_goes_on(
    backend: ModuleType,
    lacks: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = "vllm.v1.attention.backends.registry"
    if lacks == "module":
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    elif lacks == "CUSTOM":
        monkeypatch.setattr(sys.modules[name], "AttentionBackendEnum", SimpleNamespace())
    elif lacks == "is_overridden":
        monkeypatch.delattr(fakes.AttentionBackendEnum, lacks)
    else:
        monkeypatch.delattr(sys.modules[name], lacks)
    plugin.register()
    (record,) = caplog.records
    assert record.getMessage().startswith("flashgen needs vLLM 0.33")
    assert fakes.overrides == {}


def test_what_it_takes(backend: ModuleType) -> None:
    found = backend.FlashgenBackend
    assert [dim for dim in (8, 16, 20, 80, 128, 512, 520) if found.supports_head_size(dim)] == [
        16, 80, 128, 512,
    ]  # fmt: skip
    assert found.supported_dtypes == [torch.float16, torch.bfloat16]
    assert not found.supports_compute_capability(SimpleNamespace(major=7))
    assert found.supports_compute_capability(SimpleNamespace(major=8))
    with pytest.raises(InvalidArgument, match="attn_type must be"):
        backend.FlashgenImpl(1, 16, 1.0, attn_type="encoder")


Batch = list[tuple[int, int]]
"""Of each sequence how many queries, and how many keys with them."""


def serve(backend: ModuleType, batch: Batch, causal: bool, **options: Any) -> tuple[Tensor, ...]:
    """q, O of the backend, and the keys and values of each sequence: what vLLM does in a step, over shuffled pages."""
    generator = torch.Generator().manual_seed(len(batch))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.bfloat16)

    pages = [-(-keys // PAGE) for _, keys in batch]
    order = torch.randperm(sum(pages) + 1, generator=generator).int()
    table = torch.zeros(len(batch), max(pages), dtype=torch.int32)
    cache = torch.full((len(order), KV_HEADS, PAGE, 2 * DIM), torch.nan, dtype=torch.bfloat16)
    impl = backend.FlashgenImpl(HEADS, DIM, 0.2, KV_HEADS, **options)
    tokens = sum(queries for queries, _ in batch)
    new_k, new_v, known = draw(tokens, KV_HEADS, DIM), draw(tokens, KV_HEADS, DIM), []
    slots: list[int] = []
    for number, (queries, keys) in enumerate(batch):
        begin = sum(pages[:number])
        table[number, : pages[number]] = order[begin : begin + pages[number]]
        places = [int(table[number, j // PAGE]) * PAGE + j % PAGE for j in range(keys)]
        old_k, old_v = draw(keys - queries, KV_HEADS, DIM), draw(keys - queries, KV_HEADS, DIM)
        impl.do_kv_cache_update(
            fakes.Layer(), old_k, old_v, cache, torch.tensor(places[: keys - queries])
        )
        own = slice(len(slots), len(slots) + queries)
        known.append((torch.cat([old_k, new_k[own]]), torch.cat([old_v, new_v[own]])))
        slots += places[keys - queries :]
    impl.do_kv_cache_update(fakes.Layer(), new_k, new_v, cache, torch.tensor([*slots, -1]))
    starts = torch.tensor([0, *(queries for queries, _ in batch)]).cumsum(0).int()
    common = SimpleNamespace(
        query_start_loc=starts, seq_lens=torch.tensor([keys for _, keys in batch]).int(), causal=causal,
        num_actual_tokens=tokens, max_query_len=max(q for q, _ in batch),
        max_seq_len=max(k for _, k in batch), block_table_tensor=table,
    )  # fmt: skip
    builder = backend.FlashgenMetadataBuilder(None, [], None, torch.device("cpu"))
    q, out = draw(tokens + 3, HEADS, DIM), torch.full((tokens + 3, HEADS, DIM), 7.0).bfloat16()
    found = impl.forward(
        fakes.Layer(), q, new_k, new_v, cache, builder.build(0, common), output=out
    )
    assert found is out
    assert (out[tokens:] == 7).all()  # padding
    return q, out, known


def expected(q: Tensor, k: Tensor, v: Tensor, causal: bool, options: dict[str, Any]) -> Tensor:
    """Attention of one sequence in float64: q (queries, heads, dim), k and v (keys, kv heads, dim)."""
    group = HEADS // KV_HEADS
    k, v = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    s = q.double().transpose(0, 1) @ k.mT * 0.2
    if cap := options.get("logits_soft_cap"):
        s = cap * torch.tanh(s / cap)
    behind = torch.arange(q.shape[0])[:, None] + k.shape[1] - q.shape[0] - torch.arange(k.shape[1])
    if slopes := options.get("alibi_slopes"):
        s = s - torch.tensor(slopes).double()[:, None, None] * behind.abs()
    if causal:
        s = s.masked_fill(behind < 0, -torch.inf)
    if window := options.get("sliding_window"):
        s = s.masked_fill((behind >= window) | (behind <= -window), -torch.inf)
    sinks = options.get("sinks")
    extra = s[..., :0] if sinks is None else sinks.double()[:, None, None].expand(*s.shape[:2], 1)
    p = torch.cat([s, extra], -1).softmax(-1)[..., : s.shape[-1]]
    return (p @ v).transpose(0, 1)


@pytest.mark.parametrize(
    ("batch", "causal", "options"),
    [
        ([(1, 1), (1, 40), (1, 33)], True, {}),
        ([(17, 17), (5, 40)], True, {}),
        ([(1, 20), (1, 50), (9, 9), (4, 31)], True, {}),
        ([(1, 20), (9, 30)], False, {}),
        ([(1, 60), (9, 40)], True, {"sliding_window": 12}),
        (
            [(1, 60), (9, 40)],
            True,
            {"logits_soft_cap": 3.0, "sinks": torch.tensor([0.5, 1, 2, -1])},
        ),
        ([(1, 60), (9, 40)], True, {"alibi_slopes": [0.5, 0.25, 0.1, 0.05]}),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_step_of_a_model(
    backend: ModuleType, batch: Batch, causal: bool, options: dict[str, Any]
) -> None:
    q, out, known = serve(backend, batch, causal, **options)
    begin = 0
    for (queries, _), (k, v) in zip(batch, known, strict=True):
        own = slice(begin, begin + queries)
        want = expected(q[own], k, v, causal, options)
        torch.testing.assert_close(out[own].double(), want, rtol=0.02, atol=0.02)
        begin += queries


def test_decodes_and_prefills_have_their_own_operators(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for name in ("paged_decode", "paged_prefill"):
        operator = getattr(backend, name)
        monkeypatch.setattr(
            backend,
            name,
            lambda out, *x, n=name, f=operator: (seen.append((n, len(out))), f(out, *x)),
        )
    serve(backend, [(1, 20), (1, 50), (9, 9), (4, 31)], True)
    serve(backend, [(1, 20), (1, 50)], True)
    serve(backend, [(2, 20)], True)
    assert seen == [
        ("paged_decode", 2), ("paged_prefill", 13), ("paged_decode", 2), ("paged_prefill", 2),
    ]  # fmt: skip


def test_a_profiling_run_and_what_is_refused(backend: ModuleType) -> None:
    impl = backend.FlashgenImpl(1, 16, 1.0)
    x = torch.ones(3, 1, 16)
    assert (impl.forward(None, x, x, x, x, None, output=torch.ones_like(x)) == 0).all()
    with pytest.raises(InvalidArgument, match="output_scale must be None"):
        impl.forward(None, x, x, x, x, None, output=x, output_scale=x)
    builder = backend.FlashgenMetadataBuilder(None, [], None, torch.device("cpu"))
    with pytest.raises(InvalidArgument, match="causal must be one bool"):
        builder.build(0, SimpleNamespace(causal=torch.ones(1)))


@pytest.mark.slow("torch.compile and opcheck: 20 s")
def test_torch_compile_keeps_the_operators_whole() -> None:
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    pool = torch.randn(4, PAGE, KV_HEADS, DIM)
    q, lengths = torch.randn(2, HEADS, DIM), torch.tensor([20, 31], dtype=torch.int32)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    options = True, 0.2, 0, 0.0, None, None
    calls = {
        torch.ops.flashgen.paged_decode: (pool, pool, lengths, table, *options),
        torch.ops.flashgen.paged_prefill: (pool, pool, starts, lengths, table, 1, 32, *options),
    }
    for operator, arguments in calls.items():
        torch.library.opcheck(operator, (torch.empty_like(q), q, *arguments))
        nodes: list[str] = []

        def record(graph: Any, _: Any, nodes: list[str] = nodes) -> Any:
            nodes += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
            return graph

        def step(q: Tensor, operator: Any = operator, arguments: Any = arguments) -> Tensor:
            out = torch.empty_like(q)
            operator(out, q, *arguments)
            return out + 1

        own = step(q)
        torch.testing.assert_close(torch.compile(step, backend=record, fullgraph=True)(q), own)
        assert sum(str(operator) in node for node in nodes) == 1


VERSION = "0.33.0"
SHA256 = "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"


@pytest.fixture(scope="module")
def source() -> dict[str, ast.Module]:
    """The modules of vLLM's source distribution that the backend depends on, parsed. It is fetched once, into build/,
    from where pip finds it: pip itself would build it, which takes a CUDA compiler.
    """
    file = ROOT / "build" / f"vllm-{VERSION}.tar.gz"
    if not file.is_file():
        words = [sys.executable, "-m", "pip", "index", "versions", "vllm", "-vv"]
        said = subprocess.run(words, capture_output=True, text=True).stdout
        link = re.search(rf"Found link (\S+/vllm-{re.escape(VERSION)}\.tar\.gz)", said)
        if link is None:
            pytest.skip("needs a package index that has vLLM")
        content = urllib.request.urlopen(link[1], timeout=300).read()
        assert hashlib.sha256(content).hexdigest() == SHA256
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == SHA256
    names = {
        "backend": "v1/attention/backend.py",
        "registry": "v1/attention/backends/registry.py",
        "utils": "v1/attention/backends/utils.py",
        "cache": "v1/attention/ops/triton_reshape_and_cache_flash.py",
        "layer": "model_executor/layers/attention/attention.py",
        "plugins": "plugins/__init__.py",
    }
    with tarfile.open(fileobj=io.BytesIO(file.read_bytes())) as archive:
        return {
            name: ast.parse(archive.extractfile(f"vllm-{VERSION}/vllm/{path}").read())  # type: ignore[union-attr]
            for name, path in names.items()
        }


OWN = ast.parse((ROOT / "flashgen" / "runtime" / "vllm_backend.py").read_text())
SLOW = pytest.mark.slow("fetches vLLM's source, 47 MB, once")


def definition(module: ast.Module, name: str) -> Any:
    return next(x for x in module.body if getattr(x, "name", None) == name)


def methods(of: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {x.name: x for x in of.body if isinstance(x, ast.FunctionDef)}


def arguments(function: ast.FunctionDef) -> list[str]:
    return [x.arg for x in (*function.args.posonlyargs, *function.args.args)]


BASES = {
    "FlashgenBackend": "AttentionBackend",
    "FlashgenImpl": "AttentionImpl",
    "FlashgenMetadataBuilder": "AttentionMetadataBuilder",
}


@SLOW
@pytest.mark.parametrize("own", BASES)
def test_every_method_is_one_of_vllms_with_its_arguments(
    source: dict[str, ast.Module], own: str
) -> None:
    theirs, ours = methods(definition(source["backend"], BASES[own])), methods(definition(OWN, own))
    abstract = {
        name for name, x in theirs.items()
        if any("abstractmethod" in ast.unparse(each) for each in x.decorator_list)
    }  # fmt: skip
    assert abstract <= set(ours)
    private = {name for name in ours if name.startswith("_") and name != "__init__"}
    assert set(ours) - set(theirs) - private <= {"do_kv_cache_update"}
    for name in set(ours) & set(theirs):
        wanted = arguments(theirs[name])
        assert arguments(ours[name])[: len(wanted)] == wanted, name


@SLOW
def test_every_flag_is_one_of_vllms(source: dict[str, ast.Module]) -> None:
    for own, base in BASES.items():
        held = ast.unparse(definition(source["backend"], base))
        for node in definition(OWN, own).body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                assert re.search(rf"^    {ast.unparse(target)}\b", held, re.MULTILINE)
    assert "UNIFORM_SINGLE_TOKEN_DECODE" in ast.unparse(
        definition(source["backend"], "AttentionCGSupport")
    )


@SLOW
def test_every_field_of_a_batch_is_one_of_vllms(source: dict[str, ast.Module]) -> None:
    fields = {
        ast.unparse(x.target)
        for x in definition(source["backend"], "CommonAttentionMetadata").body
        if isinstance(x, ast.AnnAssign)
    }
    build = methods(definition(OWN, "FlashgenMetadataBuilder"))["build"]
    read = {x.attr for x in ast.walk(build)
            if isinstance(x, ast.Attribute) and ast.unparse(x.value) == "common"}  # fmt: skip
    assert read
    assert read <= fields


@SLOW
def test_what_it_calls_and_how_it_is_called(source: dict[str, ast.Module]) -> None:
    split = definition(source["utils"], "split_decodes_and_prefills")
    assert arguments(split)[:2] == ["common_attn_metadata", "decode_threshold"]
    write = definition(source["cache"], "triton_reshape_and_cache_flash")
    assert arguments(write)[:8] == [
        "key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype", "k_scale", "v_scale",
    ]  # fmt: skip
    layer = ast.unparse(source["layer"])
    assert (
        "self.impl.forward(self, query, key, value, kv_cache, attn_metadata, output=output" in layer
    )
    assert "do_kv_cache_update(attn_layer, key, value, kv_cache, layer_slot_mapping)" in layer
    assert "AttentionBackendEnum[self.attn_backend.get_name()]" in layer
    init = arguments(methods(definition(OWN, "FlashgenImpl"))["__init__"])
    call = next(
        x for x in ast.walk(source["layer"])
        if isinstance(x, ast.Call) and ast.unparse(x.func) == "impl_cls"
    )  # fmt: skip
    assert [ast.unparse(x) for x in call.args] == init[1 : 1 + len(call.args)]


@SLOW
def test_the_registry(source: dict[str, ast.Module]) -> None:
    register = definition(source["registry"], "register_backend")
    assert arguments(register)[:2] == ["backend", "class_path"]
    names = definition(source["registry"], "AttentionBackendEnum")
    assert "CUSTOM = None" in ast.unparse(names)
    assert {"get_path", "is_overridden"} <= set(methods(names))
    assert "'vllm.general_plugins'" in ast.unparse(source["plugins"])
