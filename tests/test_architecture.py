"""The order of the packages, and what an import costs."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ascend_lab

PACKAGE = Path(ascend_lab.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
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
)
"""A package imports only from itself and from those to its left; the rest may import anything."""
TOP = ("lab", "course", "cli", "__main__")
"""The book's own room, the course, the commands, their door: nothing in the core imports them."""


def room_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(module: Path) -> set[str]:
    """Return the rooms of this package a module imports, also inside functions."""
    rooms = set()
    for node in ast.walk(ast.parse(module.read_text("utf-8"))):
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


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_a_room_imports_only_what_stands_to_its_left(module: Path) -> None:
    room = room_of(module)
    imported = imported_rooms(module) - {room}
    if room in ORDER:
        allowed = set(ORDER[: ORDER.index(room)])
        assert imported <= allowed, f"{room} imports {sorted(imported - allowed)}"
    elif room not in TOP:
        assert room == "__init__"
        assert imported <= {"errors"}


def test_every_room_has_its_place() -> None:
    rooms = {room_of(module) for module in MODULES} - {"__init__"}
    assert rooms == set(ORDER) | set(TOP)


@pytest.mark.parametrize(
    "name", ["ascend_lab", "ascend_lab.kernels", "ascend_lab.lab.machines", "ascend_lab.ops"]
)
def test_heavy_packages_wait_until_they_are_used(name: str) -> None:
    code = f"import json, sys, {name}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {module.split(".")[0] for module in json.loads(done.stdout)}
    assert not loaded & {"matplotlib", "ipywidgets", "IPython", "numba", "tqdm", "onnx"}
