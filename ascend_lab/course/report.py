"""What grading leaves behind: tables, pages, a log for regrading, and texts that are alike.

    grades.csv        a line a student: points of each part, total, late, digest of the file
    index.html        the instructor's page, self-contained: sortable, with charts of what failed
    students/ID.html  the student's page, students/ID.json as Gradescope reads it: no hidden case
    leaderboard.csv   pseudonyms of those who gave one; similarity.csv, hints, no verdicts
    log.jsonl         every case and answer: `grade --again` judges them anew

Nothing carries a time of day: the same hand-ins give the same bytes.

How much of one text stands in another is a hint and no verdict, by fingerprints of its tokens:
names, numbers and texts become kinds of tokens; the hashes of all runs of `RUN` tokens are thinned
by winnowing (Schleimer, Wilkerson and Aiken, SIGMOD 2003): of each window of `WINDOW` the least.
"""

import csv
import html
import io
import json
import keyword
import tokenize
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import ascend_lab
from ascend_lab import __version__
from ascend_lab.course.assignment import PARTS, Assignment
from ascend_lab.course.grade import Mark, Tried, faults_said, graded_cases
from ascend_lab.output import usable_folder, write_whole

RUN, WINDOW = 12, 8
HINT = 0.5


@cache
def fingerprints(source: str) -> frozenset[int]:
    """Return the fingerprints of a Python text; of what is no Python, those of its lines so far."""
    tokens = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.NAME:
                tokens.append(token.string if keyword.iskeyword(token.string) else "n")
            elif token.type in (tokenize.NUMBER, tokenize.STRING):
                tokens.append("c")
            elif token.type == tokenize.OP:
                tokens.append(token.string)
    except (tokenize.TokenError, IndentationError, SyntaxError, RecursionError):
        pass
    runs = [" ".join(tokens[i : i + RUN]) for i in range(len(tokens) - RUN + 1)]
    hashes = [zlib.crc32(run.encode()) for run in runs]
    return frozenset(min(hashes[i : i + WINDOW]) for i in range(max(1, len(hashes) - WINDOW + 1))
                     if hashes[i : i + WINDOW])  # fmt: skip


def likeness(one: frozenset[int], other: frozenset[int], given: frozenset[int]) -> float:
    """Return the share of the smaller text that stands in the other, what was given left out."""
    a, b = one - given, other - given
    return len(a & b) / min(len(a), len(b)) if min(len(a), len(b)) >= WINDOW else 0.0


def hints(
    sources: Mapping[str, str], given: str, others: Mapping[str, str]
) -> list[tuple[str, str, float]]:
    """Return (student, student or other text, likeness) of at least `HINT`, the most alike first.

    `given` is what everybody was handed; `others` are texts nobody may hand in: keys, our sources.
    """
    start = fingerprints(given)
    prints = {name: fingerprints(text) for name, text in sources.items()}
    names = sorted(prints)
    found = [
        (a, b, likeness(prints[a], prints[b], start))
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    ]
    for label, text in others.items():
        theirs = fingerprints(text) - start
        for name in names:
            own = prints[name] - start
            if len(own) >= WINDOW:
                found.append((name, label, len(own & theirs) / len(own)))
    kept = [hint for hint in found if hint[2] >= HINT]
    return sorted(kept, key=lambda hint: (-hint[2], hint[0], hint[1]))


@cache
def our_sources() -> dict[str, str]:
    """Return the package's own modules by path: an answer copied from there is no answer."""
    package = Path(ascend_lab.__file__).parent
    return {
        f"ascend_lab/{path.relative_to(package).as_posix()}": path.read_text("utf-8")
        for path in sorted(package.rglob("*.py"))
    }


STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8886; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
th[data-sort] { cursor: pointer; text-decoration: underline dotted; }
pre { overflow-x: auto; } .pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
svg { max-width: 100%; height: auto; background: white; }
"""
SORT = """
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
    task: Assignment,
    marks: Sequence[Mark],
    out: Path,
    secret: str = "",
    changes: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Write the whole report into the folder `out`."""
    usable_folder(out / "students")
    own = task.folder / "start.py"
    given = own.read_text("utf-8") if own.is_file() else ""
    alike = hints({mark.student: mark.source for mark in marks}, given, our_sources())
    records = [{"student": mark.student, **asdict(tried)} for mark in marks for tried in mark.tried]
    files = {
        "grades.csv": _csv(_grades(task, marks)),
        "leaderboard.csv": _csv([("place", "name", "cost / optimum"), *leaderboard(marks)]),
        "leaderboard.json": _json([{"name": n, "value": v} for _, n, v in leaderboard(marks)]),
        "similarity.csv": _csv(
            [("one", "other", "alike"), *((a, b, f"{x:.2f}") for a, b, x in alike)]
        ),
        "log.jsonl": "".join(json.dumps(record, sort_keys=True) + "\n" for record in records),
        "index.html": _index(task, marks, secret, alike, changes or {}),
    }
    for mark in marks:
        files[f"students/{mark.student}.json"] = _json(results(task, mark))
        files[f"students/{mark.student}.html"] = _student_page(task, mark)
    for name, text in files.items():
        write_whole(out / name, text.encode("utf-8", "backslashreplace"))


def leaderboard(marks: Sequence[Mark]) -> list[tuple[int, str, str]]:
    """Return (place, pseudonym, cost over optimum) of those who gave a pseudonym, least first."""
    shown = sorted((m.ratio, m.pseudonym) for m in marks if m.pseudonym and m.ratio is not None)
    return [(place, name, f"{ratio:.4f}") for place, (ratio, name) in enumerate(shown, 1)]


def results(task: Assignment, mark: Mark) -> dict[str, Any]:
    """Return a mark in the form that Gradescope reads: hidden cases by property only."""
    tests = []
    for part, points in mark.points.items():
        said = [f"{name}: {text}" for name, text in _lines(task, mark, part)]
        seen = "visible" if part == "public" else "after_due_date"
        tests.append({
            "name": part, "score": points, "max_score": task.points[part],
            "output": "\n".join(said) or "all properties hold", "visibility": seen,
        })  # fmt: skip
    ratio = mark.ratio if mark.pseudonym else None
    board = [] if ratio is None else [{"name": "cost / optimum", "value": round(ratio, 4),
                                       "order": "asc"}]  # fmt: skip
    output = "\n".join(mark.notes)
    return {"score": mark.total, "output": output, "tests": tests, "leaderboard": board}


def _lines(task: Assignment, mark: Mark, part: str) -> list[tuple[str, str]]:
    """Return (property, the first thing wrong with it); of hidden cases only how many fail."""
    if part == "performance":
        return [(t.case if t.part == "public" else "a hidden case", _scale(t))
                for t in mark.tried if t.timed]  # fmt: skip
    tried = [t for t in mark.tried if t.part == part]
    if task.exercises:
        return [(case, said) for case, said in faults_said(task, tried) if said]
    found = []
    for name in task.weights:
        failing = [t for t in tried if t.judged.properties.get(name, "missing")]
        if failing and part == "public":
            first = failing[0]
            said = first.judged.properties.get(name, "missing")
            found.append(
                (name, f"fails in {len(failing)} of {len(tried)} cases; {first.case}: {said}")
            )
        elif failing:
            found.append((name, f"fails in {len(failing)} of {len(tried)} hidden cases"))
    return found


def _scale(tried: Tried) -> str:
    """Return what a cost is worth, with the fixed scale beside it."""
    judged = tried.judged
    if tried.faults or judged.cost is None:
        return "counts as the plain solution: a property does not hold"
    return (
        f"{judged.cost:g}; 0 points at {judged.base:g}, full at {judged.target:g}, certified "
        f"optimum or bound {judged.optimum:g}: {tried.share():.0%}"
    )


def _grades(task: Assignment, marks: Sequence[Mark]) -> list[tuple[Any, ...]]:
    parts = [part for part in PARTS if part in task.points]
    rows = [("id", "name", *parts, "late", "total", "file", "digest", "assignment", "grader")]
    for mark in marks:
        points = [f"{mark.points[p]:.1f}" if p in mark.points else "" for p in parts]
        rows.append((
            mark.student, mark.name, *points, f"{0 - mark.late_points:.1f}", f"{mark.total:.1f}",
            mark.file, mark.digest, f"{task.name} {task.version}", __version__,
        ))  # fmt: skip
    return rows


def _csv(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV; what a table program would take for a formula gets an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        cells = [str(cell) for cell in row]
        writer.writerow([f"'{c}" if c[:1] in "=+@\t" and c else c for c in cells])
    return text.getvalue()


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


# -- pages -----------------------------------------------------------------------------------------
def _page(title: str, *blocks: str) -> str:
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join((f"<h1>{html.escape(title)}</h1>", *blocks))
    return f"<!doctype html>\n<html lang=en>{head}<body>{body}<script>{SORT}</script></html>\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[tuple[str, str]]]) -> str:
    """Return a sortable table; a cell is (HTML, what it is sorted by)."""
    top = "".join(f"<th data-sort>{html.escape(head)}" for head in heads)
    body = "".join(
        "<tr>" + "".join(f'<td data-value="{html.escape(by)}">{cell}' for cell, by in row)
        for row in rows
    )
    return f"<table><thead><tr>{top}</thead><tbody>{body}</tbody></table>"


def _student_page(task: Assignment, mark: Mark) -> str:
    rows = [
        [(html.escape(part), part), (f"{mark.points[part]:.1f} of {task.points[part]:g}", ""),
         ("<br>".join(html.escape(f"{n}: {t}") for n, t in _lines(task, mark, part)) or "-", "")]
        for part in mark.points
    ]  # fmt: skip
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in mark.notes)
    shown = [t for t in mark.tried if t.part == "public" and t.faults]
    charts = _charts(task, mark, shown[:2], "")
    late = f", late {-mark.late_points:.1f}" if mark.late_points else ""
    title = f"{task.name} {task.title}: {mark.student}, {mark.total:.1f} points{late}"
    return _page(title, notes, _table(("part", "points", "what does not hold"), rows), charts)


def _index(
    task: Assignment,
    marks: Sequence[Mark],
    secret: str,
    alike: Sequence[tuple[str, str, float]],
    changes: Mapping[str, Sequence[str]],
) -> str:
    parts = [part for part in PARTS if part in task.points]
    rows = []
    for mark in marks:
        faults = [
            f"{part} {case}: {said}"
            for part in parts
            for case, said in faults_said(task, [t for t in mark.tried if t.part == part])
            if said
        ]
        more = [*mark.notes, *changes.get(mark.student, ()), *faults]
        failing = [t for t in mark.tried if t.faults][:3]
        details = "".join(f"<li>{html.escape(line)}" for line in more[:40])
        unfold = f"<details><summary>{len(faults)} faults</summary><ul>{details}</ul>"
        unfold += _charts(task, mark, failing, secret) + "</details>"
        points = [mark.points.get(part) for part in parts]
        points += [-mark.late_points or None, mark.total]
        cells = [("" if p is None else f"{p:.1f}",) * 2 for p in points]
        ratio = "" if mark.ratio is None else f"{mark.ratio:.3f}"
        rows.append([(html.escape(f"{mark.student} {mark.name}"), mark.student), *cells,
                     (ratio, ratio), (unfold, str(len(faults)))])  # fmt: skip
    heads = ("student", *parts, "late", "total", "cost / optimum", "what does not hold")
    pairs = "".join(_pair(a, b, x, marks) for a, b, x in alike)
    hint = "<h2>Alike, a hint and no verdict</h2>" + (pairs or "<p>nothing alike</p>")
    return _page(
        f"{task.name} {task.title}, {len(marks)} hand-ins",
        _spread(marks),
        _table(heads, rows),
        hint,
    )


def _spread(marks: Sequence[Mark]) -> str:
    """Draw how the totals are spread, ten points a bar."""
    counts = [0] * 11
    for mark in marks:
        counts[min(10, int(mark.total // 10))] += 1
    most = max(1, *counts)
    bars = "".join(
        f'<rect x="{40 * i + 4}" y="{100 - 90 * n / most:.1f}" width="32" '
        f'height="{90 * n / most:.1f}" fill="#4878a8"/>'
        f'<text x="{40 * i + 20}" y="115" font-size="11" text-anchor="middle">{10 * i}</text>'
        for i, n in enumerate(counts)
    )
    said = ", ".join(f"{n} at {10 * i}" for i, n in enumerate(counts) if n)
    head = f'<svg viewBox="0 0 440 120" width="440" role="img" aria-label="points: {said}">'
    return f"{head}{bars}</svg>"


def _pair(one: str, other: str, alike: float, marks: Sequence[Mark]) -> str:
    texts = {mark.student: mark.source for mark in marks} | our_sources()
    both = "".join(f"<pre>{html.escape(texts.get(name, ''))}</pre>" for name in (one, other))
    title = html.escape(f"{one} and {other}: {alike:.0%}")
    return f'<details><summary>{title}</summary><div class="pair">{both}</div></details>'


def _charts(task: Assignment, mark: Mark, tried: Sequence[Tried], secret: str) -> str:
    """Return the assignment's own charts of what failed, as SVG; none where it cannot draw one."""
    draw = getattr(task.public, "chart", None)
    if draw is None or not tried:
        return ""
    cases = {(part, case.name): case for part, case in graded_cases(task, mark.student, secret)}
    shown = []
    for one in tried:
        try:
            svg = draw(cases[one.part, one.case], one.answer.value) if not one.answer.error else ""
        except Exception as error:  # a chart of a wrong answer may be impossible; the mark stands
            svg = f"<p>no chart: {html.escape(type(error).__name__)}</p>"
        if svg:
            shown.append(f"<figure>{svg}<figcaption>{html.escape(one.case)}</figcaption></figure>")
    return "".join(shown)
