"""Reads the operator summary that the profiler msprof writes on a board, as measured rows.

Columns are found by name, whatever their number and order: `Op Name`, `OP Type`, `Task Type`,
`Task Duration(us)`, `Input Shapes`, `Input Data Types`, `Input Formats`, `Output Shapes`, and the
ratios of pipes such as `aic_mac_ratio`. The same table of torch_npu, `kernel_details.csv`, says
`Name`, `Type`, `Accelerator Core` and `Duration(us)`.

A profile holds shapes and types, but no attributes. Some follow from the shapes: the axes of a sum
or the permutation of a transpose, if only one fits. A task whose attributes do not follow is
refused with a message that names it, or timed with a remark.

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
"""An entry of a task -> the names of its column, in small letters."""
NEEDED_ENTRIES = ("name", "type", "duration", "shapes", "dtypes")
OFF_CORE = ("AI_CPU", "HCCL", "COMMUNICATION", "DSA", "DVPP")
"""Types of tasks that no AI core computes."""
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
"""A profile's names of number formats, in small letters and without DT_ -> ours."""
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
    """A task as one of our operators with inputs and attributes; `marks` say what is guessed."""

    operator: str
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    attributes: Mapping[str, Any]
    marks: tuple[str, ...] = ()


def is_profile(header: Sequence[str]) -> bool:
    """Tell whether a table is a profile: it has a column of durations and one of types."""
    names = {name.lower() for name in header}
    return all(names.intersection(NAMES[entry]) for entry in ("type", "duration"))


def read_rows(rows: Sequence[tuple[int, list[str]]], chip: str, where: str) -> list[Measured]:
    """Return the tasks of a profile's lines, the header first; raises `InputError`."""
    (_, header), *lines = rows
    # capitals do not matter: "OP Type", "Op Name"
    columns = [name.lower() for name in header]
    column_of = {
        entry: columns.index(name)
        for entry, names in NAMES.items()
        for name in names
        if name in columns
    }
    missing = [NAMES[entry][0] for entry in NEEDED_ENTRIES if entry not in column_of]
    if missing:
        needed = f"{where}: the columns {', '.join(missing)} of an operator summary"
        raise InputError(needed, "none", "record the profile with shapes and task times")
    pipe_columns = {column: pipe for column, name in enumerate(columns) if (pipe := _ratio(name))}
    return [_row(column_of, pipe_columns, cells, chip, line) for line, cells in lines]


def _ratio(name: str) -> str:
    """Return the pipe of a column such as `aic_mac_ratio`, or "" for any other column.

    The prefix `ai*_` stands for cube or vector cores.
    """
    if not name.endswith("_ratio"):
        return ""
    return pipe_of(name.removesuffix("_ratio").removeprefix("ai*_"))


def _row(
    column_of: Mapping[str, int],
    pipe_columns: Mapping[int, str],
    cells: Sequence[str],
    chip: str,
    line: int,
) -> Measured:
    """Return one task as a measurement, refused with the reason if no operator here computes it."""
    # msprof leaves out cells at the end of a line: they count as empty.
    row = {
        entry: cells[column] if column < len(cells) else "" for entry, column in column_of.items()
    }
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
        task_reading = reading(_task(row))
        marks = task_reading.marks
        work = Work(
            operator=task_reading.operator,
            chip=chip,
            shapes=task_reading.shapes,
            dtypes=task_reading.dtypes,
            attributes=task_reading.attributes,
            group=row["type"],
        )
    busy = {}
    for column, pipe in pipe_columns.items():
        share = number_of(cells[column]) if column < len(cells) else None
        # pipes that did nothing are left out
        if share:
            busy[pipe] = share
    return Measured(
        case=row["name"] or f"line {line}",
        group=row["type"] or "no type",
        measured_s=measured_s,
        work=work,
        marks=marks,
        busy=busy,
        refused="; ".join(reasons),
    )


def _task(row: Mapping[str, str]) -> Task:
    """Return the task of a row; raises `InputError` for those off the cores, or without shapes."""
    engine = row.get("engine", "").upper().replace(" ", "_")
    if any(word in engine for word in OFF_CORE):
        raise InputError("a task of the AI cores", engine, "the model times kernels only")
    if row["shapes"].strip('" ') in ("", "N/A"):
        raise InputError("input shapes", "none", "record the profile with task times of level l1")
    shapes = tuple(_shapes(row["shapes"]))
    dtypes = tuple(_dtype(word) for word in _items(row["dtypes"]))
    if len(dtypes) < len(shapes):
        needed = f"a data type for each of {len(shapes)} inputs"
        raise InputError(needed, str(len(dtypes)), "correct that row")
    if row["type"] not in POINTWISE:
        # A matrix of 100 x 100 in FRACTAL_NZ is printed as 7 x 7 x 16 x 16: the 100 is lost.
        # Element by element that does not matter.
        for number, word in enumerate(_items(row.get("formats", ""))[: len(shapes)]):
            if word.upper() not in PLAIN:
                needed = f"input {number} in a format whose shape is the tensor's, such as ND"
                raise InputError(needed, word, "the shape of a blocked tensor hides its own")
    outputs = row.get("out_shapes", "").strip('" ')
    # later outputs (indices, statistics) do not affect the attributes
    output = next(iter(_shapes(outputs)), None) if outputs not in ("", "N/A") else None
    output_dtypes = _items(row.get("out_dtypes", ""))
    return Task(row["type"], shapes, dtypes, output, output_dtypes[0] if output_dtypes else "")


def _items(text: str) -> list[str]:
    """Return the items of a cell such as `"ND;ND"`; msprof quotes some cells twice."""
    unquoted = text.strip('" ')
    return [item.strip() for item in unquoted.split(";")] if unquoted else []


def _shapes(text: str) -> list[Shape]:
    """Return the shapes of a cell such as `16,32;32,8`; an empty item is a scalar, shape (1,)."""
    return [
        shape_of(item.strip("[]"), ",", "input shapes") if item.strip("[] ") else (1,)
        for item in _items(text)
    ]


def _dtype(word: str) -> str:
    """Return our name of a number format: "fp16" of "DT_FLOAT16"."""
    name = word.lower().removeprefix("dt_")
    if name not in DTYPES:
        raise InputError(f"a data type among {', '.join(DTYPES)}", shown(word), "none is guessed")
    return DTYPES[name]


# -- the operator of a task's type -----------------------------------------------------------------
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
"""Types of element-wise tasks -> our operator; their tensors may lie in any format."""
WITH_TWO_OPERANDS = ("add", "sub", "mul", "div", "max", "min", "pow")
UNKNOWN_ATTRIBUTES = {
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
"""A part of a type's name -> the attributes of such tasks, which a profile does not hold."""


def reading(task: Task) -> Reading:
    """Return a task as an operator of our library; raises `InputError` where that is uncertain."""
    if task.type in POINTWISE:
        operator = POINTWISE[task.type]
        # a profile may list further inputs, such as sizes, which are ignored here
        count = 2 if operator in WITH_TWO_OPERANDS else 1
        return Reading(operator, task.shapes[:count], task.dtypes[:count], {})
    # types of several versions of one operator: MatMul, MatMulV2, MatMulV3
    for kinds, read in READERS.items():
        if task.type in kinds:
            return read(task)
    for kind, attributes in UNKNOWN_ATTRIBUTES.items():
        if kind in task.type:
            needed = f"{task.type}: {attributes}, which no profile holds"
            raise InputError(needed, "shapes only", "write a table of measured rows instead")
    raise InputError("a task type that an operator here computes", shown(task.type), "not timed")


def _matmul(task: Task) -> Reading:
    """Read a product with the transposes that fit the shapes; if several fit, add a remark."""
    batched = task.type.startswith("Batch")
    if len(task.shapes) < 2 or any(len(shape) < 2 for shape in task.shapes[:2]):
        raise InputError(f"{task.type}: two matrices", str(task.shapes), "correct that row")
    a = task.shapes[0][-2:]
    b = task.shapes[1][-2:]
    # 4 x 8 and 16 x 8 to 4 x 16: only b is transposed; 8 x 8 and 8 x 8: all four choices fit
    fitting = []
    for trans_a, trans_b in product((False, True), repeat=2):
        rows, inner = a[::-1] if trans_a else a
        inner_b, columns = b[::-1] if trans_b else b
        fits_out = task.output is None or task.output[-2:] == (rows, columns)
        if inner == inner_b and fits_out:
            fitting.append({"trans_a": trans_a, "trans_b": trans_b})
    if not fitting:
        got = f"{task.shapes[0]} and {task.shapes[1]} to {task.output}"
        raise InputError(f"{task.type}: matrices that fit together", got, "correct that row")
    marks = []
    if len(fitting) > 1:
        marks.append("transposes are not told: timed without")
    if len(task.shapes) > 2:
        marks.append("the bias is left out")
    name = "batch_matmul" if batched else "matmul"
    # False is the default of both
    attributes = {key: value for key, value in fitting[0].items() if value}
    return Reading(name, task.shapes[:2], task.dtypes[:2], attributes, tuple(marks))


def _transpose(task: Task) -> Reading:
    """Read a transpose, if exactly one permutation turns the input's shape into the output's."""
    shape = task.shapes[0]
    output = task.output
    # (2, 3, 4) to (4, 2, 3) leaves one order; (3, 3, 4) to (4, 3, 3) leaves two
    fitting: list[tuple[int, ...]] = []
    if output is not None and len(output) == len(shape) <= MAX_AXES:
        orders = permutations(range(len(shape)))
        fitting = [order for order in orders if tuple(shape[axis] for axis in order) == output]
    if len(fitting) != 1:
        # (3, 3, 4) to (4, 3, 3) fits two orders: guessing could time the wrong one
        got = f"{shape} to {output}, {len(fitting)} of them"
        raise InputError(f"{task.type}: one permutation that fits", got, "none is guessed")
    return Reading("transpose", (shape,), task.dtypes[:1], {"perm": fitting[0]})


MAX_AXES = 8
"""Most axes of a tensor whose permutation is searched: 8! = 40,320 candidates."""


def _reduction(name: str) -> Callable[[Task], Reading]:
    """Return the reader of a reduction, which needs one choice of axes that fits the shapes."""

    def read(task: Task) -> Reading:
        shape = task.shapes[0]
        output = task.output
        counts = range(1, len(shape) + 1) if output is not None and len(shape) <= MAX_AXES else ()
        fitting: list[dict[str, Any]] = []
        for axes in (axes for count in counts for axes in combinations(range(len(shape)), count)):
            # (4, 8, 16) reduced along axis 1 is (4, 1, 16) with keepdims, (4, 16) without.
            with_ones = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
            without = tuple(size for axis, size in enumerate(shape) if axis not in axes)
            if output == with_ones:
                fitting.append({"axis": axes, "keepdims": True})
            # a sum over all axes has the shape (1,), as a scalar is read
            elif output == (without or (1,)):
                fitting.append({"axis": axes, "keepdims": False})
        if len(fitting) != 1:
            got = f"{shape} to {output}, {len(fitting)} of them"
            raise InputError(f"{task.type}: one choice of axes that fits", got, "none is guessed")
        return Reading(name, (shape,), task.dtypes[:1], fitting[0])

    return read


def _last_axis(name: str) -> Callable[[Task], Reading]:
    """Return the reader of an operator along one axis, taken to be the last: a profile has none."""

    def read(task: Task) -> Reading:
        marks = ("the axis is not told: timed along the last",)
        return Reading(name, task.shapes[:1], task.dtypes[:1], {"axis": -1}, marks)

    return read


def _norm(name: str, inputs: int) -> Callable[[Task], Reading]:
    """Return the reader of a norm along the last axis, which the shape of its scale must have."""

    def read(task: Task) -> Reading:
        shapes = task.shapes[:inputs]
        # (4, 128) goes with a scale and a shift of (128,)
        if len(shapes) != inputs or any(shape != shapes[0][-1:] for shape in shapes[1:]):
            needed = f"{task.type}: {inputs - 1} tensors of the last axis behind the first"
            raise InputError(needed, str(task.shapes), "other axes are not read")
        return Reading(name, shapes, (task.dtypes[0],) * inputs, {"axis": -1})

    return read


def _cast(task: Task) -> Reading:
    """Read a cast, to the data type of the output."""
    if not task.output_dtype:
        raise InputError(f"{task.type}: an output data type", "none", "correct that row")
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
"""Types of tasks -> the functions that read them."""
