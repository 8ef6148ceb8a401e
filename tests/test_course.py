"""The five assignments from all sides, and what grading leaves behind."""

import csv
import io
import json
import re
import sys
import tomllib
import zipfile
from functools import cache
from pathlib import Path

import pytest
from command_lines import refused, run

from ascend_lab.course import grade, load, sandbox, start, write_report
from ascend_lab.course.assignment import notebook_of
from ascend_lab.course.grade import (
    Enrolled,
    cases_of,
    changes_since,
    mark,
    read_log,
    read_roster,
    try_cases,
)
from ascend_lab.course.handin import (
    HandIn,
    fingerprints,
    hand_ins,
    hints,
    likeness,
    source_of,
    student_of,
)
from ascend_lab.course.report import autograde, pack
from ascend_lab.errors import InputError
from bench.hostile import ATTACKS, GOOD

ROOT = Path(__file__).parent.parent
COURSE = ROOT / "course"
TOY = Path(__file__).parent / "course_toy"
NAMES = ("A1", "A2", "A3", "A4", "A5")
SECRET = "a secret of this test"


def mistakes():
    """Yield (assignment, kept mistake); of those that break the same property the first counts."""
    seen = set()
    for path in sorted(COURSE.glob("keys/*/wrong.toml")):
        name = path.parent.name[:2]
        for title, table in tomllib.loads(path.read_text("utf-8")).items():
            more = (name, table["fails"]) in seen
            yield pytest.param(name, title, marks=[pytest.mark.full] * more)
            seen.add((name, table["fails"]))


WRONG = list(mistakes())


@pytest.fixture(scope="module")
def toy():
    return load("A0", TOY)


@cache
def drawn(name):
    """Return an assignment and a student's cases; what its judge has proven of them stays."""
    task = load(name, COURSE)
    return task, cases_of(task, "carol", SECRET)


def tried(name, source):
    task, cases = drawn(name)
    return try_cases(task, source, cases)


def key_of(task, file="reference.py"):
    """Return a key of an assignment, with its edits for the term's twist if there is one."""
    path = COURSE / "keys" / task.folder.name / file
    source = path.read_text("utf-8")
    if adds := task.twist.get("adds"):
        twists = tomllib.loads(path.with_name("twist.toml").read_text("utf-8"))
        source = edited(source, twists[adds].get(path.stem, ()))
    return source


def edited(source, edits):
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    return source


# -- the assignments -------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_a_start_file_earns_nothing_and_the_reference_most(name):
    task, _ = drawn(name)
    assert set(task.points.values()) == {20, 25, 30}
    assert 4 <= task.hours <= 8
    begun = tried(name, (task.folder / "start.py").read_text())
    assert all(set(one.faults) == set(task.weights) for one in begun)
    done = tried(name, key_of(task))
    assert not [(one.case, one.faults) for one in done if one.faults]
    shares = [one.share() for one in done if one.timed]
    assert sum(shares) / len(shares) >= 0.8
    ratios = [(one.judged.cost or 0) / one.judged.optimum for one in done if one.timed]
    assert max(ratios) > 1.01, "the reference is not the optimum"
    assert min(ratios) >= 1, "nothing beats a certified optimum"


def with_mistake(name, title):
    """Return an answer with a kept mistake, and the property that must fail."""
    (path,) = COURSE.glob(f"keys/{name}_*/wrong.toml")
    table = tomllib.loads(path.read_text("utf-8"))[title]
    file = "greedy.py" if path.with_name("greedy.py").is_file() else "reference.py"
    return edited(key_of(load(name, COURSE), file), table["edits"]), table["fails"]


@pytest.mark.parametrize(("name", "title"), WRONG)
def test_a_wrong_answer_fails_in_the_part_it_should(name, title):
    source, fails = with_mistake(name, title)
    done = tried(name, source)
    if fails == "performance":
        shares = [one.share() for one in done if one.timed]
        assert not any(one.judged.wrong for one in done)
        assert sum(shares) / len(shares) < 0.75
    else:
        assert [one.case for one in done if fails in one.faults]


@pytest.mark.parametrize("name", NAMES)
def test_at_least_six_wrong_answers(name):
    assert sum(one.values[0] == name for one in WRONG) >= 6


@pytest.mark.parametrize("name", NAMES)
def test_students_have_instances_of_their_own(name):
    task, _ = drawn(name)
    given = [json.dumps([[c.call.arguments, dict(c.call.files)]
                         for c in task.cases("public", f"s{i}")])
             for i in range(6)]  # fmt: skip
    assert len(set(given)) > 3
    assert task.cases("hidden", "s1", "one secret here") != task.cases(
        "hidden", "s1", "another one"
    )


def test_the_keys_are_nowhere_else(tmp_path):
    """A line of the keys longer than a phrase stands in no hand-out, wheel or page of the book."""
    given = "".join(path.read_text() for path in COURSE.glob("*/public.py"))
    lines = {
        line.strip()
        for path in COURSE.glob("keys/**/*.py")
        for line in path.read_text().splitlines()
        if len(line.strip()) > 60 and line.strip() not in given
    }
    assert len(lines) > 50
    for name in NAMES:
        start(load(name, COURSE), "ada", tmp_path / name)
    handed = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [
        path for path in handed if path.parent.name in ("wrong", "keys") or "hidden" in path.name
    ]
    package = [*(ROOT / "ascend_lab").rglob("*.py")]
    pages = [*(ROOT / "book").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    for path in (*handed, *package, *pages):
        text = path.read_text("utf-8")
        assert not [line for line in lines if line in text], path
    assert "course" not in (ROOT / "pyproject.toml").read_text().partition("packages.find")[2][:60]


# -- from a file to a mark -------------------------------------------------------------------------
def test_notebook_and_script_get_equal_marks(toy):
    other = GOOD.replace("total +=", "total -=")
    cells = ["%matplotlib inline\nimport os", "this is no Python", other,
             "OFFSET = 0", GOOD, "sums([1], 2)\nwhile True: pass"]  # fmt: skip
    document = notebook_of("\n".join(f"# %%\n{cell}" for cell in cells))
    for tags in ([], ["exercise"]):
        document["cells"][0]["metadata"]["tags"] = tags
        source = source_of("work.ipynb", json.dumps(document).encode(), toy.functions)
        got = mark(toy, HandIn("ada", "work.ipynb", source), Enrolled("ada"), SECRET)
        want = mark(toy, HandIn("ada", "work.py", GOOD), Enrolled("ada"), SECRET)
        assert got.points == want.points


@pytest.mark.parametrize(
    ("name", "student", "late"),
    [
        ("Ada Lovelace_12345_assignsubmission_file_", "Ada_Lovelace_12345", False),
        ("lovelaceada_LATE_4711_99_work.py", "lovelaceada_4711", True),
        ("lovelaceada_4711_99_work.py", "lovelaceada_4711", False),
        ("submission_17", "ada@example.org", False),
        ("ada.ipynb", "ada", False),
        ("s1234", "s1234", False),
    ],
)
def test_names_of_course_systems(name, student, late):
    assert student_of(name, {"submission_17": "ada@example.org"}) == (student, late)


def test_folders_zips_and_several_files(tmp_path):
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / "notes.py").write_text("x = 1")
    (tmp_path / "ada" / "mine.py").write_text(GOOD)
    (tmp_path / "ada" / "log.md").write_text("step 1")
    begun = "def sums(values, offset):\n    raise NotImplementedError\n"
    (tmp_path / "dan").mkdir()
    (tmp_path / "dan" / "start.py").write_text(begun)
    cells = notebook_of(f"# %%\n{GOOD.strip()}")
    (tmp_path / "dan" / "start.ipynb").write_text(json.dumps(cells))
    with zipfile.ZipFile(tmp_path / "bob.zip", "w") as archive:
        archive.writestr("deep/down/work.py", GOOD)
    (tmp_path / "submission_3").mkdir()
    (tmp_path / "submission_3" / "a.py").write_text(GOOD)
    text = "submission_3:\n  :submitters:\n  - :name: C\n    :email: c@example.org\n"
    (tmp_path / "submission_metadata.yml").write_text(text)
    found = {one.student: one for one in hand_ins(tmp_path, ["sums"])}
    assert set(found) == {"ada", "bob", "c@example.org", "dan"}
    assert found.pop("dan").file == "start.ipynb", "the one that is filled in"
    assert all(one.source == GOOD for one in found.values())
    assert found["ada"].log == "step 1"


def test_grading_twice_gives_the_same_bytes_and_regrading_says_why(tmp_path, toy):
    work = tmp_path / "work"
    work.mkdir()
    slow = GOOD.replace('"steps": 10', '"steps": 20')
    (work / "ada.py").write_text('PSEUDONYM = "Countess"\n' + slow)
    (work / "bob.py").write_text(slow.replace("total += value", "total += value + 0.0"))
    roster = tmp_path / "roster.csv"
    roster.write_text("id,name,late_minutes,log\nada,Ada,0,15\nbob,Bob,1500,\ncarol,Carol,,\n")
    both = []
    for name in ("one", "two"):
        marks = grade(toy, work, secret=SECRET, roster=read_roster(roster), jobs=1)
        write_report(toy, marks, tmp_path / name, SECRET)
        both.append({p.name: p.read_bytes() for p in (tmp_path / name).rglob("*") if p.is_file()})
    assert both[0] == both[1]
    rows = {row["id"]: row for row in csv.DictReader(io.StringIO(both[0]["grades.csv"].decode()))}
    assert rows["ada"]["total"] == "87.5"  # 30 + 25 + 25 ln 5 / ln 10 + 15
    assert (rows["bob"]["late"], rows["carol"]["total"]) == ("-7.3", "0.0")
    assert json.loads(both[0]["leaderboard.json"]) == [{"name": "Countess", "value": "2.0000"}]
    known, before = read_log(tmp_path / "one" / "log.jsonl")
    judge = toy.public.judge
    try:  # a judge that was mended: numbers that are whole pass as such
        toy.public.judge = lambda case, answer: judge(
            case, {**answer, "sums": [int(s) for s in answer["sums"]]}
        )
        again = grade(toy, work, secret=SECRET, roster=read_roster(roster), known_answers=known)
    finally:
        toy.public.judge = judge
    bob = next(m for m in again if m.student == "bob")
    assert bob.points["hidden"] == 25
    assert any("whole: now holds" in line for line in changes_since(before["bob"], bob))


def test_hidden_cases_stay_hidden(tmp_path, toy):
    bad = GOOD.replace("total += value", "total += value if len(values) < 9 else 1")
    got = mark(toy, HandIn("ada", "w.py", bad), Enrolled("ada"), SECRET)
    write_report(toy, [got], tmp_path, SECRET)
    page = (tmp_path / "students" / "ada.html").read_text()
    assert "right: fails in 1 of 2 hidden cases" in page
    assert "50 values" not in page
    assert "50 values" in (tmp_path / "index.html").read_text()


def test_gradescope_runs_the_zip(tmp_path, toy):
    data = pack(toy, SECRET)
    assert data == pack(toy, SECRET)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "source")
    assert {"setup.sh", "run_autograder", "course/A0_toy/hidden.py"} <= set(names)
    assert not [name for name in names if "keys/" in name or "wrong/" in name]
    (tmp_path / "submission").mkdir()
    (tmp_path / "submission" / "any.py").write_text(GOOD)
    day = "2026-11-22T10:00:00"
    told = {"created_at": day, "users": [{"email": "ada@example.org"}],
            "previous_submissions": [{"submission_time": day}] * 5}  # fmt: skip
    (tmp_path / "submission_metadata.json").write_text(json.dumps(told))
    autograde(tmp_path, "A0")
    made = json.loads((tmp_path / "results" / "results.json").read_text())
    assert made["score"] == 80
    assert {test["name"]: test["visibility"] for test in made["tests"]}["hidden"] != "visible"
    assert "not named" in next(t for t in made["tests"] if t["name"] == "hidden")["output"]


# -- alike -----------------------------------------------------------------------------------------
def test_a_renamed_copy_is_alike_and_other_code_is_not():
    one = (COURSE / "keys" / "A4_memory" / "reference.py").read_text()
    other = (COURSE / "keys" / "A3_fusion" / "reference.py").read_text()
    renamed = re.sub(r"\b(lives|where|tops|rest|order)\b", r"my_\1", one)
    assert likeness(fingerprints(one), fingerprints(renamed), frozenset()) == 1
    assert likeness(fingerprints(one), fingerprints(other), frozenset()) < 0.2
    assert hints({"a": one, "b": one}, one, {}) == [], "what was handed out counts for nobody"


# -- the command line ------------------------------------------------------------------------------
def test_a_student_starts_and_checks(tmp_path, capsys):
    out = tmp_path / "mine"
    begin = ("course", "start", "A0", "--student", "ada", "--output", out, "--course", TOY)
    assert run(capsys, *begin)[0] == 0
    assert {p.name for p in out.iterdir()} == {
        "README.md", "assignment.toml", "instance.json", "log.md", "public.py", "start.ipynb",
        "start.py",
    }  # fmt: skip
    assert run(capsys, "course", "check", "A0", out / "start.py")[0] == 1
    (out / "start.py").write_text(GOOD)
    code, said, _ = run(capsys, "course", "check", "A0", out / "start.py")
    assert code == 0 and "public: 30.0 of 30 points" in said
    refused(capsys, *begin)
    assert (out / "start.py").read_text() == GOOD


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["start", "A9", "--student", "x"], "got 'A9'"),
        (["start", "A0"], "--student ID"),
        (["start", "A0", "--student", "../x"], "a student's name"),
        (["start", "A0", "x.py", "--student", "x"], "start: no file"),
        (["check", "A0"], "check: your file, e.g. course check A0 A0/start.py"),
        (["check", "A0", "."], "it has no .py and no .ipynb"),
        (["grade", "A0"], "grade: the folder of hand-ins, e.g. course grade A0 handed_in"),
        (["check", "A0", "none.py", "--student", "x"], "none.py"),
        (["grade", "A0", "."], "--out FOLDER"),
        (["grade", "A0", "nowhere", "--out", "r"], "nowhere"),
        (["grade", "A0", ".", "--out", "r"], "got none in ."),
        (["grade", "A0", ".", "--out", "r", "--jobs", "0"], "--jobs of at least 1"),
        (["check", "A0", "x.py", "--roster", "r"], "--roster only with course grade"),
        (["grade", "A0", ".", "--out", "r", "--again"], "grade from the start"),
        (["pack", "A0", "--secret", "none.toml"], "none.toml"),
        (["drop", "A0"], "a verb among start, check, grade, pack; got 'drop'"),
    ],
)
def test_misuse_is_one_line(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, "course", *words, "--course", TOY)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_inside_a_file_is_refused(tmp_path, capsys, toy, monkeypatch):
    (tmp_path / "file").write_text("x")
    words = ("course", "start", "A0", "--student", "x", "--output", tmp_path / "file" / "new")
    assert "a folder to write to" in refused(capsys, *words, "--course", TOY)
    with pytest.raises(InputError, match="a folder to write to"):
        write_report(toy, [], tmp_path / "file")
    words = ("course", "grade", "A0", tmp_path, "--out", tmp_path / "file" / "new")
    monkeypatch.setattr(sys.modules["ascend_lab.course.grade"], "grade", None)  # not even begun
    assert "a folder to write to" in refused(capsys, *words, "--course", TOY)


def test_thirty_hand_ins_are_graded_as_predicted(tmp_path, toy):
    wrong = {
        "off": GOOD.replace("offset, []", "0, []"),
        "late": GOOD.replace("out.append(total)\n", "pass\n"),
    }
    for i in range(10):
        (tmp_path / f"good{i}.py").write_text(GOOD)
        (tmp_path / f"wrong{i}.py").write_text(wrong["off" if i % 2 else "late"])
    quick = ("exits", "memory", "deep answer", "patches the judge", "zero bytes", "no Python",
             "an evil error", "equals everything", "kills everybody", "raises at exit")  # fmt: skip
    for i, attack in enumerate(quick):
        (tmp_path / f"hostile{i}.py").write_bytes(ATTACKS[attack].encode("utf-8", "surrogatepass"))
    marks = {m.student: m for m in grade(toy, tmp_path, secret=SECRET, jobs=2)}
    assert len(marks) == 30
    assert {marks[f"good{i}"].total for i in range(10)} == {80}
    assert all(marks[f"wrong{i}"].points["performance"] == 0 for i in range(10))
    assert all(marks[f"hostile{i}"].total < 20 for i in range(10))


# -- what newcomers stumbled over ------------------------------------------------------------------
def command(capsys, *words):
    return run(capsys, "course", *words, "--course", TOY)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id;name;late_minutes\nada;Ada;0\n", "columns are separated by commas"),
        ("name,late\nAda,0\n", "a column id; got 'name', 'late'"),
        ("id,late_minutes\nada,0\nbob,0\nada,5\n", "line 4: each id once; got ada again"),
        ("id,late_minutes\nada,-60\n", "line 2: late_minutes, a number from 0; got '-60'"),
        ("id,late_minutes\nada,nan\n", "got 'nan'"),
        ("id,log\nada,much\n", "line 2: log, a number from 0; got 'much'"),
        ("id,log\nada,5,6\n", "line 2: 2 columns"),
        ("", "a column id"),
    ],
)
def test_a_roster_that_makes_no_sense_is_one_line(text, said, tmp_path, capsys):
    (tmp_path / "r.csv").write_text(text)
    (tmp_path / "work").mkdir()
    words = ("course", "grade", "A0", tmp_path / "work", "--out", tmp_path / "out", "--roster")
    assert said in refused(capsys, *words, tmp_path / "r.csv", "--course", TOY)
    assert not (tmp_path / "out").exists()


def test_the_same_error_is_said_once_with_the_student_s_line(tmp_path, capsys):
    work = tmp_path / "ada.py"
    work.write_text("import os\n\ndef sums(values, offset):\n    return 1 / 0\n")
    code, told, _ = command(capsys, "check", "A0", work, "--student", "ada")
    assert code == 1
    assert told.count("ZeroDivisionError in line 4 of ada.py") == 1
    assert re.search(r"^\d+ cases  ", told, re.MULTILINE)
    command(capsys, "grade", "A0", work, "--out", tmp_path / "out")
    assert (tmp_path / "out/index.html").read_text().count("ZeroDivisionError") == 2  # a part each
    work.write_text("def sums(values, offset:\n    return 1\n")
    _, told, _ = command(capsys, "check", "A0", work, "--student", "ada")
    assert told.count("SyntaxError in line 1 of ada.py: '(' was never closed") == 1
    cells = notebook_of("# %%\nimport os\n# %%\n\ndef sums(values, offset):\n    return 1 / 0\n")
    (tmp_path / "ada.ipynb").write_text(json.dumps(cells))
    _, told, _ = command(capsys, "check", "A0", tmp_path / "ada.ipynb", "--student", "ada")
    assert "ZeroDivisionError in line 2 of code cell 2 of ada.ipynb" in told


def test_regrading_says_what_was_run_anew(tmp_path, capsys):
    work = tmp_path / "ada.py"
    out = tmp_path / "out"
    for name in "ab":
        (tmp_path / f"{name}.toml").write_text(f'secret = "{8 * name}"')
    work.write_text(GOOD)
    words = ("grade", "A0", work, "--out", out, "--secret")
    command(capsys, *words, tmp_path / "a.toml")
    assert "as before" not in command(capsys, *words, tmp_path / "a.toml", "--again")[1]
    _, told, _ = command(capsys, *words, tmp_path / "b.toml", "--again")
    assert re.search(
        r"80\.0 .*as before: \d of \d cases are others, run anew: another secret", told
    )
    work.write_text(GOOD + "\n")
    _, told, _ = command(capsys, *words, tmp_path / "b.toml", "--again")
    assert re.search("as before: another file: [0-9a-f]{16} -> [0-9a-f]{16}, run anew", told)
    work.write_text(GOOD.replace("total += value", "total += 1"))
    _, told, _ = command(capsys, *words, tmp_path / "b.toml", "--again")
    assert re.search(r"was 80\.0: another file: .*now fails", told)


def test_points_are_the_same_wherever_they_stand(tmp_path, capsys):
    (tmp_path / "r.csv").write_text("id,late_minutes,log\nada,3000,7.77\n")
    (tmp_path / "ada.py").write_text(GOOD.replace('"steps": 10', '"steps": 13'))
    out = tmp_path / "out"
    _, told, _ = command(capsys, "grade", "A0", tmp_path / "ada.py", "--out", out, "--roster",
                         tmp_path / "r.csv")  # fmt: skip
    (row,) = csv.DictReader(io.StringIO((out / "grades.csv").read_text()))
    parts = ("public", "hidden", "performance", "log", "late")
    assert float(row["total"]) == pytest.approx(sum(float(row[part]) for part in parts))
    assert float(row["late"]) < 0
    page = (out / "index.html").read_text()
    assert "<th data-sort>late" in page
    assert all(f">{row[part]}<" in page for part in (*parts, "total"))
    assert re.search(
        rf"^ada +{row['total']}  \(public {row['public']}.*, late {row['late']}\)", told
    )
    assert json.loads((out / "students/ada.json").read_text())["score"] == float(row["total"])
    assert f"{row['total']} points" in (out / "students/ada.html").read_text()


def test_a_start_over_work_says_what_to_do(tmp_path, capsys):
    (tmp_path / "start.py").write_text(GOOD)
    file = tmp_path / "start.py"
    words = ("course", "start", "A0", "--course", TOY, "--student", "ada", "--output")
    said = "nothing was written: name a new folder for the output"
    assert said in refused(capsys, *words, tmp_path)
    refused(capsys, *words, file)
    assert list(tmp_path.iterdir()) == [file]
    told = refused(capsys, "course", "check", "A0", tmp_path, "--course", TOY)
    assert f"name one of {file}" in told


def test_a_long_wait_is_said(monkeypatch):
    monkeypatch.setattr(sandbox, "PATIENCE_S", 0.2)
    told = []
    source = "import time\ndef f(): time.sleep(1)"
    (found,) = sandbox.answers_of(source, [sandbox.Call("f", {})], report_wait=told.append)
    assert found.error == ""
    assert re.fullmatch(r"call 1 of 1: still waiting after \d s; it may take 10 s of .*", told[-1])
