"""Gradients and costs for the tests of the gradient tuner."""

from hypothesis import strategies as st

from ascend_lab.aoe.gradient import AlphaBeta, Gradient, Piecewise


def rows_of(ready_s, sizes, dtypes=()):
    """Return gradients named by their place."""
    formats = dtypes or ["fp16"] * len(sizes)
    return tuple(
        Gradient(f"g{i}", ready, size, dtype)
        for i, (ready, size, dtype) in enumerate(zip(ready_s, sizes, formats, strict=True))
    )


def waiting_chain(count):
    """Return the case in which a local merge rule waits for one small gradient after another."""
    return rows_of([0.9 * i for i in range(count)], [10] + [0] * (count - 1))


times = st.floats(0, 10, allow_nan=False)
sizes = st.integers(0, 1000)


@st.composite
def profiles(draw, most=9, formats=1):
    """Draw gradients whose times may be out of order."""
    count = draw(st.integers(1, most))
    ready = draw(st.lists(times, min_size=count, max_size=count))
    ready = ready if draw(st.booleans()) else sorted(ready)
    kinds = st.sampled_from(["fp16", "fp32"][:formats])
    lists = (draw(st.lists(of, min_size=count, max_size=count)) for of in (sizes, kinds))
    return rows_of(ready, *lists)


@st.composite
def costs(draw):
    """Draw a cost: a line, a measured table, or a plain function that saturates."""
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return AlphaBeta(draw(st.floats(0, 5)), draw(st.floats(0, 0.05)))
    if kind == 1:
        x = draw(st.lists(st.integers(1, 5000), min_size=1, max_size=6, unique=True))
        y = draw(st.lists(st.floats(0, 20), min_size=len(x), max_size=len(x)))
        return Piecewise(tuple(map(float, sorted(x))), tuple(y))
    scale = draw(st.floats(0.01, 1))
    return lambda size: scale * size**0.5 + 0.1
