"""Checks of chapter 5: layer norm, where with good errors, a stable softplus, bytes of a graph."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab import dsl as te
from ascend_lab.chip import load_chip
from ascend_lab.dsl import Tensor
from ascend_lab.errors import AscendLabError, ShapeError, TypeMismatchError
from ascend_lab.lab.checks import core as ex
from ascend_lab.lab.figures.expressions import moved_bytes
from ascend_lab.lab.figures.nests import EXPRESSIONS, per_operation
from ascend_lab.sim import simulate_kernel

Array = NDArray[Any]

CHIP = "Ascend910A"
EPSILON = 1e-5
CENTRES = ((0.0, 1.0), (100.0, 0.1), (-2000.0, 300.0))
"""Means and spreads of the rows a layer norm is tried on.

In the second a mean of squares less a squared mean is lost in fp32; in the last fp16 squares
overflow.
"""


def computed(y: Tensor, feed: Mapping[str, Array]) -> Array:
    """Return what the default schedule of `y` computes; arrays it does not read are left out."""
    schedule = te.auto_schedule(te.renamed(y, "checked"), load_chip(CHIP))
    read = {entry.name for entry in schedule.state.inputs}
    values: Array = te.run(schedule, {n: x for n, x in feed.items() if n in read})["checked"]
    return values.astype(np.float64)


def _wrong_tensor(got: Any, shape: tuple[int, ...], dtype: str) -> str | None:
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
    except AscendLabError as error:
        return f"expected a tensor that runs, but: {error}"
    miss = np.abs(values - expected) / tolerance
    miss = np.where(np.isfinite(values), miss, np.inf)
    worst = np.unravel_index(int(miss.argmax()), miss.shape)
    if miss[worst] <= 1:
        return None
    place = ", ".join(map(str, (int(i) for i in worst)))
    return (
        f"with {values[worst]:.5g} at [{place}]{what}; expected {expected[worst]:.5g} "
        f"within {tolerance[worst]:.1g}"
    )


# -- exercise 1: layer norm ----


def _norm_case(rows: int, columns: int) -> ex.Case:
    return {
        "x": te.placeholder((rows, columns), name="x"),
        "gamma": te.placeholder((columns,), name="gamma"),
        "beta": te.placeholder((columns,), name="beta"),
    }


def _judge_norm(got: Any, case: ex.Case) -> str | None:
    shape = case["x"].shape
    wrong = _wrong_tensor(got, shape, "fp16")
    for centre, spread in CENTRES if wrong is None else ():
        rng = np.random.default_rng(shape)
        x = (centre + spread * rng.standard_normal(shape)).astype(np.float16)
        gamma, beta = (rng.uniform(0.5, 1.5, shape[-1]).astype(np.float16) for _ in range(2))
        wide = x.astype(np.float64)
        away = wide - wide.mean(-1, keepdims=True)
        norm = away / np.sqrt((away**2).mean(-1, keepdims=True) + EPSILON)
        expected = norm * gamma + beta
        tolerance = 4e-3 * (1 + np.abs(norm)) + 2e-3
        feed, what = {"x": x, "gamma": gamma, "beta": beta}, f" of rows near {centre:g}"
        wrong = _wrong_values(got, feed, expected, tolerance, what)
        if wrong is not None:
            break
    return wrong


# -- exercise 2: where, with errors ----


def _telling(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns the package's errors in place of raising them."""

    def caught(condition: Tensor, a: Tensor, b: Tensor) -> Any:
        try:
            return fn(condition, a, b)
        except AscendLabError as error:
            return error

    return caught


def _where_case(
    condition: tuple[int, ...],
    a: tuple[int, ...],
    b: tuple[int, ...],
    dtypes: tuple[str, str, str] = ("fp16", "fp16", "fp16"),
) -> ex.Case:
    names = ("condition", "a", "b")
    given = zip(names, (condition, a, b), dtypes, strict=True)
    return {name: te.placeholder(shape, dtype, name) for name, shape, dtype in given}


def _draw_where(rng: np.random.Generator) -> ex.Case:
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
    return _where_case(shapes[0], shapes[1], shapes[2], (dtypes[0], dtypes[1], dtypes[2]))


def _judge_where(got: Any, case: ex.Case) -> str | None:
    shapes = [t.shape for t in case.values()]
    dtypes = [t.dtype for t in case.values()]
    try:
        full = np.broadcast_shapes(*shapes)
    except ValueError:
        full = None
    if full is None or len(set(dtypes)) > 1:
        return _judge_error(got, shapes if full is None else [], dtypes)
    wrong = _wrong_tensor(got, full, dtypes[0])
    if wrong is not None:
        return wrong
    rng = np.random.default_rng(full)
    kind = np.dtype(np.float16 if dtypes[0] == "fp16" else np.float32)
    feed = {n: rng.standard_normal(t.shape).astype(kind) for n, t in case.items()}
    feed["condition"] = rng.integers(-1, 2, shapes[0]).astype(kind)
    expected = np.where(feed["condition"] != 0, feed["a"], feed["b"]).astype(np.float64)
    return _wrong_values(got, feed, expected, np.full(full, 1e-9), "")


def _judge_error(got: Any, shapes: list[tuple[int, ...]], dtypes: list[str]) -> str | None:
    """Judge the refusal of bad operands; with wrong shapes and wrong formats either will do."""
    allowed: list[tuple[type[AscendLabError], list[Any]]] = []
    if shapes:
        allowed.append((ShapeError, shapes))
    if len(set(dtypes)) > 1:
        allowed.append((TypeMismatchError, dtypes))
    for kind, words in allowed:
        if isinstance(got, kind):
            absent = [str(w) for w in words if str(w) not in str(got)]
            if not absent:
                return None
            return f"a {kind.__name__} that reads {str(got)!r}; expected {absent[0]} in it too"
    wanted = " or ".join(kind.__name__ for kind, _ in allowed)
    if isinstance(got, AscendLabError):
        return f"a {type(got).__name__} ({got}); expected a {wanted}"
    return f"expected a {wanted}"


# -- exercise 3: softplus that does not overflow ----


def _judge_softplus(got: Any, case: ex.Case) -> str | None:
    shape = case["x"].shape
    wrong = _wrong_tensor(got, shape, "fp16")
    for reach in (1.0, 15.0, 60000.0) if wrong is None else ():
        rng = np.random.default_rng(shape)
        x = rng.uniform(-reach, reach, shape).astype(np.float16)
        expected = np.logaddexp(0.0, x.astype(np.float64))
        tolerance = 2e-3 * (1 + np.abs(expected))
        what = f" for x between {-reach:g} and {reach:g}"
        wrong = _wrong_values(got, {"x": x}, expected, tolerance, what)
        if wrong is not None:
            break
    return wrong


# -- exercise 4: bytes from the graph ----


def _centred(x: Tensor) -> Tensor:
    middle = te.broadcast(te.reduce_max(x, -1, keepdims=True), x.shape)
    return te.renamed(te.vmul(te.vsub(x, middle), x), "y")


def _judge_bytes(got: Any, case: ex.Case) -> str | None:
    run = simulate_kernel(te.lower(per_operation(case["y"], CHIP)), load_chip(CHIP))
    return ex.equal_to(moved_bytes(run))(got)


@ex.judged(_judge_norm, edges=[_norm_case(1, 2), _norm_case(16, 1024)], cases=4)
def check_ex_05_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(x, gamma, beta)`: the layer norm of fp16 rows, on rows near 0 and far from it."""
    rows, columns = int(rng.integers(1, 40)), int(rng.integers(2, 400))
    return _norm_case(rows, columns)


@ex.judged(_judge_softplus, cases=5)
def check_ex_05_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(x)`: log(1 + exp(x)) in fp16 for every finite x, large and small."""
    shape = int(rng.integers(1, 20)), int(rng.integers(1, 200))
    return {"x": te.placeholder(shape, name="x")}


@ex.judged(
    _judge_bytes,
    edges=[{"y": EXPRESSIONS["softmax"](te.placeholder((4096, 1024), name="x"))}],
    cases=8,
)
def check_ex_05_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(y)`: bytes between GM and UB of a nest per operation, as the simulator counts."""
    x = te.placeholder(tuple(16 * int(n) for n in rng.integers(1, 60, 2)), name="x")
    made = [make(x) for name, make in EXPRESSIONS.items() if name != "sum of columns"]
    made += [te.renamed(te.vmul(x, x), "square"), _centred(x)]
    return {"y": made[int(rng.integers(0, len(made)))]}


@ex.judged(
    _judge_where,
    edges=[
        _where_case((4, 6), (4, 6), (4, 6)),
        _where_case((4, 1), (6,), (4, 6)),
        _where_case((4, 6), (5, 6), (4, 6)),
        _where_case((4, 6), (4, 6), (7,)),
        _where_case((3, 4), (3, 4), (3, 4), ("fp16", "fp16", "fp32")),
        _where_case((3, 4), (3, 4), (3, 4), ("fp32", "fp16", "fp16")),
    ],
    cases=8,
    wrap=_telling,
)
def check_ex_05_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(condition, a, b)`: a where condition is not 0, else b; shapes broadcast.

    Shapes that do not go together must raise `ShapeError` with all three shapes in its text,
    formats that differ `TypeMismatchError` with all three formats.
    """
    return _draw_where(rng)
