"""The state of a process between `acl.init` and `acl.finalize`: devices, memory, handles.

Memory is bytes and starts as poison: ones in every bit, NaN in every floating-point format. A copy
or a model poisons the memory that it will write until it is done, so that a program which reads too
early computes NaN and not, by luck, the right numbers.
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
"""Policies of `rt.malloc`: pages of 2 MB for more than 1 MB if there is room; always; never."""
TAIL_BYTES = 32
"""Bytes that AscendCL adds to a block, once its size is rounded up to a multiple of 32."""


@dataclass(eq=False)
class Device:
    """A chip, how often `set_device` chose it, its default context, its bytes of memory in use."""

    number: int
    chip: Chip
    uses: int = 0
    default: "Context | None" = None
    taken_bytes: int = 0

    def engine(self, name: str) -> str:
        """Return the name of an engine among those of all devices, such as "H2D of device 1"."""
        return f"{name} of device {self.number}" if self.number else name


@dataclass(eq=False)
class Handle:
    """Something that one call creates and another destroys; it belongs to a context."""

    context: "Context | None"
    number: int = 0

    def __str__(self) -> str:
        """Return its name in messages, such as "stream 3"."""
        return f"{type(self).__name__.lower()} {self.number}"


@dataclass(eq=False)
class Context(Handle):
    """What streams, events and models belong to; `owned` unless it is a device's default one."""

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
    """Allocated memory of a device; `taken_bytes` counts whole pages."""

    device: Device
    address: int
    size_bytes: int
    taken_bytes: int

    @cached_property
    def data(self) -> Bytes:
        """The bytes, allocated on the host when they are first needed."""
        return np.full(self.size_bytes, POISON, np.uint8)


Kind = TypeVar("Kind", bound=Handle)


@dataclass
class Process:
    """Everything that exists between `acl.init` and `acl.finalize`."""

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
        """Number a new handle, and return it."""
        handle.number = next(self.numbers)
        self.live[handle.number] = handle
        return handle

    def get(self, kind: type[Kind], handle: Any, code: Code = Code.INVALID) -> Kind:
        """Return a handle of a kind; `AclError` for one of another kind, or destroyed."""
        # "is": after destroying it a program may still hold the object, whose number is gone
        if isinstance(handle, kind) and self.live.get(handle.number) is handle:
            return handle
        raise AclError(code, f"a {kind.__name__.lower()} that lives", str(handle))

    def all(self, kind: type[Kind]) -> list[Kind]:
        """Return all handles of a kind that are not destroyed."""
        return [handle for handle in self.live.values() if isinstance(handle, kind)]

    def in_context(self, kind: type[Kind], handle: Any, code: Code = Code.INVALID) -> Kind:
        """Return a handle of the context this thread uses; `AclError` 200004 for another's."""
        checked = self.get(kind, handle, code)
        context = self.context()
        needed = f"what belongs to {context}"
        got = f"{checked} of {checked.context}"
        need(checked.context is context, needed, got, "set_current_context", Code.MISMATCH)
        return checked

    def drop(self, handle: Handle) -> None:
        """Destroy a handle and, if it is a context, all that belongs to it."""
        for member in [h for h in self.live.values() if h.context is handle]:
            if isinstance(member, Stream):
                # a stream carries out its last commands before it goes
                self.clock.drain(member)
            del self.live[member.number]
        del self.live[handle.number]

    def context(self) -> Context:
        """Return the context this thread uses."""
        context = self.current.get(threading.get_ident())
        if context is None or context.number not in self.live:
            remedy = "call rt.set_device or rt.create_context"
            raise AclError(Code.UNINITIALISED, "a context of this thread", "none", remedy)
        return context

    def device(self) -> Device:
        """Return the device of the context."""
        device = self.context().device
        assert device is not None
        return device

    def stream(self, stream: Stream | None) -> Stream:
        """Return a stream if it is not destroyed; None stands for the context's default stream."""
        return self.get(Stream, self.context().default if stream is None else stream)

    def work(
        self,
        stream: Stream,
        rows: Sequence[Sequence[Any]],
        begin: Action | None = None,
        end: Action | None = None,
    ) -> None:
        """Issue tasks to a stream: name, engine and seconds of each.

        `begin` is called when the first of them starts, `end` when the last one ends.
        """
        # a model without a task still has values to write in the stream's order
        rows = rows or (("nothing", "AI Core", 0.0),)
        device = self.device()
        # one task for each kernel: between two of them other streams get the engine
        for i, (name, engine, time_s) in enumerate(rows):
            at_start = begin if i == 0 else None
            at_end = end if i == len(rows) - 1 else None
            self.clock.issue(stream, Task(name, device.engine(engine), time_s, at_start, at_end))

    # -- memory -----------------------------------------------------------------------------------
    def allocate(self, size_bytes: int, policy: int = HUGE_FIRST) -> int:
        """Return the address of new device memory, poisoned; see `rt.malloc`."""
        device = self.device()
        # 100 bytes become 128 and, with the tail, 160
        padded_bytes = -(-size_bytes // 32) * 32 + TAIL_BYTES
        pages_may_be_huge = policy == HUGE_FIRST and size_bytes > LEAST_HUGE_BYTES
        # pages count, not sizes: a block of 100 bytes takes a page of 4 KB
        free_bytes = int(device.chip.device_memory.size_bytes) - device.taken_bytes
        if policy == HUGE_ONLY:
            page_sizes = [HUGE_BYTES]
        else:
            page_sizes = [HUGE_BYTES, PAGE_BYTES] if pages_may_be_huge else [PAGE_BYTES]
        # 1.5 MB take one page of 2 MB, or, where only 1.8 MB are free, 385 pages of 4 KB
        in_pages_bytes = [-(-padded_bytes // page_bytes) * page_bytes for page_bytes in page_sizes]
        fitting_bytes = [size for size in in_pages_bytes if size <= free_bytes]
        needed = f"{padded_bytes:,} bytes of memory of device {device.number}"
        need(bool(fitting_bytes), needed, f"{free_bytes:,} free", "free some", Code.NO_MEMORY)
        address = self.next_address
        # a page stays free behind each block: an address behind its end is none of the next block
        self.next_address += fitting_bytes[0] + PAGE_BYTES
        device.taken_bytes += fitting_bytes[0]
        self.blocks[address] = Block(device, address, padded_bytes, fitting_bytes[0])
        return address

    def release(self, address: int) -> None:
        """Free device memory."""
        block = self.blocks.pop(address, None)
        if block is None:
            needed = "an address that malloc returned"
            raise AclError(Code.INVALID, needed, repr(address), "free once")
        # the address is not used again: a late access to it is refused
        block.device.taken_bytes -= block.taken_bytes

    def memory(self, address: int, size_bytes: int) -> Bytes:
        """Return bytes of device memory; the address may lie inside a block."""
        # the quick way first: most addresses are those of blocks themselves
        for block in (self.blocks.get(address), *self.blocks.values()):
            if block is not None and 0 <= (offset := address - block.address) < block.size_bytes:
                if offset + size_bytes <= block.size_bytes:
                    return block.data[offset : offset + size_bytes]
                got = f"{block.size_bytes - offset} behind the address"
                raise AclError(Code.INVALID, f"{size_bytes} bytes of device memory", got)
        raise AclError(Code.INVALID, "an address in device memory", repr(address), "malloc some")

    def leaks(self) -> tuple[str, ...]:
        """Return what the program has not freed, destroyed or reset, a line each."""
        lines = [
            f"{b.size_bytes - TAIL_BYTES:,} bytes of device {b.device.number} at {b.address:#x}"
            for b in self.blocks.values()
        ]
        lines += [f"{len(b):,} bytes of host memory" for b in self.pinned.values()]
        # default contexts and their streams are made by `set_device` and go with the device
        automatic: set[Handle | None] = {device.default for device in self.devices}
        automatic |= {context.default for context in self.all(Context)}
        lines += [str(handle) for handle in self.live.values() if handle not in automatic]
        return (*lines, *(f"device {d.number}, not reset" for d in self.devices if d.uses))


PROCESSES: list[Process] = []
"""The process between `acl.init` and `acl.finalize`: one entry, or none."""
ENDED: list[Process] = []
"""The process that `acl.finalize` ended last, for the code of a second call."""


def init(*chips: Chip | str, kernels: bool = True) -> None:
    """Start the runtime with one device for each chip (an Ascend310 if none is named).

    Models compute by their kernels, or, without `kernels`, by the graph they were compiled from:
    quicker, and not rounded to the kernels' formats. Raises `AclError` 100002 for a second call.
    """
    need(not PROCESSES, "acl.init once", "a second", "call acl.finalize first", Code.TWICE)
    loaded = [
        load_chip(chip) if isinstance(chip, str) else chip for chip in chips or ("Ascend310",)
    ]
    ENDED.clear()
    PROCESSES.append(Process(tuple(Device(i, chip) for i, chip in enumerate(loaded)), kernels))


def finalize() -> tuple[str, ...]:
    """End the runtime and return its leaks, a line each; `AclError` 100037 for a second call.

    Streams carry out their last commands first; those that never can are reported.
    """
    # ENDED holds a process after `finalize`, and none before the first `init` or after another
    code = Code.FINALISED if ENDED else Code.UNINITIALISED
    need(bool(PROCESSES), "acl.init before acl.finalize", "none", "call each once", code)
    ended = PROCESSES.pop()
    ENDED.append(ended)
    try:
        ended.clock.drain()
    except AscendLabError as error:
        return (*ended.leaks(), f"streams that stand still: {error}")
    return ended.leaks()


def process(*, waits: bool = False) -> Process:
    """Return the process; `AclError` 100001 before `acl.init`.

    A call that `waits` or allocates is refused inside a callback.
    """
    needed = "acl.init before everything else"
    need(bool(PROCESSES), needed, "none", "call it once", Code.UNINITIALISED)
    # the callback runs inside the simulation's own loop: waiting there would never end
    needed = "a callback that neither waits nor allocates"
    remedy = "do it in another thread"
    need(not (waits and PROCESSES[0].in_callback), needed, "one that does", remedy)
    return PROCESSES[0]
