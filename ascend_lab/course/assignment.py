"""What an assignment is: its table, public cases and judge, hidden cases, and what is handed out.

    assignment.toml   title, version, chapters, hours, functions, points, weights, limits, twist
    public.py         instance(rng, twist), cases(instance, rng), judge(case, answer), chart(...)
    hidden.py         cases(instance, rng): never handed out
    start.py          the stub that students fill in, in cells `# %%`; README.md, the task

A case calls one function with plain data. Its judge says of each property whether it holds, and
what the answer costs next to a plain solution and a certified optimum.

A student is given the task, the public cases, `start.py` as script and as notebook, an instance of
the own, and what `hand_out` of the table names: a list. Whatever else lies in the folder stays.

The book's exercises are an assignment, too: `load("1,5.2")`. Its cases are the exercises, its one
property is what the check says. The check runs here, as in a notebook, but in place of the
student's function it calls one that asks the student's process (see `wire`). So nothing that a
hand-in does to a check, to the package or to NumPy reaches what decides.
"""

import hashlib
import hmac
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from ascend_lab import __version__, output
from ascend_lab.aoe.workers import Alarm
from ascend_lab.course.sandbox import Answer, Call, Limits, LostError, Session, opened
from ascend_lab.course.texts import shown
from ascend_lab.course.wire import Wire
from ascend_lab.errors import InputError
from ascend_lab.lab import checks
from ascend_lab.lab.checks.core import exercise_number
from ascend_lab.lab.checks.wall import EndedError
from ascend_lab.limits import toml_of

CHECKOUT = Path(__file__).resolve().parents[2] / "course"
PARTS = ("public", "hidden", "performance", "log")
REQUIRED = ("title", "version", "chapters", "hours", "functions", "points", "weights")


@dataclass(frozen=True, slots=True)
class Case:
    """One call of a hand-in: what is called, and what only the judge knows of it."""

    name: str
    call: Call
    known: Mapping[str, Any] = field(default_factory=dict)
    timed: bool = False
    """Whether its cost counts for the performance points."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What a judge found: for each property "" or what is wrong; costs in the task's unit."""

    properties: Mapping[str, str]
    cost: float | None = None
    base: float = 0.0
    target: float = 0.0
    optimum: float = 0.0
    wrong: str = ""
    """The first wrong value, or a cost that nothing can have: it caps the points (`Rules`)."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What an answer earns that is no better than the plain one, and what a wrong value leaves.

    `floor`: share of the points of properties at the plain answer's cost; it grows with the
    performance and is whole at the share `full_from` of the scale. `wrong`: the properties that
    compare values; the first case in which one fails leaves at most `wrong_share` of all points of
    its function, or of every function where it `spoils_all`.
    """

    floor: float = 1.0
    full_from: float = 1.0
    wrong: tuple[str, ...] = ()
    wrong_share: float = 1.0
    spoils_all: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """An assignment as loaded: its table, and the modules that draw cases and judge answers."""

    name: str
    folder: Path
    title: str
    version: str
    chapters: tuple[int, ...]
    hours: float
    functions: tuple[str, ...]
    points: Mapping[str, float]
    weights: Mapping[str, float]
    limits: Limits
    denied: tuple[str, ...]
    twist: Mapping[str, Any]
    late_per_day: float
    public: Any
    hidden: ModuleType | None
    hand_out: tuple[str, ...] = ()
    """Files of the folder that students are given as they are."""
    rules: Rules = field(default_factory=Rules)

    @property
    def exercises(self) -> tuple[str, ...]:
        """The exercises of the book that are graded, where it is those."""
        return tuple(self.twist.get("exercises", ()))

    def instance(self, student: str) -> dict[str, Any]:
        """Return the student's own instance; anybody who knows the name can draw it."""
        drawn: dict[str, Any] = self.public.instance(self._rng("", student, "instance"), self.twist)
        return drawn

    def cases(self, part: str, student: str, secret: str = "") -> list[Case]:
        """Return a part's cases: the public ones of the student, the hidden ones of the term.

        The public cases of what has no hidden ones are the term's, too. Each case knows a number
        of the term, from which `draw` makes what a judge feeds to an answer.
        """
        module = self.public if part == "public" else self.hidden
        if module is None:
            raise InputError(f"{self.name}: hidden.py", "none here", "grade where the course lies")
        key = "" if part == "public" and self.hidden else secret
        found: list[Case] = module.cases(self.instance(student), self._rng(key, student, part))
        numbers = self._rng(secret, student, part, "values").integers(1 << 62, size=len(found))
        return [
            replace(case, known={**case.known, "number": int(number)})
            for case, number in zip(found, numbers, strict=True)
        ]

    def judge(self, case: Case, answer: Any) -> Judged:
        """Judge plain data; a judge that fails over it is a property that does not hold."""
        judged: Judged = self.public.judge(case, answer)
        return judged

    def _rng(self, secret: str, *words: str) -> np.random.Generator:
        text = "\n".join((self.name, self.version, *words)).encode()
        digest = hmac.new(secret.encode(), text, hashlib.sha256).digest()
        return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def draw(case: Case, answer: Any) -> np.random.Generator:
    """Return the random numbers a judge draws for one answer of a case, the answer being there.

    They follow from the term's secret and from every character of the answer: whoever writes an
    answer cannot know what it will be fed, and the same answer is judged alike every time.
    """
    text = json.dumps([case.known.get("number", 0), answer], sort_keys=True)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def find(name: str, course: str | Path | None = None, hand_ins: str | Path | None = None) -> Path:
    """Return the folder of an assignment such as "A1": `course`, below it, or in the checkout.

    The folder one works in is no place to look, nor is what lies in `hand_ins`: a judge that came
    with a hand-in would run as the grader.
    """
    root = Path(course) if course else CHECKOUT
    below = sorted(root.glob("A*")) if root.is_dir() else []
    named = {
        folder: _name_of(folder / "assignment.toml")
        for folder in (root, *below)
        if (folder / "assignment.toml").is_file() and not _handed_in(folder, hand_ins)
    }
    found = [folder for folder, own in named.items() if own == name]
    if len(found) > 1:
        both = ", ".join(map(str, found))
        raise InputError(f"one assignment {name} in {root}", both, "move all but one elsewhere")
    if found:
        return found[0]
    there = f"among {', '.join(sorted(set(named.values())))}" if named else f"in {root}"
    remedy = "name the course's folder, which lies outside the folder of hand-ins"
    raise InputError(f"an assignment {there}", repr(name), remedy)


def _handed_in(folder: Path, hand_ins: str | Path | None) -> bool:
    """Whether a folder is, or lies in, what was handed in."""
    return hand_ins is not None and folder.resolve().is_relative_to(Path(hand_ins).resolve())


def _name_of(table: Path) -> str:
    return str(_table(table).get("name", ""))


def _table(path: Path) -> dict[str, Any]:
    return toml_of(path, "an assignment", InputError)


def load(
    name: str, course: str | Path | None = None, hand_ins: str | Path | None = None
) -> Assignment:
    """Load an assignment such as "A1", or exercises such as "1,5.2" (chapters and numbers).

    Nothing is loaded from the folder `hand_ins`. Raises `InputError` naming what is not there or
    what the table lacks.
    """
    if re.match(r"\d", name):
        return _exercises(name)
    folder = find(name, course, hand_ins)
    table = _table(folder / "assignment.toml")
    lacking = [key for key in REQUIRED if key not in table]
    if lacking:
        raise InputError(f"{folder / 'assignment.toml'}: {', '.join(lacking)}", "none", "add it")
    unknown = set(table["points"]) - set(PARTS)
    if unknown:
        raise InputError(f"points for {', '.join(PARTS)}", ", ".join(sorted(unknown)), "drop it")
    hidden = folder / "hidden.py"
    public = _module(folder / "public.py", name)
    return Assignment(
        name=name,
        folder=folder,
        title=table["title"],
        version=str(table["version"]),
        chapters=tuple(table["chapters"]),
        hours=table["hours"],
        functions=tuple(table["functions"]),
        points=table["points"],
        weights={**table["weights"], **_twist_of(table, public, folder).get("weights", {})},
        limits=Limits(**table.get("limits", {})),
        denied=tuple(table.get("denied", ())),
        twist=table.get("twist", {}),
        late_per_day=table.get("late_per_day", 0.0),
        public=public,
        hidden=_module(hidden, name) if hidden.is_file() else None,
        hand_out=_handed_out(folder, table.get("hand_out", [])),
        rules=_rules(table),
    )


def _handed_out(folder: Path, more: Any) -> tuple[str, ...]:
    """Return what of an assignment's folder students are given: a list, whatever lies there."""
    listed = isinstance(more, list) and all(isinstance(name, str) for name in more)
    for name in more if listed else ():
        if name in KEPT_BACK or Path(name).name != name or not (folder / name).is_file():
            needed = f"{folder / 'assignment.toml'}: hand_out, names of files beside it"
            raise InputError(needed, repr(name), f"never {', '.join(KEPT_BACK)}")
    if not listed:
        raise InputError(f"{folder / 'assignment.toml'}: hand_out, a list of names", repr(more))
    fixed = [name for name in HANDED_OUT if (folder / name).is_file()]
    return tuple(dict.fromkeys((*fixed, *more)))


def _rules(table: Mapping[str, Any]) -> Rules:
    """Return the rules of a table, which may leave out [scale] and [wrong]."""
    scale = table.get("scale", {})
    wrong = table.get("wrong", {})
    return Rules(
        floor=scale.get("floor", 1.0),
        full_from=scale.get("full_from", 1.0),
        wrong=tuple(wrong.get("properties", ())),
        wrong_share=wrong.get("share", 1.0),
        spoils_all=wrong.get("spoils", "function") == "all",
    )


def _twist_of(table: Mapping[str, Any], public: ModuleType, folder: Path) -> Mapping[str, Any]:
    """Return what `public.py` says of the term's twist; nothing where the term has none."""
    adds = table.get("twist", {}).get("adds", "")
    known: Mapping[str, Mapping[str, Any]] = getattr(public, "TWISTS", {})
    if adds and adds not in known:
        needed = f"{folder / 'assignment.toml'}: a twist among {', '.join(known) or 'none'}"
        raise InputError(needed, repr(adds), "name one, or add it to TWISTS in public.py")
    return known.get(adds, {})


def _module(path: Path, name: str) -> ModuleType:
    """Import one file of the course; `hidden.py` may import `public` as a sibling."""
    spec = importlib.util.spec_from_file_location(f"course_{name}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: a Python file", "none", "restore the assignment's folder")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


HANDED_OUT = ("README.md", "assignment.toml", "public.py")
NO_TWIST = "**This term adds** nothing."
"""The line of a README in whose place the hand-out says what the term's twist is."""
KEPT_BACK = ("hidden.py", "start.py", "instance.json", "start.ipynb", "log.md")
"""Never handed out as it is: `start` makes these, or nobody gets them."""
STUDENT = re.compile(r"[\w.@+-]{1,80}")


def start(task: Assignment, student: str, out: Path) -> list[str]:
    """Write the hand-out of one student into the folder `out`; return the names of its files.

    What is there already is never written over.
    """
    if not STUDENT.fullmatch(student):
        raise InputError("a student's name of letters, digits and . _ @ + -", repr(student[:40]))
    source = (task.folder / "start.py").read_text("utf-8")
    instance = {"student": student, "assignment": task.name, **task.instance(student)}
    texts = {
        "start.py": source,
        "start.ipynb": json.dumps(notebook_of(source), indent=1) + "\n",
        "instance.json": json.dumps(instance, indent=1, sort_keys=True) + "\n",
        "log.md": _log_form(task),
        **{name: text for name, text in instance.items() if name.endswith(".toml")},
    }
    files = {name: text.encode() for name, text in texts.items()}
    for name in task.hand_out:
        files[name] = (task.folder / name).read_bytes()
    twists = getattr(task.public, "TWISTS", {})
    says = twists.get(task.twist.get("adds", ""), {}).get("says", "")
    if says and "README.md" in files:
        told = files["README.md"].decode().replace(NO_TWIST, f"**This term adds** {says}")
        files["README.md"] = told.encode()
    there = [out / name for name in sorted(files) if (out / name).exists()]
    if there or (out.exists() and not out.is_dir()):
        got = f"{there[0]}, which may be your work" if there else f"{out}, which is a file"
        remedy = "nothing was written: name a new folder for the output"
        raise InputError(f"a folder without {', '.join(sorted(files))}", got, remedy)
    output.usable_folder(out)
    for name, content in files.items():
        output.write_whole(out / name, content)
    return sorted(files)


def notebook_of(source: str) -> dict[str, Any]:
    """Return a script in cells `# %%` as a notebook: `# %% [markdown]` cells lose their `# `."""
    cells: list[dict[str, Any]] = []
    for number, chunk in enumerate(re.split(r"^# %%", source, flags=re.MULTILINE)):
        head, _, body = chunk.partition("\n") if number else ("", "", chunk)
        text = body.strip("\n")
        if not text:
            continue
        cell: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}}
        if "[markdown]" in head:
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
            cell |= {"cell_type": "markdown", "source": text}
        else:
            cell |= {"cell_type": "code", "source": text, "outputs": [], "execution_count": None}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _log_form(task: Assignment) -> str:
    step = "\n".join(
        f"- {field}: "
        for field in (
            "what I changed",
            "what I expected, and why",
            "what the check said",
            "what I conclude",
            "what I do next",
        )
    )
    return (
        f"# Work log, {task.name} {task.title}\n\n## Step 1\n\n{step}\n\n"
        "## Why I stopped\n\n\n## Tools I used, language models included\n\n"
    )


# -- the book's exercises -------------------------------------------------------------------------
NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
NOT_BY_MACHINE = {"ex_16_4": "its memory is measured where it runs"}
"""Exercises whose checks look at more than what a function takes and gives."""
LIMITS = Limits(start_s=60.0, memory_bytes=1 << 30, answer_bytes=16 << 20)
OPEN = ("chapter11_12", "chapter19_20", "chapter21_22", "chapter23")
"""Checks whose pages or figures use something from their modules."""
DENIED = tuple(
    sorted({f"{checks.__name__}.{home}" for home in checks.HOMES.values() if home not in OPEN})
)
"""The other checks, next to which answers stand; the book has them, too."""
VERDICT_S = 60.0
"""What one check may take, whatever it was answered."""


def _exercises(name: str) -> Assignment:
    exercises = [one for one in chosen(name) if one not in NOT_BY_MACHINE]
    left = [exercise_number(one) for one in chosen(name) if one in NOT_BY_MACHINE]
    title = "exercises of the book" + f", not graded by machine: {', '.join(left)}" * bool(left)
    if not exercises:
        raise InputError(f"exercises {name}", title, "read them")
    return Assignment(
        name=name,
        folder=NOTEBOOKS,
        title=title,
        version=__version__,
        chapters=tuple(sorted({int(one[3:5]) for one in exercises})),
        hours=0,
        functions=tuple(dict.fromkeys(n for one in exercises for n in names_of(one))),
        points={"public": len(exercises)},
        weights={"check": 1},
        limits=LIMITS,
        denied=DENIED,
        twist={"exercises": exercises},
        late_per_day=0.0,
        public=CHECKED,
        hidden=None,
    )


def chosen(words: str) -> list[str]:
    """Return the exercises that "1,5.2,14a" names, in the book's order."""
    known = [name.removeprefix("check_") for name in checks.check_names()]
    found: set[str] = set()
    for word in words.split(","):
        number = re.fullmatch(r"0*(\d+[a-z]?)(?:\.(\d+))?", word.strip())
        some = {
            one
            for one in known
            if number
            and number[1] == exercise_number(one).split(".")[0]
            and number[2] in (None, exercise_number(one).split(".")[1])
        }
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


def _cases(instance: Mapping[str, Any], rng: np.random.Generator) -> list[Case]:
    """Return a case an exercise: its check under a seed of its own."""
    return [
        Case(exercise_number(one), Call(one, {"seed": int(rng.integers(1 << 31))}))
        for one in instance["exercises"]
    ]


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
            names = names_of(call.function)
            seed = call.arguments["seed"]
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
    try:
        with Alarm(VERDICT_S, lambda: EndedError(f"its check took more than {VERDICT_S:g} s")):
            result = getattr(checks, f"check_{exercise}")(answer, seed=seed)
    except (Exception, EndedError) as error:  # what came back was more than a check can bear
        return shown(f"no answer that can be checked ({type(error).__name__}: {error})")
    remark = f"; {session.remark}" if session.remark and "no function" in result.message else ""
    return "" if result.passed else shown(result.message) + remark


def _ask(session: Session, wire: Wire, names: str, *args: Any, **named: Any) -> Any:
    """Call the function of the far side; how its process ended is no error that a check expects."""
    session.begin(session.limits.case_s, session.what)
    try:
        return wire.ask(0, names, args, named)
    except LostError as error:
        raise EndedError(str(error)) from error


CHECKED = SimpleNamespace(
    instance=lambda rng, twist: dict(twist),
    cases=_cases,
    judge=lambda case, answer: Judged({"check": str(answer)}),
    answers_of=answers_of,
)
"""What a `public.py` has: every student has the same exercises, judged by what the check said."""


def read_secret(path: str | Path | None) -> str:
    """Return the term's secret from a TOML file with the line secret = "..."."""
    if path is None:
        return ""
    table = toml_of(path, "a file with a secret", InputError)
    secret = table.get("secret")
    if not isinstance(secret, str) or len(secret) < 8:
        raise InputError(f"{path}: secret of 8 characters or more", repr(secret), "write one")
    return secret
