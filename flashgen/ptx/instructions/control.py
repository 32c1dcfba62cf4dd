"""Branches and the end of a thread (PTX ISA 9.7.12), and what has no effect on a CPU."""

from __future__ import annotations

import numpy as np

from flashgen.ptx.decode import Form, instruction
from flashgen.ptx.types import DecodedStep, LaneMask
from flashgen.ptx.warp import Warp


@instruction("bra")
def branch(form: Form) -> DecodedStep:
    """9.7.12.3: lanes whose guard fails go on below."""
    form.hint("uni")
    target, *others = form.targets(0)
    if others:
        form.wrong("it must have one label")

    def step(warp: Warp, mask: LaneMask) -> int:
        if mask is None or (mask == warp.active).all():
            return target
        return warp.diverge(target, mask)

    return step


@instruction("brx")
def branch_by_index(form: Form) -> DecodedStep:
    """9.7.12.4: to one of a list of labels."""
    form.hint("idx", "uni")
    which, targets = form.number(0, "u32"), form.targets(1)

    def step(warp: Warp, mask: LaneMask) -> int:
        chosen = which(warp)
        active = warp.active if mask is None else mask
        indices = np.unique(chosen[active])
        if int(indices[-1]) >= len(targets):
            raise warp.fault("memcheck", f"it branches to label {indices[-1]} of {len(targets)}")
        for index in indices[1:]:
            warp.diverge(targets[int(index)], active & (chosen == index))
        if mask is not None and (warp.active & ~active).any():
            warp.others.append((warp.position + 1, warp.active & ~active))
            warp.active = active & (chosen == indices[0])
        return targets[int(indices[0])]

    return step


@instruction("ret", "exit")
def leave(form: Form) -> DecodedStep:
    """9.7.12.6 and 9.7.12.7: the active lanes end."""
    form.hint("uni")

    return lambda warp, mask: warp.leave(warp.active if mask is None else mask)


@instruction("trap")
def trap(form: Form) -> DecodedStep:
    """9.7.19.4: the program gives up."""

    def step(warp: Warp, mask: LaneMask) -> None:
        raise warp.fault("memcheck", "it traps")

    return step


@instruction("nanosleep", "griddepcontrol", "pmevent")
def nothing(form: Form) -> DecodedStep:
    """Time, launches that overlap and profiling: no effect here. Blocks run one after another, so
    that an earlier kernel is complete.
    """
    form.modifiers.clear()
    return lambda warp, mask: None
