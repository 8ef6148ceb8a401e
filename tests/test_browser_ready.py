"""The package runs where a browser's Python does: no processes, threads or sqlite3, 32-bit indices.

Imitated in a process of its own. What it cannot show is that Pyodide's NumPy needs no more.
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from scripts import load_script

ROOT = Path(__file__).resolve().parent.parent
NEED = {
    "compiler.onnx.backend": "onnx",
    "compiler.onnx.export": "onnx",
}
"""Modules that serve a package which a browser may lack; nothing imports them before it must."""

BROWSER = """
import sys, sysconfig, threading
import matplotlib.patches as patches, numpy as np

GONE = set("_multiprocessing sqlite3 _sqlite3 lzma _lzma resource fcntl termios pwd grp".split())
GONE |= set("myst_nb onnx onnxruntime ml_dtypes numba scipy ortools distributed".split())

class Browser:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in GONE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def no_thread(self):
    raise RuntimeError("can't start new thread")

def without_hatchcolor(self, *args, _make=patches.Patch.__init__, **settings):
    if "hatchcolor" in settings:
        raise AttributeError("unexpected keyword argument 'hatchcolor'")
    _make(self, *args, **settings)

def narrow(function, place):
    def called(*args, **settings):
        index = np.asarray(args[place])
        if index.ndim and not np.can_cast(index.dtype, np.int32, "safe"):
            raise TypeError(f"Cannot cast array data from {index.dtype} to dtype('int32')")
        return function(*args, **settings)
    return called

for name in GONE & set(sys.modules):
    del sys.modules[name]
sys.meta_path.insert(0, Browser())
sysconfig.get_config_vars()  # which need a file named after the platform
sys.platform = "emscripten"
threading.Thread.start = no_thread
patches.Patch.__init__ = without_hatchcolor
np.intp, np.repeat, np.bincount = np.int32, narrow(np.repeat, 1), narrow(np.bincount, 0)
"""

ROOMS = """
import importlib, json, pkgutil
import ascend_lab

failed = {}
for found in pkgutil.walk_packages(ascend_lab.__path__, "ascend_lab.", lambda name: None):
    try:
        importlib.import_module(found.name)
    except ImportError as error:
        failed[found.name.removeprefix("ascend_lab.")] = error.name
print(json.dumps(failed))
"""

WORK = """
import json
from ascend_lab import aoe
from ascend_lab.aoe.bank import Knowledge
from ascend_lab.machine.chip import load_chip
from ascend_lab.compiler import GraphBuilder, compile_graph, simulate_graph
from ascend_lab.operators.kernels import GemmShape, gemm_launch
from ascend_lab.cluster import collective_time, load_topology
from ascend_lab.lab.figures.style import new_figure, pipe_legend
from ascend_lab.lab.machines import bank_ways
from ascend_lab.machine.sim import simulate

net = GraphBuilder("small")
x = net.input("x", (1, 3, 16, 16))
net.output(net.relu(net.conv2d(x, net.weight((16, 3, 3, 3)), pad=1)))
net.output(net.matmul(net.input("a", (64, 64)), net.weight((64, 64))))
chip = load_chip("Ascend310")
time_s = simulate_graph(compile_graph(net.build(), chip)).time_s
bank = Knowledge("bank.db", None)
settings = aoe.Settings(budget=8)
tuned = aoe.tune(net.build(), chip, settings=settings, bank=bank).operators
kernel = simulate(gemm_launch(GemmShape(m=64, k=64, n=64), chip), chip)
trials = sum(len(one.trace.trials) for one in tuned.results if one.trace)
ring_s = collective_time("all_reduce", load_topology("910a-roce:4"), size_bytes=1e6).time_s
ways = bank_ways(np.arange(32)[None, :], np.ones((1, 32), bool))
fig, ax = new_figure()
pipe_legend(ax, ["V"])
sizes = [time_s, kernel.cycles, ring_s, int(ways[0]), len(fig.to_svg())]
print(json.dumps([sizes, trials, bank.warnings]))
"""

CHECKS = """
import json, sys
from pathlib import Path
from ascend_lab.lab.checks.grading import SOLUTION
from notebook_pages import Page, read_code_cells

results = {}
for file, exercise in json.loads(sys.argv[1]):
    found = Page(read_code_cells(Path(file))).attempt(exercise, SOLUTION, (20,)).results
    results[exercise] = [str(one) for one in found if not one.passed]
print("CHECKED" + json.dumps(results))
"""


def in_browser(program: str, folder: Path, *words: str) -> str:
    """Run a program in the imitated browser and return what it printed."""
    command = [
        sys.executable,
        "-c",
        f"{BROWSER}\nsys.path[:0] = {[str(ROOT), str(ROOT / 'tests')]}\n{program}",
    ]
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_room_can_be_imported(tmp_path: Path) -> None:
    assert json.loads(in_browser(ROOMS, tmp_path)) == NEED


def test_networks_are_timed_operators_tuned_and_figures_drawn(tmp_path: Path) -> None:
    sizes, trials, warnings = json.loads(in_browser(WORK, tmp_path))
    assert all(size > 0 for size in sizes)
    assert trials >= 8
    assert [text for text in warnings if "no sqlite3" in text and "goes on" in text]


def test_exercises_of_chapters_are_checked(tmp_path: Path) -> None:
    wanted = {"01": ["ex_01_4"], "22": ["ex_22_1", "ex_22_3"]}
    plain = load_script(ROOT / "book" / "plain_code.py")
    pairs = []
    for number, exercises in wanted.items():
        (file,) = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
        notebook = json.loads(file.read_text("utf-8"))
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for cell, source in zip(
            code, plain.without_glue(["".join(c["source"]) for c in code]), strict=True
        ):
            cell["source"] = source
        (tmp_path / file.name).write_text(json.dumps(notebook), "utf-8")
        pairs += [(str(tmp_path / file.name), exercise) for exercise in exercises]
    said = in_browser(CHECKS, tmp_path, json.dumps(pairs))
    results = json.loads(said.rpartition("CHECKED")[2])
    assert results == {exercise: [] for one in wanted.values() for exercise in one}


@pytest.mark.parametrize("line", ["numpy 2.0.2", "matplotlib 3.8.4", "matplotlib 3.10.8"])
def test_the_ranges_take_what_pyodide_has(line: str) -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    name, version = line.split()
    (needed,) = [r for r in map(Requirement, project["dependencies"]) if r.name == name]
    assert needed.specifier.contains(version)
