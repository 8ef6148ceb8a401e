"""Bad input: the right error class, the numbers and names in the message, and a remedy."""

import json

import numpy as np
from dsl_strategies import chip_of
from message_lists import assert_messages

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
    "add of different shapes": lambda: te.vadd(X, tensor(6, name="b")),
    "select of different shapes": lambda: te.select(X, Y, tensor(4, 1)),
    "broadcast mismatch": lambda: te.broadcast(X, (4, 7)),
    "broadcast to fewer dimensions": lambda: te.broadcast(X, (6,)),
    "shapes that never broadcast": lambda: te.broadcast_shapes((8, 5, 3), (4, 3)),
    "axis below the rank": lambda: te.reduce_sum(X, -3),
    "axis above the rank": lambda: te.reduce_max(X, (0, 2)),
    "axis twice": lambda: te.reduce_min(X, (0, -2)),
    "gather axis": lambda: te.gather(X, INDEX, 2),
    "concat axis": lambda: te.concat([X, Y], 5),
    "concat of nothing": lambda: te.concat([]),
    "concat of other sizes": lambda: te.concat([X, tensor(4, 5)], 0),
    "reshape to another size": lambda: te.reshape(X, (5, 5)),
    "reshape with a rest": lambda: te.reshape(X, (5, -1)),
    "permutation": lambda: te.transpose(X, (0, 0)),
    "slice outside": lambda: te.slice(X, (0, 6), (4, 7)),
    "slice backwards": lambda: te.slice(X, (0, 3), (4, 2)),
    "slice of other rank": lambda: te.slice(X, (0,), (4,)),
    "negative padding": lambda: te.pad(X, ((0, 0), (-1, 0))),
    "empty shape": lambda: tensor(4, 0, name="x"),
    "no dimension": lambda: te.placeholder(()),
    "size that is not whole": lambda: te.placeholder((2.5,)),
    "fold axis of no step": lambda: te.reduce_axis(0, "k"),
    "matmul sizes": lambda: te.matmul(X, tensor(5, 4)),
    "matmul of a vector": lambda: te.matmul(X, tensor(6)),
    "matmul batches": lambda: te.matmul(tensor(2, 4, 6), tensor(3, 6, 4)),
    "conv2d rank": lambda: te.conv2d(X, X),
    "conv2d groups": lambda: te.conv2d(NCHW, tensor(8, 16, 3, 3), groups=3),
    "window too large": lambda: te.conv2d(NCHW, tensor(8, 16, 9, 3)),
    "stride of 0": lambda: te.pooling2d(IMAGE, 2, 0),
    "pooling rank": lambda: te.pooling2d(NCHW, 2, 2),
    "scatter shapes": lambda: te.scatter(X, INDEX, tensor(2, 6)),
    "too few indices": lambda: te.compute((4,), lambda i: X[i]),
    "too few parameters": lambda: te.compute((4, 6), lambda i: X[i, i]),
    "index outside": lambda: te.compute((4, 6), lambda i, j: X[i, j + 1]),
    "foreign axis": lambda: te.compute((4,), lambda i: X[i, te.reduce_axis(6, "k")]),
    "fold over a data axis": lambda: te.compute(
        (4,), lambda i: te.sum(X[i, i], axis=te.Axis("i", 4))
    ),
    "no formula": lambda: te.compute((4,), lambda i: 3.0),
    "two tensors of one name": lambda: te.create_schedule(
        te.vadd(tensor(4, name="a"), tensor(4, name="a")), TOY
    ),
    "an output that is an input": lambda: te.create_schedule(X, TOY),
}

TYPES = {
    "add of different formats": lambda: te.vadd(X, WIDE),
    "formula of different formats": lambda: te.compute((4, 6), lambda i, j: X[i, j] * WIDE[i, j]),
    "a number for a tensor": lambda: te.vadd(X, 1.0),
    "exp of whole numbers": lambda: te.vexp(WHOLE),
    "exp of an element, not of a tensor": lambda: te.exp(X),
    "division of whole numbers": lambda: te.vdiv(WHOLE, WHOLE),
    "bits of a float": lambda: te.vand(X, Y),
    "not of a float": lambda: te.vnot(X),
    "a fraction times whole numbers": lambda: te.vmuls(WHOLE, 0.5),
    "a number below the format": lambda: te.vadds(BYTES, -2),
    "a number above the format": lambda: te.vmuls(tensor(4, dtype="int8"), 1000),
    "a number no int32 holds": lambda: te.vmaxs(WHOLE, 2**40),
    "unknown format": lambda: te.placeholder((4,), "fp64"),
    "cast to an unknown format": lambda: te.cast_to(X, "double"),
    "floor of whole numbers": lambda: te.floor(WHOLE),
    "unknown comparison": lambda: te.vcmp(X, Y, "=="),
    "comparison of formats": lambda: te.vcmp(X, WIDE, "gt"),
    "select of formats": lambda: te.select(X, Y, WIDE),
    "concat of formats": lambda: te.concat([X, WIDE]),
    "float indices": lambda: te.gather(X, tensor(3)),
    "scatter with float indices": lambda: te.scatter(X, tensor(3), tensor(3, 6)),
    "scatter of formats": lambda: te.scatter(X, INDEX, tensor(3, 6, dtype="fp32")),
    "scatter mode": lambda: te.scatter(X, INDEX, tensor(3, 6), "max"),
    "pooling mode": lambda: te.pooling2d(IMAGE, 2, 2, mode="min"),
    "matmul in int32": lambda: te.matmul(WHOLE, WHOLE, trans_b=True),
    "matmul of two formats": lambda: te.matmul(X, tensor(6, 4, dtype="int8")),
    "result of a matmul": lambda: te.matmul(X, Y, trans_b=True, out_dtype="int8"),
}


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
    "unknown stage": lambda: te.split(start(), "z", "i", 4),
    "an input is no stage": lambda: te.split(start(), "x", "i", 4),
    "unknown loop": lambda: te.split(start(), "y", "q", 4),
    "factor too large": lambda: te.split(start(), "y", "j", 64),
    "factor of 0": lambda: te.split(start(), "y", "j", 0),
    "factor that is not whole": lambda: te.split(start(), "y", "j", 2.5),
    "unknown tail": lambda: te.split(start(), "y", "j", 16, tail="pad"),
    "guard on a fold": lambda: te.split(start(), "total", "rj", 32, tail="guard"),
    "split of a bound loop": lambda: te.split(
        te.bind(te.split(start(), "y", "i", 4), "y", "i_o"), "y", "i_o", 2
    ),
    "split of a loop that carries a tile": lambda: te.split(
        te.compute_at(start(), "total", "reshape", "i"), "reshape", "i", 2
    ),
    "bind of a fold, without rfactor": lambda: te.bind(
        te.split(start(), "total", "rj", 16), "total", "rj_o"
    ),
    "bind of an inner loop": lambda: te.bind(te.split(start(), "y", "i", 4), "y", "j"),
    "bind of a guard loop": lambda: te.bind(
        te.split(start(), "y", "i", 3, tail="guard"), "y", "i_o"
    ),
    "bind twice": bound_twice,
    "bind to more cores than there are": lambda: te.lower(te.bind(start(), "y", "i")),
    "bind of an attached stage": lambda: te.bind(
        te.compute_at(start(), "total", "reshape", "i"), "total", "i"
    ),
    "reorder a loop twice": lambda: te.reorder(start(), "y", "i", "i"),
    "reorder parts of one axis": lambda: te.reorder(
        te.split(start(), "y", "j", 16), "y", "j_i", "j_o"
    ),
    "fuse loops that are apart": lambda: te.fuse(start(), "y", "j", "i"),
    "fuse across a broadcast": lambda: te.fuse(start(), "broadcast", "i", "j"),
    "fuse after a split": lambda: te.fuse(te.split(start(), "e", "j", 16), "e", "i", "j_o"),
    "fuse data with a fold": lambda: te.fuse(start(), "total", "i", "rj"),
    "inline a fold": lambda: te.inline(start(), "total"),
    "inline an output": lambda: te.inline(start(), "y"),
    "inline a placed tile": lambda: te.inline(te.compute_at(start(), "e", "total", "i"), "e"),
    "compute_at of a non-producer": lambda: te.compute_at(start(), "e", "y", "i"),
    "compute_at of itself": lambda: te.compute_at(start(), "e", "e", "i"),
    "compute_at of an input": lambda: te.compute_at(start(), "x", "e", "i"),
    "compute_at an unknown loop": lambda: te.compute_at(start(), "e", "total", "p"),
    "compute_at of the output into what feeds it": lambda: te.compute_at(
        start(), "y", "broadcast", "i"
    ),
    "a reader outside": lambda: te.compute_at(shared_value(), "e", "left", "i"),
    "unknown buffer": lambda: te.cache_read(start(), "x", "L9"),
    "cache of what nobody reads": lambda: te.cache_read(start(), "y", "UB"),
    "cache_write after a split": lambda: te.cache_write(te.split(start(), "y", "i", 4), "y", "UB"),
    "too many slots": lambda: te.double_buffer(start(), "y", 9),
    "align a tensor in GM": lambda: te.storage_align(start(), "y", 8),
    "align to half a block": lambda: te.storage_align(
        te.cache_read(start(), "x", "UB", "e"), "x_ub", 12
    ),
    "materialise a scheduled stage": lambda: te.materialise(te.split(start(), "e", "i", 4), "e"),
    "materialise a read that is not there": lambda: te.materialise(start(), "y", 2),
    "rfactor of a data loop": lambda: te.rfactor(start(), "total", "i"),
    "rfactor without a split": lambda: te.rfactor(start(), "total", "rj"),
    "rfactor with a rest": lambda: te.rfactor(
        te.split(start(), "total", "rj", 20), "total", "rj_o"
    ),
    "vectorise a bound loop": lambda: te.vectorise(
        te.bind(te.split(start(), "y", "i", 4), "y", "i_o"), "y", "i_o"
    ),
    "vectorise the cube": lambda: te.vectorise(product(), "c", "m"),
    "tensorize a vector stage": lambda: te.tensorize(start(), "y", "i"),
    "tensorize outside L0C": lambda: te.tensorize(product(), "c", "m"),
    "tensorize half a fractal": lambda: te.tensorize(
        te.split(cached(), "c_l0c", "m", 8), "c_l0c", "m_i"
    ),
    "tensorize without k": lambda: te.tensorize(
        te.reorder(cached(), "c_l0c", "k", "m", "n"), "c_l0c", "m"
    ),
    "loops of a hand-written kernel": lambda: te.split(moved(), "y", "i", 4),
    "JSON that is none": lambda: te.replay(output(), TOY, "{split"),
    "JSON without steps": lambda: te.replay(output(), TOY, '{"chip": "Toy"}'),
    "JSON of an unknown step": lambda: replayed([["unroll", "y", "i"]]),
    "JSON with missing arguments": lambda: replayed([["split", "y", "i"]]),
    "JSON with wrong arguments": lambda: replayed([["split", "y", "i", "4", "cut"]]),
    "JSON with arguments of wrong kind": lambda: replayed([["reorder", "y", 3]]),
    "JSON of a step that is no list": lambda: replayed(["split"]),
    "JSON of an illegal step": lambda: replayed([["split", "y", "i", 400, "cut"]]),
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


# -- what shows later: buffers, arrays, indices ----------------------------------------------------
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


def lowered(elements):
    y = te.renamed(te.vadd(tensor(elements, name="a"), tensor(elements, name="b")), "y")
    return te.lower(te.create_schedule(y, TOY))


def run_of(make):
    """A call that runs a default schedule on arrays."""
    return lambda **arrays: te.run(te.auto_schedule(make(), TOY), arrays)


def product_of_six():
    return te.renamed(te.matmul(tensor(4, 6, name="a"), tensor(6, 3, name="b")), "c")


def grouped():
    y = te.conv2d(NCHW, tensor(8, 8, 3, 3, name="w"), groups=2)
    return te.lower(te.auto_schedule(y, TOY))


GOOD = np.ones((8, 48), np.float16)
A = np.ones((4, 6), np.float16)
B = np.ones((6, 3), np.float16)
vectors = run_of(output)
matrices = run_of(product_of_six)
LATER = {
    "a tile larger than UB": lambda: lowered(1 << 20),
    "a tile somewhat larger": lambda: lowered(1 << 16),
    "a grouped convolution": grouped,
    "an array that is no input": lambda: vectors(z=GOOD, x=GOOD),
    "an array of another shape": lambda: vectors(x=GOOD[:4]),
    "an array of another format": lambda: vectors(x=GOOD.astype(np.float32)),
    "a matrix of another shape": lambda: matrices(a=A, b=B.T[:2]),
    "a matrix that is no input": lambda: matrices(a=A, b=B, d=A),
    "a matrix of another format": lambda: matrices(a=A.astype(np.float32), b=B),
    **{
        f"{kind} with index {index}": lambda kind=kind, index=index: tiny(kind, (0, index, 1))
        for kind in ("gather", "scatter")
        for index in (5, -1)
    },
}


def test_what_is_refused_says_what_is_needed():
    assert "y" in tiny("gather", (0, 4, 1)) and "y" in tiny("scatter", (0, 4, 1))
    assert np.array_equal(vectors(x=GOOD)["y"], GOOD)
    for name, calls in (("shapes", SHAPES), ("types", TYPES), ("steps", STEPS), ("later", LATER)):
        assert_messages("dsl", f"test_dsl_errors, {name}", calls)
