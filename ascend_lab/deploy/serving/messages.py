"""The bodies of requests and answers: JSON with tensors in it, or as bytes behind it.

    {"id": "7", "inputs": [{"name": "x", ..., "parameters": {"binary_data_size": 16}}]}<16 bytes>

The header Inference-Header-Content-Length tells where the JSON ends. 0 means that there is none:
the body is the bytes of the model's one input, and all outputs come back as bytes. The parameter
binary_data_output of a request, or binary_data of an output, asks for outputs as bytes. A body may
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

LENGTH = "Inference-Header-Content-Length"
ENCODINGS = ("gzip", "deflate")
SHARED = "shared_memory_region"
NESTS = 2**19
"""Most lists and objects in JSON: reading so many takes 0.3 s, in which all other requests wait."""
LEVEL = 1
"""Level of compression, of 9: numbers gain little from a higher one."""


class RefusedError(Exception):
    """A request that is refused, with the status and the text of the answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = " ".join(text.split())


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read: its inputs, and the outputs it asks for, True for those as bytes."""

    inputs: Arrays
    outputs: tuple[tuple[Port, bool], ...]
    id: str | None = None


# -- compression ----------------------------------------------------------------------------------
def unpacked(data: bytes, encoding: str, limit_bytes: int) -> bytes:
    """Return a body without its compression; no more than the limit is ever in memory.

    Raises `RefusedError`: 415 for an unknown encoding, 413 above the limit, 400 for damaged data.
    """
    word = encoding.strip().lower()
    if word in ("", "identity"):
        return data
    if word not in ENCODINGS:
        raise RefusedError(415, f"Content-Encoding {' or '.join(ENCODINGS)}; got {shown(word)}")
    # "deflate" is data in zlib's frame, whose first two bytes hold the method 8 and, as one number,
    # are a multiple of 31; some clients send the data without the frame
    has_zlib_head = len(data) > 1 and data[0] & 15 == 8 and (data[0] * 256 + data[1]) % 31 == 0
    # what zlib calls window bits: 31 expects gzip, 15 a frame, -15 none
    bits = 31 if word == "gzip" else 15 if has_zlib_head else -15
    reader = zlib.decompressobj(bits)
    try:
        # one byte more than the limit is enough to see that there is too much
        plain = reader.decompress(data, limit_bytes + 1)
    except zlib.error as error:
        raise RefusedError(400, f"a body in {word}; got {error}") from None
    if len(plain) > limit_bytes:
        raise too_large(limit_bytes)
    if not reader.eof or reader.unused_data:
        got = "more behind its end" if reader.eof else "its beginning only"
        raise RefusedError(400, f"a whole body in {word}; got {got}")
    return plain


def too_large(limit_bytes: int) -> RefusedError:
    """Return the refusal of a body above the limit."""
    text = f"a request of at most {limit_bytes:,} bytes, unpacked; got more; send less at once, "
    return RefusedError(413, f"{text}or start the server with a larger limit for bodies")


def wanted_encoding(accepted: str) -> str:
    """Return the compression that an Accept-Encoding header prefers; "" for none."""
    # "gzip;q=0.5, deflate" prefers deflate, as q is 1 where it is left out; q=0 forbids a word
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
    """Return a body compressed with gzip or deflate (in zlib's frame)."""
    if encoding == "gzip":
        return gzip.compress(data, LEVEL, mtime=0)
    return zlib.compress(data, LEVEL)


# -- requests -------------------------------------------------------------------------------------
def decoded(data: bytes | memoryview) -> Any:
    """Return the value of a body of JSON, null for nan and infinity; `InputError` if it is none."""
    text = bytes(data)
    nests = text.count(b"[") + text.count(b"{")
    if nests > NESTS:
        remedy = "send data flat, or as bytes behind the JSON"
        raise InputError(f"JSON of at most {NESTS:,} lists and objects", f"{nests:,}", remedy)
    try:
        return json.loads(
            text,
            # functions of Python, not float and int themselves: between two of their calls other
            # threads may run, while C code would hold them up until a long list is read
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
    """Return the length of the JSON from its header; `InputError` if it is no length."""
    # fewer than 16 digits: no body is longer, and `int` takes long for a text of digits
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise InputError(f"{LENGTH}, a number of bytes", shown(text))
    return int(text)


def read_request(body: bytes, header_bytes: int | None, model: Model) -> Asked:
    """Return the request in a body; raise `InputError` if anything in it is wrong."""
    if header_bytes == 0:
        return _read_raw(body, model)
    if header_bytes is not None and header_bytes > len(body):
        needed = f"{LENGTH} of at most {len(body)}, the bytes of the body"
        raise InputError(needed, str(header_bytes))
    end = len(body) if header_bytes is None else header_bytes
    # a view: slices of 16 MB of tensors are not copied
    view = memoryview(body)
    asked = decoded(view[:end])
    if not isinstance(asked, dict) or not isinstance(asked.get("inputs"), list):
        raise InputError("an object with inputs, a list of tensors", shown(asked))
    identity = _identity(asked)
    parameters = parameters_of(asked, "the request")
    behind = _Behind(view[end:], header_bytes is not None)
    inputs = _inputs(asked["inputs"], behind, model)
    if unused_bytes := behind.left_bytes:
        raise InputError("bytes behind the JSON for the inputs only", f"{unused_bytes} bytes more")
    everything_binary = _flag(parameters, "binary_data_output", default=False)
    return Asked(inputs, _outputs(asked.get("outputs"), everything_binary, model), identity)


def _read_raw(body: bytes, model: Model) -> Asked:
    """Return a request that is the bytes of the model's one input, and nothing else."""
    if len(model.inputs) != 1:
        needed = f"{LENGTH} 0 for a model of one input only"
        raise InputError(needed, f"{len(model.inputs)} inputs", "send JSON before the bytes")
    port = model.inputs[0]
    port.refuse_text("input")
    shape = port.described()["shape"]
    if shape.count(-1) > 1:
        raise InputError(f"{LENGTH} 0 for a shape with one open size", f"{shape}", "send JSON")
    # shape [-1, 3] in FP32: 12 bytes a row, so a body of 24 bytes has two
    row_bytes = math.prod(size for size in shape if size != -1) * NUMPY[port.element].itemsize
    count = len(body) // row_bytes if row_bytes else 0
    sizes = [count if size == -1 else size for size in shape]
    stated = {"datatype": port.datatype, "shape": sizes}
    inputs = {port.name: port.read(stated, model.max_batch, memoryview(body))}
    return Asked(inputs, _outputs(None, True, model))


def _identity(asked: dict[str, Any]) -> str | None:
    """Return the id of a request, None if it has none."""
    identity = asked.get("id")
    if identity is None:
        return None
    if not isinstance(identity, str):
        raise InputError("id, a text", shown(identity))
    # JSON may hold one half of a pair of characters, which the answer could not repeat
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
    if SHARED in parameters:
        needed = f"{where} in the body of the request"
        raise InputError(needed, "shared memory, which is not offered", "send its bytes")
    return parameters


def _flag(parameters: dict[str, Any], name: str, *, default: bool) -> bool:
    """Return a parameter that is true or false."""
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InputError(f"{name}, true or false", shown(value))
    return value


class _Behind:
    """The bytes behind the JSON: each input takes its own, in order."""

    def __init__(self, data: memoryview, announced: bool) -> None:
        self.data = data
        self.announced = announced

    @property
    def left_bytes(self) -> int:
        """How many bytes no input has taken yet."""
        return len(self.data)

    def take(self, size: object, where: str) -> memoryview:
        """Return the bytes of the next input; raise `InputError` if there are not so many."""
        if type(size) is not int or size < 0:
            raise InputError(f"binary_data_size of {where}, a number of bytes", shown(size))
        if not self.announced:
            needed = f"the header {LENGTH}, as {where} has binary_data_size"
            raise InputError(needed, "none", "say how long the JSON is")
        if size > len(self.data):
            needed = f"{size} bytes behind the JSON for {where}"
            raise InputError(needed, f"{len(self.data)}")
        taken = self.data[:size]
        self.data = self.data[size:]
        return taken


def _inputs(tensors: list[Any], behind: _Behind, model: Model) -> Arrays:
    """Return the arrays of all inputs; raise `InputError` if one is missing, wrong or too many."""
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
            binary = behind.take(parameters["binary_data_size"], where)
        arrays[name] = ports[name].read(tensor, model.max_batch, binary)
    if missing := ports.keys() - arrays.keys():
        raise InputError(f"inputs {names}", f"no {', '.join(map(shown, sorted(missing)))}")
    if model.batched and len({len(array) for array in arrays.values()}) > 1:
        rows = [len(array) for array in arrays.values()]
        raise InputError("inputs with as many rows", shown(rows))
    return arrays


def _outputs(
    listed: object, everything_binary: bool, model: Model
) -> tuple[tuple[Port, bool], ...]:
    """Return the outputs asked for, all if none is named, and whether each goes out as bytes."""
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
        chosen[name] = _flag(parameters, "binary_data", default=everything_binary)
    # the protocol: a request that names no outputs gets all of them
    chosen = chosen or dict.fromkeys(ports, everything_binary)
    for name in chosen:
        ports[name].refuse_text("output")
    return tuple((ports[name], binary) for name, binary in chosen.items())


# -- answers --------------------------------------------------------------------------------------
def written(head: dict[str, Any], asked: Asked, outputs: Arrays) -> tuple[bytes, int | None]:
    """Return an answer's body, and where its JSON ends if bytes stand behind it."""
    texts = []
    behind = []
    for port, binary in asked.outputs:
        array = outputs[port.name]
        described = {**port.described(), "shape": list(array.shape)}
        # the shape is that of this answer: the metadata may have -1 in its place
        if binary:
            behind.append(to_bytes(array))
            described["parameters"] = {"binary_data_size": len(behind[-1])}
            texts.append(json.dumps(described))
        else:
            # the text of the numbers is put in before the last brace: it was made in pieces
            texts.append(f'{json.dumps(described)[:-1]}, "data": {json_text(array)}}}')
    text = f'{json.dumps(head)[:-1]}, "outputs": [{", ".join(texts)}]}}'.encode("ascii")
    return b"".join([text, *behind]), len(text) if behind else None
