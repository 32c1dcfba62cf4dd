"""The folder that `flashgen export --to hf-kernel` writes, loaded by the package kernels."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from flashgen.errors import InvalidArgument
from flashgen.table import export_hf_kernel
from flashgen.table.table_file import load_with_evidence

LOADS = """
import os, sys
from pathlib import Path
import torch
from kernels import get_local_kernel
folder = Path(sys.argv[1])
assert "flashgen" not in sys.modules
kernel = get_local_kernel(folder)
assert Path(sys.modules["flashgen"].__file__).is_relative_to(folder)  # its own copy
q = torch.randn(1, 4, 33, 32)
want = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
torch.testing.assert_close(kernel.attention(q, q, q, causal=True), want)
o = kernel.flash_attn_func(*[q.transpose(1, 2)] * 3, causal=True)
torch.testing.assert_close(o.transpose(1, 2), want)
kernel.transformers.register()  # in place of a name on the Hub
from transformers import AttentionInterface
assert "flashgen" in AttentionInterface().valid_keys()
"""
REFUSES = """
import sys, types
from pathlib import Path
from kernels import get_local_kernel
sys.modules["flashgen"] = types.SimpleNamespace(__version__="0.0.9")
try:
    get_local_kernel(Path(sys.argv[1]))
except ImportError as error:
    assert "flashgen must be" in str(error), error
else:
    raise SystemExit("another version was not refused")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "kernel"
    export_hf_kernel.write(folder, Path(__file__).resolve().parents[3])
    return folder


def test_a_folder_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(InvalidArgument, match="must be new, empty or an earlier export"):
        export_hf_kernel.write(tmp_path, Path(__file__).resolve().parents[3])
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_its_metadata_is_what_the_builder_requires(folder: Path) -> None:
    rust = pytest.importorskip("kernels._rust")
    for backend, archs in (("cuda", ["8.0+PTX"]), ("cpu", None)):
        variant = folder / "build" / f"torch-{backend}"
        metadata = rust.Metadata.from_bytes((variant / "metadata.json").read_bytes())
        assert metadata.backend.archs == archs
        metadata.digest.validate(rust.Digest.hash_variant(metadata.digest.algorithm, variant))


def test_every_module_that_serving_imports_is_in_it(folder: Path) -> None:
    variant = folder / "build" / "torch-cpu"
    for path in sorted((variant / "flashgen").rglob("*.py")):
        if "_generated" in path.parts:
            continue
        for node in ast.parse(path.read_text()).body:  # what is imported with the module
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module and module.startswith("flashgen."):
                place = variant.joinpath(*module.split("."))
                assert place.is_dir() or place.with_suffix(".py").exists(), (path, module)


def test_tiles_lie_in_the_layout_of_tuned_triton_kernels(folder: Path) -> None:
    name = (
        "kernel=forward,dtype=bfloat16,precision=ieee,head_dim=128,head_dim_v=128,mask=causal,"
        "device_name=NVIDIA_H200.json"
    )
    path = Path(__file__).resolve().parents[3] / "configs" / "nvidia_h200.yaml"
    held = json.loads((folder / "build" / "torch-cuda" / "configs" / name).read_text())
    for entry in load_with_evidence(path).entries:
        if entry.spec.name == "fwd_bf16_d128_causal":
            chosen = held[str(max(1, entry.bucket.low))]
            assert (chosen["BR"], chosen["BC"]) == (entry.config.br, entry.config.bc)
            assert chosen["num_warps"] == entry.config.num_warps
    assert len(held) >= 3


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    other, folder = tmp_path / "other", tmp_path / "kernel"
    other.mkdir()
    folder.mkdir()
    (folder / "README.md").write_text(export_hf_kernel._CARD)
    (folder / "build").symlink_to(other)
    with pytest.raises(InvalidArgument, match="must be a folder, for it is replaced"):
        export_hf_kernel.write(folder, Path(__file__).resolve().parents[3])
    assert list(other.iterdir()) == []


@pytest.mark.slow("programs that import torch, with the interpreter's kernels: 15 s")
@pytest.mark.parametrize(
    ("program", "interpreted"),
    [(LOADS, "0"), (LOADS, "1"), (REFUSES, "0")],
    ids=["CPU", "interpreted", "another version"],
)
def test_get_local_kernel_loads_it(
    folder: Path, tmp_path: Path, program: str, interpreted: str
) -> None:
    pytest.importorskip("kernels")
    file = tmp_path / "loads.py"
    file.write_text(program)
    environment = {"TRITON_INTERPRET": interpreted, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-P", str(file), str(folder)],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


GPT_OSS = """
    import kernels, torch
    from transformers import GptOssConfig, GptOssForCausalLM

    {how}
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(
        hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_hidden_layers=2, vocab_size=50, num_local_experts=2, num_experts_per_tok=1, sliding_window=8,
    )).eval()
    sinks = [p for name, p in model.named_parameters() if "sinks" in name]
    given = torch.randint(0, 50, (2, 24))
    with torch.no_grad():
        for p in sinks:
            p.normal_()
        model.set_attn_implementation("eager")
        expected = model(given).logits
        model.set_attn_implementation(name)
        torch.testing.assert_close(model(given).logits, expected, rtol=1e-5, atol=1e-5)
        for p in sinks:
            p.fill_(-1e4)
        assert (model(given).logits - expected).abs().max() > 0.01
"""
REGISTERED = """kernel = kernels.get_kernel("me/attention", version=1)
    kernel.transformers.register()
    name = "flashgen"
"""
BY_NAME = """# As transformers loads it, but for the version of `kernels` that it asks for.
    from transformers.integrations import hub_kernels
    hub_kernels.is_kernels_available = lambda *_, **__: True
    hub_kernels.get_kernel = lambda repository, **_: kernels.get_kernel(repository, version=1)
    name = "me/attention"
"""


@pytest.mark.slow("programs that import torch and transformers: 10 s")
@pytest.mark.parametrize("how", [REGISTERED, BY_NAME], ids=["registered", "by the kernel's name"])
def test_gpt_oss_keeps_its_sinks_by_a_kernel_of_the_hub(
    folder: Path, tmp_path: Path, how: str
) -> None:
    """The folder stands in for a repository of the Hub, as the package `kernels` lets one try it."""
    pytest.importorskip("kernels")
    file = tmp_path / "model.py"
    file.write_text(textwrap.dedent(GPT_OSS.format(how=how)))
    environment = {
        "LOCAL_KERNELS": f"me/attention={folder}",
        "HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-P", str(file)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.slow("writes 8 MB twice")
def test_an_earlier_export_is_replaced(folder: Path) -> None:
    stray = folder / "build" / "torch-cpu" / "stray.py"
    stray.write_text("")
    export_hf_kernel.write(folder, Path(__file__).resolve().parents[3])
    assert not stray.exists()
