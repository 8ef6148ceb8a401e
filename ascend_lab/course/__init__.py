"""Assignments: hand out, check, grade behind a wall, report.

- `load`: an assignment by name, or exercises of the book by number.
- `start`: what a student gets; `check`: what a student may try.
- `grade`: marks for a folder of hand-ins; `write_report`: the pages about them.

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
from ascend_lab.course.grade import Enrolled, Mark, Tried, check, grade, mark, read_roster
from ascend_lab.course.report import write_report
from ascend_lab.course.sandbox import Answer, Call, Limits, Wall, answers_of, standing_wall

__all__ = [
    "Answer", "Assignment", "Call", "Case", "Enrolled", "Judged", "Limits", "Mark", "Tried", "Wall",
    "answers_of", "check", "draw", "grade", "load", "mark", "read_roster", "read_secret",
    "standing_wall", "start", "write_report",
]
