"""Chapter 6: the interpreter of schedules, the figures of loop nests, the checks and the page."""

import re
from itertools import pairwise

import numpy as np
import pytest
from page_checks import assert_apart, printed

from ascend_lab.errors import InputError, ScheduleError
from ascend_lab.lab.figures import fig_choices, fig_nest, fig_pairs, fig_tails
from ascend_lab.lab.figures.expressions import add_relu
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa.memory import numpy_type
from ascend_lab.operators import dsl as te
from ascend_lab.operators.dsl import interpret

CHIP = load_chip("Ascend910B2")


def normal(shape, dtype="fp16", seed=0, scale=1.0):
    values = scale * np.random.default_rng(seed).normal(size=shape)
    return values.astype(numpy_type(dtype))


# -- the interpreter --------------------------------------------------------------------------
@pytest.mark.parametrize(("dtype", "out"), [("fp16", "fp32"), ("fp16", "fp16"), ("int8", "int32")])
def test_the_cube_walks_padded_fractals(dtype: str, out: str) -> None:
    m = 33
    k = 90
    n = 17
    a = te.placeholder((m, k), dtype, "a")
    b = te.placeholder((k, n), dtype, "b")
    c = te.renamed(te.matmul(a, b, out_dtype=out), "c")
    feed = {"a": normal((m, k), dtype, scale=3), "b": normal((k, n), dtype, 1, 3)}
    wide = np.int64 if dtype == "int8" else np.float64
    exact = feed["a"].astype(wide) @ feed["b"].astype(wide)
    got = interpret(te.auto_schedule(c, CHIP), feed)["c"]
    assert got.shape == (m, n) and got.dtype == numpy_type(out)
    assert abs(got - exact).max() <= (0 if dtype == "int8" else 2e-3 * abs(exact).max())


def test_inputs_and_hand_written_stages_are_errors_with_names() -> None:
    s = te.create_schedule(add_relu(8), CHIP)
    with pytest.raises(InputError, match=r"array b of shape \(8,\); got none"):
        interpret(s, {"a": normal(8)})
    with pytest.raises(InputError, match=r"shape \(9,\)"):
        interpret(s, {"a": normal(9), "b": normal(8)})
    turned = te.renamed(te.transpose(te.placeholder((4, 6), name="x"), (1, 0)), "y")
    with pytest.raises(ScheduleError, match="hand-written kernel"):
        interpret(te.create_schedule(turned, CHIP), {"x": normal((4, 6))})


# -- figures ----------------------------------------------------------------------------------
def pairs() -> dict[str, tuple[te.Schedule, te.Schedule]]:
    plain = te.create_schedule(add_relu(100_000), CHIP)
    one = te.inline(plain, "vadd")
    tiles = te.split(one, "y", "i", 8192)
    return {"split": (one, tiles), "double_buffer": (tiles, te.double_buffer(tiles, "y"))}


@pytest.mark.parametrize(
    "make",
    [
        lambda: fig_nest(next(iter(pairs().values()))[1]),
        lambda: fig_pairs(pairs()),
        lambda: fig_tails(22, 8),
        lambda: fig_choices(True, 8192, "guard", 2, 24),
    ],
    ids=["nest", "pairs", "tails", "choices"],
)
def test_texts_stay_inside_and_apart(make) -> None:
    fig = make()
    assert_apart(fig, [t for ax in fig.axes for t in (*ax.texts, ax.xaxis.label)], room=1)


# -- the page ---------------------------------------------------------------------------------
def test_the_page_shows_what_its_prose_claims() -> None:
    text = printed("06_schedules")
    number = r"([\d,]+)"
    size = r"([\d.]+)"
    rows = re.findall(rf"^(\S.*?)  +{number} +{size}$", text, re.MULTILINE)
    cycles = {name: int(c.replace(",", "")) for name, c, _ in rows}
    moved = {name: float(size) for name, _, size in rows}
    order = ["tiles of 128", "tiles of 8,192", "inline", "double_buffer", "bind, 12 cores"]
    assert all(cycles[a] > cycles[b] for a, b in pairwise(order))
    assert cycles["bind, 24 cores"] < 1.1 * cycles["bind, 48 cores"]  # half the cores do it
    assert cycles["tiles of 128"] / cycles["double_buffer"] > 48  # more than the cores win
    assert moved["tiles of 8,192"] == 10.0 and moved["inline"] == 6.0
    tails = re.findall(rf"^ *(10,00\d) +{number} +{number} +{number} +\d+$", text, re.MULTILINE)
    assert len(tails) == 6
    for n, _, cut, guard in tails:
        ratio = int(cut.replace(",", "")) / int(guard.replace(",", ""))
        assert ratio > 1.02 if n == "10,003" else abs(ratio - 1) < 0.01
    loads = dict(re.findall(rf"^(\S+(?: row)?) +{size} +{size[1:-1]} +[\d,]+$", text, re.MULTILINE))
    assert float(loads["by row"]) == float(loads["reorder"]) > float(loads["tile"])
    assert float(loads["compute_at"]) < float(loads["tile"])
    drawn = re.findall(r"^(?:relu|max|sum) +\w+ +(\d+) +[\de+-]+$", text, re.MULTILINE)
    assert [int(count) > 0 for count in drawn] == [False, False, False, True]
    assert "same bits: True True" in text and "for i_o in 192" in text
    assert text.count("ScheduleError: ") == 2 and "    CapacityError:" in text
    assert "False" not in text
