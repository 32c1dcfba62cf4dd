"""Products of NVIDIA that flashgen knows by name alone: without their clocks and bandwidths,
nothing is estimated for them. On such a GPU the entries of the nearest of its architecture serve.

CUDA cores are those of NVIDIA's pages of the products, as two lists on GitHub have them, which
agree: that of canirun.ai, and CYBIRD-D/How-to-Choose-your-LLM-Model-for-translation. Compute
capabilities: NVIDIA's page "CUDA GPUs". T4 and V100: their data sheets. Read in November 2026.
"""

from __future__ import annotations

from typing import NamedTuple

from flashgen.spec.data_sheets import LIMITS, relative


class Named(NamedTuple):
    """One product: its name as NVML gives it, its architecture and its CUDA cores."""

    name: str
    arch: str
    cores: int

    @property
    def sms(self) -> int:
        """SMs, of 128 cores each, of Turing and Volta of 64."""
        return self.cores // (128 if self.arch in LIMITS else 64)

    @property
    def matrix_flops_per_clock(self) -> int | None:
        """Of an SM, that of a product whose data sheet is known. None for Turing and Volta."""
        sheet = relative(self.name, self.arch)
        return sheet.matrix if sheet else None


def _of(arch: str, form: str, cores: dict[str, int]) -> list[Named]:
    return [Named(form.format(name), arch, count) for name, count in cores.items()]


PRODUCTS = (
    *_of("sm_86", "NVIDIA GeForce RTX {}", {
        "3050": 2560, "3050 6GB": 2304, "3060": 3584, "3060 Ti": 4864, "3070": 5888,
        "3070 Ti": 6144,
    }),
    *_of("sm_86", "NVIDIA GeForce RTX {} Laptop GPU", {
        "3050": 2048, "3050 Ti": 2560, "3060": 3840, "3070": 5120, "3070 Ti": 5888, "3080": 6144,
        "3080 Ti": 7424,
    }),
    *_of("sm_86", "NVIDIA RTX {}", {
        "A2000": 3328, "A2000 12GB": 3328, "A4000": 6144, "A4500": 7168, "A5000": 8192,
        "A5500": 10240,
    }),
    *_of("sm_89", "NVIDIA GeForce RTX {}", {
        "4060": 3072, "4060 Ti": 4352, "4070 SUPER": 7168, "4070 Ti": 7680, "4070 Ti SUPER": 8448,
    }),
    *_of("sm_89", "NVIDIA GeForce RTX {} Laptop GPU", {
        "4050": 2560, "4060": 3072, "4070": 4608, "4080": 7424,
    }),
    *_of("sm_89", "NVIDIA RTX {} Ada Generation", {
        "2000": 2816, "4000 SFF": 6144, "4000": 6144, "4500": 7680, "5000": 12800, "5880": 14080,
    }),
    *_of("sm_120", "NVIDIA GeForce RTX {}", {
        "5050": 2560, "5060": 3840, "5060 Ti": 4608, "5070 Ti": 8960,
    }),
    *_of("sm_120", "NVIDIA GeForce RTX {} Laptop GPU", {
        "5050": 2560, "5060": 3328, "5070": 4608, "5070 Ti": 5888, "5080": 7680,
    }),
    *_of("sm_75", "{}", {"Tesla T4": 2560, "NVIDIA T4": 2560}),
    *_of("sm_70", "Tesla V100-{}", {
        "SXM2-16GB": 5120, "SXM2-32GB": 5120, "PCIE-16GB": 5120, "PCIE-32GB": 5120,
    }),
)  # fmt: skip
