"""Published tables that chapters and benches read; each folder's README names the source."""

from pathlib import Path

from ascend_lab.errors import InputError

__all__ = ["data_path"]

FOLDER = Path(__file__).parent


def data_path(name: str) -> Path:
    """Return the path of a data file of the package, `folder/file`; InputError if it has none."""
    path = FOLDER / name
    if not path.is_file():
        there = sorted(p.relative_to(FOLDER).as_posix() for p in FOLDER.glob("*/*.[cj]s*"))
        raise InputError("the name of a data file", repr(name), "there are " + ", ".join(there))
    return path
