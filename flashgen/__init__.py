"""flashgen: Triton FlashAttention kernels, tuned per GPU and served without a tuner.

The pipeline, one module a step:
spec -> config -> render -> compile -> check -> measure | estimate -> table -> generate -> dispatch.
"""

__version__ = "0.1.0"
