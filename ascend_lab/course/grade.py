"""Grades hand-ins: computes the marks of students from the files that they hand in.

A judge checks the properties of every answer, such as "values are right", and its cost, such as the
cycles of a schedule. The points follow from

    properties   points * mean over cases of (weight of the properties that hold) * ramp
    performance  points * mean over timed cases of clip(ln(base / cost) / ln(base / target), 0, 1)
    ramp         floor + (1 - floor) * min(1, performance / full_from), of the case's function

`base` is the cost of the plain answer in the hand-out, `target` a certified optimum or bound: the
scale depends neither on classmates nor on a clock. With base 200 and target 100 a cost of 141 earns
half of the performance points. An answer that is no better than the plain one earns only the share
`floor` of the points of properties (`Rules`).

Values count before costs. In a case with a wrong value neither the properties nor the cost earn
points, and it caps the points of its function. A cost below the certified optimum means that the
answer or the judge is wrong, and is reported as such.
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
"""Time limit of the judge for one answer."""
SLOW_ANSWERS = 2
"""After this many answers of one hand-in took the judge too long, its others are not judged."""
UNJUDGED = "no answer that can be judged"
ROUNDING = 1e-9
"""Relative difference allowed below a bound: sums in another order differ in the last digits."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case of one hand-in: the answer and the judgement of it.

    `part` is "public" or "hidden". `digest` identifies source and case, so that a later run can
    use the answer again. `timed` cases count for the performance points.
    """

    part: str
    case: str
    digest: str
    answer: sandbox.Answer
    judged: Judged
    timed: bool
    function: str = ""

    @property
    def faults(self) -> dict[str, str]:
        """Return a table: property -> the reason why it does not hold."""
        return {name: fault for name, fault in self.judged.properties.items() if fault}

    def share(self) -> float:
        """Return the share of the performance points that the case earns, 0 to 1."""
        judged = self.judged
        if self.faults or judged.cost is None or not 0 < judged.cost < judged.base:
            return 0.0
        if judged.base <= judged.target:
            return 1.0
        share = math.log(judged.base / judged.cost) / math.log(judged.base / judged.target)
        return min(1.0, max(0.0, share))


@dataclass(frozen=True, slots=True)
class Mark:
    """A student's mark: the points of each part of the assignment, and the results of all cases."""

    student: str
    file: str
    digest: str
    points: Mapping[str, float]
    late_points: float
    case_results: tuple[CaseResult, ...]
    notes: tuple[str, ...] = ()
    pseudonym: str = ""
    name: str = ""
    source: str = field(default="", repr=False)

    @property
    def total(self) -> float:
        """Return the points of all parts, less the points that lateness costs."""
        return tenths(max(0.0, sum(self.points.values()) - self.late_points))

    @property
    def ratio(self) -> float | None:
        """Return cost / certified optimum, geometric mean over timed cases; None if one fails."""
        timed = [result for result in self.case_results if result.timed]
        if not timed or any(result.faults or not result.judged.cost for result in timed):
            return None
        logs = [math.log((result.judged.cost or 1) / result.judged.optimum) for result in timed]
        return math.exp(sum(logs) / len(logs))


def try_cases(
    task: Assignment,
    source: str,
    cases: Sequence[tuple[str, Case]],
    known_answers: Mapping[str, sandbox.Answer] | None = None,
    file: str = "",
    report_wait: Callable[[str], None] | None = None,
) -> list[CaseResult]:
    """Run a hand-in on cases, each with its part, in a confined process, and judge each answer.

    `known_answers` holds answers of an earlier run by the digest of source and case: these are only
    judged again. `file` is the name of the source in error messages. `report_wait` is called with a
    text when a call takes long.
    """
    earlier_answers = known_answers or {}
    digests = [_digest(source, task, case) for _, case in cases]
    new_cases = [
        (digest, case)
        for digest, (_, case) in zip(digests, cases, strict=True)
        if digest not in earlier_answers
    ]
    run = getattr(task.public, "answers_of", sandbox.answers_of)
    calls = [case.call for _, case in new_cases]
    new_answers = run(source, calls, task.limits, task.denied, file or "handin.py", report_wait)
    answers = {digest: answer for (digest, _), answer in zip(new_cases, new_answers, strict=True)}
    case_results: list[CaseResult] = []
    slow_count = 0
    for digest, (part, case) in zip(digests, cases, strict=True):
        answer = answers.get(digest) or earlier_answers[digest]
        if slow_count < SLOW_ANSWERS:
            judged = judge(task, case, answer)
        else:
            judged = _fails(task, f"{UNJUDGED} (others of this hand-in took too long)")
        slow_count += any(TOO_LONG in fault for fault in judged.properties.values())
        case_result = CaseResult(
            part=part,
            case=case.name,
            digest=digest,
            answer=answer,
            judged=judged,
            timed=case.timed,
            function=case.call.function,
        )
        case_results.append(case_result)
    return case_results


TOO_LONG = f"judging took more than {JUDGE_S} s"


def judge(task: Assignment, case: Case, answer: sandbox.Answer) -> Judged:
    """Judge one answer; if there is none, or the judge fails on it, no property holds."""
    if answer.error:
        return _fails(task, answer.error)
    try:
        with Alarm(JUDGE_S, lambda: TimeoutError(TOO_LONG)):
            judged = _sanitised(task.judge(case, answer.value))
    except Exception as error:
        return _fails(task, f"{UNJUDGED} ({type(error).__name__}: {error})")
    return apply_value_rules(task, judged)


def _fails(task: Assignment, reason: str) -> Judged:
    """Return the judgement that no property holds, for one reason."""
    return Judged(dict.fromkeys(task.weights, shown(reason)))


def _sanitised(judged: Judged) -> Judged:
    """Return a judgement with short printable texts, and a finite cost or None.

    A judge may copy values out of an answer: a text as the cost, or a reason of a million letters.
    """
    properties = {name: shown(fault) for name, fault in judged.properties.items()}
    cost = judged.cost
    if cost is not None:
        number = float(cost) if isinstance(cost, numbers.Real) else math.nan
        cost = cost if math.isfinite(number) else None
    return replace(judged, properties=properties, cost=cost)


def apply_value_rules(task: Assignment, judged: Judged) -> Judged:
    """Return a judgement by the rules for wrong values and impossible costs.

    A case with a wrong value, or with a cost below the optimum, gets no cost, and `wrong` names the
    fault. An answer of which no property holds counts as missing, not as wrong.
    """
    properties = judged.properties
    any_holds = not all(properties.get(name) for name in task.weights)
    wrong = [f"{n}: {properties[n]}" for n in task.rules.wrong if properties.get(n)]
    if wrong and any_holds:
        return replace(judged, cost=None, wrong=wrong[0])
    if judged.cost is None or judged.cost >= judged.optimum * (1 - ROUNDING):
        return judged
    # The optimum is that of answers for which all properties hold; others may cost less.
    if any(properties.values()):
        return replace(judged, cost=None)
    fault = (
        f"cost {judged.cost:g} is below {judged.optimum:g}, which nothing right can have: "
        "the answer is wrong, or the judge is; tell your instructor"
    )
    return replace(judged, properties=dict.fromkeys(task.weights, fault), cost=None, wrong=fault)


def mark_of(task: Assignment, case_results: Sequence[CaseResult]) -> dict[str, float]:
    """Return the points of each part except the work log, which a person grades.

    The points of a part are divided among the functions in proportion to their numbers of cases.
    """
    parts = {
        part: [result for result in case_results if result.part == part]
        for part in ("public", "hidden")
    }
    parts["performance"] = [result for result in case_results if result.timed]
    points = {}
    for part, cases in parts.items():
        if not cases or part not in task.points:
            continue
        earned = 0.0
        for function in dict.fromkeys(result.function for result in cases):
            function_cases = [result for result in cases if result.function == function]
            share = performance_share(function_cases)
            if part != "performance":
                share = property_share(task, function_cases) * ramp(task, case_results, function)
            earned += len(function_cases) * min(share, share_cap(task, case_results, function))
        points[part] = tenths(task.points[part] * earned / len(cases))
    return points


def property_share(task: Assignment, case_results: Sequence[CaseResult]) -> float:
    """Return the share of the properties that hold, by weight; a wrong value counts as none."""
    total_weight = sum(task.weights.values())
    valid_properties = [
        result.judged.properties for result in case_results if not result.judged.wrong
    ]
    held_weight = sum(
        weight * sum(not properties.get(name, "missing") for properties in valid_properties)
        for name, weight in task.weights.items()
    )
    return held_weight / total_weight / len(case_results)


def performance_share(case_results: Sequence[CaseResult]) -> float:
    """Return the mean share of the performance points that cases earn."""
    return sum(result.share() for result in case_results) / len(case_results)


def ramp(task: Assignment, case_results: Sequence[CaseResult], function: str) -> float:
    """Return the factor on a function's points for properties: `floor` at the plain answer's cost.

    It grows linearly with the performance, and is 1 from the share `full_from` on.
    """
    timed = [result for result in case_results if result.timed and result.function == function]
    if not timed:
        return 1.0
    rules = task.rules
    return rules.floor + (1 - rules.floor) * min(1.0, performance_share(timed) / rules.full_from)


def share_cap(task: Assignment, case_results: Sequence[CaseResult], function: str) -> float:
    """Return the largest share of its points that a function may earn: less after a wrong value."""
    wrong_results = [result for result in case_results if result.judged.wrong]
    if not task.rules.spoils_all:
        wrong_results = [result for result in wrong_results if result.function == function]
    return task.rules.wrong_share if wrong_results else 1.0


def rule_lines(task: Assignment, case_results: Sequence[CaseResult]) -> list[str]:
    """Return a line for each rule that lowered the points, without the names of hidden cases."""
    lines = []
    for function in dict.fromkeys(result.function for result in case_results):
        wrong_results = [
            result for result in case_results if result.function == function and result.judged.wrong
        ]
        if wrong_results:
            result = wrong_results[0]
            where = result.case if result.part == "public" else "a hidden case"
            capped = "all points" if task.rules.spoils_all else f"the points of {function}"
            share = f"{task.rules.wrong_share:.1%}"
            lines.append(f"{function}: a wrong value in {where}, so at most {share} of {capped}")
        function_cases = [result for result in case_results if result.function == function]
        factor = ramp(task, case_results, function)
        if factor < 1 and property_share(task, function_cases) and not wrong_results:
            reason = f"at {factor:.0%}, for it is hardly better than the plain answer"
            lines.append(f"{function}: its properties count {reason}")
    return lines


def lateness(task: Assignment, minutes: float, total: float) -> float:
    """Return the points that a late hand-in loses: a share of the total per day, rounded up."""
    days = math.ceil(max(0.0, minutes) / (24 * 60))
    return tenths(min(1.0, task.late_per_day * days) * total)


def tenths(points: float) -> float:
    """Return points rounded to tenths, so that totals are sums of the printed numbers."""
    return round(points, 1)


def fault_lines(task: Assignment, case_results: Sequence[CaseResult]) -> list[tuple[str, str]]:
    """Return (cases, fault) in order, with "" for a case without faults.

    Cases with the same fault share one entry: ("3 cases", "values: the second is 7, not 8").
    """
    entries: list[tuple[list[str], str]] = []
    for result in case_results:
        names_by_text: dict[str, list[str]] = {}
        for name, text in result.faults.items():
            names_by_text.setdefault(text, []).append(name)
        fault = "; ".join(
            text if len(names) == len(task.weights) else f"{', '.join(names)}: {text}"
            for text, names in names_by_text.items()
        )
        same_fault_cases = next((cases for cases, text in entries if fault and text == fault), None)
        if same_fault_cases is None:
            entries.append(([result.case], fault))
        else:
            same_fault_cases.append(result.case)
    return [
        (f"{len(cases)} cases" if len(cases) > 1 else cases[0], fault) for cases, fault in entries
    ]


def _digest(source: str, task: Assignment, case: Case) -> str:
    """Return a digest of a hand-in's source and one call of it."""
    call = case.call
    content = [source, task.name, call.function, dict(call.arguments), dict(call.files)]
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


# -- a folder of hand-ins --------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Enrolled:
    """A line of the roster: a student, minutes late, and the points that a person gave the log."""

    student: str
    name: str = ""
    late_minutes: float = 0.0
    log_points: float | None = None


def cases_of(task: Assignment, student: str, secret: str) -> list[tuple[str, Case]]:
    """Return (part, case) of all cases of a hand-in: the student's public and the hidden ones."""
    parts = ("public", "hidden") if task.hidden else ("public",)
    return [(part, case) for part in parts for case in task.cases(part, student, secret)]


def check(
    task: Assignment,
    source: str,
    student: str,
    file: str = "",
    report_wait: Callable[[str], None] | None = None,
) -> list[CaseResult]:
    """Run a student's file on the public cases, as `grade` will."""
    cases = [("public", case) for case in task.cases("public", student)]
    return try_cases(task, source, cases, file=file, report_wait=report_wait)


def mark(
    task: Assignment,
    work: handin.HandIn,
    enrolled: Enrolled,
    secret: str,
    known_answers: Mapping[str, sandbox.Answer] | None = None,
) -> Mark:
    """Grade one hand-in; an error while grading it costs only its points and becomes a note."""
    cases = cases_of(task, work.student, secret)
    case_results: tuple[CaseResult, ...] = ()
    notes = [*work.notes, *(["marked late by the course system"] if work.late else [])]
    try:
        case_results = tuple(try_cases(task, work.source, cases, known_answers, work.file))
        points = mark_of(task, case_results)
    except sandbox.RefusedError:
        raise
    except Exception as error:  # a bug of this package on one hand-in must not stop the others
        notes.append(shown(f"could not be graded ({type(error).__name__}: {error})"))
        points = {part: 0.0 for part in task.points if part != "log"}
    if enrolled.log_points is not None:
        points["log"] = tenths(min(enrolled.log_points, task.points.get("log", 0.0)))
    late = lateness(task, enrolled.late_minutes, sum(points.values()))
    notes += rule_lines(task, case_results)
    digest = hashlib.sha256(work.source.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    pseudonym = handin.constant(work.source, "PSEUDONYM")
    return Mark(
        student=work.student,
        file=work.file,
        digest=digest,
        points=points,
        late_points=late,
        case_results=case_results,
        notes=tuple(notes),
        pseudonym=pseudonym,
        name=enrolled.name,
        source=work.source,
    )


def grade(
    task: Assignment,
    folder: Path,
    *,
    secret: str = "",
    roster: Mapping[str, Enrolled] | None = None,
    known_answers: Mapping[str, sandbox.Answer] | None = None,
    jobs: int = 1,
) -> list[Mark]:
    """Grade all hand-ins of a folder; students of the roster who handed in nothing get zero."""
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
            name=task.name,
            course=str(task.folder),
            sealed=sealed,
            work=works[student],
            enrolled=roster.get(student, Enrolled(student)),
            secret=secret,
            known_answers=dict(known_answers or {}),
        )
        for student in sorted(works)
    ]
    if jobs <= 1 or len(rows) == 1:
        return [_mark_row(row, task) for row in rows]
    return _in_processes(rows, jobs)


@dataclass(frozen=True, slots=True)
class _Row:
    """The arguments of a process that grades one hand-in; `sealed` is the digest of the judges."""

    name: str
    course: str
    sealed: str
    work: handin.HandIn
    enrolled: Enrolled
    secret: str
    known_answers: dict[str, sandbox.Answer]


def _in_processes(rows: Sequence[_Row], jobs: int) -> list[Mark]:
    """Grade in several processes.

    When one of them dies, its hand-ins are graded again, each in a process alone; a hand-in whose
    process dies again gets no points and a note.
    """
    import multiprocessing
    from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor

    def pool(count: int) -> ProcessPoolExecutor:  # here: a browser has no processes
        return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))

    def result(future: "Future[Mark]") -> Mark | None:
        """Return the mark of a finished process; None if the process died."""
        try:
            return future.result()
        except BrokenExecutor:
            return None

    with pool(jobs) as several:
        marks = [result(future) for future in [several.submit(_mark_row, row) for row in rows]]
    for index, row in enumerate(rows):
        if marks[index] is None:
            with pool(1) as alone:
                marks[index] = result(alone.submit(_mark_row, row))
    return [mark or _lost(row) for mark, row in zip(marks, rows, strict=True)]


def _lost(row: _Row) -> Mark:
    """Return the mark of a hand-in whose grading process died twice."""
    task = load(row.name, row.course)
    points = {part: 0.0 for part in task.points if part != "log"}
    notes = (*row.work.notes, "could not be graded (the process that judges it ended, twice)")
    return Mark(
        student=row.work.student,
        file=row.work.file,
        digest="",
        points=points,
        late_points=0.0,
        case_results=(),
        notes=notes,
        name=row.enrolled.name,
        source=row.work.source,
    )


def _mark_row(row: _Row, task: Assignment | None = None) -> Mark:
    """Grade a hand-in, and note if the files of the course or the package changed meanwhile."""
    task = task or _loaded(row.name, row.course, row.sealed)
    graded = mark(task, row.work, row.enrolled, row.secret, row.known_answers)
    if seal_of(task.folder) == row.sealed:
        return graded
    note = "the course's or the package's files changed while this was graded: restore them"
    return replace(graded, notes=(*graded.notes, note))


@cache
def _loaded(name: str, course: str, sealed: str) -> Assignment:
    """Load the assignment once per process; refuse it if its files changed since grading began."""
    needed = f"{course} and the package as they were when grading began"
    remedy = "restore them, and look at what was handed in"
    if seal_of(Path(course)) != sealed:
        raise InputError(needed, "other files", remedy)
    task = load(name, course)
    if seal_of(Path(course)) != sealed:
        raise InputError(needed, "other files", remedy)
    return task


# -- roster and earlier report ---------------------------------------------------------------------
def read_roster(path: str | Path | None) -> dict[str, Enrolled]:
    """Return the roster by student: a CSV file with the column `id`, and optional others.

    The others are `name`, `late_minutes` and `log`, the points of the work log.
    """
    if path is None:
        return {}
    text = read_file(path, "a roster", TABLE_BYTES).decode("utf-8-sig", "replace")
    rows = csv.DictReader(io.StringIO(text), restkey="more", restval="")
    columns = list(rows.fieldnames or ())
    if "id" not in columns:
        remedy = "columns are separated by commas; the first line names them"
        raise InputError(f"{path}: a column id", ", ".join(map(repr, columns))[:80], remedy)
    roster: dict[str, Enrolled] = {}
    for row in rows:
        student = row["id"].strip()
        line = f"{path}, line {rows.line_num}"
        if student in roster:
            raise InputError(f"{line}: each id once", f"{student} again", "keep one of its lines")
        if "more" in row:
            raise InputError(f"{line}: {len(columns)} columns", f"{row['more']} more", "correct it")
        if student:
            late, log = (_number(row.get(n, ""), f"{line}: {n}") for n in ("late_minutes", "log"))
            roster[student] = Enrolled(student, row.get("name", ""), late or 0.0, log)
    return roster


def _number(text: str, what: str) -> float | None:
    """Return a number of a roster, None for an empty cell."""
    try:
        number = float(text or 0)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise InputError(f"{what}, a number from 0", repr(text), "correct the line")
    return number if text else None


def read_log(path: Path) -> tuple[dict[str, sandbox.Answer], dict[str, list[Mapping[str, object]]]]:
    """Return the log of an earlier report: answers by digest, and the records of each student."""
    answers: dict[str, sandbox.Answer] = {}
    lines: dict[str, list[Mapping[str, object]]] = {}
    if not path.is_file():
        raise InputError(f"{path}: the log of an earlier report", "none", "grade from the start")
    for text in path.read_text("utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError as error:
            raise InputError(f"{path}: JSON lines", text[:60], "grade from the start") from error
        answer = line["answer"]
        answers[line["digest"]] = sandbox.Answer(answer["value"], answer["error"])
        lines.setdefault(line["student"], []).append(line)
    return answers, lines


def rerun_reasons(
    row: Mapping[str, str], earlier_records: Sequence[Mapping[str, object]], mark: Mark
) -> list[str]:
    """Return why the answers of an earlier report could not be used: another file or other cases.

    The list is empty if all could be used. `row` is the student's line of the earlier grades.csv.
    """
    if row["digest"] != mark.digest:
        return [f"another file: {row['digest']} -> {mark.digest}, run anew"]
    digests = {record["digest"] for record in earlier_records}
    count = sum(result.digest not in digests for result in mark.case_results)
    reason = (
        f"{count} of {len(mark.case_results)} cases are others, run anew: another secret or version"
    )
    return [reason] if count else []


def changes_since(earlier_records: Sequence[Mapping[str, object]], mark: Mark) -> list[str]:
    """Return what differs from an earlier report: properties that hold or fail now, and costs."""
    earlier = {(r["part"], r["case"]): r["judged"] for r in earlier_records}
    changes: list[str] = []
    for result in mark.case_results:
        label = f"{result.part} {result.case}"
        earlier_judged = earlier.get((result.part, result.case))
        if not isinstance(earlier_judged, dict):
            changes.append(f"{label}: new")
            continue
        for name, fault in result.judged.properties.items():
            earlier_fault = earlier_judged["properties"].get(name, "")
            if bool(earlier_fault) != bool(fault):
                changes.append(
                    f"{label}, {name}: {f'now fails: {fault}' if fault else 'now holds'}"
                )
        if earlier_judged["cost"] != result.judged.cost:
            changes.append(f"{label}: cost {earlier_judged['cost']} -> {result.judged.cost}")
    return changes
