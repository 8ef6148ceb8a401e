"""Files of arrays, .npy and .npz: read with limits and without unpickling, written in one step."""

from __future__ import annotations

import io
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab import output
from ascend_lab.errors import InputError, complain
from ascend_lab.limits import ARRAY_BYTES, refuse_above, shown

Arrays = dict[str, Any]

_DAMAGED: tuple[type[Exception], ...] = (
    OSError,
    ValueError,
    LookupError,
    EOFError,
    SyntaxError,
    TypeError,
    RuntimeError,
    MemoryError,
    zipfile.BadZipFile,
    tokenize.TokenError,
    zlib.error,
)
"""Errors that NumPy and zipfile raise for damaged files and files of another format."""
with suppress(ImportError):  # a Python built without this module cannot unpack its archives
    import lzma

    _DAMAGED += (lzma.LZMAError,)


def _damage(error: BaseException) -> str:
    """Return what is wrong with a file, without its name or NumPy's advice to unpickle it."""
    text = (getattr(error, "strerror", None) or str(error))[:200]
    # NumPy's own words would advise allow_pickle=True, which runs code that the file brings.
    if "pickle" in text:
        return "Python objects in it"
    return "another kind of file" if "magic" in text else text


@contextmanager
def _reading(path: str, needed: str, remedy: str) -> Iterator[None]:
    """Raise `InputError` for a path that is not a file, and for a file that cannot be read."""
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise InputError(needed, f"{path}, which is no file", "give a file")
        yield
    except _DAMAGED as error:
        raise InputError(needed, f"{path}: {_damage(error)}", remedy) from None


def load_arrays(path: str) -> Arrays:
    """Return the arrays of an .npz file; raise `InputError` for another or a damaged file."""
    needed = "an .npz file of arrays of numbers"
    with _reading(path, needed, "write one with numpy.savez"):
        # A file of 1 MB may unpack to 1 TB of zeros: the sizes are read before the data.
        with zipfile.ZipFile(path) as archive:
            total = sum(entry.file_size for entry in archive.infolist())
        refuse_above(f"{path}: bytes of arrays, unpacked,", total, ARRAY_BYTES, "use fewer")
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
            raise InputError(needed, f"{shown(name)} in {path}", "numpy.savez writes one")
    return arrays


def load_array(path: str) -> Any:
    """Return the array of an .npy file; raise `InputError` for another or a damaged file."""
    needed = "an .npy file of numbers"
    with _reading(path, needed, "write one with numpy.save"):
        refuse_above(f"{path}: bytes", Path(path).stat().st_size, ARRAY_BYTES, "use fewer")
        # numpy.load would also take an .npz or a pickle for an array file
        with Path(path).open("rb") as stream:
            array = np.lib.format.read_array(stream, allow_pickle=False)
    # booleans, whole numbers and floats; no texts, dates or complex numbers
    if array.dtype.kind not in "biuf":
        raise InputError(needed, f"{array.dtype} in {path}", "numpy.save writes one")
    return array


def warn_infinite(arrays: Mapping[str, Any], flag: str) -> None:
    """Say on standard error which arrays hold NaN or infinities: results may hold them, too."""
    for name, array in arrays.items():
        # A warning, not an error: the masks of attention consist of infinities.
        if wrong := array.size - np.isfinite(array).sum():
            got = f"{wrong:,} of {array.size:,} numbers of {name} are NaN or infinite"
            complain("ascend-lab", f"warning: {flag}: {got}")


def save_arrays(path: str, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name into an .npz file; every name is allowed, even with slashes.

    numpy.savez takes names as arguments of a call: an array called "file" would be its file.
    """
    packed = io.BytesIO()  # written in one step at the end: a failure leaves no incomplete file
    with zipfile.ZipFile(packed, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array, order="C"))
    output.write_whole(path, packed.getvalue())


def save_array(path: str, array: Any) -> None:
    """Write an array into an .npy file."""
    raw = io.BytesIO()
    np.lib.format.write_array(raw, np.asarray(array, order="C"))
    output.write_whole(path, raw.getvalue())
