"""Grade a folder of hand-ins: read, run behind the wall, judge, say what a mark is made of."""

import csv
import hashlib
import io
import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_lab.course.assignment import Assignment, Case
from ascend_lab.course.exercises import load
from ascend_lab.course.handin import HandIn, constant, hand_ins
from ascend_lab.course.marking import Mark, Tried, lateness, mark_of, tenths, try_cases
from ascend_lab.course.sandbox import Answer
from ascend_lab.errors import InputError
from ascend_lab.limits import TABLE_BYTES, read_file


@dataclass(frozen=True, slots=True)
class Enrolled:
    """A line of the roster: the name, minutes late, and points a person gave the work log."""

    student: str
    name: str = ""
    late_minutes: float = 0.0
    log_points: float | None = None


def graded_cases(task: Assignment, student: str, secret: str) -> list[tuple[str, Case]]:
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
    work: HandIn,
    enrolled: Enrolled,
    secret: str,
    known: Mapping[str, Answer] | None = None,
) -> Mark:
    """Grade one hand-in."""
    cases = graded_cases(task, work.student, secret)
    tried = tuple(try_cases(task, work.source, cases, known, work.file))
    points = mark_of(task, tried)
    if enrolled.log_points is not None:
        points["log"] = tenths(min(enrolled.log_points, task.points.get("log", 0.0)))
    late = lateness(task, enrolled.late_minutes, sum(points.values()))
    notes = (*work.notes, *(["marked late by the course system"] if work.late else []))
    digest = hashlib.sha256(work.source.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    pseudonym = constant(work.source, "PSEUDONYM")
    return Mark(work.student, work.file, digest, points, late, tried, notes, pseudonym,
                enrolled.name, work.source)  # fmt: skip


def grade(
    task: Assignment,
    folder: Path,
    *,
    secret: str = "",
    roster: Mapping[str, Enrolled] | None = None,
    known: Mapping[str, Answer] | None = None,
    jobs: int = 1,
) -> list[Mark]:
    """Grade all hand-ins of a folder, and give those of the roster who handed in nothing a zero."""
    roster = roster or {}
    works = {work.student: work for work in hand_ins(folder, task.functions)}
    for student in sorted(set(roster) - set(works)):
        works[student] = HandIn(student, "", "", notes=("nothing handed in",))
    course = task.folder
    rows = [
        (task.name, str(course), works[s], roster.get(s, Enrolled(s)), secret,
         dict(known or {}))
        for s in sorted(works)
    ]  # fmt: skip
    if jobs <= 1 or len(rows) == 1:
        return [_mark_row(row, task) for row in rows]
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor  # here: a browser has no processes

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        return list(pool.map(_mark_row, rows))


_Row = tuple[str, str, HandIn, Enrolled, str, dict[str, Answer]]


def _mark_row(row: _Row, task: Assignment | None = None) -> Mark:
    name, course, work, enrolled, secret, known = row
    return mark(task or load(name, course), work, enrolled, secret, known)


# -- what comes with a term ------------------------------------------------------------------------


def read_secret(path: str | Path | None) -> str:
    """Return the term's secret from a TOML file with the line secret = "..."."""
    if path is None:
        return ""
    try:
        table = tomllib.loads(read_file(path, "a file with a secret", TABLE_BYTES).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: TOML", str(error), 'write secret = "..."') from error
    secret = table.get("secret")
    if not isinstance(secret, str) or len(secret) < 8:
        raise InputError(f"{path}: secret of 8 characters or more", repr(secret), "write one")
    return secret


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
        one, line = row["id"].strip(), f"{path}, line {rows.line_num}"
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


def read_log(path: Path) -> tuple[dict[str, Answer], dict[str, list[Mapping[str, object]]]]:
    """Return what an earlier report's log holds: answers by digest, and each student's lines."""
    answers: dict[str, Answer] = {}
    lines: dict[str, list[Mapping[str, object]]] = {}
    for line in _records(path):
        found = line["answer"]
        answers[line["digest"]] = Answer(found["value"], found["error"])
        lines.setdefault(line["student"], []).append(line)
    return answers, lines


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise InputError(f"{path}: the log of an earlier report", "none", "grade from the start")
    for line in path.read_text("utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}: JSON lines", line[:60], "grade from the start") from error


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
