"""Files of arrays, .npy and .npz: read with limits and without unpickling, and written whole."""

import io
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab.errors import InputError
from ascend_lab.limits import ARRAY_BYTES, refuse_above, shown
from ascend_lab.output import write_whole

Arrays = dict[str, Any]


_DAMAGED: tuple[type[Exception], ...] = (
    OSError, ValueError, LookupError, EOFError, SyntaxError, TypeError, RuntimeError, MemoryError,
    zipfile.BadZipFile, tokenize.TokenError, zlib.error,
)  # fmt: skip
"""What NumPy and zipfile raise for what is no archive of arrays."""
with suppress(ImportError):  # a Python without it unpacks none of its archives
    import lzma

    _DAMAGED += (lzma.LZMAError,)


def _damage(error: BaseException) -> str:
    """Return what is wrong with a file, without NumPy's advice to unpickle it."""
    text = str(error)[:200]
    if "pickle" in text:
        return "Python objects in it"
    return "another kind of file" if "magic" in text else text


@contextmanager
def _reading(path: str, what: str, remedy: str) -> Iterator[None]:
    """Raise `InputError` for a path that is no file, and for whatever is wrong with one."""
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise InputError(what, f"{path}, which is no file", "give a file")
        yield
    except _DAMAGED as error:
        raise InputError(what, f"{path}: {_damage(error)}", remedy) from None


def load_arrays(path: str) -> Arrays:
    """Return the arrays of an .npz file; raise `InputError` for another or a damaged file."""
    what = "an .npz file of arrays of numbers"
    with _reading(path, what, "write one with numpy.savez"):
        with zipfile.ZipFile(path) as archive:
            total = sum(entry.file_size for entry in archive.infolist())
        refuse_above(f"{path}: bytes of arrays, unpacked,", total, ARRAY_BYTES, "use fewer")
        with np.load(path, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    for name, array in found.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
            raise InputError(what, f"{shown(name)} in {path}", "numpy.savez writes one")
    return found


def load_array(path: str) -> Any:
    """Return the array of an .npy file; raise `InputError` for another or a damaged file."""
    what = "an .npy file of numbers"
    with _reading(path, what, "write one with numpy.save"):
        refuse_above(f"{path}: bytes", Path(path).stat().st_size, ARRAY_BYTES, "use fewer")
        with Path(path).open("rb") as stream:
            array = np.lib.format.read_array(stream, allow_pickle=False)
    if array.dtype.kind not in "biuf":
        raise InputError(what, f"{array.dtype} in {path}", "numpy.save writes one")
    return array


def save_arrays(path: str, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name into an .npz file; any name will do, also those with slashes."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array))
    write_whole(path, whole.getvalue())


def save_array(path: str, array: Any) -> None:
    """Write an array into an .npy file."""
    raw = io.BytesIO()
    np.lib.format.write_array(raw, np.ascontiguousarray(array))
    write_whole(path, raw.getvalue())
