"""What a process holds between `acl.init` and `acl.finalize`: devices, memory, handles.

Memory is bytes and starts as poison: ones in every bit, NaN in every floating-point format. A copy
or a model poisons what it will write until it is done, so that who reads too early sees it.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ascend_lab.deploy.runtime.streams import AclError, Action, Code, Signal, Streams, Task, need
from ascend_lab.errors import AscendLabError
from ascend_lab.machine.chip import Chip, load_chip

Bytes = NDArray[np.uint8]
POISON = 0xFF
PAGE_BYTES = 2**12
HUGE_BYTES = 2**21
LEAST_HUGE_BYTES = 2**20
HUGE_FIRST = 0
HUGE_ONLY = 1
NORMAL_ONLY = 2
"""Policies of `rt.malloc`: pages of 2 MB for more than 1 MB if there is room, always, never."""


@dataclass(eq=False)
class Device:
    """A chip, how often it is set, its default context, the bytes of memory that are taken."""

    number: int
    chip: Chip
    uses: int = 0
    default: "Context | None" = None
    taken_bytes: int = 0

    def engine(self, name: str) -> str:
        """Return the name of one of its engines among those of all devices."""
        return f"{name} of device {self.number}" if self.number else name


@dataclass(eq=False)
class Handle:
    """What one call makes and another gives back; `context` is where it belongs."""

    context: "Context | None"
    number: int = 0

    def __str__(self) -> str:
        """Return what messages call it."""
        return f"{type(self).__name__.lower()} {self.number}"


@dataclass(eq=False)
class Context(Handle):
    """Where streams, events and models belong; not `owned` by the caller if by `set_device`."""

    device: Device | None = None
    owned: bool = True
    default: "Stream | None" = None


@dataclass(eq=False)
class Stream(Handle):
    """A stream, and the thread that takes its callbacks."""

    thread: int | None = None


@dataclass(eq=False)
class Event(Handle):
    """An event that streams record and wait for."""

    signal: Signal = field(default_factory=lambda: Signal(""))


@dataclass(eq=False)
class Block:
    """Memory of a device: its address, bytes, and what it takes with its pages."""

    device: Device
    address: int
    size_bytes: int
    taken_bytes: int

    @cached_property
    def data(self) -> Bytes:
        """The bytes, made when somebody looks."""
        return np.full(self.size_bytes, POISON, np.uint8)


Kind = TypeVar("Kind", bound=Handle)


@dataclass
class Process:
    """All that lives."""

    devices: tuple[Device, ...]
    kernels: bool
    clock: Streams = field(default_factory=Streams)
    live: dict[int, Handle] = field(default_factory=dict)
    blocks: dict[int, Block] = field(default_factory=dict)
    pinned: dict[int, Bytes] = field(default_factory=dict)
    current: dict[int, Context] = field(default_factory=dict)
    """The context of each thread."""
    reading: list[Bytes] = field(default_factory=list)
    """Host memory that copies in flight still have to read."""
    in_callback: bool = False
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    next_address: int = 2**36

    def add(self, handle: Kind) -> Kind:
        """Return a handle that lives from now on."""
        handle.number = next(self.numbers)
        self.live[handle.number] = handle
        return handle

    def get(self, kind: type[Kind], handle: Any, code: Code = Code.INVALID) -> Kind:
        """Return a handle of a kind; `AclError` unless it lives."""
        if isinstance(handle, kind) and self.live.get(handle.number) is handle:
            return handle
        raise AclError(code, f"a {kind.__name__.lower()} that lives", str(handle))

    def all(self, kind: type[Kind]) -> list[Kind]:
        """Return all handles of a kind that live."""
        return [handle for handle in self.live.values() if isinstance(handle, kind)]

    def own(self, kind: type[Kind], handle: Any, code: Code = Code.INVALID) -> Kind:
        """Return a handle of the context this thread uses; `AclError` 200004 for another's."""
        found = self.get(kind, handle, code)
        context = self.context()
        needed = f"what belongs to {context}"
        got = f"{found} of {found.context}"
        need(found.context is context, needed, got, "set_current_context", Code.MISMATCH)
        return found

    def drop(self, handle: Handle) -> None:
        """Let a handle live no longer, and what belongs to it."""
        for other in [h for h in self.live.values() if h.context is handle]:
            if isinstance(other, Stream):
                self.clock.drain(other)
            del self.live[other.number]
        del self.live[handle.number]

    def context(self) -> Context:
        """Return the context this thread uses."""
        found = self.current.get(threading.get_ident())
        if found is None or found.number not in self.live:
            remedy = "call rt.set_device or rt.create_context"
            raise AclError(Code.UNINITIALISED, "a context of this thread", "none", remedy)
        return found

    def device(self) -> Device:
        """Return the device of the context."""
        found = self.context().device
        assert found is not None
        return found

    def stream(self, stream: Stream | None) -> Stream:
        """Return a stream that lives, None for the default one of the context."""
        return self.get(Stream, self.context().default if stream is None else stream)

    def work(
        self,
        stream: Stream,
        rows: Sequence[Sequence[Any]],
        begin: Action | None = None,
        end: Action | None = None,
    ) -> None:
        """Issue kernels to a stream: name, engine and seconds of each."""
        rows = rows or (("nothing", "AI Core", 0.0),)
        device = self.device()
        for i, (name, engine, time_s) in enumerate(rows):
            first = begin if i == 0 else None
            last = end if i == len(rows) - 1 else None
            self.clock.issue(stream, Task(name, device.engine(engine), time_s, first, last))

    # -- memory -----------------------------------------------------------------------------------
    def allocate(self, size_bytes: int, policy: int = HUGE_FIRST) -> int:
        """Return the address of new device memory, poisoned; see `rt.malloc`."""
        device = self.device()
        real = -(-size_bytes // 32) * 32 + 32
        large = policy == HUGE_FIRST and size_bytes > LEAST_HUGE_BYTES
        room = int(device.chip.device_memory.size_bytes) - device.taken_bytes
        pages = {HUGE_ONLY: (HUGE_BYTES,)}.get(policy, (HUGE_BYTES, PAGE_BYTES)[not large :])
        fitting = [n for page in pages if (n := -(-real // page) * page) <= room]
        needed = f"{real:,} bytes of memory of device {device.number}"
        need(bool(fitting), needed, f"{room:,} free", "free some", Code.NO_MEMORY)
        address = self.next_address
        self.next_address += fitting[0] + PAGE_BYTES
        device.taken_bytes += fitting[0]
        self.blocks[address] = Block(device, address, real, fitting[0])
        return address

    def release(self, address: int) -> None:
        """Free device memory."""
        block = self.blocks.pop(address, None)
        if block is None:
            needed = "an address that malloc returned"
            raise AclError(Code.INVALID, needed, repr(address), "free once")
        block.device.taken_bytes -= block.taken_bytes

    def memory(self, address: int, size_bytes: int) -> Bytes:
        """Return bytes of device memory; the address may lie inside a block."""
        for block in (self.blocks.get(address), *self.blocks.values()):
            if block is not None and 0 <= (low := address - block.address) < block.size_bytes:
                if low + size_bytes <= block.size_bytes:
                    return block.data[low : low + size_bytes]
                got = f"{block.size_bytes - low} behind the address"
                raise AclError(Code.INVALID, f"{size_bytes} bytes of device memory", got)
        raise AclError(Code.INVALID, "an address in device memory", repr(address), "malloc some")

    def leaks(self) -> tuple[str, ...]:
        """Return what has not been given back, a line each."""
        found = [
            f"{b.size_bytes - 32:,} bytes of device {b.device.number} at {b.address:#x}"
            for b in self.blocks.values()
        ]
        found += [f"{len(b):,} bytes of host memory" for b in self.pinned.values()]
        made: set[Handle | None] = {device.default for device in self.devices}
        made |= {context.default for context in self.all(Context)}
        found += [str(handle) for handle in self.live.values() if handle not in made]
        return (*found, *(f"device {d.number}, not reset" for d in self.devices if d.uses))


PROCESSES: list[Process] = []
"""The one between `acl.init` and `acl.finalize`, or none."""
ENDED: list[Process] = []


def init(*chips: Chip | str, kernels: bool = True) -> None:
    """Begin, with a device per chip (an Ascend310 if none is named).

    Models compute by their kernels, or, without `kernels`, by the graph they were compiled from:
    quicker, and not rounded to the kernels' formats. Raises `AclError` 100002 for a second call.
    """
    need(not PROCESSES, "acl.init once", "a second", "call acl.finalize first", Code.TWICE)
    found = [load_chip(c) if isinstance(c, str) else c for c in chips or ("Ascend310",)]
    ENDED.clear()
    PROCESSES.append(Process(tuple(Device(i, chip) for i, chip in enumerate(found)), kernels))


def finalize() -> tuple[str, ...]:
    """End, and return what was never given back, a line each; `AclError` 100037 for a second call.

    Streams do what they still have to; those that never can are let go.
    """
    code = Code.FINALISED if ENDED else Code.UNINITIALISED
    need(bool(PROCESSES), "acl.init before acl.finalize", "none", "call each once", code)
    found = PROCESSES.pop()
    ENDED.append(found)
    try:
        found.clock.drain()
    except AscendLabError as error:
        return (*found.leaks(), f"streams that stand still: {error}")
    return found.leaks()


def process(*, waits: bool = False) -> Process:
    """Return the process; `AclError` 100001 before `acl.init`.

    What `waits` or allocates is refused inside a callback.
    """
    needed = "acl.init before everything else"
    need(bool(PROCESSES), needed, "none", "call it once", Code.UNINITIALISED)
    needed = "a callback that neither waits nor allocates"
    remedy = "do it in another thread"
    need(not (waits and PROCESSES[0].in_callback), needed, "one that does", remedy)
    return PROCESSES[0]
