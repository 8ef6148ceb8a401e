"""From hand-ins to marks: answers judged, points for properties and performance, a folder graded.

    properties   points * mean over cases of (weight of the properties that hold) * ramp
    performance  points * mean over timed cases of clip(ln(base / cost) / ln(base / target), 0, 1)
    ramp         floor + (1 - floor) * min(1, performance / full_from), of the case's function

The scale is fixed by the hand-out's own plain answer (base) and a certified optimum or bound
(target), never by classmates or a clock; the mean of logarithms is that of ratios, geometrically.
What is no better than the plain answer earns the floor and no more (`Rules`).

Values come before costs. In a case with a wrong value no property counts and no cost; a cost below
the certified optimum is no success but a wrong answer, or a wrong judge, and is named. The first
wrong value of a function caps all of its points.
"""

import csv
import hashlib
import io
import json
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from ascend_lab.aoe.workers import Alarm
from ascend_lab.course import handin, sandbox
from ascend_lab.course.assignment import Assignment, Case, Judged, load
from ascend_lab.course.seal import seal_of
from ascend_lab.course.texts import shown
from ascend_lab.errors import InputError
from ascend_lab.limits import TABLE_BYTES, read_file

JUDGE_S = 30
SLOW_ANSWERS = 2
"""After so many answers of one hand-in that took a judge too long, its others are not judged."""
UNJUDGED = "no answer that can be judged"
ROUNDING = 1e-9
"""How far below a bound a cost may lie that was summed in another order."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One case of one hand-in: the answer and what the judge found."""

    part: str
    case: str
    digest: str
    answer: sandbox.Answer
    judged: Judged
    timed: bool
    function: str = ""

    @property
    def faults(self) -> dict[str, str]:
        """What does not hold, and why."""
        return {name: said for name, said in self.judged.properties.items() if said}

    def share(self) -> float:
        """Return what the case earns of the performance points, 0 to 1."""
        judged = self.judged
        if self.faults or judged.cost is None or not 0 < judged.cost < judged.base:
            return 0.0
        if judged.base <= judged.target:
            return 1.0
        share = math.log(judged.base / judged.cost) / math.log(judged.base / judged.target)
        return min(1.0, max(0.0, share))


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
    known: Mapping[str, sandbox.Answer] | None = None,
    file: str = "",
    told: Callable[[str], None] | None = None,
) -> list[Tried]:
    """Run a hand-in on (part, case) behind the wall and judge each answer.

    `known` gives answers of an earlier run by digest of source and case: those are only judged.
    `file` is what errors call the source; `told` hears of calls that take long.
    """
    known = known or {}
    digests = [_digest(source, task, case) for _, case in cases]
    new = [
        (digest, case)
        for digest, (_, case) in zip(digests, cases, strict=True)
        if digest not in known
    ]
    run = getattr(task.public, "answers_of", sandbox.answers_of)
    calls = [case.call for _, case in new]
    fresh = run(source, calls, task.limits, task.denied, file or "handin.py", told)
    answers = {digest: answer for (digest, _), answer in zip(new, fresh, strict=True)}
    tried: list[Tried] = []
    slow = 0
    for digest, (part, case) in zip(digests, cases, strict=True):
        answer = answers.get(digest) or known[digest]
        if slow < SLOW_ANSWERS:
            judged = judge(task, case, answer)
        else:
            judged = _fails(task, f"{UNJUDGED} (others of this hand-in took too long)")
        slow += any(TOO_LONG in said for said in judged.properties.values())
        function = case.call.function
        tried.append(Tried(part, case.name, digest, answer, judged, case.timed, function))
    return tried


TOO_LONG = f"judging took more than {JUDGE_S} s"


def judge(task: Assignment, case: Case, answer: sandbox.Answer) -> Judged:
    """Judge one answer; no answer, or one over which the judge fails, holds no property."""
    if answer.error:
        return _fails(task, answer.error)
    try:
        with Alarm(JUDGE_S, lambda: TimeoutError(TOO_LONG)):
            judged = _sound(task.judge(case, answer.value))
    except Exception as error:
        return _fails(task, f"{UNJUDGED} ({type(error).__name__}: {error})")
    return settled(task, judged)


def _fails(task: Assignment, said: str) -> Judged:
    return Judged(dict.fromkeys(task.weights, shown(said)))


def _sound(judged: Judged) -> Judged:
    """Return what a judge said with texts that can be shown and a finite cost, or none.

    A judge may have passed on what stands in an answer: a text as cost, a million letters.
    """
    properties = {name: shown(said) for name, said in judged.properties.items()}
    cost = judged.cost
    if cost is not None:
        number = float(cost) if isinstance(cost, numbers.Real) else math.nan
        cost = cost if math.isfinite(number) else None
    return replace(judged, properties=properties, cost=cost)


def settled(task: Assignment, judged: Judged) -> Judged:
    """Return a judgement with its wrong value named, if it has one, and then without a cost.

    An answer of which no property holds is none: it lacks values and has no wrong one.
    """
    properties = judged.properties
    any_holds = not all(properties.get(name) for name in task.weights)
    wrong = [f"{n}: {properties[n]}" for n in task.rules.wrong if properties.get(n)]
    if wrong and any_holds:
        return replace(judged, cost=None, wrong=wrong[0])
    if judged.cost is None or judged.cost >= judged.optimum * (1 - ROUNDING):
        return judged
    if any(properties.values()):  # which explains it: the bound is one of answers that hold all
        return replace(judged, cost=None)
    said = (
        f"cost {judged.cost:g} is below {judged.optimum:g}, which nothing right can have: "
        "the answer is wrong, or the judge is; tell your instructor"
    )
    return replace(judged, properties=dict.fromkeys(task.weights, said), cost=None, wrong=said)


def mark_of(task: Assignment, tried: Sequence[Tried]) -> dict[str, float]:
    """Return the points of each part that is graded here; the log is read by a person.

    The points of a part are divided over functions by their numbers of cases.
    """
    parts = {part: [t for t in tried if t.part == part] for part in ("public", "hidden")}
    parts["performance"] = [t for t in tried if t.timed]
    points = {}
    for part, cases in parts.items():
        if not cases or part not in task.points:
            continue
        earned = 0.0
        for function in dict.fromkeys(t.function for t in cases):
            whose = [t for t in cases if t.function == function]
            share = reached(whose)
            if part != "performance":
                share = held(task, whose) * ramp(task, tried, function)
            earned += len(whose) * min(share, cap(task, tried, function))
        points[part] = tenths(task.points[part] * earned / len(cases))
    return points


def held(task: Assignment, tried: Sequence[Tried]) -> float:
    """Return the share of the properties that hold, by weight; none where a value is wrong."""
    whole = sum(task.weights.values())
    right = [t.judged.properties for t in tried if not t.judged.wrong]
    counted = sum(
        weight * sum(not properties.get(name, "missing") for properties in right)
        for name, weight in task.weights.items()
    )
    return counted / whole / len(tried)


def reached(tried: Sequence[Tried]) -> float:
    """Return the share of the performance scale that cases reach, on average."""
    return sum(t.share() for t in tried) / len(tried)


def ramp(task: Assignment, tried: Sequence[Tried], function: str) -> float:
    """Return how much the properties of a function count: the floor at the plain answer's cost."""
    timed = [t for t in tried if t.timed and t.function == function]
    if not timed:
        return 1.0
    rules = task.rules
    return rules.floor + (1 - rules.floor) * min(1.0, reached(timed) / rules.full_from)


def cap(task: Assignment, tried: Sequence[Tried], function: str) -> float:
    """Return the share of its points that a function may earn: less behind a wrong value."""
    spoilt = [t for t in tried if t.judged.wrong]
    if not task.rules.spoils_all:
        spoilt = [t for t in spoilt if t.function == function]
    return task.rules.wrong_share if spoilt else 1.0


def rules_said(task: Assignment, tried: Sequence[Tried]) -> list[str]:
    """Return a line for each rule that lowered the points; of hidden cases none is named."""
    lines = []
    for function in dict.fromkeys(t.function for t in tried):
        spoilt = [t for t in tried if t.function == function and t.judged.wrong]
        if spoilt:
            first = spoilt[0]
            where = first.case if first.part == "public" else "a hidden case"
            what = "all points" if task.rules.spoils_all else f"the points of {function}"
            share = f"{task.rules.wrong_share:.1%}"
            lines.append(f"{function}: a wrong value in {where}, so at most {share} of {what}")
        whose = [t for t in tried if t.function == function]
        counts = ramp(task, tried, function)
        if counts < 1 and held(task, whose) and not spoilt:
            slow = f"at {counts:.0%}, for it is hardly better than the plain answer"
            lines.append(f"{function}: its properties count {slow}")
    return lines


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
        said = "; ".join(
            text if len(names) == len(task.weights) else f"{', '.join(names)}: {text}"
            for text, names in kinds.items()
        )
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


# -- a folder of hand-ins --------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Enrolled:
    """A line of the roster: the name, minutes late, and points a person gave the work log."""

    student: str
    name: str = ""
    late_minutes: float = 0.0
    log_points: float | None = None


def cases_of(task: Assignment, student: str, secret: str) -> list[tuple[str, Case]]:
    """Return all (part, case) a hand-in is graded on: its public ones, and the term's hidden."""
    parts = ("public", "hidden") if task.hidden else ("public",)
    return [(part, case) for part in parts for case in task.cases(part, student, secret)]


def check(
    task: Assignment,
    source: str,
    student: str,
    file: str = "",
    told: Callable[[str], None] | None = None,
) -> list[Tried]:
    """Try a student's own file on the public cases, as `grade` will."""
    cases = [("public", case) for case in task.cases("public", student)]
    return try_cases(task, source, cases, file=file, told=told)


def mark(
    task: Assignment,
    work: handin.HandIn,
    enrolled: Enrolled,
    secret: str,
    known: Mapping[str, sandbox.Answer] | None = None,
) -> Mark:
    """Grade one hand-in; whatever fails over it costs its own points, and a note says so."""
    cases = cases_of(task, work.student, secret)
    tried: tuple[Tried, ...] = ()
    notes = [*work.notes, *(["marked late by the course system"] if work.late else [])]
    try:
        tried = tuple(try_cases(task, work.source, cases, known, work.file))
        points = mark_of(task, tried)
    except sandbox.RefusedError:
        raise
    except Exception as error:  # a mistake of ours, met by one hand-in, is not the others'
        notes.append(shown(f"could not be graded ({type(error).__name__}: {error})"))
        points = {part: 0.0 for part in task.points if part != "log"}
    if enrolled.log_points is not None:
        points["log"] = tenths(min(enrolled.log_points, task.points.get("log", 0.0)))
    late = lateness(task, enrolled.late_minutes, sum(points.values()))
    notes += rules_said(task, tried)
    digest = hashlib.sha256(work.source.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    pseudonym = handin.constant(work.source, "PSEUDONYM")
    return Mark(
        work.student,
        work.file,
        digest,
        points,
        late,
        tried,
        tuple(notes),
        pseudonym,
        enrolled.name,
        work.source,
    )


def grade(
    task: Assignment,
    folder: Path,
    *,
    secret: str = "",
    roster: Mapping[str, Enrolled] | None = None,
    known: Mapping[str, sandbox.Answer] | None = None,
    jobs: int = 1,
) -> list[Mark]:
    """Grade all hand-ins of a folder, and give those of the roster who handed in nothing a zero."""
    roster = roster or {}
    works = {work.student: work for work in handin.hand_ins(folder, task.functions)}
    for student in sorted(set(roster) - set(works)):
        works[student] = handin.HandIn(student, "", "", notes=("nothing handed in",))
    if not works:
        needed = "hand-ins: .py, .ipynb or .zip files named after students, or folders of them"
        raise InputError(needed, f"none in {folder}", "name the folder that has them")
    sealed = seal_of(task.folder)
    rows = [
        _Row(
            task.name,
            str(task.folder),
            sealed,
            works[s],
            roster.get(s, Enrolled(s)),
            secret,
            dict(known or {}),
        )
        for s in sorted(works)
    ]
    if jobs <= 1 or len(rows) == 1:
        return [_mark_row(row, task) for row in rows]
    return _in_processes(rows, jobs)


@dataclass(frozen=True, slots=True)
class _Row:
    """What one process needs to grade one hand-in."""

    name: str
    course: str
    sealed: str
    work: handin.HandIn
    enrolled: Enrolled
    secret: str
    known: dict[str, sandbox.Answer]


def _in_processes(rows: Sequence[_Row], jobs: int) -> list[Mark]:
    """Grade in several processes; a hand-in over which one dies is graded alone, then marked so."""
    import multiprocessing
    from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor

    def pool(count: int) -> ProcessPoolExecutor:  # here: a browser has no processes
        return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))

    def result(future: "Future[Mark]") -> Mark | None:
        try:
            return future.result()
        except BrokenExecutor:
            return None

    with pool(jobs) as several:
        marks = [result(future) for future in [several.submit(_mark_row, row) for row in rows]]
    for at, row in enumerate(rows):
        if marks[at] is None:
            with pool(1) as alone:
                marks[at] = result(alone.submit(_mark_row, row))
    return [mark or _lost(row) for mark, row in zip(marks, rows, strict=True)]


def _lost(row: _Row) -> Mark:
    """Return the mark of a hand-in over which the process that judges it died twice."""
    task = load(row.name, row.course)
    points = {part: 0.0 for part in task.points if part != "log"}
    notes = (*row.work.notes, "could not be graded (the process that judges it ended, twice)")
    return Mark(
        row.work.student,
        row.work.file,
        "",
        points,
        0.0,
        (),
        notes,
        name=row.enrolled.name,
        source=row.work.source,
    )


def _mark_row(row: _Row, task: Assignment | None = None) -> Mark:
    """Grade a hand-in by the judges that were there at first, and say if they changed meanwhile."""
    task = task or _loaded(row.name, row.course, row.sealed)
    found = mark(task, row.work, row.enrolled, row.secret, row.known)
    if seal_of(task.folder) == row.sealed:
        return found
    said = "the course's or the package's files changed while this was graded: restore them"
    return replace(found, notes=(*found.notes, said))


@cache
def _loaded(name: str, course: str, sealed: str) -> Assignment:
    """Return the assignment once a process, if its files are what they were when grading began."""
    needed = f"{course} and the package as they were when grading began"
    remedy = "restore them, and look at what was handed in"
    if seal_of(Path(course)) != sealed:
        raise InputError(needed, "other files", remedy)
    task = load(name, course)
    if seal_of(Path(course)) != sealed:
        raise InputError(needed, "other files", remedy)
    return task


# -- what comes with a term ------------------------------------------------------------------------
def read_roster(path: str | Path | None) -> dict[str, Enrolled]:
    """Return the roster: CSV with `id`, and if you like `name`, `late_minutes`, `log`."""
    if path is None:
        return {}
    text = read_file(path, "a roster", TABLE_BYTES).decode("utf-8-sig", "replace")
    rows = csv.DictReader(io.StringIO(text), restkey="more", restval="")
    heads = list(rows.fieldnames or ())
    if "id" not in heads:
        remedy = "columns are separated by commas; the first line names them"
        raise InputError(f"{path}: a column id", ", ".join(map(repr, heads))[:80], remedy)
    found: dict[str, Enrolled] = {}
    for row in rows:
        one = row["id"].strip()
        line = f"{path}, line {rows.line_num}"
        if one in found:
            raise InputError(f"{line}: each id once", f"{one} again", "keep one of its lines")
        if "more" in row:
            raise InputError(f"{line}: {len(heads)} columns", f"{row['more']} more", "mend it")
        if one:
            late, log = (_number(row.get(n, ""), f"{line}: {n}") for n in ("late_minutes", "log"))
            found[one] = Enrolled(one, row.get("name", ""), late or 0.0, log)
    return found


def _number(text: str, what: str) -> float | None:
    """Return a number of a roster, None where there is none."""
    try:
        number = float(text or 0)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise InputError(f"{what}, a number from 0", repr(text), "mend the line")
    return number if text else None


def read_log(path: Path) -> tuple[dict[str, sandbox.Answer], dict[str, list[Mapping[str, object]]]]:
    """Return what an earlier report's log holds: answers by digest, and each student's lines."""
    answers: dict[str, sandbox.Answer] = {}
    lines: dict[str, list[Mapping[str, object]]] = {}
    if not path.is_file():
        raise InputError(f"{path}: the log of an earlier report", "none", "grade from the start")
    for text in path.read_text("utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError as error:
            raise InputError(f"{path}: JSON lines", text[:60], "grade from the start") from error
        found = line["answer"]
        answers[line["digest"]] = sandbox.Answer(found["value"], found["error"])
        lines.setdefault(line["student"], []).append(line)
    return answers, lines


def run_anew(
    row: Mapping[str, str], before: Sequence[Mapping[str, object]], mark: Mark
) -> list[str]:
    """Return why answers of an earlier report did not serve: another file, or other cases."""
    if row["digest"] != mark.digest:
        return [f"another file: {row['digest']} -> {mark.digest}, run anew"]
    known = {record["digest"] for record in before}
    count = sum(tried.digest not in known for tried in mark.tried)
    others = f"{count} of {len(mark.tried)} cases are others, run anew: another secret or version"
    return [others] if count else []


def moved(before: Sequence[Mapping[str, object]], mark: Mark) -> list[str]:
    """Return why a mark has moved: each property that holds now and did not, or the reverse."""
    old = {(r["part"], r["case"]): r["judged"] for r in before}
    found: list[str] = []
    for tried in mark.tried:
        was = old.get((tried.part, tried.case))
        if not isinstance(was, dict):
            found.append(f"{tried.part} {tried.case}: new")
            continue
        for name, said in tried.judged.properties.items():
            before_said = was["properties"].get(name, "")
            if bool(before_said) != bool(said):
                held = f"now fails: {said}" if said else "now holds"
                found.append(f"{tried.part} {tried.case}, {name}: {held}")
        if was["cost"] != tried.judged.cost:
            found.append(f"{tried.part} {tried.case}: cost {was['cost']} -> {tried.judged.cost}")
    return found
