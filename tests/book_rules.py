"""The rules of the book, from text or cells to complaints; test_book_lint.py applies them."""

import ast
import json
import re
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
Cell = dict[str, Any]

FENCE = re.compile(r"\s*(`{3,}|~{3,}|:{3,})(.*)")
INLINE_CODE = re.compile(r"(?<!\})`[^`\n]+`")
CITE = re.compile(r"\{cite(?::\w+)?\}`([^`]+)`")
NUMBER = re.compile(
    r"\d[\d.,]*\s*(?:[GTMK]B/s|[KMGT]iB/s|[TGP]FLOPS|[TGP]FLOP/s|TOPS|[KMGT]iB|[kKMGT]B|[GM]Hz)\b"
)
ALLOWED = re.compile(r"<!-- number-ok: \S.*?-->")
ALLOWED_PAGE = re.compile(r"<!-- number-ok-page: \S.*?-->")
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z*{$`])")
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
    """One cell holds all imports, at most eight statements of them from this package."""
    importing = [
        index
        for index, cell in enumerate(code_of(cells))
        if any(isinstance(node, ast.Import | ast.ImportFrom) for node in body_of(cell))
    ]
    if len(importing) != 1:
        return [f"code cells {importing} import; one cell does"]
    statements = body_of(code_of(cells)[importing[0]])
    froms = [node.module or "" for node in statements if isinstance(node, ast.ImportFrom)]
    ours = sum(module.split(".")[0] == "ascend_lab" for module in froms)
    return [] if ours <= 8 else [f"{ours} imports from ascend_lab; at most 8: use the facades"]


def body_of(cell: Cell) -> list[ast.stmt]:
    plain = [line for line in source_of(cell).splitlines() if not line.startswith(("%", "!"))]
    return ast.parse("\n".join(plain)).body


def rhythm_complaints(cells: list[Cell]) -> list[str]:
    """A prediction comes in; 3 to 6 exercises, one of them in code; a deliberate failure."""
    code = [source_of(cell) for cell in code_of(cells)]
    tags = [tag for cell in cells for tag in cell["metadata"].get("tags", [])]
    found = []
    if not any(re.search(r"predict\w*\(", text) for text in code):
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


def box_complaints(cells: list[Cell]) -> list[str]:
    """The code of an answer stands inside the folded box: between solution-start and solution-end.

    A box that closes itself cannot hold a cell, so none may follow it.
    """
    found = []
    for cell, after in pairwise(cells):
        last = re.findall(r"^[`:]{3,}\{([\w-]+)\} ?(\S*)", source_of(cell), re.MULTILINE)[-1:]
        if after["cell_type"] == "code" and cell["cell_type"] == "markdown":
            rest = source_of(cell).rsplit("{solution}", 1)[-1]
            if last and last[0][0] == "solution" and "\n## " not in rest:
                found.append(f"{last[0][1]}: a cell of the answer stands outside its box")
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


def without_code(text: str) -> str:
    """Blank out fenced and inline code; what stands inside directives stays."""
    kept: list[str] = []
    open_fences: list[tuple[str, bool]] = []  # fence, and whether code stands inside
    for line in text.splitlines():
        fence = FENCE.match(line)
        if (
            open_fences
            and fence
            and not fence[2].strip()
            and fence[1].startswith(open_fences[-1][0])
        ):
            open_fences.pop()
            kept.append("")
        elif open_fences and open_fences[-1][1]:
            kept.append("")
        elif fence:
            info = fence[2].strip()
            open_fences.append((fence[1], not info.startswith("{") or info.startswith("{code")))
            kept.append("")
        else:
            kept.append(INLINE_CODE.sub("", line))
    return "\n".join(kept)


def sentences_of(text: str) -> list[str]:
    """Split Markdown into sentences, table rows and directive lines; code is left out."""
    rows: list[str] = []
    for block in re.split(r"\n\s*\n", without_code(text)):
        kept = ALLOWED.search(block)
        joined = re.sub(r"\n(?![|`:>-])", " ", block)
        rows += (
            [] if kept else [row for line in joined.splitlines() for row in SENTENCE.split(line)]
        )
    return rows


def number_complaints(text: str) -> list[str]:
    """No typed hardware figure: it is computed (glue, code) or its sentence cites a source."""
    if ALLOWED_PAGE.search(text):
        return []
    excused = re.compile(r"\{(?:cite|glue)")
    return [
        f"a typed figure: {row.strip()[:90]}"
        for row in sentences_of(text)
        if NUMBER.search(row) and not excused.search(row)
    ]


def word_complaints(text: str) -> list[str]:
    """No path of someone's machine, no left-over note."""
    return [match[0] for rule in (MACHINE_PATH, LEFTOVER) for match in rule.finditer(text)]


def image_complaints(text: str) -> list[str]:
    """Every picture in Markdown has an alt text."""
    bare = [f"![]({target})" for target in re.findall(r"!\[\s*\]\(([^)]*)\)", text)]
    blocks = re.findall(r"^([`:]{3,})\{(?:figure|image)\}(.*?)^\1", text, re.MULTILINE | re.DOTALL)
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


def home_complaints(text: str, root: Path) -> list[str]:
    """A chapter ends with two to four files of the package in which its matter lives."""
    part = text.partition("\n## Where this lives\n")[2].partition("\n## ")[0]
    files = re.findall(r"^- `([^`]+\.py)`: ", part, re.MULTILINE)
    found = [f"{name}: no such file" for name in files if not (root / name).is_file()]
    return found if 2 <= len(files) <= 4 else [f"Where this lives: {len(files)} files; 2 to 4"]
