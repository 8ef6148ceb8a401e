"""The language of operators: tensor expressions (what to compute) and schedules (how to do it).

The book's chapters import it as `from ascend_lab.operators import dsl as te`. An expression such as
`te.vadd(a, b)` describes a tensor; `te.auto_schedule` turns it into loops over tiles for a chip.
"""

# fmt: off
# isort: off
from ascend_lab.operators.dsl.auto import auto_schedule, schedule_product
from ascend_lab.operators.dsl.formulas import (
    absolute, broadcast, broadcast_shapes, cast_to, ceil, compute, exp, floor, log, maximum,
    minimum, placeholder, reduce_axis, relu, round, rsqrt, select, sqrt, vabs, vadd,  # noqa: A004
    vadds, vand, vcmp, vdiv, vexp, vlog, vmax, vmaxs, vmin, vmins, vmul, vmuls, vnot, vor, vrec,
    vrelu, vrsqrt, vsqrt, vsub,
    fold_max as max, fold_min as min, fold_prod as prod, fold_sum as sum,  # noqa: A004
)
from ascend_lab.operators.dsl.lower import lower
from ascend_lab.operators.dsl.operations import (
    concat, conv2d, gather, matmul, pad, pooling2d, reduce_max, reduce_min, reduce_prod,
    reduce_sum, reshape, scatter, slice, transpose,  # noqa: A004
)
from ascend_lab.operators.dsl.primitives_loops import (
    bind, fuse, reorder, rfactor, split, tensorize, tile, vectorise,
)
from ascend_lab.operators.dsl.primitives_tiles import (
    cache_read, cache_write, compute_at, double_buffer, inline, materialise, storage_align,
)
from ascend_lab.operators.dsl.run import interpret, run
from ascend_lab.operators.dsl.schedule import Schedule, Step, create_schedule, replay, show
from ascend_lab.operators.dsl.tbe import OPERATIONS, lang as lang
from ascend_lab.operators.dsl.tensor import Axis, Tensor, renamed

__all__ = [
    "OPERATIONS", "Axis", "Schedule", "Step", "Tensor", "absolute", "auto_schedule", "bind",
    "broadcast", "broadcast_shapes", "cache_read", "cache_write", "cast_to", "ceil", "compute",
    "compute_at", "concat", "conv2d", "create_schedule", "double_buffer", "exp", "floor", "fuse",
    "gather", "inline", "interpret", "log", "lower", "materialise", "matmul", "max", "maximum",
    "min", "minimum", "pad", "placeholder", "pooling2d", "prod", "reduce_axis", "reduce_max",
    "reduce_min", "reduce_prod", "reduce_sum", "relu", "renamed", "reorder", "replay", "reshape",
    "rfactor", "round", "rsqrt", "run", "scatter", "schedule_product", "select", "show", "slice",
    "split", "sqrt", "storage_align", "sum", "tensorize", "tile", "transpose", "vabs",
    "vadd", "vadds", "vand", "vcmp", "vdiv", "vectorise", "vexp", "vlog", "vmax", "vmaxs", "vmin",
    "vmins", "vmul", "vmuls", "vnot", "vor", "vrec", "vrelu", "vrsqrt", "vsqrt", "vsub",
]
