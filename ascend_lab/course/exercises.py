"""The book's exercises as an assignment: checks on this side of the wall, answers behind it.

`load("1,5.2")` is a set like any assignment; its cases are the exercises, its one property is what
the check says. The check runs here, as in a notebook, but in place of the student's function it
calls one that asks the student's process (see `wire`). So nothing that a hand-in does to a check,
to the package or to NumPy reaches what decides.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab import __version__
from ascend_lab.course import assignment
from ascend_lab.course.assignment import Assignment, Case, Judged
from ascend_lab.course.sandbox import Answer, Call, Limits, LostError, Session, opened
from ascend_lab.course.wire import Wire
from ascend_lab.errors import InputError
from ascend_lab.lab import checks
from ascend_lab.lab.checks.core import exercise_number
from ascend_lab.lab.checks.wall import EndedError

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
NOT_BY_MACHINE = {"ex_16_4": "its memory is measured where it runs"}
"""Exercises whose checks look at more than what a function takes and gives."""
LIMITS = Limits(start_s=60.0, memory_bytes=1 << 30, answer_bytes=16 << 20)
OPEN = ("chapter11_12", "chapter19_20", "chapter21_22", "chapter23_26")
"""Checks whose pages or figures use something from their modules."""
DENIED = tuple(sorted({f"{checks.__name__}.{home}" for home in checks.HOMES.values()
                       if home not in OPEN}))  # fmt: skip
"""The other checks, next to which answers stand: a hurdle, for the book has them, too."""


def load(name: str, course: str | Path | None = None) -> Assignment:
    """Load an assignment such as "A1", or exercises such as "1,5.2" (chapters and numbers)."""
    if not re.match(r"\d", name):
        return assignment.load(name, course)
    exercises = [one for one in chosen(name) if one not in NOT_BY_MACHINE]
    left = [exercise_number(one) for one in chosen(name) if one in NOT_BY_MACHINE]
    title = "exercises of the book" + f", not graded by machine: {', '.join(left)}" * bool(left)
    if not exercises:
        raise InputError(f"exercises {name}", title, "read them")
    return Assignment(
        name=name, folder=NOTEBOOKS, title=title, version=__version__,
        chapters=tuple(sorted({int(one[3:5]) for one in exercises})), hours=0,
        functions=tuple(dict.fromkeys(n for one in exercises for n in names_of(one))),
        points={"public": len(exercises)}, weights={"check": 1}, limits=LIMITS, denied=DENIED,
        twist={"exercises": exercises}, late_per_day=0.0, public=sys.modules[__name__], hidden=None,
    )  # fmt: skip


def chosen(words: str) -> list[str]:
    """Return the exercises that "1,5.2,14a" names, in the book's order."""
    known = [name.removeprefix("check_") for name in checks.check_names()]
    found: set[str] = set()
    for word in words.split(","):
        number = re.fullmatch(r"0*(\d+[a-z]?)(?:\.(\d+))?", word.strip())
        some = {one for one in known if number and number[1] == exercise_number(one).split(".")[0]
                and number[2] in (None, exercise_number(one).split(".")[1])}  # fmt: skip
        if not some:
            remedy = "name chapters and coded exercises: 1,5.2,14a"
            raise InputError(f"exercises {words}", f"none called {word.strip()!r}", remedy)
        found |= some
    return [one for one in known if one in found]


def names_of(exercise: str) -> tuple[str, ...]:
    """Return what an answer may be called: the exercise, or its name on the book's page."""
    own = _page_names(exercise[3:].rpartition("_")[0]).get(exercise)
    return (exercise, own) if own else (exercise,)


@cache
def _page_names(chapter: str) -> Mapping[str, str]:
    """Return the function that each exercise of a chapter asks for; nothing without the pages."""
    found: dict[str, str] = {}
    for page in NOTEBOOKS.glob(f"{chapter}_*.ipynb"):
        found |= dict(re.findall(r"check_(ex_\w+)\((\w+)\)", page.read_text("utf-8")))
    return found


# -- what an assignment's public.py has ------------------------------------------------------------
def instance(rng: np.random.Generator, twist: Mapping[str, Any]) -> dict[str, Any]:
    """Return the exercises; every student has the same."""
    return dict(twist)


def cases(instance: Mapping[str, Any], rng: np.random.Generator) -> list[Case]:
    """Return a case an exercise: its check under a seed of its own."""
    return [
        Case(exercise_number(one), Call(one, {"seed": int(rng.integers(1 << 31))}))
        for one in instance["exercises"]
    ]


def judge(case: Case, answer: Any) -> Judged:
    """Return what the check has said, "" where it passed."""
    return Judged({"check": str(answer)})


def answers_of(
    source: str,
    calls: Sequence[Call],
    limits: Limits,
    denied: Sequence[str] = (),
    file: str = "handin.py",
    told: Callable[[str], None] | None = None,
) -> list[Answer]:
    """Check a hand-in's exercises; an answer is what the check says, "" where it passes.

    One process answers for all, and is started again behind a check that did not leave it at rest.
    """
    found: list[Answer] = []
    session: Session | None = None
    try:
        for call in calls:
            if session is not None and not session.rests():
                session.close()
                session = None
            if session is None:
                session = Session(source, file, limits, denied, told, lenient=True)
                if wrong := opened(session):
                    return [Answer(error=wrong)] * len(calls)
            names, seed = names_of(call.function), call.arguments["seed"]
            found.append(Answer(verdict(session, call.function, names, seed)))
    finally:
        if session is not None:
            session.close()
    return found


def verdict(session: Session, exercise: str, names: Sequence[str], seed: int) -> str:
    """Return what a check says to the function of one of these names, "" where it passes."""
    wire = Wire(session.send, session.hear)
    session.what = f"exercise {exercise_number(exercise)}"
    answer = partial(_ask, session, wire, "|".join(names))
    result = getattr(checks, f"check_{exercise}")(answer, seed=seed)
    remark = f"; {session.remark}" if session.remark and "no function" in result.message else ""
    return "" if result.passed else result.message[:400] + remark


def _ask(session: Session, wire: Wire, names: str, *args: Any, **named: Any) -> Any:
    """Call the function of the far side; how its process ended is no error that a check expects."""
    session.begin(session.limits.case_s, session.what)
    try:
        return wire.ask(0, names, args, named)
    except LostError as error:
        raise EndedError(str(error)) from error
