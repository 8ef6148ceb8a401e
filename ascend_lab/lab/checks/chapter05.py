"""Checks of chapter 5: a stable softplus, a `where` with good error messages, layer norm, bytes
that a graph moves, and a bound on the error of computing a graph.

A judge returns None for a right answer, else the end of the sentence
"your function returned ..., ", for example "expected a computed tensor of the DSL".
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ascend_lab import errors
from ascend_lab.lab.checks import core as ex
from ascend_lab.lab.figures.expressions import EXPRESSIONS, per_operation
from ascend_lab.lab.figures.nests import gm_bytes
from ascend_lab.machine import chip, sim
from ascend_lab.operators import dsl as te
from ascend_lab.operators.dsl import Tensor

Array = np.ndarray
CHIP = "Ascend910A"
EPSILON = 1e-5
CENTRES = ((0.0, 1.0), (100.0, 0.1), (-2000.0, 300.0), (0.0, 0.003))
"""Means and spreads of the rows a layer norm is tried on.

In the second a mean of squares less a squared mean is lost in fp32; in the third fp16 squares
overflow; in the last the variance is of the size of epsilon.
"""


def computed(y: Tensor, feed: Mapping[str, Array]) -> Array:
    """Return the values that the default schedule of `y` computes from the arrays that it reads."""
    schedule = te.auto_schedule(te.renamed(y, "checked"), chip.load_chip(CHIP))
    names = {entry.name for entry in schedule.state.inputs}
    inputs = {name: array for name, array in feed.items() if name in names}
    values: Array = te.run(schedule, inputs)["checked"]
    return values.astype(np.float64)


def _wrong_tensor(got: Any, shape: tuple[int, ...], dtype: str) -> str | None:
    """Return what is wrong with a tensor's kind, shape or dtype, or None."""
    if not isinstance(got, Tensor) or got.body is None:
        return "expected a computed tensor of the DSL"
    if (got.shape, got.dtype) != (shape, dtype):
        return f"of shape {got.shape} in {got.dtype}, expected {shape} in {dtype}"
    return None


def _wrong_values(
    got: Tensor, feed: Mapping[str, Array], expected: Array, tolerance: Array, what: str
) -> str | None:
    """Return what is wrong with the values of a tensor: the worst element, with its inputs."""
    try:
        values = computed(got, feed)
    except errors.AscendLabError as error:
        return f"expected a tensor that runs, but: {error}"
    miss = np.where(np.isfinite(values), np.abs(values - expected) / tolerance, np.inf)
    worst = np.unravel_index(int(miss.argmax()), miss.shape)
    if miss[worst] <= 1:
        return None
    wanted = f"expected {expected[worst]:.5g} within {tolerance[worst]:.1g}"
    return f"with {values[worst]:.5g} at [{', '.join(map(str, worst))}]{what}; {wanted}"


def _norm_case(rows: int, columns: int) -> ex.Case:
    """Return placeholders for rows of x, and for gamma and beta of the columns."""
    shapes = {"x": (rows, columns), "gamma": (columns,), "beta": (columns,)}
    return {name: te.placeholder(shape, name=name) for name, shape in shapes.items()}


def _judge_norm(got: Any, case: ex.Case) -> str | None:
    """Judge a layer norm by its values on rows of several means and spreads."""
    shape = case["x"].shape
    wrong = _wrong_tensor(got, shape, "fp16")
    for centre, spread in CENTRES if wrong is None else ():
        rng = np.random.default_rng(shape)
        x = (centre + spread * rng.standard_normal(shape)).astype(np.float16)
        gamma, beta = (rng.uniform(0.5, 1.5, shape[-1]).astype(np.float16) for _ in range(2))
        exact_x = x.astype(np.float64)
        centred = exact_x - exact_x.mean(-1, keepdims=True)
        norm = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
        # An fp16 number has a relative error of up to 0.0005: a few roundings.
        tolerance = 4e-3 * (1 + np.abs(norm)) + 2e-3
        feed = {"x": x, "gamma": gamma, "beta": beta}
        what = f" of rows near {centre:g}"
        if wrong := _wrong_values(got, feed, norm * gamma + beta, tolerance, what):
            break
    return wrong


def _with_errors_returned(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns the package's errors instead of raising them."""

    def caught(condition: Tensor, a: Tensor, b: Tensor) -> Any:
        try:
            return fn(condition, a, b)
        except errors.AscendLabError as error:
            return error

    return caught


def _where_case(*shapes: tuple[int, ...], dtypes: Sequence[str] = ("fp16",) * 3) -> ex.Case:
    """Return placeholders for the operands of `where`."""
    operands = zip(("condition", "a", "b"), shapes, dtypes, strict=True)
    return {name: te.placeholder(shape, dtype, name) for name, shape, dtype in operands}


def _judge_where(got: Any, case: ex.Case) -> str | None:
    """Judge `where` by its values, or by its error if shapes or dtypes do not fit together."""
    shapes = [tensor.shape for tensor in case.values()]
    dtypes = [tensor.dtype for tensor in case.values()]
    shape = None
    with suppress(ValueError):
        shape = np.broadcast_shapes(*shapes)
    if shape is None or len(set(dtypes)) > 1:
        return _judge_error(got, shapes if shape is None else (), dtypes)
    if wrong := _wrong_tensor(got, shape, dtypes[0]):
        return wrong
    rng = np.random.default_rng(shape)
    dtype = np.dtype(np.float16 if dtypes[0] == "fp16" else np.float32)
    feed = {n: rng.standard_normal(t.shape).astype(dtype) for n, t in case.items()}
    feed["condition"] = rng.integers(-1, 2, shapes[0]).astype(dtype)
    expected = np.where(feed["condition"] != 0, feed["a"], feed["b"]).astype(np.float64)
    return _wrong_values(got, feed, expected, np.full(shape, 1e-9), "")


def _judge_error(got: Any, shapes: Sequence[Any], dtypes: Sequence[str]) -> str | None:
    """Judge the error for bad operands, which has to name all their shapes, or all their dtypes.

    If both are wrong, either error will do. `shapes` is empty if the shapes are right.
    """
    words_of: dict[type[Exception], Sequence[Any]] = {}
    if shapes:
        words_of[errors.ShapeError] = shapes
    if len(set(dtypes)) > 1:
        words_of[errors.TypeMismatchError] = dtypes
    for error_type, words in words_of.items():
        if not isinstance(got, error_type):
            continue
        absent = [str(word) for word in words if str(word) not in str(got)]
        text = f"a {type(got).__name__} that reads {str(got)!r}; expected"
        return f"{text} {absent[0]} in it too" if absent else None
    expected = " or ".join(error_type.__name__ for error_type in words_of)
    if isinstance(got, errors.AscendLabError):
        return f"a {type(got).__name__} ({got}); expected a {expected}"
    return f"expected a {expected}"


def _formats(tensor: Tensor) -> set[str]:
    """Return the number formats of all tensors of a graph."""
    return {tensor.dtype}.union(*map(_formats, tensor.inputs))


def _centred(x: Tensor) -> Tensor:
    """Return (x - the maximum of the row) x."""
    middle = te.broadcast(te.reduce_max(x, -1, keepdims=True), x.shape)
    return te.renamed(te.vmul(te.vsub(x, middle), x), "y")


def _diamonds(x: Tensor) -> Tensor:
    """Return a graph in which many results are used twice."""
    for _ in range(8):
        x = te.vmul(x, te.vabs(x))
    return te.renamed(x, "y")


def _spread_twice(x: Tensor) -> Tensor:
    """Return a product with two broadcasts of one tensor as its inputs: it reads that once."""
    largest = te.reduce_max(x, -1, keepdims=True)
    return te.renamed(te.vmul(*(te.broadcast(largest, x.shape) for _ in range(2))), "y")


def _judge_bytes(got: Any, case: ex.Case) -> str | None:
    """Judge bytes by those of a simulated kernel with one loop nest for each operation."""
    run = sim.simulate_kernel(te.lower(per_operation(case["y"], CHIP)), chip.load_chip(CHIP))
    return ex.equal_to(gm_bytes(run))(got)


BOUND_SLACK = 1.5
"""An error bound may be this many times ours in the mean, not more."""
LEAST_BOUND = 0.75
"""An error bound must be at least this share of ours at every element."""


def _plain_softmax(x: Tensor, z: Tensor) -> Tensor:
    """Return the softmax of rows of x, times z."""
    row = te.broadcast(te.reduce_max(x, -1, keepdims=True), x.shape)
    e = te.vexp(te.vsub(x, row))
    return te.vdiv(te.vmul(e, z), te.broadcast(te.reduce_sum(e, -1, keepdims=True), x.shape))


def _narrow_fold(x: Tensor, z: Tensor) -> Tensor:
    """Sum products of both signs in fp16, so that every rounding of the fold shows."""
    terms = te.vmul(x, z)
    k = te.reduce_axis(x.shape[-1], "k")
    return te.compute(x.shape[:1], lambda i: te.sum(terms[i, k], k), name="reduce_sum")


def _squared_difference(x: Tensor, z: Tensor) -> Tensor:
    """Multiply two differences that may be all error: there the product of the bounds counts."""
    d = te.vsub(te.vmul(x, x), te.vmul(z, z))
    return te.vmul(d, d)


def _shaky_divisor(x: Tensor, z: Tensor) -> Tensor:
    """Divide by a difference that is uncertain by a quarter to a half of itself."""
    return te.vdiv(x, te.vsub(te.vmul(x, x), te.vmul(z, z)))


def _shaky_power(x: Tensor, z: Tensor) -> Tensor:
    """Raise e to a difference that is off by more than 1: far from first order."""
    return te.vexp(te.vsub(te.vmul(x, x), te.vmul(z, z)))


FORMULAS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, z: te.vmul(te.vadd(x, z), te.vsub(x, z)),
    lambda x, z: te.vsub(te.vmul(x, x), te.vmul(x, z)),
    lambda x, z: te.reduce_sum(te.vmul(x, te.vabs(z)), -1),
    lambda x, z: te.vexp(te.vsub(te.vmul(x, z), te.vabs(z))),
    lambda x, z: te.vdiv(te.vmul(x, z), te.vexp(te.vabs(te.vsub(x, z)))),
    lambda x, z: te.cast_to(te.vmul(te.cast_to(x, "fp32"), te.cast_to(z, "fp32")), "fp16"),
    lambda x, z: te.vexp(te.vsub(te.vsub(te.vsub(x, te.vabs(z)), te.vabs(x)), te.vabs(x))),
    _plain_softmax,
    _narrow_fold,
    _squared_difference,
    _shaky_divisor,
    _shaky_power,
)
ULPS_APART = {9: 0, 10: 2, 11: 1}
"""Formula -> how many steps of 2^-10 x and z lie apart, x from 1 to 2: large relative errors."""
LARGE = {11: 32}
"""Formula -> by how much x and z are multiplied then: products of about 1000 are off by 1."""


def _propagated(
    t: Tensor, first: tuple[Array, Array], second: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Return value and error of an operation before it rounds, from those of its inputs.

    The inputs are a with an error of at most e, and b with at most f.
    """
    (a, e) = first
    (b, f) = second
    match t.label:
        case "vadd" | "vsub":
            return (a + b if t.label == "vadd" else a - b), e + f
        case "vmul":
            return a * b, abs(a) * f + abs(b) * e + e * f
        case "vdiv":
            return a / b, (e + abs(a / b) * f) / (abs(b) - f)
        case "vexp":
            return np.exp(a), np.exp(a) * np.expm1(e)
        case "vabs":
            return abs(a), e
        case "reduce_max":
            return a.max(-1), e.max(-1)
        case "reduce_sum":
            unit = 2.0 ** (-11 if t.dtype == "fp16" else -24)
            return a.sum(-1), e.sum(-1) + a.shape[-1] * unit * (abs(a) + e).sum(-1)
        case "broadcast":
            return np.broadcast_to(a, t.shape), np.broadcast_to(e, t.shape)
    return a.reshape(t.shape), e.reshape(t.shape)


def error_bound(y: Tensor, feed: Mapping[str, Array]) -> tuple[Array, Array]:
    """Return the values of a graph in double precision and a bound on the error of computing it."""
    if y.body is None:
        return feed[y.name].astype(np.float64), np.zeros(y.shape)
    inputs = [error_bound(tensor, feed) for tensor in y.inputs]
    value, error = _propagated(y, inputs[0], inputs[-1])
    if y.label in ("broadcast", "reshape", "reduce_max", "vabs"):
        return value, error
    # Half a step relative to the number, and half the smallest step of tiny numbers.
    unit, least = (2.0**-11, 2.0**-25) if y.dtype == "fp16" else (2.0**-24, 2.0**-150)
    return value, error + unit * (abs(value) + error) + least


def _judge_bound(got: Any, case: ex.Case) -> str | None:
    """Judge values and error bounds: not below the chip's errors, not far above our bounds."""
    y = case["y"]
    feed = case["feed"]
    is_pair = isinstance(got, tuple | list) and len(got) == 2
    if not is_pair or {np.shape(array) for array in got} != {y.shape}:
        return f"expected two arrays of shape {y.shape}"
    value, error = (np.asarray(array, np.float64) for array in got)
    exact, ours = error_bound(y, feed)
    if not np.allclose(value, exact, rtol=1e-9, atol=1e-12):
        return f"expected the values of y, they differ by up to {abs(value - exact).max():.3g}"
    if not (np.isfinite(error).all() and (error >= 0).all()):
        return "expected a bound of finite numbers from 0 on"
    miss = abs(computed(y, feed) - exact) - error
    if miss.max() > 0:
        return f"but the chip is off by {miss.max():.2g} more at element {int(miss.argmax())}"
    if (error < LEAST_BOUND * ours).any():
        worst = int((LEAST_BOUND * ours - error).argmax())
        return f"but at element {worst} an error may be larger"
    if error.mean() > BOUND_SLACK * ours.mean():
        return f"a bound {error.mean() / ours.mean():.1f} times as large as need be"
    return None


def _bound_case(number: int, shape: tuple[int, int], seed: int) -> ex.Case:
    """Return the formula of that number, and arrays that make its errors show."""
    x, z = (te.placeholder(shape, name=name) for name in "xz")
    rng = np.random.default_rng(seed)
    feed = {name: rng.uniform(-2, 2, shape).astype(np.float16) for name in "xz"}
    if number == 6:  # results so small that the bits of fp16 run out
        feed = {name: 4 + abs(values) for name, values in feed.items()}
    if number in ULPS_APART:
        x_values = rng.uniform(1.01, 1.99, shape).astype(np.float16)
        distance = ULPS_APART[number] * np.float16(2.0**-10)
        scale = np.float16(LARGE.get(number, 1))
        feed = {"x": scale * x_values, "z": scale * (x_values - np.float16(distance))}
    return {"y": FORMULAS[number](x, z), "feed": feed}


@ex.judged(_judge_norm, edges=[_norm_case(1, 2), _norm_case(16, 1024)], cases=4)
def check_ex_05_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(x, gamma, beta)`: the layer norm of fp16 rows, on rows near 0 and far from it."""
    return _norm_case(int(rng.integers(1, 40)), int(rng.integers(2, 400)))


@ex.judged(
    cases=5,
    x=lambda rng: te.placeholder((int(rng.integers(1, 20)), int(rng.integers(1, 200))), name="x"),
)
def check_ex_05_1(got: Any, case: ex.Case) -> str | None:
    """Check `fn(x)`: log(1 + exp(x)) in fp16 for every finite x, large and small."""
    shape = case["x"].shape
    wrong = _wrong_tensor(got, shape, "fp16")
    if wrong is None and _formats(got) != {"fp16"}:
        wrong = f"with tensors in {', '.join(sorted(_formats(got)))}; expected no cast"
    for reach in (1.0, 15.0, 60000.0) if wrong is None else ():
        rng = np.random.default_rng(shape)
        x = rng.uniform(-reach, reach, shape).astype(np.float16)
        expected = np.logaddexp(0.0, x.astype(np.float64))
        tolerance = 2e-3 * (1 + np.abs(expected))
        what = f" for x between {-reach:g} and {reach:g}"
        if wrong := _wrong_values(got, {"x": x}, expected, tolerance, what):
            break
    return wrong


@ex.judged(
    _judge_bytes,
    edges=[
        (EXPRESSIONS["softmax"](te.placeholder((4096, 1024), name="x")),),
        (_diamonds(te.placeholder((64, 64), name="x")),),
        (_spread_twice(te.placeholder((64, 64), name="x")),),
    ],
    cases=8,
)
def check_ex_05_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(y)`: bytes between GM and UB of a nest per operation, as the simulator counts."""
    x = te.placeholder(tuple(16 * int(n) for n in rng.integers(1, 60, 2)), name="x")
    made = [make(x) for name, make in EXPRESSIONS.items() if name != "sum of columns"]
    made += [te.renamed(te.vmul(x, x), "square"), _centred(x)]
    return ex.drawn(rng, y=made)


WHERE_SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((4, 6), (4, 6), (4, 6)),
    ((4, 1), (6,), (4, 6)),
    ((4, 6), (6,), (1, 6)),
    ((5, 6), (4, 6), (4, 6)),
    ((4, 6), (5, 6), (4, 6)),
    ((4, 6), (4, 6), (7,)),
)


@ex.judged(
    _judge_where,
    edges=[
        *(_where_case(*shapes) for shapes in WHERE_SHAPES),
        _where_case((3, 4), (3, 4), (3, 4), dtypes=("fp16", "fp16", "fp32")),
        _where_case((3, 4), (3, 4), (3, 4), dtypes=("fp32", "fp16", "fp16")),
    ],
    cases=8,
    wrap=_with_errors_returned,
)
def check_ex_05_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(condition, a, b)`: a where condition is not 0, else b; shapes broadcast."""
    full = tuple(int(n) for n in rng.integers(2, 20, int(rng.integers(1, 4))))
    shapes = []
    for _ in range(3):
        shape = tuple(n if rng.random() < 0.7 else 1 for n in full)
        shapes.append(shape[int(rng.integers(0, len(shape))) :])
    if rng.random() < 0.3:
        odd = int(rng.integers(0, 3))
        shapes[odd] = (*full[:-1], full[-1] + 1)
        shapes[odd - 1] = full
    dtypes = ["fp16"] * 3
    if rng.random() < 0.3:
        dtypes[int(rng.integers(0, 3))] = "fp32"
    return _where_case(*shapes, dtypes=dtypes)


@ex.judged(_judge_bound, edges=[_bound_case(n, (3, 200), n) for n in range(len(FORMULAS))], cases=4)
def check_ex_05_6(rng: ex.Rng) -> ex.Case:
    """Check `fn(y, feed)`: the values of a graph, and a bound on the error of computing it."""
    shape = int(rng.integers(1, 12)), int(rng.integers(2, 300))
    return _bound_case(int(rng.integers(len(FORMULAS))), shape, int(rng.integers(1 << 30)))
