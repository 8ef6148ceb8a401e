"""The command `ascend-lab course`: hands out an assignment, checks answers and grades them.

ascend-lab course start A1 --student ada          write the files of an assignment to the folder A1
ascend-lab course check A1 A1/start.py            run the public cases on an answer
ascend-lab course grade A1 handed_in --out report grade a folder of answers, on hidden cases too
ascend-lab course pack A1                         write the archive for grading on Gradescope
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ascend_lab.cli.common import JSON, Verb, check_least, flag, refuse_idle
from ascend_lab.cli.printing import emit
from ascend_lab.errors import InputError
from ascend_lab.limits import ARRAY_BYTES, count, read_file
from ascend_lab.output import usable_folder, write_whole

if TYPE_CHECKING:
    from ascend_lab.course import Assignment
    from ascend_lab.course.grade import Mark

ACTIONS = ("start", "check", "grade", "pack")
# Flag -> the actions that use it; with another action it is refused. --output names what a hand-out
# or an archive is written to, --out the folder of a report.
ACTIONS_OF_FLAG = {
    "--student": ("start", "check"),
    "--output": ("start", "pack"),
    "--out": ("grade",),
    "--roster": ("grade",),
    "--secret": ("grade", "pack"),
    "--jobs": ("grade",),
    "--again": ("grade",),
}


def _course(arguments: argparse.Namespace) -> int:
    """Check the flags, load the assignment and run the action on it."""
    from ascend_lab.course import load

    for name, actions in ACTIONS_OF_FLAG.items():
        if arguments.action not in actions:
            refuse_idle(arguments, f"with course {' or '.join(actions)}", name)
    _refuse_work(arguments)
    # --course takes precedence over the hand-out folder that contains the student's file.
    hand_out = _hand_out_of(arguments.work) if arguments.action == "check" else None
    handed_in = arguments.work if arguments.action == "grade" else None
    task = load(arguments.assignment, arguments.course or hand_out, handed_in)
    if arguments.action in ("start", "pack") and task.exercises:
        remedy = "exercises start on the book's pages; check and grade take them"
        raise InputError(f"{arguments.action}: an assignment such as A1", task.name, remedy)
    if arguments.action in ("grade", "pack") and task.hidden is None and not task.exercises:
        remedy = "name the course with --course: a hand-out cannot grade"
        raise InputError(f"hidden.py of {task.name}", f"none in {task.folder}", remedy)
    run_action = {"start": _start, "check": _check, "grade": _grade, "pack": _pack}
    return run_action[arguments.action](task, arguments)


def _hand_out_of(work: str) -> Path | None:
    """Return the folder of a student's file if it is a hand-out; None otherwise.

    A hand-out brings its judge, a file with the code that runs and scores answers. Only `check`,
    which students run on their own machines, uses the judge of that folder. `grade` must not: a
    student could hand in a judge that accepts everything.
    """
    folder = Path(work).resolve().parent
    is_hand_out = all((folder / name).is_file() for name in ("assignment.toml", "instance.json"))
    return folder if is_hand_out else None


def _refuse_work(arguments: argparse.Namespace) -> None:
    """Raise `InputError` if the argument FILE is missing, or given to an action without one."""
    action = arguments.action
    name = arguments.assignment
    work = arguments.work
    needed_work = {
        "check": f"your file, e.g. course check {name} {name}/start.py",
        "grade": f"the folder of hand-ins, e.g. course grade {name} handed_in --out report",
    }
    if action not in needed_work:
        if work is not None:
            raise InputError(f"{action}: no file", work, f"e.g. course {action} {name}")
    elif work is None:
        raise InputError(f"{action}: {needed_work[action]}", "nothing after the assignment")
    elif action == "check" and Path(work).is_dir():
        files = sorted(path for path in Path(work).iterdir() if path.suffix in (".py", ".ipynb"))
        # public.py holds the public cases, which students may read and do not hand in.
        candidates = [str(path) for path in files if path.name != "public.py"]
        remedy = (
            f"name one of {', '.join(candidates)}" if candidates else "it has no .py and no .ipynb"
        )
        raise InputError("check: one file, the one you work in", f"the folder {work}", remedy)


def _start(task: "Assignment", arguments: argparse.Namespace) -> int:
    """Write a student's hand-out, with sizes drawn from their name, and print the next command."""
    from ascend_lab.course import start

    if not arguments.student:
        raise InputError("--student ID", "none", "the name your course knows you by")
    out = Path(arguments.output or task.name)
    # The name is the random seed: it gives the same hand-out on any machine.
    files = start(task, arguments.student, out)
    next_command = f"ascend-lab course check {task.name} {out / 'start.py'}"
    lines = [f"{task.name} {task.title}: {', '.join(files)} in {out}"]
    lines.append(f"next: read {out / 'README.md'}, then {next_command}")
    emit(arguments.json, {"folder": str(out), "files": files}, lines)
    return 0


def _check(task: "Assignment", arguments: argparse.Namespace) -> int:
    """Run the public cases on an answer and print the faults of each, and the points."""
    from ascend_lab.course import check, handin
    from ascend_lab.course.grade import fault_lines, mark_of, rule_lines

    path = Path(arguments.work)
    source = handin.source_of(path.name, read_file(path, "your file", ARRAY_BYTES), task.functions)
    # Exercises of the book are the same for all students; sizes of assignments are not.
    student = arguments.student or ("" if task.exercises else _student_of(path.parent))
    # An answer may take minutes; progress goes to standard error.
    case_results = check(
        task, source, student, path.name, lambda text: print(text, file=sys.stderr)
    )
    points = mark_of(task, case_results)
    # ", cost 120 (0 points at 200, full at 100): 80%" where points grow with the speed
    cost_texts = {
        result.case: f", cost {result.judged.cost:g} (0 points at {result.judged.base:g}, full at "
        f"{result.judged.target:g}): {result.share():.0%}"
        for result in case_results
        if result.timed and not result.faults
    }
    lines = [
        f"{label:24} {fault or 'holds' + cost_texts.get(label, '')}"
        for label, fault in fault_lines(task, case_results)
    ]
    lines += [
        f"{criterion}: {value:.1f} of {task.points[criterion]:g} points"
        for criterion, value in points.items()
    ]
    lines += rule_lines(task, case_results)
    if not task.exercises:
        lines.append(
            "hidden cases are of the same kind, with other values; the work log is read by a person"
        )
    data = {
        "points": points,
        "cases": {
            result.case: {"faults": result.faults, "cost": result.judged.cost}
            for result in case_results
        },
    }
    emit(arguments.json, data, lines)
    return 1 if any(result.faults for result in case_results) else 0


def _student_of(folder: Path) -> str:
    """Return the student of a hand-out; raise `InputError` if it names none."""
    instance = folder / "instance.json"
    if not instance.is_file():
        raise InputError("--student ID", f"no instance.json in {folder}", "give --student")
    try:
        return str(json.loads(instance.read_text("utf-8"))["student"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{instance}: a student", type(error).__name__, "give --student"
        ) from error


def _grade(task: "Assignment", arguments: argparse.Namespace) -> int:
    """Grade a folder of hand-ins and write the report; `--again` compares it with the last one."""
    from ascend_lab.course import grade, read_roster, read_secret, report
    from ascend_lab.course.grade import read_log
    from ascend_lab.course.sandbox import standing_wall

    if arguments.out is None:
        raise InputError("--out FOLDER", "none", "where the report goes")
    check_least(arguments, "--jobs", 1)
    out = Path(arguments.out)
    secret = read_secret(arguments.secret)
    # The output folder is checked now, not after hours of grading.
    usable_folder(next(folder for folder in (out, *out.parents) if folder.exists()))
    previous_answers, previous_lines = read_log(out / "log.jsonl") if arguments.again else ({}, {})
    previous_rows = _read_grades(out / "grades.csv") if arguments.again else {}
    roster = read_roster(arguments.roster)
    if not Path(arguments.work).exists():
        raise InputError("a hand-in or a folder of them", arguments.work, "check the path")
    confinement = (
        standing_wall()
    )  # raises an error if this is root and no other account can run hand-ins
    marks = grade(
        task,
        Path(arguments.work),
        secret=secret,
        roster=roster,
        known_answers=previous_answers,
        jobs=arguments.jobs,
    )
    rerun_notes, changes = _compared(marks, previous_rows, previous_lines)
    report.write_report(task, marks, out, secret, changes)
    lines = [_line(mark, previous_rows, rerun_notes, changes) for mark in marks]
    lines.append(f"{len(marks)} hand-ins: {out / 'grades.csv'}, {out / 'index.html'}")
    if not secret:
        lines.append(NO_SECRET)
    data = {
        "marks": {
            mark.student: {"points": dict(mark.points), "total": mark.total} for mark in marks
        }
    }
    for line in confinement.lines():
        print(line, file=sys.stderr)
    emit(arguments.json, data, lines)
    return 0


Row = dict[str, str]
Notes = dict[str, list[str]]
"""Student -> the reasons why answers were run again, or the cases that changed."""


def _compared(
    marks: "Sequence[Mark]",
    previous_rows: Mapping[str, Row],
    previous_lines: Mapping[str, Sequence[Mapping[str, object]]],
) -> tuple[Notes, Notes]:
    """Return why answers were run again, and all changes since an earlier report, by student.

    Both are empty without --again.
    """
    from ascend_lab.course.grade import changes_since, rerun_reasons

    rerun_notes = {
        mark.student: rerun_reasons(
            previous_rows[mark.student], previous_lines.get(mark.student, ()), mark
        )
        for mark in marks
        if mark.student in previous_rows
    }
    changes = {
        mark.student: [
            *rerun_notes.get(mark.student, ()),
            *changes_since(previous_lines[mark.student], mark),
        ]
        for mark in marks
        if mark.student in previous_lines
    }
    return rerun_notes, changes


def _line(
    mark: "Mark", previous_rows: Mapping[str, Row], rerun_notes: Notes, changes: Notes
) -> str:
    """Return a student's points as a line: "ada  78.0  (values 60.0, speed 18.0)"."""
    from ascend_lab.course.texts import shown

    points = dict(mark.points) | ({"late": -mark.late_points} if mark.late_points else {})
    parts = ", ".join(f"{criterion} {value:.1f}" for criterion, value in points.items())
    line = f"{mark.student:24} {mark.total:6.1f}  ({parts})"
    previous_total = float(previous_rows.get(mark.student, {}).get("total", mark.total))
    if previous_total != mark.total:
        # Three reasons fill a line; the report has all of them.
        reasons = "; ".join(changes.get(mark.student, [])[:3]) or "points of the log, or lateness"
        line += f"  was {previous_total:.1f}: {reasons}"
    elif rerun_notes.get(mark.student):
        line += f"  as before: {rerun_notes[mark.student][0]}"
    return shown(line, 1000)  # without control characters, as names and faults come from hand-ins


def _read_grades(table: Path) -> dict[str, Row]:
    """Return the rows of an earlier grades.csv by student."""
    import csv

    with table.open(encoding="utf-8", newline="") as file:
        # The report writes ' before an id such as =1+1, which a spreadsheet would compute.
        return {row["id"].removeprefix("'"): row for row in csv.DictReader(file)}


NO_SECRET = "no --secret: students who know this course can draw the hidden cases"


def _pack(task: "Assignment", arguments: argparse.Namespace) -> int:
    """Write the archive for Gradescope: the package, an assignment and the term's secret."""
    from ascend_lab.course import read_secret, report

    out = arguments.output or f"{task.name}_gradescope.zip"
    secret = read_secret(arguments.secret)
    archive = report.pack(task, secret)
    write_whole(out, archive)
    data = {"file": str(out), "size_bytes": len(archive)}
    lines = [f"{out}: {len(archive):,} bytes"]
    if not secret:
        lines.append(NO_SECRET)
    emit(arguments.json, data, lines)
    return 0


VERBS = (
    Verb(
        "course",
        "assignments, exercises: start, check your work, grade a folder, pack",
        _course,
        (
            flag("action", choices=ACTIONS, metavar="start|check|grade|pack"),
            flag("assignment", metavar="A1|1,5.2", help="an assignment, or exercises of the book"),
            flag("work", nargs="?", metavar="FILE|FOLDER", help="what to check or grade"),
            flag("--student", metavar="ID", help="whose instance (start, check)"),
            flag("--output", type=Path, metavar="FOLDER|F.zip", help="where start and pack write"),
            flag("--out", metavar="REPORT", help="folder of the report (grade)"),
            flag("--roster", metavar="R.csv", help="id, name, late_minutes, log (grade)"),
            flag(
                "--secret", metavar="S.toml", help='the term\'s file: secret = "..." (grade, pack)'
            ),
            flag("--jobs", type=count, default=1, metavar="N", help="hand-ins at once (1)"),
            flag(
                "--again",
                action="store_true",
                help="judge the answers of an earlier report anew, and say what moved",
            ),
            flag("--course", metavar="FOLDER", help="where the assignments lie"),
            JSON,
        ),
    ),
)
