"""`acl.rt`: devices, contexts, streams, events, memory and callbacks, under AscendCL's names.

What fails raises `AclError` with the published code in place of returning it, and what a function
of `acl` returns beside its code is returned alone. Time is simulated: `now_s` tells it.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from ascend_lab.deploy.runtime import process as p
from ascend_lab.deploy.runtime.process import (
    Bytes,
    Context,
    Device,
    Event,
    Process,
    Stream,
    process,
)
from ascend_lab.deploy.runtime.streams import Call, Code, Signal, Span, need
from ascend_lab.machine.chip.model import Link

HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = range(4)
COPY_ENGINES = ("", "H2D", "D2H", "D2D")
HOST_LINK = Link(32e9, 2e-7, 1)
"""Between host and device where a chip file has no "pcie": PCIe 4.0 x16, as the Ascend910A's."""
NO_BLOCK = 0
BLOCK = 1
EVENT_SYNC = 1
EVENT_CAPTURE_STREAM_PROGRESS = 2
EVENT_TIME_LINE = 8
MOST_STREAMS = 1984
MOST_THREADS = 1024


# -- devices and contexts -------------------------------------------------------------------------
def _device(found: Process, number: int) -> Device:
    known = isinstance(number, int) and 0 <= number < len(found.devices)
    need(known, f"a device from 0 to {len(found.devices) - 1}", repr(number))
    return found.devices[number]


def get_device_count() -> int:
    """Return how many devices there are."""
    return len(process().devices)


def set_device(number: int) -> None:
    """Use a device in this thread, in its default context; counted, see `reset_device`."""
    found = process(waits=True)
    device = _device(found, number)
    device.uses += 1
    device.default = device.default or _context(found, device, owned=False)
    set_current_context(device.default)


def reset_device(number: int) -> None:
    """Undo one `set_device`; the last one frees all that the device holds."""
    found = process(waits=True)
    device = _device(found, number)
    need(device.uses > 0, f"device {number} set before it is reset", "not set", "reset once")
    device.uses -= 1
    if not device.uses:
        for context in found.all(Context):
            if context.device is device:
                found.drop(context)
        for address in [a for a, b in found.blocks.items() if b.device is device]:
            found.release(address)
        device.default = None


def create_context(number: int) -> Context:
    """Return a new context of a device, which this thread uses from now on."""
    found = process(waits=True)
    made = _context(found, _device(found, number), owned=True)
    set_current_context(made)
    return made


def _context(found: Process, device: Device, owned: bool) -> Context:
    made = found.add(Context(None, device=device, owned=owned))
    made.default = found.add(Stream(made))
    return made


def destroy_context(context: Context) -> None:
    """Destroy a context that `create_context` returned, and what belongs to it."""
    found = process(waits=True)
    owned = found.get(Context, context).owned
    remedy = "a default context goes with its device"
    need(owned, "a context that create_context returned", str(context), remedy)
    found.drop(context)


def set_current_context(context: Context) -> None:
    """Let this thread use a context, and its device."""
    found = process()
    found.current[threading.get_ident()] = found.get(Context, context)


def get_current_context() -> Context:
    """Return the context this thread uses."""
    return process().context()


# -- streams and events ---------------------------------------------------------------------------
def create_stream() -> Stream:
    """Return a new stream of the context."""
    found = process(waits=True)
    fine = len(found.all(Stream)) < MOST_STREAMS
    needed = f"at most {MOST_STREAMS} streams"
    need(fine, needed, "one more", "destroy some", Code.NO_MEMORY)
    return found.add(Stream(found.context()))


def destroy_stream(stream: Stream) -> None:
    """Destroy a stream once it has done what it was given."""
    found = process(waits=True)
    own = found.own(Stream, stream) is not found.context().default
    need(own, "a stream that create_stream returned", "the default stream")
    found.clock.drain(stream)
    found.drop(stream)


def synchronize_stream(stream: Stream | None = None) -> None:
    """Wait until a stream is done; `DeadlockError` if it never will be."""
    found = process(waits=True)
    found.clock.drain(found.stream(stream))


def synchronize_device() -> None:
    """Wait until all streams of the device are done."""
    found = process(waits=True)
    device = found.device()
    found.clock.drain(*(s for s in found.all(Stream) if s.context and s.context.device is device))


def create_event(flag: int = EVENT_TIME_LINE) -> Event:
    """Return a new event of the context."""
    found = process()
    flags = EVENT_SYNC | EVENT_CAPTURE_STREAM_PROGRESS | EVENT_TIME_LINE
    known = flag > 0 and not flag & ~flags
    need(known, "flags 1 (sync), 2 (progress), 8 (time line)", repr(flag))
    made = found.add(Event(found.context()))
    made.signal.name = str(made)
    return made


def destroy_event(event: Event) -> None:
    """Destroy an event."""
    found = process()
    found.drop(found.own(Event, event))


def record_event(event: Event, stream: Stream | None = None) -> None:
    """Record an event when a stream gets there."""
    process().clock.record(*_together(stream, event))


def stream_wait_event(stream: Stream | None, event: Event) -> None:
    """Hold a stream for an event; several streams may, and it stays recorded."""
    process().clock.wait(*_together(stream, event))


def reset_event(event: Event, stream: Stream | None = None) -> None:
    """Forget the records of an event."""
    signal = _together(stream, event)[1]
    signal.first = signal.last = None


def _together(stream: Stream | None, event: Event) -> tuple[Stream, Signal]:
    """Return a stream and an event; `AclError` 200004 unless both are of one context."""
    found = process()
    handle = found.stream(stream)
    what = found.get(Event, event)
    got = f"{handle.context} and {what.context}"
    needed = "a stream and an event of one context"
    need(handle.context is what.context, needed, got, code=Code.MISMATCH)
    return handle, what.signal


def query_event(event: Event) -> bool:
    """Tell whether the last record of an event has been reached."""
    last = process().get(Event, event).signal.last
    return last is not None and last.time_s is not None


def synchronize_event(event: Event) -> None:
    """Wait until the last record of an event is reached; at once if there is none."""
    found = process(waits=True)
    if found.get(Event, event).signal.last:
        found.clock.run(lambda: query_event(event))


def event_elapsed_time(start: Event, end: Event) -> float:
    """Return the milliseconds between two events that have been reached."""
    times = []
    for event in (start, end):
        reached = query_event(event)
        remedy = "record it and synchronise"
        need(reached, "events that have been reached", str(event), remedy)
        times.append(getattr(event.signal.last, "time_s"))  # noqa: B009 - there is one
    return float(times[1] - times[0]) * 1e3


def now_s() -> float:
    """Return the simulated time in seconds since `acl.init`."""
    return process().clock.now_s


def spans() -> tuple[Span, ...]:
    """Return what engines have done since `acl.init`."""
    return tuple(process().clock.spans)


def launch_kernel(
    name: str,
    engine: str,
    time_s: float,
    stream: Stream | None = None,
    function: Callable[[], None] | None = None,
) -> None:
    """Let an engine of the device work for some seconds; `function` is called at the end."""
    found = process()
    need(0 <= time_s < float("inf"), f"{name}: seconds of at least 0", repr(time_s))
    found.work(found.stream(stream), [(name, engine, time_s)], end=function)


# -- memory ---------------------------------------------------------------------------------------
def _size(size_bytes: int) -> int:
    fine = isinstance(size_bytes, int) and size_bytes >= 1
    need(fine, "a size of at least 1 byte", repr(size_bytes))
    return size_bytes


def malloc(size_bytes: int, policy: int = p.HUGE_FIRST) -> int:
    """Return the address of device memory: 64-byte aligned, 32 bytes more than whole 32s.

    `AclError` 200000 if the device has not that much left.
    """
    known = policy in (p.HUGE_FIRST, p.HUGE_ONLY, p.NORMAL_ONLY)
    need(known, "a policy: 0 huge first, 1 huge only, 2 normal", repr(policy))
    return process(waits=True).allocate(_size(size_bytes), policy)


def free(address: int) -> None:
    """Free device memory."""
    process().release(address)


def malloc_host(size_bytes: int) -> Bytes:
    """Return pinned host memory: copies from and to it run beside the host."""
    made = np.full(_size(size_bytes), p.POISON, np.uint8)
    process(waits=True).pinned[made.ctypes.data] = made
    return made


def free_host(memory: Bytes) -> None:
    """Free pinned host memory."""
    found = process().pinned.pop(memory.ctypes.data, None) is not None
    need(found, "memory that malloc_host returned", "other memory", "free it once")


def memcpy(dst: Any, dest_max: int, src: Any, size_bytes: int, kind: int) -> None:
    """Copy bytes and wait: addresses on the device, NumPy arrays on the host."""
    found = process(waits=True)
    own = Stream(found.context())  # a copy does not wait for streams
    _copy(found, own, dst, dest_max, src, size_bytes, kind)
    found.clock.drain(own)


def memcpy_async(
    dst: Any, dest_max: int, src: Any, size_bytes: int, kind: int, stream: Stream | None = None
) -> None:
    """Copy bytes when a stream gets there; host memory that is not pinned makes the host wait."""
    found = process()
    own = found.stream(stream)
    pinned = found.pinned.values()
    _copy(found, own, dst, dest_max, src, size_bytes, kind)
    host = [_host(x) for x in (dst, src) if not isinstance(x, int)]
    if not all(any(np.shares_memory(x, block) for block in pinned) for x in host):
        synchronize_stream(own)


def memset(address: int, dest_max: int, value: int, size_bytes: int) -> None:
    """Fill device memory, at once."""
    fine = 0 <= value <= 255 and 0 <= size_bytes <= dest_max
    need(fine, f"a byte, and at most {dest_max} of them", f"{value}, {size_bytes}")
    process().memory(address, size_bytes)[:] = value


def _copy(
    found: Process, stream: Stream, dst: Any, dest_max: int, src: Any, size_bytes: int, kind: int
) -> None:
    """Issue a copy; one within the host is done at once."""
    fine = 0 <= size_bytes <= dest_max and kind in range(4)
    got = f"{size_bytes}, {kind!r}"
    need(fine, f"at most {dest_max} bytes to copy, and a kind from 0 to 3", got)
    sides = isinstance(src, int), isinstance(dst, int)
    needed = f"source and destination of a copy of kind {kind}"
    got = "host memory for device memory or the reverse"
    need(sides == (kind in (2, 3), kind in (1, 3)), needed, got)
    source, target = (
        found.memory(x, size_bytes) if isinstance(x, int) else _host(x, size_bytes)
        for x in (src, dst)
    )
    if kind == HOST_TO_HOST:
        target[:] = source
        return
    if kind == DEVICE_TO_HOST and not any(np.shares_memory(target, x) for x in found.reading):
        target[:] = p.POISON
    if kind == HOST_TO_DEVICE:
        found.reading.append(source)
    held: list[Bytes] = []

    def begin() -> None:
        held.append(source.copy())
        target[:] = p.POISON
        found.reading[:] = [x for x in found.reading if x is not source]

    def end() -> None:
        target[:] = held[0]

    name = COPY_ENGINES[kind]
    time_s = copy_s(found.device(), size_bytes, kind)
    found.work(stream, [(f"{name} {size_bytes}", name, time_s)], begin, end)


def copy_s(device: Device, size_bytes: int, kind: int) -> float:
    """Return the seconds of a copy: a device reads and writes, a link starts and carries."""
    if kind == DEVICE_TO_DEVICE:
        return 2 * size_bytes / device.chip.device_memory.rate_bytes_per_s
    link = device.chip.links.get("pcie", HOST_LINK)
    return link.latency_s + size_bytes / link.rate_bytes_per_s


def _host(array: Any, size_bytes: int | None = None) -> Bytes:
    """Return host memory as bytes; `AclError` unless it is one piece and large enough."""
    whole = isinstance(array, np.ndarray) and array.flags.c_contiguous
    need(whole, "host memory as a contiguous array", type(array).__name__)
    raw: Bytes = array.reshape(-1).view(np.uint8)
    fine = len(raw) >= (size_bytes or 0)
    need(fine, f"{size_bytes} bytes of host memory", str(len(raw)))
    return raw[:size_bytes]


# -- callbacks ------------------------------------------------------------------------------------
def subscribe_report(thread: int, stream: Stream | None = None) -> None:
    """Let a thread take a stream's callbacks: this one by `process_report`, others in a loop."""
    found = process()
    own = found.stream(stream)
    needed = f"one thread for {own}"
    remedy = "unsubscribe_report"
    need(own.thread is None, needed, "a second", remedy, Code.SUBSCRIBED)
    threads = {s.thread for s in found.all(Stream)} - {None} | {thread}
    needed = f"at most {MOST_THREADS} threads"
    need(len(threads) <= MOST_THREADS, needed, "one more", code=Code.NO_MEMORY)
    own.thread = thread
    found.clock.retry()


def unsubscribe_report(thread: int, stream: Stream | None = None) -> None:
    """End what `subscribe_report` began."""
    own = process().stream(stream)
    need(own.thread == thread, f"thread {thread} subscribed to {own}", "another or none")
    own.thread = None


def launch_callback(
    function: Callable[[Any], object], user_data: Any, block: int, stream: Stream | None = None
) -> None:
    """Call a function of the host when a stream gets there; BLOCK holds the stream meanwhile."""
    found = process()
    own = found.stream(stream)
    need(block in (NO_BLOCK, BLOCK), "0 (no block) or 1 (block)", repr(block))

    def call() -> None:
        found.in_callback = True
        try:
            function(user_data)
        finally:
            found.in_callback = False

    def served() -> bool | None:
        return None if own.thread is None else own.thread != threading.get_ident()

    found.clock.issue(own, Call(call, served, block == BLOCK))


def process_report(timeout_ms: float = -1) -> bool:
    """Take one callback of this thread's streams; wait for it, at most some milliseconds (-1: on).

    Returns whether there was one.
    """
    clock = process(waits=True).clock
    until_s = clock.now_s + timeout_ms / 1e3 if timeout_ms >= 0 else float("inf")
    there = clock.run(lambda: bool(clock.calls), until_s)
    if there:
        clock.take_call()
    return there
