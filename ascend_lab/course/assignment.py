"""Loads assignments with their settings, cases and judges, and writes the files for students.

The folder of an assignment holds

    assignment.toml   title, version, chapters, hours, functions, points, weights, limits, twist
    public.py         instance(rng, twist), cases(instance, rng), judge(case, answer), chart(...)
    hidden.py         cases(instance, rng): never handed out
    start.py          the stub that students fill in, in cells `# %%`; README.md, the task

A case calls one function with plain data: numbers, texts, lists and tables of these. The judge
(the function `judge`) tells for each property whether it holds, and compares the cost of the
answer with those of a plain solution and of a certified optimum. A twist is a change of the task
that an instructor chooses for a term.

A student gets the task, the public cases, `start.py` as a script and as a notebook, an instance
with sizes drawn for this student, and the files that `hand_out` in the table lists. No other file
of the folder is handed out.

The book's exercises form an assignment, too: `load("1,5.2")`. Its cases are the exercises, and its
only property is that the check of the notebook passes. The check runs in this process, but instead
of the student's function it calls a stand-in that asks the student's process (see `wire`). So
nothing that a hand-in changes in the package or in NumPy can reach the check.
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
    """One call of a function of a hand-in; `known` holds data that only the judge sees."""

    name: str
    call: Call
    known: Mapping[str, Any] = field(default_factory=dict)
    timed: bool = False
    """Whether its cost counts for the performance points."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A judgement: for each property "" or its fault, and costs in units such as cycles.

    `base` is the cost of the plain solution, `target` the one that earns all points.
    """

    properties: Mapping[str, str]
    cost: float | None = None
    base: float = 0.0
    target: float = 0.0
    optimum: float = 0.0
    wrong: str = ""
    """The first wrong value, or a cost below the optimum: it caps the points (`Rules`)."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How points fall for slow answers and for wrong values.

    An answer at the cost of the plain one earns the share `floor` of the points for properties. The
    share grows with the performance, and is 1 from the share `full_from` of the performance on.
    `wrong` are the properties that compare values. Once one of them fails, its function can earn at
    most `wrong_share` of its points; with `spoils_all` this holds for all functions.
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
    """Files of the folder that students get unchanged."""
    rules: Rules = field(default_factory=Rules)

    @property
    def exercises(self) -> tuple[str, ...]:
        """Return the exercises of the book that are graded; empty for an assignment of a folder."""
        return tuple(self.twist.get("exercises", ()))

    def instance(self, student: str) -> dict[str, Any]:
        """Return the student's instance, which anybody who knows the name can draw again."""
        drawn: dict[str, Any] = self.public.instance(self._rng("", student, "instance"), self.twist)
        return drawn

    def cases(self, part: str, student: str, secret: str = "") -> list[Case]:
        """Return a part's cases: public ones depend on the student, hidden ones on the term, too.

        An assignment without hidden cases draws its public ones from the term's secret, too. Each
        case has a secret number, from which `draw` makes the inputs of a judge.
        """
        module = self.public if part == "public" else self.hidden
        if module is None:
            raise InputError(f"{self.name}: hidden.py", "none here", "grade where the course lies")
        key = "" if part == "public" and self.hidden else secret
        cases: list[Case] = module.cases(self.instance(student), self._rng(key, student, part))
        numbers = self._rng(secret, student, part, "values").integers(1 << 62, size=len(cases))
        return [
            replace(case, known={**case.known, "number": int(number)})
            for case, number in zip(cases, numbers, strict=True)
        ]

    def judge(self, case: Case, answer: Any) -> Judged:
        """Judge the plain data that a function returned."""
        judged: Judged = self.public.judge(case, answer)
        return judged

    def _rng(self, secret: str, *words: str) -> np.random.Generator:
        """Return random numbers that depend on the secret, the assignment and some words."""
        text = "\n".join((self.name, self.version, *words)).encode()
        digest = hmac.new(secret.encode(), text, hashlib.sha256).digest()
        return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def draw(case: Case, answer: Any) -> np.random.Generator:
    """Return the random numbers with which a judge tests one answer of a case.

    They depend on the term's secret and on every character of the answer: nobody can write an
    answer that fits them, and the same answer is judged the same way every time.
    """
    text = json.dumps([case.known.get("number", 0), answer], sort_keys=True)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def find(name: str, course: str | Path | None = None, hand_ins: str | Path | None = None) -> Path:
    """Return the folder of an assignment such as "A1".

    It is `course` or a folder in it; the default is the course of the git checkout. Neither the
    working directory nor `hand_ins` is searched: a judge that came with a hand-in would run as the
    grader.
    """
    root = Path(course) if course else CHECKOUT
    subfolders = sorted(root.glob("A*")) if root.is_dir() else []
    names = {
        folder: _name_of(folder / "assignment.toml")
        for folder in (root, *subfolders)
        if (folder / "assignment.toml").is_file() and not _handed_in(folder, hand_ins)
    }
    matches = [folder for folder, folder_name in names.items() if folder_name == name]
    if len(matches) > 1:
        got = ", ".join(map(str, matches))
        raise InputError(f"one assignment {name} in {root}", got, "move all but one elsewhere")
    if matches:
        return matches[0]
    choices = f"among {', '.join(sorted(set(names.values())))}" if names else f"in {root}"
    remedy = "name the course's folder, which lies outside the folder of hand-ins"
    raise InputError(f"an assignment {choices}", repr(name), remedy)


def _handed_in(folder: Path, hand_ins: str | Path | None) -> bool:
    """Tell whether a folder is the folder of hand-ins or lies in it."""
    return hand_ins is not None and folder.resolve().is_relative_to(Path(hand_ins).resolve())


def _name_of(table: Path) -> str:
    return str(_table(table).get("name", ""))


def _table(path: Path) -> dict[str, Any]:
    return toml_of(path, "an assignment", InputError)


def load(
    name: str, course: str | Path | None = None, hand_ins: str | Path | None = None
) -> Assignment:
    """Load an assignment such as "A1", or exercises such as "1,5.2" (chapters and numbers).

    Nothing is loaded from the folder `hand_ins`. Raises `InputError` for an unknown name and for
    keys that the table lacks.
    """
    if re.match(r"\d", name):
        return _exercises(name)
    folder = find(name, course, hand_ins)
    table = _table(folder / "assignment.toml")
    missing = [key for key in REQUIRED if key not in table]
    if missing:
        raise InputError(f"{folder / 'assignment.toml'}: {', '.join(missing)}", "none", "add it")
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


def _handed_out(folder: Path, extra: Any) -> tuple[str, ...]:
    """Return the files that students get: the fixed ones, and `hand_out` of the table, checked."""
    is_list = isinstance(extra, list) and all(isinstance(name, str) for name in extra)
    for name in extra if is_list else ():
        if name in KEPT_BACK or Path(name).name != name or not (folder / name).is_file():
            needed = f"{folder / 'assignment.toml'}: hand_out, names of files beside it"
            raise InputError(needed, repr(name), f"never {', '.join(KEPT_BACK)}")
    if not is_list:
        raise InputError(f"{folder / 'assignment.toml'}: hand_out, a list of names", repr(extra))
    fixed = [name for name in HANDED_OUT if (folder / name).is_file()]
    return tuple(dict.fromkeys((*fixed, *extra)))


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
    """Return the description of the term's twist in `public.py`; {} if the term has none."""
    adds = table.get("twist", {}).get("adds", "")
    twists: Mapping[str, Mapping[str, Any]] = getattr(public, "TWISTS", {})
    if adds and adds not in twists:
        needed = f"{folder / 'assignment.toml'}: a twist among {', '.join(twists) or 'none'}"
        raise InputError(needed, repr(adds), "name one, or add it to TWISTS in public.py")
    return twists.get(adds, {})


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
"""The line of a README that the hand-out replaces by the description of the term's twist."""
KEPT_BACK = ("hidden.py", "start.py", "instance.json", "start.ipynb", "log.md")
"""Files never copied to students; `start` writes its own versions of them, except `hidden.py`."""
STUDENT = re.compile(r"[\w.@+-]{1,80}")


def start(task: Assignment, student: str, out: Path) -> list[str]:
    """Write the hand-out of one student into the folder `out`; return the names of its files.

    Raises `InputError` instead of overwriting a file.
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
    description = twists.get(task.twist.get("adds", ""), {}).get("says", "")
    if description and "README.md" in files:
        readme = files["README.md"].decode()
        files["README.md"] = readme.replace(NO_TWIST, f"**This term adds** {description}").encode()
    existing = [out / name for name in sorted(files) if (out / name).exists()]
    if existing or (out.exists() and not out.is_dir()):
        got = f"{existing[0]}, which may be your work" if existing else f"{out}, which is a file"
        remedy = "nothing was written: name a new folder for the output"
        raise InputError(f"a folder without {', '.join(sorted(files))}", got, remedy)
    output.usable_folder(out)
    for name, content in files.items():
        output.write_whole(out / name, content)
    return sorted(files)


def notebook_of(source: str) -> dict[str, Any]:
    """Return a script with cells `# %%` as a notebook; `# %% [markdown]` cells lose their `# `."""
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
    """Return the empty work log that a student fills in."""
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
"""Exercises whose checks look at more than the arguments and results of a function."""
LIMITS = Limits(start_s=60.0, memory_bytes=1 << 30, answer_bytes=16 << 20)
OPEN = ("chapter11_12", "chapter19_20", "chapter21_22", "chapter23")
"""Modules of checks that hand-ins may import, because pages or figures import them."""
DENIED = tuple(
    sorted({f"{checks.__name__}.{home}" for home in checks.HOMES.values() if home not in OPEN})
)
"""All other modules of checks; hand-ins may not import them: they contain reference answers."""
VERDICT_S = 60.0
"""Time limit of one check."""


def _exercises(name: str) -> Assignment:
    """Return the exercises of the book that `name` lists, as an assignment."""
    exercises = [exercise for exercise in chosen(name) if exercise not in NOT_BY_MACHINE]
    ungraded = [
        exercise_number(exercise) for exercise in chosen(name) if exercise in NOT_BY_MACHINE
    ]
    title = "exercises of the book"
    if ungraded:
        title += f", not graded by machine: {', '.join(ungraded)}"
    if not exercises:
        raise InputError(f"exercises {name}", title, "read them")
    return Assignment(
        name=name,
        folder=NOTEBOOKS,
        title=title,
        version=__version__,
        chapters=tuple(sorted({int(exercise[3:5]) for exercise in exercises})),
        hours=0,
        functions=tuple(dict.fromkeys(n for exercise in exercises for n in names_of(exercise))),
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
    """Return the exercises that a text such as "1,5.2,14a" names, in the book's order."""
    all_exercises = [name.removeprefix("check_") for name in checks.check_names()]
    chosen_exercises: set[str] = set()
    for word in words.split(","):
        number = re.fullmatch(r"0*(\d+[a-z]?)(?:\.(\d+))?", word.strip())
        # "5.2" is one exercise, "5" all of chapter 5.
        matches = {
            exercise
            for exercise in all_exercises
            if number
            and number[1] == exercise_number(exercise).split(".")[0]
            and number[2] in (None, exercise_number(exercise).split(".")[1])
        }
        if not matches:
            remedy = "name chapters and coded exercises: 1,5.2,14a"
            raise InputError(f"exercises {words}", f"none called {word.strip()!r}", remedy)
        chosen_exercises |= matches
    return [exercise for exercise in all_exercises if exercise in chosen_exercises]


def names_of(exercise: str) -> tuple[str, ...]:
    """Return the names that a student's function may have: the exercise's or the page's."""
    page_name = _page_names(exercise[3:].rpartition("_")[0]).get(exercise)
    return (exercise, page_name) if page_name else (exercise,)


@cache
def _page_names(chapter: str) -> Mapping[str, str]:
    """Return the name of the function that each exercise asks for; {} without the notebooks."""
    functions: dict[str, str] = {}
    for page in NOTEBOOKS.glob(f"{chapter}_*.ipynb"):
        functions |= dict(re.findall(r"check_(ex_\w+)\((\w+)\)", page.read_text("utf-8")))
    return functions


def _cases(instance: Mapping[str, Any], rng: np.random.Generator) -> list[Case]:
    """Return one case per exercise: its check with a random seed."""
    return [
        Case(exercise_number(exercise), Call(exercise, {"seed": int(rng.integers(1 << 31))}))
        for exercise in instance["exercises"]
    ]


def answers_of(
    source: str,
    calls: Sequence[Call],
    limits: Limits,
    denied: Sequence[str] = (),
    file: str = "handin.py",
    report_wait: Callable[[str], None] | None = None,
) -> list[Answer]:
    """Check the exercises of a hand-in; an answer is the message of the check, "" if it passes.

    One process answers all calls. It is started again after a check that left a call unanswered.
    """
    answers: list[Answer] = []
    session: Session | None = None
    try:
        for call in calls:
            if session is not None and not session.rests():
                session.close()
                session = None
            if session is None:
                session = Session(source, file, limits, denied, report_wait, lenient=True)
                if wrong := opened(session):
                    return [Answer(error=wrong)] * len(calls)
            names = names_of(call.function)
            seed = call.arguments["seed"]
            answers.append(Answer(verdict(session, call.function, names, seed)))
    finally:
        if session is not None:
            session.close()
    return answers


def verdict(session: Session, exercise: str, names: Sequence[str], seed: int) -> str:
    """Return the message of a check of the function with one of these names, "" if it passes."""
    wire = Wire(session.send, session.hear)
    session.activity = f"exercise {exercise_number(exercise)}"
    answer = partial(_ask, session, wire, "|".join(names))
    try:
        with Alarm(VERDICT_S, lambda: EndedError(f"its check took more than {VERDICT_S:g} s")):
            result = getattr(checks, f"check_{exercise}")(answer, seed=seed)
    except (Exception, EndedError) as error:  # a check may fail on strange answers
        return shown(f"no answer that can be checked ({type(error).__name__}: {error})")
    remark = f"; {session.remark}" if session.remark and "no function" in result.message else ""
    return "" if result.passed else shown(result.message) + remark


def _ask(session: Session, wire: Wire, names: str, *args: Any, **named: Any) -> Any:
    """Call the function in the student's process.

    If that process ends, raise `EndedError`, which no check mistakes for an error of the function.
    """
    session.begin(session.limits.case_s, session.activity)
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
"""What `public.py` defines for an assignment, here for exercises: the same for all students."""


def read_secret(path: str | Path | None) -> str:
    """Return the term's secret from a TOML file with the line secret = "..."."""
    if path is None:
        return ""
    table = toml_of(path, "a file with a secret", InputError)
    secret = table.get("secret")
    if not isinstance(secret, str) or len(secret) < 8:
        raise InputError(f"{path}: secret of 8 characters or more", repr(secret), "write one")
    return secret
