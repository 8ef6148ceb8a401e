"""The rules of the book, from text or cells to complaints; test_book_lint.py applies them."""

import ast
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

FRAMES = "application/vnd.ascend-lab.frames+json"
GLUED = "application/papermill.record/"
WIDEST = 88
Cell = dict[str, Any]

FENCE = re.compile(r"\s*(`{3,}|~{3,}|:{3,})(.*)")
INLINE_CODE = re.compile(r"(\{[\w:.+-]+\}`[^`\n]+`)|`[^`\n]+`")
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


def told_cells(cells: list[Cell]) -> list[Cell]:
    """Return the code cells that tell a chapter: those of exercises and of glue alone left out."""
    told = []
    solved = False
    for cell in cells:
        if cell["cell_type"] == "markdown":
            gates = re.findall(r"^[`:]{3,}\{solution-(start|end)\}", source_of(cell), re.MULTILINE)
            solved = gates[-1] == "start" if gates else solved
            continue
        exercise = solved or "exercise" in cell["metadata"] or "check_ex_" in source_of(cell)
        hidden = {"remove-input", "remove-cell"} & set(tags_of(cell)) and not shown_in(cell)
        if not exercise and not hidden:
            told.append(cell)
    return told


def tags_of(cell: Cell) -> list[str]:
    return cell["metadata"].get("tags", [])


def shown_in(cell: Cell) -> list[Any]:
    """Return a cell's outputs without the values that it glues into the text."""
    return [
        output
        for output in cell.get("outputs", [])
        if not any(kind.startswith(GLUED) for kind in output.get("data", {}))
    ]


def measure_complaints(cells: list[Cell]) -> list[str]:
    """15 to 32 told cells of at most 25 lines; the median of all is at most 9; an answer has 40."""
    told = [lines_in(cell) for cell in told_cells(cells)]
    found = []
    if not 15 <= len(told) <= 32:
        found.append(f"{len(told)} code cells besides exercises; 15 to 32 make a chapter")
    sizes = [lines_in(cell) for cell in code_of(cells)]
    if sizes and statistics.median(sizes) > 9:
        found.append(f"the median cell has {statistics.median(sizes)} lines; at most 9")
    found += [f"a cell has {size} lines; at most 25" for size in told if size > 25]
    return found + [f"an answer has {size} lines; at most 40" for size in sizes if size > 40]


def import_complaints(cells: list[Cell]) -> list[str]:
    """One cell holds all imports, the first one, in at most twelve lines of them."""
    importing = {
        index: imports
        for index, cell in enumerate(code_of(cells))
        if (imports := [n for n in body_of(cell) if isinstance(n, ast.Import | ast.ImportFrom)])
    }
    if list(importing) != [0]:
        return [f"code cells {list(importing)} import; the first one does"]
    lines = sum((node.end_lineno or 0) - node.lineno + 1 for node in importing[0])
    return [] if lines <= 12 else [f"{lines} lines of imports; at most 12"]


def body_of(cell: Cell) -> list[ast.stmt]:
    plain = [line for line in source_of(cell).splitlines() if not line.startswith(("%", "!"))]
    return ast.parse("\n".join(plain)).body


def exercises_with(tag: str, cells: list[Cell]) -> set[str]:
    """Return the exercises that have a cell with a tag; a solution may take several cells."""
    return {str(c["metadata"].get("exercise", "")) for c in cells if tag in tags_of(c)}


def rhythm_complaints(cells: list[Cell]) -> list[str]:
    """A prediction comes in; one exercise at least is in code; a deliberate failure."""
    code = [source_of(cell) for cell in code_of(cells)]
    found = []
    if not any(re.search(r"predict\w*\(", text) for text in code):
        found.append("no cell asks for a prediction")
    if not any("except " in text for text in code):
        found.append("no deliberate failure is caught and shown")
    stubs, solutions = (exercises_with(f"exercise-{s}", cells) for s in ("stub", "solution"))
    if stubs != solutions or not stubs:
        found.append(f"stubs of {sorted(stubs)}, solutions of {sorted(solutions)}; the same")
    return found


# --- predictions ----------------------------------------------------------------------------------

SAYS = re.compile(r"[Tt]he model says (-?[\d.,]*\d)(?:e([+-]\d+))? ?(\S*?)(?=[.:]?(?:\s|$))")
UNITS = "ms|us|µs|s|cycles|cores|%|x|times|bytes|[KMG]i?B|[TGM]B/s|[TGM]Hz|TFLOPS"
FIGURE = re.compile(
    rf"(?<![\w.,\-/])(\d+(?:,\d{{3}})*(?:\.\d+)?)(?![\w.]*[A-WYZa-wyz\d])(?: ?({UNITS})(?!\w))?"
)
CLOSE = 0.02


def calls_in(cell: Cell, function: str) -> list[ast.Call]:
    """Return the calls of `function` or `checks.function` in a cell, from top to bottom."""
    found = []
    for node in (node for statement in body_of(cell) for node in ast.walk(statement)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            found += [node] if name == function else []
    return sorted(found, key=lambda call: call.lineno)


def said_in(cell: Cell) -> str:
    """Return what a code cell printed or showed as text, glued values left out."""
    texts = []
    for output in shown_in(cell):
        text = output.get("text", output.get("data", {}).get("text/plain", ""))
        texts.append("".join(text))
    return "\n".join(texts)


def glued_in(cells: list[Cell]) -> dict[str, str]:
    """Return {name: text} of the values that code glues into the prose."""
    return {
        output["metadata"]["scrapbook"]["name"]: "".join(output["data"][f"{GLUED}text/plain"])
        for cell in code_of(cells)
        for output in cell.get("outputs", [])
        if f"{GLUED}text/plain" in output.get("data", {})
    }


def resolved(text: str, glued: dict[str, str]) -> str:
    """Return prose with its glued values in it, formatted as the page does."""

    def fill(role: re.Match[str]) -> str:
        name, _, form = role[1].partition(":")
        value = glued.get(name, "").strip("'")
        try:
            return format(ast.literal_eval(value), form)
        except (ValueError, SyntaxError):
            return value

    return re.sub(r"\{glue:text\}`([^`]+)`", fill, text)


def answers_of(cells: list[Cell]) -> list[tuple[int, float, str]]:
    """Return (place of the `predict` cell, value that `compare` printed, unit) in order."""
    places = {}
    answers = []
    for place, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        for statement in body_of(cell):
            if isinstance(statement, ast.Assign) and calls_in(cell, "predict"):
                places |= {ast.unparse(target): place for target in statement.targets}
        said = SAYS.findall(said_in(cell))
        for call, (digits, power, unit) in zip(calls_in(cell, "compare"), said, strict=False):
            value = float(digits.replace(",", "")) * 10 ** int(power or 0)
            answers.append((places.get(ast.unparse(call.args[0]), -1), value, unit))
    return answers


def digits_in(number: str) -> int:
    """Return how many significant digits a printed number has."""
    return len(re.sub(r"[.,]", "", number).lstrip("0"))


def gives_away(text: str, value: float, unit: str) -> list[str]:
    """Return what in a paragraph or printed text says a value, or lets two numbers say it."""
    seen = [(float(n.replace(",", "")), n, u) for n, u in FIGURE.findall(text)]
    found = [
        f"{digits} is the answer"
        for number, digits, _ in seen
        if digits_in(digits) > 1
        for places in (2, 3)
        if number == float(f"{value:.{places}g}") or float(f"{number:.{places}g}") == value
    ]
    for (one, said, its), (other, too, their) in permutations(seen, 2):
        if not one * other or (its != their and its and their):
            continue
        if not (its and their) and min(digits_in(said), digits_in(too)) < 3:
            continue
        ways = [one / other] if unit == "x" else [one - other]
        if unit == "%":
            ways = [100 * one / other, 100 * (one / other - 1)] + ways * (its == "%")
        if any(abs(way - value) <= CLOSE * abs(value) for way in ways):
            found.append(f"{said} and {too} give the answer")
    return list(dict.fromkeys(found))


def prediction_complaints(cells: list[Cell]) -> list[str]:
    """The reader makes the guess, and nothing above it says the answer, which is folded away.

    The answer is what `compare` printed, to two or three digits; or a ratio or difference within
    2 % of it, of two numbers of one paragraph or of one printed text.
    """
    found = []
    glued = glued_in(cells)
    for cell in code_of(cells):
        found += [
            "predict(...) comes with a guess; the reader makes it"
            for call in calls_in(cell, "predict")
            if len(call.args) > 1 or any(word.arg == "guess" for word in call.keywords)
        ]
        if calls_in(cell, "compare") and "hide-output" not in tags_of(cell):
            found.append("a cell with compare(...) lacks the tag hide-output")
    answers = answers_of(cells)
    for place, value, unit in answers:
        above = cells[: place + 1]
        if place != answers[0][0]:  # a later question is read with its section
            starts = [i for i, cell in enumerate(above) if "\n## " in f"\n{source_of(cell)}"]
            above = above[starts[-1] :]
        texts = [resolved(prose, glued) for prose in map(without_links, proses(above))]
        texts += [said_in(cell) for cell in code_of(above[:-1])]
        texts += [caption for cell in above for caption in captions_of(cell)]
        found += [
            f"{said}, {value:g}{unit}: {' '.join(text.split())[:70]}"
            for text in texts
            for said in gives_away(text, value, unit)
        ]
        codes = "\n".join(source_of(cell) for cell in code_of(above))
        found += [f"{said}: in code" for said in gives_away(codes, value, "") if "and" not in said]
    return found if answers else [*found, "no compare(...) prints what the model says"]


def proses(cells: list[Cell]) -> list[str]:
    """Return the paragraphs of the Markdown of cells, code left out."""
    return [p for p in re.split(r"\n\s*\n", without_code(prose_of(cells))) if p.strip()]


def without_links(text: str) -> str:
    """Leave out the targets of roles, which are names, and of links; glue stays."""
    text = re.sub(r"\{(?!glue)[\w:]+\}`[^`]*`", " ", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def captions_of(cell: Cell) -> list[str]:
    """Return caption and alt text of a cell's figure."""
    options = cell["metadata"].get("mystnb", {})
    return [options.get(kind, {}).get(key, "") for kind, key in FIGURE_TEXTS]


FIGURE_TEXTS = (("figure", "caption"), ("image", "alt"))


# --- the parts every chapter has ------------------------------------------------------------------
def wide_complaints(cells: list[Cell]) -> list[str]:
    """No line of code is wider than the page's column."""
    return [
        f"{len(line)} columns: {line.strip()[:60]}"
        for cell in code_of(cells)
        for line in source_of(cell).splitlines()
        if len(line) > WIDEST
    ]


def table_complaints(cells: list[Cell]) -> list[str]:
    """No printed line with columns is wider than the page's column: only sentences wrap there."""
    texts = (out["text"] for cell in code_of(cells) for out in cell["outputs"] if "text" in out)
    rows = [row for text in texts for row in "".join(text).splitlines()]
    columns = re.compile(r"\S {2,}(?=\S)")
    return [
        f"{len(row)} columns: {row.strip()[:60]}"
        for row in rows
        if len(row) > WIDEST and len(columns.findall(row)) > 1
    ]


def listing_complaints(text: str) -> list[str]:
    """No line of a Python listing in a text is wider than the page's column."""
    listings = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rows = "".join(listings).splitlines()
    return [f"{len(row)} columns: {row.strip()[:60]}" for row in rows if len(row) > WIDEST]


def exercise_complaints(cells: list[Cell]) -> list[str]:
    """4 to 7 exercises, exactly one of which takes an evening."""
    titles = re.findall(r"^[`:]{3,}\{exercise(?:-start)?\} *(.*)$", prose_of(cells), re.MULTILINE)
    evenings = sum(title.rstrip().endswith("(an evening)") for title in titles)
    found = [] if 4 <= len(titles) <= 7 else [f"{len(titles)} exercises; 4 to 7"]
    return found if evenings == 1 else [*found, f"{evenings} end in '(an evening)'; one does"]


def boxes_of(cells: list[Cell]) -> list[tuple[str, str]]:
    """Return (title, class) of the boxes of a chapter."""
    pattern = r"^[`:]{3,}\{admonition\} *(.*)\n(?::class: *(.*))?"
    return re.findall(pattern, prose_of(cells), re.MULTILINE)


def minute_complaints(cells: list[Cell]) -> list[str]:
    """Two or three questions of a minute inside a chapter, their answers folded."""
    asked = [kind for title, kind in boxes_of(cells) if title.startswith("One minute: ")]
    found = [] if 2 <= len(asked) <= 3 else [f"{len(asked)} boxes 'One minute: ...'; 2 or 3"]
    return found + ["an answer is open" for kind in asked if "dropdown" not in kind.split()]


def elsewhere_complaints(cells: list[Cell]) -> list[str]:
    """One box says what the field calls it."""
    count = sum(title == "Elsewhere this is called" for title, _ in boxes_of(cells))
    return [] if count == 1 else [f"{count} boxes 'Elsewhere this is called'; one"]


def keep_complaints(cells: list[Cell]) -> list[str]:
    """One sentence to keep."""
    count = len(re.findall(r"^\*\*Keep:\*\* \S", prose_of(cells), re.MULTILINE))
    return [] if count == 1 else [f"{count} lines '**Keep:** ...'; one"]


def bitmap_complaints(cells: list[Cell]) -> list[str]:
    """No figure is a bitmap."""
    return [
        f"a bitmap: {source_of(cell).splitlines()[-1][:60]}"
        for cell in code_of(cells)
        for output in shown_in(cell)
        if {"image/png", "image/jpeg"} & set(output.get("data", {}))
    ]


def repeat_complaints(cells: list[Cell], everywhere: Counter[str]) -> list[str]:
    """No sentence of five words and more stands in ten chapters; `everywhere` counts chapters."""
    return sorted(f"stands in ten: {s}" for s in plain_sentences(cells) if everywhere[s] >= 10)


def plain_sentences(cells: list[Cell]) -> set[str]:
    """Return the sentences of five words and more, with their numbers and names left out."""
    found = set()
    for row in sentences_of(prose_of(cells)):
        text = re.sub(r"\{[\w:]+\}`[^`]*`|\$[^$]*\$|[^a-zA-Z ]", " ", row)
        ended = re.search(r"[.?!][*_)\"']*\s*$", row) and not row.startswith((":", "`"))
        if ended and len(words := text.lower().split()) >= 5:
            found.add(" ".join(words))
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


def fence_complaints(text: str) -> list[str]:
    """No backtick stands in the title of a directive fenced by backticks: it would be no fence."""
    pattern = r"^ *`{3,}[^`\n]+`.*$"
    return [
        f"a fence with a backtick: {row[:70]}" for row in re.findall(pattern, text, re.MULTILINE)
    ]


def figure_complaints(cell: Cell) -> list[str]:
    """A cell whose output is a picture has a name, a caption and an alt text; and the reverse."""
    shown = [output.get("data", {}) for output in cell.get("outputs", [])]
    pictured = any(
        kind.startswith("image/") for data in shown if FRAMES not in data for kind in data
    )
    options = cell["metadata"].get("mystnb", {})
    figure = options.get("figure", {})
    alt = options.get("image", {}).get("alt", "")
    if not pictured:
        return [f"{figure.get('name')}: a figure cell without a picture"] if figure else []
    found = []
    if not re.fullmatch(r"fig-[a-z0-9-]+", figure.get("name", "")):
        found.append(f"a picture without a name fig-...: {source_of(cell)[:60]!r}")
    if not re.search(r"\w.*[.!?]$", figure.get("caption", ""), re.DOTALL):
        found.append(f"{figure.get('name')}: the caption must be a sentence")
    if len(alt.split()) < 4 or alt == figure.get("caption"):
        found.append(f"{figure.get('name')}: the alt text must state the data")
    stale = [told for told in TOLD.findall(alt) if not is_told(told, texts_of(cell))]
    return found + [f"{figure.get('name')}: the cell's outputs do not say {told}" for told in stale]


TOLD = re.compile(r"(?<![\w.,-])(?:\d*\.\d+|\d{1,3}(?:,\d{3})+|(?!910|310)\d{3,})(?![\w.,]*\d)")
"""What an alt text tells of measured things: numbers with a point or of three digits."""


def texts_of(cell: Cell) -> str:
    """Return a cell's code, what it prints, and the words of its pictures."""
    datas = [output.get("data", {}) for output in cell["outputs"]]
    drawn = [data.get(kind, "") for data in datas for kind in ("text/plain", "image/svg+xml")]
    printed = [output.get("text", "") for output in cell["outputs"]]
    whole = "".join(part for text in (*drawn, *printed) for part in (*text, " "))
    return source_of(cell) + re.sub(r"<[^>]*>", " ", whole)


def is_told(told: str, known: str) -> bool:
    """Tell whether a text has a number, or one that is rounded to it."""
    plain = told.replace(",", "")
    whole, _, digits = plain.partition(".")
    unit = 10.0 ** (-len(digits) or len(whole) - len(whole.rstrip("0")))
    numbers = (float(one.replace(",", "")) for one in re.findall(r"\d[\d,]*(?:\.\d+)?", known))
    return any(abs(number - float(plain)) <= 0.501 * unit for number in numbers)


def rows_of(text: str, silent: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Yield (line, kind): a fence, code (also in directives that match `silent`), or text."""
    open_fences: list[tuple[str, bool]] = []  # fence, and whether code stands inside
    for line in text.split("\n"):
        fence = FENCE.match(line)
        inside = open_fences[-1] if open_fences else ("", False)
        if fence and inside[0] and not fence[2].strip() and fence[1].startswith(inside[0]):
            open_fences.pop()
            yield line, "fence"
        elif inside[1]:
            yield line, "code"
        elif fence:
            info = fence[2].strip()
            open_fences.append((fence[1], not info.startswith("{") or bool(silent.match(info))))
            yield line, "fence"
        else:
            yield line, "text"


def without_code(text: str) -> str:
    """Blank out fenced and inline code; what stands inside directives stays."""
    kept = (line if kind == "text" else "" for line, kind in rows_of(text, re.compile(r"\{code")))
    return "\n".join(INLINE_CODE.sub(lambda found: found[1] or "", line) for line in kept)


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


# --- terms of the glossary ------------------------------------------------------------------------

# Words of everyday English too: a chapter links them where it sets them in bold or italics.
ORDINARY = {"in place"} | set(
    """address attach batch bind budget burst cache coalescing conversion cycle decode
    divergence event flag fold form gap gather halo head hint instance nest offset
    overlap pass peak period phase pipe placement quantisation queue race rank reference
    region repeat ring scale scatter schedule scores slot strategy stream tail token trace
    """.split()  # noqa: SIM905
)
TERM = re.compile(r"\{term\}`([^`<]+?)(?:\s*<([^>`]+)>)?`")
NO_PROSE = re.compile(
    r"""^\ *[`:~]{3,}[^\n]*$ | ^:[\w-]+:[^\n]*$ | ^\#+\ [^\n]*$ | ^\([\w:-]+\)=$ | <!--.*?-->
    | \{[\w:.+-]+\}`[^`]+` | (?<!`)(?P<tick>`+)(?!`).+?(?<!`)(?P=tick)(?!`)
    | \$\$.*?\$\$ | \$[^$]+\$ | \[[^][]*\]\([^()\s]+\) | </?[a-z][^>\n]*> | https?://\S+""",
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
SILENT = re.compile(r"\{(?:code|code-block|code-cell|math|bibliography|glossary|road)\}")


def terms_of(glossary: str) -> list[str]:
    """Return the terms of the page of the glossary."""
    body = glossary.partition("```{glossary}\n")[2].partition("\n```")[0]
    return [row for row in body.splitlines() if row and not row.startswith(" ")]


def only_prose(text: str) -> str:
    """Return Markdown with all that is no prose as blanks: code, roles, formulas, links, titles."""
    kinds = rows_of(text, SILENT)
    kept = "\n".join(row if kind == "text" else " " * len(row) for row, kind in kinds)
    return NO_PROSE.sub(lambda found: re.sub(r"[^\n]", "\0", found[0]), kept)


def words_of(term: str) -> list[str]:
    """Return a term and its plural."""
    plural = re.sub(r"y$", "ies", term) if re.search(r"[^aeiou]y$", term) else f"{term}s"
    hissing = [f"{term}es"] if re.search(r"(?:s|x|ch|sh)$", term) else [plural]
    return [term, *hissing]


def term_pattern(terms: list[str]) -> tuple[re.Pattern[str], dict[str, str]]:
    """Return a pattern that finds any term, the longest first, and {words: term}."""
    named = {words.lower(): term for term in terms for words in words_of(term)}
    named |= {term.lower(): term for term in terms}
    found = []
    for words in sorted((w for t in terms for w in words_of(t)), key=len, reverse=True):
        start = f"[{words[0]}{words[0].upper()}]" if words[0].islower() else re.escape(words[0])
        found.append(start + r"\s+".join(map(re.escape, words[1:].split(" "))))
    return re.compile(rf"(?<![\w-])(?:{'|'.join(found)})(?![\w-])"), named


def uses_of(text: str, pattern: re.Pattern[str], named: dict[str, str]) -> list[Any]:
    """Return (place, end, term, is it linked) of the uses of terms in a Markdown cell, in order."""
    uses = [
        (found.start(), found.end(), named.get(target.lower(), target), True)
        for found in TERM.finditer(text)
        for target in [" ".join((found[2] or found[1]).split())]
    ]
    prose = only_prose(text)
    for found in pattern.finditer(prose):
        term = named[" ".join(found[0].lower().split())]
        around = prose[max(found.start() - 1, 0)] + prose[found.end() : found.end() + 1]
        if term not in ORDINARY or around == "**":
            uses.append((found.start(), found.end(), term, False))
    return sorted(uses)


def term_complaints(cells: list[Cell], terms: list[str]) -> list[str]:
    """Every term of the glossary that a chapter uses is linked where it comes first."""
    pattern, named = term_pattern(terms)
    seen: dict[str, bool] = {}
    for cell in cells:
        if cell["cell_type"] == "markdown":
            for _, _, term, linked in uses_of(source_of(cell), pattern, named):
                seen.setdefault(term, linked)
    return [f"{term}: not linked at its first use" for term, linked in seen.items() if not linked]


def link_terms(texts: list[str], terms: list[str]) -> list[str]:
    """Return the Markdown cells of a chapter with every term linked at its first use, there only.

    Links whose words are not the term's own were set by hand and stay.
    """
    pattern, named = term_pattern(terms)

    def plain(found: re.Match[str]) -> str:
        target = " ".join((found[2] or found[1]).split())
        own = named.get(" ".join(found[1].lower().split())) == named.get(target.lower(), target)
        return found[1] if own and found[1].strip() else found[0]

    done: set[str] = set()
    linked = []
    for text in (TERM.sub(plain, text) for text in texts):
        pieces = []
        last = 0
        for start, end, term, is_linked in uses_of(text, pattern, named):
            if term not in done and not is_linked:
                words = text[start:end]
                target = "" if words == term else f" <{term}>"
                pieces += [text[last:start], f"{{term}}`{words}{target}`"]
                last = end
            done.add(term)
        linked.append("".join([*pieces, text[last:]]))
    return linked
