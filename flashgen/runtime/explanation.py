"""Explanation: what explain() answers."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.runtime.select import Selection
from flashgen.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What would serve a call, from where and why; str() gives it as text."""

    spec: AttentionSpec
    selection: Selection | None  # None: CPU tensors, served by torch
    skipped: tuple[str, ...]
    hint: str | None
    twin: str | None = None  # the pointer twin that is launched in the choice's place

    def __str__(self) -> str:
        if self.selection is None:
            return f"{self.spec.name}: CPU tensors are served by torch, with no kernel of flashgen"
        choice, lines = self.selection.choice, []
        timing = "" if choice.median_us is None else f", {choice.median_us:.1f} us"
        lines.append(f"{self.spec.name}: {choice.kernel} ({choice.source}{timing})")
        lines.append(f"  {self.selection.rung}: {self.selection.reason}")
        if self.twin:
            lines.append(f"  its pointer twin runs: no descriptor takes these tensors: {self.twin}")
        lines += [f"  skipped {sentence}" for sentence in self.skipped]
        if self.hint:
            lines.append(f"  to improve it: {self.hint}")
        return "\n".join(lines)
