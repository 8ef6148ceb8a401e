"""A discrete-event simulation of the streams, events and engines of a device.

A stream carries out its commands in order. A task requests its engine when it becomes the first
command of its stream. An engine serves tasks first come, first served, as many at once as it has
servers. A record of an event is reached when its stream gets to it. A wait blocks its stream until
the last record that was issued before the wait is reached or, if there was none, the first one
issued after it. If no record has been issued when the stream gets to the wait, it does not block.

Issuing a command takes no time. The clock moves only when the program waits, so that all commands
issued until then are known. Streams that can never continue raise `DeadlockError`. All errors have
AscendCL's codes.
"""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from ascend_lab.deploy.agenda import Agenda
from ascend_lab.errors import AscendLabError, InputError


class Code(IntEnum):
    """AscendCL's error codes: 1xxxxx mistakes of the caller, 2xxxxx resources, 5xxxxx the runtime.

    Source: CANN runtime documentation, aclError.
    """

    meaning: str

    def __new__(cls, number: int, meaning: str) -> "Code":
        """Return the member of a number, with its meaning as an attribute."""
        # A member is an int, so that `error.code == 100000` holds.
        code = int.__new__(cls, number)
        code._value_ = number
        code.meaning = meaning
        return code

    INVALID = 100000, "invalid parameter"
    UNINITIALISED = 100001, "not initialised"
    TWICE = 100002, "initialised twice"
    NO_MODEL = 100011, "invalid model id"
    INPUTS = 100017, "input does not match the model"
    OUTPUTS = 100018, "output does not match the model"
    STATIC = 100019, "not a dynamic model"
    NO_OPERATOR = 100024, "operator not found"
    SUBSCRIBED = 100033, "subscribed twice"
    FINALISED = 100037, "finalised twice"
    QUEUE = 148048, "queue of operators out of range"
    NO_MEMORY = 200000, "no memory"
    MISMATCH = 200004, "resources do not belong together"
    INTERNAL = 500000, "internal error"


CODES = {int(code): code.meaning for code in Code}
"""AscendCL's error codes -> their meanings."""


class AclError(AscendLabError):
    """An error of a call of the runtime; `code` is AscendCL's number."""

    def __init__(self, code: Code, needed: str, got: str = "", remedy: str = "") -> None:
        """Build the message, which begins with the code and its meaning."""
        self.code = int(code)
        super().__init__(f"ACL error {self.code} ({code.meaning}): {needed}", got, remedy)


def need(
    condition: bool, needed: str, got: str = "", remedy: str = "", code: Code = Code.INVALID
) -> None:
    """Raise the `AclError` of a code unless a condition holds."""
    if not condition:
        raise AclError(code, needed, got, remedy)


class DeadlockError(AclError):
    """Streams that wait for each other, or for a callback that no thread runs."""

    def __init__(self, needed: str, got: str, remedy: str) -> None:
        """Build the message, with AscendCL's code of an internal error."""
        super().__init__(Code.INTERNAL, needed, got, remedy)


# -- commands of a stream -------------------------------------------------------------------------
Action = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Task:
    """Work that occupies an engine for `time_s`; `begin` and `end` are called at both times."""

    name: str
    engine: str
    time_s: float
    begin: Action | None = None
    end: Action | None = None


@dataclass(eq=False, slots=True)
class Signal:
    """An event that streams record and wait for, with its first and last issued record."""

    name: str
    first_record: "Mark | None" = None
    last_record: "Mark | None" = None


@dataclass(eq=False, slots=True)
class Mark:
    """One record of an event; `time_s` is the time at which it was reached (None: not yet)."""

    signal: Signal
    stream: Hashable
    time_s: float | None = None
    waiting_streams: list[Hashable] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Wait:
    """Blocks a stream until an event's last earlier record, or else its first later one."""

    signal: Signal
    previous_record: Mark | None

    def record(self) -> Mark | None:
        """Return the record to wait for, or None if none has been issued."""
        return self.previous_record or self.signal.first_record


@dataclass(frozen=True, slots=True)
class Call:
    """A callback of the host in a stream; if `blocks`, the stream waits until it has returned.

    `served` returns True if another thread runs the callback, False if the thread that runs the
    simulation has to run it (by `take_call`), and None if no thread has subscribed to it.
    """

    function: Action
    served: Callable[[], bool | None]
    blocks: bool


Command = Task | Mark | Wait | Call


@dataclass(frozen=True, slots=True)
class Span:
    """The time from `start_s` to `end_s` in which a task of a stream ran on an engine."""

    stream: Hashable
    name: str
    engine: str
    start_s: float
    end_s: float


class Streams:
    """The streams of a device, its engines and the clock; `spans` lists all started tasks."""

    def __init__(self, servers: Mapping[str, int] | None = None) -> None:
        """Start at time 0; an engine has one server unless `servers` has its number."""
        self.spans: list[Span] = []
        self.calls: deque[tuple[Hashable, Call]] = deque()
        self._servers = dict(servers or {})
        # A stream has a queue as long as it has commands; the first one is its current command.
        self._queues: dict[Hashable, deque[Command]] = {}
        # Streams whose first command has not been started yet.
        self._ready_streams: deque[Hashable] = deque()
        # Streams at a callback that no thread has subscribed to.
        self._unserved_streams: list[Hashable] = []
        # Engine -> the tasks that wait for it, and the number of servers that are busy.
        self._engine_queues: dict[str, deque[tuple[Hashable, Task]]] = {}
        self._busy_servers: dict[str, int] = {}
        self._agenda = Agenda()

    @property
    def now_s(self) -> float:
        """Return the simulated time in seconds."""
        return self._agenda.now_s

    # -- issuing ----------------------------------------------------------------------------------
    def issue(self, stream: Hashable, command: Command) -> None:
        """Append a command to a stream."""
        queue = self._queues.setdefault(stream, deque())
        queue.append(command)
        # Otherwise an earlier command has not ended yet; the stream continues when it has.
        if len(queue) == 1:
            self._ready_streams.append(stream)

    def record(self, stream: Hashable, signal: Signal) -> Mark:
        """Issue a record of an event."""
        record_command = Mark(signal, stream)
        signal.last_record = record_command
        signal.first_record = signal.first_record or record_command
        self.issue(stream, record_command)
        return record_command

    def wait(self, stream: Hashable, signal: Signal) -> None:
        """Issue a wait for an event."""
        self.issue(stream, Wait(signal, signal.last_record))

    def is_idle(self, stream: Hashable) -> bool:
        """Return whether a stream has carried out all its commands."""
        return stream not in self._queues

    # -- the clock --------------------------------------------------------------------------------
    def run(self, is_done: Callable[[], bool], until_s: float = float("inf")) -> bool:
        """Move the clock until `is_done()`, at most to `until_s`; return whether it is done.

        Without a limit it raises `DeadlockError` if no stream can continue.
        """
        while not is_done():
            if self._ready_streams:
                self._step(self._ready_streams.popleft())
            # Time passes only when no stream can continue at the present time.
            elif not self._agenda.step(until_s):
                if until_s == float("inf"):
                    raise self._deadlock()
                self._agenda.now_s = max(self.now_s, until_s)
                return False
        return True

    def drain(self, *streams: Hashable) -> None:
        """Move the clock until some streams (by default all) have carried out their commands."""
        drained = streams or tuple(self._queues)
        self.run(lambda: all(map(self.is_idle, drained)))

    def _step(self, stream: Hashable) -> None:
        """Carry out a stream's commands until one of them does not end at once."""
        while (queue := self._queues.get(stream)) and self._start_command(stream, queue[0]):
            self._pop(stream)

    def _start_command(self, stream: Hashable, command: Command) -> bool:
        """Start a stream's first command; return whether it ends at once."""
        if isinstance(command, Task):
            self._engine_queues.setdefault(command.engine, deque()).append((stream, command))
            self._serve(command.engine)
            return False
        if isinstance(command, Mark):
            command.time_s = self.now_s
            for waiting_stream in command.waiting_streams:
                self._advance(waiting_stream)
            return True
        if isinstance(command, Wait):
            record = command.record()
            # Without an issued record the wait does not block (as with events of CUDA).
            if record is None or record.time_s is not None:
                return True
            # The record lets this stream continue when its own stream reaches it.
            record.waiting_streams.append(stream)
            return False
        is_served = command.served()
        if is_served is None:
            self._unserved_streams.append(stream)
        elif is_served:
            # The other thread runs it without delay, after all other actions of this time.
            self._continue_after(0.0, stream, command.function)
        else:
            self.calls.append((stream, command))
        return is_served is False and not command.blocks

    def take_call(self) -> None:
        """Run the oldest callback that waits for this thread."""
        stream, call = self.calls.popleft()
        try:
            call.function()
        finally:
            if call.blocks:
                self._advance(stream)

    def retry(self) -> None:
        """Start those callbacks again that no thread had subscribed to."""
        self._ready_streams.extend(self._unserved_streams)
        self._unserved_streams.clear()

    def _pop(self, stream: Hashable) -> None:
        """Remove the first task of a stream."""
        queue = self._queues[stream]
        queue.popleft()
        if not queue:
            del self._queues[stream]

    def _advance(self, stream: Hashable) -> None:
        """Remove the first task of a stream, and let the next one begin."""
        self._pop(stream)
        if stream in self._queues:
            self._ready_streams.append(stream)

    def _serve(self, engine: str) -> None:
        """Start waiting tasks while the engine has a free server."""
        waiting_tasks = self._engine_queues[engine]
        # First come, first served: a task of another stream may have been there earlier.
        while waiting_tasks and self._busy_servers.get(engine, 0) < self._servers.get(engine, 1):
            stream, task = waiting_tasks.popleft()
            self._busy_servers[engine] = self._busy_servers.get(engine, 0) + 1
            if task.begin:
                task.begin()
            self.spans.append(Span(stream, task.name, engine, self.now_s, self.now_s + task.time_s))
            self._continue_after(task.time_s, stream, task.end, engine)

    def _continue_after(
        self, time_s: float, stream: Hashable, end: Action | None, engine: str | None = None
    ) -> None:
        """Let a stream continue `time_s` from now, and free its engine, even if `end` raises."""

        def finish(now_s: float, argument: None) -> None:
            """End the task: its stream goes on, and its engine is free."""
            try:
                if end:
                    end()
            finally:
                self._advance(stream)
                if engine is not None:
                    self._busy_servers[engine] -= 1
                    self._serve(engine)

        self._agenda.at(self.now_s + time_s, finish)

    # -- deadlocks --------------------------------------------------------------------------------
    def _deadlock(self) -> DeadlockError:
        """Return the cause of a deadlock: a circle of waits, or a callback that no thread runs."""
        # A stream at a wait depends on the stream that will record the event. Following these
        # dependences leads to a callback, or to a stream that was passed already: a circle.
        for first_stream in self._queues:
            path: dict[Hashable, str] = {}
            stream: Hashable = first_stream
            while stream not in path:
                command = self._queues[stream][0]
                if isinstance(command, Call):
                    needed = f"a thread that takes the callback in {stream}"
                    got = "none that is free: the stream, and all that wait for it, stand still"
                    return DeadlockError(needed, got, "subscribe_report a thread that processes it")
                record = command.record() if isinstance(command, Wait) else None
                assert record is not None
                path[stream] = f"{stream} waits for {record.signal.name}"
                stream = record.stream
            names = list(path)
            # Streams before the circle are left out: of A -> B -> C -> B the message has B -> C.
            circle = [path[name] for name in names[names.index(stream) :]]
            text = ", recorded later by ".join([*circle, f"{stream}"])
            return DeadlockError("waits without a circle", text, "record before you wait")
        raise AssertionError("streams are idle")


# -- programs that are known in advance -----------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Record:
    """A command of a program that records an event, given by name."""

    event: str


@dataclass(frozen=True, slots=True)
class WaitFor:
    """A command of a program that waits for an event, given by name."""

    event: str


def run_streams(
    programs: Sequence[Sequence[Task | Record | WaitFor]], servers: Mapping[str, int] | None = None
) -> tuple[Span, ...]:
    """Return the spans of the tasks of some streams; each stream is a list of commands.

    All commands are issued at time 0, stream by stream. Raises `DeadlockError` for waits in a
    circle, `InputError` for a task of negative time.
    """
    signals: dict[str, Signal] = {}
    streams = Streams(servers)
    for number, program in enumerate(programs):
        for step in program:
            if isinstance(step, Task):
                if not step.time_s >= 0:
                    raise InputError(f"{step.name}: seconds of at least 0", str(step.time_s))
                streams.issue(number, step)
                continue
            signal = signals.setdefault(step.event, Signal(step.event))
            issue = streams.record if isinstance(step, Record) else streams.wait
            issue(number, signal)
    streams.drain()
    return tuple(streams.spans)


def pipeline_programs(
    items: int, streams: int, in_s: float, kernel_s: float, out_s: float
) -> tuple[tuple[Task, ...], ...]:
    """Return programs that copy each item in, compute on it and copy it out.

    Items are assigned to streams in turn: with 3 streams the first one has items 0, 3, 6.
    """
    programs: list[list[Task]] = [[] for _ in range(streams)]
    for item in range(items):
        programs[item % streams] += [
            Task(f"in {item}", "H2D", in_s),
            Task(f"kernel {item}", "AI Core", kernel_s),
            Task(f"out {item}", "D2H", out_s),
        ]
    return tuple(map(tuple, programs))


def pipeline_s(items: int, streams: int, in_s: float, kernel_s: float, out_s: float) -> float:
    """Return the seconds of `pipeline_programs` in closed form, for 1 stream and for 3 or more.

        1 stream: n (in + kernel + out)    else: in + kernel + out + (n - 1) max(in, kernel, out)

    Raises `InputError` for 2 streams, whose time depends on all three steps.
    """
    item_s = in_s + kernel_s + out_s
    if streams == 2:
        raise InputError("1 stream, or 3 and more, for the closed form", "2", "simulate it")
    if streams == 1:
        return items * item_s
    # 3 items of 1, 2 and 1 s: the first ends after 4 s, the others 2 s later each, at 8 s.
    return item_s + (items - 1) * max(in_s, kernel_s, out_s)
