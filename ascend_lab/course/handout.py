"""What a student is given: the task, a start file as script and as notebook, the public cases.

Both start files come from one source, `start.py` in cells `# %%`; the instance of the student is
laid beside them. Keys, wrong solutions and hidden cases stay where they are.
"""

import json
import re
from pathlib import Path
from typing import Any

from ascend_lab.course.assignment import Assignment
from ascend_lab.errors import InputError
from ascend_lab.output import write_whole

KEPT_BACK = ("hidden.py", "start.py", "instance.json", "start.ipynb")
STUDENT = re.compile(r"[\w.@+-]{1,80}")


def start(task: Assignment, student: str, out: Path) -> list[str]:
    """Write the hand-out of one student into the folder `out`; return the names of its files.

    What is there already is never written over.
    """
    if not STUDENT.fullmatch(student):
        raise InputError("a student's name of letters, digits and . _ @ + -", repr(student[:40]))
    source = (task.folder / "start.py").read_text("utf-8")
    instance = {"student": student, "assignment": task.name, **task.instance(student)}
    files = {
        "start.py": source,
        "start.ipynb": json.dumps(notebook_of(source), indent=1) + "\n",
        "instance.json": json.dumps(instance, indent=1, sort_keys=True) + "\n",
        "log.md": _log_form(task),
        **{name: text for name, text in instance.items() if name.endswith(".toml")},
    }
    for path in sorted(task.folder.iterdir()):
        if path.is_file() and path.name not in KEPT_BACK:
            files[path.name] = path.read_text("utf-8")
    there = [out / name for name in sorted(files) if (out / name).exists()]
    if there or (out.exists() and not out.is_dir()):
        got = f"{there[0]}, which may be your work" if there else f"{out}, which is a file"
        remedy = "nothing was written: name a new folder for the output"
        raise InputError(f"a folder without {', '.join(sorted(files))}", got, remedy)
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_whole(out / name, text.encode())
    return sorted(files)


def notebook_of(source: str) -> dict[str, Any]:
    """Return a script in cells `# %%` as a notebook: `# %% [markdown]` cells lose their `# `."""
    cells: list[dict[str, Any]] = []
    for number, chunk in enumerate(re.split(r"^# %%", source, flags=re.MULTILINE)):
        head, _, body = chunk.partition("\n") if number else ("", "", chunk)
        text = body.strip("\n")
        if not text:
            continue
        cell: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}}
        if "[markdown]" in head:
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
            cell |= {"cell_type": "markdown", "source": text}
        else:
            cell |= {"cell_type": "code", "source": text, "outputs": [], "execution_count": None}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _log_form(task: Assignment) -> str:
    step = "\n".join(f"- {field}: " for field in
                     ("what I changed", "what I expected, and why", "what the check said",
                      "what I conclude", "what I do next"))  # fmt: skip
    return (
        f"# Work log, {task.name} {task.title}\n\n## Step 1\n\n{step}\n\n"
        "## Why I stopped\n\n\n## Tools I used, language models included\n\n"
    )
