"""The readers' copies: no plumbing, numbers and titles there, solutions closed, no change lost."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "notebooks").glob("*.ipynb"))
LEAK = re.compile(
    r"\{[a-z][a-z:_-]*\}`|^ *(?:`{3,}|~{3,}|:{3,})\{|^:[\w-]+:|^\([\w:-]+\)=|<!--|\{\{|\$\$ *\(",
    re.MULTILINE,
)
LINK = re.compile(r"\]\(([^()\s]*)\)")
SOLUTION = re.compile(r"^`{3,}\{solution(?:-start)?\}", re.MULTILINE)
EXERCISE = re.compile(r"^`{3,}\{exercise\} (.+)\n:label: ex-(\d+[a-z]?)-(\d+)$", re.MULTILINE)
each_notebook = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


@pytest.fixture(scope="module")
def made(copies: ModuleType) -> dict[str, NotebookNode]:
    return copies.all_copies()


def text_of(notebook: NotebookNode) -> str:
    return "\n\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")


def code_of(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


# --- what stands in a copy ------------------------------------------------------------------------
@each_notebook
def test_nothing_of_the_books_machinery_is_left(made, file: Path) -> None:
    copy = made[file.name]
    nbformat.validate(copy)
    assert LEAK.findall(text_of(copy)) == []
    for cell in copy.cells:
        assert set(cell.metadata) <= {"jupyter"}
        assert not re.search(r"\bmyst_nb\b|\bglue\b|\.\./", cell.source)
        kinds = {kind for output in cell.get("outputs", ()) for kind in output.get("data", {})}
        assert kinds <= {"text/plain", "text/html", "image/svg+xml", "image/png"}


@each_notebook
def test_solutions_are_closed_and_stubs_have_no_answer(made, file: Path) -> None:
    source = nbformat.read(file, as_version=4)
    copy = made[file.name]
    folded = [c.source for c in copy.cells if "<summary>Solution of " in c.source]
    assert len(folded) == len(SOLUTION.findall(text_of(source)))
    for text in folded:
        assert text.startswith("<details>\n<summary>Solution of Exercise ")
        assert text.endswith("\n\n</details>")
    open_code = {cell.source: cell for cell in code_of(copy)}
    for cell in code_of(source):
        tags = cell.metadata.get("tags", [])
        if "exercise-solution" in tags:
            assert cell.source not in open_code
            assert any(cell.source.splitlines()[0] in text for text in folded)
        if {"exercise-stub", "hide-output"} & set(tags):
            bare = next(c for c in open_code.values() if c.id == cell.id)
            assert bare.outputs == []
            assert bare.execution_count is None
    said = json.dumps([cell.outputs for cell in open_code.values()])
    assert not re.search(r"ex \d+[a-z]?\.\d+ (?:passed|not yet)", said + text_of(copy))


@each_notebook
def test_titles_and_captions_are_there(made, file: Path) -> None:
    source = nbformat.read(file, as_version=4)
    copy = made[file.name]
    titles = re.findall(r"^### Exercise (\d+[a-z]?)\.(\d+): (.+)$", text_of(copy), re.MULTILINE)
    listed = EXERCISE.findall(text_of(source))
    assert [(a, b) for a, b, _ in titles] == [(a.lstrip("0"), b) for _, a, b in listed]
    assert [title for *_, title in titles] == [title for title, *_ in listed]
    ids = [cell.id for cell in copy.cells]
    chapter = file.name.partition("_")[0].lstrip("0") + "." if file.name[:2].isdigit() else ""
    count = 0
    for cell in code_of(source):
        if figure := cell.metadata.get("mystnb", {}).get("figure"):
            count += 1
            below = copy.cells[ids.index(cell.id) + 1]
            assert below.source.startswith(f"**Figure {chapter}{count}.** ")
            assert below.source.split("** ")[1][:12] == figure["caption"][:12]
            assert f'<a id="{figure["name"]}"></a>' in text_of(copy)


@each_notebook
def test_every_link_has_its_target(made, file: Path) -> None:
    for target in LINK.findall(text_of(made[file.name])):
        if target.startswith("https://"):
            continue
        name, _, fragment = target.partition("#")
        there = made[name or file.name]
        assert not fragment or f'<a id="{fragment}"></a>' in text_of(there), target


def test_a_formula_a_citation_and_a_number_as_a_reader_sees_them(made) -> None:
    text = text_of(made["08_convolution.ipynb"])
    assert "The matrix of this letter holds 9.0 times" in text
    assert "**im2col** ([Chellapilla et al., 2006](references.ipynb#chellapilla2006))." in text
    assert "\\approx \\frac{r s}{\\sigma^2} \\tag{8.2}\n$$" in text
    assert "It is [Eq. (8.3)](#eq-conv-address), with" in text
    assert "[Figure 7.3](#fig-traffic)" in text_of(made["07_matmul.ipynb"])
    assert "[Exercise 3.1](03_memory_roofline.ipynb#ex-03-1)" in text_of(made["07_matmul.ipynb"])
    assert "**Williams et al., 2009.** Samuel Williams" in text_of(made["references.ipynb"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("as {foo}`bar` says", "role {foo}"),
        ("see {cite}`nobody1999`", "nobody1999"),
        ("{glue:text}`nothing:.1f`", "glued as 'nothing'"),
        ("{eq}`eq-nowhere`", "eq-nowhere"),
        ("[here](nowhere.ipynb)", "nowhere"),
        ("```{note}\nHear!\n```", "directive {note}"),
        (":::{tip}\nHear!\n:::", "directive {tip}"),
        ("```{admonition} Of `f`\nSo.\n```", "use colons"),
        ("```{exercise} Never\n:label: ex-99-1\n\nclosed", "never closed"),
        ("% a comment of MyST", "line '% a comment"),
    ],
)
def test_what_has_no_plain_form_is_an_error(copies: ModuleType, text: str, said: str) -> None:
    page = copies.Page("x.ipynb", {}, copies.Book({}, {}))
    with pytest.raises(copies.CopyError, match=re.escape(said)):
        page.render(text)


def test_a_box_is_a_fold_or_a_quotation(copies: ModuleType) -> None:
    page = copies.Page("x.ipynb", {"n": "7"}, copies.Book({}, {}))
    fold = ":::{admonition} One minute: $n$ of `f`?\n:class: dropdown tip\n{glue:text}`n`.\n:::"
    assert page.render(fold) == (
        "<details>\n<summary>One minute: $n$ of <code>f</code>?</summary>\n\n7.\n\n</details>"
    )
    box = ":::{admonition} Elsewhere\n:class: note\n- a {term}`tile <tiling>`\n\n- b\n:::"
    assert page.render(box) == "> **Elsewhere**\n>\n> - a tile\n>\n> - b"


def test_code_in_a_text_stays_as_it_is(copies: ModuleType) -> None:
    page = copies.Page("x.ipynb", {"n": "'7'"}, copies.Book({}, {}))
    text = "a ``{glue:text}`n` `` b `$x$`\n\n```python\n# {cite}`k`\n```\n\n$a_{b}$ and $[i](j)$"
    assert page.render(text) == text
    assert page.render("{glue:text}`n`, {glue:text}`n:.1f`<!-- why -->") == "7, 7.0"


def test_only_what_serves_the_text_leaves_the_code(copies: ModuleType) -> None:
    before = [
        "import math\nfrom os import path, sep\nfrom myst_nb import glue",
        "x = 1\nsaid = {'a': x}\n# for the text\nfor k, v in said.items():\n    glue(k, v)\nx;",
        "for i in (1, 2):\n    glue('b', i)\n    print(i)\nglue('c', sep), glue('d', math.pi)",
        "def f():\n    return x\nf()\ny = f()\nglue('e', y);",
        "if x:\n    glue('g', x)",
    ]
    assert copies.without_glue(before) == [
        "from os import path",
        "x = 1\nx;",
        "for i in (1, 2):\n    print(i)",
        "def f():\n    return x\nf();",
        "",
    ]


# --- files ----------------------------------------------------------------------------------------
def test_a_changed_copy_is_kept_and_an_older_one_renewed(
    copies: ModuleType, made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {name: made[name] for name in ("references.ipynb", "validation.ipynb", "hardware.ipynb")}
    monkeypatch.setattr(copies, "all_copies", lambda: json_copy(few))
    folder = tmp_path / "my notebooks"
    assert copies.write_copies(folder) == (list(few), [])
    assert copies.write_copies(folder) == ([], [])
    changed, opened, older = (folder / name for name in few)
    notebook = json.loads(changed.read_text())
    notebook["cells"][0]["source"] += ["\nmy note"]
    changed.write_text(json.dumps(notebook))
    notebook = json.loads(opened.read_text())
    notebook["metadata"]["language_info"]["version"] = "3.11.7"  # a viewer's own doing
    opened.write_text(json.dumps(notebook))
    few["hardware.ipynb"].cells[0].source += "\nA new edition."
    before = changed.read_bytes(), opened.read_bytes()
    assert copies.write_copies(folder) == (["hardware.ipynb"], ["references.ipynb"])
    assert (changed.read_bytes(), opened.read_bytes()) == before
    assert "A new edition." in older.read_text()
    assert {path.name for path in folder.iterdir()} == set(few), "nothing is left beside them"


def json_copy(notebooks: dict[str, NotebookNode]) -> dict[str, NotebookNode]:
    return {k: nbformat.from_dict(json.loads(json.dumps(v))) for k, v in notebooks.items()}


@pytest.mark.parametrize("kind", ["rubbish", "own", "folder", "link", "dangling"])
def test_what_the_reader_put_there_is_never_replaced(
    copies: ModuleType, made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    few = {"references.ipynb": made["references.ipynb"]}
    monkeypatch.setattr(copies, "all_copies", lambda: json_copy(few))
    path = tmp_path / "in" / "references.ipynb"
    other = tmp_path / "elsewhere.ipynb"
    path.parent.mkdir()
    if kind == "folder":
        path.mkdir()
    elif kind in ("link", "dangling"):
        if kind == "link":
            copies.write_copies(tmp_path)
            (tmp_path / "references.ipynb").rename(other)
        path.symlink_to(other)
    else:
        path.write_text("{" if kind == "rubbish" else nbformat.writes(nbformat.v4.new_notebook()))
    before = sorted((p.name, p.is_file() and p.read_bytes()) for p in tmp_path.rglob("*"))
    assert copies.write_copies(path.parent) == ([], ["references.ipynb"])
    assert sorted((p.name, p.is_file() and p.read_bytes()) for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("place", ["notebooks", "book/sub"])
def test_the_books_own_folders_are_refused(copies: ModuleType, capsys, place: str) -> None:
    assert copies.main([str(ROOT / place)]) == 1
    assert "a folder of their own" in capsys.readouterr().err
    assert not (ROOT / place / "references.ipynb").exists()


def test_jupyter_trusts_a_copy_until_someone_else_changes_it(
    copies: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    cell = nbformat.v4.new_code_cell("draw()", id="a")
    cell.outputs = [nbformat.v4.new_output("display_data", data={"image/svg+xml": "<svg/>"})]
    notebook = nbformat.v4.new_notebook(cells=[cell])
    nbformat.write(notebook, tmp_path / "a.ipynb")
    copies.trust([tmp_path / "a.ipynb"])
    notary = copies.NotebookNotary()
    assert notary.check_signature(nbformat.read(tmp_path / "a.ipynb", as_version=4))
    notebook.cells[0].outputs[0].data["image/svg+xml"] = "<svg onload='other()'/>"
    assert not notary.check_signature(notebook)


# --- they run -------------------------------------------------------------------------------------

FORBID = """
import importlib.abc, json, sys

class Forbid(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("myst_nb", "sphinx", "jupyter_book"):
            raise ImportError(name)

sys.meta_path.insert(0, Forbid())
"""


def test_a_copy_runs_elsewhere_and_without_the_book(made, tmp_path: Path) -> None:
    """All imports of all copies, and chapter 22, which reads a table, from an empty folder."""
    imports = [c.source for n in made.values() for c in code_of(n) if "import " in c.source]
    chapter = [cell.source for cell in code_of(made["22_collectives.ipynb"])]
    (tmp_path / "cells.json").write_text(json.dumps(imports + chapter))
    script = FORBID + "for cell in json.load(open('cells.json')):\n    exec(cell, globals())\n"
    env = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outputs = [o for c in code_of(made["22_collectives.ipynb"]) for o in c.outputs]
    printed = [output.text for output in outputs if output.output_type == "stream"]
    assert len(printed) > 5
    assert [text for text in printed if text not in done.stdout] == []
