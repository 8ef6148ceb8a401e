"""The grader against kept hand-ins, hostile, honest and wrong: `lab.py bench course`.

Every mark must be the one foretold, and nothing may stay behind: no process, no file in a shared
folder, no change of what decides marks.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ascend_lab.course import grade, load, write_report
from ascend_lab.course.confine import FIRST_ACCOUNT, NOBODY
from ascend_lab.course.grade import Mark
from ascend_lab.course.leftovers import SHARED
from ascend_lab.course.sandbox import _children
from ascend_lab.course.seal import seal_of
from bench.hand_ins import Row
from bench.honest import HONEST
from bench.hostile import HOSTILE
from bench.table import Figure

ROOT = Path(__file__).parents[1]
COURSES = {"A0": ROOT / "tests/course_toy"}
"""Where an assignment lies that is not in the project's course."""
SECRET = "a secret of the bench"
MAX_S = 300.0
JOBS = 2


def course_figures(rows: Sequence[Row] = (*HOSTILE, *HONEST)) -> Iterator[Figure]:
    """Grade all rows, a class for each assignment; yield a figure for each, and what was left."""
    with tempfile.TemporaryDirectory(prefix="bench-") as home, _temporary_files_in(home):
        yield from _figures_in(Path(home), rows)


def _figures_in(home: Path, rows: Sequence[Row]) -> Iterator[Figure]:
    before = left_behind(home)
    start_s = time.perf_counter()
    for name in sorted({row.assignment for row in rows}):
        own = [row for row in rows if row.assignment == name]
        begun_s = time.perf_counter()
        unchanged, wrong = _class_of(name, own)
        took_s = time.perf_counter() - begun_s
        held = f"{len(own) - len(wrong)} of {len(own)}"
        yield Figure(f"{name}: marks as foretold", held, "all", not wrong)
        yield Figure(f"  graded and drawn, {JOBS} jobs", f"{took_s:.0f} s", "", None)
        for said in wrong:
            yield Figure(f"  {said}", "", "", False)
        if not unchanged:
            yield Figure("  the course or the package changed", "", "", False)
    took_s = time.perf_counter() - start_s
    yield Figure("all hand-ins", f"{took_s:.0f} s", f"< {MAX_S:.0f} s", took_s < MAX_S)
    stayed = sorted(left_behind(home) - before)
    yield Figure("processes and files left", ", ".join(stayed)[:60] or "none", "none", not stayed)


def _class_of(name: str, rows: Sequence[Row]) -> tuple[bool, list[str]]:
    """Return whether what decides marks is as before, and what was not as foretold."""
    task = load(name, COURSES.get(name))
    seal = seal_of(task.folder)
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        work = Path(home, "handed_in")
        work.mkdir()
        for row in rows:
            row.write(work, row.student)
        marks = grade(task, work, secret=SECRET, jobs=JOBS)
        write_report(task, marks, Path(home, "report"), SECRET)
        page = Path(home, "report/index.html").read_text("utf-8")
    wrong = list(_not_foretold(rows, marks))
    if page.count("<script>") != 1:
        wrong.append("a script of a hand-in on the page")
    return seal == seal_of(task.folder), wrong


def _not_foretold(rows: Sequence[Row], marks: Sequence[Mark]) -> Iterator[str]:
    totals = {mark.student: mark.total for mark in marks}
    for row in rows:
        total = totals.pop(row.student, None)
        if total is None:
            yield f"{row.student} ({row.kind}): no mark"
        elif not row.least <= total <= row.most:
            yield f"{row.student} ({row.kind}): {total}, foretold {row.least:g} to {row.most:g}"
    yield from (f"{student}: a mark of nobody" for student in totals)


@contextmanager
def _temporary_files_in(home: str) -> Iterator[None]:
    """Let this process, and those that it starts, lay temporary files into one folder."""
    before = os.environ.get("TMPDIR")
    Path(home).chmod(0o711)  # a hand-in's account goes through it to its own folder
    os.environ["TMPDIR"] = home
    tempfile.tempdir = None
    try:
        yield
    finally:
        tempfile.tempdir = None
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def left_behind(home: Path) -> set[str]:
    """Return what a grader could leave: children, temporary files, files of hand-ins' accounts."""
    found = {f"process {number}" for number in _children() if not _keeps_count(number)}
    found |= {path.name for path in home.iterdir() if path.name.startswith("handin-")}
    for folder in filter(os.path.isdir, SHARED):
        for entry in os.scandir(folder):
            with suppress(OSError):
                owner = entry.stat(follow_symlinks=False).st_uid
                if entry.name.startswith("left_") or FIRST_ACCOUNT <= owner < NOBODY:
                    found.add(entry.path)
    return found


def _keeps_count(process: int) -> bool:
    """Whether a child is Python's own, which counts what several processes share."""
    try:
        return b"resource_tracker" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return True  # ended meanwhile
