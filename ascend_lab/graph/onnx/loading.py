"""Reading a model file: limits before work, damaged files, and what the model says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.graph.onnx.registry import NEWEST_OPSET
from ascend_lab.graph.onnx.tensors import Limits

if TYPE_CHECKING:
    from onnx import ModelProto

Source = "str | Path | bytes | ModelProto"
NEWEST_IR = 14
"""The newest version of the file format that is read."""


def load(source: str | Path | bytes | ModelProto, limits: Limits) -> tuple[ModelProto, Path | None]:
    """Return the model and the folder its external data may lie in.

    Raises `InputError` for a file that cannot be read, is too large or is no model.
    """
    if not isinstance(source, str | Path | bytes):
        return source, None
    data = source if isinstance(source, bytes) else _bytes(Path(source), limits)
    if len(data) > limits.file_bytes:
        raise InputError(f"a model of at most {limits.file_bytes} bytes", str(len(data)), "split")
    where = "bytes" if isinstance(source, bytes) else str(source)
    folder = None if isinstance(source, bytes) else Path(source).resolve().parent
    return _parsed(data, where), folder


def _bytes(path: Path, limits: Limits) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise InputError("a model file", f"{path}, which is none", "give the file's path")
        size = path.stat().st_size
        if size > limits.file_bytes:
            got = f"{size} bytes in {path}"
            raise InputError(
                f"a model file of at most {limits.file_bytes} bytes", got, "move its weights out"
            )
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise InputError("a model file that can be read", f"{path}: {error}", "check it") from None


def _parsed(data: bytes, where: str) -> ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        got = f"{where}: {str(error).strip() or 'not a model'}"
        raise InputError(
            "an ONNX model", got, "export it again: damaged or another format"
        ) from None
    if not model.HasField("graph") or not model.graph.output:
        raise InputError("an ONNX model with a graph", f"{where}: none", "export it again")
    return model


def opset_of(model: ModelProto) -> int:
    """Return the version of the standard's operators; raise `UnsupportedError` for a newer one."""
    if model.ir_version > NEWEST_IR:
        raise UnsupportedError(
            f"ONNX files of IR version {NEWEST_IR} or older", str(model.ir_version), "export anew"
        )
    found = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    if len(set(found)) > 1:
        raise InputError("one version of the standard's operators", str(found), "keep one")
    version = found[0] if found else 1
    if not 1 <= version <= NEWEST_OPSET:
        raise UnsupportedError(
            f"operators of opset 1 to {NEWEST_OPSET}", str(version), "export with an older opset"
        )
    return int(version)
