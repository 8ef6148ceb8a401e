"""Chapter 5: figures say what programs do, the three nests agree, the checks have two sides."""

from typing import Any

import numpy as np
import pytest

from ascend_lab.lab.figures import expressions as fx, nests as ns
from ascend_lab.lab.figures.nests import gm_bytes
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import sanitize
from ascend_lab.machine.sim import simulate_kernel
from ascend_lab.operators import dsl as te

CHIP = "Ascend910A"


def matrix(rows: int, columns: int) -> te.Tensor:
    return te.placeholder((rows, columns), name="x")


def exact_softmax(x: Any) -> Any:
    e = np.exp(x.astype(float) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# --- the three nests ------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(16, 16), (70, 600), (33, 1100)])
def test_three_nests_give_the_same_bits(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(1).normal(size=shape).astype(np.float16)
    results = []
    for make in fx.three_nests(fx.softmax(matrix(*shape)), CHIP).values():
        schedule = make()
        assert sanitize(te.lower(schedule), load_chip(CHIP)) == []
        results.append(te.run(schedule, {"x": x})["y"])
    assert all(np.array_equal(results[0], other) for other in results[1:])
    assert np.allclose(results[0], exact_softmax(x), rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("chip", "limit"), [("Ascend310", "V"), ("Ascend310P3", "memory"), ("Ascend910A", "V")]
)
def test_bytes_and_the_order_of_the_nests_are_as_the_text_says(chip: str, limit: str) -> None:
    y = fx.softmax(matrix(16384, 1024))
    runs = [
        simulate_kernel(te.lower(make()), load_chip(chip))
        for make in fx.three_nests(y, chip).values()
    ]
    assert [round(gm_bytes(run) / y.elements) for run in runs] == [16, 4, 8]
    each, rows, pieces = (run.cycles for run in runs)
    assert rows < pieces < each
    assert (runs[0].bound_by, runs[1].bound_by) == ("memory", limit)
    assert (each == pytest.approx(4 * rows, rel=0.01)) if limit == "memory" else each < 4 * rows


# --- figures --------------------------------------------------------------------------------------
def test_a_nest_is_read_off_its_schedule() -> None:
    (cores,) = ns.nest_of(fx.whole_rows(fx.softmax(matrix(4096, 512)), CHIP))
    assert isinstance(cores, ns.Box)
    (loop,) = cores.inside
    assert isinstance(loop, ns.Box)
    assert (cores.heading, loop.heading) == ("32 cores", "8 × 16 rows")
    assert loop.inside == (
        ns.Work("MTE2", "load x"),
        ns.Work("V", "max(x)"),
        ns.Work("V", "e = exp(x − max)"),
        ns.Work("V", "sum(e)"),
        ns.Work("V", "y = e / sum"),
        ns.Work("MTE3", "store y"),
    )
    assert ns.height_of((cores,)) == pytest.approx(2 * 1.35 + 6)
    pieces = ns.nest_of(fx.rows_in_pieces(fx.softmax(matrix(4096, 1024)), CHIP))
    assert "".join(p[0] for p in ns.pipes_in(pieces)) == "MVMVMVM"
