"""The GPUs of this host, and those of them that `--gpus` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.errors import InvalidArgument, NoGpuError, ToolchainError
from flashgen.evaluate.payloads import DEVICE_ENV
from flashgen.evaluate.workers.answers import Done, Task
from flashgen.evaluate.workers.pool import Workers
from flashgen.spec.gpu import OFFLINE_TARGET, Gpu
from flashgen.spec.records import record_of

LIST_LIMIT_S = 60.0
"""To import torch and ask the driver takes seconds."""


QUERY = "flashgen.tune.devices:list_devices"


def devices(query: str = QUERY) -> dict[int, Gpu]:
    """The GPUs that torch sees, by their index there. Raises NoGpuError if there is none, and
    ToolchainError.

    A child process lists them, because the CUDA context that this creates takes GPU memory while it
    lives.
    """
    with Workers(1, env=DEVICE_ENV) as workers:
        answer = workers.submit(Task(function=query, payload={}, limit_s=LIST_LIMIT_S)).result()
    if not isinstance(answer, Done):
        raise ToolchainError(f"torch cannot list the GPUs of this machine: {answer}")
    found = [record_of(Gpu, each, "a GPU") for each in answer.value["gpus"]]
    if not found:
        instead = in_place_of("--gpus")
        raise NoGpuError(f"torch sees no GPU here; without one, type: {instead}")
    return dict(enumerate(found))


def in_place_of(option: str) -> str:
    """What a user types where there is no GPU; the other options stay."""
    return f"--target {OFFLINE_TARGET} in place of {option}"


def list_devices(_: dict[str, Any]) -> dict[str, Any]:
    """{} -> {gpus}: the fields of a Gpu for each CUDA device, in their order."""
    from dataclasses import asdict

    import torch

    from flashgen.kernels.launch import device_gpu

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"gpus": [asdict(device_gpu(index)) for index in range(count)]}


def chosen(text: str, found: Mapping[int, Gpu]) -> dict[int, Gpu]:
    """The devices that --gpus names: "all", or indices as in "0,2". Raises InvalidArgument."""
    if text == "all":
        return dict(found)
    words = [word.strip() for word in text.split(",")]
    known = {str(index): index for index in found}
    if len(set(words)) < len(words) or not set(words) <= known.keys():
        raise InvalidArgument(
            f"--gpus must be all, or indices of {', '.join(known)}, none twice: got {text!r}"
        )
    return {known[word]: found[known[word]] for word in words}
