"""Chapter 5: figures say what programs do, the three nests agree, the checks have two sides."""

from typing import Any

import numpy as np
import pytest

from ascend_lab.errors import CapacityError, ShapeError
from ascend_lab.lab.figures import expressions as fx, nests as ns
from ascend_lab.lab.figures.nests import gm_bytes
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import sanitize
from ascend_lab.machine.sim import simulate_kernel
from ascend_lab.operators import dsl as te
from ascend_lab.operators.dsl.tbe import fusion_manager, util

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


def test_rms_norm_is_right_in_every_nest() -> None:
    x = np.random.default_rng(2).normal(size=(40, 528)).astype(np.float16)
    wide = x.astype(float)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    for make in fx.three_nests(fx.rms_norm(matrix(40, 528)), CHIP).values():
        assert np.allclose(te.run(make(), {"x": x})["y"], expected, rtol=2e-3, atol=1e-5)


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


def test_long_rows_fit_only_in_pieces() -> None:
    y = fx.softmax(matrix(512, 32768))
    with pytest.raises(CapacityError, match="UB"):
        te.lower(fx.whole_rows(y, CHIP))
    for schedule in (fx.per_operation(y, CHIP), fx.rows_in_pieces(y, CHIP)):
        assert te.lower(schedule).core_count == 32


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


def test_formulas_keep_their_brackets() -> None:
    a, b = (te.placeholder((4,), name=name) for name in "ab")
    y = te.compute((4,), lambda i: (a[i] + b[i]) * a[i] - te.exp(b[i] * 0.5), name="y")
    (stage,) = te.create_schedule(y, load_chip(CHIP)).state.stages
    assert ns.formula(stage.expr) == "((a + b) × a) − exp(b × 0.5)"


# --- what the text says about expressions ---------------------------------------------------------
def test_a_formula_is_called_once_and_broadcasts_are_explicit() -> None:
    calls: list[int] = []
    te.compute((50,), lambda i: [calls.append(1), matrix(1, 50)[0, i] * 2.0][1])
    assert calls == [1]
    with pytest.raises(ShapeError, match=r"\(4, 6\).*\(6,\)"):
        te.vadd(matrix(4, 6), te.placeholder((6,), name="b"))


def test_sums_of_fp16_overflow_unless_cast_first() -> None:
    x = te.placeholder((16, 16384), name="x")
    values = np.full((16, 16384), 10, np.float16)
    means = []
    for total in (te.reduce_sum(x, -1), te.reduce_sum(te.cast_to(x, "fp32"), -1)):
        y = te.renamed(te.vmuls(total, 1 / 16384), "y")
        means.append(te.run(te.auto_schedule(y, load_chip(CHIP)), {"x": values})["y"][0])
    assert means[0] == np.inf
    assert means[1] == 10


def test_an_operator_in_the_published_form() -> None:
    @fusion_manager.register("test_add_relu")
    def compute(x: te.Tensor, y: te.Tensor) -> te.Tensor:
        *_, shape = util.produce_shapes(x.shape, y.shape)
        util.check_shape_size(shape, util.SHAPE_SIZE_LIMIT)
        return te.vrelu(te.vadd(te.broadcast(x, shape), te.broadcast(y, shape)))

    assert fusion_manager.get("test_add_relu") is compute
    x = te.placeholder((8, 1), name="x")
    y = te.placeholder((48,), name="y")
    out = te.renamed(compute(x, y), "out")
    rng = np.random.default_rng(3)
    feed = {t.name: rng.normal(size=t.shape).astype(np.float16) for t in (x, y)}
    got = te.run(te.auto_schedule(out, load_chip("Ascend310")), feed)["out"]
    assert np.array_equal(got, np.maximum(feed["x"] + feed["y"], np.float16(0)))
