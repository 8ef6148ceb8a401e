"""How long the notebooks of the book take: part of `lab.py bench`."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path


def chapter_seconds() -> Iterator[tuple[str, float]]:
    """Yield name and seconds of every notebook, executed fresh, kernel start included."""
    import nbformat
    from nbclient import NotebookClient

    folder = Path(__file__).parent.parent / "notebooks"
    for file in sorted(folder.glob("[012]*.ipynb")):
        notebook = nbformat.read(file, as_version=4)  # type: ignore[no-untyped-call]
        client = NotebookClient(
            notebook, timeout=120, resources={"metadata": {"path": str(folder)}}
        )
        start = time.perf_counter()
        client.execute(stderr=subprocess.DEVNULL)  # kernel log lines are not results
        yield file.stem, time.perf_counter() - start
