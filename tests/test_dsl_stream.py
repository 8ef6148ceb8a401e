"""`stream`: cube and vector cores in one nest; values, times of both engines, and refusals."""

import numpy as np
import pytest
from dsl_strategies import chip_of
from hypothesis import HealthCheck, given, settings, strategies as st
from test_dsl_schedules import check_text_and_replay, matrices
from test_epilogue import SIGMOID_GELU

from ascend_lab.errors import CapacityError, ScheduleError
from ascend_lab.machine.isa import sanitize
from ascend_lab.machine.sim import simulate, simulate_kernel
from ascend_lab.operators import dsl as te
from ascend_lab.operators.dsl.stages import Stage
from ascend_lab.operators.kernels import GemmSchedule, GemmShape, gemm_launch

SPLIT = chip_of("Ascend910B2")
SMALL = GemmSchedule(48, 32, 48, 2, 2, 1)


def given_as(dtype, *shape, name):
    return te.placeholder(shape, dtype, name)


def spread(name, c, axis):
    """One number a row (axis 0) or a column of a matrix."""
    sizes = tuple(n if d == len(c.shape) - 2 + axis else 1 for d, n in enumerate(c.shape))
    return te.broadcast(given_as(c.dtype, *sizes, name=name), c.shape)


def gelu(c):
    x = te.vadd(c, spread("bias", c, 1))
    return te.cast_to(te.vmul(x, te.vrec(te.vadds(te.vexp(te.vmuls(x, -1.702)), 1.0))), "fp16")


def residual(c):
    return te.vrelu(te.vadd(c, given_as(c.dtype, *c.shape, name="other")))


def scaled_rows(c):
    return te.vmul(te.vabs(c), spread("scale", c, 0))


def clipped(c):
    return te.vmins(te.vrelu(c), 6.0)


def dequantised(c):
    x = te.cast_to(c, "fp32")
    return te.vmul(x, spread("scale", x, 1))


CHAINS = {f.__name__: f for f in (gelu, residual, scaled_rows, clipped, dequantised)}


def program(chain, shape, batch=()):
    """The output y behind a product, and arrays of all inputs: sums are exact in any order."""
    *_, c = matrices(shape, batch)
    y = te.renamed(CHAINS[chain](c), "y")
    rng, kinds = np.random.default_rng(shape.n), {"fp16": np.float16, "fp32": np.float32}
    entries = te.create_schedule(y, SPLIT).state.inputs
    arrays = {
        e.name: rng.integers(-3, 4, e.shape).astype(kinds.get(e.dtype, e.dtype)) for e in entries
    }
    return y, arrays


def tiled(y, tiling=SMALL, chip=SPLIT):
    """The schedule with the product in tiles, its operands' copies inlined, the rest as it is."""
    s = te.create_schedule(y, chip)
    for stage in s.state.stages:
        if isinstance(stage, Stage) and stage.is_copy:
            s = te.inline(s, stage.name)
    return te.schedule_product(s, product_of(s), tiling)


def product_of(s):
    """The name of the product: that of a ReLU right behind it, which it does itself."""
    return next(x.name.partition("_")[0] for x in s.state.cubes)


def loop_of(s, end):
    """The loop of y inside a tile, along its rows, whatever its axis is called."""
    y = s.state.stage("y")
    return next(x.name for x in y.loops if x.root == y.axes[-2].name and x.name.endswith(end))


def check(s, arrays):
    """Values of the default schedule; no race; one time; text and steps replay."""
    (phase,) = te.lower(s).phases
    assert phase.mix == 3
    got = te.run(s, arrays)["y"]
    np.testing.assert_array_equal(got, te.run(te.auto_schedule(s.outputs, SPLIT), arrays)["y"])
    np.testing.assert_array_equal(te.interpret(s, arrays)["y"], got)
    assert sanitize(phase, SPLIT) == []
    fast, plain = (simulate(phase, SPLIT, engine=e) for e in ("fast", "reference"))
    assert (fast.cycles, fast.pipe_cycles) == (plain.cycles, plain.pipe_cycles)
    check_text_and_replay(s)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["gelu", "residual", "scaled_rows", "clipped"]),
    st.tuples(*[st.integers(1, 150)] * 3),
    st.sampled_from(["fp16", "fp32"]),
    st.sampled_from([SMALL, GemmSchedule(32, 16, 64, 1, 1, 3), GemmSchedule(16, 32, 16, 1, 4, 2)]),
    st.integers(1, 5),
    st.sampled_from([0, 5, 8, 16]),
)
def test_any_chain_behind_a_product_has_the_values_of_two_phases(
    chain, sizes, out, tiling, slots, rows
):
    """Ragged sizes, odd rows, tails of cores; pieces of rows; as many slots as one likes."""
    y, arrays = program(chain, GemmShape(*sizes, out_dtype=out))
    s = tiled(y, tiling)
    s = te.stream(s, product_of(s), slots)
    if rows:
        inside = loop_of(s, "_i_i")
        s = te.split(s, "y", inside, min(rows, s.state.stage("y").loop(inside).extent))
    check(s, arrays)


@pytest.mark.parametrize(
    ("chain", "shape", "batch"),
    [
        ("dequantised", GemmShape(70, 70, 90, "int8"), ()),
        ("gelu", GemmShape(37, 70, 33), (3,)),
        ("residual", GemmShape(40, 16, 48, out_dtype="fp16"), (2, 2)),
    ],
)
def test_bytes_and_batches(chain, shape, batch):
    y, arrays = program(chain, shape, batch)
    check(te.stream(tiled(y, GemmSchedule(16, 32, 32, 2, 2, 1)), "c"), arrays)


def test_the_nest_behind_is_a_nest_like_any_other():
    """Its operands are held further out, its tile and the ring get slots, an output is added."""
    y, arrays = program("gelu", GemmShape(150, 70, 100))
    s = te.stream(tiled(y), "c", 2)
    x = next(r for r in s.state.readers("bias") if isinstance(r, Stage))
    s = te.cache_read(s, "bias", "UB", x.name)
    s = te.compute_at(s, "bias_ub", "y", s.state.stage("y").loops[0].name)
    s = te.double_buffer(te.double_buffer(s, "c", 3), "y", 1)
    check(s, arrays)
    assert "tile in L2, 3 slots" in te.show(s)
    rows = [part.program for part in te.lower(s).phases[0].parts if part.program.params[-1:]]
    assert any("aiv" in dict(program.params) for program in rows)


def test_a_tile_of_the_cube_core_stays_for_a_loop_of_the_nest_behind():
    """Rows of a in L1 for all columns of a core, as `keep` does in the kernel by hand."""
    y, arrays = program("gelu", GemmShape(100, 40, 150))
    s = te.stream(tiled(y), "c")
    check(te.compute_at(s, "a_l1", "y", s.state.stage("y").loops[2].name), arrays)
    check(te.compute_at(s, "a_l1", "y", s.state.stage("c").attach[1]), arrays)


def test_two_streamed_products_behind_each_other():
    a, b, d = (
        te.placeholder(x, name=n) for n, x in (("a", (90, 70)), ("b", (70, 99)), ("d", (99, 50)))
    )
    between = te.vmins(te.vabs(te.renamed(te.matmul(a, b), "c")), 3.0)
    y = te.renamed(te.vabs(te.renamed(te.matmul(between, d), "c2")), "y")
    s = te.create_schedule(y, SPLIT)
    for name in ("c", "c2"):
        s = te.stream(te.schedule_product(s, name, SMALL), name)
    kernel, rng = te.lower(s), np.random.default_rng(5)
    assert [phase.mix for phase in kernel.phases] == [3, 0, 3]
    assert sanitize(kernel, SPLIT) == []
    arrays = {t.name: rng.integers(-3, 4, t.shape).astype(np.float16) for t in (a, b, d)}
    wanted = te.run(te.auto_schedule(y, SPLIT), arrays)["y"]
    np.testing.assert_array_equal(te.run(s, arrays)["y"], wanted)


def test_vector_cores_with_other_shares_of_the_rows_have_programs_of_their_own():
    even, odd = (
        te.lower(te.stream(tiled(program("clipped", GemmShape(m, 32, 48))[0]), "vrelu")).phases[0]
        for m in (90, 91)
    )
    assert even.parts[1].program == even.parts[2].program
    assert odd.parts[-2].program != odd.parts[-1].program


def test_vector_work_hides_and_takes_the_time_of_the_kernel_by_hand():
    """Within half a percent of the hand-written kernel; far quicker than phases."""
    side, tiling = 2048, GemmSchedule(128, 64, 256, 4, 6, 4)
    a, b = (te.placeholder((side, side), name=n) for n in "ab")
    c = te.renamed(te.matmul(a, b, out_dtype="fp32"), "c")
    y = te.renamed(gelu(c), "y")
    s = te.stream(tiled(y, tiling), "c")
    s = te.split(s, "y", loop_of(s, "_i_i"), 16)
    cycles = simulate_kernel(te.lower(s), SPLIT).cycles
    shape = GemmShape(side, side, side, out_dtype="fp16")
    by_hand, alone = (
        simulate_kernel(gemm_launch(x, SPLIT, tiling, after), SPLIT).cycles
        for x, after in ((shape, SIGMOID_GELU), (shape, None))
    )
    assert abs(cycles - by_hand) < 0.005 * by_hand
    phases = simulate_kernel(te.lower(te.auto_schedule(y, SPLIT, tiling)), SPLIT).cycles
    assert alone < cycles < 1.15 * alone < phases


def test_slots_hide_the_round_trip_through_l2_where_tiles_are_short():
    a, b = te.placeholder((2048, 64), name="a"), te.placeholder((64, 2048), name="b")
    y = te.renamed(gelu(te.renamed(te.matmul(a, b), "c")), "y")
    took = []
    for slots in (1, 2, 4, 8):
        s = te.stream(tiled(y, GemmSchedule(128, 64, 128, 1, 4, 6)), "c", slots)
        s = te.split(s, "y", loop_of(s, "_i_i"), 16)
        took.append(simulate_kernel(te.lower(s), SPLIT).cycles)
    assert took[0] > 1.3 * took[1] > took[2] >= took[3]
    assert took[3] > 0.99 * took[2]


# -- refusals --------------------------------------------------------------------------------------
def matrix(m=64, k=32, n=48):
    a, b = te.placeholder((m, k), name="a"), te.placeholder((k, n), name="b")
    return te.renamed(te.matmul(a, b), "c")


def outputs_apart():
    c = matrix()
    return tiled([te.renamed(te.vabs(c), "y"), te.renamed(te.vexp(c), "z")])


REFUSED = {
    "a product not tiled": (
        lambda: te.stream(te.create_schedule(te.vabs(matrix()), SPLIT), "c"),
        "sums in L0C",
        "not yet scheduled",
    ),
    "coupled cores": (
        lambda: te.stream(tiled(te.vabs(matrix()), chip=chip_of("Ascend910A")), "c"),
        "sums in L0C",
        "cores are apart",
    ),
    "a stage that is none": (lambda: te.stream(tiled(te.vabs(matrix())), "vabs"), "vabs"),
    "no reader": (lambda: te.stream(tiled(matrix()), "c"), "the caller"),
    "a fold behind it": (
        lambda: te.stream(tiled(te.reduce_max(matrix(), 1)), "c"),
        "elementwise readers",
    ),
    "two ends": (lambda: te.stream(outputs_apart(), "c"), "y, z", "the last"),
    "a reader already scheduled": (
        lambda: te.stream(te.split(tiled(te.vabs(matrix())), "vabs", "i", 16), "c"),
        "not yet scheduled",
    ),
    "no slot": (lambda: te.stream(tiled(te.vabs(matrix())), "c", 0), "1 to 15 slots", "0"),
    "16 slots": (lambda: te.stream(tiled(te.vabs(matrix())), "c", 16), "1 to 15 slots", "16"),
    "half a slot": (lambda: te.stream(tiled(te.vabs(matrix())), "c", 1.5), "1 to 15", "1.5"),
    "a tile on every core": (lambda: te.stream(one_each(), "c"), "innermost loop around tiles"),
}


def one_each():
    s = te.create_schedule(te.vabs(matrix()), SPLIT)
    s = te.split(te.cache_write(s, "c", "L0C"), "c", "m", 16)
    return te.compute_at(te.bind(s, "c", "m_o"), "c_l0c", "c", "m_o")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_streamed_is_refused(name):
    make, *words = REFUSED[name]
    with pytest.raises(ScheduleError) as found:
        make()
    assert all(word in str(found.value) for word in words), found.value


def test_a_replay_for_coupled_cores_is_refused_when_it_is_lowered():
    y, _ = program("clipped", GemmShape(64, 32, 48))
    s = te.stream(tiled(y), "vrelu")
    with pytest.raises(ScheduleError, match="Ascend910A, whose cores do both"):
        te.lower(te.replay(y, chip_of("Ascend910A"), s.steps))


@pytest.mark.parametrize(
    ("stage", "loop", "words"),
    [
        ("a_l1", "i_i_i", "a_l1: no further in than c, at y.j_i_o"),
        ("vadd", "i_o", "c_ub: no further out than c, at y.j_i_o"),
    ],
)
def test_a_tile_on_the_wrong_side_of_the_ring_is_refused_when_it_is_lowered(stage, loop, words):
    y, _ = program("gelu", GemmShape(64, 32, 48))
    s = te.compute_at(te.stream(tiled(y), "c"), stage, "y", loop)
    with pytest.raises(ScheduleError, match=words):
        te.lower(s)


def test_a_nest_inside_another_one_is_refused_when_it_is_lowered():
    h = te.renamed(te.vabs(matrix()), "h")
    s = te.split(
        te.cache_write(te.create_schedule(te.reduce_max(h, 1), SPLIT), "c", "L0C"), "c", "m", 16
    )
    s = te.stream(te.compute_at(s, "c_l0c", "c", "m_o"), "c")
    s = te.compute_at(te.split(s, "reduce_max", "i", 16), "h", "reduce_max", "i_o")
    with pytest.raises(ScheduleError, match="reader's own; got in that of reduce_max"):
        te.lower(s)


def test_a_tile_that_ub_cannot_hold_is_refused_with_its_bytes():
    y, _ = program("gelu", GemmShape(256, 32, 256))
    s = te.stream(tiled(y, GemmSchedule(128, 32, 256, 1, 1, 1)), "c")
    with pytest.raises(CapacityError, match="bytes of UB"):
        te.lower(s)
    te.lower(te.split(s, "y", loop_of(s, "_i_i"), 16))
