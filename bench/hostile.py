"""Sixty hostile or broken hand-ins, small and as data, with the marks foretold for them.

Most are of the toy course of the tests, whose function `sums` adds numbers up and states its own
cost: 80 points for `GOOD`, at most 18.3 for an answer that is whole numbers and nothing else.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path

from bench.hand_ins import Row, Writer, data, script

GOOD = """
def sums(values, offset):
    total, out = offset, []
    for value in values:
        total += value
        out.append(total)
    return {"sums": out, "steps": 10}
"""
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
        'import json\njson.dumps = lambda *a, **k: \'{"at": 0, "value": {"sums": [], '
        f'"steps": 0}}}}\'\ndef sums(values, offset): return {ANSWER}'
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
        '            line = b\'{"at": %d, "value": {"sums": [], "steps": 1}}\\n\' % call\n'
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
    "imports what is closed": ("from ascend_lab.aoe import tune\n" + GOOD),
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
}

WHOLE = 18.4
"""Of 80: the public and hidden points of the property that a list of whole numbers holds."""
ATTACK_ROWS = tuple(
    Row(f"attack_{number}", "A0", script(source), 0, WHOLE, kind)
    for number, (kind, source) in enumerate(ATTACKS.items())
)


# -- sources that came later -----------------------------------------------------------------------
LATER = {
    "a text as cost": (GOOD.replace('"steps": 10', '"steps": "many"'), 55, 55),
    "an infinite cost, by the wire": (
        "import os\nfor end in range(3, 20):\n    try:\n"
        '        os.write(end, b\'{"at": -1}\\n{"at": 0, "value": {"sums": [], '
        '"steps": 1e999}}\\n\')\n    except OSError: pass\n' + GOOD,
        0,
        0,
    ),
    "a cost beyond floating point": (GOOD.replace('"steps": 10', '"steps": 10**400'), 0, 0),
    "terminal escapes in an error": (
        "def sums(values, offset): raise Exception('\\x1b]0;pwned\\x07\\x1b[2J\\u202e')",
        0,
        0,
    ),
    "markup in an error": (
        "def sums(values, offset): raise Exception('</td><script>1</script>')",
        0,
        0,
    ),
    "a formula as pseudonym": ('PSEUDONYM = "=HYPERLINK(1;-2+3)"\n' + GOOD, 80, 80),
    "files in shared folders": (
        "import os, tempfile\n"
        "for folder in ('/tmp', '/var/tmp', '/dev/shm', tempfile.gettempdir()):\n"
        "    try: open(os.path.join(folder, 'left_by_a_hand_in'), 'w').write('x')\n"
        "    except OSError: pass\n" + GOOD,
        80,
        80,
    ),
    "folders three thousand deep, without rights": (
        "import os\nhome = os.getcwd()\nfor i in range(3000):\n    os.mkdir('d')\n"
        "    os.chdir('d')\nos.chdir(home)\nos.chmod('d', 0)\n" + GOOD,
        80,
        80,
    ),
    "closes all that is open": ("import os\nos.closerange(0, 64)\n" + GOOD, 0, 0),
    "ignores the end of its time": (
        (
            "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
            "    except OSError: pass\ndef sums(values, offset):\n    while True: pass"
        ),
        0,
        0,
    ),
    "reads memory that is not there": (
        "import ctypes\ndef sums(values, offset): ctypes.string_at(0)",
        0,
        0,
    ),
    "recursion without end": (
        (
            "import sys\nsys.setrecursionlimit(10**9)\n"
            "def sums(values, offset): return sums(values, offset)"
        ),
        0,
        0,
    ),
    "a late thread": (
        "import threading\ndef late():\n    while True: pass\n"
        "threading.Thread(target=late).start()\n" + GOOD,
        0,
        80,
    ),
    "climbs out of an open folder": (
        (
            "import os\ndef sums(values, offset):\n    told = []\n    for end in range(64):\n"
            "        for up in ('', '/..' * 3, '/..' * 5, '/..' * 9):\n"
            "            for name in ('.bashrc', 'root/.bashrc', 'etc/shadow', 'etc/passwd'):\n"
            "                try: told.append(open(f'/proc/self/fd/{end}{up}/{name}').read(9))\n"
            "                except OSError: pass\n"
            "    return {'sums': told or [0.5], 'steps': 10}"
        ),
        0,
        0,
    ),
    "mounts, and other people's processes": (
        (
            "import ctypes, os\ndef sums(values, offset):\n    c = ctypes.CDLL(None)\n"
            "    got = [c.umount2(b'/', 2), c.mount(b'/', b'/', None, 4096, None), "
            "c.ptrace(16, 1, 0, 0), c.chroot(b'/'), c.setuid(0), c.unshare(0x10000000)]\n"
            "    return {'sums': [g + 0.5 for g in got if g == 0] or [0.5], 'steps': 10}"
        ),
        0,
        0,
    ),
    "rewrites what it imports": (
        "import json, os, numpy\nfrom pathlib import Path\n"
        "for module in (json, os, numpy):\n    try: Path(module.__file__).write_text('1/0')\n"
        "    except OSError: pass\n    try: os.chmod(module.__file__, 0)\n"
        "    except OSError: pass\n" + GOOD,
        80,
        80,
    ),
    "raises what is 1,500 deep": (f"def sums(values, offset):\n    raise x{'.a' * 1500}\n", 0, 0),
    "minus signs, a hundred thousand": ("x = " + "-" * 100_000 + "1\n" + GOOD, 0, 0),
    "900,000 letters of remarks": ("#" + "x" * 900_000 + "\n" + GOOD, 0, 0),
    "numbers as keys": ("def sums(values, offset): return {i: i for i in range(10**6)}", 0, 0),
}
LATER_ROWS = tuple(
    Row(f"later_{number}", "A0", script(source), least, most, kind)
    for number, (kind, (source, least, most)) in enumerate(LATER.items())
)


# -- files that are damaged, or no files ---------------------------------------------------------
def zipped(*members: tuple[str, str], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """Return a zip of (name, text)."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as archive:
        for name, text in members:
            archive.writestr(name, text)
    return made.getvalue()


def damaged_stream() -> bytes:
    """Return a zip whose table of contents is whole and whose data is not."""
    whole = bytearray(zipped(("work.py", GOOD * 9)))
    start = 30 + len("work.py")
    whole[start : start + 40] = bytes(40)
    return bytes(whole)


def no_utf_8_name() -> bytes:
    """Return a zip with a good file beside one whose name says UTF-8 and is not."""
    return zipped(("work.py", GOOD), ("\u00e9\u00e9.py", "x = 1")).replace(
        "\u00e9\u00e9".encode(), b"\xff\xfe\xff\xfe"
    )


def as_name(name: bytes, source: str) -> Writer:
    """Return what writes a source under a name that is no student's."""

    def write(folder: Path, student: str) -> None:
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_text(source)

    return write


def pipe(folder: Path, student: str) -> None:
    """Leave a named pipe, which whoever opens it waits for."""
    os.mkfifo(folder / f"{student}.py")


def link(folder: Path, student: str) -> None:
    """Leave a link to a file that only the grader may read."""
    (folder / f"{student}.py").symlink_to("/etc/shadow")


def own_course(folder: Path, student: str) -> None:
    """Leave a folder that looks like the assignment, with a judge that praises its author."""
    own = folder / student
    own.mkdir()
    (own / "assignment.toml").write_text('name = "A4"\ntitle = "mine"\nversion = "1"\n')
    praise = "raise SystemExit('this ran as the grader')\n"
    for name in ("public.py", "hidden.py"):
        (own / name).write_text(praise)
    (own / "start.py").write_text("def offsets(*given, **named):\n    return []\n")


def deep_notebook() -> bytes:
    """Return a notebook nested a hundred thousand deep."""
    return b'{"cells": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


FILE_ROWS = (
    Row("stream", "A0", data(damaged_stream(), ".zip"), 0, 0, "a zip with a damaged stream"),
    Row("names", "A0", data(no_utf_8_name(), ".zip"), 0, 0, "a member whose name is no UTF-8"),
    Row(
        "members",
        "A0",
        data(zipped(*((f"f{i}.txt", "") for i in range(20_000)), ("w.py", GOOD)), ".zip"),
        0,
        0,
        "20,000 members",
    ),
    Row("slip", "A0", data(zipped(("../../../slipped.py", GOOD)), ".zip"), 80, 80, "a path"),
    Row("bomb", "A0", data(zipped(("w.py", "#" * 50_000_000)), ".zip"), 0, 0, "a zip bomb"),
    Row(
        "table",
        "A0",
        data(json.dumps({"cells": {"a": 1}}).encode(), ".ipynb"),
        0,
        0,
        "a notebook whose cells are a table",
    ),
    Row("deep", "A0", data(deep_notebook(), ".ipynb"), 0, 0, "a notebook, nested deep"),
    Row("pipe", "A0", pipe, 0, 0, "a named pipe"),
    Row("link", "A0", link, 0, 0, "a link to a file of the grader"),
    Row("wide", "A0", data(GOOD.encode("utf-16"), ".py"), 0, 0, "UTF-16"),
    Row("1_1", "A0", as_name(b"=1 1.py", GOOD), 80, 80, "a formula as name"),
    Row("esc_31m", "A0", as_name(b"esc\x1b\n[31m.py", GOOD), 80, 80, "terminal escapes as name"),
    Row(
        "Eve_12",
        "A0",
        as_name(b"Eve_12_assignsubmission_file_Bob_13_assignsubmission_file_.py", GOOD),
        80,
        80,
        "another's name behind the own",
    ),
)


# -- the assignments ---------------------------------------------------------------------------
LETTERS = "def kernel(*given, **named):\n    return ['program p\\n' + 'a' * 900_000]\n"
MARKUP = (
    "def groups(graph, slots, launch_bytes):\n"
    "    evil = '</text><script>document.title = \"pwned\"</script><text>'\n"
    "    return [[evil + name] for name, *_ in graph['nodes']]\n"
)
PLANNER = (
    "import sys\nwho = lambda finder: finder.__class__.__name__\n"
    "sys.meta_path[:] = [f for f in sys.meta_path if who(f) != '_Denied']\n"
    "def offsets(*given, **named):\n    import ascend_lab.compiler.memory as planner\n"
    "    return [0] * len(planner.__dict__)\n"
)
KEYS = (
    "from pathlib import Path\nfor key in Path('/').glob('*/*/course/keys/A4_memory/*.py'):\n"
    "    exec(key.read_text())\n"
)


def keys(folder: Path, student: str) -> None:
    """Leave a file that reads the keys of the very checkout that grades it."""
    key = Path(__file__).parents[1] / "course/keys/A4_memory/reference.py"
    (folder / f"{student}.py").write_text(f"exec(open({str(key)!r}).read())\n" + KEYS)


ASSIGNMENT_ROWS = (
    Row("letters", "A1", script(LETTERS), 0, 0, "a word of 900,000 letters"),
    Row("markup", "A3", script(MARKUP), 0, 0, "script in the names of groups"),
    Row("planner", "A4", script(PLANNER), 0, 0, "the package's own planner"),
    Row("keys", "A4", keys, 0, 0, "the keys of this checkout"),
    Row("Anna", "A4", own_course, 0, 0, "a course of its own"),
)
HOSTILE = (*ATTACK_ROWS, *LATER_ROWS, *FILE_ROWS, *ASSIGNMENT_ROWS)
