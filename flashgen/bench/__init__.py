"""Bench: compares flashgen with other implementations in one run, `flashgen bench`.

    cases -> contenders -> judged -> raced -> record, listing, picture

Start with run.py; evaluate/measure.py has the protocol.
"""

GROUPS = (
    "flashgen", "default", "ladder", "sdpa", "flex", "flash-attn-2", "flash-attn-3",
    "flash-attn-4", "flashinfer",
)  # fmt: skip
"""The words of --contender, in the order in which contenders are listed."""
