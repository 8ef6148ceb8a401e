"""A profile of a board as measured rows: the operator summary that msprof writes.

Columns are found by name, whatever their number and order: `Op Name`, `OP Type`, `Task Type`,
`Task Duration(us)`, `Input Shapes`, `Input Data Types`, `Input Formats`, `Output Shapes`, and the
ratios of pipes such as `aic_mac_ratio`. The same table of torch_npu, `kernel_details.csv`, says
`Name`, `Type`, `Accelerator Core` and `Duration(us)`.

A profile holds shapes and types, no attributes. What follows from the shapes is taken (which axes
were summed, which permutation, if only one fits); what does not is refused by name, or marked.

Sources: hiascend.com, Profiling, op_summary (Operator Details), CANN 8.0 to 9.0; the column names
in Ascend/msprof, `analysis/msconfig/prof_header_mapping.json`, and Ascend/pytorch,
`torch_npu/profiler/analysis/prof_common_func/_csv_headers.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from typing import Any

from ascend_lab.compare.rows import Measured, Shape, Work, pipe_of, reasons_in, shape_of
from ascend_lab.errors import InputError
from ascend_lab.limits import number_of, shown

NAMES = {
    "name": ("op name", "name"),
    "type": ("op type", "type"),
    "engine": ("task type", "accelerator core"),
    "duration": ("task duration(us)", "duration(us)"),
    "shapes": ("input shapes",),
    "dtypes": ("input data types",),
    "formats": ("input formats",),
    "out_shapes": ("output shapes",),
    "out_dtypes": ("output data types",),
}
"""What is read -> the columns that hold it, in small letters."""
NEEDED = ("name", "type", "duration", "shapes", "dtypes")
OFF_CORE = ("AI_CPU", "HCCL", "COMMUNICATION", "DSA", "DVPP")
"""Kinds of tasks that no AI core computes."""
DTYPES = {
    "float16": "fp16",
    "float": "fp32",
    "float32": "fp32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "int64": "int64",
}
"""What a profile calls number formats, small and without DT_ -> what they are called here."""
PLAIN = ("ND", "NCHW", "NHWC", "NCL", "FORMAT_ND", "N/A", "")
"""Formats whose shapes are those of the tensor itself."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a profile: its type, the shapes and types of inputs, the shape of an output."""

    type: str
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    output: Shape | None
    output_dtype: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What a task is here: operator, its inputs, its attributes, and what to keep in mind."""

    operator: str
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    attributes: Mapping[str, Any]
    marks: tuple[str, ...] = ()


def is_profile(header: Sequence[str]) -> bool:
    """Tell whether a table is a profile: it has a column of durations and one of types."""
    names = {name.lower() for name in header}
    return all(names.intersection(NAMES[part]) for part in ("type", "duration"))


def read_rows(rows: Sequence[tuple[int, list[str]]], chip: str, where: str) -> list[Measured]:
    """Return the tasks of a profile's lines, the header first; raises `InputError`."""
    (_, header), *lines = rows
    small = [name.lower() for name in header]
    places = {
        part: small.index(name) for part, names in NAMES.items() for name in names if name in small
    }
    missing = [NAMES[part][0] for part in NEEDED if part not in places]
    if missing:
        needed = f"{where}: the columns {', '.join(missing)} of an operator summary"
        raise InputError(needed, "none", "record the profile with shapes and task times")
    ratios = {at: pipe for at, name in enumerate(small) if (pipe := _ratio(name))}
    return [_row(places, ratios, cells, chip, line) for line, cells in lines]


def _ratio(name: str) -> str:
    """Return the pipe of a column such as `aic_mac_ratio`, "" for others; `ai*_` is either core."""
    if not name.endswith("_ratio"):
        return ""
    return pipe_of(name.removesuffix("_ratio").removeprefix("ai*_"))


def _row(
    places: Mapping[str, int],
    ratios: Mapping[int, str],
    cells: Sequence[str],
    chip: str,
    line: int,
) -> Measured:
    """Return one task as a measurement, refused by name if it is no work of ours."""
    row = {part: cells[at] if at < len(cells) else "" for part, at in places.items()}
    reasons: list[str] = []
    measured_s: float | None = None
    work: Work | None = None
    marks: tuple[str, ...] = ()
    with reasons_in(reasons):
        value = number_of(row["duration"])
        if value is None or value <= 0:
            needed = "a task duration above 0 microseconds"
            raise InputError(needed, shown(row["duration"]), "drop that row")
        measured_s = value * 1e-6
    with reasons_in(reasons):
        found = reading(_task(row))
        marks = found.marks
        work = Work(
            found.operator,
            chip,
            found.shapes,
            None,
            found.dtypes,
            found.attributes,
            group=row["type"],
        )
    busy = {}
    for at, pipe in ratios.items():
        share = number_of(cells[at]) if at < len(cells) else None
        if share:
            busy[pipe] = share
    group = row["type"] or "no type"
    name = row["name"] or f"line {line}"
    return Measured(name, group, measured_s, work, marks, busy, "; ".join(reasons))


def _task(row: Mapping[str, str]) -> Task:
    """Return the task of a row; raises `InputError` for those off the cores, or without shapes."""
    engine = row.get("engine", "").upper().replace(" ", "_")
    if any(word in engine for word in OFF_CORE):
        raise InputError("a task of the AI cores", engine, "the model times kernels only")
    if row["shapes"].strip('" ') in ("", "N/A"):
        raise InputError("input shapes", "none", "record the profile with task times of level l1")
    shapes = tuple(_shapes(row["shapes"]))
    dtypes = tuple(_dtype(word) for word in _parts(row["dtypes"]))
    if len(dtypes) < len(shapes):
        needed = f"a data type for each of {len(shapes)} inputs"
        raise InputError(needed, str(len(dtypes)), "mend that row")
    if row["type"] not in POINTWISE:
        for place, word in enumerate(_parts(row.get("formats", ""))[: len(shapes)]):
            if word.upper() not in PLAIN:
                needed = f"input {place} in a format whose shape is the tensor's, such as ND"
                raise InputError(needed, word, "the shape of a blocked tensor hides its own")
    outputs = row.get("out_shapes", "").strip('" ')
    output = next(iter(_shapes(outputs)), None) if outputs not in ("", "N/A") else None
    output_dtypes = _parts(row.get("out_dtypes", ""))
    return Task(row["type"], shapes, dtypes, output, output_dtypes[0] if output_dtypes else "")


def _parts(text: str) -> list[str]:
    """Return the parts of a cell such as `"ND;ND"`; msprof quotes some cells once more."""
    plain = text.strip('" ')
    return [part.strip() for part in plain.split(";")] if plain else []


def _shapes(text: str) -> list[Shape]:
    """Return the shapes of a cell such as `16,32;32,8`; an empty part is a scalar, one number."""
    return [
        shape_of(part.strip("[]"), ",", "input shapes") if part.strip("[] ") else (1,)
        for part in _parts(text)
    ]


def _dtype(word: str) -> str:
    small = word.lower().removeprefix("dt_")
    if small not in DTYPES:
        raise InputError(f"a data type among {', '.join(DTYPES)}", shown(word), "none is guessed")
    return DTYPES[small]


# -- what a type of task is here -------------------------------------------------------------------
POINTWISE = {
    **dict.fromkeys(("Add", "AddV2"), "add"),
    "Sub": "sub",
    "Mul": "mul",
    **dict.fromkeys(("Div", "RealDiv"), "div"),
    "Maximum": "max",
    "Minimum": "min",
    "Pow": "pow",
    "Adds": "adds",
    "Muls": "muls",
    "Abs": "abs",
    "Neg": "neg",
    "Relu": "relu",
    "Relu6": "relu6",
    "Exp": "exp",
    "Log": "log",
    "Sqrt": "sqrt",
    "Rsqrt": "rsqrt",
    "Reciprocal": "rec",
    "Square": "square",
    "Ceil": "ceil",
    "Floor": "floor",
    "Rint": "round",
    "Sign": "sign",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "Gelu": "gelu",
    **dict.fromkeys(("Swish", "Silu"), "silu"),
    "Erf": "erf",
}
"""Types that work element by element -> the operator; their tensors may lie in any format."""
NOT_TOLD = {
    "Conv": "strides and pads",
    "Depthwise": "strides and pads",
    "Pool": "windows and strides",
    "Attention": "heads and layout",
    "Attn": "heads and layout",
    "Gather": "the axis",
    "Slice": "where it begins",
    "Pad": "the widths",
    "Quant": "scales and epilogue",
    "Grouped": "the rows of each group",
}
"""Parts of types -> what of them no profile holds."""


def reading(task: Task) -> Reading:
    """Return what a task is in the operator library; raises `InputError` where nothing says so."""
    if task.type in POINTWISE:
        count = (
            2 if POINTWISE[task.type] in ("add", "sub", "mul", "div", "max", "min", "pow") else 1
        )
        return Reading(POINTWISE[task.type], task.shapes[:count], task.dtypes[:count], {})
    for kinds, read in READERS.items():
        if task.type in kinds:
            return read(task)
    for part, lost in NOT_TOLD.items():
        if part in task.type:
            needed = f"{task.type}: {lost}, which no profile holds"
            raise InputError(needed, "shapes only", "write a table of measured rows instead")
    raise InputError("a task type that an operator here computes", shown(task.type), "not timed")


def _matmul(task: Task) -> Reading:
    """Read a product: transposes are those that fit the shapes, those in doubt are marked."""
    batched = task.type.startswith("Batch")
    if len(task.shapes) < 2 or any(len(shape) < 2 for shape in task.shapes[:2]):
        raise InputError(f"{task.type}: two matrices", str(task.shapes), "mend that row")
    a = task.shapes[0][-2:]
    b = task.shapes[1][-2:]
    fitting = []
    for trans_a, trans_b in product((False, True), repeat=2):
        rows, inner = a[::-1] if trans_a else a
        inner_b, columns = b[::-1] if trans_b else b
        fits_out = task.output is None or task.output[-2:] == (rows, columns)
        if inner == inner_b and fits_out:
            fitting.append({"trans_a": trans_a, "trans_b": trans_b})
    if not fitting:
        got = f"{task.shapes[0]} and {task.shapes[1]} to {task.output}"
        raise InputError(f"{task.type}: matrices that fit together", got, "mend that row")
    marks = []
    if len(fitting) > 1:
        marks.append("transposes are not told: timed without")
    if len(task.shapes) > 2:
        marks.append("the bias is left out")
    name = "batch_matmul" if batched else "matmul"
    attributes = {key: value for key, value in fitting[0].items() if value}
    return Reading(name, task.shapes[:2], task.dtypes[:2], attributes, tuple(marks))


def _transpose(task: Task) -> Reading:
    """Read a transpose whose permutation the shapes of input and output leave no doubt about."""
    shape = task.shapes[0]
    output = task.output
    fits: list[tuple[int, ...]] = []
    if output is not None and len(output) == len(shape) <= MOST_AXES:
        orders = permutations(range(len(shape)))
        fits = [order for order in orders if tuple(shape[axis] for axis in order) == output]
    if len(fits) != 1:
        got = f"{shape} to {output}, {len(fits)} of them"
        raise InputError(f"{task.type}: one permutation that fits", got, "none is guessed")
    return Reading("transpose", (shape,), task.dtypes[:1], {"perm": fits[0]})


MOST_AXES = 8
"""Of a tensor in a profile: 8! permutations are looked at."""


def _reduction(name: str) -> Callable[[Task], Reading]:
    """Return the reader of a reduction whose axes the shapes leave no doubt about."""

    def read(task: Task) -> Reading:
        shape = task.shapes[0]
        output = task.output
        ranks = range(1, len(shape) + 1) if output is not None and len(shape) <= MOST_AXES else ()
        fits: list[dict[str, Any]] = []
        for axes in (axes for count in ranks for axes in combinations(range(len(shape)), count)):
            kept = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
            left = tuple(size for axis, size in enumerate(shape) if axis not in axes)
            if output == kept:
                fits.append({"axis": axes, "keepdims": True})
            elif output == (left or (1,)):
                fits.append({"axis": axes, "keepdims": False})
        if len(fits) != 1:
            got = f"{shape} to {output}, {len(fits)} of them"
            raise InputError(f"{task.type}: one choice of axes that fits", got, "none is guessed")
        return Reading(name, (shape,), task.dtypes[:1], fits[0])

    return read


def _last_axis(name: str) -> Callable[[Task], Reading]:
    """Return the reader of an operator along the last axis, which a profile does not tell."""

    def read(task: Task) -> Reading:
        marks = ("the axis is not told: timed along the last",)
        return Reading(name, task.shapes[:1], task.dtypes[:1], {"axis": -1}, marks)

    return read


def _norm(name: str, inputs: int) -> Callable[[Task], Reading]:
    """Return the reader of a norm whose scale says that it runs along the last axis."""

    def read(task: Task) -> Reading:
        shapes = task.shapes[:inputs]
        if len(shapes) != inputs or any(shape != shapes[0][-1:] for shape in shapes[1:]):
            needed = f"{task.type}: {inputs - 1} tensors of the last axis behind the first"
            raise InputError(needed, str(task.shapes), "other axes are not read")
        return Reading(name, shapes, (task.dtypes[0],) * inputs, {"axis": -1})

    return read


def _cast(task: Task) -> Reading:
    """Read a cast: the output's data type is what it casts to."""
    if not task.output_dtype:
        raise InputError(f"{task.type}: an output data type", "none", "mend that row")
    attributes = {"dtype": _dtype(task.output_dtype)}
    return Reading("cast", task.shapes[:1], task.dtypes[:1], attributes)


READERS: Mapping[tuple[str, ...], Callable[[Task], Reading]] = {
    ("MatMul", "MatMulV2", "MatMulV3"): _matmul,
    ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"): _matmul,
    ("Transpose", "TransposeD"): _transpose,
    ("ReduceSum", "ReduceSumD"): _reduction("reduce_sum"),
    ("ReduceMean", "ReduceMeanD"): _reduction("reduce_mean"),
    ("ReduceMax", "ReduceMaxD"): _reduction("reduce_max"),
    ("ReduceMin", "ReduceMinD"): _reduction("reduce_min"),
    ("SoftmaxV2", "Softmax"): _last_axis("softmax"),
    ("LogSoftmaxV2", "LogSoftmax"): _last_axis("log_softmax"),
    ("LayerNorm", "LayerNormV3"): _norm("layer_norm", 3),
    ("RmsNorm",): _norm("rms_norm", 2),
    ("Cast",): _cast,
}
"""Types of tasks -> what reads them."""
