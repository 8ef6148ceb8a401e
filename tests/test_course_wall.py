"""Hostile hand-ins change nothing but their own mark, and leave nothing behind."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ascend_lab.course import load
from ascend_lab.course.grade import Enrolled, mark
from ascend_lab.course.handin import HandIn, hand_ins
from ascend_lab.course.sandbox import Call, Limits, _children, answers_of
from bench.hostile import ATTACKS, GOOD

COURSE = Path(__file__).parent / "course_toy"
linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems limit less")


@pytest.fixture(scope="module")
def task():
    """A task whose grader is, after all attacks of this file, what it was."""
    task = load("A0", COURSE)
    yield task
    assert graded(task, GOOD).total == 80, "an attack reached the next hand-in"


def graded(task, source, student="ada"):
    work = HandIn(student, "work.py", source)
    return mark(task, work, Enrolled(student), "a long secret")


def test_good_work_gets_its_marks(task):
    assert graded(task, GOOD).points == {"public": 30, "hidden": 25, "performance": 25}
    slow = GOOD.replace('"steps": 10', '"steps": 32')
    assert graded(task, slow).points["performance"] == round(25 * 0.4949, 1)


@linux
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_earns_nothing_and_leaves_nothing(task, attack):
    before = _children()
    got = graded(task, ATTACKS[attack])
    assert got.total < 20, f"{attack}: {got.points}"
    assert _children() - before == set()


@linux
def test_a_call_that_ends_the_process_costs_only_itself():
    source = "import os\ndef f(n):\n    if n == 1: os._exit(3)\n    return n"
    found = answers_of(source, [Call("f", {"n": n}) for n in range(4)])
    assert [answer.value for answer in found] == [0, None, 2, 3]
    assert found[1].error == "ended the process"


@linux
def test_a_process_that_never_listens_does_not_hold_the_grader():
    long = [Call("sums", {"values": "x" * 500_000, "offset": 0})]
    (found,) = answers_of(ATTACKS["never listens"], long, Limits(case_s=0.5))
    assert found.error == "did not end within 0.5 s"


def test_the_environment_of_the_grader_stays_outside(monkeypatch):
    monkeypatch.setenv("TERM_SECRET", "hush")
    source = "import os\ndef f(): return [dict(os.environ).get('TERM_SECRET'), os.listdir('.')]"
    (found,) = answers_of(source, [Call("f", {})])
    assert found.value == [None, ["output.txt"]]


def test_files_of_a_call_lie_in_its_folder():
    source = "def f(): return open('chip.toml').read()"
    found = answers_of(source, [Call("f", {}, {"chip.toml": text}) for text in "ab"])
    assert [answer.value for answer in found] == ["a", "b"]


# -- files that are no files ---------------------------------------------------------------------
def test_links_and_bombs_are_not_followed(tmp_path):
    secret = tmp_path / "secret.py"
    secret.write_text(GOOD)
    work = tmp_path / "work"
    (work / "eve").mkdir(parents=True)
    (work / "eve" / "mine.py").symlink_to(secret)
    (work / "mallory.py").symlink_to(secret)
    with zipfile.ZipFile(work / "bob.zip", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("../../bomb.py", "x" * 50_000_000)
        bomb.writestr("../escape.md", "out")
    (work / "carol.zip").write_bytes(b"PK no zip")
    (work / "dan.py").write_bytes(b"#" * 2_000_000)
    found = {one.student: one for one in hand_ins(work, ["sums"])}
    assert set(found) == {"eve", "mallory", "bob", "carol", "dan"}
    assert all(one.source == "" for one in found.values())
    assert all(one.notes for one in found.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret.py", "work"]


def test_names_do_not_leave_the_report(tmp_path, task):
    from ascend_lab.course import write_report

    sources = {"../../up": GOOD, "=cmd|' /C calc'": GOOD, "ⅷ": GOOD, "<script>": GOOD}
    work = tmp_path / "work"
    work.mkdir()
    for number, (name, source) in enumerate(sources.items()):
        (work / f"{number}{name.replace('/', '_')}.py").write_text(source)
    marks = [
        mark(task, one, Enrolled(one.student, "=1+1<b>"), "") for one in hand_ins(work, ["sums"])
    ]
    write_report(task, marks, tmp_path / "out")
    table = (tmp_path / "out" / "grades.csv").read_text()
    assert "\n=" not in table
    assert ",=" not in table
    page = (tmp_path / "out" / "index.html").read_text()
    assert "<script>" not in page.split("</table>")[0]
    assert "<b>" not in page
    assert {p.parent.name for p in (tmp_path / "out").rglob("*.html")} == {"out", "students"}


@linux
def test_the_limits_hold_for_a_plain_process():
    source = (
        "import resource as r\n"
        "def f(): return [r.getrlimit(n)[1] for n in (r.RLIMIT_AS, r.RLIMIT_FSIZE)]"
    )
    (found,) = answers_of(
        source, [Call("f", {})], Limits(memory_bytes=600 << 20, output_bytes=5000)
    )
    assert found.value == [600 << 20, 5000]


@linux
def test_a_killed_grader_takes_its_hand_in_along(tmp_path):
    script = (
        "from ascend_lab.course.sandbox import Call, Limits, answers_of\n"
        "source = 'import time\\ndef f(): time.sleep(500)'\n"
        "answers_of(source, [Call('f', {})], Limits(case_s=400))"
    )
    root = str(Path(__file__).parent.parent)
    grader = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": root}
    )
    child = _wait_for_child(grader.pid)
    grader.kill()
    grader.wait()
    for _ in range(200):
        if not Path(f"/proc/{child}").exists() or "Z" in _state(child):
            return
        os.sched_yield()
        _nap()
    pytest.fail("the hand-in lives on")


def _state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _nap():
    import time

    time.sleep(0.05)


def _wait_for_child(pid):
    for _ in range(400):
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(stat[1]) == pid and b"inside" in (folder / "cmdline").read_bytes():
                    return int(folder.name)
            except (OSError, IndexError):
                continue
        _nap()
    pytest.fail("no hand-in was started")


def test_answers_are_plain_data():
    source = (
        "import numpy as np\nfrom decimal import Decimal\n"
        "def f(n): return [np.float32(2), (1, 2), {3: None}, Decimal(1)][n]"
    )
    found = answers_of(source, [Call("f", {"n": n}) for n in range(4)])
    assert [answer.value for answer in found] == [2.0, [1, 2], {"3": None}, None]
    assert "Decimal" in found[3].error
    assert json.dumps([answer.value for answer in found])
