"""From an operator to a kernel: check, express, schedule, lower; then values and time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ascend_lab import dsl as te
from ascend_lab.chip import Chip
from ascend_lab.dsl.fractals import matrices, matrix_map
from ascend_lab.dsl.moves import axis_names, copied
from ascend_lab.errors import ShapeError
from ascend_lab.isa import Kernel, var
from ascend_lab.kernels import GemmSchedule
from ascend_lab.layout import pack, unpack
from ascend_lab.ops.formats import Values, format_of
from ascend_lab.ops.operator import Call, Operator, resolve
from ascend_lab.ops.shapes import Shape, elements
from ascend_lab.sim import DeviceMemory, KernelTimeline, analyse, execute, simulate_kernel


def check(
    operator: Operator | str,
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    chip: Chip,
    **attrs: Any,
) -> None:
    """Raise `ShapeError`, `TypeMismatchError` or `InputError` before any work is done."""
    resolve(operator).check(shapes, dtypes, attrs, chip)


def output_names(operator: Operator, inputs: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the names of the outputs' GM tensors, different from each other and the inputs'."""
    own = operator.outputs
    names = own if len(own) == count else tuple(f"{own[0]}{i}" for i in range(count))
    return tuple(f"{name}_out" if name in inputs else name for name in names)


def express(
    operator: Operator | str, shapes: Sequence[Shape], dtypes: Sequence[str], **attrs: Any
) -> tuple[te.Tensor, ...]:
    """Return the named output tensors of the operator's expression on placeholders.

    Tensors without axes become (1,), as in device memory.
    """
    op = resolve(operator)
    names = op.names(len(shapes))
    tensors = [
        te.placeholder(tuple(shape) or (1,), dtype, name)
        for name, shape, dtype in zip(names, shapes, dtypes, strict=True)
    ]
    found = op.expression(*tensors, **attrs)
    outputs = found if isinstance(found, tuple) else (found,)
    titles = output_names(op, names, len(outputs))
    return tuple(
        te.renamed(own_tensor(t, names), title) for t, title in zip(outputs, titles, strict=True)
    )


def own_tensor(tensor: te.Tensor, inputs: Sequence[str]) -> te.Tensor:
    """Return the tensor to store: row-major memory knows no shape, so a last reshape is dropped.

    An input is copied: outputs have memory of their own.
    """
    while tensor.hint == "reshape" and tensor.inputs[0].body is not None:
        tensor = tensor.inputs[0]
    if tensor.name not in inputs:
        return tensor
    names = axis_names(len(tensor.shape))
    return copied(tensor[tuple(var(n) for n in names)], tensor.shape, names, "copy")


def compile(  # noqa: A001 - what it does
    operator: Operator | str,
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    chip: Chip,
    **attrs: Any,
) -> Kernel:
    """Return the kernel of the operator's template, or of its default schedule.

    Raises as `check`; `ShapeError` also for empty tensors, for which nothing is launched.
    """
    op = resolve(operator)
    op.check(shapes, dtypes, attrs, chip)
    for shape in (*shapes, *op.infer(*shapes, **attrs)):
        if elements(tuple(shape)) == 0:
            raise ShapeError(
                f"{op.name}: elements to compute", str(shape), "ops.run returns at once"
            )
    call = op.call(shapes, dtypes, attrs)
    template = op.template_for(call, chip)
    return template.kernel(call, chip) if template else te.lower(_schedule(op, call, chip))


def _schedule(op: Operator, call: Call, chip: Chip) -> te.Schedule:
    return te.auto_schedule(express(op, call.shapes, call.dtypes, **call.attrs), chip)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A kernel with its GM tensors filled, and how to read the outputs from memory afterwards."""

    kernel: Kernel
    tensors: dict[str, Values]
    fetch: Callable[[Mapping[str, Values]], tuple[Values, ...]]


def prepare(operator: Operator | str, *arrays: Values, chip: Chip, **attrs: Any) -> Prepared:
    """Return the kernel for some input arrays and the tensors to launch it with.

    Raises as `compile`, and `InputError` for indices outside their tensors.
    """
    op = resolve(operator)
    shapes, dtypes = [a.shape for a in arrays], [format_of(a) for a in arrays]
    op.check(shapes, dtypes, attrs, chip)
    op.check_indices(arrays, op.settings(attrs))
    call = op.call(shapes, dtypes, attrs)
    template = op.template_for(call, chip)
    if template:
        fetch = partial(template.outputs, call)
        return Prepared(template.kernel(call, chip), template.tensors(call, arrays), fetch)
    return _scheduled(op, _schedule(op, call, chip), arrays, call)


def _scheduled(
    op: Operator, schedule: te.Schedule, arrays: Sequence[Values], call: Call
) -> Prepared:
    """Return a scheduled expression prepared; the cube's matrices are laid out as fractals."""
    kernel, stored = te.lower(schedule), matrices(schedule.state)
    names, known = op.names(len(arrays)), {t.name for t in kernel.tensors}
    feed = {n: a for n, a in zip(names, arrays, strict=True) if n in known}
    for name in feed.keys() & stored.keys():
        where = matrix_map(feed[name].shape, stored[name], format_of(feed[name]))
        feed[name] = pack(where, feed[name])
    titles = output_names(op, names, len(call.outputs))

    def fetch(memory: Mapping[str, Values]) -> tuple[Values, ...]:
        found = []
        for title, shape in zip(titles, call.outputs, strict=True):
            values = memory[title]
            if title in stored:
                values = unpack(matrix_map(shape, stored[title], format_of(values)), values)
            found.append(values.reshape(shape))
        return tuple(found)

    return Prepared(kernel, feed, fetch)


def run(operator: Operator | str, *arrays: Values, chip: Chip, **attrs: Any) -> Any:
    """Return the output array (a tuple of several) that the kernel computes on the chip.

    Without elements nothing is launched: the result is the reference's, empty or an identity.
    Raises as `prepare`.
    """
    op = resolve(operator)
    given = [np.asarray(a) for a in arrays]
    shapes = [a.shape for a in given]
    op.check(shapes, [format_of(a) for a in given], attrs, chip)
    if any(elements(shape) == 0 for shape in (*shapes, *op.infer(*shapes, **attrs))):
        return op.reference(*given, **attrs)
    ready = prepare(op, *given, chip=chip, **attrs)
    results = ready.fetch(execute(ready.kernel, ready.tensors, chip))
    return results if len(results) > 1 else results[0]


def time(
    operator: Operator | str,
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    chip: Chip,
    *,
    warm_l2: bool = False,
    tiling: GemmSchedule | None = None,
    **attrs: Any,
) -> KernelTimeline:
    """Return the timeline of the operator's kernel, phase by phase; raises as `compile`.

    `tiling` is a matrix product's, by default the best in closed form. With `warm_l2` the operands
    lie in L2 as far as they fit, phases find there what others left, and the kernel waits in the
    device's queue behind the one that brought the operands.
    """
    kernel = compile(operator, shapes, dtypes, chip, **attrs)
    if tiling:
        tensors = express(operator, shapes, dtypes, **attrs)
        kernel = te.lower(te.auto_schedule(tensors, chip, tiling))
    if not warm_l2:
        return simulate_kernel(kernel, chip)
    traffic = [analyse(phase, chip) for phase in kernel.phases]
    written = {name for t in traffic for name in t.write_once}
    operands = {name for t in traffic for name in t.read_once} - written
    memory = DeviceMemory.holding(chip, kernel.tensors, operands)
    return replace(simulate_kernel(kernel, chip, memory), start="queued")
