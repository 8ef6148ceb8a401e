"""One file of typed partitions, every byte of it under a checksum: an offline model, as written.

    header   magic, version, entries, length, SHA-256 of header and table
    table    per partition: kind, gear, offset, size, checksum
    bodies   each from an address that is a multiple of 64, padded with zeros

The idea is that of CANN's offline model (`ge::ModelFileHeader` and its partitions); the format is
our own and not compatible. A checksum of megabytes has to be quick: 64-bit words in rows of 512;
products of each row with odd constants, sums of the columns, both modulo 2**64, and SHA-256 of
these. What changes one word changes its row, since odd numbers have inverses; two words that share
a row have different columns. It guards against damage, not against forgers.

`compile_offline` writes, for each gear (a batch that is compiled for), the graph as the model
states it, the graph that was compiled, kernels as programs, their times and the memory plan; the
weights once, as stated and as the kernels read them. `load_offline` in `offline` reads it.
"""

import hashlib
import json
import mmap
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from enum import IntEnum
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab import __version__
from ascend_lab.compiler import Compiled, Constant, Fill, Graph, Road, Task, lower, onnx, tiled
from ascend_lab.compiler.compile import DEFAULT_ROAD, Front, finish_stages, front_stages
from ascend_lab.compiler.ir import MAX_WRITTEN, Values, to_text
from ascend_lab.compiler.network import PLAN, NetworkTimeline, network_events
from ascend_lab.compiler.placement import constant_bytes, places_of, plan_network
from ascend_lab.compiler.tasks import CpuKernel
from ascend_lab.compiler.values import writes_int64
from ascend_lab.errors import AscendLabError, CapacityError, InputError
from ascend_lab.limits import shown
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import Buffer, Kernel, Launch, Part, parse_program
from ascend_lab.operators.ops.formats import format_of

MAGIC = b"ALMODEL\0"
VERSION = 1
SUFFIX = ".alm"
ALIGN_BYTES = 64
_HEAD = struct.Struct("<8sIIQ8x32s")
_ENTRY = struct.Struct("<IIQQ8x32s")
_ROW = 512
_ODD = np.arange(1, _ROW + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
REMEDY = "compile the model again"


class Kind(IntEnum):
    """What a partition holds; those of a gear carry its number."""

    META = 0
    WEIGHTS = 1
    GRAPH = 2
    TASKS = 3
    KERNELS = 4
    MEMORY = 5


Parts = Mapping[tuple[Kind, int], memoryview]
KERNEL_BYTES = 2**27
"""Of all kernels, unpacked: MobileNetV2's are 2 MB."""
_FORGED = (
    *(TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError),
    *(RecursionError, MemoryError, SyntaxError, RuntimeError, zlib.error),
)
"""What other data than `compile_offline` writes lead to in what reads them."""


@contextmanager
def as_written(where: str) -> Iterator[None]:
    """Raise `InputError` for whatever the data of a forged file lead to.

    Its checksums guard against damage: who writes other data can write their checksums, too.
    """
    try:
        yield
    except AscendLabError:
        raise
    except _FORGED as error:
        got = f"other data ({type(error).__name__}: {shown(str(error))})"
        raise InputError(f"{where}: an offline model as `compile` writes it", got, REMEDY) from None


def need(fits: bool, what: str) -> None:
    """Raise `ValueError`, which `as_written` tells, unless data of a file are as they should be."""
    if not fits:
        raise ValueError(f"no {what}")


def json_of(data: bytes | memoryview) -> Any:
    """Return plain data; raise `ValueError` for NaN, infinities and halves of characters."""
    text = bytes(data).decode()
    found = json.loads(text, parse_constant=_refuse_number)
    if "\\ud" in text.lower():
        json.dumps(found, ensure_ascii=False).encode()
    return found


def _refuse_number(text: str) -> None:
    raise ValueError(f"{text}, which is no number")


def unpacked(data: bytes | memoryview) -> bytes:
    """Return compressed bytes unpacked, never more than `KERNEL_BYTES`; raise `ValueError`."""
    opened = zlib.decompressobj()
    found = opened.decompress(bytes(data), KERNEL_BYTES)
    need(opened.eof, f"kernels of at most {KERNEL_BYTES:,} bytes")
    return found


def checksum(data: bytes | memoryview) -> bytes:
    """Return the 32-byte checksum of some bytes; see the module's text."""
    raw = np.frombuffer(data, np.uint8)
    whole = len(raw) // (8 * _ROW) * 8 * _ROW
    words = raw[:whole].view("<u8").reshape(-1, _ROW)
    found = hashlib.sha256(struct.pack("<Q", len(raw)) + raw[whole:].tobytes())
    for sums in (np.dot(words, _ODD), words.sum(0)):
        found.update(sums.astype("<u8").tobytes())
    return found.digest()


def pack_parts(parts: Sequence[tuple[Kind, int, Sequence[Values]]]) -> memoryview:
    """Return the file of some partitions: (kind, gear, arrays of bytes one behind the other)."""
    sizes = [sum(map(len, pieces)) for _, _, pieces in parts]
    start = _HEAD.size + _ENTRY.size * len(parts)
    offsets = list(accumulate((n + -n % ALIGN_BYTES for n in sizes), initial=start))
    whole = np.zeros(offsets[-1], np.uint8)
    table = b""
    for (kind, gear, pieces), size, offset in zip(parts, sizes, offsets, strict=False):
        body = whole[offset : offset + size + -size % ALIGN_BYTES]
        np.concatenate(pieces, out=body[:size])
        table += _ENTRY.pack(kind, gear, offset, size, checksum(body.data))
    front = _head(len(parts), offsets[-1], table) + table
    whole[:start] = np.frombuffer(front, np.uint8)
    return whole.data


def _head(entries: int, length: int, table: bytes) -> bytes:
    bare = _HEAD.pack(MAGIC, VERSION, entries, length, bytes(32))
    return _HEAD.pack(MAGIC, VERSION, entries, length, hashlib.sha256(bare + table).digest())


def unpack_parts(data: memoryview, where: str) -> Parts:
    """Return the partitions of a file; raise `InputError` for another version and any damage."""
    if bytes(data[:8]) != MAGIC or len(data) < _HEAD.size:
        raise InputError(f"{where}: an offline model", "other or damaged bytes", REMEDY)
    _, version, entries, length, _ = _HEAD.unpack_from(data)
    if version != VERSION:
        needed = f"{where}: an offline model of version {VERSION}"
        raise InputError(needed, f"version {version}", REMEDY)
    if length != len(data):
        raise InputError(f"{where}: {length:,} bytes", f"{len(data):,}: damaged", REMEDY)
    start = _HEAD.size + _ENTRY.size * entries
    table = bytes(data[_HEAD.size : start])
    if bytes(data[: _HEAD.size]) != _head(entries, length, table):
        raise InputError(f"{where}: a sound header", "a damaged one: its checksum differs", REMEDY)
    found = {}
    kinds = set(Kind)
    for number, gear, offset, size, stated in _ENTRY.iter_unpack(table):
        if number not in kinds or offset + size > length:
            raise InputError(f"{where}: partitions inside the file", "others", REMEDY)
        kind = Kind(number)
        if checksum(data[offset : offset + size + -size % ALIGN_BYTES]) != stated:
            got = "a damaged one: its checksum differs"
            raise InputError(f"{where}: a sound partition {kind.name}", got, REMEDY)
        found[kind, gear] = data[offset : offset + size]
    return found


def is_offline(path: str | Path) -> bool:
    """Tell whether a file says by its name or its first bytes that it is an offline model."""
    try:
        if Path(path).suffix == SUFFIX or not Path(path).is_file():
            return Path(path).suffix == SUFFIX
        with Path(path).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def read_parts(path: str | Path) -> Parts:
    """Return the partitions of a file, mapped into memory; raises as `unpack_parts`."""
    try:
        with Path(path).open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        reason = "an empty file" if "empty" in reason else reason
        raise InputError(f"{path}: a compiled model", reason, "check the path") from None
    return unpack_parts(data, str(path))


# -- writing a network ----------------------------------------------------------------------------
AI_CORE = "AI Core"
Told = Callable[[NetworkTimeline, Front, Graph], tuple[dict[str, Any], list[str]]]
"""What to say of a network's times: as data, and as lines."""


class _Weights:
    """Arrays one behind the other, equal ones once; `index` says where each lies."""

    def __init__(self) -> None:
        self.index: list[tuple[int, str, list[int]]] = []
        self.body: list[Values] = []
        self._known: dict[tuple[bytes, str, tuple[int, ...]], int] = {}
        self._end = 0

    def add(self, array: Values) -> int:
        """Return the number of an array."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        key = checksum(raw.data), format_of(array), array.shape
        if key not in self._known:
            self._known[key] = len(self.index)
            self.index.append((self._end, key[1], list(array.shape)))
            self.body += [raw, np.zeros(-len(raw) % ALIGN_BYTES, np.uint8)]
            self._end += len(raw) + len(self.body[-1])
        return self._known[key]


def compile_offline(
    gears: Mapping[int | None, onnx.Imported],
    chip: Chip,
    road: Road = DEFAULT_ROAD,
    *,
    options: Mapping[str, str] | None = None,
    told: Told = lambda times, front, graph: (times.summary(), []),
) -> memoryview:
    """Return the offline model of a network for a chip; `gears` are its graphs by batch.

    One graph under None has fixed sizes. `told` is what the file says of its times.
    Raises as `compile_stages`, and `CapacityError` for a network that would have to be tiled.
    """
    weights = _Weights()
    kernels = dict[str, int]()
    parts = []
    rows = []
    for number, (batch, found) in enumerate(gears.items()):
        front = front_stages(found.graph, chip, road)
        times, _ = tiled.simulate_within(front, chip, None, road)
        if isinstance(times, tiled.TiledTimeline):
            needed = f"{chip.name} to hold the network: {times.tiled.limit_bytes:,} bytes of memory"
            raise CapacityError(
                needed, f"{times.tiled.tile_count} tiles", "compile it for a smaller batch"
            )
        compiled = finish_stages(front, chip, road).compiled
        parts += [
            (Kind.GRAPH, number, _graphs(found, compiled, weights, kernels)),
            (Kind.TASKS, number, _times(times, *told(times, front, found.graph))),
            (Kind.MEMORY, number, _memory(compiled)),
        ]
        inputs = {n: found.graph.types[n].shape for n in found.graph.inputs}
        rows.append({"batch": batch, "inputs": inputs, "time_s": times.time_s})
    first = next(iter(gears.values()))
    meta = {
        "name": first.graph.name,
        "written_by": __version__,
        "dtype": road.dtype,
        "chip": chip.name,
        "cores": chip.core_count,
        "chip_checksum": chip_checksum(chip),
        "options": dict(options or {}),
        "gears": rows,
        "weights": weights.index,
    }
    shared = [
        (Kind.META, 0, _json(meta)),
        (Kind.WEIGHTS, 0, weights.body or _bytes(b"")),
        (Kind.KERNELS, 0, _bytes(zlib.compress(f"[{','.join(kernels)}]".encode()))),
    ]
    return pack_parts([*shared, *parts])


def _json(data: Any) -> list[Values]:
    return _bytes(json.dumps(data).encode())


def _bytes(data: bytes) -> list[Values]:
    return [np.frombuffer(data, np.uint8)]


def chip_checksum(chip: Chip) -> str:
    """Return a checksum of a chip's numbers, not of where they are from."""
    numbers = (
        (f.name, getattr(chip, f.name))
        for f in fields(chip)
        if f.name not in ("facts", "sources", "summary")
    )
    plain = [(n, sorted(v.items()) if isinstance(v, Mapping) else v) for n, v in numbers]
    return checksum(repr(plain).encode()).hex()


def _graphs(
    found: onnx.Imported, compiled: Compiled, weights: _Weights, kernels: dict[str, int]
) -> list[Values]:
    """Return both graphs, and the tasks with what their kernels read; `kernels` numbers these."""
    tasks = []
    for task in compiled.tasks:
        row: dict[str, Any] = {"nodes": task.nodes}
        if task.lowered is not None:
            text = json.dumps(kernel_data(task.lowered.kernel))
            row["kernel"] = kernels.setdefault(text, len(kernels))
            row["extra"] = {n: weights.add(a) for n, a in task.lowered.extra.items()}
            if not isinstance(task.lowered.kernel, CpuKernel):
                row["forms"] = {
                    b.name: weights.add(_stored(task, compiled.graph, b.name))
                    for b in task.lowered.kernel.tensors
                    if b.name.partition(".")[0] in task.piece.constants
                }
        tasks.append(row)
    return _json(
        {
            "source": _graph(found.graph, weights),
            "compiled": _graph(_bare(compiled), weights),
            "input_types": dict(found.input_types),
            "output_types": dict(found.output_types),
            "tasks": tasks,
        }
    )


def _stored(task: Task, graph: Graph, name: str) -> Values:
    """Return a constant as the task's kernel reads it."""
    assert task.lowered is not None
    constant = graph.constants[task.value(name)]
    form = task.lowered.forms.get(name)
    return form(constant.array()) if form else lower.packed(constant.type, constant.array())


def _bare(compiled: Compiled) -> Graph:
    """Return the compiled graph; constants that only kernels read, in forms of their own, empty.

    What makes int64 numbers stays: they are computed beside the kernel, too, to see that they fit.
    """
    graph = compiled.graph
    kept = set(compiled.graph.outputs)
    for task in compiled.tasks:
        nodes = [graph.node(name) for name in task.nodes]
        apart = task.lowered is None or isinstance(task.lowered.kernel, CpuKernel)
        if apart or writes_int64(graph, nodes):
            kept |= {name for node in nodes for name in node.inputs}
    constants = {
        n: c if n in kept else replace(c, data=Fill(0)) for n, c in graph.constants.items()
    }
    return replace(graph, constants=constants)


def _graph(graph: Graph, weights: _Weights) -> dict[str, Any]:
    """Return a graph as text, its long constants as numbers of weights; seeded ones are drawn."""
    drawn = {
        n: c if isinstance(c.data, Fill) else Constant(c.type, c.array())
        for n, c in graph.constants.items()
    }
    long = {
        n: weights.add(np.asarray(c.data))
        for n, c in drawn.items()
        if not isinstance(c.data, Fill) and c.type.elements > MAX_WRITTEN
    }
    text = to_text(replace(graph, constants=drawn))
    return {"text": text, "data": long, "narrowed": sorted(graph.narrowed)}


def _times(times: NetworkTimeline, data: Mapping[str, Any], lines: Sequence[str]) -> list[Values]:
    """Return what is said of the times, and each task's seconds on its engine."""
    return _json(
        {
            "summary": data,
            "table": lines,
            "tasks": engine_rows(times),
            "events": network_events(times),
        }
    )


def engine_rows(times: NetworkTimeline) -> list[list[Any]]:
    """Return name, engine and seconds of every kernel, launch included."""
    return [
        [op.name, op.type.partition(" on the ")[2] or AI_CORE, op.time_s] for op in times.operators
    ]


def _memory(compiled: Compiled) -> list[Values]:
    plan = plan_network(compiled, PLAN)
    constants = sum(constant_bytes(compiled).values())
    return _json(
        {
            "work_bytes": plan.height_bytes,
            "weight_bytes": constants,
            "places": places_of(compiled, plan.offsets),
        }
    )


# -- kernels as plain data and back: programs in their text form, all else in numbers and names ----
def kernel_data(kernel: Kernel) -> dict[str, Any]:
    """Return a kernel, or an operator of another engine, as data for JSON."""
    if isinstance(kernel, CpuKernel):
        sides = (kernel.reads, kernel.writes)
        reads, writes = ([[b.name, b.dtype, b.elements] for b in side] for side in sides)
        return {
            "name": kernel.name,
            "reads": reads,
            "writes": writes,
            "rest": [kernel.factor_bytes, kernel.reason, kernel.engine],
        }
    phases = [
        [p.name, [[str(part.program), part.bindings] for part in p.parts], p.mix]
        for p in kernel.phases
    ]
    return {"name": kernel.name, "phases": phases}


def kernel_of(data: Mapping[str, Any]) -> Kernel:
    """Return the kernel that `kernel_data` wrote."""
    if "phases" not in data:
        reads, writes = (
            tuple(Buffer(name, "GM", dtype, elements) for name, dtype, elements in data[side])
            for side in ("reads", "writes")
        )
        return CpuKernel(data["name"], (), reads, writes, *data["rest"])
    phases = []
    for name, parts, *mix in data["phases"]:
        own = (
            Part(parse_program(text), tuple(tuple(map(tuple, core)) for core in bindings))
            for text, bindings in parts
        )
        phases.append(Launch(name, tuple(own), *mix))
    return Kernel(data["name"], tuple(phases))
