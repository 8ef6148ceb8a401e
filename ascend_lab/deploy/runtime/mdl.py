"""The functions of `acl.mdl`, which load offline models and run them on buffers in device memory.

A program makes a dataset (a list of data buffers) for the inputs of a model and one for its
outputs, and calls `execute`, or `execute_async` with a stream.
"""

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
    """A model in device memory, its current gear (batch size), and its last stream."""

    offline: OfflineModel | None = None
    address: int = 0
    gear: Gear | None = None
    stream: Stream | None = None


@dataclass(eq=False)
class Desc(Handle):
    """A description of a model's inputs and outputs in its largest gear; `get_desc` fills it."""

    gear: Gear | None = None


@dataclass(eq=False)
class DataBuffer(Handle):
    """A range of device memory: an address and a size."""

    address: int = 0
    size_bytes: int = 0


@dataclass(eq=False)
class Dataset(Handle):
    """Data buffers in the order of a model's inputs or outputs."""

    buffers: list[DataBuffer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Tensor:
    """The name, NumPy type and shape of an input or output."""

    name: str
    dtype: np.dtype[Any]
    dims: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all elements."""
        return int(np.prod(self.dims, dtype=np.int64)) * self.dtype.itemsize


# -- loading --------------------------------------------------------------------------------------
def query_size(path: str | Path) -> tuple[int, int]:
    """Return the bytes of device memory of a model's activations, and of its weights."""
    return _sizes(load_offline(path))


def _sizes(model: OfflineModel) -> tuple[int, int]:
    """Return the bytes of activations and of weights, each the maximum over all gears."""
    # One gear runs at a time: for gears of 100 and 400 bytes, 400 bytes are enough.
    plans = [gear.memory for gear in model.gears]
    work_bytes: int = max(plan["work_bytes"] for plan in plans)
    weight_bytes: int = max(plan["weight_bytes"] for plan in plans)
    return work_bytes, weight_bytes


def load_from_file(path: str | Path) -> Model:
    """Load an offline model into the context's device.

    Raises `InputError` for a file that is damaged or made for another chip, and `AclError` if the
    device has too little memory.
    """
    proc = process(waits=True)
    return _load(proc, load_offline(path, proc.device().chip))


def load_from_mem(data: bytes | memoryview) -> Model:
    """Load an offline model from memory, as `load_from_file` does from a file."""
    proc = process(waits=True)
    chip = proc.device().chip
    model = OfflineModel("memory", unpack_parts(memoryview(data), "memory"), chip)
    # The model may be for another chip than that of the device.
    model.check_chip(chip)
    return _load(proc, model)


def _load(proc: Process, offline: OfflineModel) -> Model:
    """Return a model with memory for its weights and its activations."""
    # A network without weights and activations gets 1 byte, as 0 bytes cannot be allocated.
    address = proc.allocate(max(sum(_sizes(offline)), 1))
    return proc.add(Model(proc.context(), 0, offline, address, offline.gears[-1]))


def unload(model: Model) -> None:
    """Unload a model that is not running."""
    proc = process(waits=True)
    _check_idle(proc, proc.in_context(Model, model, Code.NO_MODEL), None)
    proc.release(model.address)
    proc.drop(model)


# -- descriptions ---------------------------------------------------------------------------------
def create_desc() -> Desc:
    """Return a new, empty description."""
    return process().add(Desc(None))


def get_desc(desc: Desc, model: Model) -> None:
    """Fill a description with the inputs and outputs of a model."""
    proc = process()
    offline = proc.in_context(Model, model, Code.NO_MODEL).offline
    proc.get(Desc, desc).gear = offline.gears[-1] if offline else None


def _destroyer(handle_class: type[Handle]) -> Callable[[Any], None]:
    """Return the function that destroys handles of the class `handle_class`."""

    def destroy(handle: Any) -> None:
        proc = process()
        proc.drop(proc.get(handle_class, handle))

    # As in AscendCL, destroying a dataset keeps its buffers, and a buffer keeps its memory.
    destroy.__doc__ = f"Destroy a {handle_class.__name__}, not what it names."
    return destroy


destroy_desc = _destroyer(Desc)
destroy_dataset = _destroyer(Dataset)
destroy_data_buffer = _destroyer(DataBuffer)


def _tensors(gear: Gear, side: str) -> list[Tensor]:
    """Return a gear's inputs or outputs."""
    imported = gear.imported
    graph = imported.graph
    is_input = side == "input"
    element_types = imported.input_types if is_input else imported.output_types
    pairs = zip(element_types.items(), graph.inputs if is_input else graph.outputs, strict=True)
    return [
        Tensor(name, NUMPY[element_type], graph.types[value].shape)
        for (name, element_type), value in pairs
    ]


def _tensors_of(desc: Desc, side: str) -> list[Tensor]:
    """Return the inputs or outputs of a description; raises `AclError` if it is empty."""
    gear = process().get(Desc, desc).gear
    if gear is None:
        raise AclError(Code.INVALID, "a description that get_desc has filled", "an empty one")
    return _tensors(gear, side)


def get_num_inputs(desc: Desc) -> int:
    """Return the number of inputs of a model."""
    return len(_tensors_of(desc, "input"))


def get_num_outputs(desc: Desc) -> int:
    """Return the number of outputs of a model."""
    return len(_tensors_of(desc, "output"))


def _getters(attribute: str) -> tuple[Callable[[Desc, int], Any], ...]:
    """Return two functions that get an attribute of an input and of an output by its index."""

    def get_attribute(side: str, desc: Desc, index: int) -> Any:
        """Return an attribute of one input or output of a model."""
        tensors = _tensors_of(desc, side)
        need(0 <= index < len(tensors), f"an {side} from 0 to {len(tensors) - 1}", repr(index))
        return getattr(tensors[index], attribute)

    return partial(get_attribute, "input"), partial(get_attribute, "output")


get_input_size_by_index, get_output_size_by_index = _getters("size_bytes")
get_input_name_by_index, get_output_name_by_index = _getters("name")
get_input_dims, get_output_dims = _getters("dims")
get_input_data_type, get_output_data_type = _getters("dtype")


# -- data -----------------------------------------------------------------------------------------
def create_data_buffer(address: int, size_bytes: int) -> DataBuffer:
    """Return a data buffer over device memory."""
    proc = process()
    # Raises an error now if the block is smaller, instead of when a model reads it.
    proc.memory(address, size_bytes)
    return proc.add(DataBuffer(None, 0, address, size_bytes))


def create_dataset() -> Dataset:
    """Return a new, empty dataset."""
    return process().add(Dataset(None))


def add_dataset_buffer(dataset: Dataset, buffer: DataBuffer) -> None:
    """Append a data buffer to a dataset."""
    proc = process()
    proc.get(Dataset, dataset).buffers.append(proc.get(DataBuffer, buffer))


# -- running --------------------------------------------------------------------------------------
def set_dynamic_batch_size(model: Model, batch: int) -> None:
    """Set the batch of a model with several gears; raises `AclError` if it has no gear for it."""
    offline = process().in_context(Model, model, Code.NO_MODEL).offline
    gears = {gear.batch: gear for gear in offline.gears} if offline else {}
    got = "one with fixed sizes"
    remedy = "compile it for several batches"
    # A model with fixed sizes has one gear, whose batch is None.
    need(None not in gears, "a model with gears", got, remedy, code=Code.STATIC)
    needed = f"a batch among the gears {', '.join(map(str, gears))}"
    need(batch in gears, needed, repr(batch), "pad to a gear")
    model.gear = gears[batch]


def execute(model: Model, inputs: Dataset, outputs: Dataset) -> None:
    """Run a model and wait for it."""
    proc = process(waits=True)
    # A new stream, so that the model does not wait for the commands of other streams.
    model_stream = Stream(proc.context())
    _issue(proc, model, inputs, outputs, model_stream)
    proc.clock.drain(model_stream)


def execute_async(
    model: Model, inputs: Dataset, outputs: Dataset, stream: Stream | None = None
) -> None:
    """Run a model in a stream; its outputs are poison (bytes of ones) until it has ended."""
    proc = process()
    _issue(proc, model, inputs, outputs, proc.stream(stream))


def _issue(proc: Process, model: Model, inputs: Dataset, outputs: Dataset, stream: Stream) -> None:
    """Issue the kernels of a model as tasks; the outputs are computed when the last one ends."""
    gear = proc.in_context(Model, model, Code.NO_MODEL).gear
    assert gear is not None
    _check_idle(proc, model, stream)
    input_memory = _buffer_memory(proc, inputs, _tensors(gear, "input"), Code.INPUTS)
    output_memory = _buffer_memory(proc, outputs, _tensors(gear, "output"), Code.OUTPUTS)
    # The memory of its activations is in use: it must not run in another stream until then.
    model.stream = stream
    input_copies: list[Bytes] = []

    def begin() -> None:
        """Copy the inputs, and fill the outputs with NaN."""
        # The model uses its inputs as they are at its start; later changes have no effect.
        input_copies.extend(memory.copy() for memory in input_memory)
        for memory in output_memory:
            # A program that reads an output before the last kernel has ended gets NaN.
            memory[:] = POISON

    end = partial(_compute, gear, input_copies, output_memory, proc.kernels)
    proc.issue_tasks(stream, gear.times["tasks"], begin, end)


def _check_idle(proc: Process, model: Model, stream: Stream | None) -> None:
    """Raise `AclError` 200004 if a model still runs in another stream."""
    last_stream = model.stream
    is_idle = last_stream in (None, stream) or proc.clock.is_idle(last_stream)
    got = f"one that runs in {last_stream}"
    remedy = "synchronise that stream, or load it twice"
    need(is_idle, "a model in one stream at a time", got, remedy, code=Code.MISMATCH)


def _buffer_memory(
    proc: Process, dataset: Dataset, tensors: Sequence[Tensor], code: Code
) -> list[Bytes]:
    """Return the memory of a dataset's buffers, each cut to the size of its tensor."""
    buffers = [proc.get(DataBuffer, buffer) for buffer in proc.get(Dataset, dataset).buffers]
    is_complete = len(buffers) == len(tensors)
    need(is_complete, f"{len(tensors)} buffers", str(len(buffers)), "one a tensor", code=code)
    memory = []
    for buffer, tensor in zip(buffers, tensors, strict=True):
        needed = f"{tensor.name} of {tensor.dims}: {tensor.size_bytes} bytes"
        # A larger buffer is allowed: one for the largest gear serves all gears.
        fits = buffer.size_bytes >= tensor.size_bytes
        got = str(buffer.size_bytes)
        need(fits, needed, got, "see get_input_size_by_index", code=code)
        memory.append(proc.memory(buffer.address, tensor.size_bytes))
    return memory


def _compute(
    gear: Gear, input_copies: list[Bytes], output_memory: Sequence[Bytes], kernels: bool
) -> None:
    """Compute a gear's outputs from the bytes of its inputs, and write them as bytes."""
    pairs = zip(_tensors(gear, "input"), input_copies, strict=True)
    inputs = {t.name: raw.view(t.dtype).reshape(t.dims) for t, raw in pairs}
    try:
        values = gear.run(inputs, kernels=kernels)
    # Inputs may have values that the network refuses, such as an index out of range.
    except AscendLabError as error:
        raise AclError(Code.INPUTS, error.needed, error.got, error.remedy) from error
    for (name, kind), memory in zip(gear.imported.output_types.items(), output_memory, strict=True):
        memory[:] = np.ascontiguousarray(in_type(values[name], kind)).reshape(-1).view(np.uint8)
