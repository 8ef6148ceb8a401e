"""Reads and writes the bodies of inference requests: JSON, optionally with tensors as bytes.

    {"id": "7", "inputs": [{"name": "x", ..., "parameters": {"binary_data_size": 16}}]}<16 bytes>

The header Inference-Header-Content-Length is the length of the JSON. If it is 0, the body is the
bytes of the model's only input, and all outputs are returned as bytes. The parameter
binary_data_output of a request, or binary_data of an output, requests outputs as bytes. A body may
be compressed.

Protocol: https://github.com/kserve/open-inference-protocol; bytes: docs/protocol
(extension_binary_data.md) of https://github.com/triton-inference-server/server.
"""

import gzip
import json
import math
import zlib
from dataclasses import dataclass
from typing import Any

from ascend_lab.compiler.onnx.tensors import NUMPY
from ascend_lab.deploy.serving.opened import Model
from ascend_lab.deploy.serving.tensors import Arrays, Port, json_text, to_bytes
from ascend_lab.errors import InputError
from ascend_lab.limits import shown

LENGTH_HEADER = "Inference-Header-Content-Length"
ENCODINGS = ("gzip", "deflate")
SHARED_MEMORY = "shared_memory_region"
MAX_NESTED = 2**19
"""Largest number of lists and objects in JSON: reading them delays other requests by 0.3 s."""
COMPRESSION_LEVEL = 1
"""Level of compression, from 1 to 9; tensors hardly become smaller with a higher one."""


class RefusedError(Exception):
    """A refusal of a request, with the status and the text of the answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = " ".join(text.split())


@dataclass(frozen=True, slots=True)
class Asked:
    """A decoded request: its inputs, and pairs of (output, whether to return it as bytes)."""

    inputs: Arrays
    outputs: tuple[tuple[Port, bool], ...]
    id: str | None = None


# -- compression ----------------------------------------------------------------------------------
def unpacked(data: bytes, encoding: str, limit_bytes: int) -> bytes:
    """Return a decompressed body, without ever using more memory than the limit.

    Raises `RefusedError`: 415 for an unknown encoding, 413 above the limit, 400 for damaged data.
    """
    word = encoding.strip().lower()
    if word in ("", "identity"):
        return data
    if word not in ENCODINGS:
        raise RefusedError(415, f"Content-Encoding {' or '.join(ENCODINGS)}; got {shown(word)}")
    # "deflate" is zlib's format. Its first two bytes have the method 8 and are, as one number, a
    # multiple of 31. Some clients send the raw data without this header.
    has_zlib_head = len(data) > 1 and data[0] & 15 == 8 and (data[0] * 256 + data[1]) % 31 == 0
    # The window bits of zlib: 31 stands for gzip, 15 for zlib's header, -15 for none.
    deflate_bits = 15 if has_zlib_head else -15
    bits = 31 if word == "gzip" else deflate_bits
    reader = zlib.decompressobj(bits)
    try:
        # One byte above the limit is enough to detect that the body is too large.
        decompressed = reader.decompress(data, limit_bytes + 1)
    except zlib.error as error:
        raise RefusedError(400, f"a body in {word}; got {error}") from None
    if len(decompressed) > limit_bytes:
        raise too_large(limit_bytes)
    if not reader.eof or reader.unused_data:
        got = "more behind its end" if reader.eof else "its beginning only"
        raise RefusedError(400, f"a whole body in {word}; got {got}")
    return decompressed


def too_large(limit_bytes: int) -> RefusedError:
    """Return the refusal of a body above the limit."""
    text = f"a request of at most {limit_bytes:,} bytes, unpacked; got more; send less at once, "
    return RefusedError(413, f"{text}or start the server with a larger limit for bodies")


def wanted_encoding(accepted: str) -> str:
    """Return the compression that an Accept-Encoding header prefers, or "" for none."""
    # "gzip;q=0.5, deflate" prefers deflate, as a missing q is 1; q=0 forbids an encoding.
    best = ""
    best_weight = 0.0
    for entry in accepted.lower().split(","):
        word, _, quality = entry.partition(";")
        weight_text = quality.strip().removeprefix("q=").strip() or "1"
        try:
            weight = float(weight_text)
        except ValueError:
            continue
        if word.strip() in ENCODINGS and weight > best_weight:
            best = word.strip()
            best_weight = weight
    return best


def packed(data: bytes, encoding: str) -> bytes:
    """Return a body compressed with gzip or deflate (in zlib's format)."""
    if encoding == "gzip":
        return gzip.compress(data, COMPRESSION_LEVEL, mtime=0)
    return zlib.compress(data, COMPRESSION_LEVEL)


# -- requests -------------------------------------------------------------------------------------
def decoded(data: bytes | memoryview) -> Any:
    """Return the value of a JSON body, with null for nan and infinity; may raise `InputError`."""
    text = bytes(data)
    nested_count = text.count(b"[") + text.count(b"{")
    if nested_count > MAX_NESTED:
        remedy = "send data flat, or as bytes behind the JSON"
        raise InputError(
            f"JSON of at most {MAX_NESTED:,} lists and objects", f"{nested_count:,}", remedy
        )
    try:
        return json.loads(
            text,
            # These are Python functions instead of float and int, because other threads can run
            # between two Python calls; C code would block them until a long list is read.
            parse_float=_decimal,
            parse_int=_whole,
            parse_constant=lambda word: None,
        )
    except (ValueError, RecursionError) as error:
        raise InputError("a request: JSON", str(error)[:80]) from None


def _decimal(text: str) -> float:
    return float(text)


def _whole(text: str) -> int:
    return int(text)


def header_bytes_of(text: str | None) -> int | None:
    """Return the length of the JSON from its header; raises `InputError` for other texts."""
    # No body has a length of 16 digits, and `int` would be slow for thousands of digits.
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise InputError(f"{LENGTH_HEADER}, a number of bytes", shown(text))
    return int(text)


def read_request(body: bytes, header_bytes: int | None, model: Model) -> Asked:
    """Return the request in a body; raises `InputError` if it is not valid."""
    if header_bytes == 0:
        return _read_raw(body, model)
    if header_bytes is not None and header_bytes > len(body):
        needed = f"{LENGTH_HEADER} of at most {len(body)}, the bytes of the body"
        raise InputError(needed, str(header_bytes))
    end = len(body) if header_bytes is None else header_bytes
    # Slices of a view are not copied.
    view = memoryview(body)
    request = decoded(view[:end])
    if not isinstance(request, dict) or not isinstance(request.get("inputs"), list):
        raise InputError("an object with inputs, a list of tensors", shown(request))
    identity = _identity(request)
    parameters = parameters_of(request, "the request")
    binary_tail = _BinaryTail(view[end:], header_bytes is not None)
    inputs = _inputs(request["inputs"], binary_tail, model)
    if unused_bytes := binary_tail.unused_bytes:
        raise InputError("bytes behind the JSON for the inputs only", f"{unused_bytes} bytes more")
    all_binary = _flag(parameters, "binary_data_output", default=False)
    return Asked(inputs, _outputs(request.get("outputs"), all_binary, model), identity)


def _read_raw(body: bytes, model: Model) -> Asked:
    """Return a request whose body is just the bytes of the model's only input."""
    if len(model.inputs) != 1:
        needed = f"{LENGTH_HEADER} 0 for a model of one input only"
        raise InputError(needed, f"{len(model.inputs)} inputs", "send JSON before the bytes")
    port = model.inputs[0]
    port.refuse_text("input")
    shape = port.described()["shape"]
    if shape.count(-1) > 1:
        raise InputError(
            f"{LENGTH_HEADER} 0 for a shape with one open size", f"{shape}", "send JSON"
        )
    # Shape [-1, 3] in FP32 has 12 bytes a row, so that a body of 24 bytes has two rows.
    row_bytes = math.prod(size for size in shape if size != -1) * NUMPY[port.element].itemsize
    count = len(body) // row_bytes if row_bytes else 0
    sizes = [count if size == -1 else size for size in shape]
    stated = {"datatype": port.datatype, "shape": sizes}
    inputs = {port.name: port.read(stated, model.max_batch, memoryview(body))}
    return Asked(inputs, _outputs(None, True, model))


def _identity(request: dict[str, Any]) -> str | None:
    """Return the id of a request, None if it has none."""
    identity = request.get("id")
    if identity is None:
        return None
    if not isinstance(identity, str):
        raise InputError("id, a text", shown(identity))
    # JSON can have one half of a surrogate pair, which the answer could not repeat.
    try:
        identity.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError("id, a text of whole characters", shown(identity)) from None
    return identity


def parameters_of(owner: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the parameters of a request or tensor; unknown ones are allowed and ignored."""
    parameters = owner.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise InputError(f"parameters of {where}, an object", shown(parameters))
    if SHARED_MEMORY in parameters:
        needed = f"{where} in the body of the request"
        raise InputError(needed, "shared memory, which is not offered", "send its bytes")
    return parameters


def _flag(parameters: dict[str, Any], name: str, *, default: bool) -> bool:
    """Return a parameter that is true or false."""
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InputError(f"{name}, true or false", shown(value))
    return value


class _BinaryTail:
    """The bytes after the JSON, which the inputs take in order."""

    def __init__(self, data: memoryview, announced: bool) -> None:
        self.data = data
        self.announced = announced

    @property
    def unused_bytes(self) -> int:
        """Return the number of bytes that no input has taken."""
        return len(self.data)

    def take(self, size: object, where: str) -> memoryview:
        """Return the bytes of the next input; raises `InputError` if there are too few."""
        if type(size) is not int or size < 0:
            raise InputError(f"binary_data_size of {where}, a number of bytes", shown(size))
        if not self.announced:
            needed = f"the header {LENGTH_HEADER}, as {where} has binary_data_size"
            raise InputError(needed, "none", "say how long the JSON is")
        if size > len(self.data):
            needed = f"{size} bytes behind the JSON for {where}"
            raise InputError(needed, f"{len(self.data)}")
        taken = self.data[:size]
        self.data = self.data[size:]
        return taken


def _inputs(tensors: list[Any], binary_tail: _BinaryTail, model: Model) -> Arrays:
    """Return the arrays of all inputs; raises `InputError` for missing, wrong or unknown ones."""
    ports = {port.name: port for port in model.inputs}
    names = ", ".join(map(shown, ports))
    arrays: Arrays = {}
    for tensor in tensors:
        name = tensor.get("name") if isinstance(tensor, dict) else None
        if not isinstance(name, str) or name not in ports or name in arrays:
            raise InputError(f"inputs {names}, each once", shown(name or tensor))
        where = f"input {shown(name)}"
        parameters = parameters_of(tensor, where)
        binary = None
        if "binary_data_size" in parameters:
            if "data" in tensor:
                raise InputError(f"{where}: data or binary_data_size", "both", "send one")
            binary = binary_tail.take(parameters["binary_data_size"], where)
        arrays[name] = ports[name].read(tensor, model.max_batch, binary)
    if missing := ports.keys() - arrays.keys():
        raise InputError(f"inputs {names}", f"no {', '.join(map(shown, sorted(missing)))}")
    if model.batched and len({len(array) for array in arrays.values()}) > 1:
        rows = [len(array) for array in arrays.values()]
        raise InputError("inputs with as many rows", shown(rows))
    return arrays


def _outputs(listed: object, all_binary: bool, model: Model) -> tuple[tuple[Port, bool], ...]:
    """Return pairs of (output, whether to return it as bytes) for the requested outputs."""
    ports = {port.name: port for port in model.outputs}
    chosen: dict[str, bool] = {}
    if listed is not None and not isinstance(listed, list):
        raise InputError("outputs, a list", shown(listed))
    for entry in listed or ():
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in ports or name in chosen:
            port_names = ", ".join(map(shown, ports))
            raise InputError(f"outputs among {port_names}, each once", shown(name or entry))
        where = f"output {shown(name)}"
        parameters = parameters_of(entry, where)
        if "classification" in parameters:
            raise InputError(f"{where} as a tensor", "classification, which is not offered")
        chosen[name] = _flag(parameters, "binary_data", default=all_binary)
    # By the protocol, a request that names no outputs gets all of them.
    chosen = chosen or dict.fromkeys(ports, all_binary)
    for name in chosen:
        ports[name].refuse_text("output")
    return tuple((ports[name], binary) for name, binary in chosen.items())


# -- answers --------------------------------------------------------------------------------------
def written(head: dict[str, Any], request: Asked, outputs: Arrays) -> tuple[bytes, int | None]:
    """Return an answer's body, and the length of its JSON if bytes follow it."""
    texts = []
    binary_parts = []
    for port, binary in request.outputs:
        array = outputs[port.name]
        described = {**port.described(), "shape": list(array.shape)}
        # The shape is that of this answer; in the metadata it may have -1.
        if binary:
            binary_parts.append(to_bytes(array))
            described["parameters"] = {"binary_data_size": len(binary_parts[-1])}
            texts.append(json.dumps(described))
        else:
            # The text of the numbers, which was written in chunks, goes before the last brace.
            texts.append(f'{json.dumps(described)[:-1]}, "data": {json_text(array)}}}')
    text = f'{json.dumps(head)[:-1]}, "outputs": [{", ".join(texts)}]}}'.encode("ascii")
    return b"".join([text, *binary_parts]), len(text) if binary_parts else None
