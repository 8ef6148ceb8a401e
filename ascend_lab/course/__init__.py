"""Runs the assignments of a course: hands them out, checks and grades answers, reports the marks.

- `load` returns an assignment by name, or exercises of the book by number.
- `start` writes the files that a student gets; `check` runs the public cases on an answer.
- `grade` returns the marks of a folder of hand-ins, whose code runs in a confined process;
  `write_report` writes tables and pages about them.

Exercises that can be handed in like an assignment, here 5.2 and all of Chapter 1:

>>> from ascend_lab.course import load
>>> assignment = load("1,5.2")
>>> assignment.title
'exercises of the book'
>>> len(assignment.functions) > 1
True
"""

# fmt: off
# isort: off
from ascend_lab.course.assignment import Assignment, Case, Judged, draw, load, read_secret, start
from ascend_lab.course.grade import Enrolled, Mark, CaseResult, check, grade, mark, read_roster
from ascend_lab.course.report import write_report
from ascend_lab.course.sandbox import Answer, Call, Limits, Wall, answers_of, standing_wall

__all__ = [
    "Answer",
    "Assignment",
    "Call",
    "Case",
    "CaseResult",
    "Enrolled",
    "Judged",
    "Limits",
    "Mark",
    "Wall",
    "answers_of",
    "check",
    "draw",
    "grade",
    "load",
    "mark",
    "read_roster",
    "read_secret",
    "standing_wall",
    "start",
    "write_report",
]
