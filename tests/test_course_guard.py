"""One hand-in neither ends nor enters the grading of others: files, judges, pages, folders."""

import base64
import csv
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
from command_lines import refused, run

from ascend_lab.course import (
    assignment as assignments,
    confine,
    grade,
    leftovers,
    load,
    report,
    sandbox,
    shelf,
    start,
    write_report,
)
from ascend_lab.course.grade import Enrolled, mark
from ascend_lab.course.handin import HandIn, hand_ins
from ascend_lab.course.sandbox import Call, answers_of, standing_wall
from ascend_lab.course.texts import shown
from ascend_lab.errors import InputError, ProgramError
from ascend_lab.machine.isa import parse_program
from bench.course import course_figures
from bench.hostile import GOOD, HOSTILE, damaged_stream, deep_notebook, no_utf_8_name, zipped

TOY = Path(__file__).parent / "course_toy"
linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems limit less")
as_root = pytest.mark.skipif(
    os.name != "posix" or os.getuid() != 0, reason="only root becomes another account"
)


@pytest.fixture
def toy():
    return load("A0", TOY)


def graded(task, source):
    return mark(task, HandIn("ada", "work.py", source), Enrolled("ada"), "a long secret")


# -- what is handed in -----------------------------------------------------------------------------
BROKEN = {
    "stream.zip": damaged_stream(),
    "names.zip": no_utf_8_name(),
    "table.ipynb": b'{"cells": {"a": 1}}',
    "numbers.ipynb": b'{"cells": [1, null, {"cell_type": "code", "source": {"a": 1}}]}',
    "list.ipynb": b"[]",
    "deep.ipynb": deep_notebook(),
    "dots.py": f"def sums(v, o):\n    raise x{'.a' * 1500}\n".encode(),
    "minus.py": ("x = " + "-" * 200_000 + "1\n" + GOOD).encode(),
    "long.py": b"#" * 900_000,
}


def test_a_broken_file_ends_nobody_s_reading(tmp_path):
    for name, content in BROKEN.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "ada.py").write_text(GOOD)
    with zipfile.ZipFile(tmp_path / "bob.zip", "w") as archive:  # one member is damaged, one good
        archive.writestr("a.py", "#" * 500)
        archive.writestr("b.py", GOOD)
    whole = (tmp_path / "bob.zip").read_bytes()
    (tmp_path / "bob.zip").write_bytes(whole.replace(b"#" * 20, b"x" * 20, 1))
    found = {one.student: one for one in hand_ins(tmp_path, ["sums"])}
    assert set(found) == {"ada", "bob", *(name.partition(".")[0] for name in BROKEN)}
    assert found["ada"].source == found["bob"].source == GOOD
    assert any("a.py in bob.zip: cannot be read" in note for note in found["bob"].notes)
    lost = set(found) - {"ada", "bob", "dots", "minus"}  # Python says what is wrong with these
    assert all(found[name].notes and not found[name].source for name in lost)


def test_a_zip_damaged_anywhere_is_a_note(tmp_path):
    whole = zipped(("work.py", GOOD * 3), ("log.md", "step 1"))
    rng = random.Random(7)
    for number in range(150):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        (tmp_path / f"s{number}.zip").write_bytes(damaged[: rng.choice([None, -9])])
    found = hand_ins(tmp_path, ["sums"])
    assert len(found) == 150
    assert all(one.source or one.notes for one in found)


def test_names_that_look_alike_are_students_of_their_own(tmp_path):
    """`a b` and `a_b` are the same in a table; files of one name are of one student."""
    for name in ("a b.py", "a_b.py", "a<b.py", "ada.py", "ada.ipynb"):
        (tmp_path / name).write_text("def sums(): return 1" if name.endswith(".py") else "{}")
    found = [one.student for one in hand_ins(tmp_path, ["sums"])]
    assert sorted(found) == ["a_b", "a_b-2", "a_b-3", "ada"]


@pytest.mark.parametrize(
    "line",
    ["V vadd " + "a" * 300_000, "V vadd " + "a[" * 150_000, "V vadd a[0 | 1:1] " + "k=(" * 100_000,
     "V vadd a[" + "+".join(f"v{i}" for i in range(40_000)) + " | 1:1]", "a" * 300_000],
)  # fmt: skip
def test_a_text_of_a_program_is_read_once(line):
    """Quadratic patterns took minutes for these; the limit is of the processor, and a wide one."""
    before_s = time.process_time()
    with suppress(ProgramError):
        parse_program(f"program p\nbuffer a UB fp16 64\n{line}")
    assert time.process_time() - before_s < 20


# -- judges and charts -----------------------------------------------------------------------------
def test_what_a_judge_passes_on_is_made_sound(toy):
    many = graded(toy, GOOD.replace('"steps": 10', '"steps": "many"'))
    assert many.points == {"public": 30, "hidden": 25, "performance": 0}
    assert graded(toy, GOOD.replace('"steps": 10', '"steps": 10**400')).total == 0
    said = graded(toy, "def sums(values, offset): return {'sums': ['\x1b[2J' * 9000], 'steps': 1}")
    texts = [text for tried in said.case_results for text in tried.faults.values()]
    assert texts and max(map(len, texts)) < 4000
    assert not [text for text in texts if "\x1b" in text]


def test_an_infinite_number_does_not_come_through_the_wire():
    source = (
        "import os\ndef f():\n    for end in range(3, 20):\n        try:\n"
        '            os.write(end, b\'{"at": 0, "value": 1e999}\\n\')\n'
        "        except OSError: pass\n"
    )
    (found,) = answers_of(source, [Call("f", {})])
    assert found.error == "sent something that is no answer"


def test_a_judge_that_fails_or_hangs_costs_one_hand_in(toy, monkeypatch):
    def judge(case, answer):
        while True:
            pass

    monkeypatch.setattr(sys.modules["ascend_lab.course.grade"], "JUDGE_S", 0.2)
    monkeypatch.setattr(toy.public, "judge", judge)
    got = graded(toy, GOOD)
    assert got.total == 0
    assert [one for one in got.case_results if "others of this hand-in took too long" in
            next(iter(one.faults.values()))]  # fmt: skip

    def dies(task, tried):
        raise RecursionError("of ours")

    monkeypatch.setattr(sys.modules["ascend_lab.course.grade"], "mark_of", dies)
    got = graded(toy, GOOD)
    assert got.total == 0 and "could not be graded (RecursionError: of ours)" in got.notes[-1]


EVIL = '<svg><text></text><script>document.title = "pwned"</script></svg>'


@pytest.mark.parametrize("svg", [EVIL, EVIL.replace("</svg>", ""), "<svg>" + "x" * (3 << 20)])
def test_nothing_of_a_chart_runs_on_a_page(toy, tmp_path, monkeypatch, svg):
    monkeypatch.setattr(toy.public, "chart", lambda case, answer: svg)
    got = graded(toy, "def sums(values, offset): return {'sums': [1], 'steps': 10}")
    write_report(toy, [got], tmp_path, "a long secret")
    page = (tmp_path / "index.html").read_text()
    assert page.count("<script>") == 1
    if svg is EVIL:
        (inner,) = set(re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page))
        assert b"pwned" in base64.b64decode(inner)
    else:
        assert "no chart" in page


def test_a_chart_that_hangs_is_left_out(toy, tmp_path, monkeypatch):
    def chart(case, answer):
        while True:
            pass

    monkeypatch.setattr(report, "CHART_S", 0.2)
    monkeypatch.setattr(toy.public, "chart", chart)
    got = graded(toy, "def sums(values, offset): return {'sums': [1], 'steps': 10}")
    write_report(toy, [got], tmp_path, "a long secret")
    assert (tmp_path / "index.html").read_text().count("no chart: TimeoutError") == 1


def test_a_table_program_finds_no_formula(toy, tmp_path):
    got = graded(toy, 'PSEUDONYM = "ok;=1+1"\n' + GOOD)
    write_report(toy, [got], tmp_path)
    assert "ok;'=1+1" in (tmp_path / "leaderboard.csv").read_text()
    rows = report._csv([("-1+1", "@a", "+b", "\t=c", "-3.5", "a\t-d")])
    assert next(csv.reader(io.StringIO(rows))) == ["'-1+1", "'@a", "'+b", "\t'=c", "-3.5", "a\t'-d"]


def test_a_terminal_is_told_nothing_to_obey():
    assert shown("a\x1b[2J\u202eb\ud800\n") == "a\\x1b[2J\\u202eb\\ud800 "
    assert len(shown("x" * 10**6)) == 400


# -- where assignments are found -----------------------------------------------------------------
def judge_of_a_student(folder):
    folder.mkdir()
    (folder / "assignment.toml").write_text('name = "A4"\nversion = "1"\n')
    for name in ("public.py", "hidden.py"):
        (folder / name).write_text("raise SystemExit('this ran as the grader')\n")
    return folder


def test_no_assignment_is_found_among_hand_ins(tmp_path, monkeypatch, capsys):
    own = judge_of_a_student(tmp_path / "Anna")
    monkeypatch.chdir(tmp_path)
    assert load("A4", hand_ins=tmp_path).folder.parent == assignments.CHECKOUT
    monkeypatch.chdir(own)
    assert load("A4").folder.parent == assignments.CHECKOUT
    words = ("course", "grade", "A4", tmp_path, "--out", tmp_path / "out", "--course", tmp_path)
    assert "outside the folder of hand-ins" in refused(capsys, *words)


def test_two_assignments_of_one_name_are_refused(tmp_path):
    for name in ("A0_toy", "A0_old"):
        shutil.copytree(TOY / "A0_toy", tmp_path / name)
    with pytest.raises(InputError, match=r"one assignment A0 in .*A0_old, .*A0_toy"):
        load("A0", tmp_path)


def test_a_list_is_handed_out_and_no_folder(tmp_path, capsys):
    course = tmp_path / "course" / "A0_toy"
    shutil.copytree(TOY / "A0_toy", course)
    for name in ("hidden.py~", "term.toml", ".hidden.py.swp"):
        (course / name).write_text("secret")
    (course / "data.bin").write_bytes(b"\xff\xfe\x00")
    start(load("A0", course.parent), "ada", tmp_path / "ada")
    wanted = {"README.md", "assignment.toml", "public.py", "start.py", "start.ipynb", "log.md",
              "instance.json"}  # fmt: skip
    assert {path.name for path in (tmp_path / "ada").iterdir()} == wanted
    table = (course / "assignment.toml").read_text()
    (course / "assignment.toml").write_text('hand_out = ["data.bin"]\n' + table)
    start(load("A0", course.parent), "bob", tmp_path / "bob")
    assert (tmp_path / "bob" / "data.bin").read_bytes() == b"\xff\xfe\x00"
    for bad in ('["hidden.py"]', '["../A0_toy/public.py"]', '["none"]', '"data.bin"'):
        (course / "assignment.toml").write_text(f"hand_out = {bad}\n" + table)
        with pytest.raises(InputError, match="hand_out"):
            load("A0", course.parent)


# -- the wall ----------------------------------------------------------------------------------
LOOKS = """
import os
def look(path):
    try:
        with open(path, 'rb') as file:
            return file.read(5).decode('latin-1')
    except OSError as error:
        return type(error).__name__
def touch(path):
    try:
        open(path, 'w').close()
        return 'written'
    except OSError as error:
        return type(error).__name__
def who():
    return os.getuid()
def reach(name):
    import sys
    sys.meta_path[:] = [finder for finder in sys.meta_path if hasattr(finder, 'find_spec')
                        and finder.__class__.__name__ != '_Denied']
    sys.path += [p for p in ('/usr/lib/python3/dist-packages', PACKAGE) if p]
    try:
        return __import__(name).__name__
    except ImportError as error:
        return type(error).__name__
"""
closes_files = pytest.mark.skipif(
    sys.platform != "linux" or not standing_wall().files, reason="this system closes no files"
)


@closes_files
def test_a_hand_in_opens_python_and_its_own_files_only(tmp_path):
    (tmp_path / "secret.toml").write_text('secret = "hush"')
    (tmp_path / "secret.toml").chmod(0o644)
    hidden = TOY / "A0_toy" / "hidden.py"
    paths = [
        tmp_path / "secret.toml",
        hidden,
        "/etc/passwd",
        "/proc/self/environ",
        sandbox.__file__,
    ]
    calls = [Call("look", {"path": str(path)}) for path in paths]
    places = ("/tmp/left_by_a_test", "/dev/shm/left_by_a_test", hidden, "own.txt")
    calls += [Call("touch", {"path": str(path)}) for path in places]
    found = answers_of(LOOKS, calls, denied=("ascend_lab",))
    assert [answer.value for answer in found[:5]] == ["PermissionError"] * 5
    assert [answer.value == "written" for answer in found[5:]] == [False, False, False, True]
    assert "cases" in hidden.read_text()


@closes_files
def test_what_is_denied_is_not_on_the_path():
    source = f"PACKAGE = {str(shelf.PACKAGE.parent)!r}\n" + LOOKS
    names = ("ascend_lab", "ascend_lab.machine.isa", "numpy")
    calls = [Call("reach", {"name": name}) for name in names]
    closed = [answer.value for answer in answers_of(source, calls, denied=("ascend_lab",))]
    assert [name in ("ModuleNotFoundError", "ImportError") for name in closed[:2]] == [True, True]
    assert closed[2] == "numpy"
    calls = [
        Call("reach", {"name": name})
        for name in ("ascend_lab.machine.isa", "ascend_lab.machine.sim")
    ]
    found = [
        answer.value for answer in answers_of(source, calls, denied=("ascend_lab.machine.sim",))
    ]
    assert found[0] == "ascend_lab"
    assert found[1] != "ascend_lab"


@as_root
@linux
def test_root_becomes_an_account_that_owns_nothing(capsys, tmp_path):
    (found,) = answers_of(LOOKS, [Call("who", {})])
    assert found.value >= confine.FIRST_ACCOUNT
    (tmp_path / "ada.py").write_text(GOOD)
    words = ("course", "grade", "A0", tmp_path / "ada.py", "--out", tmp_path / "out")
    _, _, said = run(capsys, *words, "--course", TOY)
    assert "you are root: hand-ins run as account" in said


@as_root
@linux
def test_a_private_folder_for_temporary_files_shuts_no_hand_in_out(monkeypatch, tmp_path):
    """Below a folder that only root may enter an account of its own would find nothing."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(private))
    (found,) = answers_of("import numpy\ndef who():\n    return 3", [Call("who", {})])
    assert (found.value, found.error) == (3, "")


def test_leaving_root_fails_aloud(monkeypatch, tmp_path):
    def not_permitted(*numbers):
        raise PermissionError

    for name in ("chown", "setgroups", "setgid", "setuid"):
        monkeypatch.setattr(confine.os, name, not_permitted, raising=False)
    monkeypatch.setattr(confine.os, "getuid", lambda: 0, raising=False)
    with pytest.raises(PermissionError, match="root cannot become another account"):
        confine.leave_root(61999)


@as_root
@linux
def test_root_that_cannot_leave_itself_grades_nothing(monkeypatch, tmp_path, toy):
    """Where the far side cannot become another account, nobody gets a mark, not even a zero."""
    far = tmp_path / "inside.py"
    leaving = 'wall["account"] = confine.leave_root(account)'
    text = sandbox.INSIDE.read_text()
    assert leaving in text
    text = text.replace(leaving, 'raise PermissionError("root cannot become another account")')
    text = text.replace('Path(__file__).with_name(f"{name}.py")', f"Path({confine.__file__!r})")
    far.write_text(text)
    monkeypatch.setattr(sandbox, "INSIDE", far)
    with pytest.raises(sandbox.RefusedError, match="root cannot become another account"):
        standing_wall()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "ada.py").write_text(GOOD)
    with pytest.raises(sandbox.RefusedError):
        grade(toy, tmp_path / "work")


def test_every_wall_says_what_it_is():
    own = os.getuid() if os.name == "posix" else -1
    for wall in (sandbox.Wall(), sandbox.Wall(own), sandbox.Wall(own, True), sandbox.Wall(61999)):
        (line,) = wall.lines()
        assert ("gap" in line or "only time" in line) is not wall.files


@linux
def test_whatever_a_hand_in_leaves_is_removed(tmp_path):
    deep = tmp_path / "handin"
    deep.mkdir()
    outside = tmp_path / "outside"
    outside.write_text("stays")
    home = Path.cwd()
    os.chdir(deep)
    try:
        for _ in range(2500):
            Path("d").mkdir()
            os.chdir("d")
        Path("link").symlink_to(outside)
    finally:
        os.chdir(home)
    (deep / "shut").mkdir()
    (deep / "shut" / "file").write_text("x")
    (deep / "shut").chmod(0)
    leftovers.remove(deep)
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]


@as_root
@linux
def test_what_an_account_left_in_shared_folders_is_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, "SHARED", (str(tmp_path),))
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path))
    for name in ("theirs", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    os.chown(tmp_path / "theirs", 61999, 61999)
    leftovers.sweep(61999)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@linux
def test_no_folder_of_a_hand_in_stays(toy):
    before = set(Path(sandbox.tempfile.gettempdir()).glob("handin-*"))
    answers_of("import os\nos.mkdir('d')\nos.chmod('d', 0)\ndef f(): os._exit(1)", [Call("f", {})])
    after = set(Path(sandbox.tempfile.gettempdir()).glob("handin-*"))
    assert not [path for path in after - before if path.stat().st_uid == os.getuid()
                and path.stat().st_mtime < time.time() - 60]  # fmt: skip


def test_a_course_that_changes_while_it_is_graded_is_said(tmp_path):
    shutil.copytree(TOY / "A0_toy", tmp_path / "A0_toy")
    task = load("A0", tmp_path)
    judge = task.public.judge

    def rewriting(case, answer):
        (tmp_path / "A0_toy" / "public.py").write_text("# rewritten")
        return judge(case, answer)

    task.public.judge = rewriting
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "ada.py").write_text(GOOD)
    (got,) = grade(task, tmp_path / "work")
    assert "files changed while this was graded" in got.notes[-1]


# -- Gradescope --------------------------------------------------------------------------------
UPLOAD = """
import os, glob
told = []
for path in glob.glob(ROOT + '/**', recursive=True) + [
        ROOT + '/source/secret.toml', ROOT + '/source/course/A0_toy/hidden.py']:
    try:
        told.append(open(path).read())
    except OSError:
        pass
for name in ('course/A0_toy/public.py', 'secret.toml'):
    try:
        open(ROOT + '/source/' + name, 'w').write('x = 1')
    except OSError:
        pass
def sums(values, offset):
    raise Exception('found: ' + ' '.join(told)[:300])
"""


@closes_files
def test_an_upload_reads_neither_secret_nor_hidden_cases(tmp_path, toy):
    with zipfile.ZipFile(io.BytesIO(report.pack(toy, "the secret of this term"))) as archive:
        modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
        archive.extractall(tmp_path / "source")
    closed = [name for name in modes if name.startswith(("course/", "secret"))]
    assert len(closed) == 6
    assert {modes[name] for name in closed} == {0o600}
    stub = tmp_path / "bin"
    stub.mkdir()
    (stub / "python3").write_text(  # no network here: what is installed is this package
        f'#!/bin/sh\ncase "$*" in\n*pip*) exit 0 ;;\n*dirname*) echo {tmp_path}/installed ;;\n'
        f'*) exec {sys.executable} "$@" ;;\nesac\n'
    )
    (stub / "python3").chmod(0o755)
    (tmp_path / "installed").mkdir()
    where = {**os.environ, "PATH": f"{stub}:{os.environ['PATH']}", "AUTOGRADER": str(tmp_path),
             "PYTHONPATH": str(Path(report.__file__).parents[2])}  # fmt: skip
    subprocess.run(["bash", tmp_path / "source" / "setup.sh"], env=where, check=True)
    for name in ("secret.toml", "course/A0_toy/hidden.py"):
        assert (tmp_path / "source" / name).stat().st_mode & 0o077 == 0
    assert (tmp_path / "installed").stat().st_mode & 0o077 == 0
    (tmp_path / "submission").mkdir()
    (tmp_path / "submission" / "w.py").write_text(f"ROOT = {str(tmp_path)!r}\n" + UPLOAD)
    for _ in range(2):
        subprocess.run(["bash", tmp_path / "source" / "run_autograder"], env=where, check=True)
        made = (tmp_path / "results" / "results.json").read_text()
        assert json.loads(made)["score"] == 0
        assert "found: " in made
        assert "secret of this term" not in made and "def cases" not in made
    assert "the secret of this term" in (tmp_path / "source" / "secret.toml").read_text()


def test_an_archive_holds_what_is_listed(tmp_path):
    shutil.copytree(TOY / "A0_toy", tmp_path / "A0_toy")
    (tmp_path / "A0_toy" / "hidden.py~").write_text("old")
    (tmp_path / "A0_toy" / "term.toml").write_text('secret = "x"')
    with zipfile.ZipFile(io.BytesIO(report.pack(load("A0", tmp_path), "a secret"))) as archive:
        own = {Path(name).name for name in archive.namelist() if name.startswith("course/")}
    assert own == {"README.md", "assignment.toml", "public.py", "hidden.py", "start.py"}


@as_root
@linux
def test_a_package_that_only_root_reads_is_copied_for_hand_ins(tmp_path, monkeypatch):
    package = tmp_path / "ascend_lab"
    (package / "open").mkdir(parents=True)
    (package / "shut").mkdir()
    (package / "open" / "part.py").write_text("x = 1")
    package.chmod(0o700)
    monkeypatch.setattr(shelf, "PACKAGE", package)
    laid = tmp_path / "shelf"
    laid.mkdir()
    shelf.fill(laid, ["ascend_lab.shut"])
    part = laid / "ascend_lab" / "open" / "part.py"
    assert part.read_text() == "x = 1"
    assert not part.is_symlink() and part.stat().st_mode & 0o777 == 0o644
    assert not (laid / "ascend_lab" / "shut").exists()


# -- the kept hand-ins -------------------------------------------------------------------------
def test_there_are_enough_hostile_hand_ins_and_a_few_are_graded_here():
    assert len(HOSTILE) >= 60
    assert len({(row.assignment, row.student) for row in HOSTILE}) == len(HOSTILE)
    quick = [row for row in HOSTILE if row.assignment == "A0" and not row.student.startswith("att")]
    chosen = [row for row in quick if not row.student.startswith("later")]
    missed = [figure.line() for figure in course_figures(chosen) if figure.met is False]
    assert not missed, missed
