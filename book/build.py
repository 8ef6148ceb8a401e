"""Execute the chapters and render the book; `lab.py` calls this inside its environment.

python book/build.py book [--saved]      copy the sources to _build, execute, render strictly
python book/build.py refresh [NAME ...]  execute notebooks in place
"""

import asyncio
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import matplotlib.font_manager  # noqa: F401  builds the font cache before a kernel would
import nbclient
import nbformat
import reading_time
import zmq

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "_build"
HTML = BUILD / "html"
# Jupyter Book ends a failed build with a traceback of its own, below Sphinx' messages: not needed.
# The trees of all pages stay to the end: to look for garbage among them takes a tenth of the time.
RENDER = """
import gc
import sys
gc.set_threshold(500_000, 50)
from jupyter_book.cli.main import main
try:
    main()
except RuntimeError:
    sys.exit(1)
"""
RUN_TIMES_MARK = "<!-- lab: run times -->"
NO_ICON = '<link rel="icon" href="data:," />'
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
DRAW_FRAMES = """
from ascend_lab.lab.page_frames import show_frames
show_frames(Out, {asked!r})
"""


class BuildError(Exception):
    """Something an author has to put right; the message says what."""


def find_notebooks(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """Return the notebooks of `folder`, or those whose file name starts with one of `names`."""
    found = sorted(folder.glob("*.ipynb"))
    prefixes = tuple(Path(name).name for name in names)
    chosen = [path for path in found if not prefixes or path.name.startswith(prefixes)]
    if not chosen:
        raise BuildError(f"no notebook {' or '.join(names) or '(*.ipynb)'} in {folder}")
    return chosen


def tidy(notebook: nbformat.NotebookNode) -> str:
    """Keep the metadata that readers need; a widget without its kernel is its frames."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": kernel, "language_info": {"name": "python"}}
    )
    for cell in notebook.cells:
        for key in ("execution", "collapsed", "ExecuteTime"):
            cell.metadata.pop(key, None)
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop(WIDGET_VIEW, None)
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def drawing_cell(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return a cell that draws all widgets at the settings of the page."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    asked = {
        number: dict(cell.metadata["page_values"])
        for number, cell in enumerate(code, start=1)
        if "page_values" in cell.metadata
    }
    return nbformat.v4.new_code_cell(DRAW_FRAMES.format(asked=asked))


def save_frames(notebook: nbformat.NotebookNode) -> None:
    """Move what the last cell, `DRAW_FRAMES`, displayed to the widgets it belongs to."""
    drawing = notebook.cells.pop()
    widgets = {
        output.execution_count: output
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type == "execute_result"
    }
    for frames in drawing.outputs:
        if frames.output_type == "display_data":  # and no warning of a figure at some setting
            widgets[frames.metadata["shown_by"]].data.update(frames.data)


class Client(nbclient.NotebookClient):
    """A client that hears the end of a cell whose widgets it answered meanwhile."""

    def process_message(
        self, msg: dict, cell: nbformat.NotebookNode, index: int
    ) -> nbformat.NotebookNode | None:
        """Handle a message; an answer sent may have taken the sign that a reply is there: look."""
        try:
            return super().process_message(msg, cell, index)
        finally:
            self.kc.shell_channel.socket.get(zmq.EVENTS)


async def execute_one(path: Path, gate: asyncio.Semaphore) -> tuple[str, float]:
    """Execute one notebook in a fresh kernel; return its new text and the seconds it took."""
    async with gate:
        notebook = nbformat.read(path, as_version=4)
        has_widgets = any("explore(" in cell.source for cell in notebook.cells)
        if has_widgets:
            notebook.cells.append(drawing_cell(notebook))
        client = Client(
            notebook,
            timeout=300,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": str(path.parent)}},
        )
        started = time.perf_counter()
        try:
            await client.async_execute()
        except nbclient.exceptions.CellExecutionError as error:
            raise BuildError(f"{path.name} raised an error:\n{error}") from None
        except nbclient.exceptions.CellTimeoutError:
            raise BuildError(f"{path.name}: a cell ran for more than 300 s") from None
        except nbclient.exceptions.DeadKernelError:
            raise BuildError(f"{path.name}: its kernel died; is there memory enough?") from None
        seconds = time.perf_counter() - started
        if has_widgets:
            save_frames(notebook)
        if path.name[:2].isdigit():
            reading_time.state(notebook.cells)
        print(f"  {path.name}: {seconds:.1f} s", flush=True)
        return tidy(notebook), seconds


def execute_notebooks(paths: Sequence[Path]) -> dict[str, float]:
    """Execute notebooks in place, two at a time, and return {name: seconds}; all or none change."""

    async def all_of_them() -> list[tuple[str, float]]:
        gate = asyncio.Semaphore(min(2, os.cpu_count() or 1))
        return await asyncio.gather(*(execute_one(path, gate) for path in paths))

    print("lab: executing", len(paths), "notebooks", flush=True)
    done = asyncio.run(all_of_them())
    for path, (text, _) in zip(paths, done, strict=True):
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8", newline="\n")
    return {path.name: seconds for path, (_, seconds) in zip(paths, done, strict=True)}


def run_times_table(seconds: Mapping[str, float]) -> str:
    """Return the status page's tables: versions in use, and run times where there are any."""
    rows = [("Python", platform.python_version())]
    rows += [(name, version(name)) for name in ("ascend-lab", "numpy", "matplotlib", "ipywidgets")]
    lines = ["| Built with | Version |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows), ""]
    if seconds:
        lines += ["| Notebook | Seconds |", "|---|---:|"]
        lines += [f"| {name} | {value:.1f} |" for name, value in seconds.items()]
    else:
        lines += ["This copy shows the saved outputs; its notebooks were not executed again."]
    return "\n".join(lines) + "\n"


def copy_sources(source: Path) -> None:
    """Copy what the book is made from to the empty folder `source`."""
    shutil.rmtree(source, ignore_errors=True)
    skip = shutil.ignore_patterns(".*", "__pycache__")
    for folder in ("book", "notebooks"):
        shutil.copytree(ROOT / folder, source / folder, ignore=skip)
    for name in ("_config.yml", "_toc.yml"):
        shutil.copy(ROOT / name, source / name)


def build_book(execute: bool = True) -> int:
    """Render the book strictly, from scratch, from a copy of the sources; return the exit code."""
    source = BUILD / "src"
    copy_sources(source)
    notebooks = find_notebooks(source / "notebooks")
    seconds = execute_notebooks(notebooks) if execute else {}
    status = source / "book" / "status.md"
    if status.exists():
        text = status.read_text(encoding="utf-8")
        filled = text.replace(RUN_TIMES_MARK, run_times_table(seconds))
        status.write_text(filled, encoding="utf-8")
    # A second strict build over an old one would report only the pages it reads again.
    for old in (HTML, BUILD / ".doctrees"):
        shutil.rmtree(old, ignore_errors=True)
    command = [sys.executable, "-c", RENDER, "build", source, "--path-output", ROOT]
    strict = ["-W", "-n", "--keep-going", "-q"]
    # Warnings and errors come on stderr; stdout holds greetings.
    done = subprocess.run([*command, *strict], stdout=subprocess.DEVNULL, check=False)
    if done.returncode == 0:
        ask_no_icon(HTML / "index.html")
    return done.returncode


def ask_no_icon(page: Path) -> None:
    """Give the page that forwards to the book an empty icon.

    Without one browsers ask for /favicon.ico, and a real one they stop loading half-way.
    """
    with page.open("a", encoding="utf-8") as file:
        file.write(f"{NO_ICON}\n")


def main(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        if arguments[0] == "book":
            return build_book(execute="--saved" not in arguments)
        execute_notebooks(find_notebooks(ROOT / "notebooks", arguments[1:]))
        return 0
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        # Kernels end with their parent; the clean-up at exit would only print tracebacks.
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
