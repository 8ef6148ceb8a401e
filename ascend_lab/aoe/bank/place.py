"""Where the custom bank lies: `TUNE_BANK_PATH`, else `ASCEND_CACHE_PATH`, else the home folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ascend_lab.aoe.bank.knowledge import NOT_STORED, Knowledge
from ascend_lab.aoe.bank.store import FILE_NAME
from ascend_lab.errors import InputError

ROOT_VARIABLE = "TUNE_BANK_PATH"
CACHE_VARIABLE = "ASCEND_CACHE_PATH"
REPEAT_VARIABLE = "REPEAT_TUNE"


def bank_file(
    environ: Mapping[str, str] | None = None, home: Path | None = None, *, make: bool = True
) -> Path:
    """Return the file of the custom bank; its folder exists then, unless nothing is to `make`.

    `TUNE_BANK_PATH` must name a folder that exists and may be read, written and entered; the folder
    `aoe_data` in `ASCEND_CACHE_PATH` and `.ascend_lab/aoe` in the home folder are made. Raises
    `InputError` naming the variable.
    """
    environ = os.environ if environ is None else environ
    root, cache = environ.get(ROOT_VARIABLE, ""), environ.get(CACHE_VARIABLE, "")
    if root:
        return _usable(Path(root), ROOT_VARIABLE) / FILE_NAME
    if cache:
        folder, variable = Path(cache) / "aoe_data", CACHE_VARIABLE
    else:
        folder, variable = (home or _home()) / ".ascend_lab" / "aoe", "the home folder"
    return (_made(folder, variable) if make else folder) / FILE_NAME


def open_knowledge(
    environ: Mapping[str, str] | None = None, home: Path | None = None, *, resume: bool = True
) -> Knowledge:
    """Open the banks where the environment says.

    A `TUNE_BANK_PATH` that cannot be used raises `InputError`, as published; any other place that
    cannot be made leaves a warning and the built-in bank.
    """
    environ = os.environ if environ is None else environ
    try:
        return Knowledge(bank_file(environ, home), resume=resume)
    except InputError as error:
        if environ.get(ROOT_VARIABLE) or type(error) is not InputError:
            raise
        knowledge = Knowledge(None, resume=resume)
        knowledge.warnings.append(NOT_STORED.format(error))
        return knowledge


def repeat_tune(environ: Mapping[str, str] | None = None) -> bool:
    """Return what `REPEAT_TUNE` says: True or False (the default), in any case."""
    value = (os.environ if environ is None else environ).get(REPEAT_VARIABLE, "") or "False"
    if value.lower() not in ("true", "false"):
        raise InputError(f"{REPEAT_VARIABLE} as True or False", repr(value), "unset it")
    return value.lower() == "true"


def _usable(folder: Path, variable: str) -> Path:
    """Return the folder if it exists and may be read, written and entered."""
    wrong = ""
    try:
        if not folder.is_dir():
            wrong = "a file" if folder.exists() else "nothing there"
        elif not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            wrong = "no permission"
    except OSError as error:
        wrong = str(error.strerror)
    if wrong:
        raise InputError(
            f"{variable} as an existing folder to read, write and enter",
            f"{str(folder)!r}: {wrong}",
            f"make that folder, change its permissions, or unset {variable}",
        )
    return folder


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        remedy = f"set {ROOT_VARIABLE} to a folder that may be written"
        raise InputError("a home folder for the knowledge bank", str(error), remedy) from None


def _made(folder: Path, variable: str) -> Path:
    """Make the folder and return it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"a folder for the knowledge bank, from {variable}",
            f"{str(folder)!r}: {error.strerror}",
            f"set {ROOT_VARIABLE} to a folder that may be written",
        ) from None
    return _usable(folder, variable)
