"""The fp8 forward compiles, fits and keeps its matrix instructions apart on sm_89 and later."""

from __future__ import annotations

from itertools import product

import pytest

from flashgen.schedules.defaults import default_config
from tests.cpu.compile.test_decode_compiles import Job, assert_all_fit
from tests.makers import make_config, make_spec

ARCHS = ("sm_89", "sm_90", "sm_100", "sm_120")


def jobs_of(dims: tuple[int, ...], archs: tuple[str, ...]) -> list[Job]:
    """The defaults, and by descriptor where there is one: on sm_90 a product that is added to the
    others before it is done is serialised, as the judge says.
    """
    jobs: list[Job] = []
    for dim, arch in product(dims, archs):
        spec = make_spec("bfloat16", dim, "causal", fp8=True)
        jobs.append((spec, default_config(spec), arch))
        if arch in ("sm_90", "sm_100") and dim == 128:
            config = make_config(128, 64, num_warps=8, loads="descriptor")
            jobs.append((spec, config, arch))
    return jobs


def test_defaults_fit() -> None:
    assert_all_fit(jobs_of((64,), ("sm_90",)))


@pytest.mark.slow("make test proves a sample of it")
def test_every_default_fits() -> None:
    assert_all_fit(jobs_of((32, 64, 128, 256), ARCHS))
