"""FlexAttention, compiled with the options that the table of this GPU gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch.nn.attention.flex_attention import flex_attention

from flashgen.table.export_flex import options_of
from flashgen.table.table_file import load_with_evidence
from tests.driver.cases import GPU, tensors
from tests.driver.events import Launch, Recording

SEQ = 2048
TABLE = Path(__file__).resolve().parents[2] / "configs" / f"{GPU.slug}.yaml"


def distinct() -> dict[str, dict[str, Any]]:
    """Each set of options once, by a name."""
    found: dict[str, dict[str, Any]] = {}
    for each in options_of(load_with_evidence(TABLE)):
        if each["dtype"] == "bfloat16":
            found.setdefault(f"{each['head_dim']} {json.dumps(each['kernel_options'])}", each)
    return found


@pytest.mark.parametrize("name", distinct())
@config.patch(use_static_triton_launcher=False)  # it needs cuModuleLoad, which the driver lacks
def test_flex_attention_compiles_and_runs_with_them(recording: Recording, name: str) -> None:
    each = distinct()[name]
    options = each["kernel_options"]
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, SEQ, each["head_dim"]))
    torch._dynamo.reset()
    o = torch.compile(lambda q, k, v: flex_attention(q, k, v, kernel_options=options))(q, k, v)
    torch.autograd.grad(o, (q, k, v), torch.empty_like(o))
    forward, backward = (
        each for each in recording.of(Launch) if each.kernel.startswith("triton_tem")
    )
    assert forward.grid[0] == SEQ // options["fwd_BLOCK_M"]
    assert forward.threads == 32 * options["fwd_num_warps"]
    assert backward.grid[0] == SEQ // options["bwd_BLOCK_M2"] + SEQ // options["bwd_BLOCK_N1"]
    assert backward.threads == 32 * options["bwd_num_warps"]
    assert (forward.broken, backward.broken) == ("", "")
