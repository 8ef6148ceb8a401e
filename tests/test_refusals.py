"""Refusals of both programs, word for word: each room's commands and what they say of them.

tests/data/refusals holds `$ command` and its answer below it. It finds the files of
`fuzz_cases.files`; `= name: "text"` adds one from there on, `< name: "text"` one for the next
command alone, and `~ name: ["old", "new"]` changes one for it. New words are read as a diff:
`REFUSALS=write pytest tests/test_refusals.py` writes the answers anew.
"""

import contextlib
import io
import json
import os
import shlex
from pathlib import Path

import pytest
from fuzz_cases import files_once, fill

from ascend_lab.cli import aoe, ascend_lab

FILL = {"folder", "loop", "dangling"}
"""What `fill` adds to files."""
ROOMS = sorted((Path(__file__).parent / "data" / "refusals").glob("*.txt"))


def answer(command: str) -> str:
    """Return the one line that refuses a command, or what is wrong with its end."""
    program, *words = shlex.split(command)
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = {"aoe": aoe, "ascend-lab": ascend_lab}[program](words)
    said = err.getvalue()
    printed = out.getvalue() if program == "ascend-lab" else ""  # aoe says which model it takes
    if (code, printed, said.count("\n")) != (2, "", 1) or not said.startswith(program):
        return f"NO REFUSAL: code {code}, {len(out.getvalue())} letters printed, {said!r}"
    return said.rstrip("\n")


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.stem)
def test_a_refusal_says_what_it_said(
    room: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNE_BANK_PATH", str(tmp_path_factory.mktemp("bank")))
    files = files_once() | {}
    fill(tmp_path, files)
    transcript = room.read_text("utf-8")
    lines = []
    changed: set[str] = set()
    for line in transcript.splitlines():
        kind, _, words = line.partition(" ")
        name, _, text = words.partition(": ")
        if kind in ("=", "<", "~"):
            content = json.loads(text)
            if kind == "~":
                old, new = content
                content = files[name].decode("utf-8").replace(old, new)
                assert content.encode("utf-8") != files[name], line
            (tmp_path / name).write_text(content, "utf-8")
            changed.add(name)
            if kind == "=":
                files[name] = content.encode("utf-8")
            lines += [line, ""] if kind == "=" else [line]
        elif kind == "$":
            lines += [line, answer(words), ""]
            for name in changed:
                (tmp_path / name).unlink()
                if name in files:
                    (tmp_path / name).write_bytes(files[name])
            changed.clear()
            names = {path.name for path in tmp_path.iterdir()}
            known = {name.partition("/")[0] for name in files} | FILL
            assert names == known, f"{words} left a file"
    text = "\n".join(lines)
    if os.environ.get("REFUSALS") == "write":
        room.write_text(text, "utf-8")
        transcript = text
    assert text == transcript
    assert "NO REFUSAL" not in text
