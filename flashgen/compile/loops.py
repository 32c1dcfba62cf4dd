"""The natural loops of a SASS listing, found by dominators, and the instruction counts of the main
ones.

Backward branches are not enough: ptxas puts the retry of a barrier wait after the end of the
kernel, and the branch from there back into a loop is no loop.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flashgen.compile.sass import INTEGER, WARP, Instruction, Listing

Body = tuple[Instruction, ...]


def loops(instructions: Sequence[Instruction]) -> tuple[tuple[Instruction, ...], ...]:
    """The natural loops, in order of address, each as its instructions in order of address.

    Blocks behind a loop's last back edge are left out: retries that run only when a wait fails. Not
    so where that edge comes before the header, as LLVM places it.
    """
    blocks, _, successors = flow(instructions)
    predecessors: list[list[int]] = [[] for _ in blocks]
    for source, targets in enumerate(successors):
        for target in targets:
            predecessors[target].append(source)
    dominators = _dominators(successors, predecessors)
    latches: dict[int, list[int]] = {}
    for source, targets in enumerate(successors):
        for header in targets:
            if header in dominators[source]:
                latches.setdefault(header, []).append(source)
    found = []
    for header, sources in sorted(latches.items()):
        body = _reached(sources, predecessors, {header})
        last = max(sources)
        inside = (n for n in sorted(body) if last < header or header <= n <= last)
        found.append(tuple(instruction for n in inside for instruction in blocks[n]))
    return tuple(found)


def main_bodies(listing: Listing) -> tuple[Body, ...]:
    """The innermost loops that do the work, in order of address.

    They are those with matrix instructions, and those that read tensor memory, where warps that
    multiply do nothing else; or, in a kernel without any (float32 in ieee precision), those with
    exp2. A loop that branches over its mask is there twice, as masked tiles run it and without the
    mask.
    """
    found = loops(listing.instructions)
    marks: tuple[Callable[[Instruction], bool], ...] = (
        lambda i: i.is_matrix or i.reads_tensor,
        lambda i: i.is_exp2,
    )
    for mark in marks:
        working = [loop for loop in found if any(map(mark, loop))]
        inner = [loop for loop in working if not any(_within(other, loop) for other in working)]
        if inner:
            return tuple(itertools.chain.from_iterable(map(_paths, inner)))
    return ()


def issued(listing: Listing, num_warps: int) -> tuple[int, int] | None:
    """Instructions that all warps of a block issue for one tile in the steady loops, and the exp2
    of MUFU among them: of each role the shortest main loop, times its warps. Those that take no
    slot are left out. num_warps: of a block whose warps all do the same. None without a main loop,
    and where roles cannot be told.
    """
    if hidden_roles(listing):
        return None
    steady = [
        (role.steady, role.warps or num_warps) for role in roles(listing, main_bodies(listing))
    ]
    if not steady:
        return None
    exp2 = sum(warps * sum(i.is_exp2 for i in loop) for loop, warps in steady)
    return sum(warps * sum(i.takes_slot for i in loop) for loop, warps in steady), exp2


def _paths(body: Body) -> tuple[Body, ...]:
    """The loop as it is, and, if it branches over its mask, without the mask."""
    masking = {i.address for branch in body for i in _mask_behind(branch, body)}
    if not masking:
        return (body,)
    return body, tuple(i for i in body if i.address not in masking)


def _mask_behind(branch: Instruction, body: Body) -> Body:
    """What a branch of a loop with products skips, if that is a mask: it selects and compares, and
    neither multiplies, nor takes exp2, nor touches memory.
    """
    target = branch.target
    if branch.base != "BRA" or target is None or not branch.address < target <= body[-1].address:
        return ()
    skipped = tuple(i for i in body if branch.address < i.address < target)
    bases = {i.base for i in skipped}
    selects = "FSEL" in bases and bases <= _OF_A_MASK
    return skipped if selects and any(i.is_matrix for i in body) else ()


def flow(
    instructions: Sequence[Instruction],
) -> tuple[list[list[Instruction]], dict[int, int], list[list[int]]]:
    """Basic blocks in order of address, their numbers by address, and the successors of each."""
    blocks = _blocks(instructions)
    starts = {block[0].address: n for n, block in enumerate(blocks)}
    return blocks, starts, [_successors(block, n, starts) for n, block in enumerate(blocks)]


def _blocks(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    """Basic blocks, in order of address."""
    targets = {i.target for i in instructions}
    blocks: list[list[Instruction]] = [[]]
    for i in instructions:
        if i.address in targets and blocks[-1]:
            blocks.append([])
        blocks[-1].append(i)
        if i.ends_block:
            blocks.append([])
    return [block for block in blocks if block]


def _successors(block: Sequence[Instruction], number: int, starts: dict[int, int]) -> list[int]:
    last = block[-1]
    found = [starts[last.target]] if last.target in starts else []
    if last.falls_through and number + 1 < len(starts):
        found.append(number + 1)
    return found


def _dominators(
    successors: Sequence[Sequence[int]], predecessors: Sequence[Sequence[int]]
) -> list[set[int]]:
    """The blocks on every way from an entry to each block, itself included."""
    everything, first = set(range(len(predecessors))), entries(successors, predecessors)
    found = [{n} if n in first else set(everything) for n in sorted(everything)]
    changed = True
    while changed:
        changed = False
        for n, before in enumerate(predecessors):
            if n in first:
                continue
            new = set.intersection(*(found[p] for p in before)) | {n}
            if new != found[n]:
                found[n], changed = new, True
    return found


def entries(successors: Sequence[Sequence[int]], predecessors: Sequence[Sequence[int]]) -> set[int]:
    """The first block, and the targets of jump tables: blocks to which no branch is seen.

    Such a target may still be the target of a branch from below, because setmaxnreg is retried
    until the registers are free. So of the blocks that no entry reaches, the first is taken as an
    entry, until none is left.
    """
    entries = {n for n, before in enumerate(predecessors) if n == 0 or not before}
    reached = _reached(entries, successors)
    for n in range(len(predecessors)):
        if n not in reached:
            entries.add(n)
            reached |= _reached({n}, successors)
    return entries


def _reached(
    origins: Iterable[int], edges: Sequence[Sequence[int]], ends: Iterable[int] = ()
) -> set[int]:
    """The blocks that can be reached from `origins` by edges without passing one of `ends`, all of
    these included.
    """
    found, pending = set(ends), list(origins)
    while pending:
        block = pending.pop()
        if block not in found:
            found.add(block)
            pending.extend(edges[block])
    return found


def _within(inner: Sequence[Instruction], outer: Sequence[Instruction]) -> bool:
    """Whether `inner` is another loop inside `outer`."""
    if inner is outer:
        return False
    return outer[0].address <= inner[0].address and inner[-1].address <= outer[-1].address


@dataclass(frozen=True, kw_only=True)
class Role:
    """Warps of a block that run code of their own, and their loops in sequence.

    warps is None if the code does not tell: all of the block. start and end are the addresses of
    its code.
    """

    loops: tuple[Body, ...]
    warps: int | None
    start: int
    end: int

    @property
    def steady(self) -> Body:
        """Its shortest loop: masked tiles take more instructions."""
        return min(self.loops, key=len)

    @property
    def task(self) -> str:
        """What a role of a kernel of tcgen05 does: softmax, correction (of O in tensor memory),
        products or loads; "" where it does several, or none.
        """
        does = {
            "softmax": any(i.is_exp2 for i in self.steady),
            "products": any(i.is_matrix for i in self.steady),
            "loads": any(i.is_bulk_load for i in self.steady),
        }
        found = [task for task, holds in does.items() if holds]
        if not found and any(i.reads_tensor for i in self.steady):
            return "correction"
        return found[0] if len(found) == 1 else ""


def roles(listing: Listing, main: Sequence[Body]) -> tuple[Role, ...]:
    """The roles of a warp-specialized kernel, by address; any other kernel has one role.

    main are its main_bodies.

    Triton starts the warps of such a kernel with a jump table (BRX), which dominance does not see.
    So two loops belong to one role if one of them is reached from the other.
    """
    if not any(i.base == "BRX" for i in listing.instructions):
        last = listing.instructions[-1].address
        return (Role(loops=tuple(main), warps=None, start=0, end=last),) if main else ()
    moving = [loop for loop in loops(listing.instructions) if any(i.is_bulk_load for i in loop)]
    inner = [loop for loop in moving if not any(_within(other, loop) for other in moving)]
    every = sorted({*main, *inner}, key=lambda loop: (loop[0].address, -len(loop)))
    return tuple(_role(listing, group) for group in _reaching(listing, every))


def hidden_roles(listing: Listing) -> bool:
    """Whether the kernel is warp-specialized but `roles` cannot tell: registers are handed over
    (setmaxnreg), which nothing else needs, and there is no jump table.

    With three roles ptxas may branch to each by comparisons (schedule auto, sm_90, head dim 128).
    """
    bases = {i.base for i in listing.instructions}
    return "USETMAXREG" in bases and "BRX" not in bases


def _reaching(listing: Listing, bodies: Sequence[Body]) -> list[list[Body]]:
    """The loops in groups, within which one is reached from another."""
    _, starts, successors = flow(listing.instructions)
    groups: list[list[Body]] = []
    for body in bodies:
        for group in groups:
            reached = _reached([starts[group[-1][0].address]], successors)
            if starts[body[0].address] in reached:
                group.append(body)
                break
        else:
            groups.append([body])
    return groups


def _role(listing: Listing, group: Sequence[Body]) -> Role:
    """A role; the barriers that only it uses tell its warps. Without any these are 4 where it
    multiplies by wgmma or reads tensor memory, each warp a quarter, else 1.
    """
    first, last = group[0][0].address, group[-1][-1].address
    before = [i.address for i in listing.instructions if i.address < first and _enters(i)]
    start = max(before, default=0)
    own = [i for i in listing.instructions if start <= i.address <= last]
    elsewhere = {i.barrier_name for i in listing.instructions if not start <= i.address <= last}
    threads = [
        i.barrier_threads for i in own if i.barrier_threads and i.barrier_name not in elsewhere
    ]
    of_four = any(i.is_wgmma or i.reads_tensor for body in group for i in body)
    warps = max(threads) // WARP if threads else 4 if of_four else 1
    return Role(loops=tuple(group), warps=warps, start=start, end=last)


def _enters(i: Instruction) -> bool:
    """Whether a role may start here: at a register handover, or after a jump."""
    return i.base in ("USETMAXREG", "BRX") or (i.base == "BRA" and not i.falls_through)


_COMMITTED = re.compile(r"gsb0,\s*0x([0-9a-f]+)")


@dataclass(frozen=True, kw_only=True)
class LoopFacts:
    """What one warp executes in one iteration of a main loop, that is, for one tile of K and V.

    matrix_flops counts the warp's share of a warpgroup's instruction. fp32 are additions and
    multiplications; other are comparisons, selections, conversions and integer work. shared_bytes
    pass between the warp and shared memory, including shuffles and the operands of wgmma.
    exp2_under_matrix is the share of exp2 issued while a wgmma of the same warpgroup runs; None in
    a loop without wgmma.
    """

    instructions: int
    matrix_instructions: int
    matrix_flops: int
    exp2: int
    fp32: int
    other: int
    shared_bytes: int
    spills: int
    warpgroup_arrives: int
    exp2_under_matrix: float | None


def spilling_loops(listing: Listing) -> tuple[tuple[int, int], ...]:
    """Loads and stores of spilled registers, and instructions, of each loop that spills; those
    without matrix instructions count too.
    """
    counts = ((sum(i.is_spill for i in loop), len(loop)) for loop in loops(listing.instructions))
    return tuple((spills, length) for spills, length in counts if spills)


def main_loops(listing: Listing) -> tuple[LoopFacts, ...]:
    """Facts of the main loops, the steady one first, then by length.

    If masked tiles have a loop of their own, or a branch to their mask, the steady one is shorter.
    """
    return tuple(sorted(map(facts, main_bodies(listing)), key=lambda loop: loop.instructions))


def facts(body: Sequence[Instruction]) -> LoopFacts:
    """The facts of one loop, given its instructions in the order they are issued."""
    exp2 = sum(i.is_exp2 for i in body)
    wgmma = any(i.is_wgmma for i in body)
    # In the second iteration every wgmma carried over from the first is already running.
    under = _exp2_under_wgmma([*body, *body]) - _exp2_under_wgmma(body)
    return LoopFacts(
        instructions=len(body),
        matrix_instructions=sum(i.is_matrix for i in body),
        matrix_flops=sum(i.matrix_flops for i in body),
        exp2=exp2,
        fp32=sum(i.is_fp32 for i in body),
        other=sum(i.is_other for i in body),
        shared_bytes=sum(i.shared_bytes for i in body),
        spills=sum(i.is_spill for i in body),
        warpgroup_arrives=sum(i.opcode == "WARPGROUP.ARRIVE" for i in body),
        exp2_under_matrix=under / max(1, exp2) if wgmma else None,
    )


_UNIFORM = ("R2UR", "UIADD3", "UIMAD", "ULEA", "ULOP3", "UMOV", "USEL", "USHF")
_OF_A_MASK = frozenset(("FSEL", *INTEGER, *_UNIFORM))


def _exp2_under_wgmma(body: Iterable[Instruction]) -> int:
    """The number of exp2 issued while a wgmma is not committed, or its group not awaited."""
    issued, groups, under = False, 0, 0
    for i in body:
        if i.is_wgmma:
            committed = "gsb0" in i.operands
            groups, issued = groups + committed, not committed
        elif i.opcode.startswith("WARPGROUP.DEPBAR"):
            allowed = _COMMITTED.search(i.operands)
            groups = min(groups, int(allowed[1], 16)) if allowed else 0
        elif i.is_exp2 and (issued or groups):
            under += 1
    return under
