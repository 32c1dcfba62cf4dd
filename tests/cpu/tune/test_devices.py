"""devices: the GPUs of this host, and which of them are chosen."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from flashgen import paths
from flashgen.errors import InvalidArgument, NoGpuError, ToolchainError
from flashgen.spec.gpu import OFFLINE_TARGET, TARGETS
from flashgen.table.table_file import load
from flashgen.tune import places
from flashgen.tune.devices import chosen, devices, list_devices
from flashgen.tune.places import TargetOptions

H200, L4 = TARGETS["nvidia_h200"], TARGETS["nvidia_l4"]
FOUR = dict.fromkeys(range(4), H200)


def test_the_devices_are_those_that_a_child_lists() -> None:
    assert devices("tests.fleet_fakes:mixed") == {0: H200, 1: L4, 2: H200}
    with pytest.raises(NoGpuError, match="torch sees no GPU here"):
        devices("tests.fleet_fakes:none")
    with pytest.raises(ToolchainError, match=r"cannot list the GPUs .*driver too old"):
        devices("tests.fleet_fakes:broken")


def test_torch_is_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr("flashgen.kernels.launch.device_gpu", (H200, L4).__getitem__)
    assert [each["name"] for each in list_devices({})["gpus"]] == ["NVIDIA H200", "NVIDIA L4"]
    cuda.is_available = lambda: False
    assert list_devices({}) == {"gpus": []}


@pytest.mark.parametrize(
    ("text", "indices"), [("all", (0, 1, 2, 3)), ("0,2", (0, 2)), ("3", (3,)), (" 2, 1", (2, 1))]
)
def test_all_or_some_are_chosen(text: str, indices: tuple[int, ...]) -> None:
    assert tuple(chosen(text, FOUR)) == indices


@pytest.mark.parametrize("text", ["", "4", "0,0", "0,", "-1", "one", "ALL", "0 1"])
def test_others_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--gpus must be all, or indices of 0, 1, 2, 3"):
        chosen(text, FOUR)


def test_each_product_has_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GPUs measure for it alone, and all share the cores."""
    found = devices("tests.fleet_fakes:mixed")
    monkeypatch.setattr("flashgen.tune.devices.devices", lambda: found)
    said: list[str] = []
    with places.opened(TargetOptions(gpus="all", jobs=3), said.append) as (h200, l4):
        assert (h200.gpu, l4.gpu) == (H200, L4)
        assert [place.pools.device and place.pools.device.size for place in (h200, l4)] == [2, 1]
        assert h200.pools.cpu is l4.pools.cpu
        assert h200.pools.cpu.size == 3
    assert said == [
        "Tuning for NVIDIA H200 (nvidia_h200), measuring on GPU 0, 2.",
        "Tuning for NVIDIA L4 (nvidia_l4), measuring on GPU 1.",
    ]


def test_all_targets_are_tuned_at_once_and_those_by_rule_are_named() -> None:
    said: list[str] = []
    with places.opened(TargetOptions(target="all", jobs=1), said.append) as found:
        assert [place.gpu for place in found] == list(TARGETS.values())
        assert all(place.pools.device is None for place in found)
    assert "nvidia_b200" in said[0]
    assert "nvidia_l4" not in said[0]


def test_what_is_tuned_without_a_gpu_may_change() -> None:
    """An estimate never replaces a measured entry: a run without a GPU would be for nothing."""
    entries = load(paths.shipped_table(OFFLINE_TARGET)).entries
    defaults = {f"fwd_bf16_d{dim}{mask}" for dim in (64, 128) for mask in ("", "_causal")}
    sources = {entry.spec.name: entry.result.source for entry in entries}
    assert {sources[name] for name in defaults} == {"estimated"}
