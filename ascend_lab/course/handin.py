"""Reads the files that students hand in, and compares them with each other.

A hand-in is a script, a notebook or a zip, or a folder of these as Moodle, Canvas or Gradescope
export it. Nothing here runs a hand-in or writes its files to disk. In a notebook the last
definition of each required function counts, with the cells that it needs: lost tags, moved cells
and copied cells do no harm. Each file is read within limits of size and time. A damaged file
becomes a note of its student and does not affect the others.

The similarity of two texts is a hint for the instructor, not a verdict. It compares fingerprints:
in the token sequence all names count as equal, and so do all numbers and texts. Every run of `RUN`
tokens is hashed, and of each window of `WINDOW` hashes the smallest is kept (winnowing: Schleimer,
Wilkerson and Aiken, SIGMOD 2003).
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
"""Largest file of a hand-in."""
SOURCE_BYTES = 1 << 18
"""Largest Python source of a hand-in, in characters: 262,144."""
ALL_BYTES = 32 << 20
"""Largest total of the files of one student."""
ZIP_BYTES = 20 << 20
"""Largest archive, in bytes."""
ZIP_FILES = 200
"""Most files in an archive."""
READ_S = 20.0
"""Time limit for reading the files of one student."""
PRINT_S = 5.0
"""Time limit for splitting one text into tokens."""
SUFFIXES = (".py", ".ipynb")
RUN = 12
"""Tokens that are hashed together."""
WINDOW = 8
"""Hashes of which the smallest is kept."""
HINT = 0.5
"""Similarity from which two texts are reported."""
MOODLE = re.compile(r"(?P<name>.+?)_(?P<id>\d+)_assignsubmission_\w+?_(?P<file>.*)$")
CANVAS = re.compile(r"(?P<id>[^\W_]+)_(?P<late>LATE_)?(?P<user>\d+)_\d+_(?P<file>.+)$")
GRADESCOPE = re.compile(r"submission_(?P<id>\d+)$")


@dataclass(frozen=True, slots=True)
class HandIn:
    """The file of one student that counts, as one Python source; `log` is the work log."""

    student: str
    file: str
    source: str
    log: str = ""
    notes: tuple[str, ...] = ()
    late: bool = False


def hand_ins(folder: Path, functions: Sequence[str]) -> list[HandIn]:
    """Return the hand-ins in a folder, or the one in a file, in order of the students' names.

    Each file or subfolder belongs to one student, whose name is read from its name. One that cannot
    be read becomes a hand-in without source and with a note that gives the reason.
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
        student = _unique_student(student, place.name, owners)
        late |= {student} if is_late else set()
        student_notes = notes.setdefault(student, [])
        files.setdefault(student, []).extend(_read(place, student_notes))
    return [
        _guarded_choice(student, student_files, functions, notes[student], student in late)
        for student, student_files in sorted(files.items())
    ]


def _read(place: Path, notes: list[str]) -> list[tuple[str, bytes]]:
    """Return (name, content) of the readable files at a place; errors become notes."""
    files: list[tuple[str, bytes]] = []
    size_bytes = 0
    try:
        with _in_time():
            for name, data in _files_in(place, notes):
                size_bytes += len(data)
                if size_bytes > ALL_BYTES:
                    notes.append(f"{shown(place.name)}: only its first {ALL_BYTES:,} bytes count")
                    break
                files.append((shown(name, 120), data))
    except Exception as error:  # the files of other students are still read
        notes.append(f"{shown(place.name)}: cannot be read ({_described(error)})")
    return files


def _guarded_choice(
    student: str,
    files: Sequence[tuple[str, bytes]],
    functions: Sequence[str],
    notes: list[str],
    late: bool,
) -> HandIn:
    """Choose the file that counts; if that fails, return no source and a note with the reason."""
    try:
        with _in_time():
            return _choose(student, files, functions, notes, late)
    except Exception as error:
        all_notes = (*notes, f"no file can be chosen ({_described(error)})")
        return HandIn(student, "", "", "", all_notes, late)


def _in_time() -> Alarm:
    """Return a context that raises `TimeoutError` after `READ_S` seconds."""
    return Alarm(READ_S, lambda: TimeoutError(f"more than {READ_S:g} s"))


def _described(error: Exception) -> str:
    """Return an error as a short printable text."""
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


def _unique_student(student: str, name: str, owners: dict[str, str]) -> str:
    """Return the student's name, with a number appended if another file name gave the same one.

    `a b.py` and `a_b.py` both give a_b: the second becomes a_b-2. But `ada.py` and `ada.ipynb`
    belong to one student. `owners` maps the names given so far to the file names they come from.
    """
    stem = name.rsplit(".", 1)[0] if name.endswith((*SUFFIXES, ".zip")) else name
    stem = unicodedata.normalize("NFKC", stem)
    if MOODLE.match(name) or CANVAS.match(name) or GRADESCOPE.match(name):
        stem = student  # it ends in the course system's number, which is unique
    candidates = (student, *(f"{student}-{number}" for number in range(2, len(owners) + 3)))
    return next(c for c in candidates if owners.setdefault(c, stem) == stem)


def _plain(name: str) -> str:
    """Return a name in normalised Unicode, with _ for characters that are unsafe in paths."""
    normalised = unicodedata.normalize("NFKC", name)
    return re.sub(r"[^\w.@+-]+", "_", normalised).strip("_.") or "nobody"


def _gradescope_emails(folder: Path) -> dict[str, str]:
    """Return the e-mail address of each folder of a Gradescope export, from its metadata."""
    table = folder / "submission_metadata.yml"
    if not table.is_file() or table.is_symlink() or table.stat().st_size > TEXT_BYTES:
        return {}
    emails: dict[str, str] = {}
    current = ""
    for line in table.read_text("utf-8", "replace").splitlines():
        if key := re.match(r"(submission_\d+):", line):
            current = key[1]
        elif current and (mail := re.search(r"email:\s*([^\s,@]+@[^\s,@]+)", line[:400])):
            emails.setdefault(current, mail[1].strip("\"'"))
    return emails


# -- files -----------------------------------------------------------------------------------------
def _files_in(place: Path, notes: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the files at a place; links and too large files become notes."""
    paths = [place]
    if place.is_dir() and not place.is_symlink():
        paths = sorted(path for path in place.rglob("*"))[: 10 * ZIP_FILES]
    for path in paths:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            notes.append(f"{shown(path.name)}: a link, not followed")
        elif path.suffix == ".zip" and stat.S_ISREG(status.st_mode):
            yield from _unzipped(path, notes)
        elif stat.S_ISREG(status.st_mode) and path.suffix in (*SUFFIXES, ".md"):
            if status.st_size > TEXT_BYTES:
                size = f"{status.st_size:,} bytes, at most {TEXT_BYTES:,}"
                notes.append(f"{shown(path.name)}: {size}")
            else:
                yield path.name, path.read_bytes()


def _unzipped(path: Path, notes: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the files of a zip, read in memory: nothing is unpacked to disk."""
    label = shown(path.name)
    if path.stat().st_size > ZIP_BYTES:
        notes.append(f"{label}: a zip of more than {ZIP_BYTES:,} bytes")
        return
    try:
        archive = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
    except Exception as error:  # damaged archives raise errors of many types
        notes.append(f"{label}: no zip that can be read ({_described(error)})")
        return
    with archive:
        for info in archive.infolist()[:ZIP_FILES]:
            is_link = stat.S_ISLNK(info.external_attr >> 16)
            name = info.filename.rpartition("/")[2]
            if info.is_dir() or is_link or not name.endswith((*SUFFIXES, ".md")):
                continue
            if info.file_size > TEXT_BYTES or "__MACOSX" in info.filename:
                notes.append(f"{shown(name)}: left out of {label}")
                continue
            try:
                with archive.open(info) as file:
                    data = file.read(TEXT_BYTES)
            except Exception as error:  # a damaged stream, a name not in UTF-8, a password
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
    """Return the file that answers the most functions; of several such, the last by name."""
    log = "".join(data.decode("utf-8", "replace") for name, data in files if name.endswith(".md"))
    sources = []
    for name, data in files:
        if name.endswith(SUFFIXES):
            try:
                source = source_of(name, data, functions)
            except InputError as error:
                notes.append(shown(str(error)))
                continue
            defined = _defined(source) & set(functions)
            finished = defined - _unfinished(source)
            sources.append((len(finished), len(defined), name, source))
    if len(sources) > 1:
        notes.append(f"{len(sources)} files; the one that answers most functions counts")
    _, count, name, source = max(sources, default=(0, 0, "", ""))
    if not count:
        notes.append(f"no file defines {', '.join(functions)}")
    return HandIn(student, name, source, log, tuple(notes), late)


def source_of(name: str, data: bytes, functions: Sequence[str]) -> str:
    """Return a script or notebook as one Python source; raise `InputError` if it is unreadable."""
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
        definitions = ((function, cell) for cell in cells for function in _defined(cell.source))
        # A later definition replaces an earlier one, as it does when the notebook runs.
        last_cells = {function: cell for function, cell in definitions if function in functions}
        answer_cells = {cell.index: cell for cell in last_cells.values()}
        needed = {
            cell.index: cell
            for index in sorted(answer_cells)
            for cell in needed_cells(cells, [answer_cells[index]])
        }
    except TimeoutError:
        raise
    except Exception as error:  # the JSON may have any shape
        got = _described(error)
        raise InputError(f"{name}: a notebook", got, "save it again in JupyterLab") from error
    needed |= answer_cells
    chunks = (f"# %% code cell {index}\n{needed[index].source}" for index in sorted(needed))
    return "\n\n".join(chunks) + "\n"


EXPORTED = re.compile(r"^# In\[[\d *]*\]:?[ \t]*$", re.MULTILINE)
CELL = re.compile(r"^# %%(?! \[markdown\]).*$", re.MULTILINE)
MAGIC = re.compile(r"^[ \t]*get_ipython\(\)", re.MULTILINE)


def _is_exported(text: str) -> bool:
    """Tell whether a script was exported from a notebook by JupyterLab, nbconvert or an editor."""
    return bool(EXPORTED.search(text) or MAGIC.search(text))


def _notebook_of_export(text: str) -> dict[str, object]:
    """Return the notebook from which a script was exported.

    Cells begin at lines `# In[1]:`, or at `# %%` if there are none of those. Calls of
    `get_ipython()` become magics (lines such as `%timeit`) again.
    """
    border = EXPORTED if EXPORTED.search(text) else CELL
    preamble, *chunks = border.split(text)
    if _parsed(preamble):
        chunks.insert(0, preamble)
    cells = [
        {"cell_type": "code", "metadata": {}, "source": _with_magics(chunk)} for chunk in chunks
    ]
    return {"cells": cells}


def _with_magics(chunk: str) -> str:
    """Return a cell whose calls of `get_ipython()` are magics; a cell magic keeps its body."""
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
    """Return the texts among the arguments of a call; [] for a line that is not a call."""
    body = _parsed(line)
    statement = body[0] if body else None
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return []
    constants = [a.value for a in statement.value.args if isinstance(a, ast.Constant)]
    return [value for value in constants if isinstance(value, str)]


def _code_cells(notebook: Mapping[str, object]) -> Iterator[CodeCell]:
    """Yield the code cells that are valid Python once their magics are left out.

    Cells tagged as published solutions of the book are left out. Raises `ValueError` for JSON that
    is not a notebook.
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
        raw_source = cell.get("source", "")
        text = "".join(map(str, raw_source)) if isinstance(raw_source, list) else str(raw_source)
        lines = [line for line in text.splitlines() if not line.lstrip().startswith(("%", "!"))]
        source = "\n".join(lines)
        if len(source) <= SOURCE_BYTES and _parsed(source) is not None:
            yield CodeCell(number, source, frozenset(), "")


def _parsed(source: str) -> list[ast.stmt] | None:
    """Return the statements of a source; None if it is not valid Python or too long."""
    if len(source) > SOURCE_BYTES:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a hand-in's "\\d" would warn about our file
            return ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _defined(source: str) -> set[str]:
    """Return the functions that a source defines at its top level."""
    if (body := _parsed(source)) is None:
        # a file with a syntax error still counts: running it tells the student where the error is
        return set(re.findall(r"^def (\w+)", source, re.MULTILINE))
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def _unfinished(source: str) -> set[str]:
    """Return the functions that raise `NotImplementedError`, as those of the hand-out do."""
    functions = (node for node in _parsed(source) or () if isinstance(node, ast.FunctionDef))
    return {
        node.name
        for node in functions
        if any(isinstance(n, ast.Raise) and _names_not_implemented(n) for n in node.body)
    }


def _names_not_implemented(statement: ast.Raise) -> bool:
    """Tell whether a `raise` statement mentions `NotImplementedError`."""
    names = (node.id for node in ast.walk(statement) if isinstance(node, ast.Name))
    return "NotImplementedError" in names


def constant(source: str, name: str) -> str:
    """Return the text that a source assigns to a name at its top level, such as a pseudonym."""
    match = re.search(rf"^{name}\s*=\s*[\"']([^\"'\n]{{1,40}})[\"']", source, re.MULTILINE)
    return shown(match[1]) if match else ""


# -- similar texts --------------------------------------------------------------------------------
@cache
def fingerprints(source: str) -> frozenset[int]:
    """Return the fingerprints of a Python text, or of its part before a syntax error."""
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
    except Exception:  # a syntax error or the time limit: the tokens so far count
        pass
    runs = [" ".join(tokens[i : i + RUN]) for i in range(len(tokens) - RUN + 1)]
    hashes = [zlib.crc32(run.encode()) for run in runs]
    return frozenset(
        min(hashes[i : i + WINDOW])
        for i in range(max(1, len(hashes) - WINDOW + 1))
        if hashes[i : i + WINDOW]
    )


def likeness(first: frozenset[int], second: frozenset[int], handed_out: frozenset[int]) -> float:
    """Return the share of the smaller text that the other contains, without what was handed out."""
    first_prints = first - handed_out
    second_prints = second - handed_out
    smaller = min(len(first_prints), len(second_prints))
    return len(first_prints & second_prints) / smaller if smaller >= WINDOW else 0.0


def hints(
    sources: Mapping[str, str], handed_out: str, forbidden: Mapping[str, str]
) -> list[tuple[str, str, float]]:
    """Return (student, student or forbidden text, likeness) from `HINT` on, the highest first.

    `handed_out` is the stub that everybody starts from; `forbidden` are texts that nobody may hand
    in, such as answer keys and this package.
    """
    stub_prints = fingerprints(handed_out)
    prints = {name: fingerprints(text) for name, text in sources.items()}
    names = sorted(prints)
    pairs = [
        (a, b, likeness(prints[a], prints[b], stub_prints))
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    ]
    for label, text in forbidden.items():
        forbidden_prints = fingerprints(text) - stub_prints
        for name in names:
            student_prints = prints[name] - stub_prints
            if len(student_prints) >= WINDOW:
                share = len(student_prints & forbidden_prints) / len(student_prints)
                pairs.append((name, label, share))
    similar = [pair for pair in pairs if pair[2] >= HINT]
    return sorted(similar, key=lambda pair: (-pair[2], pair[0], pair[1]))


@cache
def our_sources() -> dict[str, str]:
    """Return the modules of this package by path: answers copied from them do not count."""
    package = Path(ascend_lab.__file__).parent
    return {
        f"ascend_lab/{path.relative_to(package).as_posix()}": path.read_text("utf-8")
        for path in sorted(package.rglob("*.py"))
    }
