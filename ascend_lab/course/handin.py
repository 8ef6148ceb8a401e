"""What students hand in, found, read and compared: files, notebooks, zips, exports of systems.

Nothing here runs a hand-in or writes what it contains. Of a notebook counts the last definition of
each required function with the cells it needs, so lost tags, moved and copied cells do no harm.
Each file is opened and read by itself, within limits of size and time: one that is damaged costs
its student that file, with a note that names it, and nobody else anything.

How much of one text stands in another is a hint and no verdict, by fingerprints of its tokens:
names, numbers and texts become kinds of tokens; the hashes of all runs of `RUN` tokens are thinned
by winnowing (Schleimer, Wilkerson and Aiken, SIGMOD 2003): of each window of `WINDOW` the least.
"""

import ast
import io
import json
import keyword
import re
import stat
import tokenize
import unicodedata
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import ascend_lab
from ascend_lab.aoe.workers import Alarm
from ascend_lab.course.texts import shown
from ascend_lab.errors import InputError
from ascend_lab.lab.checks.grading import SOLUTION, CodeCell, needed_cells

TEXT_BYTES = 1 << 20
"""Of one file as it was handed in."""
SOURCE_BYTES = 1 << 18
"""Of the Python in it."""
ALL_BYTES = 32 << 20
"""Of all files of one student."""
ZIP_BYTES = 20 << 20
ZIP_FILES = 200
READ_S = 20.0
PRINT_S = 5.0
"""Seconds to open what a student handed in and choose from it, and for the tokens of one text."""
SUFFIXES = (".py", ".ipynb")
RUN = 12
WINDOW = 8
HINT = 0.5
MOODLE = re.compile(r"(?P<name>.+?)_(?P<id>\d+)_assignsubmission_\w+?_(?P<file>.*)$")
CANVAS = re.compile(r"(?P<id>[^\W_]+)_(?P<late>LATE_)?(?P<user>\d+)_\d+_(?P<file>.+)$")
GRADESCOPE = re.compile(r"submission_(?P<id>\d+)$")


@dataclass(frozen=True, slots=True)
class HandIn:
    """One student's file: who, what it is called, its source as one Python text, remarks."""

    student: str
    file: str
    source: str
    log: str = ""
    notes: tuple[str, ...] = ()
    late: bool = False


def hand_ins(folder: Path, functions: Sequence[str]) -> list[HandIn]:
    """Return every hand-in below a folder, or the one a file is, in order of the students' names.

    A file or folder a student; names as Moodle, Canvas and Gradescope export them are understood.
    What cannot be read becomes a hand-in without source that says why.
    """
    if not folder.exists():
        raise InputError("a hand-in or a folder of them", str(folder), "check the path")
    places = [folder] if folder.is_file() else sorted(folder.iterdir())
    emails = _gradescope_emails(folder)
    files: dict[str, list[tuple[str, bytes]]] = {}
    notes: dict[str, list[str]] = {}
    late: set[str] = set()
    owners: dict[str, str] = {}
    for place in places:
        if place.name.startswith((".", "submission_metadata")):
            continue
        student, is_late = student_of(place.name, emails)
        student = _told_apart(student, place.name, owners)
        late |= {student} if is_late else set()
        said = notes.setdefault(student, [])
        files.setdefault(student, []).extend(_read(place, said))
    return [
        _guarded_choice(student, found, functions, notes[student], student in late)
        for student, found in sorted(files.items())
    ]


def _read(place: Path, notes: list[str]) -> list[tuple[str, bytes]]:
    """Return what can be read at a place; what stops it is noted, whatever it is."""
    found: list[tuple[str, bytes]] = []
    count = 0
    try:
        with _in_time():
            for name, data in _files_in(place, notes):
                count += len(data)
                if count > ALL_BYTES:
                    notes.append(f"{shown(place.name)}: only its first {ALL_BYTES:,} bytes count")
                    break
                found.append((shown(name, 120), data))
    except Exception as error:  # nobody else's reading ends by it
        notes.append(f"{shown(place.name)}: cannot be read ({_described(error)})")
    return found


def _guarded_choice(
    student: str,
    files: Sequence[tuple[str, bytes]],
    functions: Sequence[str],
    notes: list[str],
    late: bool,
) -> HandIn:
    """Choose the file that counts; where that cannot be done none does, and a note says why."""
    try:
        with _in_time():
            return _choose(student, files, functions, notes, late)
    except Exception as error:
        told = (*notes, f"no file can be chosen ({_described(error)})")
        return HandIn(student, "", "", "", told, late)


def _in_time() -> Alarm:
    return Alarm(READ_S, lambda: TimeoutError(f"more than {READ_S:g} s"))


def _described(error: Exception) -> str:
    """Return an error in a few words that can be shown."""
    return shown(f"{type(error).__name__}: {error}", 200)


def student_of(name: str, emails: Mapping[str, str]) -> tuple[str, bool]:
    """Return (student, whether marked late) from the name of an exported file or folder."""
    moodle = MOODLE.match(name)
    canvas = CANVAS.match(name)
    gradescope = GRADESCOPE.match(name)
    if moodle:
        return f"{_plain(moodle['name'])}_{moodle['id']}", False
    if canvas:
        return f"{_plain(canvas['id'])}_{canvas['user']}", bool(canvas["late"])
    if gradescope:
        return emails.get(name, name), False
    return _plain(name.rsplit(".", 1)[0] if name.endswith((*SUFFIXES, ".zip")) else name), False


def _told_apart(student: str, name: str, owners: dict[str, str]) -> str:
    """Return the student, with a number behind where another name gave the same: `a b`, `a_b`.

    Files of one name, `ada.py` and `ada.ipynb`, are of one student. `owners` remembers the names.
    """
    stem = name.rsplit(".", 1)[0] if name.endswith((*SUFFIXES, ".zip")) else name
    stem = unicodedata.normalize("NFKC", stem)
    if MOODLE.match(name) or CANVAS.match(name) or GRADESCOPE.match(name):
        stem = student  # the course system's number tells them apart
    candidates = (student, *(f"{student}-{number}" for number in range(2, len(owners) + 3)))
    return next(c for c in candidates if owners.setdefault(c, stem) == stem)


def _plain(name: str) -> str:
    """Return a name in one form of Unicode, without what a table or a path would trip over."""
    kept = unicodedata.normalize("NFKC", name)
    return re.sub(r"[^\w.@+-]+", "_", kept).strip("_.") or "nobody"


def _gradescope_emails(folder: Path) -> dict[str, str]:
    """Return the e-mail of each folder of a Gradescope export, from its list of metadata."""
    table = folder / "submission_metadata.yml"
    if not table.is_file() or table.is_symlink() or table.stat().st_size > TEXT_BYTES:
        return {}
    found: dict[str, str] = {}
    current = ""
    for line in table.read_text("utf-8", "replace").splitlines():
        if key := re.match(r"(submission_\d+):", line):
            current = key[1]
        elif current and (mail := re.search(r"email:\s*([^\s,@]+@[^\s,@]+)", line[:400])):
            found.setdefault(current, mail[1].strip("\"'"))
    return found


# -- files -----------------------------------------------------------------------------------------
def _files_in(place: Path, notes: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) of the readable files at a place; links and large files only noted."""
    paths = [place]
    if place.is_dir() and not place.is_symlink():
        paths = sorted(path for path in place.rglob("*"))[: 10 * ZIP_FILES]
    for path in paths:
        kind = path.lstat()
        if stat.S_ISLNK(kind.st_mode):
            notes.append(f"{shown(path.name)}: a link, not followed")
        elif path.suffix == ".zip" and stat.S_ISREG(kind.st_mode):
            yield from _unzipped(path, notes)
        elif stat.S_ISREG(kind.st_mode) and path.suffix in (*SUFFIXES, ".md"):
            if kind.st_size > TEXT_BYTES:
                size = f"{kind.st_size:,} bytes, at most {TEXT_BYTES:,}"
                notes.append(f"{shown(path.name)}: {size}")
            else:
                yield path.name, path.read_bytes()


def _unzipped(path: Path, notes: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a zip from memory: no path of it is ever used for writing."""
    label = shown(path.name)
    if path.stat().st_size > ZIP_BYTES:
        notes.append(f"{label}: a zip of more than {ZIP_BYTES:,} bytes")
        return
    try:
        archive = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
    except Exception as error:  # a damaged table of contents raises many kinds
        notes.append(f"{label}: no zip that can be read ({_described(error)})")
        return
    with archive:
        for info in archive.infolist()[:ZIP_FILES]:
            link = stat.S_ISLNK(info.external_attr >> 16)
            name = info.filename.rpartition("/")[2]
            if info.is_dir() or link or not name.endswith((*SUFFIXES, ".md")):
                continue
            if info.file_size > TEXT_BYTES or "__MACOSX" in info.filename:
                notes.append(f"{shown(name)}: left out of {label}")
                continue
            try:
                with archive.open(info) as file:
                    data = file.read(TEXT_BYTES)
            except Exception as error:  # a damaged stream, a name that is no UTF-8, a password
                if isinstance(error, TimeoutError):
                    raise
                notes.append(f"{shown(name)} in {label}: cannot be read ({_described(error)})")
                continue
            yield name, data


def _choose(
    student: str,
    files: Sequence[tuple[str, bytes]],
    functions: Sequence[str],
    notes: list[str],
    late: bool,
) -> HandIn:
    """Take the file that answers most of the functions; the last by name of several."""
    log = "".join(data.decode("utf-8", "replace") for name, data in files if name.endswith(".md"))
    sources = []
    for name, data in files:
        if name.endswith(SUFFIXES):
            try:
                source = source_of(name, data, functions)
            except InputError as error:
                notes.append(shown(str(error)))
                continue
            named = _defined(source) & set(functions)
            sources.append((len(named - _begun(source)), len(named), name, source))
    if len(sources) > 1:
        notes.append(f"{len(sources)} files; the one that answers most functions counts")
    _, count, name, source = max(sources, default=(0, 0, "", ""))
    if not count:
        notes.append(f"no file defines {', '.join(functions)}")
    return HandIn(student, name, source, log, tuple(notes), late)


def source_of(name: str, data: bytes, functions: Sequence[str]) -> str:
    """Return a hand-in as one Python source; raise `InputError` where it cannot be read."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: UTF-8", f"byte {error.start}", "save it as UTF-8") from error
    if not name.endswith(".ipynb") and _is_exported(text):
        text = _source_of_notebook(name, json.dumps(_notebook_of_export(text)), functions)
    elif name.endswith(".ipynb"):
        text = _source_of_notebook(name, text, functions)
    if len(text) > SOURCE_BYTES:
        got = f"{len(text):,}"
        raise InputError(f"{name}: at most {SOURCE_BYTES:,} letters of Python", got, "shorten it")
    return text


def _source_of_notebook(name: str, text: str, functions: Sequence[str]) -> str:
    """Return the cells of a notebook that define the functions, and those they need."""
    try:
        cells = list(_code_cells(json.loads(text)))
        found = ((function, cell) for cell in cells for function in _defined(cell.source))
        last = {function: cell for function, cell in found if function in functions}
        own = [cell for _, cell in sorted({cell.index: cell for cell in last.values()}.items())]
        needed = {c.index: c for one in own for c in needed_cells(cells, [one])}
    except TimeoutError:
        raise
    except Exception as error:  # any shape of JSON may come
        got = _described(error)
        raise InputError(f"{name}: a notebook", got, "save it again in JupyterLab") from error
    needed |= {cell.index: cell for cell in own}
    chunks = (f"# %% code cell {index}\n{needed[index].source}" for index in sorted(needed))
    return "\n\n".join(chunks) + "\n"


EXPORTED = re.compile(r"^# In\[[\d *]*\]:?[ \t]*$", re.MULTILINE)
CELL = re.compile(r"^# %%(?! \[markdown\]).*$", re.MULTILINE)
MAGIC = re.compile(r"^[ \t]*get_ipython\(\)", re.MULTILINE)


def _is_exported(text: str) -> bool:
    """Tell whether a script was made from a notebook by JupyterLab, nbconvert or an editor."""
    return bool(EXPORTED.search(text) or MAGIC.search(text))


def _notebook_of_export(text: str) -> dict[str, object]:
    """Return a script exported from a notebook as that notebook again.

    Cells begin at lines `# In[1]:`, or `# %%` where there are none; calls of `get_ipython()`
    become the magics that they were. Prose stands in comments.
    """
    border = EXPORTED if EXPORTED.search(text) else CELL
    above, *chunks = border.split(text)
    if _parsed(above):
        chunks.insert(0, above)
    cells = [
        {"cell_type": "code", "metadata": {}, "source": _with_magics(chunk)} for chunk in chunks
    ]
    return {"cells": cells}


def _with_magics(chunk: str) -> str:
    """Return a cell with its calls of `get_ipython()` as magics; a cell magic keeps its body."""
    lines: list[str] = []
    for line in chunk.strip("\n").splitlines():
        if not MAGIC.match(line):
            lines.append(line)
            continue
        words = _texts_of(line.strip())
        lines.append(f"%%{words[0]}" if len(words) > 2 else "%magic")
        lines += words[2].splitlines() if len(words) > 2 else []
    return "\n".join(lines)


def _texts_of(line: str) -> list[str]:
    """Return the texts that a call is given, as far as it can be read."""
    body = _parsed(line)
    statement = body[0] if body else None
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return []
    given = [a.value for a in statement.value.args if isinstance(a, ast.Constant)]
    return [value for value in given if isinstance(value, str)]


def _code_cells(notebook: Mapping[str, object]) -> Iterator[CodeCell]:
    """Yield the code cells that Python can read, by their number, without magics.

    A solution that was published with its page, and still says so, is nobody's answer. Raises
    `ValueError` for what has not the shape of a notebook.
    """
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise ValueError("its cells are no list of tables")
    code = (cell for cell in cells if cell.get("cell_type") == "code")
    for number, cell in enumerate(code, 1):
        metadata = cell.get("metadata")
        tags = metadata.get("tags") if isinstance(metadata, dict) else None
        if isinstance(tags, list) and SOLUTION in tags:
            continue
        given = cell.get("source", "")
        whole = "".join(map(str, given)) if isinstance(given, list) else str(given)
        lines = [line for line in whole.splitlines() if not line.lstrip().startswith(("%", "!"))]
        source = "\n".join(lines)
        if len(source) <= SOURCE_BYTES and _parsed(source) is not None:
            yield CodeCell(number, source, frozenset(), "")


def _parsed(source: str) -> list[ast.stmt] | None:
    """Return the statements of a source, None where Python cannot read it."""
    if len(source) > SOURCE_BYTES:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a hand-in's `\\d`: they name a file of ours
            return ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _defined(source: str) -> set[str]:
    """Return the functions that a source defines at its top."""
    if (body := _parsed(source)) is None:
        # a file that cannot be read still counts as the student's: running it says where it fails
        return set(re.findall(r"^def (\w+)", source, re.MULTILINE))
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def _begun(source: str) -> set[str]:
    """Return the functions that still raise `NotImplementedError`, as they were handed out."""
    functions = (node for node in _parsed(source) or () if isinstance(node, ast.FunctionDef))
    return {
        node.name
        for node in functions
        if any(isinstance(n, ast.Raise) and _names_not_implemented(n) for n in node.body)
    }


def _names_not_implemented(statement: ast.Raise) -> bool:
    """Whether a `raise` names that error; walked without recursion, however deep it is."""
    names = (node.id for node in ast.walk(statement) if isinstance(node, ast.Name))
    return "NotImplementedError" in names


def constant(source: str, name: str) -> str:
    """Return the text that a source assigns to a name at its top, such as a pseudonym."""
    found = re.search(rf"^{name}\s*=\s*[\"']([^\"'\n]{{1,40}})[\"']", source, re.MULTILINE)
    return shown(found[1]) if found else ""


# -- texts that are alike -------------------------------------------------------------------------
@cache
def fingerprints(source: str) -> frozenset[int]:
    """Return the fingerprints of a Python text; of what is no Python, those of its lines so far."""
    tokens: list[str] = []
    try:
        with Alarm(PRINT_S, lambda: TimeoutError("tokens of one text")):
            for token in tokenize.generate_tokens(io.StringIO(source).readline):
                if token.type == tokenize.NAME:
                    tokens.append(token.string if keyword.iskeyword(token.string) else "n")
                elif token.type in (tokenize.NUMBER, tokenize.STRING):
                    tokens.append("c")
                elif token.type == tokenize.OP:
                    tokens.append(token.string)
    except Exception:  # no Python, or too long to read: those so far
        pass
    runs = [" ".join(tokens[i : i + RUN]) for i in range(len(tokens) - RUN + 1)]
    hashes = [zlib.crc32(run.encode()) for run in runs]
    return frozenset(
        min(hashes[i : i + WINDOW])
        for i in range(max(1, len(hashes) - WINDOW + 1))
        if hashes[i : i + WINDOW]
    )


def likeness(one: frozenset[int], other: frozenset[int], given: frozenset[int]) -> float:
    """Return the share of the smaller text that stands in the other, what was given left out."""
    a = one - given
    b = other - given
    return len(a & b) / min(len(a), len(b)) if min(len(a), len(b)) >= WINDOW else 0.0


def hints(
    sources: Mapping[str, str], given: str, others: Mapping[str, str]
) -> list[tuple[str, str, float]]:
    """Return (student, student or other text, likeness) of at least `HINT`, the most alike first.

    `given` is what everybody was handed; `others` are texts nobody may hand in: keys, our sources.
    """
    start = fingerprints(given)
    prints = {name: fingerprints(text) for name, text in sources.items()}
    names = sorted(prints)
    found = [
        (a, b, likeness(prints[a], prints[b], start))
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    ]
    for label, text in others.items():
        theirs = fingerprints(text) - start
        for name in names:
            own = prints[name] - start
            if len(own) >= WINDOW:
                found.append((name, label, len(own & theirs) / len(own)))
    kept = [hint for hint in found if hint[2] >= HINT]
    return sorted(kept, key=lambda hint: (-hint[2], hint[0], hint[1]))


@cache
def our_sources() -> dict[str, str]:
    """Return the package's own modules by path: an answer copied from there is no answer."""
    package = Path(ascend_lab.__file__).parent
    return {
        f"ascend_lab/{path.relative_to(package).as_posix()}": path.read_text("utf-8")
        for path in sorted(package.rglob("*.py"))
    }
