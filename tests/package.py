"""A small generated package made in a folder, for tests of the runtime."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from flashgen.kernels.render import render
from flashgen.kernels.text import text_name
from flashgen.runtime import Dispatcher, autograd
from flashgen.runtime.choice import Choice, by_spec
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Bucket


def make_choice(spec: AttentionSpec, config: KernelConfig, bucket: Bucket | None) -> Choice:
    return Choice(spec=spec, bucket=bucket, config=config, source="estimated", median_us=12.5)


def make_dispatcher(
    folder: Path, slug: str, arch: str, choices: Sequence[Choice] = ()
) -> Dispatcher:
    """A dispatcher over kernels written to folder/<name>/kernels; the folder goes on sys.path."""
    name = f"generated_{abs(hash(str(folder)))}"
    kernels = folder / name / "kernels"
    kernels.mkdir(parents=True)
    for choice in choices:
        for config in {choice.config, choice.config.pointer_twin(choice.spec)}:
            file = kernels / f"{text_name(choice.spec, config)}.py"
            file.write_text(render(choice.spec, config).source)
    sys.path.insert(0, str(folder))
    dispatcher = Dispatcher(package=name, archs={slug: arch}, choices={slug: by_spec(choices)})
    autograd.served[name] = dispatcher.passes
    return dispatcher
