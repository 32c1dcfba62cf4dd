"""Bench: flashgen beside its peers in one run, `flashgen bench`.

    cases -> contenders -> judged -> raced -> record, listing, picture

run.py has the story; evaluate/measure.py, left of here, the protocol.
"""

GROUPS = (
    "flashgen", "default", "ladder", "sdpa", "flex", "flash-attn-2", "flash-attn-3",
    "flash-attn-4", "flashinfer",
)  # fmt: skip
"""The words of --contender, in the order in which contenders are listed."""
