"""benchmarks/peer_kernels.py: what a mangled name tells, and how a wheel is taken apart."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import peer_kernels
from benchmarks.duel import Cell
from benchmarks.peer_kernels import FA3_FWD, pattern_of, plain_name
from flashgen.errors import ToolchainError

FORWARD = (
    "_ZN7cutlass13device_kernelIN5flash20enable_sm90_or_laterINS1_16FlashAttnFwdSm90INS1_25Collecti"
    "veMainloopFwdSm90ILi2EN4cute5tupleIJNS5_1CILi1EEES8_S8_EEENS6_IJNS7_ILi128EEENS7_ILi80EEENS7_I"
    "Li256EEEEEELi256ENS_10bfloat16_tEfNS_4arch4Sm90E{}EENS1_21CollectiveEpilogueFwdINS6_IJSA_SC_SB"
    "_EEES9_SE_SG_Li256ELb0ELb1ELb1ELb0EEENS1_19SingleTileSchedulerILb0ELb1ELb1ELi128EEEEEEEEEvNT_6"
    "ParamsE"
)
"""FlashAttention-3's at head dim 256, in which later numbers are named by the place of the first."""
BACKWARD = (
    "FlashAttnBwdSm90<CollectiveMainloopBwdSm90<2, 2, 2, tuple<1, 1, 1>, tuple<80, 128, 128>, "
    "bfloat16_t, float, Sm90, true, false, false, false, {}, true, true, false, 2, 1>, "
    "CollectiveEpilogueBwd<tuple<80, 128>, bfloat16_t, Sm90, 256, false, true, 2>"
)
FLAGS = "000000011000"


def forward(flags: str = FLAGS, **changes: str) -> str:
    name = plain_name(FORWARD.format("".join(f"Lb{flag}E" for flag in flags)))
    for before, after in changes.items():
        assert before in name
        name = name.replace(before, after)
    return name


def found(name: str, cell: Cell = ("forward", 256, "none")) -> re.Match[str] | None:
    return pattern_of(cell).search(name)


def test_a_kernels_name_has_its_tile_and_its_threads() -> None:
    match = found(forward())
    assert match is not None
    assert match.groupdict() == {"br": "128", "bc": "80", "threads": "256"}
    match = found(BACKWARD.format("false"), ("backward", 128, "causal"))
    assert match is not None
    assert match.groupdict() == {"br": "80", "bc": "128", "threads": "256"}


def test_a_cell_means_one_kernel() -> None:
    assert not found(forward(), ("forward", 128, "none"))
    assert not found(forward(), ("forward", 256, "causal"))
    assert not found(forward(), ("decode", 256, "none"))
    split = forward("100000011110")
    assert found(split, ("decode", 256, "causal"))
    assert not found(split, ("forward", 256, "causal"))


@pytest.mark.parametrize("flag", [1, 2, 3, 4, 5, 6, 11])
def test_a_kernel_of_a_feature_is_none(flag: int) -> None:
    assert not found(forward("".join("1" if n == flag else FLAGS[n] for n in range(12))))


def test_nor_is_one_of_another_dtype_of_clusters_or_deterministic() -> None:
    assert not found(forward(bfloat16_t="half_t"))
    assert not found(forward(**{"tuple<1, 1, 1>": "tuple<2, 1, 1>"}))
    assert not found(BACKWARD.format("true"), ("backward", 128, "causal"))


def test_what_is_no_name_of_cpp_is_none() -> None:
    assert plain_name("fwd_bf16_d64") == ""


def test_the_kernels_of_a_cubin_are_its_sections_of_code(tmp_path: Path) -> None:
    names = b"\0.text.first\0.nv.info\0.rel.text.first\0.text.second\0.shstrtab\0"
    (tmp_path / "a.cubin").write_bytes(names)
    assert peer_kernels.entry_points(tmp_path / "a.cubin") == ["first", "second"]


def test_wheels_are_installed_once_with_their_hash_and_not_into_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(Path(command[command.index("-r") + 1]).read_text())
        library = Path(command[command.index("--target") + 1]) / FA3_FWD.library
        library.parent.mkdir(parents=True)
        library.write_text("code")
        return subprocess.CompletedProcess(command, int(len(calls) == 1), "", "another hash")

    monkeypatch.setattr(peer_kernels.subprocess, "run", pip)
    with pytest.raises(ToolchainError, match="another hash"):
        peer_kernels.fetch(FA3_FWD, tmp_path)
    assert peer_kernels.fetch(FA3_FWD, tmp_path).read_text() == "code"
    assert peer_kernels.fetch(FA3_FWD, tmp_path).is_relative_to(tmp_path)
    assert calls == [f"{FA3_FWD.label} --hash=sha256:{FA3_FWD.sha256}\n"] * 2
