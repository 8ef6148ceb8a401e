"""Hostile hand-ins change nothing but their own mark, and leave nothing behind."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ascend_lab.course import Call, Enrolled, Limits, answers_of, load, mark
from ascend_lab.course.handin import HandIn, hand_ins
from ascend_lab.course.sandbox import _children

COURSE = Path(__file__).parent / "course_toy"
GOOD = """
def sums(values, offset):
    total, out = offset, []
    for value in values:
        total += value
        out.append(total)
    return {"sums": out, "steps": 10}
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems limit less")
ANSWER = "{'sums': [7] * len(values), 'steps': 10}"
ATTACKS = {
    "endless loop": "def sums(values, offset):\n    while True: pass",
    "sleeps": "import time\ndef sums(values, offset): time.sleep(1000)",
    "exits": "import os\ndef sums(values, offset): os._exit(0)",
    "exits when read": "import os\nos._exit(0)\n" + GOOD,
    "kills its group": "import os\ndef sums(values, offset): os.killpg(0, 9)",
    "memory": "def sums(values, offset): return bytearray(10**12)",
    "forks": "import os\ndef sums(values, offset):\n    while True: os.fork()",
    "leaves a process": (
        "import subprocess, sys\ndef sums(values, offset):\n"
        "    subprocess.Popen([sys.executable, '-c',"
        " 'import os, time; os.setsid(); time.sleep(1000)'])\n    os.read(0, 1)"
    ),
    "floods its output": "def sums(values, offset):\n    while True: print('x' * 10000)",
    "floods the answer": "def sums(values, offset): return {'sums': [1] * 10**6, 'steps': 1}",
    "deep answer": (
        "def sums(values, offset):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x"
    ),
    "huge number": "def sums(values, offset): return {'sums': [10**5000], 'steps': 1}",
    "equals everything": (
        "class E(list):\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n"
        "def sums(values, offset): return {'sums': E(), 'steps': 10}"
    ),
    "not a number": "def sums(values, offset): return {'sums': [], 'steps': float('nan')}",
    "negative cost": "def sums(values, offset): return {'sums': [offset], 'steps': -1e9}",
    "patches the judge": (
        "import ascend_lab.course.grade as m\nm.mark_of = lambda *a: {'public': 1e9}\n"
        "m.Judged = lambda *a, **k: None\n"
        f"def sums(values, offset): return {ANSWER}"
    ),
    "patches json": (
        "import json\njson.dumps = lambda *a, **k: '{\"at\": 0, \"value\": {\"sums\": [], "
        f"\"steps\": 0}}}}'\ndef sums(values, offset): return {ANSWER}"
    ),
    "patches numpy": (
        "import numpy as np\nnp.allclose = np.array_equal = lambda *a, **k: True\n"
        f"def sums(values, offset): return {ANSWER}"
    ),
    "looks up the stack": (
        "import sys\ndef sums(values, offset):\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in list(frame.f_locals.values()):\n"
        "            if hasattr(value, 'judge'): return value.judge()\n"
        "        frame = frame.f_back\n    return {'sums': [0], 'steps': 10}"
    ),
    "writes answers for all calls": (
        "import os\nfor end in range(3, 20):\n    for call in range(9):\n        try:\n"
        "            line = b'{\"at\": %d, \"value\": {\"sums\": [], \"steps\": 1}}\\n' % call\n"
        "            os.write(end, line)\n"
        f"        except OSError: pass\ndef sums(values, offset): return {ANSWER}"
    ),
    "writes nonsense": (
        "import os\nfor end in range(3, 20):\n    try: os.write(end, b'\\xff\\x00nonsense\\n')\n"
        "    except OSError: pass\n" + GOOD
    ),
    "reads the keys": (
        "from pathlib import Path\nimport ascend_lab\n"
        "def sums(values, offset):\n"
        "    root = Path(ascend_lab.__file__).parents[1]\n"
        "    exec(next(root.rglob('keys/A0*/*.py')).read_text(), globals())\n"
        "    return globals()['sums'](values, offset)"
    ),
    "imports what is closed": (
        "from ascend_lab.aoe import tune\n" + GOOD
    ),
    "opens what is closed": (
        "import sys\nsys.meta_path.pop(0)\nimport ascend_lab.aoe as solver\n"
        "def sums(values, offset): return solver.sums(values, offset)"
    ),
    "the network": (
        "import socket\ndef sums(values, offset):\n"
        "    socket.create_connection(('192.0.2.1', 80), 0.5)"
    ),
    "never listens": (
        "import os, time\nfor end in range(3, 20):\n    try: os.write(end, b'{\"at\": -1}\\n')\n"
        "    except OSError: pass\ntime.sleep(1000)\n" + GOOD
    ),
    "no Python": "def sums(values, offset: return 1",
    "zero bytes": "\0\0\0",
    "a surrogate": "def sums(values, offset): return {'sums': ['\\ud800'], 'steps': 10}",
    "interrupts": "import os\ndef sums(values, offset): os.kill(os.getppid(), 2)",
    "kills everybody": "import os\ndef sums(values, offset): os.kill(-1, 9)",
    "a very long line": "def sums(values, offset): return " + "(" * 5000 + ")" * 5000,
    "writes files": (
        "def sums(values, offset):\n    for i in range(10**6):\n"
        "        open(f'f{i}', 'w').write('x' * 10**6)"
    ),
    "raises at exit": "def sums(values, offset): raise SystemExit(0)",
    "an evil error": (
        "class E(Exception):\n    def __str__(self): raise RuntimeError\n"
        "def sums(values, offset): raise E"
    ),
}  # fmt: skip


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
        "from ascend_lab.course import Call, Limits, answers_of\n"
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
