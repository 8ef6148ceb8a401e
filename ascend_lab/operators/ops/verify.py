"""Test tools for operators: values within bounds, gradients, slices; and `make_test`, a test file.

Failures raise `AssertionError` with the worst element. A generated file calls these functions, for
any operator, the reader's own included.
"""

import textwrap
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ascend_lab import errors
from ascend_lab.machine import isa, sim
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.operators.ops.expressions import prepare, run
from ascend_lab.operators.ops.formats import (
    Shape,
    Values,
    format_of,
    is_float,
    numpy_type,
    round_to,
    widen,
)
from ascend_lab.operators.ops.gradients import gradient
from ascend_lab.operators.ops.operator import OPERATORS, Domain, Example, Operator, resolve
from ascend_lab.operators.ops.slicing import Cut, Range, Reduction, combine, cut, take

GRID = 2.0**-9
WHOLE_SCALE = 10
"""Whole numbers are drawn from a domain this many times wider than the floats'."""


def sample(
    operator: Operator, shapes: Sequence[Shape], dtype: str, attrs: Any, seed: int = 0
) -> list[Values]:
    """Return random inputs: the operator's main format `dtype`, values from its domains."""
    rng = np.random.default_rng(seed)
    names = operator.names(len(shapes))
    wide = dtype == "fp64"
    main = operator.types.allowed[0] if wide else dtype
    formats = operator.input_types(len(shapes), main, **attrs)
    limits = operator.index_limits(shapes, attrs)
    arrays = []
    for i, (name, shape, kind) in enumerate(zip(names, shapes, formats, strict=True)):
        if i in limits:
            least = -limits[i] if attrs.get("from_end") else 0
            arrays.append(rng.integers(least, max(limits[i], 1), shape).astype(numpy_type(kind)))
        else:
            target = "fp64" if wide and is_float(kind) else kind
            arrays.append(draw(rng, operator.domains.get(name, Domain()), shape, target))
    return arrays


def draw(rng: np.random.Generator, domain: Domain, shape: Shape, dtype: str) -> Values:
    """Return an array of one format with values from a domain."""
    kind = numpy_type(dtype)
    if not is_float(dtype):
        info = np.iinfo(kind)
        low = max(int(domain.low * WHOLE_SCALE), info.min)
        high = min(int(domain.high * WHOLE_SCALE), info.max)
        return rng.integers(low, high + 1, shape).astype(kind)
    if domain.distinct:
        steps = np.linspace(domain.low, domain.high, int(np.prod(shape)) + 1)[:-1]
        return round_to(rng.permutation(steps).reshape(shape), dtype)
    values = rng.uniform(domain.low, domain.high, shape)
    return round_to(np.rint(values / domain.step) * domain.step if domain.step else values, dtype)


def _many(outputs: Any) -> tuple[Values, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def check_within(operator: Operator, got: Any, wanted: Any) -> None:
    """Raise unless every output is within the operator's tolerance of the reference's."""
    results = _many(got)
    references = _many(wanted)
    names = operator.outputs * len(results)
    for name, ours, theirs in zip(names, results, references, strict=False):
        dtype = format_of(theirs)
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise AssertionError(
                f"{operator.name}: {name} is {ours.dtype} {ours.shape}, "
                f"the reference {theirs.dtype} {theirs.shape}"
            )
        tolerance = operator.tolerances[dtype]
        left, right = (v.astype(np.float64) for v in (ours, theirs))
        with np.errstate(invalid="ignore"):
            same = (left == right) | (np.isnan(left) & np.isnan(right))
            excess = np.where(same, 0.0, np.abs(left - right)) - tolerance.bound(right, dtype)
        bad = ~(excess <= 0)
        if bad.any():
            worst = np.argmax(np.where(bad, np.nan_to_num(excess, nan=np.inf), -1))
            at = tuple(int(i) for i in np.unravel_index(worst, bad.shape))
            raise AssertionError(
                f"{operator.name}: {name}{at} = {left[at]}, reference {right[at]} in {dtype}: "
                f"off by more than {tolerance.ulps:g} ulps + {tolerance.atol:g} "
                f"({tolerance.reason}); {int(bad.sum())} of {bad.size} elements"
            )


def check_values(
    operator: Operator, shapes: Sequence[Shape], attrs: Any, dtype: str, chip: Chip, seed: int = 0
) -> None:
    """Raise unless the kernel's values equal the reference's within the tolerance."""
    arrays = sample(operator, shapes, dtype, attrs, seed)
    check_within(
        operator, run(operator, *arrays, chip=chip, **attrs), operator.reference(*arrays, **attrs)
    )


def check_program(
    operator: Operator, shapes: Sequence[Shape], attrs: Any, dtype: str, chip: Chip, seed: int = 0
) -> None:
    """Raise unless the kernel's program is free of races, bad addresses and deadlocks, and timed.

    No pipe may be busy for longer than the whole kernel takes.
    """
    ready = prepare(operator, *sample(operator, shapes, dtype, attrs, seed), chip=chip, **attrs)
    findings = isa.sanitize(ready.kernel, chip, filled=ready.tensors)
    if findings:
        raise AssertionError(f"{operator.name} on {chip.name}: {findings[0]}")
    line = sim.simulate_kernel(ready.kernel, chip)
    if not line.cycles > 0 or any(share > 1 for share in line.busy.values()):
        raise AssertionError(f"{operator.name}: {line.cycles} cycles, busy {dict(line.busy)}")


# -- gradients ------------------------------------------------------------------------------------
def check_gradient(
    operator: Operator, shapes: Sequence[Shape], attrs: Any, seed: int = 0, step: float = 1e-5
) -> int:
    """Raise unless the gradient agrees with central differences in fp64; return inputs checked.

    loss = sum(c y); along a random direction d of one input,
    (loss(x + h d) - loss(x - h d)) / 2h must equal sum(gradient d).
    """
    rng = np.random.default_rng(seed + 1)
    arrays = _off_kinks(operator, sample(operator, shapes, "fp64", attrs, seed))
    outputs = _many(operator.reference(*arrays, **attrs))
    # of outputs with names of their own only the first is part of a loss
    seen = 1 if len(operator.outputs) > 1 else len(outputs)
    weights = [rng.uniform(-1, 1, o.shape) for o in outputs[:seen]]
    grads = gradient(
        operator, (*weights, *(None,) * (len(outputs) - seen)), arrays, outputs, **attrs
    )
    checked = 0
    for i, found in enumerate(grads):
        if arrays[i].dtype != np.float64:
            continue
        grad = np.zeros(arrays[i].shape) if found is None else found
        if grad.shape != arrays[i].shape:
            raise AssertionError(
                f"{operator.name}: gradient {i} is {grad.shape}, the input {arrays[i].shape}"
            )
        direction = rng.uniform(-1, 1, arrays[i].shape)
        sides = []
        for sign in (1, -1):
            moved = [a + sign * step * direction if n == i else a for n, a in enumerate(arrays)]
            values = _many(operator.reference(*moved, **attrs))
            sides.append(sum(float((w * v).sum()) for w, v in zip(weights, values, strict=False)))
        numeric = (sides[0] - sides[1]) / (2 * step)
        exact = float((grad * direction).sum())
        if not abs(numeric - exact) <= 1e-5 * (1 + abs(numeric)):
            raise AssertionError(
                f"{operator.name}: d/d{operator.names(len(arrays))[i]} is {exact}, "
                f"central differences give {numeric}"
            )
        checked += 1
    return checked


def _off_kinks(operator: Operator, arrays: Sequence[Values]) -> list[Values]:
    """Move fp64 inputs onto grids of their own, away from whole numbers, 0 and each other.

    Differences across a kink or jump (of floor, max, ...) would say nothing about a gradient.
    """
    out = []
    for i, (name, array) in enumerate(zip(operator.names(len(arrays)), arrays, strict=True)):
        if array.dtype == np.float64 and not operator.domains.get(name, Domain()).distinct:
            array = (np.floor(array / GRID) + (i + 1) / (len(arrays) + 2)) * GRID  # noqa: PLW2901
        out.append(array)
    return out


# -- slices ---------------------------------------------------------------------------------------
def check_slices(
    operator: Operator, shapes: Sequence[Shape], attrs: Any, dtype: str, seed: int = 0
) -> int:
    """Raise unless pieces cut by the slice rules, computed alone and joined, equal the whole.

    Returns how many axes were really cut into several pieces.
    """
    rng = np.random.default_rng(seed + 2)
    arrays = sample(operator, shapes, dtype, attrs, seed)
    rules = operator.slice_rules(shapes, attrs)
    whole = _many(operator.reference(*arrays, **attrs))
    if len(rules.axes) != whole[0].ndim:
        raise AssertionError(f"{operator.name}: {len(rules.axes)} rules for {whole[0].shape}")
    cuts = 0
    for rule in rules.axes:
        size = whole[0].shape[rule.axis]

        def part(piece: Range, axis: int = rule.axis) -> Cut | None:
            try:
                return cut(rules, shapes, attrs, axis, piece)
            except errors.ShapeError:
                return None

        if not rule.splits:
            if part((0, size)):
                raise AssertionError(f"{operator.name}: axis {rule.axis} may not be split but was")
            continue
        pieces = _pieces(rng, rule.grain, size, part)
        found = [cut(rules, shapes, attrs, rule.axis, piece) for piece in pieces]
        parts = [_many(operator.reference(*take(arrays, c.ranges), **c.attrs)) for c in found]
        for n, values in enumerate(whole):
            joined = np.concatenate([p[n] for p in parts], axis=rule.joins[n])
            _equal(operator, f"axis {rule.axis} in {pieces}", joined, values)
        cuts += len(pieces) > 1
    return cuts + sum(
        _folds(operator, way, arrays, attrs, whole[0], rng) for way in rules.reductions
    )


def _pieces(
    rng: np.random.Generator, grain: int, size: int, part: Callable[[Range], Cut | None]
) -> list[Range]:
    """Return up to four random pieces in whole grains; a piece of padding only is joined up."""
    chosen: list[int] = rng.permutation(np.arange(grain, size, grain))[:3].tolist()
    kept = [0]
    for high in sorted(chosen):
        if part((kept[-1], high)) and part((high, size)):
            kept.append(high)
    return list(pairwise((*kept, size)))


def _folds(
    operator: Operator,
    reduction: Reduction,
    arrays: Sequence[Values],
    attrs: Any,
    whole: Values,
    rng: np.random.Generator,
) -> int:
    """Split a reduction axis in two and combine the partial outputs; return 1 if it was."""
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
    _equal(operator, f"reduction over {reduction.sources}", combine(reduction, parts), whole)
    return 1


def _equal(operator: Operator, what: str, got: Values, wanted: Values) -> None:
    """Raise unless two arrays agree: exactly, or to fp64 rounding."""
    if got.shape != wanted.shape:
        raise AssertionError(f"{operator.name}, {what}: {got.shape} joined, whole {wanted.shape}")
    if not np.allclose(got.astype(np.float64), wanted.astype(np.float64), 1e-11, 1e-11, True):
        raise AssertionError(f"{operator.name}, {what}: joined pieces differ from the whole")


# `make_test`: write the test file of any operator, the reader's own included.


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
    `limit` keeps the first cases only. Raises `InputError` if the file could not find it.
    """
    op = resolve(operator)
    if not lookup and op.name not in OPERATORS and not imports:
        what = f"{op.name}: a registered operator, or the import line of its module"
        remedy = 'pass imports="from my_ops import NAME", lookup="NAME"'
        raise errors.InputError(what, "neither", remedy)
    every = tuple(Example((shape,) * len(op.inputs)) for shape in EDGE_SIZES)
    examples = (op.examples or every)[:limit]
    some_empty = any(0 in shape for e in examples for shape in e.shapes)
    filled = "[case for case in CASES if all(0 not in shape for shape in case[0])]"
    cases = filled if some_empty else "CASES"
    first = op.types.allowed[0]
    found = op.tolerances.items()
    bounds = [f"# {dtype}: {b.ulps:g} ulps + {b.atol:g} ({b.reason})" for dtype, b in found]
    return _TEMPLATE.format(
        name=op.name,
        summary=textwrap.fill(op.summary or "y = f(x)", 96),
        imports=f"{imports}\n" if imports else "",
        lookup=lookup or f'ops.get("{op.name}")',
        seed=seed,
        cases=_literal([(e.shapes, dict(e.attrs)) for e in examples]),
        formats=_literal([(c, d) for c in chips for d in op.types.on_chip(load_chip(c))]),
        unit=op.types.unit,
        tolerances="\n".join(bounds),
        bad=_literal(_bad_calls(op, examples[0], chips[0])),
        dtypes=repr(op.types.allowed).replace("'", '"'),
        gradient=_GRADIENT.format(cases=cases) if op.backward else "",
        filled=cases,
        slice_dtype="fp64" if is_float(first) else first,
        chip=chips[0],
    )


def _literal(value: list[Any]) -> str:
    """Return a list as source text, one item a line."""
    lines = "".join(f"    {item!r},\n" for item in value)
    return f"[\n{lines}]".replace("'", '"')


def _bad_calls(operator: Operator, example: Example, chip: str) -> list[Any]:
    """Return calls that must fail: an input too many, a wrong format, an unknown attribute, ..."""
    shapes = example.shapes
    attrs = dict(example.attrs)
    main = operator.types.on_chip(load_chip(chip))[0]
    dtypes = operator.input_types(len(shapes), main, **attrs)
    others = [d for d in ("int8", "int32", "fp32", "fp16") if d not in operator.types.allowed]
    calls: list[Any] = [
        (shapes, ((*others, "fp64")[0], *dtypes[1:]), attrs),
        (shapes, ("fp8", *dtypes[1:]), attrs),
        (shapes, dtypes, {**attrs, "colour": 1}),
        (((-1,), *shapes[1:]), dtypes, attrs),
        ((), (), attrs),
    ]
    if not operator.variadic:
        calls.append((shapes * 5, dtypes * 5, attrs))
    return calls
