"""`make_test`: write the test file of any operator, the reader's own included."""

from __future__ import annotations

import textwrap
from typing import Any

from ascend_lab.chip import load_chip
from ascend_lab.errors import InputError
from ascend_lab.ops.formats import is_float
from ascend_lab.ops.operator import OPERATORS, Example, Operator, resolve
from ascend_lab.ops.shapes import Shape

TEST_CHIPS = ("Ascend310", "Ascend910A", "Ascend910B2")
EDGE_SIZES: tuple[Shape, ...] = (
    (1,), (7,), (16,), (15,), (17,), (31,), (33,), (127,), (128,), (129,), (3, 5, 7), (2, 1, 33),
)  # fmt: skip
"""One element, primes, and one off the multiples 16 (lanes), 32 (bytes) and 128 (a repeat)."""

_TEMPLATE = '''"""Tests of the operator {name}.

{summary}

Written by ascend_lab.ops.make_test from the operator's examples; add cases of your own below.
"""

import pytest

from ascend_lab import ops
from ascend_lab.chip import load_chip
from ascend_lab.errors import AscendLabError
from ascend_lab.ops import verify
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
        raise InputError(
            f"{op.name}: a registered operator, or the import line of its module",
            "neither",
            'pass imports="from my_ops import NAME", lookup="NAME"',
        )
    every = tuple(Example((shape,) * len(op.inputs)) for shape in EDGE_SIZES)
    examples = (op.examples or every)[:limit]
    some_empty = any(0 in shape for e in examples for shape in e.shapes)
    filled = "[case for case in CASES if all(0 not in shape for shape in case[0])]"
    cases, first = filled if some_empty else "CASES", op.types.allowed[0]
    bounds = [f"# {dtype}: {b.ulps:g} ulps + {b.atol:g} ({b.reason})"
              for dtype, b in op.tolerances.items()]  # fmt: skip
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
    shapes, attrs = example.shapes, dict(example.attrs)
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
