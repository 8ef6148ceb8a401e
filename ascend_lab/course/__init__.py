"""Assignments: hand out, check, grade behind a wall, report."""

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
