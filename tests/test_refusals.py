"""Refusals of both programs, word for word: each room's commands and what they say of them.

tests/data/refusals holds `$ command`, its answer below it, and above it `< name: "text"` for a file
that it finds beside those of `fuzz_cases.files`. A change of words is read as a diff:
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
def test_a_refusal_says_what_it_said(room, tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNE_BANK_PATH", str(tmp_path_factory.mktemp("bank")))
    fill(tmp_path, files_once())
    names = {path.name for path in tmp_path.iterdir()}
    transcript = room.read_text("utf-8")
    lines = []
    written = {}
    for line in transcript.splitlines():
        kind, _, words = line.partition(" ")
        if kind == "<":
            name, _, text = words.partition(": ")
            written[name] = json.loads(text)
            (tmp_path / name).write_text(written[name], "utf-8")
            lines.append(line)
        elif kind == "$":
            lines += [line, answer(words), ""]
            for name in written:
                if name in files_once():
                    (tmp_path / name).write_bytes(files_once()[name])
                else:
                    (tmp_path / name).unlink()
            written.clear()
            assert {path.name for path in tmp_path.iterdir()} == names, f"{words} left a file"
    text = "\n".join(lines)
    if os.environ.get("REFUSALS") == "write":
        room.write_text(text, "utf-8")
        transcript = text
    assert text == transcript
    assert "NO REFUSAL" not in text
