"""Default schedules: how near the roofline they come, and that awkward shapes get one at all."""

import numpy as np
import pytest
from dsl_oracles import (
    binary,
    broadcast,
    cast,
    compare,
    cut,
    fold,
    known,
    layer_norm,
    reshape,
    rounding,
    scalar,
    select,
    softmax,
    transpose,
    unary,
)
from dsl_strategies import CHIP_CASES, array, assert_time, check_auto, chip_of

from ascend_lab.machine.isa import sanitize
from ascend_lab.machine.sim import simulate_kernel
from ascend_lab.operators import dsl as te
from ascend_lab.operators.dsl.tensor import topological

REAL = ("Ascend310", "Ascend310P3", "Ascend910A", "Ascend910B2")


def tensor(*shape, dtype="fp16", name=""):
    return te.placeholder(shape, dtype, name)


def memory_share(outputs, chip):
    """Useful bytes over what device memory could move in the kernel's time.

    More than L2 holds (192 MB on the 910B2): smaller results stay there.
    """
    tensors = [outputs] if isinstance(outputs, te.Tensor) else list(outputs)
    timeline = simulate_kernel(te.lower(te.auto_schedule(tensors, chip)), chip)
    inputs = {t for t in topological(tensors) if t.body is None}
    size = sum(t.size_bytes for t in (*inputs, *tensors))
    return size / (timeline.cycles / chip.clock_hz) / chip.device_memory.rate_bytes_per_s


def soft(x, axis=-1):
    top = te.broadcast(te.reduce_max(x, axis, True), x.shape)
    power = te.vexp(te.vsub(x, top))
    return te.vdiv(power, te.broadcast(te.reduce_sum(power, axis, True), x.shape))


def adam(count):
    p, g, m, v = (tensor(count, dtype="fp32", name=n) for n in "pgmv")
    m2 = te.vadd(te.vmuls(m, 0.9), te.vmuls(g, 0.1))
    v2 = te.vadd(te.vmuls(v, 0.99), te.vmuls(te.vmul(g, g), 0.01))
    step = te.vdiv(m2, te.vadds(te.vsqrt(v2), 1e-8))
    return m2, v2, te.vsub(p, te.vmuls(step, 1e-3))


# -- how near the roofline -------------------------------------------------------------------------
@pytest.mark.parametrize("chip", REAL)
@pytest.mark.parametrize("shape", [(99, 300), (97, 3, 40), (1, 4000), (128, 16), (50, 9)])
def test_a_number_of_each_row_is_stored_beside_the_row(chip, shape):
    """Rows over half their largest element, and this: one nest, but for rows fewer than cores."""
    values = array(np.random.default_rng(0), shape, "fp16", 0.5)
    x = known(values, "fp16", "x")
    top = fold("max", x, len(shape) - 1, keepdims=True)
    halves = scalar("vmuls", top, 0.5)
    quotients = binary("vdiv", x, broadcast(halves, shape))
    kernel = check_auto([quotients, halves], {"x": values}, chip)
    cores = chip_of(chip).core_count * chip_of(chip).vector_cores_per_core
    rows = values.size // shape[-1]
    assert (len(kernel.phases) == 1) == (rows >= cores)


@pytest.mark.parametrize("chip", REAL)
def test_a_large_add_runs_at_the_speed_of_memory(chip):
    chip = chip_of(chip)
    for count, dtype in ((1 << 27, "fp16"), (1 << 26, "fp32"), (130_000_001, "fp16")):
        a = tensor(count, dtype=dtype, name="a")
        b = tensor(count, dtype=dtype, name="b")
        assert 0.85 <= memory_share(te.vadd(a, b), chip) <= 1.0 + 1e-9


STREAMS = {
    "relu": (0.85, lambda: te.vrelu(tensor(1 << 27, dtype="fp32"))),
    "bias": (
        0.85,
        lambda: te.vadd(tensor(131072, 2048), te.broadcast(tensor(2048), (131072, 2048))),
    ),
    "scale rows": (
        0.8,
        lambda: te.vmul(tensor(131072, 2048), te.broadcast(tensor(131072, 1), (131072, 2048))),
    ),
    "channel bias": (
        0.7,
        lambda: te.vadd(tensor(1024, 64, 3136), te.broadcast(tensor(64, 1), (1024, 64, 3136))),
    ),
    "row maxima": (0.7, lambda: te.reduce_max(tensor(262144, 1024), 1)),
    "column maxima": (0.7, lambda: te.reduce_max(tensor(262144, 1024), 0)),
    "largest of all": (0.7, lambda: te.reduce_max(tensor(262144, 1024), (0, 1))),
    "adam": (0.7, lambda: adam(1 << 26)),
}


@pytest.mark.parametrize("name", STREAMS)
def test_other_streams_keep_memory_busy(name):
    least, make = STREAMS[name]
    shares = {chip: memory_share(make(), chip_of(chip)) for chip in ("Ascend910A", "Ascend910B2")}
    assert min(shares.values()) >= least, shares
    assert max(shares.values()) <= 1.0 + 1e-9


# -- awkward shapes: they lower, are free of races, and keep the bounds of time --------------------
def column(x, axis=1):
    return te.broadcast(te.reduce_sum(x, axis, True), x.shape)


AWKWARD = {
    "one element": lambda: te.vadd(tensor(1), tensor(1)),
    "one element fp32 sum": lambda: te.reduce_sum(tensor(1, dtype="fp32"), 0),
    "prime length": lambda: te.vexp(tensor(1_000_003)),
    "rank 6": lambda: te.vrelu(tensor(2, 3, 4, 5, 6, 7)),
    "row too long for UB": lambda: te.vadd(tensor(3, 2_000_001), tensor(3, 2_000_001)),
    "softmax of short rows": lambda: soft(tensor(100_000, 3)),
    "softmax of one row": lambda: soft(tensor(1, 1000)),
    "softmax of long rows": lambda: soft(tensor(7, 65_537)),
    "softmax, row too long for UB": lambda: soft(tensor(2, 1_500_001)),
    "softmax over the first axis": lambda: soft(tensor(1000, 130), 0),
    "softmax over the middle": lambda: soft(tensor(17, 33, 65), 1),
    "softmax of softmax": lambda: soft(soft(tensor(64, 100)), 0),
    "sum of all": lambda: te.reduce_sum(tensor(1 << 22), 0),
    "sum of a prime": lambda: te.reduce_sum(tensor(1_000_003, dtype="fp32"), 0),
    "max of a prime": lambda: te.reduce_max(tensor(1_000_003), 0),
    "product of all": lambda: te.reduce_prod(tensor(33, 77, dtype="fp32"), (0, 1)),
    "first axis, wide": lambda: te.reduce_sum(tensor(3, 70_001), 0),
    "last axis of 2": lambda: te.reduce_max(tensor(70_001, 2), 1),
    "two outer axes": lambda: te.reduce_min(tensor(40, 50, 60), (0, 1)),
    "batch-norm axes": lambda: te.reduce_sum(tensor(8, 64, 28, 28), (0, 2, 3)),
    "five axes, two folded": lambda: te.reduce_max(tensor(3, 4, 5, 6, 7), (1, 3)),
    "five axes, three folded": lambda: te.reduce_min(tensor(3, 4, 5, 6, 7), (0, 2, 4)),
    "5-D broadcast": lambda: te.vadd(
        tensor(3, 4, 5, 6, 7), te.broadcast(tensor(4, 1, 6, 1), (3, 4, 5, 6, 7))
    ),
    "outer product": lambda: te.vmul(
        te.broadcast(tensor(300, 1), (300, 500)), te.broadcast(tensor(500), (300, 500))
    ),
    "broadcast of one number": lambda: te.broadcast(tensor(1), (333, 77)),
    "long column": lambda: te.vmul(tensor(50_001, 9), te.broadcast(tensor(50_001, 1), (50_001, 9))),
    "centred twice": lambda: centred(centred(tensor(64, 96), 1), 0),
    "adam of a prime": lambda: adam(1_000_003),
    "adam of one": lambda: adam(1),
    "outputs in a row": lambda: in_a_row(tensor(1000)),
    "two programs in one": lambda: (te.vabs(tensor(33)), te.vexp(tensor(7, 9))),
    "transpose": lambda: te.transpose(tensor(129, 257)),
    "transpose of vectors": lambda: te.transpose(tensor(100, 64, 48), (1, 0, 2)),
    "4-D permutation": lambda: te.transpose(tensor(2, 12, 40, 64), (0, 2, 1, 3)),
    "slice of the last column": lambda: te.slice(tensor(100, 100), (0, 99), (100, 100)),
    "matmul of 1": lambda: te.matmul(tensor(1, 1), tensor(1, 1)),
    "matmul of primes": lambda: te.matmul(tensor(127, 257), tensor(257, 67)),
    "matmul times a vector": lambda: te.matmul(tensor(1, 4096), tensor(4096, 1000)),
    "matmul, long k": lambda: te.matmul(tensor(16, 100_000), tensor(100_000, 16)),
    "attention": lambda: attention(64, 48),
}


def centred(x, axis):
    mean = te.vmuls(te.reduce_sum(x, axis, True), 1.0 / x.shape[axis])
    return te.vsub(x, te.broadcast(mean, x.shape))


def in_a_row(x):
    out = [x]
    for number in range(4):
        out.append(te.renamed(te.vadds(te.vabs(out[-1]), 1.0), f"y{number}"))
    return out[1:]


def attention(length, width):
    q, k, v = (tensor(2, length, width) for _ in "qkv")
    scores = te.vmuls(te.matmul(q, k, trans_b=True), width**-0.5)
    return te.matmul(soft(scores), v)


@pytest.mark.parametrize("chip", ["Ascend910A", "Ascend910B2"])
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_expressions_get_a_default_schedule(name, chip):
    """They lower in few instructions, without races, within the bounds of time; steps replay."""
    made = AWKWARD[name]()
    outputs = [made] if isinstance(made, te.Tensor) else list(made)
    schedule = te.auto_schedule(outputs, chip_of(chip))
    kernel = te.lower(schedule)
    assert_time(kernel, chip_of(chip))
    if kernel.executed_count < (20_000 if chip == "Ascend910A" else 5_000):
        assert sanitize(kernel, chip_of(chip)) == []
    assert te.replay(outputs, chip_of(chip), schedule.to_json()) == schedule
    static = sum(len(list(p.program.instructions())) for ph in kernel.phases for p in ph.parts)
    assert static < 2500, static


# -- programs that once went wrong -----------------------------------------------------------------
def chained(x, count):
    """x + x, and so on: the outputs y0, y1, ..., each of the one before."""
    out = [x]
    for number in range(count):
        out.append(binary("vadd", out[-1], x).named(f"y{number}"))
    return out[1:]


def output_through_inlined_values(x):
    first, second = chained(x, 2)
    value = unary("vabs", unary("vabs", second))
    return first, second, select(compare(value, x, "gt"), value, x)


def output_that_is_folded(x):
    (first,) = chained(x, 1)
    whole = rounding("floor", binary("vadd", first, x)).named("y1")
    return first, whole, fold("sum", whole, (0, 1), keepdims=True)


def fold_of_a_fold(x, b):
    least = fold("min", x, 0)
    total = cast(fold("sum", least, 0), "fp32").named("y0")
    return total, binary("vmax", least, broadcast(b, least.shape))


def fold_of_an_output_plus_a_column(x, b):
    (first,) = chained(x, 1)
    total = fold("sum", first, 0).named("y1")
    return first, total, binary("vadd", total, broadcast(b, (3, 3, 2)))


def two_broadcasts_of_one_tensor(x):
    turned = broadcast(reshape(x, (1, 33, 1)), (1, 33, 33))
    return (binary("vadd", turned, broadcast(x, (1, 33, 33))),)


def kept_fold_that_is_read(x):
    total = fold("sum", x, 0, keepdims=True).named("y0")
    return total, scalar("vmins", total, -2)


def copy_beside_a_computation(x):
    return cut(x, (0,), (4,), (1,)).named("y0"), scalar("vadds", scalar("vmuls", x, 2), 1)


def softmax_and_softmax_of_it(x, b):
    first = softmax(x, -1)
    size = unary("vabs", first).named("y0")
    both = binary("vadd", size, broadcast(b, first.shape)).named("y1")
    return size, both, softmax(first, 1)


def norm_over_rows_then_sum(x, g, b):
    first, second, value = chained(x, 3)
    return first, second, fold("sum", layer_norm(binary("vadd", value, x), (0,), g, b), 1)


def copied_output_that_is_read(x):
    first = reshape(x, (1, 1)).named("y0")
    return first, binary("vadd", first, broadcast(x, (1, 1)))


def slice_of_a_softmax(x):
    first = unary("vabs", x).named("y0")
    second = unary("vabs", first).named("y1")
    value = unary("vabs", binary("vadd", softmax(second, 1), x))
    return first, second, cut(value, (0, 1), (1, 2), (1, 1))


def sums_as_rows_values_as_columns(x):
    sums = broadcast(fold("sum", x, 1), (16, 16))
    return (binary("vadd", sums, broadcast(x, (16, 16))),)


def product_beside_a_difference(x, b):
    product = fold("prod", x, (1, 3), keepdims=True).named("y0")
    return product, binary("vsub", x, broadcast(b, x.shape))


def transposed_sum_of_rows(x):
    sums = broadcast(fold("sum", x, 1, keepdims=True), x.shape)
    return (transpose(binary("vmul", x, sums), (1, 0)),)


def norm_over_everything(x, g, b):
    return (layer_norm(x, (0, 1), g, b),)


ONCE_WRONG = (
    ("int32", lambda x: [fold("sum", x, (0, 1, 2), keepdims=True)], (13, 5, 16)),
    ("fp16", output_through_inlined_values, (7, 16, 2)),
    ("fp16", output_that_is_folded, (1, 2, 2)),
    ("int32", fold_of_a_fold, (5, 5, 7, 3), (1,)),
    ("fp16", norm_over_everything, (7, 5), (7, 5), (7, 5)),
    ("fp16", norm_over_everything, (1, 1), (1, 1), (1, 1)),
    ("fp16", fold_of_an_output_plus_a_column, (1, 3, 3, 2), (3, 3, 1)),
    ("fp16", two_broadcasts_of_one_tensor, (1, 1, 33)),
    ("int32", kept_fold_that_is_read, (1, 2)),
    ("fp16", copy_beside_a_computation, (4,)),
    ("fp16", lambda x: [softmax(softmax(x, 1), 0)], (20, 17)),
    ("fp16", softmax_and_softmax_of_it, (1, 2, 3, 2), (2,)),
    ("fp16", norm_over_rows_then_sum, (2, 2), (2, 1), (2, 1)),
    ("fp16", copied_output_that_is_read, (1,)),
    ("fp16", slice_of_a_softmax, (1, 2)),
    ("fp16", lambda x: [reshape(reshape(x, (1, 2, 2)), (4,))], (2, 2)),
    ("fp32", sums_as_rows_values_as_columns, (16, 1)),
    ("int32", product_beside_a_difference, (7, 13, 5, 3), (3,)),
    ("fp32", transposed_sum_of_rows, (33, 20)),
)


@pytest.mark.parametrize("chip", CHIP_CASES)
@pytest.mark.parametrize(("dtype", "make", "shapes"), [(d, m, s) for d, m, *s in ONCE_WRONG])
def test_programs_that_once_went_wrong(dtype, make, shapes, chip):
    rng = np.random.default_rng(10)
    arrays = {f"x{i}": array(rng, s, dtype) for i, s in enumerate(shapes)}
    outputs = make(*(known(a, dtype, name) for name, a in arrays.items()))
    named = [o if o.tensor.name else o.named("last") for o in outputs]
    check_auto(named, arrays, chip, whole=False)
