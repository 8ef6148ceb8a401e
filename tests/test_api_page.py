"""The API page has a section for every room that offers words, and a line for each constant."""

import re
from importlib import import_module
from pathlib import Path

import pytest
from sphinx.pycode import ModuleAnalyzer

import ascend_lab

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "book" / "api.md").read_text(encoding="utf-8")
PACKAGE = Path(ascend_lab.__file__).parent
ROOMS = sorted(
    ".".join(("ascend_lab", *file.parent.relative_to(PACKAGE).parts))
    for file in PACKAGE.rglob("__init__.py")
    if file.parent != PACKAGE and "__all__ =" in file.read_text(encoding="utf-8")
)


def test_defaults_are_shown_as_they_are_written() -> None:
    """Not as paths or the environment of the machine that builds the book."""
    assert "autodoc_preserve_defaults: true" in (ROOT / "_config.yml").read_text("utf-8")


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_listed_with_its_constants(room: str) -> None:
    heading = f"## `{room}`\n"
    assert PAGE.count(heading) == 1
    part = PAGE.split(heading)[1].split("\n## ")[0]
    assert re.findall(r"automodule:: (\S+)", part) == [room]
    module = import_module(room)
    told = {name for _, name in ModuleAnalyzer.for_module(room).find_attr_docs()}
    constants = {name for name in module.__all__ if not callable(getattr(module, name))}
    assert set(re.findall(r"data:: (\w+)", part)) >= constants - told
