"""The API page lists every public name of the package, and nothing that is not there."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "book" / "api.md").read_text(encoding="utf-8")
PACKAGES = (
    "data",
    "chip",
    "isa",
    "sim",
    "layout",
    "kernels",
    "machines",
    "dsl",
    "ops",
    "graph",
    "graph.onnx",
    "graph.zoo",
    "graph.passes",
    "graph.layouts",
    "graph.fusion",
    "graph.lower",
    "graph.memory",
    "graph.tiling",
    "cluster",
    "train",
    "parallel.values",
    "parallel.plans",
    "parallel.redistribution",
    "parallel.strategy",
    "aoe",
    "aoe.search",
    "aoe.bank",
    "aoe.subgraph",
    "aoe.gradient",
    "aoe.contest",
    "checks",
    "figures",
    "widgets",
)
ENTRY = re.compile(
    r"^\.\. (?:auto(?:class|function|exception)|data):: (\w+)(?:\((.*)\))?$", re.MULTILINE
)


def listed(package: str) -> list[tuple[str, str]]:
    start = f"## `ascend_lab.{package}`"
    assert PAGE.count(start) == 1
    part = PAGE.split(start)[1].split("\n## ")[0]
    assert set(re.findall(r"currentmodule:: (\S+)", part)) == {f"ascend_lab.{package}"}
    return ENTRY.findall(part)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_stands_once(package: str) -> None:
    module = import_module(f"ascend_lab.{package}")
    public = set(module.FIGURES if package == "figures" else module.__all__)
    names = [name for name, _ in listed(package)]
    assert len(names) == len(set(names))
    assert set(names) - {"check_names"} == public
    assert all(hasattr(module, name) for name in names)


@pytest.mark.parametrize("package", PACKAGES)
def test_signatures_written_by_hand_are_those_of_the_code(package: str) -> None:
    module = import_module(f"ascend_lab.{package}")
    for name, written in listed(package):
        if written:
            assert written == ", ".join(inspect.signature(getattr(module, name)).parameters)
