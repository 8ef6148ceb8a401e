"""Write a site that runs the readers' copies in the visitor's browser: `lab.py browser`.

python book/browser.py FOLDER

The site is JupyterLite with our wheel. Python itself (Pyodide) and compiled packages are not in it:
a browser fetches them from a network on its first visit.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from copies import all_copies

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ("ascend_lab", "pyproject.toml", "README.md", "LICENSE", "LICENSE-TEXT")
INSTALL = "%pip install -q ascend-lab  # on this site only; the first time takes a minute"


def write_wheel(folder: Path) -> Path:
    """Build our wheel from a copy, because building leaves files behind; return its path."""
    source = folder / "source"
    source.mkdir()
    for name in PACKAGE:
        if (ROOT / name).is_dir():
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=skip)
        else:
            shutil.copy(ROOT / name, source / name)
    run(source, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def write_copies(folder: Path) -> None:
    """Write the readers' copies; the first cell of code installs the package."""
    folder.mkdir()
    for name, notebook in all_copies().items():
        if any(cell.cell_type == "code" for cell in notebook.cells):
            notebook.cells.insert(1, nbformat.v4.new_code_cell(INSTALL, id="install"))
        nbformat.write(notebook, folder / name)


def run(folder: Path, *words: object) -> None:
    """Run Python in a folder; show what it said only if it failed."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        sys.exit((done.stdout + done.stderr)[-3000:])


def main(target: Path) -> None:
    """Build the site in a folder that is not there yet, or is a site of before."""
    if target.exists() and any(target.iterdir()) and not (target / "jupyter-lite.json").exists():
        sys.exit(f"the site goes in a folder of its own, not in {target}")
    with TemporaryDirectory() as place:
        folder = Path(place)
        wheel, files = write_wheel(folder), folder / "files"
        write_copies(files)
        shutil.rmtree(target, ignore_errors=True)
        words = ("--contents", files, "--piplite-wheels", wheel, "--output-dir", target)
        run(folder, "-m", "jupyter", "lite", "build", "--no-sourcemaps", *words)
    size_bytes = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    print(f"lab: a site of {size_bytes / 1e6:.0f} MB written")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
