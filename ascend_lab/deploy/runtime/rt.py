"""The functions of `acl.rt`: devices, contexts, streams, events, memory and callbacks.

They have AscendCL's names. A function of AscendCL returns an error code, often with a result; here
it returns the result alone and raises `AclError` with the published code. Time is simulated:
`now_s` returns it.
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
"""The link to the host if a chip's file has no "pcie": PCIe 4.0 x16, like the Ascend910A's."""
NO_BLOCK = 0
BLOCK = 1
EVENT_SYNC = 1
EVENT_CAPTURE_STREAM_PROGRESS = 2
EVENT_TIME_LINE = 8
MAX_STREAMS = 1984
MAX_THREADS = 1024


# -- devices and contexts -------------------------------------------------------------------------
def _device(proc: Process, number: int) -> Device:
    """Return the device of a number; raises `AclError` for a number out of range."""
    is_device = isinstance(number, int) and 0 <= number < len(proc.devices)
    need(is_device, f"a device from 0 to {len(proc.devices) - 1}", repr(number))
    return proc.devices[number]


def get_device_count() -> int:
    """Return the number of devices."""
    return len(process().devices)


def set_device(number: int) -> None:
    """Let this thread use a device in its default context; `reset_device` undoes it."""
    proc = process(waits=True)
    device = _device(proc, number)
    # Calls are counted, as in AscendCL: two of set_device need two of reset_device.
    device.uses += 1
    device.default_context = device.default_context or _new_context(proc, device, is_explicit=False)
    set_current_context(device.default_context)


def reset_device(number: int) -> None:
    """Undo one `set_device`; undoing the last one frees all resources of the device."""
    proc = process(waits=True)
    device = _device(proc, number)
    need(device.uses > 0, f"device {number} set before it is reset", "not set", "reset once")
    device.uses -= 1
    if not device.uses:
        for context in proc.handles_of(Context):
            if context.device is device:
                proc.drop(context)
        for address in [a for a, b in proc.blocks.items() if b.device is device]:
            proc.release(address)
        device.default_context = None


def create_context(number: int) -> Context:
    """Return a new context of a device, and let this thread use it."""
    proc = process(waits=True)
    context = _new_context(proc, _device(proc, number), is_explicit=True)
    set_current_context(context)
    return context


def _new_context(proc: Process, device: Device, is_explicit: bool) -> Context:
    """Return a new context with its default stream."""
    # A context belongs to no other context, so its own context is None.
    context = proc.add(Context(None, device=device, is_explicit=is_explicit))
    context.default_stream = proc.add(Stream(context))
    return context


def destroy_context(context: Context) -> None:
    """Destroy a context that `create_context` returned, and all handles that belong to it."""
    proc = process(waits=True)
    is_explicit = proc.get(Context, context).is_explicit
    remedy = "a default context goes with its device"
    need(is_explicit, "a context that create_context returned", str(context), remedy)
    proc.drop(context)


def set_current_context(context: Context) -> None:
    """Let this thread use a context, and its device."""
    proc = process()
    # Each thread has its own current context, as in AscendCL.
    proc.current[threading.get_ident()] = proc.get(Context, context)


def get_current_context() -> Context:
    """Return the context that this thread uses."""
    return process().context()


# -- streams and events ---------------------------------------------------------------------------
def create_stream() -> Stream:
    """Return a new stream of the context."""
    proc = process(waits=True)
    has_room = len(proc.handles_of(Stream)) < MAX_STREAMS
    needed = f"at most {MAX_STREAMS} streams"
    need(has_room, needed, "one more", "destroy some", Code.NO_MEMORY)
    return proc.add(Stream(proc.context()))


def destroy_stream(stream: Stream) -> None:
    """Destroy a stream after it has carried out its commands."""
    proc = process(waits=True)
    is_created = proc.in_context(Stream, stream) is not proc.context().default_stream
    need(is_created, "a stream that create_stream returned", "the default stream")
    proc.clock.drain(stream)
    proc.drop(stream)


def synchronize_stream(stream: Stream | None = None) -> None:
    """Wait until a stream has carried out its commands; raises `DeadlockError` if it never can."""
    proc = process(waits=True)
    proc.clock.drain(proc.stream(stream))


def synchronize_device() -> None:
    """Wait until all streams of the device, in all contexts, have ended."""
    proc = process(waits=True)
    device = proc.device()
    proc.clock.drain(
        *(s for s in proc.handles_of(Stream) if s.context and s.context.device is device)
    )


def create_event(flag: int = EVENT_TIME_LINE) -> Event:
    """Return a new event of the context."""
    proc = process()
    flags = EVENT_SYNC | EVENT_CAPTURE_STREAM_PROGRESS | EVENT_TIME_LINE
    # Flags are bits and can be combined: 1 | 8 = 9 is valid, 4 is not.
    is_known = flag > 0 and not flag & ~flags
    need(is_known, "flags 1 (sync), 2 (progress), 8 (time line)", repr(flag))
    event = proc.add(Event(proc.context()))
    # The handle has its number now; the message of a deadlock uses this name.
    event.signal.name = str(event)
    return event


def destroy_event(event: Event) -> None:
    """Destroy an event."""
    proc = process()
    proc.drop(proc.in_context(Event, event))


def record_event(event: Event, stream: Stream | None = None) -> None:
    """Record an event when a stream reaches this command."""
    process().clock.record(*_in_one_context(stream, event))


def stream_wait_event(stream: Stream | None, event: Event) -> None:
    """Let a stream wait for an event; several streams can wait, and the event stays recorded."""
    process().clock.wait(*_in_one_context(stream, event))


def reset_event(event: Event, stream: Stream | None = None) -> None:
    """Delete the records of an event."""
    signal = _in_one_context(stream, event)[1]
    signal.first_record = None
    signal.last_record = None


def _in_one_context(stream: Stream | None, event: Event) -> tuple[Stream, Signal]:
    """Return a stream and an event; raises `AclError` 200004 unless they share a context."""
    proc = process()
    handle = proc.stream(stream)
    event_handle = proc.get(Event, event)
    got = f"{handle.context} and {event_handle.context}"
    needed = "a stream and an event of one context"
    need(handle.context is event_handle.context, needed, got, code=Code.MISMATCH)
    return handle, event_handle.signal


def query_event(event: Event) -> bool:
    """Return whether the last record of an event has been reached."""
    last_record = process().get(Event, event).signal.last_record
    # Only the last record counts, even if an earlier one has been reached.
    return last_record is not None and last_record.time_s is not None


def synchronize_event(event: Event) -> None:
    """Wait until the last record of an event is reached; without a record, return at once."""
    proc = process(waits=True)
    if proc.get(Event, event).signal.last_record:
        proc.clock.run(lambda: query_event(event))


def event_elapsed_time(start: Event, end: Event) -> float:
    """Return the milliseconds between two events that have been reached."""
    times_s: list[float] = []
    for event in (start, end):
        is_reached = query_event(event)
        remedy = "record it and synchronise"
        need(is_reached, "events that have been reached", str(event), remedy)
        assert event.signal.last_record is not None
        assert event.signal.last_record.time_s is not None
        times_s.append(event.signal.last_record.time_s)
    return (times_s[1] - times_s[0]) * 1e3


def now_s() -> float:
    """Return the simulated time in seconds since `acl.init`."""
    return process().clock.now_s


def spans() -> tuple[Span, ...]:
    """Return the spans of all tasks that ran on engines since `acl.init`."""
    return tuple(process().clock.spans)


def launch_kernel(
    name: str,
    engine: str,
    time_s: float,
    stream: Stream | None = None,
    function: Callable[[], None] | None = None,
) -> None:
    """Issue a task to an engine of the device; `function` is called when it ends."""
    proc = process()
    need(0 <= time_s < float("inf"), f"{name}: seconds of at least 0", repr(time_s))
    proc.issue_tasks(proc.stream(stream), [(name, engine, time_s)], on_end=function)


# -- memory ---------------------------------------------------------------------------------------
def _checked_size(size_bytes: int) -> int:
    """Return a size of memory; raises `AclError` unless it is a positive integer."""
    is_size = isinstance(size_bytes, int) and size_bytes >= 1
    need(is_size, "a size of at least 1 byte", repr(size_bytes))
    return size_bytes


def malloc(size_bytes: int, policy: int = p.HUGE_FIRST) -> int:
    """Return the address of new device memory, 64-byte aligned.

    The size is rounded up to a multiple of 32, and 32 bytes are added. Raises `AclError` 200000 if
    the device has too little free memory.
    """
    is_known = policy in (p.HUGE_FIRST, p.HUGE_ONLY, p.NORMAL_ONLY)
    need(is_known, "a policy: 0 huge first, 1 huge only, 2 normal", repr(policy))
    return process(waits=True).allocate(_checked_size(size_bytes), policy)


def free(address: int) -> None:
    """Free device memory."""
    process().release(address)


def malloc_host(size_bytes: int) -> Bytes:
    """Return pinned host memory, which asynchronous copies can use while the host continues."""
    memory = np.full(_checked_size(size_bytes), p.POISON, np.uint8)
    # Arrays cannot be keys of a dict; the address of the first byte can.
    process(waits=True).pinned[memory.ctypes.data] = memory
    return memory


def free_host(memory: Bytes) -> None:
    """Free pinned host memory."""
    was_pinned = process().pinned.pop(memory.ctypes.data, None) is not None
    need(was_pinned, "memory that malloc_host returned", "other memory", "free it once")


def memcpy(dst: Any, dest_max: int, src: Any, size_bytes: int, kind: int) -> None:
    """Copy bytes and wait; device memory is given as an address, host memory as an array."""
    proc = process(waits=True)
    # A new stream, so that the copy does not wait for the commands of other streams.
    copy_stream = Stream(proc.context())
    _copy(copy_stream, dst, dest_max, src, size_bytes, kind)
    proc.clock.drain(copy_stream)


def memcpy_async(
    dst: Any, dest_max: int, src: Any, size_bytes: int, kind: int, stream: Stream | None = None
) -> None:
    """Copy bytes when a stream reaches this command; waits if host memory is not pinned."""
    proc = process()
    handle = proc.stream(stream)
    pinned = proc.pinned.values()
    _copy(handle, dst, dest_max, src, size_bytes, kind)
    # With memory that is not pinned, AscendCL's asynchronous copy is synchronous.
    host_memory = [_host_bytes(side) for side in (dst, src) if not isinstance(side, int)]
    if not all(any(np.shares_memory(side, block) for block in pinned) for side in host_memory):
        synchronize_stream(handle)


def memset(address: int, dest_max: int, value: int, size_bytes: int) -> None:
    """Fill device memory without using a stream."""
    fits = 0 <= value <= 255 and 0 <= size_bytes <= dest_max
    need(fits, f"a byte, and at most {dest_max} of them", f"{value}, {size_bytes}")
    process().memory(address, size_bytes)[:] = value


def _copy(stream: Stream, dst: Any, dest_max: int, src: Any, size_bytes: int, kind: int) -> None:
    """Issue a copy to a stream; a copy within the host is carried out at once."""
    proc = process()
    is_valid = 0 <= size_bytes <= dest_max and kind in range(4)
    got = f"{size_bytes}, {kind!r}"
    need(is_valid, f"at most {dest_max} bytes to copy, and a kind from 0 to 3", got)
    # An address in device memory is an int, host memory is an array.
    on_device = isinstance(src, int), isinstance(dst, int)
    needed = f"source and destination of a copy of kind {kind}"
    got = "host memory for device memory or the reverse"
    need(on_device == (kind in (2, 3), kind in (1, 3)), needed, got)
    source, target = (
        proc.memory(side, size_bytes) if isinstance(side, int) else _host_bytes(side, size_bytes)
        for side in (src, dst)
    )
    # A copy within the host uses no engine of the device, so it takes no simulated time.
    if kind == HOST_TO_HOST:
        target[:] = source
        return
    # The target must not change as long as an earlier copy has not read it.
    if kind == DEVICE_TO_HOST and not any(
        np.shares_memory(target, side) for side in proc.copy_sources
    ):
        target[:] = p.POISON
    # A later copy from the device must not poison this memory before it has been read.
    if kind == HOST_TO_DEVICE:
        proc.copy_sources.append(source)
    source_bytes: list[Bytes] = []

    def begin() -> None:
        """Copy the source, and fill the target with NaN."""
        # The copy transfers the bytes that the source has at its start.
        source_bytes.append(source.copy())
        target[:] = p.POISON
        proc.copy_sources[:] = [side for side in proc.copy_sources if side is not source]

    def end() -> None:
        target[:] = source_bytes[0]

    name = COPY_ENGINES[kind]
    time_s = copy_s(proc.device(), size_bytes, kind)
    proc.issue_tasks(stream, [(f"{name} {size_bytes}", name, time_s)], begin, end)


def copy_s(device: Device, size_bytes: int, kind: int) -> float:
    """Return the seconds of a copy.

    Within a device every byte is read and written once: 2 * bytes / rate. Between host and device
    the link takes its latency and bytes / rate.
    """
    if kind == DEVICE_TO_DEVICE:
        # 1 MB at 1.2 TB/s: 2 * 1e6 / 1.2e12 s = 1.7 us
        return 2 * size_bytes / device.chip.device_memory.rate_bytes_per_s
    # 1 MB over PCIe 4.0 x16: 0.2 us + 1e6 / 32e9 s = 31.5 us
    link = device.chip.links.get("pcie", HOST_LINK)
    return link.latency_s + size_bytes / link.rate_bytes_per_s


def _host_bytes(array: Any, size_bytes: int | None = None) -> Bytes:
    """Return host memory as bytes; raises `AclError` unless it is contiguous and large enough."""
    is_contiguous = isinstance(array, np.ndarray) and array.flags.c_contiguous
    need(is_contiguous, "host memory as a contiguous array", type(array).__name__)
    raw: Bytes = array.reshape(-1).view(np.uint8)
    is_large_enough = len(raw) >= (size_bytes or 0)
    need(is_large_enough, f"{size_bytes} bytes of host memory", str(len(raw)))
    return raw[:size_bytes]


# -- callbacks ------------------------------------------------------------------------------------
def subscribe_report(thread: int, stream: Stream | None = None) -> None:
    """Let a thread run a stream's callbacks.

    The calling thread runs them by `process_report`; another thread is assumed to call that in a
    loop.
    """
    proc = process()
    handle = proc.stream(stream)
    needed = f"one thread for {handle}"
    remedy = "unsubscribe_report"
    need(handle.thread is None, needed, "a second", remedy, Code.SUBSCRIBED)
    threads = {stream.thread for stream in proc.handles_of(Stream)} - {None} | {thread}
    needed = f"at most {MAX_THREADS} threads"
    # `threads` are all threads with callbacks of some stream, including the new one.
    need(len(threads) <= MAX_THREADS, needed, "one more", code=Code.NO_MEMORY)
    handle.thread = thread
    proc.clock.retry()


def unsubscribe_report(thread: int, stream: Stream | None = None) -> None:
    """Undo a `subscribe_report`."""
    handle = process().stream(stream)
    need(
        handle.thread == thread,
        f"thread {thread} subscribed to {handle}",
        "another or none",
    )
    handle.thread = None


def launch_callback(
    function: Callable[[Any], object], user_data: Any, block: int, stream: Stream | None = None
) -> None:
    """Call a function of the host when a stream gets here; if `block`, the stream waits for it."""
    proc = process()
    handle = proc.stream(stream)
    need(block in (NO_BLOCK, BLOCK), "0 (no block) or 1 (block)", repr(block))

    def call() -> None:
        """Call the user's function."""
        # While this is set, calls that wait or allocate raise an error: see `process`.
        proc.in_callback = True
        try:
            function(user_data)
        finally:
            proc.in_callback = False

    def is_served() -> bool | None:
        """Tell whether another thread serves the stream; None without a thread."""
        # Evaluated when the stream is there: a thread may subscribe after the call was issued.
        return None if handle.thread is None else handle.thread != threading.get_ident()

    proc.clock.issue(handle, Call(call, is_served, block == BLOCK))


def process_report(timeout_ms: float = -1) -> bool:
    """Run one callback of this thread's streams, and return whether there was one.

    It waits for a callback at most `timeout_ms` of simulated time (-1: without a limit).
    """
    clock = process(waits=True).clock
    until_s = clock.now_s + timeout_ms / 1e3 if timeout_ms >= 0 else float("inf")
    has_call = clock.run(lambda: bool(clock.calls), until_s)
    if has_call:
        clock.take_call()
    return has_call
