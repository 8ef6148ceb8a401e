"""Compact is a feature: what a room may weigh, how long the road of `simulate` may be."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ascend_lab
from ascend_lab.graph import zoo
from ascend_lab.graph.onnx import save_onnx

PACKAGE = Path(ascend_lab.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

LINES = {
    "__init__": 10,
    "__main__": 10,
    "aoe": 10765,
    "chip": 630,
    "cli": 4020,
    "cluster": 2690,
    "compress": 3035,
    "course": 2310,
    "data": 20,
    "dsl": 6405,
    "errors": 85,
    "graph": 17900,
    "isa": 3250,
    "kernels": 11795,
    "lab": 18190,
    "layout": 835,
    "limits": 260,
    "media": 1080,
    "ops": 6075,
    "output": 130,
    "parallel": 4555,
    "runtime": 2145,
    "serving": 2180,
    "sim": 2620,
    "train": 1395,
}
"""Lines a room may have: what it had at its last reading plus 2 %; CONTRIBUTING.md says how."""
FILES = 329
IMPORT_LINES = 3810
ROAD = 80
"""Files in which `ascend-lab simulate` runs a function for a ResNet-18."""
LONGEST_MODULE, LONGEST_FUNCTION = 420, 40


@cache
def tree_of(module: Path) -> ast.Module:
    return ast.parse(module.read_text("utf-8"))


def lines_of(modules: list[Path]) -> int:
    return sum(module.read_text("utf-8").count("\n") for module in modules)


def room_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("room", sorted(LINES))
def test_a_room_keeps_to_its_lines(room: str) -> None:
    lines = lines_of([m for m in MODULES if room_of(m) == room])
    assert lines <= LINES[room], f"{room} has {lines} lines"


def test_every_room_has_a_budget() -> None:
    assert {room_of(module) for module in MODULES} == set(LINES)


def test_files_and_import_lines() -> None:
    statements = [
        node
        for module in MODULES
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    lines = sum((node.end_lineno or 0) - node.lineno + 1 for node in statements)
    assert len(MODULES) <= FILES
    assert lines <= IMPORT_LINES


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_modules_and_functions_stay_readable(module: Path) -> None:
    assert lines_of([module]) <= LONGEST_MODULE
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.FunctionDef):
            doc = ast.get_docstring(node) or ""
            lines = (node.end_lineno or 0) - node.lineno + 1 - doc.count("\n")
            assert lines <= LONGEST_FUNCTION, f"{node.name} has {lines} lines"


def test_no_module_imports_in_a_circle() -> None:
    """Imports inside functions and for types only count as well."""
    names = {".".join(m.relative_to(PACKAGE.parent).with_suffix("").parts): m for m in MODULES}
    names = {name.removesuffix(".__init__"): module for name, module in names.items()}
    needs: dict[str, set[str]] = {}
    for name, module in names.items():
        found = set()
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found.add(whole if whole in names else node.module)
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        needs[name] = {other for other in found if other in names}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail("circle: " + " -> ".join(error.args[1]))


TRACED = """
import sys
from ascend_lab.cli import ascend_lab as command

seen = set()

def note(frame, event, argument):
    name = frame.f_code.co_filename
    if event != "call" or name in seen or frame.f_code.co_name.startswith("<"):
        return
    above = frame.f_back
    while above is not None and above.f_code.co_name != "<module>":
        above = above.f_back
    if above is None or "ascend_lab" not in above.f_code.co_filename:  # not while importing
        seen.add(name)

sys.setprofile(note)
code = command(["simulate", sys.argv[1], "--chip", "Ascend310"])
sys.setprofile(None)
print("ROAD", code, *seen, sep="|")
"""


def test_the_road_of_simulate_is_short(tmp_path: Path) -> None:
    model = tmp_path / "resnet18.onnx"
    save_onnx(zoo.build("resnet18"), model)
    run = [sys.executable, "-c", TRACED, str(model)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    code, *files = done.stdout.rstrip().rpartition("ROAD|")[2].split("|")
    assert code == "0"
    own = [file for file in files if Path(file).is_relative_to(PACKAGE)]
    assert ROAD / 2 < len(own) <= ROAD, f"the road runs through {len(own)} files"


def test_the_week_has_seven_sittings_that_can_be_sat_through() -> None:
    page = (PACKAGE.parent / "book" / "code_in_a_week.md").read_text("utf-8")
    sittings = page.split("\n## ")[1:]
    assert len(sittings) == 7
    for sitting in sittings:
        files = [PACKAGE.parent / name for name in re.findall(r"(?m)^- `([^`]+)`: ", sitting)]
        assert 4 <= len(files) <= 8
        assert lines_of(files) <= 2500
