"""`acl.mdl`: models, their descriptions, datasets of buffers, and running them in a stream."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab.compiler.onnx.tensors import NUMPY, in_type
from ascend_lab.deploy.runtime.container import unpack_parts
from ascend_lab.deploy.runtime.offline import Gear, OfflineModel, load_offline
from ascend_lab.deploy.runtime.process import POISON, Bytes, Handle, Process, Stream, process
from ascend_lab.deploy.runtime.streams import AclError, Code, need
from ascend_lab.errors import AscendLabError


@dataclass(eq=False)
class Model(Handle):
    """A model in the memory of a device, the gear it is set to, and the stream it runs in."""

    offline: OfflineModel | None = None
    address: int = 0
    gear: Gear | None = None
    stream: Stream | None = None


@dataclass(eq=False)
class Desc(Handle):
    """What a model reads and writes, in its largest gear; filled by `get_desc`."""

    gear: Gear | None = None


@dataclass(eq=False)
class DataBuffer(Handle):
    """An address in device memory and a size."""

    address: int = 0
    size_bytes: int = 0


@dataclass(eq=False)
class Dataset(Handle):
    """Data buffers in the order of a model's inputs or outputs."""

    buffers: list[DataBuffer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output: name, NumPy type, shape."""

    name: str
    dtype: np.dtype[Any]
    dims: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return int(np.prod(self.dims, dtype=np.int64)) * self.dtype.itemsize


# -- loading --------------------------------------------------------------------------------------
def query_size(path: str | Path) -> tuple[int, int]:
    """Return the bytes of device memory a model works in, and of its weights."""
    return _sizes(load_offline(path))


def _sizes(model: OfflineModel) -> tuple[int, int]:
    """Return the most of all gears: they share weights and memory."""
    work, weights = (max(g.memory[f"{k}_bytes"] for g in model.gears) for k in ("work", "weight"))
    return work, weights


def load_from_file(path: str | Path) -> Model:
    """Load an offline model into the context's device.

    Raises `InputError` for a file that is damaged or for another chip, `AclError` without memory.
    """
    found = process(waits=True)
    return _load(found, load_offline(path, found.device().chip))


def load_from_mem(data: bytes | memoryview) -> Model:
    """Load an offline model from memory, as `load_from_file` does from a file."""
    found = process(waits=True)
    chip = found.device().chip
    model = OfflineModel("memory", unpack_parts(memoryview(data), "memory"), chip)
    model.check_chip(chip)
    return _load(found, model)


def _load(found: Process, offline: OfflineModel) -> Model:
    address = found.allocate(max(sum(_sizes(offline)), 1))
    return found.add(Model(found.context(), 0, offline, address, offline.gears[-1]))


def unload(model: Model) -> None:
    """Unload a model that is not running."""
    found = process(waits=True)
    _check_free(found, found.own(Model, model, Code.NO_MODEL), None)
    found.release(model.address)
    found.drop(model)


# -- descriptions ---------------------------------------------------------------------------------
def create_desc() -> Desc:
    """Return a new, empty description."""
    return process().add(Desc(None))


def get_desc(desc: Desc, model: Model) -> None:
    """Fill a description with what a model reads and writes."""
    found = process()
    offline = found.own(Model, model, Code.NO_MODEL).offline
    found.get(Desc, desc).gear = offline.gears[-1] if offline else None


def _destroyer(kind: type[Handle]) -> Callable[[Any], None]:
    def destroy(handle: Any) -> None:
        found = process()
        found.drop(found.get(kind, handle))

    destroy.__doc__ = f"Destroy a {kind.__name__}, not what it names."
    return destroy


destroy_desc = _destroyer(Desc)
destroy_dataset = _destroyer(Dataset)
destroy_data_buffer = _destroyer(DataBuffer)


def _tensors(gear: Gear, side: str) -> list[Tensor]:
    """Return a gear's inputs or outputs."""
    found = gear.imported
    graph = gear.imported.graph
    inputs = side == "input"
    kinds = found.input_types if inputs else found.output_types
    pairs = zip(kinds.items(), graph.inputs if inputs else graph.outputs, strict=True)
    return [Tensor(name, NUMPY[kind], graph.types[own].shape) for (name, kind), own in pairs]


def _described(desc: Desc, side: str) -> list[Tensor]:
    gear = process().get(Desc, desc).gear
    if gear is None:
        raise AclError(Code.INVALID, "a description that get_desc has filled", "an empty one")
    return _tensors(gear, side)


def get_num_inputs(desc: Desc) -> int:
    """Return how many inputs a model has."""
    return len(_described(desc, "input"))


def get_num_outputs(desc: Desc) -> int:
    """Return how many outputs a model has."""
    return len(_described(desc, "output"))


def _getters(what: str) -> tuple[Callable[[Desc, int], Any], ...]:
    def of(side: str, desc: Desc, index: int) -> Any:
        found = _described(desc, side)
        need(0 <= index < len(found), f"an {side} from 0 to {len(found) - 1}", repr(index))
        return getattr(found[index], what)

    return partial(of, "input"), partial(of, "output")


get_input_size_by_index, get_output_size_by_index = _getters("size_bytes")
get_input_name_by_index, get_output_name_by_index = _getters("name")
get_input_dims, get_output_dims = _getters("dims")
get_input_data_type, get_output_data_type = _getters("dtype")


# -- data -----------------------------------------------------------------------------------------
def create_data_buffer(address: int, size_bytes: int) -> DataBuffer:
    """Return a data buffer over device memory."""
    found = process()
    found.memory(address, size_bytes)
    return found.add(DataBuffer(None, 0, address, size_bytes))


def create_dataset() -> Dataset:
    """Return a new, empty dataset."""
    return process().add(Dataset(None))


def add_dataset_buffer(dataset: Dataset, buffer: DataBuffer) -> None:
    """Append a data buffer to a dataset."""
    found = process()
    found.get(Dataset, dataset).buffers.append(found.get(DataBuffer, buffer))


# -- running --------------------------------------------------------------------------------------
def set_dynamic_batch_size(model: Model, batch: int) -> None:
    """Choose the gear of a model that has several; `AclError` names them all for another batch."""
    offline = process().own(Model, model, Code.NO_MODEL).offline
    gears = {gear.batch: gear for gear in offline.gears} if offline else {}
    got = "one with fixed sizes"
    remedy = "compile it for several batches"
    need(None not in gears, "a model with gears", got, remedy, code=Code.STATIC)
    known = f"a batch among the gears {', '.join(map(str, gears))}"
    need(batch in gears, known, repr(batch), "pad to a gear")
    model.gear = gears[batch]


def execute(model: Model, inputs: Dataset, outputs: Dataset) -> None:
    """Run a model and wait for it."""
    found = process(waits=True)
    own = Stream(found.context())
    _issue(found, model, inputs, outputs, own)
    found.clock.drain(own)


def execute_async(
    model: Model, inputs: Dataset, outputs: Dataset, stream: Stream | None = None
) -> None:
    """Run a model when a stream gets there; its outputs are poison until it is done."""
    found = process()
    _issue(found, model, inputs, outputs, found.stream(stream))


def _issue(found: Process, model: Model, inputs: Dataset, outputs: Dataset, stream: Stream) -> None:
    """Issue the kernels of a model, one task each; values come with the last."""
    gear = found.own(Model, model, Code.NO_MODEL).gear
    assert gear is not None
    _check_free(found, model, stream)
    reads = _memory(found, inputs, _tensors(gear, "input"), Code.INPUTS)
    writes = _memory(found, outputs, _tensors(gear, "output"), Code.OUTPUTS)
    model.stream = stream
    held: list[Bytes] = []

    def begin() -> None:
        held.extend(memory.copy() for memory in reads)
        for memory in writes:
            memory[:] = POISON

    end = partial(_compute, gear, held, writes, found.kernels)
    found.work(stream, gear.times["tasks"], begin, end)


def _check_free(found: Process, model: Model, stream: Stream | None) -> None:
    """Raise `AclError` 200004 for a model that still runs in another stream."""
    other = model.stream
    free = other in (None, stream) or found.clock.is_idle(other)
    got = f"one that runs in {other}"
    remedy = "synchronise that stream, or load it twice"
    need(free, "a model in one stream at a time", got, remedy, code=Code.MISMATCH)


def _memory(found: Process, dataset: Dataset, tensors: Sequence[Tensor], code: Code) -> list[Bytes]:
    """Return the memory of a dataset's buffers, as large as the tensors."""
    buffers = [found.get(DataBuffer, buffer) for buffer in found.get(Dataset, dataset).buffers]
    same = len(buffers) == len(tensors)
    need(same, f"{len(tensors)} buffers", str(len(buffers)), "one a tensor", code=code)
    memory = []
    for buffer, tensor in zip(buffers, tensors, strict=True):
        needed = f"{tensor.name} of {tensor.dims}: {tensor.size_bytes} bytes"
        fits = buffer.size_bytes >= tensor.size_bytes
        got = str(buffer.size_bytes)
        need(fits, needed, got, "see get_input_size_by_index", code=code)
        memory.append(found.memory(buffer.address, tensor.size_bytes))
    return memory


def _compute(gear: Gear, held: list[Bytes], writes: Sequence[Bytes], kernels: bool) -> None:
    """Compute a gear's outputs from bytes into bytes."""
    pairs = zip(_tensors(gear, "input"), held, strict=True)
    inputs = {t.name: raw.view(t.dtype).reshape(t.dims) for t, raw in pairs}
    try:
        values = gear.run(inputs, kernels=kernels)
    except AscendLabError as error:
        raise AclError(Code.INPUTS, error.needed, error.got, error.remedy) from error
    for (name, kind), memory in zip(gear.imported.output_types.items(), writes, strict=True):
        memory[:] = np.ascontiguousarray(in_type(values[name], kind)).reshape(-1).view(np.uint8)
