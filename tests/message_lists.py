"""Messages of errors in one reviewed list for each area: tests/data/messages_AREA.txt.

A section of a list is a test file, an entry the name of a call with the class and the message
(needed; got; remedy) of its error. `MESSAGES=write pytest tests` renews the lists: read their diff
before you commit it.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ascend_lab.errors import AscendLabError

DATA = Path(__file__).resolve().parent / "data"
Calls = Mapping[str, Callable[[], Any]]


def entry_of(name: str, call: Callable[[], Any]) -> str:
    """Return what a call says: the class of its error, what is needed, what it got, what to do."""
    with pytest.raises(AscendLabError) as caught:
        call()
    error = caught.value
    assert error.needed, name
    text = str(error).replace("\0", "\\0")
    # What Python and NumPy say differs from version to version.
    cause = error.__context__
    if cause is not None and not isinstance(cause, AscendLabError) and len(str(cause)) > 9:
        text = text.replace(str(cause), "<what Python says>")
    return f"{name}\n  {type(error).__name__}: {text}\n"


def assert_messages(area: str, section: str, calls: Calls) -> None:
    """Every call raises the error that the area's list has under its name."""
    path = DATA / f"messages_{area}.txt"
    text = path.read_text("utf-8") if path.exists() else ""
    parts = re.split("^# ", text, flags=re.MULTILINE)[1:]
    sections = dict(part.split("\n", 1) for part in parts)
    said = "".join(entry_of(name, call) for name, call in calls.items())
    if os.environ.get("MESSAGES") == "write":
        sections[section] = said
        text = "".join(f"# {name}\n{entries}" for name, entries in sorted(sections.items()))
        path.write_text(text, "utf-8")
        return
    assert said == sections.get(section), "MESSAGES=write pytest renews the list"
