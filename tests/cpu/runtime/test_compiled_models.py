"""torch.compile of what runs on a hook: no graph break, in a process that has served nothing yet."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

HOOKS = {
    "transformers": """
        from transformers import LlamaConfig, LlamaForCausalLM
        from flashgen.runtime import transformers as hook
        hook.register()
        config = LlamaConfig(hidden_size=64, intermediate_size=64, num_attention_heads=4,
                             num_key_value_heads=2, num_hidden_layers=2, vocab_size=50)
        config._attn_implementation = "flashgen"
        model = LlamaForCausalLM(config)
        given = torch.arange(34).view(2, 17)
        call = lambda x: model(x).logits
    """,
    "sdpa": """
        from flashgen.runtime import sdpa
        given = torch.randn(1, 2, 8, 16, requires_grad=True)
        call = lambda x: sdpa.scaled_dot_product_attention(x, x, x, is_causal=True)
    """,
    "flash_attn": """
        from flashgen.runtime import flash_attn
        given = torch.randn(1, 8, 2, 16, requires_grad=True)
        call = lambda x: flash_attn.flash_attn_func(x, x, x, causal=True, window_size=(4, 0))
    """,
    "attention": """
        import flashgen
        given = torch.randn(1, 2, 8, 16, requires_grad=True)
        call = lambda x: flashgen.attention(x, x, x, causal=True)
    """,
    "attention_varlen": """
        import flashgen
        bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
        attend = flashgen.attention_varlen
        given = torch.randn(8, 2, 16, requires_grad=True)
        call = lambda x: attend(x, x, x, bounds, bounds, 5, 5, causal=True)
    """,
}
"""Each ends in a call and what it is given."""

CHECK = """
    import torch._dynamo
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(given)  # the first call
    torch.testing.assert_close(compiled, call(given), rtol=1e-5, atol=1e-5)
    compiled.sum().backward()
    torch._dynamo.reset()
    found = torch._dynamo.explain(call)(given)
    operators = [node for graph in found.graphs for node in graph.graph.nodes
                 if str(node.target).startswith("flashgen")]
    assert operators, found
    print(found.graph_break_count, found.graph_count)
"""


@pytest.mark.slow("processes that import torch and compile: 15 s each")
@pytest.mark.parametrize("hook", HOOKS)
def test_a_first_call_that_is_compiled_has_no_graph_break(hook: str) -> None:
    program = "import torch\n" + textwrap.dedent(HOOKS[hook]) + textwrap.dedent(CHECK)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["0", "1"], done.stdout + done.stderr
