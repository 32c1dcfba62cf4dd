"""A model of the few things of Gluon that the hopper templates use, to run their text on a CPU.

The rendered file is executed as Python. Each partition of warp_specialize is a thread, one of which
runs at a time; whenever one may wait, a seeded choice says who goes on. What the hardware does on
its own is as late, or as early, as it may be:

  a TMA load spoils its place when it is issued, and fills it at any later time
  a wgmma reads shared memory when it is issued, or not before its wait; a TMA store at its wait
  what a warp stores in shared memory is there for others at its next fence, barrier or load
  an mbarrier counts arrivals and bytes, has the parity of its phase, and refuses to overflow
  a named barrier counts warpgroups, and refuses the same one twice
  an addition to memory stays in its tensor

So a wait that is missing shows as NaN, and one too many as Deadlock. The model shows the logic of
the text. What the compiler and the hardware make of it, it does not.
"""

from __future__ import annotations

import inspect
import itertools
import random
import re
import sys
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from flashgen.evaluate.gluon_model import is_constant

WARPGROUP_THREADS = 128


class Deadlock(AssertionError):
    """All partitions wait."""


class Misuse(AssertionError):
    """What the hardware leaves undefined."""


@dataclass(eq=False)
class MBarrier:
    """An mbarrier: arrivals and bytes still missing in this phase, and how many phases ended."""

    count: int = 0
    missing: int = 0
    bytes_due: int = 0
    phase: int = 0
    waits: list[int] = field(default_factory=list)

    def arrive(self, count: int = 1) -> None:
        if count > self.missing:
            raise Misuse("more arrivals than the phase has left")
        self.missing -= count
        self._advance()

    def expect(self, size: int) -> None:
        self.bytes_due += size
        self.arrive()

    def bytes_came(self, size: int) -> None:
        self.bytes_due -= size
        self._advance()

    def _advance(self) -> None:
        if self.missing == 0 and self.bytes_due == 0:
            self.phase, self.missing = self.phase + 1, self.count

    def passed(self, parity: int) -> bool:
        """mbarrier.try_wait.parity: the phase of that parity has ended."""
        return self.phase % 2 != parity


@dataclass(eq=False)
class Named:
    """A named barrier of two warpgroups."""

    present: list[int] = field(default_factory=list)
    generation: int = 0

    def come(self, who: int, threads: int) -> None:
        if who in self.present:
            raise Misuse(f"warpgroup {who} comes twice to a named barrier")
        self.present.append(who)
        if len(self.present) * WARPGROUP_THREADS == threads:
            self.present, self.generation = [], self.generation + 1


class Memory:
    """Shared memory: a view, of whose allocation `index` takes the n-th part."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts

    @property
    def shape(self) -> Sequence[int]:
        return self.parts.shape  # type: ignore[no-any-return]

    def index(self, place: Any) -> Any:
        found = self.parts[int(place)]
        return Memory(found) if isinstance(found, Tensor) else found

    def reshape(self, shape: Sequence[int]) -> Memory:
        return Memory(self.parts.view(shape))

    def permute(self, order: Sequence[int]) -> Memory:
        return Memory(self.parts.permute(*order))

    def slice(self, start: int, length: int, axis: int = 0) -> Memory:
        return Memory(self.parts.narrow(axis, start, length))

    def store(self, values: Tensor) -> None:
        machine().write(self.parts, values)
        machine().pause()

    def load(self, layout: object) -> Tensor:
        machine().settle()
        machine().pause()
        return self.parts.clone()


@dataclass(eq=False)
class Product:
    """A wgmma under way."""

    a: Any
    b: Memory
    acc: Any
    use_acc: bool
    result: Tensor | None = None

    def finish(self) -> Tensor:
        if self.result is None:
            a = self.a.parts if isinstance(self.a, Memory) else self.a
            acc = self.acc.finish() if isinstance(self.acc, Product) else self.acc
            product = a.float() @ self.b.parts.float()
            self.result = acc + product if self.use_acc else product
        return self.result


class Pointer:
    """An address in memory, and what is added to it."""

    def __init__(self, base: Tensor, offset: Any = 0) -> None:
        self.base, self.offset = base, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.base, self.offset + more)


class Descriptor:
    """What a kernel sees of a host's TensorDescriptor."""

    def __init__(self, host: Any) -> None:
        self.whole, self.block, self.layout = host.base, host.block_shape, host.layout
        self.dtype = host.base.dtype
        nbytes = torch.Size(self.block).numel() * self.dtype.itemsize
        self.block_type = types.SimpleNamespace(nbytes=nbytes)

    def window(self, at: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of the block at these coordinates that lies in the tensor: there, and here."""
        there, here = [], []
        for start, size, length in zip(map(int, at), self.block, self.whole.shape, strict=True):
            low, high = max(start, 0), max(min(start + size, length), max(start, 0))
            there.append(slice(low, high))
            here.append(slice(low - start, high - start))
        return tuple(there), tuple(here)


class Machine:
    """One block: its partitions, and what is under way beside them."""

    def __init__(self, seed: int, pid: int = 0, programs: int = 1) -> None:
        self.random = random.Random(seed)
        self.pid, self.programs = pid, programs
        # Some blocks have a fast memory, and some one that is awaited until nobody can go on.
        self.eager = self.random.choice((0.0, 0.1, 0.3))
        # In some a partition runs on for long while another stands still.
        self.loyal = self.random.choice((0.0, 0.95))
        self.named: dict[int, Named] = {}
        self.barriers: list[MBarrier] = []
        self.copies: list[Callable[[], None]] = []
        self.products: dict[int, list[Product]] = {}
        self.stores: dict[int, list[Callable[[], None]]] = {}
        self.written: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.unfenced: dict[int, list[tuple[int, int]]] = {}
        self.loads: list[tuple[str, int, int]] = []
        self._turn = threading.Condition()
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._current: int | None = None
        self._last: int | None = None
        self._failure: BaseException | None = None
        self._local = threading.local()

    def who(self) -> int:
        return getattr(self._local, "who", 0)

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let somebody else run, and go on when `ready`."""
        if not hasattr(self._local, "who"):
            return  # before warp_specialize
        with self._turn:
            self._waiting[self.who()] = ready
            self._choose()
            self._turn.wait_for(lambda: self._current == self.who() or self._failure)
            if self._failure:
                raise self._failure

    def _choose(self) -> None:
        """Let copies come in, at random or because nobody can go on; then choose who runs."""
        while self.copies and self.random.random() < self.eager:
            self.copies.pop(self.random.randrange(len(self.copies)))()
        while not (able := [w for w, ready in self._waiting.items() if ready()]):
            if not self.copies:
                if self._waiting:
                    self._failure = Deadlock(f"partitions {sorted(self._waiting)} wait for ever")
                break
            self.copies.pop(self.random.randrange(len(self.copies)))()
        if self._last not in able or self.random.random() >= self.loyal:
            self._last = self.random.choice(able) if able else None
        self._current = self._last
        self._waiting.pop(self._current, None)  # type: ignore[arg-type]
        self._turn.notify_all()

    def run(self, partitions: Sequence[tuple[Callable[..., None], Sequence[Any]]]) -> None:
        """All partitions to their ends. Raises what one of them raised."""

        def body(who: int, function: Callable[..., None], arguments: Sequence[Any]) -> None:
            self._local.who = who
            try:
                with self._turn:
                    self._turn.wait_for(lambda: self._current == who or self._failure)
                if self._failure is None:
                    function(*arguments)
            except BaseException as error:
                self._failure = self._failure or error
            with self._turn:
                self._choose() if self._failure is None else self._turn.notify_all()

        threads = [
            threading.Thread(target=body, args=(who, *partition), daemon=True)
            for who, partition in enumerate(partitions)
        ]
        for thread in threads:
            thread.start()
        with self._turn:
            self._waiting = dict.fromkeys(range(len(threads)), lambda: True)
            self._choose()
        for thread in threads:
            thread.join()
        if self._failure:
            raise self._failure

    def write(self, place: Tensor, values: Tensor) -> None:
        """Store in shared memory, seen by others when it settles."""
        self.written.setdefault(self.who(), []).append((place, values.clone()))
        self.unfenced.setdefault(self.who(), []).append(_extent(place))
        if self.random.random() < 0.5:
            self.settle()

    def settle(self) -> None:
        """What the partition has stored is there for all."""
        for place, values in self.written.pop(self.who(), []):
            place.copy_(values)

    def fence(self) -> None:
        """Order what the partition has stored before what wgmma and the TMA unit read."""
        self.settle()
        self.unfenced.pop(self.who(), None)

    def refuse_unfenced(self, memory: Memory) -> None:
        """The asynchronous proxy reads this memory."""
        low, high = _extent(memory.parts)
        written = itertools.chain(*self.unfenced.values())
        if any(start < high and low < end for start, end in written):
            raise Misuse("what was written is read by wgmma or the TMA unit without a fence since")

    def at_rest(self) -> None:
        """Nothing is left half done: the next block of this SM would find it."""
        if any(named.present for named in self.named.values()):
            raise Misuse("somebody came to a named barrier that nobody else comes to")
        if self.copies or any(self.products.values()) or any(self.stores.values()):
            raise Misuse("a copy or a product is not waited for")
        for barrier in self.barriers:
            if barrier.bytes_due:
                raise Misuse("bytes are expected that never come")


def _extent(view: Tensor) -> tuple[int, int]:
    """The addresses from its first element to behind its last."""
    steps = zip(view.shape, view.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return view.data_ptr(), view.data_ptr() + elements * view.element_size()


_machine: list[Machine] = []


def machine() -> Machine:
    """The block that runs."""
    return _machine[-1]


def _wait(barrier: MBarrier, parity: Any) -> None:
    parity = int(parity)
    machine().pause(lambda: barrier.passed(parity))


def _arrive(barrier: MBarrier, *, count: int) -> None:
    barrier.arrive(count)
    machine().pause()


def _expect(barrier: MBarrier, size: int) -> None:
    """Of no bytes, it is an arrival, behind which others may go on."""
    barrier.expect(size)
    if not size:
        machine().pause()


def _init(barrier: MBarrier, *, count: int) -> None:
    barrier.count = barrier.missing = count


def _load(desc: Descriptor, at: Sequence[Any], barrier: MBarrier, place: Memory) -> None:
    there, here = desc.window(at)
    place.parts.fill_(float("nan"))

    def land() -> None:
        block = torch.zeros(desc.block, dtype=desc.dtype)
        block[here] = desc.whole[there]
        place.parts.copy_(block)
        barrier.bytes_came(desc.block_type.nbytes)

    machine().loads.append((str(desc.block), int(at[1]), int(at[2])))
    machine().copies.append(land)
    machine().pause()


def _store(desc: Descriptor, at: Sequence[Any], place: Memory) -> None:
    me = machine().who()
    machine().refuse_unfenced(place)
    there, here = desc.window(at)

    def land() -> None:
        desc.whole[there] = place.parts[here]

    machine().stores.setdefault(me, []).append(land)
    machine().pause()


def _store_wait(pendings: int) -> None:
    stores = machine().stores.get(machine().who(), [])
    while len(stores) > pendings:
        stores.pop(0)()


def _mma(a: Any, b: Memory, acc: Any, *, use_acc: bool = True, is_async: bool) -> Product:
    assert is_async
    for operand in (a, b):
        if isinstance(operand, Memory):
            machine().refuse_unfenced(operand)
    product = Product(a, b, acc, use_acc)
    block = machine()
    before = block.products.setdefault(block.who(), [])
    if not before and block.random.random() < 0.5:
        product.finish()
    before.append(product)
    block.pause()
    return product


def _mma_wait(outstanding: int, deps: Sequence[Product]) -> Any:
    machine().pause()
    products = machine().products[machine().who()]
    while len(products) > outstanding:
        products.pop(0).finish()
    if any(product in products for product in deps):
        raise Misuse("a product is read that is not waited for")
    results = tuple(product.finish() for product in deps)
    return results if len(results) > 1 else results[0]


def _asm(text: str, constraints: str, args: Sequence[Tensor], **options: Any) -> Tensor:
    """The statements of the templates: bar.sync, bar.arrive, and the one never reached."""
    assert options["is_pure"] is False
    (x,) = args
    if "@never" in text:
        assert not bool((x < 0).any()), "the barrier that is never reached is reached"
        return x
    found = re.fullmatch(r"bar\.(sync|arrive) (\d+), (\d+); mov.*", text)
    assert found, text
    named, block = machine().named.setdefault(int(found[2]), Named()), machine()
    before = named.generation
    named.come(block.who(), int(found[3]))
    if found[1] == "sync":
        block.settle()
        block.pause(lambda: named.generation != before)
    else:
        block.pause()
    return x


def _allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Memory:
    if dtype is torch.int64:
        barriers = [MBarrier() for _ in range(shape[0])]
        machine().barriers += barriers
        return Memory(barriers)
    return Memory(torch.full(list(shape), float("nan"), dtype=dtype))


def _specialize(partitions: Any, warps: Sequence[int], registers: Sequence[int]) -> None:
    assert len(partitions) - 1 == len(warps) == len(registers)
    machine().run(partitions)


def _put(pointer: Pointer, value: Tensor, *, mask: Tensor) -> None:
    pointer.base.view(-1)[pointer.offset[mask]] = value[mask]


def _take(pointer: Pointer, *, mask: Tensor, other: float) -> Tensor:
    found = torch.full(mask.shape, other, dtype=pointer.base.dtype)
    found[mask] = pointer.base.view(-1)[pointer.offset[mask]]
    return found


def _add(pointer: Pointer, value: Tensor, *, sem: str) -> None:
    assert sem == "relaxed"
    if pointer.offset.min() < 0 or pointer.offset.max() >= pointer.base.numel():
        raise Misuse("an address outside of its tensor")
    pointer.base.view(-1).index_add_(0, pointer.offset.flatten(), value.flatten())


def _either(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


def _language() -> types.ModuleType:
    gl = types.ModuleType("triton.experimental.gluon.language")
    layout = lambda *_, **__: None  # noqa: E731
    vars(gl).update(
        constexpr=lambda value: value,
        to_tensor=lambda value: torch.as_tensor(value).clone(),
        int32=torch.int32,
        int64=torch.int64,
        uint32=torch.int64,  # with it, torch counts little; nobody here counts below 0
        float32=torch.float32,
        static_range=range,
        program_id=lambda axis: torch.tensor(machine().pid),
        num_programs=lambda axis: torch.tensor(machine().programs),
        cdiv=lambda a, b: -(-a // b),
        minimum=_either(torch.minimum),
        maximum=_either(torch.maximum),
        arange=lambda low, high, layout: torch.arange(low, high),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        where=torch.where,
        expand_dims=torch.unsqueeze,
        max=lambda x, axis: x.amax(axis),
        sum=lambda x, axis: x.sum(axis),
        exp2=torch.exp2,
        log2=torch.log2,
        convert_layout=lambda x, layout: x,
        load=_take,
        store=_put,
        atomic_add=_add,
        barrier=lambda: machine().settle(),
        allocate_shared_memory=_allocate,
        inline_asm_elementwise=_asm,
        warp_specialize=_specialize,
        NVMMADistributedLayout=layout,
        DistributedLinearLayout=layout,
        DotOperandLayout=layout,
        SliceLayout=layout,
        BlockedLayout=layout,
        SwizzledSharedLayout=layout,
        NVMMASharedLayout=layout,
    )
    return gl


def _modules() -> dict[str, types.ModuleType]:
    """The modules that a rendered kernel imports from."""

    def jit(function: Any = None, **_: Any) -> Any:
        return function or (lambda f: f)

    name = "triton.experimental"
    experimental, gluon = types.ModuleType(name), types.ModuleType(f"{name}.gluon")
    hopper = types.ModuleType(f"{name}.gluon.language.nvidia.hopper")
    gl = _language()
    vars(gluon).update(jit=jit, constexpr_function=jit, language=gl)
    vars(experimental).update(gluon=gluon)
    vars(hopper).update(
        fence_async_shared=lambda: machine().fence(),
        warpgroup_mma=_mma,
        warpgroup_mma_wait=_mma_wait,
        mbarrier=types.SimpleNamespace(
            init=_init,
            wait=_wait,
            arrive=_arrive,
            expect=_expect,
            MBarrierLayout=object,
        ),
        tma=types.SimpleNamespace(async_load=_load, async_store=_store, store_wait=_store_wait),
    )
    nvidia = types.ModuleType(f"{name}.gluon.language.nvidia")
    made = (experimental, gluon, gl, nvidia, hopper)
    return {module.__name__: module for module in made}


def _seen(argument: Any) -> Any:
    """An argument of a launch as the kernel sees it."""
    if isinstance(argument, Tensor):
        return Pointer(argument)
    if isinstance(argument, float):
        return argument
    return torch.tensor(argument) if isinstance(argument, int) else Descriptor(argument)


class ModelKernel:
    """A rendered kernel as flashgen.kernels.launch takes one: kernel[(blocks,)](*arguments)."""

    def __init__(self, source: str, name: str, seed: int = 0) -> None:
        scope: dict[str, Any] = {}
        with patch.dict(sys.modules, _modules()):
            exec(compile(source, f"{name}.py", "exec"), scope)
        self._function, self._seed = scope[name], seed
        self._parameters = inspect.signature(self._function).parameters
        self.arg_names = tuple(self._parameters)
        self.loads: list[list[tuple[str, int, int]]] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *arguments, **options: self._launch(grid[0], arguments)

    def _launch(self, blocks: int, arguments: Sequence[Any]) -> None:
        pairs = zip(self._parameters.values(), arguments, strict=True)
        seen = [x if is_constant(parameter) else _seen(x) for parameter, x in pairs]
        for pid in range(blocks):
            block = Machine(self._seed * 1000 + pid, pid, blocks)
            _machine.append(block)
            try:
                self._function(*seen)
                block.at_rest()
            finally:
                _machine.pop()
            self.loads.append(block.loads)
