"""From answers to points: properties, performance on a fixed scale, lateness.

    properties   points * sum over properties of weight * share of the cases in which it holds
    performance  points * mean over timed cases of clip(ln(base / cost) / ln(base / target), 0, 1)

The scale is fixed by a plain solution (base) and a certified optimum (target), never by
classmates or a clock; the mean of logarithms is that of ratios, geometrically. A case with a
property that does not hold earns no performance.
"""

import contextlib
import hashlib
import json
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

from ascend_lab.course.assignment import Assignment, Case, Judged
from ascend_lab.course.sandbox import Answer, answers_of

JUDGE_S = 30


@dataclass(frozen=True, slots=True)
class Tried:
    """One case of one hand-in: the answer and what the judge found."""

    part: str
    case: str
    digest: str
    answer: Answer
    judged: Judged
    timed: bool

    @property
    def faults(self) -> dict[str, str]:
        """What does not hold, and why."""
        return {name: said for name, said in self.judged.properties.items() if said}

    def share(self) -> float:
        """Return what the case earns of the performance points, 0 to 1."""
        judged = self.judged
        if self.faults or judged.cost is None or not judged.cost > 0:
            return 0.0
        reached = math.log(judged.base / judged.cost) / math.log(judged.base / judged.target)
        return min(1.0, max(0.0, reached))


@dataclass(frozen=True, slots=True)
class Mark:
    """A student's mark: points a part and in all, and every case behind them."""

    student: str
    file: str
    digest: str
    points: Mapping[str, float]
    late_points: float
    tried: tuple[Tried, ...]
    notes: tuple[str, ...] = ()
    pseudonym: str = ""
    name: str = ""
    source: str = field(default="", repr=False)

    @property
    def total(self) -> float:
        """The points of all parts, less what lateness costs."""
        return tenths(max(0.0, sum(self.points.values()) - self.late_points))

    @property
    def ratio(self) -> float | None:
        """Cost over certified optimum, geometric mean over timed cases; None if one fails."""
        timed = [t for t in self.tried if t.timed]
        if not timed or any(t.faults or not t.judged.cost for t in timed):
            return None
        logs = [math.log((t.judged.cost or 1) / t.judged.optimum) for t in timed]
        return math.exp(sum(logs) / len(logs))


def try_cases(
    task: Assignment,
    source: str,
    cases: Sequence[tuple[str, Case]],
    known: Mapping[str, Answer] | None = None,
    file: str = "",
    told: Callable[[str], None] | None = None,
) -> list[Tried]:
    """Run a hand-in on (part, case) behind the wall and judge each answer.

    `known` gives answers of an earlier run by digest of source and case: those are only judged.
    `file` is what errors call the source; `told` hears of calls that take long.
    """
    known = known or {}
    digests = [_digest(source, task, case) for _, case in cases]
    new = [(digest, case) for digest, (_, case) in zip(digests, cases, strict=True)
           if digest not in known]  # fmt: skip
    run = getattr(task.public, "answers_of", answers_of)
    calls = [case.call for _, case in new]
    fresh = run(source, calls, task.limits, task.denied, file or "handin.py", told)
    answers = {digest: answer for (digest, _), answer in zip(new, fresh, strict=True)}
    return [
        Tried(part, case.name, digest, answer, judge(task, case, answer), case.timed)
        for digest, (part, case) in zip(digests, cases, strict=True)
        for answer in (answers.get(digest) or known[digest],)
    ]


def judge(task: Assignment, case: Case, answer: Answer) -> Judged:
    """Judge one answer; no answer, or one over which the judge fails, holds no property."""
    if answer.error:
        return Judged(dict.fromkeys(task.weights, answer.error))
    try:
        with _within(JUDGE_S):
            judged = task.judge(case, answer.value)
    except (Exception, RecursionError) as error:
        said = f"no answer that can be judged ({type(error).__name__}: {error})"[:300]
        return Judged(dict.fromkeys(task.weights, said.replace("\n", " ")))
    return judged


def mark_of(task: Assignment, tried: Sequence[Tried]) -> dict[str, float]:
    """Return the points of each part that is graded here; the log is read by a person."""
    points = {}
    whole = sum(task.weights.values())
    for part in ("public", "hidden"):
        cases = [t for t in tried if t.part == part]
        if cases and part in task.points:
            held = sum(
                weight * sum(not t.judged.properties.get(name, "missing") for t in cases)
                for name, weight in task.weights.items()
            )
            points[part] = tenths(task.points[part] * held / whole / len(cases))
    timed = [t for t in tried if t.timed]
    if timed and "performance" in task.points:
        shares = sum(t.share() for t in timed)
        points["performance"] = tenths(task.points["performance"] * shares / len(timed))
    return points


def lateness(task: Assignment, minutes: float, total: float) -> float:
    """Return the points that a late hand-in loses: a share for each day begun."""
    days = math.ceil(max(0.0, minutes) / (24 * 60))
    return tenths(min(1.0, task.late_per_day * days) * total)


def tenths(points: float) -> float:
    """Return points as they are written everywhere: rounded once, so that sums are those shown."""
    return round(points, 1)


def faults_said(task: Assignment, tried: Sequence[Tried]) -> list[tuple[str, str]]:
    """Return (cases, what does not hold, "" where all does) in order; what repeats is said once."""
    found: list[tuple[list[str], str]] = []
    for one in tried:
        kinds: dict[str, list[str]] = {}
        for name, text in one.faults.items():
            kinds.setdefault(text, []).append(name)
        said = "; ".join(text if len(names) == len(task.weights) else f"{', '.join(names)}: {text}"
                         for text, names in kinds.items())  # fmt: skip
        same = next((cases for cases, text in found if said and text == said), None)
        if same is None:
            found.append(([one.case], said))
        else:
            same.append(one.case)
    return [(f"{len(cases)} cases" if len(cases) > 1 else cases[0], said) for cases, said in found]


def _digest(source: str, task: Assignment, case: Case) -> str:
    call = case.call
    whole = [source, task.name, call.function, dict(call.arguments), dict(call.files)]
    text = json.dumps(whole, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def as_record(student: str, tried: Tried) -> dict[str, Any]:
    """Return one line of the log: enough to judge the answer again without running it."""
    return {"student": student, **asdict(tried)}


@contextlib.contextmanager
def _within(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` in a judge that an answer keeps busy (POSIX, main thread)."""
    if not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"judging took more than {seconds} s")

    try:
        before = signal.signal(signal.SIGALRM, stop)
    except ValueError:  # not the main thread
        yield
        return
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
