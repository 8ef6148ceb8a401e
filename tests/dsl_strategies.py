"""Random tensor programs with their values, random steps, and what every kernel must be."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from dsl_oracles import (
    BINARY,
    FLOAT_ONLY,
    INT_ONLY,
    INTS,
    POSITIVE,
    SCALAR,
    UNARY,
    Known,
    Values,
    binary,
    broadcast,
    cast,
    compare,
    concat,
    cut,
    fold,
    known,
    layer_norm,
    pad,
    reshape,
    rounding,
    scalar,
    select,
    softmax,
    transpose,
    unary,
)
from hypothesis import strategies as st
from strategies import assert_bounds

from ascend_lab.errors import ScheduleError
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.machine.isa import Kernel, sanitize
from ascend_lab.machine.isa.memory import numpy_type
from ascend_lab.machine.sim import execute, simulate_kernel
from ascend_lab.operators import dsl as te
from ascend_lab.operators.dsl.stages import Stage
from ascend_lab.operators.dsl.tensor import topological

CHIPS = ("Ascend910A", "Ascend910B2")
"""A chip with coupled cores, and one whose cube and vector cores are apart."""
ALL_CHIPS = ("Toy", "Ascend310", "Ascend310P3", *CHIPS)
CHIP_CASES = (*CHIPS, pytest.param("Toy", marks=pytest.mark.full))
SIZES = (1, 2, 3, 5, 7, 13, 15, 16, 17, 31, 32, 33, 37, 67, 127, 128, 129)


@cache
def chip_of(name: str) -> Chip:
    return load_chip(name)


def array(rng: np.random.Generator, shape: Sequence[int], dtype: str, low: float = -2.0) -> Values:
    """Random values of a format; small whole numbers, so that sums of a few stay inside int8."""
    if dtype in INTS:
        lowest = 0 if dtype == "uint8" or low >= 0 else -4
        return rng.integers(lowest, 5, tuple(shape)).astype(numpy_type(dtype))
    return rng.uniform(low, 2.0, tuple(shape)).astype(np.float32).astype(numpy_type(dtype))


@st.composite
def shapes(
    draw: st.DrawFn,
    least: int = 1,
    most: int = 4,
    limit: int = 1500,
    choices: Sequence[int] = SIZES,
) -> tuple[int, ...]:
    """A shape of at most `limit` elements; odd sizes preferred."""
    sizes = draw(st.lists(st.sampled_from(choices), min_size=least, max_size=most))
    while math.prod(sizes) > limit:
        largest = sizes.index(max(sizes))
        sizes[largest] = choices[choices.index(sizes[largest]) // 2]
    return tuple(sizes)


# -- what every kernel must be ---------------------------------------------------------------------
def verify(
    outputs: Sequence[Known],
    arrays: dict[str, Values],
    schedule: te.Schedule,
    *,
    whole: bool = True,
) -> Kernel:
    """Lower and execute a schedule; values, flags and time must be right. Return the kernel.

    `whole`: the program needs every element of its inputs, so memory bounds its time.
    """
    kernel = te.lower(schedule)
    assert_values(outputs, arrays, kernel, schedule.chip)
    assert sanitize(kernel, schedule.chip) == []
    if whole:
        cycles = simulate_kernel(kernel, schedule.chip).cycles
        assert least_cycles(outputs, schedule.chip) <= cycles
    return kernel


def assert_values(
    outputs: Sequence[Known], arrays: dict[str, Values], kernel: Kernel, chip: Chip
) -> None:
    """Every output is within the slack of its oracle, element by element."""
    names = {t.name for t in kernel.tensors}
    got = execute(kernel, {n: a for n, a in arrays.items() if n in names}, chip)
    for out in outputs:
        found = got[out.tensor.label].reshape(out.shape)
        assert found.dtype == out.value.dtype
        assert_close(found, out)


def assert_close(found: Values, out: Known) -> None:
    """|found - value| <= slack; infinities and NaN in the same places."""
    have = found.astype(np.float64)
    want = out.value.astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (have == want) | (np.isnan(have) & np.isnan(want))
        good = same | (np.abs(have - want) <= out.slack)
    if not np.all(good):
        at = tuple(int(i) for i in np.argwhere(~good)[0])
        raise AssertionError(
            f"{out.tensor.label}{out.shape} {out.dtype}: {np.count_nonzero(~good)} wrong, first at "
            f"{at}: {have[at]!r}, not {want[at]!r} +- {out.slack[at]:.3g}"
        )


def check_auto(
    outputs: Sequence[Known],
    arrays: dict[str, Values],
    chip_name: str,
    *,
    whole: bool = True,
    cores: int = 99,
) -> Kernel:
    """The default schedule of these outputs is right on a chip, or on some of its cores."""
    chip = chip_of(chip_name)
    chip = replace(chip, core_count=min(cores, chip.core_count))
    schedule = te.auto_schedule([o.tensor for o in outputs], chip)
    return verify(outputs, arrays, schedule, whole=whole)


def assert_time(kernel: Kernel, chip: Chip) -> None:
    """Both engines agree on every pipe; phases are within their bounds and add up."""
    timeline = simulate_kernel(kernel, chip)
    plain = simulate_kernel(kernel, chip, engine="reference")
    assert timeline.cycles == plain.cycles
    assert [p.pipe_cycles for p in timeline.phases] == [p.pipe_cycles for p in plain.phases]
    waits = (len(kernel.phases) - 1) * chip.all_cores_cycles
    assert timeline.cycles == sum(p.cycles for p in timeline.phases) + waits
    for phase in timeline.phases:
        assert_bounds(phase)


def least_cycles(outputs: Sequence[Known], chip: Chip) -> float:
    """Roofline from the expression alone: every input is read from memory once.

    (Outputs may stay in L2, which the model writes back only where they do not fit.)
    """
    tensors = [o.tensor for o in outputs]
    inputs = {t for t in topological(tensors) if t.body is None}
    size = sum(t.size_bytes for t in inputs)
    return size / chip.device_memory.rate_bytes_per_s * chip.clock_hz


# -- random tensor programs ------------------------------------------------------------------------
class Program:
    """Outputs and inputs of a random program; prints as the reader of a failed test wants it."""

    def __init__(self, outputs: list[Known], arrays: dict[str, Values]) -> None:
        self.outputs = outputs
        self.arrays = arrays

    def __repr__(self) -> str:
        state = te.create_schedule([o.tensor for o in self.outputs], chip_of("Toy")).state
        inputs = [f"{i.name}{i.shape} {i.dtype}" for i in state.inputs]
        lines = [
            f"{s.name}{s.shape} = {getattr(s, 'fold', s)} {getattr(s, 'expr', '')}"
            for s in state.stages
        ]
        return "\n".join([*inputs, *lines, f"outputs {[o.tensor.label for o in self.outputs]}"])


ELEMENTWISE = ("binary", "binary", "unary", "scalar", "choose")
FUSABLE = (*ELEMENTWISE, "fold", "softmax", "norm", "cast")
ANYTHING = (*FUSABLE, "move", "move")


class _Writer:
    """Grows a program by one random step after another."""

    def __init__(self, draw: st.DrawFn, limit: int) -> None:
        self.draw = draw
        self.limit = limit
        self.rng = np.random.default_rng(draw(st.integers(0, 2**16)))
        self.arrays: dict[str, Values] = {}
        self.pool: list[Known] = []

    def pick(self, choices: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(tuple(choices)))

    def input(self, shape: Sequence[int], dtype: str) -> Known:
        name = f"x{len(self.arrays)}"
        self.arrays[name] = array(self.rng, shape, dtype)
        self.pool.append(known(self.arrays[name], dtype, name))
        return self.pool[-1]

    def value(self) -> Known:
        """A value of the pool; the latest ones are likelier."""
        back = self.draw(st.integers(0, min(len(self.pool), 4) - 1))
        return self.pool[-1 - back]

    def mate(self, a: Known) -> tuple[Known, Known]:
        """`a` and another value of its format, both stretched to their common shape."""
        fits = [b for b in self.pool if b.dtype == a.dtype and self._together(a, b)]
        if self.pick((True, True, False)) and fits:
            b = self.pick(fits)
        else:
            keep = self.draw(st.integers(1, len(a.shape)))
            shape = tuple(self.pick((n, n, 1)) for n in a.shape[len(a.shape) - keep :])
            b = self.input(shape, a.dtype)
        both = np.broadcast_shapes(a.shape, b.shape)
        return self.stretched(a, both), self.stretched(b, both)

    def _together(self, a: Known, b: Known) -> bool:
        try:
            return math.prod(np.broadcast_shapes(a.shape, b.shape)) <= self.limit
        except ValueError:
            return False

    def stretched(self, a: Known, shape: tuple[int, ...]) -> Known:
        return a if a.shape == shape else broadcast(a, shape)

    def positive(self, a: Known) -> Known:
        return scalar("vadds", unary("vabs", a), 0.5)

    def step(self, kind: str) -> Known:
        result: Known = getattr(self, f"_{kind}")(self.value())
        return result

    def _binary(self, a: Known) -> Known:
        ops = [o for o in BINARY if o not in (FLOAT_ONLY if a.dtype in INTS else INT_ONLY)]
        op = self.pick(ops)
        a, b = self.mate(a)
        return binary(op, a, self.positive(b) if op == "vdiv" else b)

    def _unary(self, a: Known) -> Known:
        ops = [o for o in UNARY if o not in (FLOAT_ONLY if a.dtype in INTS else INT_ONLY)]
        op = self.pick(ops)
        return unary(op, self.positive(a) if op in POSITIVE else a)

    def _scalar(self, a: Known) -> Known:
        whole = (1, 2, 3) if a.dtype == "uint8" else (-2, 1, 2)
        number = self.pick(whole if a.dtype in INTS else (-1.5, 0.3, 2.0))
        return scalar(self.pick(SCALAR), a, number)

    def _choose(self, a: Known) -> Known:
        a, b = self.mate(a)
        condition = compare(a, b, self.pick(("gt", "ge", "lt", "le", "eq", "ne")))
        return select(condition, *self.pick(((a, b), (b, a))))

    def _axes(self, a: Known) -> tuple[int, ...]:
        chosen = self.draw(st.sets(st.integers(0, len(a.shape) - 1), min_size=1))
        return tuple(sorted(chosen))

    def _fold(self, a: Known) -> Known:
        kind = self.pick(("sum", "sum", "max", "min", "prod"))
        return fold(kind, a, self._axes(a), keepdims=self.pick((True, False)))

    def _softmax(self, a: Known) -> Known:
        if a.dtype in INTS:
            return self._fold(a)
        return softmax(a, self.draw(st.integers(-len(a.shape), len(a.shape) - 1)))

    def _norm(self, a: Known) -> Known:
        if a.dtype in INTS:
            return self._fold(a)
        axes = self._axes(a)
        sizes = tuple(n if d in axes else 1 for d, n in enumerate(a.shape))
        return layer_norm(a, axes, self.input(sizes, a.dtype), self.input(sizes, a.dtype))

    def _cast(self, a: Known) -> Known:
        if a.dtype not in INTS and self.pick((True, False, False)):
            return rounding(self.pick(("floor", "ceil", "round")), a)
        return cast(a, self.pick([d for d in ("fp16", "fp32", "int32") if d != a.dtype]))

    def _move(self, a: Known) -> Known:
        return getattr(self, self.pick(("_turn", "_reshape", "_cut", "_join", "_pad")))(a)

    def _turn(self, a: Known) -> Known:
        return transpose(a, self.draw(st.permutations(range(len(a.shape)))))

    def _reshape(self, a: Known) -> Known:
        total = math.prod(a.shape)
        first = self.pick((1, 2, 3, 7, 16))
        shapes = [(total,), (-1,), (1, *a.shape), (*a.shape, 1)]
        shapes += [(first, total // first)] if total % first == 0 else []
        return reshape(a, self.pick(shapes))

    def _cut(self, a: Known) -> Known:
        begin = [self.draw(st.integers(-n, n - 1)) for n in a.shape]
        low = [b % n for b, n in zip(begin, a.shape, strict=True)]
        end = [self.draw(st.integers(b + 1, n + 3)) for b, n in zip(low, a.shape, strict=True)]
        step = [self.pick((1, 1, 2, 3)) for _ in a.shape]
        if a.dtype == "int8":  # no chip moves single bytes
            step[-1] = 1
        return cut(a, begin, end, step)

    def _join(self, a: Known) -> Known:
        axis = self.draw(st.integers(-len(a.shape), len(a.shape) - 1))
        shape = list(a.shape)
        shape[axis] = self.pick((1, 3, 16, 17, shape[axis]))
        return concat(self.pick(((a, a), (a, self.input(shape, a.dtype), a))), axis)

    def _pad(self, a: Known) -> Known:
        widths = [(self.pick((0, 1, 3)), self.pick((0, 2, 16))) for _ in a.shape]
        return pad(a, widths, self.pick((0.0, 1.0, -3.0)))


def tame(a: Known, limit: int) -> bool:
    """True for results of a sensible size, exactness and range."""
    values = np.abs(a.value.astype(np.float64))
    if a.value.size > limit or not np.all(np.isfinite(values)):
        return False
    if a.dtype in ("int8", "uint8"):
        return bool(np.max(values) <= 30)
    return bool(np.max(values) <= 500.0 and np.max(a.slack) <= 0.05 * (1.0 + np.max(values)))


@st.composite
def programs(
    draw: st.DrawFn,
    *,
    kinds: Sequence[str] = FUSABLE,
    dtypes: Sequence[str] = ("fp16", "fp32", "int32"),
    most: int = 6,
    limit: int = 1500,
    sizes: Sequence[int] = SIZES,
) -> Program:
    """A random program: chains with shared values, broadcasts, folds; one to three outputs."""
    writer = _Writer(draw, limit)
    writer.input(draw(shapes(limit=limit, choices=sizes)), draw(st.sampled_from(tuple(dtypes))))
    results: list[Known] = []
    outputs: dict[str, Known] = {}
    for _ in range(draw(st.integers(1, most))):
        before = list(writer.pool)
        inputs = dict(writer.arrays)
        value = writer.step(draw(st.sampled_from(tuple(kinds))))
        if not tame(value, limit) or value.tensor.body is None or _is_known(value, writer.pool):
            writer.pool = before
            writer.arrays = inputs
            continue
        if draw(st.integers(0, 3)) == 0 and len(outputs) < 2:
            value = value.named(f"y{len(outputs)}")
            outputs[value.tensor.name] = value
        writer.pool.append(value)
        results.append(value)
    if not results:
        results.append(unary("vabs", writer.pool[0]))
    if results[-1].tensor.name not in outputs:
        last = results[-1].named(f"y{len(outputs)}")
        outputs[last.tensor.name] = last
    return Program(list(outputs.values()), writer.arrays)


def _is_known(value: Known, pool: Sequence[Known]) -> bool:
    """True where an operation that changes nothing returned its operand."""
    return any(value.tensor is p.tensor for p in pool)


# -- random schedules ------------------------------------------------------------------------------

PRIMITIVES = (
    *("split", "split", "split", "reorder", "reorder", "fuse", "compute_at", "compute_at"),
    *("cache_read", "cache_write", "inline", "double_buffer", "bind", "vectorise"),
    *("storage_align", "rfactor", "materialise"),
)
FACTORS = (1, 2, 3, 4, 5, 8, 16)
WHOLE_BLOCKS = (16, 16, 32, 32, 48, 64, 3)
"""Factors for the last axis: tiles in UB begin at whole blocks (a 3 now and then is refused)."""


def candidate(draw: st.DrawFn, s: te.Schedule) -> tuple[Any, ...]:
    """A primitive with arguments that look sensible for this schedule; many are illegal."""

    def pick(choices: Sequence[Any]) -> Any:
        return draw(st.sampled_from(tuple(choices)))

    stages = [x for x in s.state.stages if isinstance(x, Stage)]
    stage = pick(stages)
    name = stage.name
    loops = [x.name for x in stage.loops]
    loop = pick(loops)
    few = [x.name for x in stage.loops if x.extent <= s.chip.core_count]
    at = draw(st.integers(0, len(loops) - 1))
    host = pick([x for x in stages if name in x.sources] or stages)
    factors = (
        WHOLE_BLOCKS if stage.loops[loops.index(loop)].root == stage.axes[-1].name else FACTORS
    )
    outer = [x.name for x in host.loops if x.root != host.axes[-1].name or x.width > 8]
    inside = pick(outer or [host.loops[-1].name])
    everything = [x.name for x in (*s.state.inputs, *stages)]
    choices: dict[str, tuple[Any, ...]] = {
        "split": (te.split, name, loop, pick(factors), pick(("cut", "cut", "guard"))),
        "reorder": (te.reorder, name, *draw(st.permutations(loops))[: at + 1]),
        "fuse": (te.fuse, name, loops[at], loops[min(at + 1, len(loops) - 1)]),
        "cache_read": (te.cache_read, pick(everything), "UB"),
        "cache_write": (te.cache_write, name, "UB"),
        "compute_at": (te.compute_at, name, host.name, inside),
        "double_buffer": (te.double_buffer, name, pick((1, 2, 2, 3))),
        "storage_align": (te.storage_align, name, pick((8, 16, 32, 64))),
        "inline": (te.inline, name),
        "materialise": (te.materialise, name, pick((0, 0, 1))),
        "bind": (te.bind, name, pick(few)) if few else (te.inline, name),
        "vectorise": (te.vectorise, name, loop),
        "rfactor": (te.rfactor, name, loop),
    }
    return choices[pick(PRIMITIVES)]


def applied(s: te.Schedule, step: tuple[Any, ...]) -> te.Schedule:
    """The schedule with a candidate step, or unchanged where it is illegal."""
    function, *arguments = step
    try:
        if function is te.split:
            return te.split(s, *arguments[:3], tail=arguments[3])
        result: te.Schedule = function(s, *arguments)
    except ScheduleError:
        return s
    return result


class Scheduled:
    """A program and one of its schedules; prints both."""

    def __init__(self, program: Program, schedule: te.Schedule) -> None:
        self.program = program
        self.schedule = schedule

    def __repr__(self) -> str:
        return f"{self.program}\n{self.schedule}"


@st.composite
def schedules(
    draw: st.DrawFn, programs: Sequence[Any], most: int = 14, chips: Sequence[str] = CHIPS
) -> Scheduled:
    """One of the programs with a random sequence of legal steps, on one of the chips."""
    program: Program = draw(st.sampled_from(tuple(programs)))()
    chip = chip_of(draw(st.sampled_from(tuple(chips))))
    s = te.create_schedule([o.tensor for o in program.outputs], chip)
    for _ in range(draw(st.integers(4, most))):
        s = applied(s, candidate(draw, s))
    return Scheduled(program, s)
