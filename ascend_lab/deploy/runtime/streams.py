"""Streams, events and engines of a device, simulated: which task runs when, and what it waits for.

A stream carries out its commands in order. A task asks for its engine as soon as it is the first
of its stream; an engine serves tasks first come, first served, as many at once as it has servers.
A record marks an event when the stream reaches it. A wait holds the stream until the last record
issued before the wait is marked, or, if there was none, the first one issued after it. If no record
has been issued when the stream reaches the wait, it goes on at once, as on the hardware.

Issuing takes no time: the clock moves only when somebody waits, so that all commands issued until
then are known. Streams that can never go on raise an error of the runtime; these errors carry
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
        # a member is the number itself, so that `error.code == 100000` holds
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
"""AscendCL's error codes, and what each means."""


class AclError(AscendLabError):
    """A call of the runtime that cannot be carried out; `code` is AscendCL's number."""

    def __init__(self, code: Code, needed: str, got: str = "", remedy: str = "") -> None:
        """Build the message, the code and its meaning in front."""
        self.code = int(code)
        super().__init__(f"ACL error {self.code} ({code.meaning}): {needed}", got, remedy)


def need(
    condition: bool, needed: str, got: str = "", remedy: str = "", code: Code = Code.INVALID
) -> None:
    """Raise the `AclError` of a code unless a condition holds."""
    if not condition:
        raise AclError(code, needed, got, remedy)


class DeadlockError(AclError):
    """Streams that wait for each other, or for a thread that nobody subscribed."""

    def __init__(self, needed: str, got: str, remedy: str) -> None:
        """Build the message; AscendCL has no code for a deadlock but that of an internal error."""
        super().__init__(Code.INTERNAL, needed, got, remedy)


# -- what streams do ------------------------------------------------------------------------------
Action = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Task:
    """Work for an engine for `time_s`; `begin` and `end` are called when it starts and ends."""

    name: str
    engine: str
    time_s: float
    begin: Action | None = None
    end: Action | None = None


@dataclass(eq=False, slots=True)
class Signal:
    """An event that streams record and wait for, and the first and last record issued of it."""

    name: str
    first_mark: "Mark | None" = None
    last_mark: "Mark | None" = None


@dataclass(eq=False, slots=True)
class Mark:
    """One record of an event: its stream, when it was reached (None: not yet), who waits for it."""

    signal: Signal
    stream: Hashable
    time_s: float | None = None
    waiting: list[Hashable] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Wait:
    """Hold the stream for an event: for the last record issued before, or the first one after."""

    signal: Signal
    mark_before: Mark | None

    def mark(self) -> Mark | None:
        """Return the record that is waited for, None if there is none."""
        return self.mark_before or self.signal.first_mark


@dataclass(frozen=True, slots=True)
class Call:
    """A function of the host in a stream, which `blocks` the stream until it has returned.

    `served` returns True if a thread of its own takes the call, False if the thread that runs the
    simulation has to (by `take_call`), None if no thread has subscribed to it.
    """

    function: Action
    served: Callable[[], bool | None]
    blocks: bool


Command = Task | Mark | Wait | Call


@dataclass(frozen=True, slots=True)
class Span:
    """When a task ran: from `start_s` to `end_s`, in a stream, on an engine."""

    stream: Hashable
    name: str
    engine: str
    start_s: float
    end_s: float


class Streams:
    """The streams of a device, their engines and the clock; `spans` lists the tasks started."""

    def __init__(self, servers: Mapping[str, int] | None = None) -> None:
        """Start at time 0; engines have one server unless `servers` says more."""
        self.spans: list[Span] = []
        self.calls: deque[tuple[Hashable, Call]] = deque()
        self._servers = dict(servers or {})
        # a stream has a queue while it has commands left: the first is the one it stands at
        self._queues: dict[Hashable, deque[Command]] = {}
        # streams whose first command has not been looked at yet
        self._ready: deque[Hashable] = deque()
        # streams at a call that no thread has subscribed to
        self._stuck: list[Hashable] = []
        # by engine: the tasks that wait for it, and how many it works on
        self._asking: dict[str, deque[tuple[Hashable, Task]]] = {}
        self._busy: dict[str, int] = {}
        self._agenda = Agenda()

    @property
    def now_s(self) -> float:
        """The simulated time."""
        return self._agenda.now_s

    # -- issuing ----------------------------------------------------------------------------------
    def issue(self, stream: Hashable, command: Command) -> None:
        """Append a command to a stream."""
        queue = self._queues.setdefault(stream, deque())
        queue.append(command)
        # else the stream stands at an earlier command, and goes on when that is over
        if len(queue) == 1:
            self._ready.append(stream)

    def record(self, stream: Hashable, signal: Signal) -> Mark:
        """Issue a record of an event."""
        mark = Mark(signal, stream)
        signal.last_mark = mark
        signal.first_mark = signal.first_mark or mark
        self.issue(stream, mark)
        return mark

    def wait(self, stream: Hashable, signal: Signal) -> None:
        """Issue a wait for an event."""
        self.issue(stream, Wait(signal, signal.last_mark))

    def is_idle(self, stream: Hashable) -> bool:
        """Tell whether a stream has carried out all its commands."""
        return stream not in self._queues

    # -- the clock --------------------------------------------------------------------------------
    def run(self, done: Callable[[], bool], until_s: float = float("inf")) -> bool:
        """Move the clock until `done()`, at most to `until_s`; tell whether it is done.

        Without a limit it raises `DeadlockError` if nothing can happen any more.
        """
        while not done():
            if self._ready:
                self._step(self._ready.popleft())
            # time passes only when no stream can go on at this moment
            elif not self._agenda.step(until_s):
                if until_s == float("inf"):
                    raise self._deadlock()
                self._agenda.now_s = max(self.now_s, until_s)
                return False
        return True

    def drain(self, *streams: Hashable) -> None:
        """Move the clock until some streams, by default all, have carried out their commands."""
        drained = streams or tuple(self._queues)
        self.run(lambda: all(map(self.is_idle, drained)))

    def _step(self, stream: Hashable) -> None:
        """Carry out a stream's commands until one has to wait."""
        while (queue := self._queues.get(stream)) and self._passes(stream, queue[0]):
            self._pop(stream)

    def _passes(self, stream: Hashable, head: Command) -> bool:
        """Start a stream's first command; tell whether it is over at once."""
        if isinstance(head, Task):
            self._asking.setdefault(head.engine, deque()).append((stream, head))
            self._serve(head.engine)
            return False
        if isinstance(head, Mark):
            head.time_s = self.now_s
            for waiting_stream in head.waiting:
                self._next(waiting_stream)
            return True
        if isinstance(head, Wait):
            mark = head.mark()
            # no record issued by now: the hardware does not wait, either
            if mark is None or mark.time_s is not None:
                return True
            # the record wakes the stream when its own stream gets there
            mark.waiting.append(stream)
            return False
        served = head.served()
        if served is None:
            self._stuck.append(stream)
        elif served:
            # the other thread takes it at once, but after all that happens at this moment
            self._later(0.0, stream, head.function)
        else:
            self.calls.append((stream, head))
        return served is False and not head.blocks

    def take_call(self) -> None:
        """Run the oldest call that waits for this thread."""
        stream, call = self.calls.popleft()
        try:
            call.function()
        finally:
            if call.blocks:
                self._next(stream)

    def retry(self) -> None:
        """Look again at calls that no thread had subscribed to."""
        self._ready.extend(self._stuck)
        self._stuck.clear()

    def _pop(self, stream: Hashable) -> None:
        queue = self._queues[stream]
        queue.popleft()
        if not queue:
            del self._queues[stream]

    def _next(self, stream: Hashable) -> None:
        self._pop(stream)
        if stream in self._queues:
            self._ready.append(stream)

    def _serve(self, engine: str) -> None:
        """Start waiting tasks while the engine has a server that is free."""
        asking = self._asking[engine]
        # first come, first served: a task of another stream may have asked earlier
        while asking and self._busy.get(engine, 0) < self._servers.get(engine, 1):
            stream, task = asking.popleft()
            self._busy[engine] = self._busy.get(engine, 0) + 1
            if task.begin:
                task.begin()
            self.spans.append(Span(stream, task.name, engine, self.now_s, self.now_s + task.time_s))
            self._later(task.time_s, stream, task.end, engine)

    def _later(
        self, time_s: float, stream: Hashable, end: Action | None, engine: str | None = None
    ) -> None:
        """Let a stream go on in `time_s` from now, and free its engine, even if `end` raises."""

        def finish(now_s: float, argument: None) -> None:
            try:
                if end:
                    end()
            finally:
                self._next(stream)
                if engine is not None:
                    self._busy[engine] -= 1
                    self._serve(engine)

        self._agenda.at(self.now_s + time_s, finish)

    # -- why nothing goes on ----------------------------------------------------------------------
    def _deadlock(self) -> DeadlockError:
        """Return why no stream goes on: a circle of waits, or a call that no thread takes."""
        # each stream that stands at a wait names the stream that will record the event: following
        # these names leads to a call, or to a stream that was passed before, which closes a circle
        for start in self._queues:
            path: dict[Hashable, str] = {}
            stream: Hashable = start
            while stream not in path:
                head = self._queues[stream][0]
                if isinstance(head, Call):
                    needed = f"a thread that takes the callback in {stream}"
                    got = "none that is free: the stream, and all that wait for it, stand still"
                    return DeadlockError(needed, got, "subscribe_report a thread that processes it")
                mark = head.mark() if isinstance(head, Wait) else None
                assert mark is not None
                path[stream] = f"{stream} waits for {mark.signal.name}"
                stream = mark.stream
            names = list(path)
            # the way into the circle is left out: of A -> B -> C -> B remains B -> C
            loop = [path[name] for name in names[names.index(stream) :]]
            text = ", recorded later by ".join([*loop, f"{stream}"])
            return DeadlockError("waits without a circle", text, "record before you wait")
        raise AssertionError("streams are idle")


# -- whole programs at once -----------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Record:
    """In a program: record the event of a name."""

    event: str


@dataclass(frozen=True, slots=True)
class WaitFor:
    """In a program: wait for the event of a name."""

    event: str


def run_streams(
    programs: Sequence[Sequence[Task | Record | WaitFor]], servers: Mapping[str, int] | None = None
) -> tuple[Span, ...]:
    """Return when the tasks of some streams run, each stream given as a list of commands.

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

    Items are dealt out to the streams like cards: with 3 streams the first takes items 0, 3, 6.
    """
    steps = (("in", "H2D", in_s), ("kernel", "AI Core", kernel_s), ("out", "D2H", out_s))
    return tuple(
        tuple(
            Task(f"{name} {item}", engine, time_s)
            for item in range(stream, items, streams)
            for name, engine, time_s in steps
        )
        for stream in range(streams)
    )


def pipeline_s(items: int, streams: int, in_s: float, kernel_s: float, out_s: float) -> float:
    """Return the seconds of `pipeline_programs` in closed form, for 1 stream and for 3 or more.

        1 stream: n (in + kernel + out)    else: in + kernel + out + (n - 1) max(in, kernel, out)

    Raises `InputError` for 2 streams, where it depends on more than the longest step.
    """
    item_s = in_s + kernel_s + out_s
    if streams == 2:
        raise InputError("1 stream, or 3 and more, for the closed form", "2", "simulate it")
    if streams == 1:
        return items * item_s
    # 3 items of 1, 2 and 1 s: the first is out after 4 s, each further one 2 s later: 8 s
    return item_s + (items - 1) * max(in_s, kernel_s, out_s)
