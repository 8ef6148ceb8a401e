"""Sphinx extension: a prediction is a box for a number, a button, and the model's answer.

A chapter asks with `guess = predict("How many times?", unit="x")` and answers further down with
`compare(guess, value)`, whose saved output says the value. The page gets both in one form; its
script, `_static/interactive.js`, compares them in the reader's browser and sends nothing.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

Cell = Mapping[str, Any]
ASKED = re.compile(r"^(?P<question>.+)\n(?P<asks>Your guess.*\?) Add guess=.*\n?\Z", re.MULTILINE)
SAID = re.compile(r"^The model says (-?[\d.,]+(?:e[+-]\d+)?)(.*)\.$", re.MULTILINE)


def printed(cell: Cell) -> str:
    """Return what a cell printed."""
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


def calls_of(function: str, cell: Cell) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of a function in a cell, each with the name its value is assigned to."""
    tree = ast.parse("".join(cell["source"]))
    targets = {
        node.value: ast.unparse(node.targets[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name == function:
                yield targets.get(node, ""), node


def answers_of(cells: Sequence[Cell]) -> dict[str, tuple[str, str]]:
    """Return (number, unit) that the model says, by the name of the prediction."""
    answers = {}
    for cell in cells:
        sentences = SAID.findall(printed(cell))
        calls = sorted((call for _, call in calls_of("compare", cell)), key=lambda c: c.lineno)
        for call, answer in zip(calls, sentences, strict=True):
            answers[ast.unparse(call.args[0])] = answer
    return answers


def form(key: str, asked: re.Match[str], number: str, unit: str) -> str:
    """Return the box of one prediction."""
    plain = number.replace(",", "")
    data = f'data-answer="{plain}" data-said="{escape(number + unit)}" data-unit="{escape(unit)}"'
    return (
        f'<form class="lab-guess" autocomplete="off" {data}>'
        f'<label for="{key}">{escape(asked["question"])} '
        f'<span class="lab-asks">{escape(asked["asks"])}</span></label>'
        f'<span class="lab-entry"><input id="{key}" type="text" inputmode="decimal">'
        f'<button type="submit">Compare</button></span>'
        f'<p class="lab-verdict" role="status"></p></form>'
    )


def add_forms(cells: Sequence[Cell]) -> None:
    """Put a form in the place of the words that `predict` printed."""
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    if not any(ASKED.search(printed(cell)) for cell in code):
        return
    answers = answers_of(code)
    for number, cell in enumerate(code, start=1):
        for output in cell["outputs"]:
            text = "".join(output.get("text", ""))
            asked = ASKED.search(text)
            if asked is None:
                continue
            ((name, _),) = calls_of("predict", cell)
            box = form(f"guess-{number}", asked, *answers[name])
            shown = {"text/html": box, "text/plain": asked[0]}
            cell["outputs"].append({"output_type": "display_data", "data": shown, "metadata": {}})
            output["text"] = text[: asked.start()]
        cell["outputs"][:] = [out for out in cell["outputs"] if out.get("text", "?")]


def read(_app: Any, docname: str, source: list[str]) -> None:
    """Change a chapter as it is read."""
    if docname.startswith("notebooks/"):
        notebook = json.loads(source[0])
        add_forms(notebook["cells"])
        source[0] = json.dumps(notebook)


def setup(app: Any) -> dict[str, bool]:
    """Run when a page is read."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
