"""What the pages say the command line prints is what it prints."""

import re
import shlex
from pathlib import Path

import pytest

from ascend_lab.cli import ascend_lab as main

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


def commands_in(text: str) -> list[tuple[str, str]]:
    return [(m[1], m[2]) for block in BLOCK.findall(text) for m in COMMAND.finditer(block)]


OWN = ("instructor.md", "student.md")
"""Pages whose commands need a class: tests/test_instructor.py runs them."""
CASES = [
    case
    for page in sorted((ROOT / "book").glob("*.md"))
    if page.name not in OWN
    for case in commands_in(page.read_text())
]


def test_the_pages_show_commands() -> None:
    assert len(CASES) >= 4


@pytest.mark.parametrize(("command", "shown"), CASES)
def test_console_blocks_are_true(
    command: str,
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    head, _, cut = command.partition(" | ")
    words = shlex.split(head)
    assert words[0] == "ascend-lab"
    assert main(words[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    if cut.startswith("head -"):
        printed = printed[: int(cut.removeprefix("head -"))]
    elif cut:
        columns = int(cut.removeprefix("cut -c1-"))
        printed = [line[:columns].rstrip() for line in printed]
    assert shown.splitlines() == printed
