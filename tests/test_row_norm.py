"""Layer norm with the cube's help: values, no races, cycles, and when the compiler takes it."""

import numpy as np
import pytest
from cube_checks import run_checked

from ascend_lab.aoe.operators import unit_of
from ascend_lab.compiler import GraphBuilder, compile_stages, evaluate
from ascend_lab.compiler.values import run_tasks
from ascend_lab.errors import CapacityError, PathError
from ascend_lab.fused.row_norm_kernel import (
    NormShape,
    fixed_operands,
    norm_launch,
    norm_launches,
    packed_bias,
    packed_scale,
)
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.layout import address_map, pack, unpack
from ascend_lab.operators import ops
from ascend_lab.operators.ops.verify import check_within

COUPLED = ("Ascend310", "Ascend310P3", "Ascend910A")
NORM = ops.get("layer_norm")
# (rows, columns), tile: one core has nothing, a rest of rows, of columns, one tile, many of them
SIZES = (
    ((1, 16), (1, 1)),
    ((16, 768), (1, 8)),
    ((177, 208), (2, 5)),
    ((1500, 48), (3, 2)),
    ((400, 1040), (4, 7)),
)


def tensors(x, scale, bias):
    """What a launch reads; rows that pad are NaN."""
    rows = -(-len(x) // 16) * 16
    padded = np.full((rows, x.shape[1]), np.nan, np.float16)
    padded[: len(x)] = x
    stored = pack(address_map("FRACTAL_NZ", padded.shape, "fp16"), padded)
    factors = {"scale": packed_scale(scale), "bias": packed_bias(bias)}
    return {"x": stored.reshape(-1), "ones": fixed_operands(), **factors}


def operands(x):
    rng = np.random.default_rng(1)
    factors = (rng.normal(mean, 0.5, x.shape[1]).astype(np.float16) for mean in (1, 0))
    return x.astype(np.float16), *factors


def launched(x, chip, tile, epsilon=1e-5):
    """Return what is computed, rows that pad left out, and what should be."""
    x, scale, bias = operands(x)
    shape = NormShape(-(-len(x) // 16), x.shape[1] // 16, epsilon)
    given = tensors(x, scale, bias)
    launch = norm_launch(shape, load_chip(chip), *tile)
    y = run_checked(launch, given, load_chip(chip), filled=given)["y"]
    whole = address_map("FRACTAL_NZ", (shape.rows * 16, x.shape[1]), "fp16")
    return unpack(whole, y)[: len(x)], NORM.reference(x, scale, bias, epsilon=epsilon)


def normal(shape, spread=1.0, mean=0.0):
    return np.random.default_rng(0).normal(mean, spread, shape)


# -- values ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("chip", COUPLED)
@pytest.mark.parametrize(("shape", "tile"), SIZES)
def test_values_are_as_exact_as_those_of_fp32(shape, tile, chip):
    check_within(NORM, *launched(normal(shape), chip, tile))


@pytest.mark.parametrize(
    ("x", "epsilon"),
    [
        (normal((32, 768), 3000.0, -30000.0), 1e-5),
        (np.where(normal((32, 768)) > 0, 65504, -65504), 1e-5),
        (np.where(normal((32, 768)) > 0.5, 1.23, 0.771), 1e-12),
        (normal((32, 768), 0.003), 1e-12),
        (np.full((32, 768), -0.1), 1e-12),
        (np.zeros((32, 768)), 1e-12),
    ],
    ids=["far off 0", "largest", "two values", "small", "equal", "zero"],
)
def test_values_of_unusual_rows(x, epsilon):
    check_within(NORM, *launched(x, "Ascend310", (2, 6), epsilon))


def test_a_row_of_infinity_leaves_its_neighbours_alone():
    x = normal((16, 96))
    x[3, 50] = np.inf
    got, wanted = launched(x, "Ascend310", (1, 6))
    assert np.isnan(got[3]).all()
    others = np.arange(16) != 3
    check_within(NORM, got[others], wanted[others])


# -- programs -------------------------------------------------------------------------------------
def test_what_does_not_fit_is_refused():
    shape = NormShape(4, 48, 1e-5)
    with pytest.raises(PathError):
        norm_launch(shape, load_chip("Ascend910B2"), 1, 6)
    with pytest.raises(CapacityError, match="L1"):
        norm_launch(shape, load_chip("Ascend310"), 16, 6)
    assert not [*norm_launches(shape, load_chip("Toy"))]
    assert len([*norm_launches(shape, load_chip("Ascend310"))]) == 2  # rows of a core


# -- in networks ----------------------------------------------------------------------------------
def network(rows=150, columns=96, constant=True):
    rng = np.random.default_rng(2)

    def weights(*shape):
        return net.constant(rng.normal(size=shape).astype(np.float16))

    net = GraphBuilder("net", "fp16")
    x = net.matmul(net.input("x", (rows, 64)), weights(64, columns))
    scale = weights(columns) if constant else net.input("scale", (columns,))
    y = net.layer_norm(x, scale, weights(columns))
    net.output(net.matmul(y, weights(columns, 64)))
    return net.build()


def norm_of(graph, chip):
    stages = compile_stages(graph, chip, passes=())
    return stages, next(task for task in stages.compiled.tasks if task.op == "layer_norm")


def multiplies(task):
    programs = [part.program for phase in task.lowered.kernel.phases for part in phase.parts]
    return any(i.op == "mmad" for program in programs for i, _ in program.instructions())


def assert_values(stages, x):
    """The kernels differ from NumPy by no more than a share of the largest number."""
    given = {"x": x.astype(np.float16)}
    (wanted,) = evaluate(stages.laid_out, given).values()
    (got,) = run_tasks(stages.compiled, given).values()
    off = np.abs(got.astype(float) - wanted.astype(float)).max()
    assert off <= 2e-3 * np.abs(wanted.astype(float)).max()


@pytest.mark.parametrize("rows", [150, 1600])
@pytest.mark.parametrize("chip", ["Ascend310", "Ascend910A"])
def test_a_network_computes_what_numpy_does(chip, rows):
    graph = network(rows)
    stages, task = norm_of(graph, chip)
    assert multiplies(task) == ((chip, rows) != ("Ascend910A", 150))
    assert_values(stages, np.random.default_rng(3).normal(size=(rows, 64)))


def test_it_is_taken_where_it_is_quicker_and_can_be_written():
    _, task = norm_of(network(), "Ascend310")
    assert multiplies(task)
    assert unit_of(task.piece, load_chip("Ascend310")) == (
        "",
        "it has a hand-written kernel without parameters",
    )
    for graph, chip in ((network(columns=90), "Ascend310"), (network(constant=False), "Ascend310"),
                        (network(16), "Ascend910A"), (network(), "Ascend910B2")):  # fmt: skip
        _, task = norm_of(graph, chip)
        assert not multiplies(task)
        assert unit_of(task.piece, load_chip(chip))[0] == "vector"
