"""A folder that the package `kernels` of Hugging Face loads: the serving half of flashgen with the
templates and generated/, once for each backend of torch.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from flashgen import __version__, paths
from flashgen.errors import InvalidArgument
from flashgen.files import write_whole
from flashgen.kernels.render import render_text
from flashgen.table.emit import demand_agreement, tables_for
from flashgen.table.table import Table

ARCHS: dict[str, dict[str, list[str]]] = {"cuda": {"archs": ["8.0+PTX"]}, "cpu": {}}
"""What the package kernels knows of a backend's devices: Triton compiles for sm_80 and later."""
SERVING = ("spec", "inputs", "schedules", "kernels", "reference", "runtime")
"""The packages that serve. They import no other one of flashgen (.importlinter)."""
MODULES = (
    "__init__.py", "errors.py", "files.py", "lazy.py", "paths.py", "settings.py", "version.py",
    "py.typed",
)  # fmt: skip

_CARD = """---
license: apache-2.0
tags:
- kernels
---

# flashgen

Exact attention by Triton kernels that were tuned per GPU.
Written by `flashgen export --to hf-kernel`.
"""


def write(folder: Path, out: Path) -> None:
    """Write the folder from the generated/ of `out`, or of the shipped tables. What an earlier
    export wrote is replaced. Raises InvalidArgument for a folder of anything else, and
    GeneratedError where generated/ is not current.
    """
    card, build = folder / "README.md", folder / "build"
    if build.is_symlink():
        raise InvalidArgument(f"{build} must be a folder, for it is replaced: got a symbolic link")
    if folder.is_dir() and any(folder.iterdir()):
        if not card.is_file() or card.read_text() != _CARD:
            raise InvalidArgument(f"{folder} must be new, empty or an earlier export: name another")
        shutil.rmtree(build, ignore_errors=True)
    generated = paths.generated_dir(out)
    generated = generated if generated.is_dir() else paths.shipped_generated_dir()
    tables = tables_for(out)
    demand_agreement(tables, generated)
    content = _content(generated) | _tuned(tables.values())
    digest = hashlib.sha256()
    for name, data in sorted(content.items()):
        digest.update(name.encode() + b"\0" + data + b"\0")
    files = {
        name: base64.b64encode(hashlib.sha256(data).digest()).decode()
        for name, data in sorted(content.items())
    }
    for backend in ARCHS:
        variant = build / f"torch-{backend}"
        for name, data in content.items():
            (variant / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(variant / name, data)
        metadata = {
            "id": f"_flashgen_{backend}_{digest.hexdigest()[:12]}",
            "name": "flashgen",
            "version": 1,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend} | ARCHS[backend],
            "digest": {"algorithm": "sha256", "files": files},
        }
        write_whole(variant / "metadata.json", json.dumps(metadata, indent=2) + "\n")
    write_whole(card, _CARD)


def _tuned(tables: Iterable[Table]) -> dict[str, bytes]:
    """The tiles of entries without features, one file a GPU and spec, in the layout that
    kernel-builder has for tuned Triton kernels: key lengths, and what was chosen for them.
    """
    found: dict[str, dict[int, dict[str, object]]] = {}
    for table in tables:
        device = table.gpu.name.replace(" ", "_").replace("/", "_")
        for entry in table.entries:
            spec, config = entry.spec, entry.config
            if spec.featured or spec.direction not in ("forward", "backward_dkv", "backward_dq"):
                continue
            name = (
                f"kernel={spec.direction},dtype={spec.dtype},precision={spec.precision},"
                f"head_dim={spec.head_dim},head_dim_v={spec.head_dim_v},mask={spec.mask},"
                f"device_name={device}.json"
            )
            found.setdefault(name, {})[max(1, entry.bucket.low)] = {
                "BR": config.br,
                "BC": config.bc,
                "num_warps": config.num_warps,
                "num_stages": config.num_stages,
                "schedule": config.schedule,
                "loads": config.loads,
                "order": config.order,
            }
    return {f"configs/{name}": json.dumps(held, indent=1).encode() for name, held in found.items()}


def _content(generated: Path) -> dict[str, bytes]:
    """The files of a variant by their path in it."""
    found = {f"flashgen/{name}": (paths.PACKAGE / name).read_bytes() for name in MODULES}
    folders = {name: (paths.PACKAGE / name, "*.py") for name in SERVING}
    folders |= {
        "_templates": (paths.templates_dir(), "*.jinja"),
        "_generated": (generated, "*.py"),
    }
    for name, (source, pattern) in folders.items():
        for path in source.rglob(pattern):
            found[f"flashgen/{name}/{path.relative_to(source).as_posix()}"] = path.read_bytes()
    return found | {"__init__.py": render_text("hf_kernel.py.jinja", version=__version__).encode()}
