"""The book's rules: no orphan page, measured cells, captions and alt texts, no bare numbers.

Every rule is a function from text or cells to a list of complaints. It is run on the book, and on
a bad example that it has to complain about.
"""

import ast
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = sorted((ROOT / "book").rglob("*.md"))
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
Cell = dict[str, Any]

CODE = re.compile(r"^(`{3,}|~{3,})(?!\{).*?^\1\s*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
CITE = re.compile(r"\{cite(?::\w+)?\}`([^`]+)`")
NUMBER = re.compile(
    r"\d[\d.,]*\s*(?:[GTMK]B/s|[KMGT]iB/s|[TGP]FLOPS|[TGP]FLOP/s|TOPS|[KMGT]iB|[kKMGT]B|[GM]Hz)\b"
)
ALLOWED = re.compile(r"<!-- number-ok: \S.*?-->")
ALLOWED_PAGE = re.compile(r"<!-- number-ok-page: \S.*?-->")
MACHINE_PATH = re.compile(r"(?<![\w.~:/-])(?:/(?:home|Users|root|tmp|mnt|opt|var)/\w|[A-Z]:\\+\w)")
LEFTOVER = re.compile(r"\b(?:TODO|FIXME|XXX|TBD|lorem ipsum)\b")


def cells_of(notebook: Path) -> list[Cell]:
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


def source_of(cell: Cell) -> str:
    return "".join(cell["source"])


def code_of(cells: list[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell["cell_type"] == "code"]


def prose_of(cells: list[Cell]) -> str:
    return "\n\n".join(source_of(cell) for cell in cells if cell["cell_type"] == "markdown")


# --- rules ----------------------------------------------------------------------------------------


def lines_in(cell: Cell) -> int:
    """Count the lines of code that a reader reads: blank ones and comments do not count."""
    lines = (line.strip() for line in source_of(cell).splitlines())
    return sum(1 for line in lines if line and not line.startswith("#"))


def measure_complaints(cells: list[Cell]) -> list[str]:
    """15 to 25 code cells, median at most 6 lines, none above 25."""
    sizes = [lines_in(cell) for cell in code_of(cells)]
    found = []
    if not 15 <= len(sizes) <= 25:
        found.append(f"{len(sizes)} code cells; 15 to 25 make a chapter")
    if sizes and statistics.median(sizes) > 6:
        found.append(f"the median cell has {statistics.median(sizes)} lines; at most 6")
    return found + [f"a cell has {size} lines; at most 25" for size in sizes if size > 25]


def import_complaints(cells: list[Cell]) -> list[str]:
    """One cell holds all imports, and it is the first."""
    importing = [
        index
        for index, cell in enumerate(code_of(cells))
        if any(isinstance(node, ast.Import | ast.ImportFrom) for node in body_of(cell))
    ]
    return [] if importing == [0] else [f"code cells {importing} import; only the first one may"]


def body_of(cell: Cell) -> list[ast.stmt]:
    plain = [line for line in source_of(cell).splitlines() if not line.startswith(("%", "!"))]
    return ast.parse("\n".join(plain)).body


def rhythm_complaints(cells: list[Cell]) -> list[str]:
    """A prediction comes in; 3 to 6 exercises, one of them in code; a deliberate failure."""
    code = [source_of(cell) for cell in code_of(cells)]
    tags = [tag for cell in cells for tag in cell["metadata"].get("tags", [])]
    found = []
    if not any("predict" in text for text in code[1:]):
        found.append("no cell asks for a prediction")
    if not any("except " in text for text in code):
        found.append("no deliberate failure is caught and shown")
    exercises = len(re.findall(r"^[`:]{3,}\{exercise(?:-start)?\}", prose_of(cells), re.MULTILINE))
    if not 3 <= exercises <= 6:
        found.append(f"{exercises} exercises; 3 to 6")
    stubs, solutions = tags.count("exercise-stub"), tags.count("exercise-solution")
    if stubs != solutions or not stubs:
        found.append(f"{stubs} stub cells and {solutions} solution cells; as many, at least one")
    return found


def figure_complaints(cell: Cell) -> list[str]:
    """A cell whose output is a picture has a name, a caption and an alt text; and the reverse."""
    shown = [output.get("data", {}) for output in cell.get("outputs", [])]
    pictured = any(
        kind.startswith("image/") for data in shown if WIDGET_VIEW not in data for kind in data
    )
    options = cell["metadata"].get("mystnb", {})
    figure, alt = options.get("figure", {}), options.get("image", {}).get("alt", "")
    if not pictured:
        return [f"{figure.get('name')}: a figure cell without a picture"] if figure else []
    found = []
    if not re.fullmatch(r"fig-[a-z0-9-]+", figure.get("name", "")):
        found.append(f"a picture without a name fig-...: {source_of(cell)[:60]!r}")
    if not re.search(r"\w.*[.!?]$", figure.get("caption", ""), re.DOTALL):
        found.append(f"{figure.get('name')}: the caption must be a sentence")
    if len(alt.split()) < 4 or alt == figure.get("caption"):
        found.append(f"{figure.get('name')}: the alt text must state the data")
    return found


def number_complaints(text: str) -> list[str]:
    """No typed hardware figure: it is computed (glue, code) or cited on the same line."""
    if ALLOWED_PAGE.search(text):
        return []
    found, before = [], ""
    for line in CODE.sub(lambda m: "\n" * m[0].count("\n"), text).splitlines():
        excused = ALLOWED.search(before + line) or CITE.search(line) or "{glue" in line
        if NUMBER.search(line) and not excused:
            found.append(f"a typed figure: {line.strip()[:90]}")
        before = line if ALLOWED.fullmatch(line.strip()) else ""
    return found


def word_complaints(text: str) -> list[str]:
    """No path of someone's machine, no left-over note."""
    return [match[0] for rule in (MACHINE_PATH, LEFTOVER) for match in rule.finditer(text)]


def image_complaints(text: str) -> list[str]:
    """Every picture in Markdown has an alt text."""
    bare = [f"![]({target})" for target in re.findall(r"!\[\s*\]\(([^)]*)\)", text)]
    blocks = re.findall(
        r"^([`:]{3,})\{(?:figure|image)\}(.*?)^\1", text, re.MULTILINE | re.DOTALL
    )
    return bare + [block.split()[0] for _, block in blocks if not re.search(r":alt:\s*\S", block)]


def cited_keys(text: str) -> set[str]:
    return {key.strip() for group in CITE.findall(text) for key in group.split(",")}


def printed_in(cells: list[Cell]) -> str:
    """Return everything the code cells printed, as text; pictures left out."""
    texts = []
    for output in (output for cell in code_of(cells) for output in cell["outputs"]):
        data = {k: v for k, v in output.get("data", {}).items() if k.startswith("text/")}
        texts.append(json.dumps([output.get("text", ""), data, output.get("traceback", "")]))
    return "\n".join(texts)


def toc_files(node: Any) -> list[str]:
    """Return every file that a table of contents names, in order."""
    if isinstance(node, dict):
        own = [node[key] for key in ("root", "file") if key in node]
        return own + [name for value in node.values() for name in toc_files(value)]
    return [name for item in node for name in toc_files(item)] if isinstance(node, list) else []


# --- the book obeys -------------------------------------------------------------------------------

each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
each_text = pytest.mark.parametrize("path", [*NOTEBOOKS, *PAGES], ids=lambda path: path.name)


def text_of(path: Path) -> str:
    """Return a page, or the Markdown of a notebook."""
    return prose_of(cells_of(path)) if path.suffix == ".ipynb" else path.read_text("utf-8")


def test_the_table_of_contents_names_every_page_once() -> None:
    listed = toc_files(yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8")))
    there = [path.relative_to(ROOT).with_suffix("").as_posix() for path in [*NOTEBOOKS, *PAGES]]
    assert sorted(listed) == sorted(there)


@each_notebook
def test_a_chapter_keeps_measure_and_rhythm(notebook: Path) -> None:
    cells = cells_of(notebook)
    rules = (measure_complaints, import_complaints, rhythm_complaints)
    assert [complaint for rule in rules for complaint in rule(cells)] == []


@each_notebook
def test_figures_have_name_caption_and_alt_text(notebook: Path) -> None:
    cells = code_of(cells_of(notebook))
    assert [complaint for cell in cells for complaint in figure_complaints(cell)] == []


@each_notebook
def test_notebooks_are_saved_executed_and_clean(notebook: Path) -> None:
    document = json.loads(notebook.read_text(encoding="utf-8"))
    kept = {"kernelspec", "language_info", "widgets"}
    assert set(document["metadata"]) <= kept, "python3 lab.py refresh drops the rest"
    code = code_of(document["cells"])
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert len({cell["id"] for cell in document["cells"]}) == len(document["cells"])
    assert not any("execution" in cell["metadata"] for cell in code)
    assert word_complaints(printed_in(code)) == []


@each_text
def test_prose_is_clean(path: Path) -> None:
    text = text_of(path)
    rules = (number_complaints, word_complaints, image_complaints)
    assert [complaint for rule in rules for complaint in rule(text)] == []


def test_every_citation_has_an_entry() -> None:
    entries = re.findall(
        r"^@\w+\{\s*([^,\s]+)\s*,", (ROOT / "book/references.bib").read_text("utf-8"), re.MULTILINE
    )
    assert len(entries) == len(set(entries)), "a key stands twice"
    cited = {key for path in [*NOTEBOOKS, *PAGES] for key in cited_keys(text_of(path))}
    assert cited
    assert cited <= set(entries)


# --- the rules bite -------------------------------------------------------------------------------


def code_cell(source: str, **metadata: Any) -> Cell:
    return {"cell_type": "code", "source": source, "metadata": metadata, "outputs": []}


def pictured(caption: str, alt: str, name: str = "fig-a") -> Cell:
    options = {"figure": {"name": name, "caption": caption}, "image": {"alt": alt}}
    cell = code_cell("fig", mystnb=options)
    return {**cell, "outputs": [{"data": {"image/png": "", "text/plain": "Figure"}}]}


def test_measure_rule_bites() -> None:
    assert len(measure_complaints([code_cell("x = 1\n" * 26)] * 3)) == 5
    assert measure_complaints([code_cell("# why\n\nx = 1")] * 15) == []
    assert import_complaints([code_cell("import os"), code_cell("from os import path")])
    assert import_complaints([code_cell("%pylab\nimport os"), code_cell("x = 1")]) == []


def test_rhythm_rule_bites() -> None:
    assert len(rhythm_complaints([code_cell("import os"), code_cell("x = 1")])) == 4


@pytest.mark.parametrize(
    "cell",
    [
        pictured("No full stop", "Bars of four pipes."),
        pictured("A sentence.", "A sentence."),
        pictured("A sentence.", "Bars of four pipes.", name="sine"),
        {**pictured("A sentence.", "Bars of four pipes."), "outputs": []},
        {**pictured("A sentence.", "Bars of four pipes."), "metadata": {}},
    ],
)
def test_figure_rule_bites(cell: Cell) -> None:
    assert figure_complaints(cell)
    assert figure_complaints(pictured("A sentence.", "Bars of four pipes.")) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("L1 holds 512 KiB and HBM gives 1.6 TB/s.", 1),
        ("The clock is 1.8 GHz {cite}`liao2021`.", 0),
        ("L1 holds {glue:text}`l1` KiB; `64 KiB` is code.", 0),
        ("```python\nsize = '64 KiB'\n```\n32 KiB in prose", 1),
        ("```{note}\n32 KiB in a note\n```", 1),
        ("<!-- number-ok: a definition -->\n1 KiB is 1024 bytes\nL0A has 64 KiB", 1),
        ("<!-- number-ok-page: generated -->\n64 KiB\n", 0),
    ],
)
def test_number_rule_bites(text: str, count: int) -> None:
    assert len(number_complaints(text)) == count


def test_word_image_and_citation_rules_bite() -> None:
    assert word_complaints("see /home/me/x and C:\\Users, TODO") == ["/home/m", "C:\\U", "TODO"]
    assert word_complaints("GET https://x.org/home/me or ../opt/x") == []
    assert len(image_complaints("![](a.png)\n![b](b.png)\n```{figure} c.png\n:name: c\n```")) == 2
    assert cited_keys("{cite}`a, b` and {cite:t}`c`") == {"a", "b", "c"}
