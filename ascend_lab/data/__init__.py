"""Published tables that chapters and benches read; each folder's README names the source."""

from pathlib import Path

from ascend_lab.errors import InputError

__all__ = ["data_path"]

FOLDER = Path(__file__).parent


def data_path(name: str) -> Path:
    """Return the path of a published table, named `folder/file`; raise `InputError` if unknown.

    The package may be installed anywhere, so paths are relative to this file.
    """
    path = FOLDER / name
    if not path.is_file():
        # *.csv and *.json, not the READMEs beside them
        file_names = sorted(p.relative_to(FOLDER).as_posix() for p in FOLDER.glob("*/*.[cj]s*"))
        raise InputError(
            "the name of a data file", repr(name), "there are " + ", ".join(file_names)
        )
    return path
