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

from ascend_lab.course.assignment import Assignment, load, read_secret, start
from ascend_lab.course.grade import check, grade, read_roster
from ascend_lab.course.report import write_report
from ascend_lab.facade import names_of

__all__ = [
    "Assignment",
    "check",
    "grade",
    "load",
    "read_roster",
    "read_secret",
    "start",
    "write_report",
]

__getattr__ = names_of(__name__, {})
