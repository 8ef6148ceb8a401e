"""The list of all verbs of `ascend-lab`, and the verbs on chips and single kernels.

ascend-lab chips Ascend910B2                       every number of a chip, with its source
ascend-lab gemm 4096 4096 4096 --chip Ascend910B2  a matrix product
ascend-lab conv 1 64 56 56 64 3 3 --pad 1 --chip Ascend310
ascend-lab op softmax 4096x1024 --chip Ascend310   any operator of the library
ascend-lab run-kernel my_kernel.py --chip Toy      a kernel of one's own
"""

from __future__ import annotations

import argparse
import ast
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ascend_lab.cli import (
    cluster,
    compare,
    compiling,
    course,
    frames,
    llm,
    models,
    network,
    serving,
    solve,
)
from ascend_lab.cli.common import CHIP, JSON, LIKE, TRACE, Flag, Verb, flag, refuse_idle
from ascend_lab.cli.printing import emit
from ascend_lab.errors import InputError
from ascend_lab.limits import count, shown, whole, wholes_of
from ascend_lab.machine.chip import load_chip

if TYPE_CHECKING:
    from ascend_lab.machine.sim import KernelTimeline


def _op(arguments: argparse.Namespace) -> int:
    """Time an operator of the library on shapes, or list all operators."""
    from ascend_lab.operators import dsl as te, ops
    from ascend_lab.operators.dsl.tensor import ALIASES

    if arguments.name is None:
        return _list_operators(arguments)
    if arguments.json:
        refuse_idle(arguments, "without --json", "--show")
    operator = ops.get(arguments.name)
    # Whatever is missing, the message shows a complete command that works.
    example = _example(operator, arguments.chip)
    if not arguments.shapes:
        raise InputError(f"a shape per input ({', '.join(operator.inputs)})", "none", example)
    if arguments.chip is None:
        raise InputError("--chip with a chip name or file", "none", example)
    chip = load_chip(arguments.chip)
    attrs = _attributes(arguments.attr)
    if missing := [key for key in operator.needs if key not in attrs]:
        raise InputError(" ".join(f"--attr {key}=VALUE" for key in missing), "none", example)
    shapes = [_shape(text) for text in arguments.shapes]
    dtype = arguments.dtype
    # One --dtype is for all inputs that may have it: indices of a gather stay int32.
    formats = operator.input_types(len(shapes), ALIASES.get(dtype, dtype), **attrs)
    tiling = _own_tiling(arguments, chip, shapes, formats, attrs)
    warm = arguments.warm_l2
    timeline = ops.time(arguments.name, shapes, formats, chip, warm_l2=warm, tiling=tiling, **attrs)
    data = timeline.summary() | ({"schedule": tiling.as_dict()} if tiling else {})
    lines = _timing(arguments.name, timeline)
    if arguments.show:
        # Some operators have a kernel written by hand, which no schedule of loops describes.
        if template := operator.template_for(operator.call(shapes, formats, attrs), chip):
            lines.append(
                f"  timed is a kernel written by hand, which {template.build.__module__} names"
            )
            lines.append("what it computes, as the loops of a default schedule, not timed:")
        tensors = ops.express(arguments.name, shapes, formats, **attrs)
        lines += te.show(te.auto_schedule(tensors, chip, tiling)).split("\n")
    emit(arguments.json, data, lines)
    return 0


def _example(operator: Any, chip: str | None) -> str:
    """Return the command that times an operator on the simplest of its examples."""
    # Examples for tests include empty shapes and sizes of 0.
    examples = [e for e in operator.examples if all(shape and all(shape) for shape in e.shapes)]
    # The simplest has the fewest attributes, and among those the most elements: the time of a
    # small shape is nearly all launch.
    plain = min(
        examples, key=lambda e: (len(e.attrs), -sum(map(math.prod, e.shapes))), default=None
    )
    if plain is None:
        return "e.g. op softmax 64x1000 --chip Ascend910A"
    words = [operator.name, *("x".join(map(str, shape)) for shape in plain.shapes)]
    words += [word for item in plain.attrs.items() for word in ("--attr", "=".join(map(str, item)))]
    if "fp16" not in operator.types.allowed:
        words += ["--dtype", operator.types.allowed[0]]
    return f"e.g. op {shlex.join([*words, '--chip', chip or 'Ascend910A'])}"


def _timing(name: str, timeline: KernelTimeline) -> list[str]:
    """Return the lines that `op` prints: times, bytes, and how busy each pipe is."""
    busy = ", ".join(f"{pipe} {share:.1%}" for pipe, share in timeline.busy.items())
    phases = len(timeline.phases)
    # A kernel started by the host pays for the whole launch, one in the device's queue for little.
    by_host = timeline.start == "cold"
    with_launch = ""
    if by_host:
        with_launch = f", {timeline.time_s * 1e6:.2f} us with a launch by the host"
    of_what = "of the time with the launch" if by_host else "of the time on the device"
    return [
        f"{name} on {timeline.core_count} cores of {timeline.chip.name} (model result)",
        (
            f"  {timeline.task_s * 1e6:.2f} us on the device{with_launch}; "
            f"{timeline.cycles} cycles in {phases} {'phases' if phases > 1 else 'phase'}, "
            f"bound by {timeline.bound_by}"
        ),
        f"  {timeline.memory_bytes} bytes cross the memory interface (what stays in L2 does not)",
        f"  busy, {of_what}: {busy}",
    ]


def _list_operators(arguments: argparse.Namespace) -> int:
    """Print every operator of the library with the names of its inputs."""
    from ascend_lab.operators import ops

    refuse_idle(arguments, "with an operator's name", *_OF_OPERATORS)
    lines = [f"{name:<20} {', '.join(op.inputs)}" for name, op in ops.OPERATORS.items()]
    emit(arguments.json, {n: list(o.inputs) for n, o in ops.OPERATORS.items()}, lines)
    return 0


_OF_OPERATORS = (
    *("--chip", "--dtype", "--attr", "--show", "--warm-l2"),
    *("--tile", "--step-k", "--grid", "--like"),
)


def _own_tiling(
    arguments: argparse.Namespace, chip: Any, shapes: Sequence[Any], formats: Any, attrs: Any
) -> Any:
    """Return the tiling of --like, or of --tile, --step-k and --grid; None without these flags."""
    from ascend_lab.compiler.like_cann import tiling_of_operator
    from ascend_lab.operators import kernels, ops

    if (arguments.tile, arguments.step_k, arguments.grid, arguments.like) == (None, None, None, ""):
        return None
    if arguments.name != "matmul":
        needed = "matmul for --tile, --step-k, --grid and --like"
        raise InputError(needed, arguments.name, "drop them: other operators have no such tiling")
    # Wrong shapes are reported as such, not as a tiling that does not fit them.
    ops.check("matmul", shapes, formats, chip, **attrs)
    if arguments.like:
        refuse_idle(arguments, "without --like", "--tile", "--step-k", "--grid")
        return tiling_of_operator(shapes, formats, chip, attrs)
    # A stored K x M with trans_a is an M x K to the kernel.
    rows, columns = (
        shape[::-1] if attrs.get(name) else shape
        for shape, name in zip(shapes, ("trans_a", "trans_b"), strict=True)
    )
    shape = kernels.GemmShape(rows[0], rows[1], columns[1], formats[0])
    tiling = _tiled(arguments, chip, shape)
    kernels.check_schedule(shape, tiling, chip)
    return tiling


def _shape(text: str) -> tuple[int, ...]:
    """Return the sizes of "4096x1024"; raise `InputError` for other texts."""
    shape = wholes_of(text.lower(), "x")
    if not shape:
        raise InputError("a shape such as 4096x1024", shown(text), "join sizes with x")
    return shape


def _attributes(texts: Sequence[str]) -> dict[str, Any]:
    """Return the attributes of KEY=VALUE texts, values as Python reads them, or else as texts."""
    attributes: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InputError("--attr KEY=VALUE", shown(text), "e.g. --attr axis=-1")
        if key in attributes:
            raise InputError(f"--attr {key} once", f"again {shown(text)}", "keep one")
        try:
            attributes[key] = ast.literal_eval(value)  # reads literals, runs nothing
        # TypeError: a key that cannot be hashed, {[]: 1}; RecursionError: thousands of brackets
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            attributes[key] = value
    return attributes


# -- verbs --------------------------------------------------------------------------------------
def _chips(arguments: argparse.Namespace) -> int:
    """List the chips, or show every number of one with its source."""
    from ascend_lab.machine.chip import model, presets

    if arguments.name is None:
        chips = presets()
        data: Any = {name: model.chip_dict(chip) for name, chip in chips.items()}
        lines = model.chip_table(chips.values())
    else:
        chip = load_chip(arguments.name)
        data = model.chip_dict(chip)
        lines = model.chip_lines(chip)
    emit(arguments.json, data, lines)
    return 0


def _gemm(arguments: argparse.Namespace) -> int:
    """Time a matrix product."""
    from ascend_lab.operators.kernels import GemmShape

    chip = load_chip(arguments.chip)
    shape = GemmShape(arguments.m, arguments.k, arguments.n, arguments.dtype, arguments.out_dtype)
    title = "gemm m {m}, n {n}, k {k}, {dtype},".format(**vars(arguments))
    return _time(arguments, chip, shape, title)


def _conv(arguments: argparse.Namespace) -> int:
    """Time a convolution."""
    from ascend_lab.operators.kernels import ConvShape

    chip = load_chip(arguments.chip)
    names = ("n", "c", "h", "w", "k", "r", "s", "groups", "dtype", "out_dtype")
    sizes: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    for name in ("stride", "pad", "dilation"):
        text = getattr(arguments, name)
        # `ConvShape` checks how many numbers each may have: here they only have to be numbers.
        sizes[name] = tuple(_numbers(text, ",", text.count(",") + 1, f"--{name} as numbers"))
    return _time(arguments, chip, ConvShape(**sizes), "conv {n}x{c}x{h}x{w}".format(**sizes))


def _run_kernel(arguments: argparse.Namespace) -> int:
    """Run and time a kernel of a user's file; exit code 1 for wrong values or a race."""
    from ascend_lab.machine.sim import write_trace
    from ascend_lab.operators.kernels.run_file import run_kernel_file

    chip = load_chip(arguments.chip)
    sanitize = arguments.sanitize
    report = run_kernel_file(arguments.file, chip, check_sync=sanitize, seed=arguments.seed)
    if arguments.trace:
        write_trace(report.timeline, arguments.trace)
    lines = [*report.text.split("\n"), *map(str, report.findings)]
    if sanitize and not report.findings:
        lines.append("sanitizer: nothing found")
    emit(arguments.json, report.as_dict(), lines)
    return 0 if report.values_ok and not report.findings else 1


# -- helpers ------------------------------------------------------------------------------------
def _numbers(text: str, separator: str, count: int, needed: str) -> list[int]:
    """Return `count` whole numbers of a text such as "128,64,32"; raise `InputError` for others."""
    values = wholes_of(text.lower(), separator)
    if len(values) != count:
        example = separator.join(["128", "64", "32"][:count])
        raise InputError(needed, shown(text), f"give {count} whole numbers such as {example}")
    return list(values)


def _override(schedule: Any, arguments: argparse.Namespace) -> Any:
    """Return a schedule with the fields that --tile, --step-k and --grid state."""
    fields: dict[str, int] = {}
    if arguments.tile is not None:
        m, k, n = _numbers(arguments.tile, ",", 3, "--tile as m,k,n")
        fields |= {"base_m": m, "base_k": k, "base_n": n}
        # The default's tiles of K in L1 were counted for its own tile: larger ones may not fit.
        fields["step_k"] = 1
    if arguments.step_k is not None:
        fields["step_k"] = arguments.step_k
    if arguments.grid is not None:
        rows, cols = _numbers(arguments.grid, "x", 2, "--grid as RxC")
        fields |= {"grid_rows": rows, "grid_cols": cols}
    return replace(schedule, **fields)


def _tiled(arguments: argparse.Namespace, chip: Any, shape: Any) -> Any:
    """Return the schedule that the flags state, or without flags the default one of networks.

    A stated tile is used as it is. If no grid is stated, grids are simulated to find the quickest.
    """
    from ascend_lab.operators.kernels import ConvShape, best_grid, conv_schedule, default_schedule
    from ascend_lab.operators.ops.matmul import default_product

    if (arguments.tile, arguments.step_k, arguments.grid) == (None, None, None):
        rule: Any = conv_schedule if isinstance(shape, ConvShape) else default_product
        return rule(shape, chip)
    rule = conv_schedule if isinstance(shape, ConvShape) else default_schedule
    schedule = _override(rule(shape, chip), arguments)
    return schedule if arguments.grid else best_grid(shape, chip, schedule)


def _timeline(shape: Any, chip: Any, schedule: Any) -> Any:
    """Return the timeline of a product or convolution, with all phases of a product.

    A product whose cores share K has two phases: partial sums, then the sum of these.
    """
    from ascend_lab.machine.sim import DeviceMemory, simulate, simulate_kernel
    from ascend_lab.operators.kernels import ConvShape, conv_launch
    from ascend_lab.operators.ops.matmul import product_kernel

    if isinstance(shape, ConvShape):
        return simulate(conv_launch(shape, chip, schedule), chip)
    kernel = product_kernel(shape, chip, schedule)
    if len(kernel.phases) == 1:
        return simulate(kernel.phases[0], chip)
    return simulate_kernel(kernel, chip, DeviceMemory.of(chip))


def _time(arguments: argparse.Namespace, chip: Any, shape: Any, title: str) -> int:
    """Time a product or convolution, and print its rate as well as the cube's peak."""
    from ascend_lab.machine.sim import write_trace

    schedule = _tiled(arguments, chip, shape)
    timeline = _timeline(shape, chip, schedule)
    if arguments.trace:
        # A trace has one clock: if there are several phases, the first is written.
        write_trace(getattr(timeline, "phases", [timeline])[0], arguments.trace)
    # Results are written by the vector unit's pipe if cube and vector share a core.
    stored = "MTE3" if chip.combined else "FIX"
    pipes = {"cube": "M", "mte1": "MTE1", "mte2": "MTE2", "store": stored}
    busy = {name: timeline.busy.get(pipe, 0.0) for name, pipe in pipes.items()}
    ops_per_s = shape.ops / timeline.time_s
    data = {
        **timeline.summary(),
        "tflops": ops_per_s / 1e12,
        "peak_share": ops_per_s / chip.peak_ops_per_s(shape.dtype),
        "busy": busy,
        "schedule": schedule.as_dict(),
    }
    shares = ", ".join(f"{pipes[name]} {share:.1%}" for name, share in busy.items())
    lines = [
        f"{title} on {timeline.core_count} cores of {chip.name} (model result)",
        (
            f"  {timeline.task_s * 1e6:.2f} us on the device, "
            f"{timeline.time_s * 1e6:.2f} us with a launch by the host; {timeline.cycles} cycles"
        ),
        (
            f"  of the time with the launch: {data['tflops']:.2f} TFLOPS = "
            f"{data['peak_share']:.1%} of the cube peak; busy {shares}"
        ),
        f"  bound by {timeline.bound_by}",
    ]
    fields = ", ".join(f"{name} {value}" for name, value in schedule.as_dict().items())
    lines.append(f"  schedule: {fields}")
    emit(arguments.json, data, lines)
    return 0


def _sizes(**sizes: str) -> tuple[Flag, ...]:
    """Return positional sizes by name, with what each counts."""
    return tuple(flag(n, metavar=n.upper(), type=whole, help=text) for n, text in sizes.items())


_TILES = (
    flag("--tile", metavar="m,k,n", help="base tile of L0, in elements"),
    flag("--step-k", type=count, metavar="S", help="base_k tiles staged in L1 (1 with --tile)"),
    flag("--grid", metavar="RxC", help="cores along m and n (the quickest)"),
)
_TILING = (
    *_TILES,
    flag("--dtype", default="fp16", help="fp16 (default), int8, or bf16 where the chip has it"),
    flag("--out-dtype", default="", help="fp32, int32 or fp16"),
    CHIP,
    JSON,
    TRACE,
)
_TWO = "one number, or down,across"
VERBS = (
    Verb(
        "chips",
        "list the chips, or show one with all its numbers",
        _chips,
        (flag("name", nargs="?", help="a preset name or your own .toml file"), JSON),
    ),
    Verb(
        "gemm",
        "time C = A @ B, A is M x K, B is K x N",
        _gemm,
        _sizes(m="rows of A and C", n="columns of B and C", k="columns of A, rows of B") + _TILING,
        {"epilog": network.PIPES},
    ),
    Verb(
        "conv",
        "time a convolution: batch, channels, image, kernels",
        _conv,
        (
            *_sizes(
                n="images",
                c="channels",
                h="image height",
                w="image width",
                k="kernels (output channels)",
                r="kernel height",
                s="kernel width",
            ),
            flag("--stride", default="1", metavar="S", help=_TWO),
            flag(
                "--pad",
                default="0",
                metavar="P",
                help="one number, rows,columns or top,bottom,left,right",
            ),
            flag("--dilation", default="1", metavar="D", help=_TWO),
            flag("--groups", type=count, default=1, metavar="G", help="of channels (1)"),
            *_TILING,
        ),
        {"epilog": network.PIPES},
    ),
    Verb(
        "op",
        "time an operator of the library; without a name, list them",
        _op,
        (
            flag("name", nargs="?", help="an operator, such as softmax"),
            flag("shapes", nargs="*", help="one shape per input, such as 4096x1024"),
            flag("--chip", help="a preset name or your own .toml file"),
            flag("--dtype", default="fp16", help="number format of the inputs (fp16)"),
            flag(
                "--attr",
                action="append",
                default=[],
                metavar="KEY=VALUE",
                help="e.g. axis=-1; repeatable",
            ),
            flag("--show", action="store_true", help="print the default schedule's loop nests"),
            *_TILES,
            LIKE,
            flag(
                "--warm-l2",
                action="store_true",
                help="operands start in L2, the kernel in the device's queue",
            ),
            JSON,
        ),
        {
            "epilog": "Timed is the operator by itself on rows as they lie; in a network, fusion "
            f"and private layouts may give it another kernel. {network.PIPES}"
        },
    ),
    Verb(
        "run-kernel",
        "execute, check and time a kernel of your own",
        _run_kernel,
        (
            flag(
                "file",
                metavar="FILE.py",
                help="defines kernel(chip), inputs(rng) and reference(inputs)",
            ),
            flag("--sanitize", action="store_true", help="look for races and lost flags"),
            flag("--seed", type=whole, default=0, help="seed of the inputs"),
            CHIP,
            JSON,
            TRACE,
        ),
        {
            "description": "Execute, check and time a kernel. This runs the file's Python code, "
            "with all your rights: give it files that you trust.",
            "epilog": "kernel(chip) returns a program; inputs(rng) arrays by the names of its "
            "tensors, drawn from a NumPy generator; reference(inputs) the outputs that are "
            f"expected, by name. notebooks/my_kernel.py is one to copy. {network.PIPES}",
        },
    ),
    *network.VERBS,
    compare.COMPARE,
    llm.LLM,
    compiling.COMPILE,
    *models.VERBS,
    *solve.VERBS,
    *cluster.VERBS,
    frames.AIPP,
    *serving.VERBS,
    *course.VERBS,
)
