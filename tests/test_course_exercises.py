"""The book's exercises behind the wall: right answers pass, kept mistakes fail, nothing escapes."""

import csv
import io
import json
import re
import sys
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from command_lines import refused, run
from notebook_pages import Page, read_code_cells
from test_exercises import definitions

from ascend_lab.compiler.draft import Draft
from ascend_lab.course import assignment as book
from ascend_lab.course.sandbox import Answer, Call, Session
from ascend_lab.course.wire import StandIn, Wire
from ascend_lab.errors import InputError, ShapeError
from ascend_lab.lab import checks
from ascend_lab.lab.checks.chapter14_14a import chain_graph
from ascend_lab.lab.checks.grading import SOLUTION, needed_cells
from ascend_lab.machine.isa.memory import Affine

HERE = Path(__file__).parent
CODED = [name.removeprefix("check_") for name in checks.check_names()]
TRAVEL = [name for name in CODED if name not in book.NOT_BY_MACHINE]
OF_EACH_KIND = ("ex_01_2", "ex_02_2", "ex_04_3", "ex_05_2", "ex_08_4", "ex_13_3", "ex_14_2",
                "ex_14_4", "ex_15_4", "ex_24_3")  # fmt: skip
"""Dataclasses, programs, callbacks, errors, arrays, builders, drafts, what may not be written,
objects that are called; generators, of many calls, in a full run and in a test of the wire."""


@cache
def answer_to(exercise):
    """Return the cells that the published solution needs, and the solution."""
    (path,) = (HERE.parent / "notebooks").glob(f"{exercise[3:].rpartition('_')[0]}_*.ipynb")
    cells = read_code_cells(path)
    own, _ = Page(cells)._own(exercise, SOLUTION)
    above = "\n\n".join(cell.source for cell in needed_cells(cells, own))
    return above, without_check("\n\n".join(cell.source for cell in own))


def without_check(source):
    """Return a solution without what it prints and without the call of its check."""
    return re.sub(r"(?m)^.*check_ex_.*$", "", definitions(source))


@cache
def mistakes_in(exercise):
    """Return (solution with a kept mistake, the mistake)."""
    (path,) = (HERE.parent / "notebooks").glob(f"{exercise[3:].rpartition('_')[0]}_*.ipynb")
    own, _ = Page(read_code_cells(path))._own(exercise, SOLUTION)
    source = "\n\n".join(cell.source for cell in own)
    kept = tomllib.loads((HERE / f"wrong/{path.stem[: path.stem.index('_')]}.toml").read_text())
    edits = kept[exercise]["wrong"]
    return [(without_check(source.replace(old, new, 1)), said) for old, new, said, *_ in edits]


def source_with(exercise, answers):
    """Return a hand-in whose functions answer_0, answer_1, ... are these answers'."""
    above, _ = answer_to(exercise)
    name = book.names_of(exercise)[-1]
    lines = [above, "def _answer(text):\n    names = dict(globals())\n    exec(text, names)",
             f"    return names[{name!r}]"]  # fmt: skip
    chunks = ["\n".join(lines[1:])]
    chunks += [f"answer_{i} = _answer({text!r})" for i, text in enumerate(answers)]
    return above + "\n\n" + "\n".join(chunks)


@pytest.fixture
def verdicts():
    """Return a function that says what an exercise's check says to each of some answers."""
    opened = []

    def try_all(exercise, answers, seed=20):
        for number in range(len(answers)):
            if opened and not opened[-1].rests():
                opened.pop().close()
            if not opened:
                source = source_with(exercise, answers)
                opened.append(Session(source, "w.py", book.LIMITS, book.DENIED, lenient=True))
                assert opened[-1].open() == ""
            yield book.verdict(opened[-1], exercise, [f"answer_{number}"], seed)

    yield try_all
    for session in opened:
        session.close()


def test_nearly_all_exercises_are_graded_by_machine():
    assert set(book.NOT_BY_MACHINE) <= set(CODED)
    assert len(TRAVEL) / len(CODED) > 0.9


def try_both_sides(exercise, verdicts, most=None):
    wrong = mistakes_in(exercise)[:most]
    answers = [answer_to(exercise)[1], *(source for source, _ in wrong)]
    right, *said = verdicts(exercise, answers)
    assert right == ""
    passed = [mistake for (_, mistake), text in zip(wrong, said, strict=True) if not text]
    assert not passed
    assert not [text for text in said if "sent something" in text or "no function" in text]


@pytest.mark.parametrize("exercise", OF_EACH_KIND)
def test_solutions_pass_and_mistakes_fail_through_the_wall(exercise, verdicts):
    try_both_sides(exercise, verdicts, most=2)


@pytest.mark.full
@pytest.mark.parametrize("exercise", TRAVEL)
def test_every_solution_passes_and_every_mistake_fails(exercise, verdicts):
    try_both_sides(exercise, verdicts)


# -- what a hand-in may not do ---------------------------------------------------------------------
ATTACKS = {
    "hangs": "def groups(*given):\n    while True: pass",
    "exits": "import os\ndef groups(*given): os._exit(0)",
    "exits nicely": "def groups(*given): raise SystemExit(0)",
    "patches the check": (
        "from ascend_lab.lab.checks import core\ncore.check_property = lambda *a, **k: 1\n"
        "core.CheckResult.passed = True\ndef groups(*given): return []"
    ),
    "equals everything": (
        "class E(set):\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 0\n"
        "def groups(*given): return [E()]"
    ),
    "a class of its own": (
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Graph:\n    n: int = 1\n"
        "def groups(*given): return Graph()"
    ),
    "says that it passed": (
        "import os\nfor end in range(3, 20):\n    try: os.write(end, b'{\"value\": [], "
        "\"changed\": {}}\\n' * 99)\n    except OSError: pass\ndef groups(*given): return []"
    ),
    "sends a pickle": (
        "import json, os\nvalue = {'!': 'trusted', 'n': -9, "
        "'v': 'gASVHwAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjARleGl0lIWUUpQu'}\n"
        "line = json.dumps({'value': value, 'changed': {}}).encode() + b'\\n'\n"
        "def groups(*given):\n    for end in range(3, 20):\n        try: os.write(end, line)\n"
        "        except OSError: pass\n    return []"
    ),
    "opens what is closed": "from ascend_lab.lab.checks.chapter14b import groups",
    "no Python": "def groups(*given: return []",
}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="other systems limit less")
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_costs_only_its_own_exercise(attack):
    _, right = answer_to("ex_03_4")  # which reads nothing of the cells above it
    source = f"{ATTACKS[attack]}\n\n{right}"
    calls = [Call(name, {"seed": 3}) for name in ("ex_14b_4", "ex_03_4")]
    bad, good = book.answers_of(source, calls, replace(book.LIMITS, case_s=1.0), book.DENIED)
    assert bad.value != ""
    kept = ("says that it passed", "no Python")  # the whole file is of no use
    assert (good == Answer("")) is (attack not in kept), good


def linked(roots):
    """Return the near and the far side of a wire in one process."""
    lines = [], []

    def hear(at):
        if not lines[at]:
            (far if at == 0 else near).serve(json.loads(lines[1 - at].pop(0)))
        return json.loads(lines[at].pop(0))

    near = Wire(lambda line: lines[1].append(json.dumps(line)), lambda: hear(0))
    far = Wire(lambda line: lines[0].append(json.dumps(line)), lambda: hear(1), roots)
    return near, far


@pytest.mark.parametrize(
    "value",
    [
        [1, -2.5, "text", None, True, (1, (2,)), {3, 4}, frozenset("ab"), b"\x00\xff", 2 + 1j],
        {"a": 1, 2: [3], (4, 5): {}},
        [float("inf"), float("-inf"), 1e308, 0.1 + 0.2],
        np.float32(1.5),
        Affine(3),
    ],
)
def test_values_travel_and_return(value):
    near, _ = linked({"same": lambda value: value})
    back = near.ask(0, "same", (value,))
    assert back == value
    assert type(back) is type(value)


def test_arrays_keep_their_numbers_and_objects_their_identity():
    near, _ = linked({"same": lambda value: value, "pair": lambda a: (a, Affine(7), a)})
    for array in (np.arange(6).reshape(2, 3), np.float16([1, 2]), np.array(True), np.zeros((0, 4))):
        array.flags.writeable = False
        back = near.ask(0, "same", (array,))
        assert (back.dtype, back.shape, back.tobytes()) == (
            array.dtype, array.shape, array.tobytes())  # fmt: skip
        assert not back.flags.writeable
    one = Affine(5)
    first, made, again = near.ask(0, "pair", (one,))
    assert first is again is one
    assert made == Affine(7)


def test_what_a_function_changes_is_changed_here():
    def spoil(values, array, table):
        values.append(1)
        array[0] = 9
        table.clear()

    near, _ = linked({"spoil": spoil})
    values = [5]
    array = np.zeros(2)
    table = {"a": 1}
    near.ask(0, "spoil", (values, array, table))
    assert (values, array.tolist(), table) == ([5, 1], [9, 0], {})


def test_functions_and_generators_are_called_from_afar():
    def count(to, tell):
        for i in range(to):
            got = yield tell(i)
            if got:
                return "over"

    near, _ = linked({"count": count})
    steps = near.ask(0, "count", (9, lambda i: 10 * i))
    assert isinstance(steps, StandIn)
    assert [next(steps), next(steps), steps.send(None)] == [0, 10, 20]
    with pytest.raises(StopIteration, match="over"):
        steps.send("enough")


def test_errors_keep_their_kind():
    def fail(how):
        own = type("Own", (Exception,), {})
        raise [ShapeError("two shapes", "one", "add one"), KeyError("k"), own("mine"),
               KeyboardInterrupt()][how]  # fmt: skip

    near, _ = linked({"fail": fail})
    for how, kind, text in ((0, ShapeError, "two shapes; got one; add one"), (1, KeyError, "'k'")):
        with pytest.raises(kind) as caught:
            near.ask(0, "fail", (how,))
        assert str(caught.value) == text
    for how, name in ((2, "Own"), (3, "KeyboardInterrupt")):
        with pytest.raises(Exception, match=r"mine|^$") as caught:
            near.ask(0, "fail", (how,))
        assert type(caught.value).__name__ == name


AFFINE = "ascend_lab.machine.isa.memory:Affine"


@pytest.mark.parametrize(
    "said",
    [
        {"!": "trusted", "v": "gASVHwAAAAAAAAA=", "n": -1},
        {"!": "data", "c": AFFINE, "v": {"const": 1, "more": 2}, "n": -1},
        {"!": "data", "c": AFFINE, "v": {}, "n": 1},
        {"!": "data", "c": "ascend_lab.output:write_whole", "v": {"path": "x"}, "n": -1},
        {"!": "data", "c": "subprocess:Popen", "v": {"args": "true"}, "n": -1},
        {"!": "data", "c": "ascend_lab.lab.checks.core:CheckResult", "v": {}, "n": -1},
        {"!": "data", "c": "ascend_lab.course.wire:Wire", "v": {"send": 1, "hear": 2}, "n": -1},
        {"!": "known", "n": 99},
        {"!": "other", "n": 1},
        {"!": "array", "t": "O", "v": "AAAAAAAAAAA=", "s": [1], "w": True},
        {"!": "array", "t": "<f8", "v": "AAAAAAAAAAA=", "s": [1000000000], "w": True},
        {"!": "eval", "v": "1"},
        {"v": 1},
    ],
)  # fmt: skip
def test_nothing_but_data_is_read(said):
    near, _ = linked({})
    before = dict(sys.modules)
    with pytest.raises((ValueError, TypeError, KeyError)):
        near.decode(said)
    assert dict(sys.modules) == before


def test_of_what_was_handed_over_only_the_public_part_can_be_reached():
    near, far = linked({})
    draft = Draft(chain_graph([1, 2], []))
    numbers = [near.encode(thing)["n"] for thing in (draft, len, iter([1]))]
    asked = [(numbers[0], "_release"), (numbers[0], "__class__"), (numbers[0], "__init__"),
             (numbers[1], "__self__"), (numbers[1], "__globals__"), (numbers[2], "gi_frame"),
             (numbers[2], "__reduce__"), (77, ""), (0, "len")]  # fmt: skip
    for on, name in asked:
        for args in (None, []):
            near.serve({"on": on, "name": name, "args": args, "named": {}})
            assert "error" in far.hear(), name


# -- the command line ------------------------------------------------------------------------------
def test_a_copy_of_a_chapter_is_checked_and_graded(tmp_path, capsys):
    page = next((HERE.parent / "notebooks").glob("11_*.ipynb"))
    whole = json.loads(page.read_text("utf-8"))
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "bob.ipynb").write_text(json.dumps(whole))  # stubs, solutions below them
    for cell in whole["cells"]:
        cell["metadata"].pop("tags", None)  # what was copied into cells of one's own
    (tmp_path / "w" / "ada.ipynb").write_text(json.dumps(whole))
    out = tmp_path / "out"
    words = ("course", "grade", "11.1,11.2,11.3", tmp_path / "w", "--out", out)
    told = run(capsys, *words)[1]
    table = (out / "grades.csv").read_text()
    rows = {row["id"]: row for row in csv.DictReader(io.StringIO(table))}
    assert (rows["ada"]["total"], rows["bob"]["total"]) == ("3.0", "0.0"), told
    assert "11.2: for " in (out / "students" / "bob.html").read_text()
    code, told, _ = run(capsys, *words, "--again")
    assert code == 0 and "was" not in told
    check = ("course", "check", "11.1")
    assert run(capsys, *check, tmp_path / "w" / "ada.ipynb")[0] == 0
    code, told, _ = run(capsys, *check, tmp_path / "w" / "bob.ipynb")
    assert code == 1 and re.search(r"^11\.1 +for ", told, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "99", "x.py"], "none called '99'"),
        (["check", "1.99", "x.py"], "none called '1.99'"),
        (["check", "1,,2", "x.py"], "none called ''"),
        (["check", "16.4", "x.py"], "not graded by machine: 16.4"),
        (["start", "1", "--student", "ada"], "start: an assignment such as A1"),
        (["pack", "1.2"], "pack: an assignment such as A1"),
    ],
)
def test_sets_that_mean_nothing_are_one_line(words, said, capsys):
    assert said in refused(capsys, "course", *words)


def test_a_set_names_its_exercises_once_in_the_book_s_order():
    task = book.load("05.2, 1.2,1")
    assert task.exercises[0] == "ex_01_1"
    assert task.exercises[-1] == "ex_05_2"
    assert len(set(task.exercises)) == len(task.exercises)
    assert book.load("16").title.endswith("not graded by machine: 16.4")
    one, other = (task.cases("public", "ada", secret) for secret in ("a secret", "another one"))
    assert one != other
    with pytest.raises(InputError):
        book.load("16.4")
