"""Where tables are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen import paths
from flashgen.errors import InvalidArgument


def test_flashgen_configs_is_taken_and_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_CONFIGS", str(tmp_path))
    assert paths.shipped_table("nvidia_l4") == tmp_path / "nvidia_l4.yaml"
    assert paths.table_file(Path("elsewhere"), "nvidia_l4") == tmp_path / "nvidia_l4.yaml"
    monkeypatch.setenv("FLASHGEN_CONFIGS", str(tmp_path / "gone"))
    with pytest.raises(InvalidArgument, match="FLASHGEN_CONFIGS must name a folder"):
        paths.shipped_configs_dir()
