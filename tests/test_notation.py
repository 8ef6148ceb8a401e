"""The page of notation: symbols of every chapter, and text that can be read back."""

import re
from pathlib import Path

from ascend_lab.compiler.text_form import from_text

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "book" / "notation.md").read_text("utf-8")


def test_every_chapter_has_symbols_and_no_other_is_named() -> None:
    symbols = PAGE.partition("## Symbols")[2].partition("\n## ")[0]
    last = re.findall(r"^\|.*\| ([\w, ]+) \|$", symbols, re.MULTILINE)
    named = {number for cell in last for number in cell.split(", ")} - {"chapter", "all"}
    files = (ROOT / "notebooks").glob("[0-9]*.ipynb")
    assert named == {path.name.partition("_")[0].lstrip("0") for path in files}


def test_the_text_of_a_graph_is_one() -> None:
    part = PAGE.partition("## Graphs as text")[2]
    head, constant, node = re.findall(r"^\| `(.+?)` \|", part, re.MULTILINE)[:3]
    assert (
        from_text("\n".join([head.replace("(y)", "(c)"), constant, node, "}"])).nodes[0].op
        == "conv2d"
    )
