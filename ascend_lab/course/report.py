"""Writes the report of a graded assignment (tables, pages, a log), and the archive for Gradescope.

    grades.csv        one line per student: points of each part, total, late, digest of the file
    index.html        the instructor's page, self-contained: sortable, with charts of what failed
    students/ID.html  the student's page, students/ID.json as Gradescope reads it: no hidden case
    leaderboard.csv   the pseudonyms that students gave; similarity.csv, pairs of similar texts
    log.jsonl         every case and answer, which `grade --again` judges again

No file contains a time of day: the same hand-ins give the same bytes. Texts of students are escaped
everywhere, and charts are embedded as images, in which no script runs.

Gradescope unpacks an archive to /autograder/source, runs setup.sh once with access to the network,
then run_autograder for each hand-in, which writes /autograder/results/results.json.
"""

import base64
import csv
import html
import io
import json
import os
import re
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import ascend_lab
from ascend_lab.aoe.workers import Alarm
from ascend_lab.course import assignment, handin
from ascend_lab.course.grade import (
    UNJUDGED,
    CaseResult,
    Enrolled,
    Mark,
    cases_of,
    fault_lines,
    mark as marked,
)
from ascend_lab.course.sandbox import RefusedError, standing_wall
from ascend_lab.course.texts import shown
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.output import usable_folder, write_whole

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8886; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
th[data-sort] { cursor: pointer; text-decoration: underline dotted; }
pre { overflow-x: auto; } .pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
svg, img { max-width: 100%; height: auto; background: white; }
"""
CHART_S = 15.0
"""Time limit of one chart; after one that takes longer, no others of the hand-in are drawn."""
CHART_BYTES = 2 << 20
"""Largest chart, as SVG."""
TOO_SLOW = f"more than {CHART_S:g} s"
SORT_SCRIPT = """
for (const head of document.querySelectorAll("th[data-sort]")) head.onclick = () => {
  const body = head.closest("table").tBodies[0], place = head.cellIndex;
  const value = row => row.cells[place].dataset.value ?? row.cells[place].textContent;
  const up = head.dataset.up = head.dataset.up === "1" ? "0" : "1";
  const rows = [...body.rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)], order = isNaN(x - y) ? x.localeCompare(y) : x - y;
    return up === "1" ? order : -order;
  });
  body.append(...rows);
};
"""


def write_report(
    task: assignment.Assignment,
    marks: Sequence[Mark],
    out: Path,
    secret: str = "",
    changes: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Write the whole report into the folder `out`."""
    usable_folder(out / "students")
    stub = task.folder / "start.py"
    stub_source = stub.read_text("utf-8") if stub.is_file() else ""
    sources = {mark.student: mark.source for mark in marks}
    similar = handin.hints(sources, stub_source, forbidden_sources(task))
    records = [
        {"student": mark.student, **asdict(result)}
        for mark in marks
        for result in mark.case_results
    ]
    files = {
        "grades.csv": _csv(_grades(task, marks)),
        "leaderboard.csv": _csv([("place", "name", "cost / optimum"), *leaderboard(marks)]),
        "leaderboard.json": _json([{"name": n, "value": v} for _, n, v in leaderboard(marks)]),
        "similarity.csv": _csv(
            [("one", "other", "alike"), *((a, b, f"{share:.2f}") for a, b, share in similar)]
        ),
        "log.jsonl": "".join(json.dumps(record, sort_keys=True) + "\n" for record in records),
        "index.html": _index(task, marks, secret, similar, changes or {}),
    }
    for mark in marks:
        files[f"students/{mark.student}.json"] = _json(gradescope_results(task, mark))
        files[f"students/{mark.student}.html"] = _student_page(task, mark)
    for name, text in files.items():
        write_whole(out / name, text.encode("utf-8", "backslashreplace"))


def forbidden_sources(task: assignment.Assignment) -> dict[str, str]:
    """Return the texts by name that nobody may hand in: the package, keys, judges."""
    return {**handin.our_sources(), **_course_sources(task.folder)}


@cache
def _course_sources(folder: Path) -> dict[str, str]:
    """Return keys and judges by path, of the course of an assignment and of the git checkout."""
    sources: dict[str, str] = {}
    for course in (assignment.CHECKOUT, folder.parent):
        keys = sorted(course.glob("keys/*/*.py"))
        judges = [path for name in ("public.py", "hidden.py") for path in course.glob(f"A*/{name}")]
        for path in (*keys, *sorted(judges)):
            sources[f"course/{path.relative_to(course).as_posix()}"] = path.read_text("utf-8")
    return sources


def leaderboard(marks: Sequence[Mark]) -> list[tuple[int, str, str]]:
    """Return (place, pseudonym, cost over optimum) of students with a pseudonym, best first."""
    ranked = sorted((m.ratio, m.pseudonym) for m in marks if m.pseudonym and m.ratio is not None)
    return [(place, name, f"{ratio:.4f}") for place, (ratio, name) in enumerate(ranked, 1)]


def gradescope_results(task: assignment.Assignment, mark: Mark) -> dict[str, Any]:
    """Return a mark in Gradescope's format; for hidden cases only the failing properties."""
    tests = []
    for part, points in mark.points.items():
        faults = [f"{name}: {text}" for name, text in _fault_lines(task, mark, part)]
        visibility = "visible" if part == "public" else "after_due_date"
        tests.append(
            {
                "name": part,
                "score": points,
                "max_score": task.points[part],
                "output": "\n".join(faults) or "all properties hold",
                "visibility": visibility,
            }
        )
    ratio = mark.ratio if mark.pseudonym else None
    board_entries = (
        []
        if ratio is None
        else [{"name": "cost / optimum", "value": round(ratio, 4), "order": "asc"}]
    )
    output = "\n".join(mark.notes)
    return {"score": mark.total, "output": output, "tests": tests, "leaderboard": board_entries}


def _fault_lines(task: assignment.Assignment, mark: Mark, part: str) -> list[tuple[str, str]]:
    """Return (property, its first fault) of a part; of hidden cases only how many fail."""
    if part == "performance":
        return [
            (result.case if result.part == "public" else "a hidden case", _scale_text(result))
            for result in mark.case_results
            if result.timed
        ]
    case_results = [result for result in mark.case_results if result.part == part]
    if not case_results:
        return [] if part == "log" else [("not graded", "see the notes")]
    if task.exercises:
        return [(case, fault) for case, fault in fault_lines(task, case_results) if fault]
    lines = []
    for name in task.weights:
        failing = [
            result for result in case_results if result.judged.properties.get(name, "missing")
        ]
        if failing and part == "public":
            result = failing[0]
            fault = result.judged.properties.get(name, "missing")
            count = f"{len(failing)} of {len(case_results)}"
            lines.append((name, f"fails in {count} cases; {result.case}: {fault}"))
        elif failing:
            count = f"{len(failing)} of {len(case_results)}"
            lines.append((name, f"fails in {count} hidden cases"))
    return lines


def _scale_text(result: CaseResult) -> str:
    """Return the cost of a case, its scale, and the share of the points that it earns."""
    judged = result.judged
    if result.faults or judged.cost is None:
        return "counts as the plain solution: a property does not hold"
    return (
        f"{judged.cost:g}; 0 points at {judged.base:g}, full at {judged.target:g}, certified "
        f"optimum or bound {judged.optimum:g}: {result.share():.0%}"
    )


def _grades(task: assignment.Assignment, marks: Sequence[Mark]) -> list[tuple[Any, ...]]:
    """Return the table of grades: a row of heads, then one for each student."""
    parts = [part for part in assignment.PARTS if part in task.points]
    rows = [("id", "name", *parts, "late", "total", "file", "digest", "assignment", "grader")]
    for mark in marks:
        points = [f"{mark.points[p]:.1f}" if p in mark.points else "" for p in parts]
        rows.append(
            (
                mark.student,
                mark.name,
                *points,
                f"{0 - mark.late_points:.1f}",
                f"{mark.total:.1f}",
                mark.file,
                mark.digest,
                f"{task.name} {task.version}",
                ascend_lab.__version__,
            )
        )
    return rows


FORMULA = re.compile(r"(^|[;,\t|])(\s*)(?=[=+@\-\uff1d\uff0b\uff20\uff0d\r])")
"""Text that a spreadsheet may take for a formula, at the start of a cell or after a separator."""
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


def _csv(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV; texts that a spreadsheet would take for formulas get an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        cells = [str(cell) for cell in row]
        writer.writerow([c if NUMBER.fullmatch(c) else FORMULA.sub(r"\1\2'", c) for c in cells])
    return text.getvalue()


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


# -- pages -----------------------------------------------------------------------------------------
def _page(title: str, *blocks: str) -> str:
    """Return an HTML page of a title and blocks."""
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join((f"<h1>{html.escape(title)}</h1>", *blocks))
    return (
        f"<!doctype html>\n<html lang=en>{head}<body>{body}<script>{SORT_SCRIPT}</script></html>\n"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[tuple[str, str]]]) -> str:
    """Return a sortable table; a cell is (HTML, the text that it is sorted by)."""
    header = "".join(f"<th data-sort>{html.escape(head)}" for head in heads)
    body = "".join(
        "<tr>" + "".join(f'<td data-value="{html.escape(key)}">{cell}' for cell, key in row)
        for row in rows
    )
    return f"<table><thead><tr>{header}</thead><tbody>{body}</tbody></table>"


def _student_page(task: assignment.Assignment, mark: Mark) -> str:
    """Return the HTML page of one student: points by part, faults, and charts of failing cases."""
    rows = []
    for part in mark.points:
        points = f"{mark.points[part]:.1f} of {task.points[part]:g}"
        faults = [f"{name}: {text}" for name, text in _fault_lines(task, mark, part)]
        faults_html = "<br>".join(map(html.escape, faults)) or "-"
        rows.append([(html.escape(part), part), (points, ""), (faults_html, "")])
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in mark.notes)
    failing = [result for result in mark.case_results if result.part == "public" and result.faults]
    charts = _charts(task, mark, failing[:2], "")
    late = f", late {-mark.late_points:.1f}" if mark.late_points else ""
    title = f"{task.name} {task.title}: {mark.student}, {mark.total:.1f} points{late}"
    return _page(title, notes, _table(("part", "points", "what does not hold"), rows), charts)


def _index(
    task: assignment.Assignment,
    marks: Sequence[Mark],
    secret: str,
    similar: Sequence[tuple[str, str, float]],
    changes: Mapping[str, Sequence[str]],
) -> str:
    """Return the HTML page of all marks, similar hand-ins and changes since a run."""
    parts = [part for part in assignment.PARTS if part in task.points]
    rows = []
    for mark in marks:
        faults = []
        for part in parts:
            case_results = [result for result in mark.case_results if result.part == part]
            for case, fault in fault_lines(task, case_results):
                if fault:
                    faults.append(f"{part} {case}: {fault}")
        lines = [*mark.notes, *changes.get(mark.student, ()), *faults]
        failing = [result for result in mark.case_results if result.faults][:3]
        details = "".join(f"<li>{html.escape(line)}" for line in lines[:40])
        expandable = f"<details><summary>{len(faults)} faults</summary><ul>{details}</ul>"
        expandable += _charts(task, mark, failing, secret) + "</details>"
        points = [mark.points.get(part) for part in parts]
        points += [-mark.late_points or None, mark.total]
        cells = [("" if p is None else f"{p:.1f}",) * 2 for p in points]
        ratio = "" if mark.ratio is None else f"{mark.ratio:.3f}"
        rows.append(
            [
                (html.escape(f"{mark.student} {mark.name}"), mark.student),
                *cells,
                (ratio, ratio),
                (expandable, str(len(faults))),
            ]
        )
    heads = ("student", *parts, "late", "total", "cost / optimum", "what does not hold")
    pairs = "".join(_pair_view(task, a, b, share, marks) for a, b, share in similar)
    hint = "<h2>Alike, a hint and no verdict</h2>" + (pairs or "<p>nothing alike</p>")
    return _page(
        f"{task.name} {task.title}, {len(marks)} hand-ins",
        _totals_chart(marks),
        _table(heads, rows),
        hint,
    )


def _totals_chart(marks: Sequence[Mark]) -> str:
    """Return a histogram of the totals as SVG, ten points a bar."""
    counts = [0] * 11
    for mark in marks:
        counts[min(10, int(mark.total // 10))] += 1
    max_count = max(1, *counts)
    bars = "".join(
        f'<rect x="{40 * i + 4}" y="{100 - 90 * n / max_count:.1f}" width="32" '
        f'height="{90 * n / max_count:.1f}" fill="#4878a8"/>'
        f'<text x="{40 * i + 20}" y="115" font-size="11" text-anchor="middle">{10 * i}</text>'
        for i, n in enumerate(counts)
    )
    alt_text = ", ".join(f"{n} at {10 * i}" for i, n in enumerate(counts) if n)
    head = f'<svg viewBox="0 0 440 120" width="440" role="img" aria-label="points: {alt_text}">'
    return f"{head}{bars}</svg>"


def _pair_view(
    task: assignment.Assignment, first: str, second: str, share: float, marks: Sequence[Mark]
) -> str:
    """Return two similar texts side by side, under a title that unfolds them."""
    texts = {mark.student: mark.source for mark in marks} | forbidden_sources(task)
    columns = "".join(f"<pre>{html.escape(texts.get(name, ''))}</pre>" for name in (first, second))
    title = html.escape(f"{first} and {second}: {share:.0%}")
    return f'<details><summary>{title}</summary><div class="pair">{columns}</div></details>'


def _charts(
    task: assignment.Assignment, mark: Mark, case_results: Sequence[CaseResult], secret: str
) -> str:
    """Return the assignment's charts of failed cases as figures; "" if it draws none."""
    draw = getattr(task.public, "chart", None)
    if draw is None or not case_results:
        return ""
    cases = {(part, case.name): case for part, case in cases_of(task, mark.student, secret)}
    figures = []
    for result in case_results:
        picture = _chart_image(draw, cases[result.part, result.case], result)
        if picture:
            caption = f"<figcaption>{html.escape(result.case)}</figcaption>"
            figures.append(f"<figure>{picture}{caption}</figure>")
        if TOO_SLOW in picture:
            break
    return "".join(figures)


def _chart_image(draw: Any, case: assignment.Case, result: CaseResult) -> str:
    """Return a chart as an HTML image, or "" if there is none; errors do not change the mark."""
    fault_text = "; ".join(result.faults.values())
    if result.answer.error:
        return ""
    if fault_text.startswith(UNJUDGED):
        return "<p>no chart: the answer could not be judged</p>"
    try:
        with Alarm(CHART_S, lambda: TimeoutError(TOO_SLOW)):
            svg = str(draw(case, result.answer.value))
            if not svg:
                return ""
            if len(svg) > CHART_BYTES:
                raise ValueError("it is too large")
            ET.fromstring(svg)
    except Exception as error:  # a chart of a wrong answer may be impossible
        reason = shown(f"{type(error).__name__}: {error}", 120)
        return f"<p>no chart: {html.escape(reason)}</p>"
    if "xmlns=" not in svg[: svg.find(">")]:
        svg = svg.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    encoded = base64.b64encode(svg.encode("utf-8", "replace")).decode("ascii")
    alt = html.escape(f"{result.case}: {fault_text}" if fault_text else result.case)
    return f'<img alt="{alt}" src="data:image/svg+xml;base64,{encoded}">'


# -- Gradescope -----------------------------------------------------------------------------------
SETUP_SCRIPT = """#!/usr/bin/env bash
set -e
umask 077
cd "${AUTOGRADER:-/autograder}/source"
chmod -R go-rwx .
(umask 022; python3 -m pip install ./package)
installed=$(cd / && python3 -c "import ascend_lab, os; print(os.path.dirname(ascend_lab.__file__))")
chmod -R go-rwx "$installed"
"""
RUN_SCRIPT = """#!/usr/bin/env bash
umask 077
root="${{AUTOGRADER:-/autograder}}"
cd "$root/source"
python3 -c "import sys; from ascend_lab.course.report import autograde
autograde(sys.argv[1], '{name}')" "$root"
"""
NAMED_HAND_INS_PER_DAY = 5
"""After this many hand-ins of one day the faults of hidden cases are no longer named."""


def pack(task: assignment.Assignment, secret: str) -> bytes:
    """Return the archive for Gradescope: package, assignment and secret, without keys."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in _archive_entries(task, secret):
            info = zipfile.ZipInfo(name)  # a fixed date: the same course gives the same bytes
            info.external_attr = _mode_of(name) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return packed.getvalue()


def _mode_of(name: str) -> int:
    """Return the rights of a packed file: only the grader reads judges and the secret."""
    if name in ("setup.sh", "run_autograder"):
        return 0o755
    return 0o600 if name == "secret.toml" or name.startswith("course/") else 0o644


def _archive_entries(task: assignment.Assignment, secret: str) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the files in the archive."""
    yield "setup.sh", SETUP_SCRIPT.encode()
    yield "run_autograder", RUN_SCRIPT.format(name=task.name).encode()
    yield "secret.toml", f"secret = {json.dumps(secret)}\n".encode()
    for name in sorted({*task.hand_out, "start.py", "hidden.py"}):
        if (path := task.folder / name).is_file():
            yield f"course/{task.folder.name}/{name}", path.read_bytes()
    package = Path(ascend_lab.__file__).parent
    if not (package.parent / "pyproject.toml").is_file():
        raise InputError("the project's checkout", str(package.parent), "pack from a git clone")
    for name in ("pyproject.toml", "README.md", "LICENSE", "LICENSE-TEXT"):
        yield f"package/{name}", (package.parent / name).read_bytes()
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield f"package/ascend_lab/{path.relative_to(package).as_posix()}", path.read_bytes()


def autograde(root: str | Path, name: str) -> None:
    """Grade the hand-in in Gradescope's folder `root`, and write results/results.json there."""
    autograder = Path(root)
    source = autograder / "source"
    secret_file = source / "secret.toml"
    _restrict_rights(source)
    task = assignment.load(name, source / "course", autograder / "submission")
    secret = (
        assignment.read_secret(secret_file) if 'secret = ""' not in secret_file.read_text() else ""
    )
    metadata_file = autograder / "submission_metadata.json"
    metadata = json.loads(metadata_file.read_text("utf-8")) if metadata_file.is_file() else {}
    users = metadata.get("users") or [{}]
    student = str(users[0].get("email") or "nobody")
    out = autograder / "results"
    out.mkdir(exist_ok=True)
    try:
        wall = standing_wall()
        if os.name == "posix" and not wall.files and wall.account == os.getuid():
            remedy = "run the autograder as root, or on a Linux with Landlock"
            raise RefusedError("a wall over secret.toml and hidden.py", "none", remedy)
        works = handin.hand_ins(autograder / "submission", task.functions)
        best = max(
            works, key=lambda work: bool(work.source), default=handin.HandIn(student, "", "")
        )
        log = "".join(work.log for work in works)
        work = handin.HandIn(student, best.file, best.source, log, best.notes)
        results = gradescope_results(task, marked(task, work, Enrolled(student), secret))
    except AscendLabError as error:  # caused by this machine or its folders: no mark is given
        results = {"output": f"not graded, tell your course: {error}", "tests": []}
    if _earlier_today(metadata) >= NAMED_HAND_INS_PER_DAY:
        for test in results["tests"]:
            if test["name"] == "hidden":
                test["output"] = f"not named after {NAMED_HAND_INS_PER_DAY} hand-ins a day"
    write_whole(out / "results.json", json.dumps(results, indent=1, sort_keys=True))


def _restrict_rights(source: Path) -> None:
    """Close judges and the secret to other accounts: unpacking an archive may drop its rights."""
    for path in (
        source,
        source / "secret.toml",
        source / "course",
        *(source / "course").rglob("*"),
    ):
        with suppress(OSError):
            path.chmod(0o700 if path.is_dir() else 0o600)


def _earlier_today(metadata: dict[str, object]) -> int:
    """Return the number of earlier hand-ins of the same day."""
    day = str(metadata.get("created_at", ""))[:10]
    previous = metadata.get("previous_submissions")
    times = (
        [str(entry.get("submission_time", "")) for entry in previous]
        if isinstance(previous, list)
        else []
    )
    return sum(bool(day) and time.startswith(day) for time in times)
