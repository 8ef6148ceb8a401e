"""Holds the state of the runtime between `acl.init` and `acl.finalize`: devices, memory, handles.

A handle is an object such as a stream or an event that one call creates and another destroys.
New memory is filled with poison, bytes of ones, which are NaN in every floating-point format. A
copy or a model also poisons the memory that it is going to write, so that a program that reads too
early computes NaN instead of the right numbers by luck.
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
SMALLEST_HUGE_BYTES = 2**20
HUGE_FIRST = 0
HUGE_ONLY = 1
NORMAL_ONLY = 2
"""Policies of `rt.malloc`: 2 MB pages for more than 1 MB if they fit, always, or never."""
TAIL_BYTES = 32
"""Bytes that AscendCL adds to a block after rounding its size up to a multiple of 32."""


@dataclass(eq=False)
class Device:
    """A chip, with the number of `set_device` calls that are not reset and its used memory."""

    number: int
    chip: Chip
    uses: int = 0
    default_context: "Context | None" = None
    used_bytes: int = 0

    def engine(self, name: str) -> str:
        """Return a name of an engine that is unique among devices, such as "H2D of device 1"."""
        return f"{name} of device {self.number}" if self.number else name


@dataclass(eq=False)
class Handle:
    """An object that one call creates and another destroys; most belong to a context."""

    context: "Context | None"
    number: int = 0

    def __str__(self) -> str:
        """Return its name in messages, such as "stream 3"."""
        return f"{type(self).__name__.lower()} {self.number}"


@dataclass(eq=False)
class Context(Handle):
    """The owner of streams, events and models of a device.

    It is explicit if `create_context` made it, and else the default context of its device.
    """

    device: Device | None = None
    is_explicit: bool = True
    default_stream: "Stream | None" = None


@dataclass(eq=False)
class Stream(Handle):
    """A stream, and the thread that runs its callbacks (None: no thread)."""

    thread: int | None = None


@dataclass(eq=False)
class Event(Handle):
    """An event that streams record and wait for."""

    signal: Signal = field(default_factory=lambda: Signal(""))


@dataclass(eq=False)
class Block:
    """A block of allocated device memory; `pages_bytes` is the size of its pages."""

    device: Device
    address: int
    size_bytes: int
    pages_bytes: int

    @cached_property
    def data(self) -> Bytes:
        """Return the bytes, which are allocated on the host when they are first used."""
        return np.full(self.size_bytes, POISON, np.uint8)


HandleKind = TypeVar("HandleKind", bound=Handle)


@dataclass
class Process:
    """All state that exists between `acl.init` and `acl.finalize`."""

    devices: tuple[Device, ...]
    kernels: bool
    clock: Streams = field(default_factory=Streams)
    live: dict[int, Handle] = field(default_factory=dict)
    blocks: dict[int, Block] = field(default_factory=dict)
    pinned: dict[int, Bytes] = field(default_factory=dict)
    current: dict[int, Context] = field(default_factory=dict)
    """The context of each thread."""
    copy_sources: list[Bytes] = field(default_factory=list)
    """Host memory that copies have not read yet."""
    in_callback: bool = False
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    next_address: int = 2**36

    def add(self, handle: HandleKind) -> HandleKind:
        """Register a new handle, give it a number, and return it."""
        handle.number = next(self.numbers)
        self.live[handle.number] = handle
        return handle

    def get(self, kind: type[HandleKind], handle: Any, code: Code = Code.INVALID) -> HandleKind:
        """Return a handle; raises `AclError` if it is of another type than `kind` or destroyed."""
        # A program may still have the object of a destroyed handle, but its number is not in use.
        if isinstance(handle, kind) and self.live.get(handle.number) is handle:
            return handle
        raise AclError(code, f"a {kind.__name__.lower()} that lives", str(handle))

    def handles_of(self, kind: type[HandleKind]) -> list[HandleKind]:
        """Return all handles of the type `kind` that have not been destroyed."""
        return [handle for handle in self.live.values() if isinstance(handle, kind)]

    def in_context(
        self, kind: type[HandleKind], handle: Any, code: Code = Code.INVALID
    ) -> HandleKind:
        """Return a handle; raises `AclError` 200004 if it belongs to another context."""
        checked = self.get(kind, handle, code)
        context = self.context()
        needed = f"what belongs to {context}"
        got = f"{checked} of {checked.context}"
        need(checked.context is context, needed, got, "set_current_context", Code.MISMATCH)
        return checked

    def drop(self, handle: Handle) -> None:
        """Destroy a handle and, if it is a context, all handles that belong to it."""
        for member in [h for h in self.live.values() if h.context is handle]:
            if isinstance(member, Stream):
                # A stream carries out its remaining commands before it is destroyed.
                self.clock.drain(member)
            del self.live[member.number]
        del self.live[handle.number]

    def context(self) -> Context:
        """Return the context that this thread uses."""
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
        """Return a stream; None stands for the default stream of the context."""
        return self.get(Stream, self.context().default_stream if stream is None else stream)

    def issue_tasks(
        self,
        stream: Stream,
        tasks: Sequence[Sequence[Any]],
        on_start: Action | None = None,
        on_end: Action | None = None,
    ) -> None:
        """Issue tasks to a stream, each given as name, engine and seconds.

        `on_start` is called when the first task starts, `on_end` when the last one ends.
        """
        # A model without a kernel still has to write its outputs when the stream reaches it.
        tasks = tasks or (("nothing", "AI Core", 0.0),)
        device = self.device()
        # Each kernel is a task of its own: between two of them other streams get the engine.
        for i, (name, engine, time_s) in enumerate(tasks):
            at_start = on_start if i == 0 else None
            at_end = on_end if i == len(tasks) - 1 else None
            self.clock.issue(stream, Task(name, device.engine(engine), time_s, at_start, at_end))

    # -- memory -----------------------------------------------------------------------------------
    def allocate(self, size_bytes: int, policy: int = HUGE_FIRST) -> int:
        """Return the address of new device memory, filled with poison; see `rt.malloc`."""
        device = self.device()
        # 100 bytes become 128 and, with the 32 additional bytes, 160.
        padded_bytes = -(-size_bytes // 32) * 32 + TAIL_BYTES
        may_use_huge_pages = policy == HUGE_FIRST and size_bytes > SMALLEST_HUGE_BYTES
        # Memory is used in whole pages: a block of 100 bytes takes a page of 4 KB.
        free_bytes = int(device.chip.device_memory.size_bytes) - device.used_bytes
        if policy == HUGE_ONLY:
            page_sizes = [HUGE_BYTES]
        else:
            page_sizes = [HUGE_BYTES, PAGE_BYTES] if may_use_huge_pages else [PAGE_BYTES]
        # 1.5 MB take one page of 2 MB, or 385 pages of 4 KB if only 1.8 MB are free.
        paged_sizes_bytes = [
            -(-padded_bytes // page_bytes) * page_bytes for page_bytes in page_sizes
        ]
        fitting_sizes_bytes = [size for size in paged_sizes_bytes if size <= free_bytes]
        needed = f"{padded_bytes:,} bytes of memory of device {device.number}"
        need(bool(fitting_sizes_bytes), needed, f"{free_bytes:,} free", "free some", Code.NO_MEMORY)
        address = self.next_address
        # An unused page follows each block, so that an address beyond its end is in no block.
        self.next_address += fitting_sizes_bytes[0] + PAGE_BYTES
        device.used_bytes += fitting_sizes_bytes[0]
        self.blocks[address] = Block(device, address, padded_bytes, fitting_sizes_bytes[0])
        return address

    def release(self, address: int) -> None:
        """Free device memory."""
        block = self.blocks.pop(address, None)
        if block is None:
            needed = "an address that malloc returned"
            raise AclError(Code.INVALID, needed, repr(address), "free once")
        # The address is not used again, so that a later access to it raises an error.
        block.device.used_bytes -= block.pages_bytes

    def memory(self, address: int, size_bytes: int) -> Bytes:
        """Return bytes of device memory; the address may be inside a block."""
        # Most addresses are the beginning of a block: that block is tried first.
        for block in (self.blocks.get(address), *self.blocks.values()):
            if block is not None and 0 <= (offset := address - block.address) < block.size_bytes:
                if offset + size_bytes <= block.size_bytes:
                    return block.data[offset : offset + size_bytes]
                got = f"{block.size_bytes - offset} behind the address"
                raise AclError(Code.INVALID, f"{size_bytes} bytes of device memory", got)
        raise AclError(Code.INVALID, "an address in device memory", repr(address), "malloc some")

    def leaks(self) -> tuple[str, ...]:
        """Return a line for each resource that the program has not freed, destroyed or reset."""
        lines = [
            f"{b.size_bytes - TAIL_BYTES:,} bytes of device {b.device.number} at {b.address:#x}"
            for b in self.blocks.values()
        ]
        lines += [f"{len(b):,} bytes of host memory" for b in self.pinned.values()]
        # Default contexts and default streams are created by `set_device`, not by the program.
        automatic: set[Handle | None] = {device.default_context for device in self.devices}
        automatic |= {context.default_stream for context in self.handles_of(Context)}
        lines += [str(handle) for handle in self.live.values() if handle not in automatic]
        return (*lines, *(f"device {d.number}, not reset" for d in self.devices if d.uses))


PROCESSES: list[Process] = []
"""The process between `acl.init` and `acl.finalize`: one entry, or none."""
ENDED_PROCESSES: list[Process] = []
"""The process that `acl.finalize` ended last; it decides the error code of a second call."""


def init(*chips: Chip | str, kernels: bool = True) -> None:
    """Start the runtime with one device for each chip (by default one Ascend310).

    Models compute their outputs by their kernels or, if `kernels` is false, by the graph they were
    compiled from, which is faster and does not round to the formats of kernels. Raises `AclError`
    100002 for a second call.
    """
    need(not PROCESSES, "acl.init once", "a second", "call acl.finalize first", Code.TWICE)
    loaded = [
        load_chip(chip) if isinstance(chip, str) else chip for chip in chips or ("Ascend310",)
    ]
    ENDED_PROCESSES.clear()
    PROCESSES.append(Process(tuple(Device(i, chip) for i, chip in enumerate(loaded)), kernels))


def finalize() -> tuple[str, ...]:
    """End the runtime and return a line for each leak; raises `AclError` 100037 for a second call.

    Streams carry out their remaining commands first; a deadlock is reported as a line, too.
    """
    # `init` empties ENDED_PROCESSES, so that it has an entry only after a `finalize`.
    code = Code.FINALISED if ENDED_PROCESSES else Code.UNINITIALISED
    need(bool(PROCESSES), "acl.init before acl.finalize", "none", "call each once", code)
    ended_process = PROCESSES.pop()
    ENDED_PROCESSES.append(ended_process)
    try:
        ended_process.clock.drain()
    except AscendLabError as error:
        return (*ended_process.leaks(), f"streams that stand still: {error}")
    return ended_process.leaks()


def process(*, waits: bool = False) -> Process:
    """Return the process; raises `AclError` 100001 before `acl.init`.

    `waits` states that the caller waits or allocates, which a callback must not do.
    """
    needed = "acl.init before everything else"
    need(bool(PROCESSES), needed, "none", "call it once", Code.UNINITIALISED)
    # A callback runs inside the loop of the simulation: waiting there would never end.
    needed = "a callback that neither waits nor allocates"
    remedy = "do it in another thread"
    need(not (waits and PROCESSES[0].in_callback), needed, "one that does", remedy)
    return PROCESSES[0]
