"""What a room may import, what an import costs, how long the road of `simulate` is."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ascend_lab
from ascend_lab.graph import zoo
from ascend_lab.graph.onnx import save_onnx

PACKAGE = Path(ascend_lab.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

ROAD = 81
"""Files in which `ascend-lab simulate` runs a function for a ResNet-18."""


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements inside a node; neither imports nor functions stand in expressions."""
    for part in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, part, ()):
            yield child
            yield from statements(child)


@cache
def statements_of(module: Path) -> tuple[ast.AST, ...]:
    return tuple(statements(ast.parse(module.read_text("utf-8"))))


def lines_of(modules: list[Path]) -> int:
    return sum(module.read_text("utf-8").count("\n") for module in modules)


def room_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules_of(room: str) -> list[Path]:
    return [module for module in MODULES if room_of(module) == room]


def test_no_module_imports_in_a_circle() -> None:
    """Imports inside functions and for types only count as well."""
    names = {".".join(m.relative_to(PACKAGE.parent).with_suffix("").parts): m for m in MODULES}
    names = {name.removesuffix(".__init__"): module for name, module in names.items()}
    needs: dict[str, set[str]] = {}
    for name, module in names.items():
        found = set()
        for node in statements_of(module):
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
        assert lines_of(files) <= 3000  # four hours at five seconds a line


# -- the order of the rooms -----------------------------------------------------------------------
ORDER = (
    "errors",
    "data",
    "output",
    "limits",
    "chip",
    "isa",
    "sim",
    "layout",
    "kernels",
    "dsl",
    "ops",
    "graph",
    "cluster",
    "train",
    "parallel",
    "aoe",
    "compress",
    "media",
    "runtime",
    "serving",
    "compare",
)
"""A package imports only from itself and from those to its left; the rest may import anything."""
TOP = ("lab", "course", "cli", "__main__")
"""The book's own room, the course, the commands, their door: nothing in the core imports them."""


def imported_rooms(module: Path) -> set[str]:
    """Return the rooms of this package a module imports, also inside functions."""
    rooms = set()
    for node in statements_of(module):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "ascend_lab":
                own = [alias.name for alias in node.names if alias.name != "__version__"]
                names = [f"ascend_lab.{name}" for name in own]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {n.split(".")[1] for n in names if n.startswith("ascend_lab.")}
    return rooms


@pytest.mark.parametrize("room", ["__init__", *ORDER])
def test_a_room_imports_only_what_stands_to_its_left(room: str) -> None:
    left = ORDER[: ORDER.index(room)] if room in ORDER else ("errors",)
    for module in modules_of(room):
        imported = imported_rooms(module) - {room, *left}
        assert not imported, f"{module} imports {sorted(imported)}"


def test_every_room_has_its_place() -> None:
    assert {room_of(module) for module in MODULES} == {"__init__", *ORDER, *TOP}


@pytest.mark.parametrize(
    "name", ["ascend_lab", "ascend_lab.kernels", "ascend_lab.lab.machines", "ascend_lab.ops"]
)
def test_heavy_packages_wait_until_they_are_used(name: str) -> None:
    code = f"import json, sys, {name}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {module.split(".")[0] for module in json.loads(done.stdout)}
    assert not loaded & {"matplotlib", "ipywidgets", "IPython", "numba", "tqdm", "onnx"}
