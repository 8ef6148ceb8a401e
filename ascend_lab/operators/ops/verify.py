"""Checks of an operator's values, program, gradient and slices, and the files of its tests.

For example, `check_values(get("relu"), ((129,),), {}, "fp16", chip)` runs the kernel of relu on 129
random numbers and compares them with the reference. A failed check raises `AssertionError` with the
worst element. `make_test` writes a test file for any operator, including one of the reader's own.
"""

import math
import textwrap
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ascend_lab import errors
from ascend_lab.machine import isa, sim
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.operators import dsl as te
from ascend_lab.operators.dsl.tensor import Compute, topological
from ascend_lab.operators.ops.expressions import express, prepare, run
from ascend_lab.operators.ops.formats import (
    Shape,
    Tolerance,
    Tolerances,
    Values,
    format_of,
    is_float,
    numpy_type,
    round_to,
    rounded,
    spacing,
    widen,
)
from ascend_lab.operators.ops.gradients import gradient
from ascend_lab.operators.ops.operator import OPERATORS, Domain, Example, Operator, resolve
from ascend_lab.operators.ops.slicing import Cut, Range, Reduction, combine, cut, take

GRID = 2.0**-9  # spacing of the points at which gradients are checked
WHOLE_SCALE = 10
"""Factor of the domain of integers: for floats in -2 .. 2, integers are in -20 .. 20."""


def sample(
    operator: Operator, shapes: Sequence[Shape], dtype: str, attrs: Any, seed: int = 0
) -> list[Values]:
    """Return random inputs from the operator's domains, with `dtype` as its main format."""
    rng = np.random.default_rng(seed)
    names = operator.names(len(shapes))
    wide = dtype == "fp64"
    main = operator.types.allowed[0] if wide else dtype
    formats = operator.input_types(len(shapes), main, **attrs)
    # gather on a table of 10 rows: {1: 10}, input 1 holds indices below 10.
    limits = operator.index_limits(shapes, attrs)
    arrays = []
    for i, (name, shape, kind) in enumerate(zip(names, shapes, formats, strict=True)):
        if i in limits:
            first_index = -limits[i] if attrs.get("from_end") else 0
            arrays.append(
                rng.integers(first_index, max(limits[i], 1), shape).astype(numpy_type(kind))
            )
        else:
            target = "fp64" if wide and is_float(kind) else kind
            arrays.append(draw(rng, operator.domains.get(name, Domain()), shape, target))
    return arrays


def draw(rng: np.random.Generator, domain: Domain, shape: Shape, dtype: str) -> Values:
    """Return an array of one format with values from a domain."""
    kind = numpy_type(dtype)
    if not is_float(dtype):
        info = np.iinfo(kind)
        # A domain of -300 .. 300 would be -3000 .. 3000: in int8 it is -128 .. 127.
        low = max(int(domain.low * WHOLE_SCALE), info.min)
        high = min(int(domain.high * WHOLE_SCALE), info.max)
        return rng.integers(low, high + 1, shape).astype(kind)
    if domain.distinct:
        # evenly spaced numbers in random order: none occurs twice before rounding
        steps = np.linspace(domain.low, domain.high, int(np.prod(shape)) + 1)[:-1]
        return round_to(rng.permutation(steps).reshape(shape), dtype)
    values = rng.uniform(domain.low, domain.high, shape)
    return round_to(np.rint(values / domain.step) * domain.step if domain.step else values, dtype)


def _as_tuple(outputs: Any) -> tuple[Values, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def check_within(
    operator: Operator, got: Any, expected: Any, tolerances: Tolerances | None = None
) -> None:
    """Raise unless every output is within a tolerance of `expected`, by default the operator's."""
    tolerances = tolerances or operator.tolerances or rounded()
    results = _as_tuple(got)
    references = _as_tuple(expected)
    names = operator.outputs * len(results)
    for name, result, reference in zip(names, results, references, strict=False):
        dtype = format_of(reference)
        if result.shape != reference.shape or result.dtype != reference.dtype:
            raise AssertionError(
                f"{operator.name}: {name} is {result.dtype} {result.shape}, "
                f"the reference {reference.dtype} {reference.shape}"
            )
        tolerance = tolerances[dtype]
        got_values, reference_values = (v.astype(np.float64) for v in (result, reference))
        both_nan = np.isnan(got_values) & np.isnan(reference_values)
        with np.errstate(invalid="ignore"):
            agree = (got_values == reference_values) | both_nan
            deviation = np.where(agree, 0.0, np.abs(got_values - reference_values))
            excess = deviation - tolerance.bound(reference_values, dtype)
        # Not `excess > 0`: that is False for NaN, which must count as too far.
        too_far = ~(excess <= 0)
        if too_far.any():
            worst = np.argmax(np.where(too_far, np.nan_to_num(excess, nan=np.inf), -1))
            index = tuple(int(i) for i in np.unravel_index(worst, too_far.shape))
            got_value = got_values[index]
            reference_value = reference_values[index]
            raise AssertionError(
                f"{operator.name}: {name}{index} = {got_value}, "
                f"reference {reference_value} in {dtype}: "
                f"off by more than {tolerance.ulps:g} ulps + {tolerance.atol:g} "
                f"({tolerance.reason}); {int(too_far.sum())} of {too_far.size} elements"
            )


def check_values(
    operator: Operator, shapes: Sequence[Shape], attrs: Any, dtype: str, chip: Chip, seed: int = 0
) -> None:
    """Raise unless the kernel's values equal the reference's within the tolerance.

    For a reader's own operator without tolerances, the roundings of its expression determine them.
    """
    arrays = sample(operator, shapes, dtype, attrs, seed)
    tolerances = None
    if operator.tolerances is None and operator.name not in LIBRARY:
        tolerances = expression_tolerances(operator, arrays, dtype, attrs)
    got = run(operator, *arrays, chip=chip, **attrs)
    check_within(operator, got, operator.reference(*arrays, **attrs), tolerances)


def check_program(
    operator: Operator, shapes: Sequence[Shape], attrs: Any, dtype: str, chip: Chip, seed: int = 0
) -> None:
    """Raise unless the kernel's program is free of races, bad addresses and deadlocks.

    The kernel must also take time, and no pipe may be busy for longer than that.
    """
    prepared = prepare(operator, *sample(operator, shapes, dtype, attrs, seed), chip=chip, **attrs)
    findings = isa.sanitize(prepared.kernel, chip, filled=prepared.tensors)
    if findings:
        raise AssertionError(f"{operator.name} on {chip.name}: {findings[0]}")
    timeline = sim.simulate_kernel(prepared.kernel, chip)
    if not timeline.cycles > 0 or any(share > 1 for share in timeline.busy.values()):
        raise AssertionError(
            f"{operator.name}: {timeline.cycles} cycles, busy {dict(timeline.busy)}"
        )


# -- tolerances of an operator that declares none --------------------------------------------------
LIBRARY = frozenset(OPERATORS)
"""The operators of the package; what is registered later is a reader's own."""
ROUNDING_OPS = frozenset(
    ("vadd", "vsub", "vmul", "vdiv", "vadds", "vmuls", "vexp", "vln", "vsqrt", "vrsqrt", "vrec")
)
"""Vector operations that round their result; others select a number or change a sign."""


def expression_tolerances(
    operator: Operator, arrays: Sequence[Values], dtype: str, attrs: Any
) -> Tolerances:
    """Return the tolerances that follow from the roundings of an operator's expression.

    Each operation rounds once and a sum of n numbers n times. Each rounding is a unit in the last
    place of the largest input or of the result, as a difference of large numbers keeps their error.
    For example, y = 1.5 x in fp16 with inputs up to 2 may be off by 2 units at 2, which is 0.004; a
    sum of 1,000 numbers by 1,001 units.
    """
    kinds = operator.input_types(len(arrays), dtype, **attrs)
    outputs = express(operator, [a.shape for a in arrays], kinds, **attrs)
    counts: dict[Any, int] = {}
    for tensor in topological(outputs):
        source_count = max((counts[source] for source in tensor.inputs), default=0)
        counts[tensor] = source_count + _roundings(tensor)
    ulps = 1.0 + max(counts[tensor] for tensor in outputs)
    largest = max((float(np.abs(a).max(initial=0.0)) for a in arrays), default=0.0)
    reason = f"{ulps - 1:g} roundings of its expression, and one of the reference"

    def tolerance_of(kind: str) -> Tolerance:
        if not is_float(kind):
            return Tolerance(0.0, 0.0, "whole numbers are exact")
        return Tolerance(ulps, ulps * float(spacing(np.array(largest), kind)), reason)

    return {kind: tolerance_of(kind) for kind in rounded()}


def _roundings(tensor: te.Tensor) -> int:
    """Return the number of roundings of an element in one stage of an expression."""
    body = tensor.body
    if not isinstance(body, Compute):  # an input, or a kernel written by hand
        return 0
    in_sum = math.prod(axis.extent for axis in body.reduce) if body.fold in ("sum", "prod") else 0
    return _longest_path(body.expr) + in_sum


def _longest_path(expr: Any) -> int:
    """Return the number of rounding operations on the longest path through a formula."""
    args = getattr(expr, "args", ())
    own_rounding = 1 if getattr(expr, "op", "") in ROUNDING_OPS else 0
    return own_rounding + max(map(_longest_path, args), default=0)


# -- gradients ------------------------------------------------------------------------------------
def check_gradient(
    operator: Operator, shapes: Sequence[Shape], attrs: Any, seed: int = 0, step: float = 1e-5
) -> int:
    """Raise unless gradients agree with central differences in fp64; return the inputs checked.

    loss = sum(c y); along a random direction d of one input,
    (loss(x + h d) - loss(x - h d)) / 2h must equal sum(gradient d).
    """
    rng = np.random.default_rng(seed + 1)
    arrays = _away_from_kinks(operator, sample(operator, shapes, "fp64", attrs, seed))
    outputs = _as_tuple(operator.reference(*arrays, **attrs))
    # If an operator has named outputs, such as batch norm's running statistics, only the first is
    # part of a loss. The pieces of a split are all parts.
    used_outputs = 1 if len(operator.outputs) > 1 else len(outputs)
    # Random c in loss = sum(c y): with c = 1 errors of opposite signs could cancel, as in softmax,
    # whose outputs always add up to 1.
    weights = [rng.uniform(-1, 1, o.shape) for o in outputs[:used_outputs]]
    unused = (None,) * (len(outputs) - used_outputs)
    grads = gradient(operator, (*weights, *unused), arrays, outputs, **attrs)

    def loss(inputs: Sequence[Values]) -> float:
        values = _as_tuple(operator.reference(*inputs, **attrs))
        return sum(float((w * v).sum()) for w, v in zip(weights, values, strict=False))

    float_inputs = [i for i in range(len(grads)) if arrays[i].dtype == np.float64]
    for i in float_inputs:
        grad = np.zeros(arrays[i].shape) if grads[i] is None else grads[i]
        assert grad is not None
        if grad.shape != arrays[i].shape:
            raise AssertionError(
                f"{operator.name}: gradient {i} is {grad.shape}, the input {arrays[i].shape}"
            )
        # One direction checks all elements at once: two evaluations, not two for each element.
        direction = rng.uniform(-1, 1, arrays[i].shape)
        numeric = _central_difference(loss, arrays, i, step * direction) / (2 * step)
        analytic = float((grad * direction).sum())
        # `not <=` rather than `>`: a NaN on either side must fail.
        if not abs(numeric - analytic) <= 1e-5 * (1 + abs(numeric)):
            raise AssertionError(
                f"{operator.name}: d/d{operator.names(len(arrays))[i]} is {analytic}, "
                f"central differences give {numeric}"
            )
    return len(float_inputs)


def _central_difference(
    loss: Callable[[Sequence[Values]], float], arrays: Sequence[Values], place: int, change: Values
) -> float:
    """Return loss(x + change) - loss(x - change), where x is one of the inputs."""
    # The error falls with the square of the change, where that of one-sided differences falls with
    # the change.
    ahead, behind = (
        loss([*arrays[:place], arrays[place] + sign * change, *arrays[place + 1 :]])
        for sign in (1, -1)
    )
    return ahead - behind


def _away_from_kinks(operator: Operator, arrays: Sequence[Values]) -> list[Values]:
    """Return fp64 inputs moved to separate grids, away from integers, 0 and each other.

    With two inputs the grids are (i + 1/4) 2^-9 and (i + 2/4) 2^-9. So max(x, y) never compares
    equal numbers, and no difference quotient crosses a kink or a jump (of floor, max, ...), where
    it would not approximate the gradient.
    """
    moved_arrays = []
    for i, (name, array) in enumerate(zip(operator.names(len(arrays)), arrays, strict=True)):
        if array.dtype != np.float64 or operator.domains.get(name, Domain()).distinct:
            moved_arrays.append(array)
            continue
        # Of two inputs 0.3 becomes (153 + 1/4) / 512 in the first and (153 + 2/4) / 512 in the
        # second.
        offset = (i + 1) / (len(arrays) + 2)
        moved_arrays.append((np.floor(array / GRID) + offset) * GRID)
    return moved_arrays


# -- slices ---------------------------------------------------------------------------------------
def check_slices(
    operator: Operator, shapes: Sequence[Shape], attrs: Any, dtype: str, seed: int = 0
) -> int:
    """Raise unless pieces cut by the slice rules and computed separately join to the whole.

    Returns the number of axes that were cut into several pieces.
    """
    rng = np.random.default_rng(seed + 2)
    arrays = sample(operator, shapes, dtype, attrs, seed)
    rules = operator.slice_rules(shapes, attrs)
    full_outputs = _as_tuple(operator.reference(*arrays, **attrs))
    if len(rules.axes) != full_outputs[0].ndim:
        raise AssertionError(
            f"{operator.name}: {len(rules.axes)} rules for {full_outputs[0].shape}"
        )
    cuts = 0
    for rule in rules.axes:
        size = full_outputs[0].shape[rule.axis]

        def cut_or_none(piece: Range, axis: int = rule.axis) -> Cut | None:
            try:
                return cut(rules, shapes, attrs, axis, piece)
            except errors.ShapeError:
                return None

        if not rule.splits:
            if cut_or_none((0, size)):
                raise AssertionError(f"{operator.name}: axis {rule.axis} may not be split but was")
            continue
        pieces = _pieces(rng, rule.grain, size, cut_or_none)
        piece_cuts = [cut(rules, shapes, attrs, rule.axis, piece) for piece in pieces]
        parts = [
            _as_tuple(operator.reference(*take(arrays, c.ranges), **c.attrs)) for c in piece_cuts
        ]
        for n, values in enumerate(full_outputs):
            joined = np.concatenate([p[n] for p in parts], axis=rule.joins[n])
            _equal(operator, f"axis {rule.axis} in {pieces}", joined, values)
        cuts += 1 if len(pieces) > 1 else 0
    return cuts + sum(
        _check_reduction(operator, reduction, arrays, attrs, full_outputs[0], rng)
        for reduction in rules.reductions
    )


def _pieces(
    rng: np.random.Generator, grain: int, size: int, cut_or_none: Callable[[Range], Cut | None]
) -> list[Range]:
    """Return up to four random pieces in whole grains.

    There is no cut that would leave a piece with only padding: `cut_or_none` returns None for it.
    """
    # Size 12 in grains of 4: cuts at 4 and 8.
    chosen: list[int] = rng.permutation(np.arange(grain, size, grain))[:3].tolist()
    bounds = [0]
    for high in sorted(chosen):
        if cut_or_none((bounds[-1], high)) and cut_or_none((high, size)):
            bounds.append(high)
    return list(pairwise((*bounds, size)))


def _check_reduction(
    operator: Operator,
    reduction: Reduction,
    arrays: Sequence[Values],
    attrs: Any,
    full_output: Values,
    rng: np.random.Generator,
) -> int:
    """Check that an axis split in two and combined gives the whole; return 1, or 0 for size 1."""
    size = arrays[reduction.sources[0][0]].shape[reduction.sources[0][1]]
    if size < 2:
        return 0
    middle = int(rng.integers(1, size))
    parts = []
    for piece in ((0, middle), (middle, size)):
        ranges: tuple[dict[int, Range], ...] = tuple({} for _ in arrays)
        for index, axis in reduction.sources:
            ranges[index][axis] = piece
        values = operator.reference(*take(arrays, ranges), **attrs)
        parts.append(widen(values) if values.dtype.kind in "iu" else values)
    _equal(operator, f"reduction over {reduction.sources}", combine(reduction, parts), full_output)
    return 1


def _equal(operator: Operator, what: str, got: Values, expected: Values) -> None:
    """Raise unless two arrays agree: exactly, or to fp64 rounding."""
    if got.shape != expected.shape:
        raise AssertionError(f"{operator.name}, {what}: {got.shape} joined, whole {expected.shape}")
    if not np.allclose(got.astype(np.float64), expected.astype(np.float64), 1e-11, 1e-11, True):
        raise AssertionError(f"{operator.name}, {what}: joined pieces differ from the whole")


# -- test files ------------------------------------------------------------------------------------


TEST_CHIPS = ("Ascend310", "Ascend910A", "Ascend910B2")
EDGE_SIZES: tuple[Shape, ...] = (
    (1,),
    (7,),
    (16,),
    (15,),
    (17,),
    (31,),
    (33,),
    (127,),
    (128,),
    (129,),
    (3, 5, 7),
    (2, 1, 33),
)
"""One element, primes, and one off the multiples 16 (lanes), 32 (bytes) and 128 (a repeat)."""

_TEMPLATE = '''"""Tests of the operator {name}.

{summary}

Written by ascend_lab.operators.ops.make_test from the operator's examples.
Add cases of your own below.
"""

import pytest

from ascend_lab.operators import ops
from ascend_lab.machine.chip import load_chip
from ascend_lab.errors import AscendLabError
from ascend_lab.operators.ops import verify
{imports}
OPERATOR = {lookup}
SEED = {seed}

# Input shapes and attributes: size 1, primes, one off multiples of 16, 32 and 128, empty if legal.
CASES = {cases}

# Number formats each chip computes, by the unit that does the work ({unit}).
FORMATS = {formats}

# How far a result may be off, in units in the last place and absolutely:
{tolerances}

BAD_CALLS = {bad}


@pytest.mark.parametrize(("shapes", "attrs"), CASES)
@pytest.mark.parametrize(("chip", "dtype"), FORMATS)
def test_the_kernel_computes_what_the_reference_computes(chip, dtype, shapes, attrs):
    verify.check_values(OPERATOR, shapes, attrs, dtype, load_chip(chip), SEED)


@pytest.mark.parametrize(("shapes", "attrs"), {filled})
@pytest.mark.parametrize(("chip", "dtype"), FORMATS)
def test_the_program_is_sound_and_timed(chip, dtype, shapes, attrs):
    verify.check_program(OPERATOR, shapes, attrs, dtype, load_chip(chip), SEED)


@pytest.mark.parametrize(("shapes", "attrs"), CASES)
def test_shapes_and_formats_are_as_inferred(shapes, attrs):
    for dtype in {dtypes}:
        arrays = verify.sample(OPERATOR, shapes, dtype, attrs, SEED)
        found = OPERATOR.reference(*arrays, **attrs)
        outputs = found if isinstance(found, tuple) else (found,)
        assert tuple(o.shape for o in outputs) == OPERATOR.infer(*shapes, **attrs)
{gradient}

@pytest.mark.parametrize(("shapes", "attrs"), {filled})
def test_pieces_computed_alone_join_to_the_whole(shapes, attrs):
    verify.check_slices(OPERATOR, shapes, attrs, "{slice_dtype}", SEED)


@pytest.mark.parametrize(("shapes", "dtypes", "attrs"), BAD_CALLS)
def test_bad_calls_raise_before_any_work(shapes, dtypes, attrs):
    with pytest.raises(AscendLabError, match="{name}"):
        ops.check(OPERATOR, shapes, dtypes, load_chip("{chip}"), **attrs)
'''
_GRADIENT = """

@pytest.mark.parametrize(("shapes", "attrs"), {cases})
def test_gradients_equal_finite_differences(shapes, attrs):
    assert verify.check_gradient(OPERATOR, shapes, attrs, SEED) > 0
"""


def make_test(
    operator: Operator | str,
    *,
    imports: str = "",
    lookup: str = "",
    chips: tuple[str, ...] = TEST_CHIPS,
    limit: int | None = None,
    seed: int = 0,
) -> str:
    """Return a pytest file for an operator: values, shapes, gradient, slices, bad calls.

    For an operator of your own give the line that makes it available, and the expression that
    names it if it is not registered: `imports="from my_ops import SWISH"`, `lookup="SWISH"`.
    `limit` keeps the first cases only. Raises `InputError` for an operator of your own without its
    import line.
    """
    op = resolve(operator)
    if not imports and op.name not in LIBRARY:
        # The file runs in another process, in which nobody has registered the operator.
        needed = f"{op.name}: the import line of the file that registers it"
        remedy = 'write it to my_ops.py and pass imports="import my_ops"'
        raise errors.InputError(needed, "none", remedy)
    edge_examples = tuple(Example((shape,) * len(op.inputs)) for shape in EDGE_SIZES)
    examples = (op.examples or edge_examples)[:limit]
    has_empty_case = any(0 in shape for e in examples for shape in e.shapes)
    filled = "[case for case in CASES if all(0 not in shape for shape in case[0])]"
    cases = filled if has_empty_case else "CASES"
    first_format = op.types.allowed[0]
    return _TEMPLATE.format(
        name=op.name,
        summary=textwrap.fill(op.summary or "y = f(x)", 96),
        imports=f"{imports}\n" if imports else "",
        lookup=lookup or f'ops.get("{op.name}")',
        seed=seed,
        cases=_literal([(e.shapes, dict(e.attrs)) for e in examples]),
        formats=_literal([(c, d) for c in chips for d in op.types.on_chip(load_chip(c))]),
        unit=op.types.unit,
        tolerances="\n".join(_tolerance_comments(op)),
        bad=_literal(_bad_calls(op, examples[0], chips[0])),
        dtypes=repr(op.types.allowed).replace("'", '"'),
        gradient=_GRADIENT.format(cases=cases) if op.backward else "",
        filled=cases,
        slice_dtype="fp64" if is_float(first_format) else first_format,
        chip=chips[0],
    )


def _tolerance_comments(op: Operator) -> list[str]:
    """Return the comment lines that state the tolerance of each number format."""
    if not op.tolerances and op.name not in LIBRARY:
        return ["# as many as the roundings of its expression; state tolerances= for others"]
    stated = (op.tolerances or rounded()).items()
    return [f"# {dtype}: {b.ulps:g} ulps + {b.atol:g} ({b.reason})" for dtype, b in stated]


def _literal(value: list[Any]) -> str:
    """Return a list as source text, one item a line."""
    lines = "".join(f"    {item!r},\n" for item in value)
    return f"[\n{lines}]".replace("'", '"')


def _bad_calls(operator: Operator, example: Example, chip: str) -> list[Any]:
    """Return calls that must fail: too many inputs, a wrong format, an unknown attribute, ..."""
    shapes = example.shapes
    attrs = dict(example.attrs)
    main = operator.types.on_chip(load_chip(chip))[0]
    dtypes = operator.input_types(len(shapes), main, **attrs)
    wrong_formats = [
        d for d in ("int8", "int32", "fp32", "fp16") if d not in operator.types.allowed
    ]
    calls: list[Any] = [
        (shapes, ((*wrong_formats, "fp64")[0], *dtypes[1:]), attrs),
        (shapes, ("fp8", *dtypes[1:]), attrs),
        (shapes, dtypes, {**attrs, "colour": 1}),
        (((-1,), *shapes[1:]), dtypes, attrs),
        ((), (), attrs),
    ]
    if not operator.variadic:
        calls.append((shapes * 5, dtypes * 5, attrs))
    return calls
