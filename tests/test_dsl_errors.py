"""Bad input: the right error class, the numbers and names in the message, and a remedy."""

import json

import numpy as np
import pytest
from dsl_strategies import chip_of

from ascend_lab.errors import (
    AscendLabError,
    CapacityError,
    InputError,
    LayoutError,
    ScheduleError,
    ShapeError,
    SimulationError,
    TypeMismatchError,
)
from ascend_lab.machine.sim import execute
from ascend_lab.operators import dsl as te

TOY = chip_of("Toy")


def tensor(*shape, dtype="fp16", name=""):
    return te.placeholder(shape, dtype, name)


X = tensor(4, 6, name="x")
Y = tensor(4, 6, name="y")
WIDE = tensor(4, 6, dtype="fp32", name="wide")
WHOLE = tensor(4, 6, dtype="int32", name="whole")
BYTES = tensor(4, 6, dtype="uint8", name="bytes")
INDEX = tensor(3, dtype="int32", name="index")
NCHW = tensor(1, 16, 8, 8, name="image")
IMAGE = tensor(1, 1, 8, 8, 16, name="image")

SHAPES = {
    "add of different shapes": (lambda: te.vadd(X, tensor(6, name="b")), "x (4, 6)", "b (6,)"),
    "select of different shapes": (lambda: te.select(X, Y, tensor(4, 1)), "(4, 6)", "(4, 1)"),
    "broadcast mismatch": (lambda: te.broadcast(X, (4, 7)), "(4, 7)", "(4, 6)"),
    "broadcast to fewer dimensions": (lambda: te.broadcast(X, (6,)), "(6,)", "x (4, 6)"),
    "shapes that never broadcast": (
        lambda: te.broadcast_shapes((8, 5, 3), (4, 3)),
        "(8, 5, 3)",
        "(4, 3)",
        "5 and 4",
    ),
    "axis below the rank": (lambda: te.reduce_sum(X, -3), "-2 to 1", "-3"),
    "axis above the rank": (lambda: te.reduce_max(X, (0, 2)), "reduce_max", "2"),
    "axis twice": (lambda: te.reduce_min(X, (0, -2)), "once", "(0, -2)"),
    "gather axis": (lambda: te.gather(X, INDEX, 2), "-2 to 1", "2"),
    "concat axis": (lambda: te.concat([X, Y], 5), "-2 to 1", "5"),
    "concat of nothing": (lambda: te.concat([]), "at least one"),
    "concat of other sizes": (lambda: te.concat([X, tensor(4, 5)], 0), "(4, 6)", "(4, 5)"),
    "reshape to another size": (lambda: te.reshape(X, (5, 5)), "24 elements", "25"),
    "reshape with a rest": (lambda: te.reshape(X, (5, -1)), "24", "5"),
    "permutation": (lambda: te.transpose(X, (0, 0)), "0..1", "(0, 0)"),
    "slice outside": (lambda: te.slice(X, (0, 6), (4, 7)), "6"),
    "slice backwards": (lambda: te.slice(X, (0, 3), (4, 2)), "3, 2"),
    "slice of other rank": (lambda: te.slice(X, (0,), (4,)), "2 axes", "(0,)"),
    "negative padding": (lambda: te.pad(X, ((0, 0), (-1, 0))), "(-1, 0)"),
    "empty shape": (lambda: tensor(4, 0, name="x"), "x", "(4, 0)"),
    "no dimension": (lambda: te.placeholder(()), "()", "(1,)"),
    "size that is not whole": (lambda: te.placeholder((2.5,)), "2.5"),
    "fold axis of no step": (lambda: te.reduce_axis(0, "k"), "k", "0"),
    "matmul sizes": (lambda: te.matmul(X, tensor(5, 4)), "6 in (4, 6)", "5 in (5, 4)"),
    "matmul of a vector": (lambda: te.matmul(X, tensor(6)), "(4, 6)", "(6,)"),
    "matmul batches": (
        lambda: te.matmul(tensor(2, 4, 6), tensor(3, 6, 4)),
        "(2, 4, 6)",
        "(3, 6, 4)",
    ),
    "conv2d rank": (lambda: te.conv2d(X, X), "(n, c, h, w)", "(4, 6)"),
    "conv2d groups": (lambda: te.conv2d(NCHW, tensor(8, 16, 3, 3), groups=3), "3 groups", "16"),
    "window too large": (lambda: te.conv2d(NCHW, tensor(8, 16, 9, 3)), "8", "9"),
    "stride of 0": (lambda: te.pooling2d(IMAGE, 2, 0), "stride", "0"),
    "pooling rank": (lambda: te.pooling2d(NCHW, 2, 2), "(n, c1, h, w, c0)", "(1, 16, 8, 8)"),
    "scatter shapes": (lambda: te.scatter(X, INDEX, tensor(2, 6)), "(3,)", "(2, 6)"),
    "too few indices": (lambda: te.compute((4,), lambda i: X[i]), "2 indices", "1"),
    "too few parameters": (lambda: te.compute((4, 6), lambda i: X[i, i]), "2 indices", "1"),
    "index outside": (lambda: te.compute((4, 6), lambda i, j: X[i, j + 1]), "0..5", "1..6"),
    "foreign axis": (
        lambda: te.compute((4,), lambda i: X[i, te.reduce_axis(6, "k")]),
        "axes i",
        "k",
    ),
    "fold over a data axis": (
        lambda: te.compute((4,), lambda i: te.sum(X[i, i], axis=te.Axis("i", 4))),
        "reduce_axis",
    ),
    "no formula": (lambda: te.compute((4,), lambda i: 3.0), "3.0"),
    "two tensors of one name": (
        lambda: te.create_schedule(te.vadd(tensor(4, name="a"), tensor(4, name="a")), TOY),
        "one name",
        "a",
    ),
    "an output that is an input": (lambda: te.create_schedule(X, TOY), "input x"),
}

TYPES = {
    "add of different formats": (lambda: te.vadd(X, WIDE), "fp16", "fp32"),
    "formula of different formats": (
        lambda: te.compute((4, 6), lambda i, j: X[i, j] * WIDE[i, j]),
        "fp16 and fp32",
    ),
    "a number for a tensor": (lambda: te.vadd(X, 1.0), "1.0", "vadds"),
    "exp of whole numbers": (lambda: te.vexp(WHOLE), "vexp", "int32"),
    "exp of an element, not of a tensor": (lambda: te.exp(X), "a[i, j]", "te.vexp"),
    "division of whole numbers": (lambda: te.vdiv(WHOLE, WHOLE), "vdiv", "int32"),
    "bits of a float": (lambda: te.vand(X, Y), "vand", "fp16"),
    "not of a float": (lambda: te.vnot(X), "vnot", "fp16"),
    "a fraction times whole numbers": (lambda: te.vmuls(WHOLE, 0.5), "0.5", "int32"),
    "a number below the format": (lambda: te.vadds(BYTES, -2), "0", "255", "-2", "uint8"),
    "a number above the format": (lambda: te.vmuls(tensor(4, dtype="int8"), 1000), "127", "1000"),
    "a number no int32 holds": (lambda: te.vmaxs(WHOLE, 2**40), "int32"),
    "unknown format": (lambda: te.placeholder((4,), "fp64"), "'fp64'", "fp16"),
    "cast to an unknown format": (lambda: te.cast_to(X, "double"), "'double'"),
    "floor of whole numbers": (lambda: te.floor(WHOLE), "floor", "int32"),
    "unknown comparison": (lambda: te.vcmp(X, Y, "=="), "'=='", "gt"),
    "comparison of formats": (lambda: te.vcmp(X, WIDE, "gt"), "fp16", "fp32"),
    "select of formats": (lambda: te.select(X, Y, WIDE), "fp16 and fp32"),
    "concat of formats": (lambda: te.concat([X, WIDE]), "fp16 and fp32"),
    "float indices": (lambda: te.gather(X, tensor(3)), "int32", "fp16"),
    "scatter with float indices": (lambda: te.scatter(X, tensor(3), tensor(3, 6)), "int32", "fp16"),
    "scatter of formats": (
        lambda: te.scatter(X, INDEX, tensor(3, 6, dtype="fp32")),
        "fp16 and fp32",
    ),
    "scatter mode": (lambda: te.scatter(X, INDEX, tensor(3, 6), "max"), "'max'"),
    "pooling mode": (lambda: te.pooling2d(IMAGE, 2, 2, mode="min"), "'min'"),
    "matmul in int32": (lambda: te.matmul(WHOLE, WHOLE, trans_b=True), "fp16", "int32"),
    "matmul of two formats": (lambda: te.matmul(X, tensor(6, 4, dtype="int8")), "fp16 and int8"),
    "result of a matmul": (lambda: te.matmul(X, Y, trans_b=True, out_dtype="int8"), "int8"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    check(ShapeError, *SHAPES[name])


@pytest.mark.parametrize("name", TYPES)
def test_types(name):
    check(TypeMismatchError, *TYPES[name])


def check(kind, make, *words):
    """The call raises exactly this class; the message has the words; what to do stands there."""
    with pytest.raises(AscendLabError) as caught:
        make()
    error = caught.value
    assert type(error) is kind, repr(error)
    assert error.needed
    assert error.remedy, str(error)
    for word in words:
        assert word in str(error), f"{word!r} not in {str(error)!r}"


# -- schedules -------------------------------------------------------------------------------------
def start(chip=TOY):
    """total = sum over k of e = exp(x); y = total[i] * x[i, j]: x (8, 48) fp32."""
    x = te.placeholder((8, 48), "fp32", name="x")
    e = te.renamed(te.vexp(x), "e")
    total = te.renamed(te.reduce_sum(e, 1), "total")
    column = te.broadcast(te.reshape(total, (8, 1)), (8, 48))
    return te.create_schedule(te.renamed(te.vmul(column, x), "y"), chip)


def product(m=64, k=64, n=64, chip=TOY):
    a = te.placeholder((m, k), name="a")
    b = te.placeholder((k, n), name="b")
    return te.create_schedule(te.renamed(te.matmul(a, b, out_dtype="fp32"), "c"), chip)


def moved():
    x = te.placeholder((8, 48), name="x")
    return te.create_schedule(te.renamed(te.transpose(x), "y"), TOY)


def bound_twice():
    return te.bind(te.bind(te.split(start(), "y", "i", 4), "y", "i_o"), "y", "i_o")


def cached():
    return te.cache_write(product(), "c", "L0C")


STEPS = {
    "unknown stage": (lambda: te.split(start(), "z", "i", 4), "'z'", "e, total"),
    "an input is no stage": (lambda: te.split(start(), "x", "i", 4), "'x'", "cache_read"),
    "unknown loop": (lambda: te.split(start(), "y", "q", 4), "'q'", "(i, j)"),
    "factor too large": (lambda: te.split(start(), "y", "j", 64), "1 to 48", "64"),
    "factor of 0": (lambda: te.split(start(), "y", "j", 0), "1 to 48", "0"),
    "factor that is not whole": (lambda: te.split(start(), "y", "j", 2.5), "2.5"),
    "unknown tail": (lambda: te.split(start(), "y", "j", 16, tail="pad"), "'pad'", "cut"),
    "guard on a fold": (lambda: te.split(start(), "total", "rj", 32, tail="guard"), "rj", "twice"),
    "split of a bound loop": (
        lambda: te.split(te.bind(te.split(start(), "y", "i", 4), "y", "i_o"), "y", "i_o", 2),
        "y.i_o",
    ),
    "split of a loop that carries a tile": (
        lambda: te.split(te.compute_at(start(), "total", "reshape", "i"), "reshape", "i", 2),
        "reshape.i",
        "total",
    ),
    "bind of a fold, without rfactor": (
        lambda: te.bind(te.split(start(), "total", "rj", 16), "total", "rj_o"),
        "rj_o",
        "rfactor",
    ),
    "bind of an inner loop": (
        lambda: te.bind(te.split(start(), "y", "i", 4), "y", "j"),
        "j inside",
    ),
    "bind of a guard loop": (
        lambda: te.bind(te.split(start(), "y", "i", 3, tail="guard"), "y", "i_o"),
        "y.i_o",
        "cut",
    ),
    "bind twice": (bound_twice, "i_o"),
    "bind to more cores than there are": (lambda: te.lower(te.bind(start(), "y", "i")), "8", "2"),
    "bind of an attached stage": (
        lambda: te.bind(te.compute_at(start(), "total", "reshape", "i"), "total", "i"),
        "total",
    ),
    "reorder a loop twice": (lambda: te.reorder(start(), "y", "i", "i"), "('i', 'i')"),
    "reorder parts of one axis": (
        lambda: te.reorder(te.split(start(), "y", "j", 16), "y", "j_i", "j_o"),
        "j_o",
        "j_i",
    ),
    "fuse loops that are apart": (lambda: te.fuse(start(), "y", "j", "i"), "i, j"),
    "fuse across a broadcast": (lambda: te.fuse(start(), "broadcast", "i", "j"), "i and j"),
    "fuse after a split": (
        lambda: te.fuse(te.split(start(), "e", "j", 16), "e", "i", "j_o"),
        "i, j_o",
    ),
    "fuse data with a fold": (lambda: te.fuse(start(), "total", "i", "rj"), "rj"),
    "inline a fold": (lambda: te.inline(start(), "total"), "total", "fold"),
    "inline an output": (lambda: te.inline(start(), "y"), "y", "output"),
    "inline a placed tile": (
        lambda: te.inline(te.compute_at(start(), "e", "total", "i"), "e"),
        "e",
        "tile",
    ),
    "compute_at of a non-producer": (lambda: te.compute_at(start(), "e", "y", "i"), "y", "e"),
    "compute_at of itself": (lambda: te.compute_at(start(), "e", "e", "i"), "e"),
    "compute_at of an input": (lambda: te.compute_at(start(), "x", "e", "i"), "'x'"),
    "compute_at an unknown loop": (lambda: te.compute_at(start(), "e", "total", "p"), "'p'"),
    "compute_at of the output into what feeds it": (
        lambda: te.compute_at(start(), "y", "broadcast", "i"),
        "y",
        "broadcast",
    ),
    "a reader outside": (lambda: te.compute_at(shared_value(), "e", "left", "i"), "right"),
    "unknown buffer": (lambda: te.cache_read(start(), "x", "L9"), "'L9'", "UB"),
    "cache of what nobody reads": (lambda: te.cache_read(start(), "y", "UB"), "y", "none"),
    "cache_write after a split": (
        lambda: te.cache_write(te.split(start(), "y", "i", 4), "y", "UB"),
        "y",
        "first",
    ),
    "too many slots": (lambda: te.double_buffer(start(), "y", 9), "1 to 4", "9"),
    "align a tensor in GM": (lambda: te.storage_align(start(), "y", 8), "y", "GM"),
    "align to half a block": (
        lambda: te.storage_align(te.cache_read(start(), "x", "UB", "e"), "x_ub", 12),
        "multiple of 8",
        "12",
    ),
    "materialise a scheduled stage": (
        lambda: te.materialise(te.split(start(), "e", "i", 4), "e"),
        "e",
        "first",
    ),
    "materialise a read that is not there": (
        lambda: te.materialise(start(), "y", 2),
        "0 to 1",
        "2",
    ),
    "rfactor of a data loop": (lambda: te.rfactor(start(), "total", "i"), "total", "i"),
    "rfactor without a split": (lambda: te.rfactor(start(), "total", "rj"), "rj"),
    "rfactor with a rest": (
        lambda: te.rfactor(te.split(start(), "total", "rj", 20), "total", "rj_o"),
        "48",
        "20",
    ),
    "vectorise a bound loop": (
        lambda: te.vectorise(te.bind(te.split(start(), "y", "i", 4), "y", "i_o"), "y", "i_o"),
        "i_o",
    ),
    "vectorise the cube": (lambda: te.vectorise(product(), "c", "m"), "tensorize"),
    "tensorize a vector stage": (lambda: te.tensorize(start(), "y", "i"), "vector stage"),
    "tensorize outside L0C": (lambda: te.tensorize(product(), "c", "m"), "GM", "L0C"),
    "tensorize half a fractal": (
        lambda: te.tensorize(te.split(cached(), "c_l0c", "m", 8), "c_l0c", "m_i"),
        "16",
        "8",
    ),
    "tensorize without k": (
        lambda: te.tensorize(te.reorder(cached(), "c_l0c", "k", "m", "n"), "c_l0c", "m"),
        "k in multiples of 16",
    ),
    "loops of a hand-written kernel": (lambda: te.split(moved(), "y", "i", 4), "transpose"),
    "JSON that is none": (lambda: te.replay(output(), TOY, "{split"), "JSON"),
    "JSON without steps": (lambda: te.replay(output(), TOY, '{"chip": "Toy"}'), "steps"),
    "JSON of an unknown step": (lambda: replayed([["unroll", "y", "i"]]), "'unroll'", "split"),
    "JSON with missing arguments": (lambda: replayed([["split", "y", "i"]]), "split"),
    "JSON with wrong arguments": (lambda: replayed([["split", "y", "i", "4", "cut"]]), "4"),
    "JSON with arguments of wrong kind": (lambda: replayed([["reorder", "y", 3]]), "reorder"),
    "JSON of a step that is no list": (lambda: replayed(["split"]), "steps"),
    "JSON of an illegal step": (lambda: replayed([["split", "y", "i", 400, "cut"]]), "400"),
}


def shared_value():
    x = te.placeholder((8, 48), name="x")
    e = te.renamed(te.vexp(x), "e")
    outs = te.renamed(te.vabs(e), "left"), te.renamed(te.vrelu(e), "right")
    return te.create_schedule(outs, TOY)


def output():
    return te.renamed(te.vabs(te.placeholder((8, 48), name="x")), "y")


def replayed(rows):
    return te.replay(output(), TOY, json.dumps({"chip": "Toy", "steps": rows}))


@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    check(ScheduleError, *STEPS[name])


# -- what shows later: buffers, arrays, indices ----------------------------------------------------
def test_a_tile_larger_than_ub_says_so():
    y = te.renamed(te.vadd(tensor(1 << 20, name="a"), tensor(1 << 20, name="b")), "y")
    s = te.create_schedule(y, TOY)
    check(CapacityError, lambda: te.lower(s), "UB", str(TOY.buffers["UB"]))


def test_the_message_of_a_full_buffer_names_the_bytes_needed():
    y = te.renamed(te.vadd(tensor(1 << 16, name="a"), tensor(1 << 16, name="b")), "y")
    with pytest.raises(CapacityError) as caught:
        te.lower(te.create_schedule(y, TOY))
    numbers = [int(w) for w in str(caught.value).replace(",", " ").split() if w.isdigit()]
    assert any(n >= 1 << 17 for n in numbers), str(caught.value)


def tiny(kind, index):
    x = tensor(5, 16, name="x")
    picks = tensor(3, dtype="int32", name="index")
    if kind == "gather":
        y = te.gather(x, picks)
        rest = {}
    else:
        y = te.scatter(x, picks, tensor(3, 16, name="u"))
        rest = {"u": np.ones((3, 16), np.float16)}
    kernel = te.lower(te.auto_schedule(te.renamed(y, "y"), TOY))
    arrays = {"x": np.zeros((5, 16), np.float16), "index": np.array(index, np.int32), **rest}
    return execute(kernel, arrays, TOY)


@pytest.mark.parametrize("kind", ["gather", "scatter"])
@pytest.mark.parametrize("index", [(0, 5, 1), (0, 1, -1)])
def test_an_index_out_of_bounds_is_named(kind, index):
    bad = next(i for i in index if not 0 <= i < 5)
    check(SimulationError, lambda: tiny(kind, index), str(bad), "index")
    assert "y" in tiny(kind, (0, 4, 1))


def test_run_refuses_wrong_arrays():
    s = te.auto_schedule(output(), TOY)
    good = np.ones((8, 48), np.float16)
    check(InputError, lambda: te.run(s, {"z": good, "x": good}), "z")
    check(InputError, lambda: te.run(s, {"x": good[:4]}), "x", "(8, 48)", "(4, 48)")
    check(InputError, lambda: te.run(s, {"x": good.astype(np.float32)}), "fp16", "float32")
    assert np.array_equal(te.run(s, {"x": good})["y"], good)


def test_run_refuses_wrong_matrices():
    s = te.auto_schedule(
        te.renamed(te.matmul(tensor(4, 6, name="a"), tensor(6, 3, name="b")), "c"), TOY
    )
    a = np.ones((4, 6), np.float16)
    b = np.ones((6, 3), np.float16)
    check(InputError, lambda: te.run(s, {"a": a, "b": b.T[:2]}), "b")
    check(InputError, lambda: te.run(s, {"a": a, "b": b, "d": a}), "d")
    check(LayoutError, lambda: te.run(s, {"a": a.astype(np.float32), "b": b}), "fp16")


def test_a_grouped_convolution_says_what_to_use():
    y = te.conv2d(NCHW, tensor(8, 8, 3, 3, name="w"), groups=2)
    check(
        ScheduleError, lambda: te.lower(te.auto_schedule(y, TOY)), "one group", "2", "ops.compile"
    )


def test_there_are_enough_cases():
    assert len(SHAPES) + len(TYPES) + len(STEPS) > 100
