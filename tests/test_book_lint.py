"""The book's rules: no orphan page, measured cells, captions and alt texts, no bare numbers.

Every rule (book_rules.py) runs on the book, and on a bad example that it has to complain about.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from book_rules import (
    Cell,
    box_complaints,
    cells_of,
    cited_keys,
    code_of,
    figure_complaints,
    home_complaints,
    image_complaints,
    import_complaints,
    measure_complaints,
    number_complaints,
    printed_in,
    prose_of,
    rhythm_complaints,
    toc_files,
    word_complaints,
)

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CHAPTERS = [path for path in NOTEBOOKS if path.name[:2].isdigit()]
PAGES = sorted((ROOT / "book").rglob("*.md"))

# --- the book obeys -------------------------------------------------------------------------------

each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
each_chapter = pytest.mark.parametrize("notebook", CHAPTERS, ids=lambda path: path.stem)
each_text = pytest.mark.parametrize("path", [*NOTEBOOKS, *PAGES], ids=lambda path: path.name)


def text_of(path: Path) -> str:
    """Return a page, or the Markdown of a notebook."""
    return prose_of(cells_of(path)) if path.suffix == ".ipynb" else path.read_text("utf-8")


def test_the_table_of_contents_names_every_page_once() -> None:
    listed = toc_files(yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8")))
    there = [path.relative_to(ROOT).with_suffix("").as_posix() for path in [*NOTEBOOKS, *PAGES]]
    assert sorted(listed) == sorted(there)


@each_chapter
def test_a_chapter_keeps_measure_and_rhythm(notebook: Path) -> None:
    cells = cells_of(notebook)
    rules = (measure_complaints, import_complaints, rhythm_complaints, box_complaints)
    assert [complaint for rule in rules for complaint in rule(cells)] == []
    assert home_complaints(prose_of(cells), ROOT) == []


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


def test_box_rule_bites() -> None:
    def prose(source: str) -> Cell:
        return {"cell_type": "markdown", "source": source}

    closed = prose("```{exercise}\n:label: e\n```\n\n```{solution} e\nThe cell counts.\n```")
    opened = prose("````{solution-start} e\n````\n\nThe cell counts.")
    assert box_complaints([closed, code_cell("1 + 1")]) == [
        "e: a cell of the answer stands outside its box"
    ]
    assert box_complaints([opened, code_cell("1 + 1"), closed]) == []


def pictured(caption: str, alt: str, name: str = "fig-a") -> Cell:
    options = {"figure": {"name": name, "caption": caption}, "image": {"alt": alt}}
    cell = code_cell("fig", mystnb=options)
    return {**cell, "outputs": [{"data": {"image/png": "", "text/plain": "Figure"}}]}


def test_measure_rule_bites() -> None:
    assert len(measure_complaints([code_cell("x = 1\n" * 26)] * 3)) == 5
    assert measure_complaints([code_cell("# why\n\nx = 1")] * 15) == []
    assert import_complaints([code_cell("import os"), code_cell("from os import path")])
    assert import_complaints([code_cell("%pylab\nimport os"), code_cell("x = 1")]) == []
    deep = "\n".join(f"from ascend_lab.room{i} import x" for i in range(9))
    assert import_complaints([code_cell(deep)])
    assert home_complaints("\n## Where this lives\n\n- `lab.py`: it\n- `no.py`: it\n", ROOT)
    assert home_complaints("\n## Where this lives\n\n- `lab.py`: it\n", ROOT)
    assert home_complaints("\n## Where this lives\n\n- `lab.py`: a\n- `lab.py`: b\n", ROOT) == []


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
        ("```{note}\n32 KiB in a note\n```\n64 KiB\n```\n1 KiB\n```", 2),
        ("<!-- number-ok: a definition -->\n1 KiB is 1024 bytes.\n\nL0A has 64 KiB.", 1),
        ("L1 has 1 MiB,\nas printed {cite}`liao2021`. L0A has\n64 KiB.", 1),
        ("| L1 | 1 MiB |\n| UB | 256 KiB {cite}`liao2021` |", 1),
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
