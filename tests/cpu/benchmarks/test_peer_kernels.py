"""benchmarks/peer_kernels.py: what a mangled name tells, and how a wheel is taken apart."""

from __future__ import annotations

import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import peer_kernels
from benchmarks.peer_kernels import FA3_FWD, PeerKernel, template_arguments
from flashgen.errors import ToolchainError

ONE_BLOCK, TWO_BLOCKS = "NS5_1CILi1EEES8_S8_EEE", "NS5_1CILi2EEENS7_ILi1EEES9_EEE"


def forward(cluster: str, tile: str, dim_v: int, flags: str, *, dtype: str = "10bfloat16_t") -> str:
    shown = "".join(f"Lb{flag}E" for flag in flags)
    return (
        "_ZN7cutlass13device_kernelIN5flash16FlashAttnFwdSm90INS1_25CollectiveMainloopFwdSm90ILi2EN"
        f"4cute5tupleIJ{cluster}NS6_IJ{tile}EEELi{dim_v}ENS_{dtype}EfNS_4arch4Sm90E{shown}EENS1_21"
        "CollectiveEpilogueFwdINS6_IJSA_SA_SB_EEES9_SD_SF_Li256ELb0ELb0EEEEvNT_6ParamsE"
    )


def backward(tile: str, flags: str) -> str:
    shown = "".join(f"Lb{flag}E" for flag in flags)
    return (
        "_ZN7cutlass13device_kernelIN5flash16FlashAttnBwdSm90INS1_25CollectiveMainloopBwdSm90ILi2E"
        f"Li2ELi2EN4cute5tupleIJ{ONE_BLOCK}NS6_IJ{tile}EEENS_10bfloat16_tEfNS_4arch4Sm90E{shown}Li2"
        "ELi1ELi2ELi1ELb0EEENS1_21CollectiveEpilogueBwdISC_SD_SF_Li256ELb0ELb1ELi2EEEEvNT_6ParamsE"
    )


def test_a_forward_kernel_names_its_tile() -> None:
    text = forward(ONE_BLOCK, "NS7_ILi128EEENS7_ILi176EEESA_", 128, "000000011000")
    found = template_arguments(text)
    assert found is not None
    assert (found.br, found.bc, found.head_dim, found.head_dim_v) == (128, 176, 128, 128)
    assert (found.threads, found.causal, found.plain, found.split) == (256, False, True, False)


def test_numbers_are_named_by_their_place_after_a_cluster_too() -> None:
    text = forward(TWO_BLOCKS, "NS7_ILi128EEESB_NS7_ILi192EEE", 128, "100000011000")
    found = template_arguments(text)
    assert found is not None
    assert (found.br, found.bc, found.head_dim, found.causal) == (128, 128, 192, True)
    assert not found.plain


@pytest.mark.parametrize("flag", [1, 2, 3, 4, 5, 6, 11])
def test_a_kernel_of_a_feature_is_not_plain(flag: int) -> None:
    flags = "".join("1" if place == flag else "0" for place in range(12))
    found = template_arguments(forward(ONE_BLOCK, "NS7_ILi64EEESA_SA_", 64, flags))
    assert found is not None
    assert not found.plain


def test_another_dtype_is_not_plain() -> None:
    text = forward(ONE_BLOCK, "NS7_ILi64EEESA_SA_", 64, "0" * 12, dtype="6half_t")
    found = template_arguments(text)
    assert found is not None
    assert not found.plain


def test_a_backward_kernel() -> None:
    text = backward("NS7_ILi80EEENS7_ILi128EEESB_", "10000110")
    found = template_arguments(text)
    assert found is not None
    assert (found.br, found.bc, found.head_dim, found.causal) == (80, 128, 128, True)
    assert found.backward
    assert found.plain
    assert not getattr(template_arguments(backward("NS7_ILi80EEESA_SA_", "00001000")), "plain", 1)


def test_which_kernel_a_row_means() -> None:
    row = PeerKernel(peer=FA3_FWD, direction="decode", head_dim=128, mask="none")
    tile = "NS7_ILi128EEENS7_ILi176EEESA_"
    split = template_arguments(forward(ONE_BLOCK, tile, 128, "000000011110"))
    whole = template_arguments(forward(ONE_BLOCK, tile, 128, "000000011000"))
    assert split is not None
    assert whole is not None
    assert row.matches(split)
    assert not row.matches(whole)
    assert replace(row, direction="forward").matches(whole)
    assert not replace(row, direction="forward", mask="causal").matches(whole)
    assert not replace(row, direction="forward", head_dim=64).matches(whole)


def test_kernels_of_other_types_have_no_arguments() -> None:
    assert template_arguments("_ZN7cutlass13device_kernelIN5flash19FlashAttnFwdCombineEEEv") is None


def test_the_kernels_of_a_cubin_are_its_sections_of_code() -> None:
    names = b"\0.text.first\0.nv.info\0.text.second\0.shstrtab\0"
    places = [0, *(names.index(name) for name in (b".text.f", b".nv", b".text.s", b".shs"))]
    table = b"".join(
        struct.pack("<IIQQQQIIQQ", place, 0, 0, 0, 64, 0, 0, 0, 0, 0) for place in places
    )
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, 64 + len(names))
    struct.pack_into("<HHH", header, 0x3A, 64, len(places), 4)
    assert list(peer_kernels.entry_points(bytes(header) + names + table)) == ["first", "second"]


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
