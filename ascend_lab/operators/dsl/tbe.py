"""The names that operators in CANN's TBE style use, implemented with this package's DSL.

They are `tvm.placeholder`, `tvm.target.cce()`, `generic.auto_schedule`, `te.lang.cce.*`, `util.*`
and `fusion_manager.register` (CANN TBE developer guide). Such operators run unchanged, except for
their import lines. `build(schedule, config)` returns the kernel of a finished operator, and
`built(name)` finds it again.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any

from ascend_lab.errors import InputError, ScheduleError, ShapeError, TypeMismatchError
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.machine.isa import Kernel
from ascend_lab.operators.dsl import auto, formulas, operations, tensor
from ascend_lab.operators.dsl.lower import lower
from ascend_lab.operators.dsl.schedule import Schedule, show

# fmt: off
_ELEMENTWISE = (
    "vadd", "vsub", "vmul", "vdiv", "vmax", "vmin", "vadds", "vmuls", "vmaxs", "vmins", "vabs",
    "vexp", "vlog", "vsqrt", "vrsqrt", "vrec", "vrelu", "vnot", "vand", "vor", "vcmp", "select",
    "cast_to", "floor", "ceil", "round", "broadcast",
)
_WHOLE_TENSOR = (
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "matmul", "conv2d", "pooling2d",
    "reshape", "transpose", "concat", "slice", "pad", "gather", "scatter",
)
# fmt: on
OPERATIONS = (*_ELEMENTWISE, *_WHOLE_TENSOR)
"""The whole-tensor operations, by their published names."""

SHAPE_SIZE_LIMIT = 2**31
"""Most elements a TBE operator takes."""

# A stack: blocks of `cce` may be nested, and the innermost chip is the target.
_targets: list[Chip] = []
_kernels: dict[str, Kernel] = {}


class FusionManager:
    """Compute functions by name: a registered one may be fused with its neighbours."""

    def __init__(self) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}

    def register(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return the decorator that registers a compute function under `name`."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            self.functions[name] = function
            return function

        return add

    def get(self, name: str) -> Callable[..., Any]:
        """Return a registered compute function; raise `InputError` with the registered names."""
        if name not in self.functions:
            names = ", ".join(self.functions) or "none yet"
            raise InputError(f"a registered compute function ({names})", repr(name), "register it")
        return self.functions[name]


fusion_manager = FusionManager()


@contextmanager
def cce(chip: Chip | str = "Ascend310") -> Iterator[Chip]:
    """Make a chip the target of `auto_schedule` inside the block."""
    _targets.append(load_chip(chip) if isinstance(chip, str) else chip)
    try:
        yield _targets[-1]
    finally:
        _targets.pop()


def placeholder(shape: Sequence[int], name: str = "", dtype: str = "float16") -> tensor.Tensor:
    """Return an input tensor, with the argument order of tvm.placeholder."""
    return formulas.placeholder(shape, dtype, name)


def auto_schedule(outputs: tensor.Tensor | Sequence[tensor.Tensor]) -> Schedule:
    """Return the default schedule for the chip of the enclosing `with tvm.target.cce()`."""
    if not _targets:
        raise ScheduleError("a target chip", "none", "write it inside `with tvm.target.cce():`")
    return auto.auto_schedule(outputs, _targets[-1])


def build(schedule: Schedule, config: Mapping[str, Any]) -> Kernel:
    """Lower a schedule and keep the kernel under config["name"]; `print_ir` prints the nests.

    Inputs and outputs of `tensor_list` must be the schedule's.
    """
    listed = config.get("tensor_list", ())
    missing = [t.label for t in schedule.outputs if not any(t is x for x in listed)]
    if listed and missing:
        raise InputError("tensor_list with every output", f"{', '.join(missing)} missing", "add it")
    if config.get("print_ir"):
        print(show(schedule))
    kernel = lower(schedule)
    _kernels[str(config.get("name", schedule.outputs[0].label))] = kernel
    return kernel


def built(name: str) -> Kernel:
    """Return the kernel that `build` kept under a name."""
    if name not in _kernels:
        names = ", ".join(_kernels) or "none"
        raise InputError(f"a built kernel ({names})", repr(name), "build it")
    return _kernels[name]


def produce_shapes(a: Sequence[int], b: Sequence[int]) -> tuple[list[int], ...]:
    """Return both shapes with ones in front to equal rank, and the shape they broadcast to."""
    # (3, 1) and (4,) become (3, 1), (1, 4) and (3, 4).
    out_shape = list(formulas.broadcast_shapes(a, b))
    a_shape, b_shape = ([1] * (len(out_shape) - len(shape)) + list(shape) for shape in (a, b))
    return a_shape, b_shape, out_shape


def check_shape_size(shape: Sequence[int], limit: int = SHAPE_SIZE_LIMIT) -> None:
    """Raise `ShapeError` if a shape has more elements than `limit`."""
    total = math.prod(shape)
    if total > limit:
        raise ShapeError(f"at most {limit} elements", f"{total} for {tuple(shape)}", "split it")


def check_dtype_rule(dtype: str, allowed: Sequence[str]) -> None:
    """Raise `TypeMismatchError` unless a number format is allowed."""
    if dtype not in allowed:
        raise TypeMismatchError(f"a number format of {', '.join(allowed)}", dtype, "cast the input")


def check_kernel_name(name: str) -> None:
    """Raise `InputError` unless a kernel name is an identifier."""
    # "my-kernel" and "2add" could not be the name of a function
    if not isinstance(name, str) or not name.isidentifier():
        raise InputError("a kernel name of letters, digits and _", repr(name), "rename it")


def check_input_type(*kinds: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that checks the types of positional arguments."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            # Fewer types than arguments: the arguments behind are not checked.
            for number, (value, kind) in enumerate(zip(args, kinds, strict=False)):
                if not isinstance(value, kind):
                    needed = f"{function.__name__}: argument {number} a {kind.__name__}"
                    raise TypeMismatchError(needed, type(value).__name__, "see its signature")
            return function(*args, **kwargs)

        return checked

    return decorate


util = SimpleNamespace(
    shape_to_list=lambda shape: [int(n) for n in shape],
    produce_shapes=produce_shapes,
    check_shape_size=check_shape_size,
    check_tensor_shape_size=check_shape_size,
    check_shape_rule=lambda shape, *limits: formulas.check_shape(tuple(shape)),
    check_dtype_rule=check_dtype_rule,
    check_kernel_name=check_kernel_name,
    check_input_type=check_input_type,
    SHAPE_SIZE_LIMIT=SHAPE_SIZE_LIMIT,
)
tvm = SimpleNamespace(placeholder=placeholder, target=SimpleNamespace(cce=cce))
generic = SimpleNamespace(auto_schedule=auto_schedule)
lang = SimpleNamespace(
    cce=SimpleNamespace(
        util=util,
        auto_schedule=auto_schedule,
        cce_build_code=build,
        **{name: getattr(formulas, name) for name in _ELEMENTWISE},
        **{name: getattr(operations, name) for name in _WHOLE_TENSOR},
    )
)
