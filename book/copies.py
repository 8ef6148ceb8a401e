"""Write copies of the chapters that open cleanly in any notebook viewer: `lab.py copies`.

python book/copies.py FOLDER

A copy has the numbers, titles and captions of the rendered page as plain Markdown, its solutions
folded away, and nothing of the book's machinery. A copy that its reader has changed stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import nbformat
from chapter_numbers import number_of
from nbformat import NotebookNode
from nbformat.sign import NotebookNotary
from plain_code import without_glue
from plain_text import Block, Book, CopyError, Page, anchor, bibliography, blocks, joined

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "notebooks"
OWN = "ascend_lab"
GLUED = "application/papermill.record/"
FRAMES = "application/vnd.ascend-lab.frames+json"
LABELLED = re.compile(r"\$\$ *\(([\w-]+)\)|^\(([\w:-]+)\)=\n+#+ (.+)$", re.MULTILINE)
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


# --- what texts refer to --------------------------------------------------------------------------


def title_of(notebook: NotebookNode) -> str:
    """Return the title of a notebook."""
    return re.search(r"^# (.+)$", notebook.cells[0].source, re.MULTILINE)[1]


def labels_of(file: str, notebook: NotebookNode) -> dict[str, tuple[str, str]]:
    """Return {label: (file, words)} of a notebook's figures, formulas, exercises and sections."""
    number = number_of(f"notebooks/{file}")
    chapter = "" if number is None else f"{number}."
    found = {Path(file).stem: (file, title_of(notebook))}
    counts = {"Figure {}": 0, "Eq. ({})": 0, "Exercise {}": 0}

    def count(form: str, label: str) -> None:
        counts[form] += 1
        found[label] = (file, form.format(f"{chapter}{counts[form]}"))

    for cell in notebook.cells:
        if cell.cell_type == "code" and (figure := figure_of(cell)):
            count("Figure {}", figure["name"])
        for block in flat(cell.source) if cell.cell_type == "markdown" else ():
            if block.name == "exercise":
                count("Exercise {}", block.options["label"])
            elif block.name == "math" and "label" in block.options:
                count("Eq. ({})", block.options["label"])
            for formula, section, title in LABELLED.findall(block.body if not block.name else ""):
                if formula:
                    count("Eq. ({})", formula)
                else:
                    found[section] = (file, title)
    return found


def flat(text: str) -> Iterator[Block]:
    """Yield the blocks of a text and of the directives in it."""
    for block in blocks(text):
        yield block
        if block.name in ("exercise", "solution"):
            yield from flat(block.body)


def figure_of(cell: NotebookNode) -> dict[str, str]:
    """Return name and caption of a cell's figure, or {}."""
    return cell.metadata.get("mystnb", {}).get("figure", {})


def glued_in(notebook: NotebookNode) -> dict[str, str]:
    """Return {name: text} of the values that the code glues into the text."""
    return {
        output.metadata["scrapbook"]["name"]: output.data[f"{GLUED}text/plain"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if is_glued(output)
    }


def is_glued(output: NotebookNode) -> bool:
    """Tell whether an output is a value for the text."""
    return any(kind.startswith(GLUED) for kind in output.get("data", {}))


# --- cells ----------------------------------------------------------------------------------------


class Copy:
    """The cells of a copy while it is written."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.cells: list[NotebookNode] = []
        self.solved = ""  # the exercise whose solution is open, and what stands in it
        self.folded: list[str] = []

    def markdown(self, text: str, key: str) -> None:
        """Add a Markdown cell."""
        if text:
            ids = {cell.id for cell in self.cells}
            own = next(i for i in (key, *(f"{key}-{n}" for n in range(2, 99))) if i not in ids)
            self.cells.append(nbformat.v4.new_markdown_cell(text, id=own))

    def text(self, cell: NotebookNode) -> None:
        """Add a cell of text: exercises in cells of their own, solutions folded away."""
        plain: list[str] = []
        for block in blocks(cell.source):
            if self.solved and block.name not in ("solution-end", "exercise", "solution-start"):
                self.folded.append(self.page.block(block))
            elif block.name in ("solution-start", "solution", "solution-end", "exercise"):
                self.markdown(joined(plain), cell.id)
                plain = []
                self.exercise(block, cell.id)
            else:
                plain.append(self.page.block(block))
        self.markdown(joined(plain), cell.id)

    def exercise(self, block: Block, key: str) -> None:
        """Add an exercise, or open or close a solution."""
        if bool(self.solved) != (block.name == "solution-end"):
            raise self.page.problem(f"a {{{block.name}}} where none can stand")
        if block.name == "exercise":
            self.markdown(self.page.block(block), key)
        elif block.name == "solution-start":
            self.solved = block.argument
        elif block.name == "solution":
            self.fold(block.argument, [self.page.render(block.body)], key)
        else:
            self.fold(self.solved, self.folded, key)
            self.solved, self.folded = "", []

    def fold(self, label: str, parts: Sequence[str], key: str) -> None:
        """Add a solution that a click opens, in every viewer."""
        summary = f"<summary>Solution of {self.page.words(label)}</summary>"
        text = joined(parts).replace("he cell below", "he code below")  # no cell here
        self.markdown(f"<details>\n{summary}\n\n{text}\n\n</details>", key)

    def code(self, cell: NotebookNode, source: str) -> None:
        """Add a cell of code, a figure's caption under it; no answer before the reader runs it."""
        tags = cell.metadata.get("tags", [])
        shown = [seen for output in cell.outputs if (seen := plain_output(output))]
        if self.solved:
            answers = [] if "check_ex_" in source else printed(shown)
            self.folded += [fenced("python", source), *answers]
            return
        if not source:
            return
        bare = {"exercise-stub", "remove-cell", "hide-output"} & set(tags) or "check_ex_" in source
        new = nbformat.v4.new_code_cell(source, id=cell.id, outputs=[] if bare else shown)
        if {"hide-input", "remove-input", "remove-cell"} & set(tags):
            new.metadata["jupyter"] = {"source_hidden": True}
        if figure := figure_of(cell):
            self.point(figure["name"])
        self.cells.append(new)
        if figure:
            words = self.page.words(figure["name"])
            caption = f"**{words}.** {self.page.render(figure['caption'])}"
            self.markdown(caption, f"{cell.id}-caption")

    def point(self, label: str) -> None:
        """Let links to a figure lead to the text above it, so that the figure is in sight."""
        if self.cells[-1].cell_type == "markdown":
            self.cells[-1].source += f"\n\n{anchor(label)}"
        else:
            self.markdown(anchor(label), f"{label}-above")


def plain_output(output: NotebookNode) -> NotebookNode | None:
    """Return an output as it shows without a kernel: no glued value, no frames; None if empty."""
    if is_glued(output):
        return None
    output = nbformat.from_dict(json.loads(json.dumps(output)))
    output.get("data", {}).pop(FRAMES, None)
    if "execution_count" in output:
        output["execution_count"] = None
    return output


def fenced(language: str, text: str) -> str:
    """Return code or what it printed in a fence that is longer than any in it."""
    longest = max([2, *(len(run) for run in re.findall("`+", text))])
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text}\n{fence}" if text else ""


def printed(outputs: Sequence[NotebookNode]) -> list[str]:
    """Return what outputs say, as fences of text."""
    texts = [output.get("text") or output.data["text/plain"] for output in outputs]
    return [fenced("text", text.rstrip("\n")) for text in texts]


def copy_of(notebook: NotebookNode, file: str, book: Book) -> NotebookNode:
    """Return the reader's copy of a notebook."""
    copy = Copy(Page(file, glued_in(notebook), book))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    sources = dict(zip([c.id for c in code], without_glue([c.source for c in code]), strict=True))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            copy.code(cell, sources[cell.id])
        else:
            copy.text(cell)
    if copy.solved:
        raise copy.page.problem(f"the solution of {copy.solved} is never closed")
    if number := number_of(f"notebooks/{file}"):
        first = copy.cells[0]
        first.source = re.sub(r"^# ", f"# {number}. ", first.source, count=1, flags=re.MULTILINE)
    return notebook_of(copy.cells)


def notebook_of(cells: list[NotebookNode]) -> NotebookNode:
    """Return a notebook of these cells with a plain kernel."""
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata)


def all_copies(sources: Path = SOURCES) -> dict[str, NotebookNode]:
    """Return {file name: copy} of every notebook, and of the list of sources."""
    files = sorted(sources.glob("*.ipynb"))
    notebooks = {file.name: nbformat.read(file, as_version=4) for file in files}
    words, listed = bibliography(ROOT / "book" / "references.bib")
    labels: dict[str, tuple[str, str]] = {}
    for name, notebook in notebooks.items():
        labels |= labels_of(name, notebook)
    book = Book(labels, words)
    copies = {name: copy_of(notebook, name, book) for name, notebook in notebooks.items()}
    cell = nbformat.v4.new_markdown_cell(listed, id="references")
    return copies | {"references.ipynb": notebook_of([cell])}


# --- files ----------------------------------------------------------------------------------------


def digest_of(notebook: Mapping[str, object]) -> str:
    """Return a digest of the cells: viewers write other metadata when a file is only opened."""
    return hashlib.sha256(json.dumps(notebook["cells"], sort_keys=True).encode()).hexdigest()


def written_in(path: Path) -> str:
    """Return the digest of a copy that is as it was written, or "": all else is the reader's."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        digest = digest_of(found)
        return digest if found["metadata"][OWN]["digest"] == digest else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def write_copies(folder: Path) -> tuple[list[str], list[str]]:
    """Write new and renewed copies; return the names written, and those kept as changed."""
    copies = all_copies()
    folder.mkdir(parents=True, exist_ok=True)
    written, kept = [], []
    for name, notebook in copies.items():
        path, digest = folder / name, digest_of(json.loads(nbformat.writes(notebook)))
        if path.exists() or path.is_symlink():
            there = "" if path.is_symlink() else written_in(path)
            if there != digest:
                (written if there else kept).append(name)
            if there in ("", digest):
                continue
        else:
            written.append(name)
        notebook.metadata[OWN] = {"digest": digest}
        # A name of this process's own: two runs at once write the same copy, and neither fails.
        beside = folder / f".{name}.{os.getpid()}.new"
        beside.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8", newline="\n")
        beside.replace(path)
    return written, kept


def trust(paths: Iterable[Path]) -> None:
    """Sign the copies as the user's own: Jupyter shows no drawing of a file it does not trust."""
    notary = NotebookNotary()
    for path in paths:
        with suppress(OSError):  # then drawings appear when their cells are run
            notary.sign(nbformat.read(path, as_version=4))


def main(arguments: list[str]) -> int:
    """Write the copies and say what was done."""
    folder = Path(arguments[0])
    if any(folder.resolve().is_relative_to(ROOT / own) for own in ("notebooks", "book")):
        print(f"copies go in a folder of their own, not in {folder}", file=sys.stderr)
        return 1
    try:
        written, kept = write_copies(folder)
    except (CopyError, OSError) as error:
        where = f"copies go in a folder that can be written, not in {folder}: "
        print(f"{where}{error.strerror}" if isinstance(error, OSError) else error, file=sys.stderr)
        return 1
    trust(folder / name for name in written)
    print(f"lab: {len(written)} copies written in {folder}")
    if kept:
        print(f"lab: kept as you changed them (rename one to get it anew): {', '.join(kept)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
