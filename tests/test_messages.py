"""What a message suggests exists: flags, commands, verbs, files and names in all of the source."""

import argparse
import ast
import importlib.util
import inspect
import re
import shlex
from functools import cache
from pathlib import Path

import onnx
import pytest
from onnx import helper
from onnx_models import model_of

import ascend_lab
from ascend_lab.cli import aoe, ascend_lab as lab
from ascend_lab.cli.aoe_bank import bank_parser
from ascend_lab.cli.aoe_words import parser as aoe_parser
from ascend_lab.cli.common import in_flags, parser_of
from ascend_lab.cli.verbs import VERBS
from ascend_lab.compiler.onnx import import_model
from ascend_lab.errors import AscendLabError

PACKAGE = Path(ascend_lab.__file__).parent
ROOT = PACKAGE.parent
FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
COMMAND = re.compile(r"`((?:ascend-lab|aoe|(?:python3 )?lab\.py)(?: [^`]*)?)`")
FILE = re.compile(r"\b(?:notebooks|book|tests|ascend_lab)/[\w./-]+\w")
Piece = tuple[str, str]
TABLES = {("tune_flags", "REFUSED"), ("common", "_FLAGS")}
"""Published flags that are refused; the spellings of two programs."""


@cache
def trees():
    """Return the source of the package and of bench, parsed."""
    folders = PACKAGE, ROOT / "bench"
    found = [p for folder in folders for p in sorted(folder.rglob("*.py"))]
    return {p: ast.parse(p.read_text("utf-8")) for p in found}


@cache
def front(stem):
    """Return all nodes of a module of the command lines, and its body."""
    tree = trees()[PACKAGE / "cli" / f"{stem}.py"]
    return list(ast.walk(tree)), tree.body


# -- the parsers -----------------------------------------------------------------------------------
@cache
def parsers():
    """Return the parser of every command, such as "ascend-lab run" or "aoe bank list"."""
    found = {}
    todo = [parser_of(VERBS), aoe_parser(), bank_parser()]
    for parser in todo:
        found[parser.prog] = parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                todo += action.choices.values()
    return found


def options_of(command):
    """Return the options of a command and of its verbs, but not those of all of ascend-lab."""
    mine = [p for name, p in parsers().items() if name == command or name.startswith("aoe bank ")]
    chosen = mine if command == "aoe bank" else mine[:1]
    return {option for p in chosen for action in p._actions for option in action.option_strings}


@cache
def lab_verbs():
    spec = importlib.util.spec_from_file_location("lab_py", ROOT / "lab.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return set(module.VERBS)


def missing_in(command):
    """Return what a full command names and does not have."""
    words = command.removeprefix("python3 ").split()
    if words[0] == "lab.py":
        verb = words[1] if len(words) > 1 else "book"
        known = verb in lab_verbs() or not verb.isascii() or verb.isupper()
        return [] if known else [command]
    if words == ["ascend-lab"] or words[:2] == ["ascend-lab", "VERB"]:
        return []
    name = max((n for n in parsers() if f"{command} ".startswith(f"{n} ")), key=len)
    if name == "ascend-lab" and not words[1].startswith("-"):
        return [command]
    mine = {o for a in parsers()[name]._actions for o in a.option_strings}
    return [f"{name} {flag}" for flag in FLAG.findall(command) if flag not in mine]


# -- the source ------------------------------------------------------------------------------------
def texts_in(piece, *, docs=False):
    """Yield the strings in a piece of source with {} for what is put in; docstrings if asked."""
    skip = set()
    if not docs:
        skip = {id(n.value) for n in ast.walk(piece) if isinstance(n, ast.Expr)}
    for one in ast.walk(piece):
        if isinstance(one, ast.JoinedStr):
            skip |= {id(part) for part in one.values}
            yield "".join(p.value if isinstance(p, ast.Constant) else "{}" for p in one.values)  # type: ignore[misc]
        elif isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in skip:
            yield one.value


def flags_in(text):
    """Return the flags of a text outside full commands."""
    return FLAG.findall(COMMAND.sub(" ", text))


@cache
def defined(stem):
    """Return what a module of the command lines defines, by name."""
    found = {}
    for one in front(stem)[1]:
        if isinstance(one, ast.FunctionDef | ast.ClassDef):
            found[one.name] = one
        elif isinstance(one, ast.Assign | ast.AnnAssign):
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            found |= {t.id: one for t in targets if isinstance(t, ast.Name)}
    return found


@cache
def imported(stem):
    """Return which module of the command lines a name comes from, also inside functions."""
    return {
        alias.name: one.module.split(".")[2]
        for one in front(stem)[0]
        if isinstance(one, ast.ImportFrom) and (one.module or "").startswith("ascend_lab.cli.")
        for alias in one.names
    }


@cache
def modules(stem):
    """Return the modules of the command lines that one knows, by what it calls them."""
    return {
        alias.asname or alias.name: alias.name
        for one in front(stem)[0]
        if isinstance(one, ast.ImportFrom) and one.module == "ascend_lab.cli"
        for alias in one.names
    }


def reached(start):
    """Return all pieces of the command lines that one may use."""
    seen = set()
    todo = [start]
    while todo:
        stem, name = here = todo.pop()
        if here in seen or name not in defined(stem):
            continue
        seen.add(here)
        inside = list(ast.walk(defined(stem)[name]))
        own = {n.arg for n in inside if isinstance(n, ast.arg)}
        own |= {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        words = {n.id for n in inside if isinstance(n, ast.Name)} - (own - {name})
        todo += [(imported(stem).get(word, stem), word) for word in words]
        todo += [
            (modules(stem)[n.value.id], n.attr)
            for n in inside
            if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") in modules(stem)
        ]
    return seen


@cache
def roots():
    """Return the function behind each command."""
    found = {"aoe": ("tune", "_tune_all"), "aoe bank": ("aoe_bank", "bank_main")}
    for verb in VERBS:
        found[f"ascend-lab {verb.name}"] = (verb.run.__module__.split(".")[-1], verb.run.__name__)
    return found


# -- the tests -------------------------------------------------------------------------------------
def test_every_verb_is_walked():
    verbs = {name for name in parsers() if not name.startswith("aoe bank ")}
    assert set(roots()) == verbs - {"ascend-lab"}


@pytest.mark.parametrize("command", sorted(roots()))
def test_a_command_names_flags_that_it_has(command):
    options = options_of(command)
    pieces = reached(roots()[command])
    assert len(pieces) > 2
    found = [
        f"{stem}.{name}: {flag}"
        for stem, name in sorted(pieces - TABLES)
        for text in texts_in(defined(stem)[name])
        for flag in flags_in(text)
        if flag not in options
    ]
    assert found == []


def test_the_library_names_no_flag():
    """Its messages reach Python and several commands, each with flags of its own."""
    found = []
    for path, tree in trees().items():
        if path.parent.name == "cli":
            continue
        own = path.parent.name == "bench" or path.match("lab/tuning.py")  # run commands themselves
        mine = {t for t in texts_in(tree) if FLAG.fullmatch(t)} if own else set()
        texts = [text for text in texts_in(tree) if text not in mine]
        found += [f"{path.name}: {f}" for t in texts for f in flags_in(t) if f not in mine]
    assert found == []


def test_commands_and_files_in_the_source_exist():
    commands = 0
    for path, tree in trees().items():
        for text in texts_in(tree, docs=True):
            named = COMMAND.findall(text)
            commands += len(named)
            assert [x for one in named for x in missing_in(one)] == [], path
            missing = [f for f in FILE.findall(text) if not (ROOT / f).exists()]
            assert missing == [], path
    assert commands > 20


def test_names_in_messages_exist():
    source = "\n".join(path.read_text("utf-8") for path in trees())
    known = set(re.findall(r"(?:def|class) (\w+)", source)) | set(
        re.findall(r"(\w+)[:=,)]", source)
    )
    kinds = {kind.__name__ for kind in [AscendLabError, *AscendLabError.__subclasses__()]}
    for path, tree in trees().items():
        for one in ast.walk(tree):
            if isinstance(one, ast.Call) and getattr(one.func, "id", "") in kinds:
                words = [w for t in texts_in(one) for w in re.findall(r"`([A-Za-z_.]+)`", t)]
                assert {w.split(".")[-1] for w in words} - {"aoe"} <= known, path


@pytest.mark.parametrize(
    "page", ["README.md", *(f"book/{p.name}" for p in (ROOT / "book").glob("*.md"))]
)
def test_commands_on_the_pages_are_taken(page):
    text = (ROOT / page).read_text("utf-8")
    for line in re.findall(r"^(?:\$ )?((?:ascend-lab|aoe) .*)$", text, re.MULTILINE):
        words = shlex.split(re.split(r" [|<>] ", line)[0], comments=True)
        bank = words[:2] == ["aoe", "bank"]
        parsers()["aoe bank" if bank else words[0]].parse_args(words[2 if bank else 1 :])
    assert [x for one in COMMAND.findall(text) for x in missing_in(one)] == []
    if page == "README.md":  # links between pages are the book's own check
        assert [f for f in FILE.findall(text) if not (ROOT / f).exists()] == []


# -- sizes left open, as each front says it --------------------------------------------------------
@pytest.fixture
def open_model(tmp_path):
    nodes = [helper.make_node("Relu", ["data"], ["y"], "relu")]
    path = tmp_path / "open.onnx"
    onnx.save(model_of(nodes, {"data": ("N", 3, "W")}, ["y"]), path)
    return path


COMMANDS = {
    "ascend-lab run": ["{}"],
    "ascend-lab simulate": ["{}", "--chip", "Toy"],
    "ascend-lab train-plan": ["{}", "--cluster", "ring", "--devices", "2"],
    "aoe": ["-j", "2", "-m", "{}"],
    "aoe gradient": ["-j", "4", "-m", "{}", "--cluster", "ring:2"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_open_sizes_are_pinned_by_flags_of_the_command(name, open_model, capsys, monkeypatch):
    monkeypatch.chdir(open_model.parent)
    program, _, verb = name.partition(" ")
    words = [word.format(open_model) for word in COMMANDS[name]]
    code = aoe(words) if program == "aoe" else lab([verb, *words])
    err = capsys.readouterr().err
    named = FLAG.findall(err)
    assert code == 2 and err.count("\n") == 1
    assert named and set(named) <= options_of(name.removesuffix(" gradient"))
    flag, given = re.search(r"(--input.shape) (\S+)", err).groups()  # type: ignore[union-attr]
    assert given == "data:1,3,1"
    if name != "ascend-lab train-plan":
        again = aoe([*words, flag, given]) if program == "aoe" else lab([verb, *words, flag, given])
        assert "pin them" not in capsys.readouterr().err
        assert again in (0, 2)


def test_python_is_told_arguments(open_model):
    with pytest.raises(AscendLabError) as caught:
        import_model(open_model)
    assert FLAG.findall(str(caught.value)) == []
    assert str(caught.value).endswith("shapes={'data': (1, 3, 1)}")  # a batch alone would not do
    assert {"shapes", "batch", "pinned"} <= set(inspect.signature(import_model).parameters)


def test_arguments_become_flags_where_the_verb_has_them():
    text = "pass its value: pinned={'n': array}"
    assert in_flags(text, "ascend-lab", argparse.Namespace(inputs=None)).endswith("--inputs F.npz")
    assert in_flags(text, "ascend-lab", argparse.Namespace()).endswith("array} in Python")
    assert in_flags(text, "aoe").endswith("array} in Python")
