"""On the way of a call no two public functions of modules have one name, but for those that others dictate."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

FLASHGEN = Path(__file__).resolve().parents[3] / "flashgen"
DICTATED = {
    "attention": "flashgen.runtime.fp8.attention is a public path; runtime/eager's is what it stands for",
    "attention_forward": "an operator of torch, flashgen::attention_forward, and what transformers calls",
    **dict.fromkeys(
        (
            "flash_attn_combine",
            "flash_attn_func",
            "flash_attn_qkvpacked_func",
            "flash_attn_varlen_func",
            "flash_attn_with_kvcache",
        ),
        "public paths: FlashAttention 2, 3 and 4 have these names for functions of other arguments",
    ),
    "register": "public paths: the drop-ins of diffusers, torch, transformers, SGLang and vLLM",
}


def functions(folders: tuple[str, ...]) -> dict[str, list[str]]:
    """The modules of each public function of these folders, by its name."""
    found = defaultdict(list)
    for folder in folders:
        for path in sorted((FLASHGEN / folder).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                overloaded = any(
                    "overload" in ast.unparse(x) for x in getattr(node, "decorator_list", ())
                )
                if (
                    isinstance(node, ast.FunctionDef)
                    and not node.name.startswith("_")
                    and not overloaded
                ):
                    found[node.name].append(str(path.relative_to(FLASHGEN)))
    return found


def test_a_name_is_one_functions() -> None:
    found = functions(("kernels", "runtime", "spec"))
    assert {name for name, places in found.items() if len(places) > 1} == set(DICTATED), found
