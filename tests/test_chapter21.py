"""The checks and figures of chapter 21, and what its prose claims."""

import numpy as np
import pytest
from onnx_models import run_onnx

from ascend_lab.aoe.subgraph import (
    Region,
    SlicePlan,
    prepared,
    sliced,
)
from ascend_lab.aoe.subgraph.segments import Segments
from ascend_lab.aoe.subgraph.slicing import even, ranges_of
from ascend_lab.compiler import evaluate
from ascend_lab.compiler.onnx import export_onnx
from ascend_lab.compiler.slice import part_of
from ascend_lab.compiler.zoo import build
from ascend_lab.lab.checks.chapter21_22 import chain_rows, eyes
from ascend_lab.lab.figures.tuned_networks import Bands
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim.l2 import L2, Access

CHIP = load_chip("Ascend310P3")
KIB = 1024


@pytest.fixture(scope="module")
def net():
    return prepared(eyes(), CHIP)


# -- exercises -------------------------------------------------------------------------------------


def test_the_formula_of_the_halo_is_what_slice_rules_say(net):
    part = part_of(net, net.nodes, "eyes")
    found = ranges_of(part, Region("conv1", "pool", "height", even(56, 4)))
    rows = [found.spans[name, 1] for name in ("conv1", "conv2", "conv3", "conv4", "pool")]
    wanted = chain_rows([(3, 1)] * 3 + [(4, 4)], 14)
    assert [high - low for low, high in rows] == wanted == [62, 60, 58, 56, 14]


# -- what the prose says ---------------------------------------------------------------------------
@pytest.mark.parametrize("l2_rows", [4, 7, 9, 12, 40])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 12])
def test_bands_are_what_the_package_says_of_l2(count, l2_rows):
    l2 = L2(l2_rows * KIB, KIB)
    sizes = even(12, count)
    first = 0
    found = 0
    moved = 0
    low = max(sizes)

    def touch(row, write=False):
        nonlocal moved, found
        out = l2.touch([Access("t", row * KIB, KIB, write)])
        moved += out.write_back_bytes // KIB
        if not write:
            found += out.hits["t"] == 1.0
            moved += out.hits["t"] == 0.0

    for size in sizes:
        for i in range(size):
            touch(first + i)
            touch(12 + i, True)
        for i in range(size):
            touch(12 + i)
            touch(12 + low + first + i, True)
        first += size
    moved += l2.flush() // KIB
    bands = Bands(12, l2_rows, even(12, count), 0, False)
    assert (bands.count("hit"), bands.memory_rows) == (found, moved)


def test_the_sliced_graph_runs_as_onnx(net):
    plan = SlicePlan((Region("conv1", "pool", "batch", (4, 3)),))
    graph = sliced(net, plan)
    rng = np.random.default_rng(0)
    inputs = {"x": rng.integers(-2, 3, (7, 3, 224, 224)).astype(np.float16)}
    (got,) = run_onnx(export_onnx(graph), inputs).values()
    np.testing.assert_array_equal(got, evaluate(net, inputs)["pool"])


def test_kernels_on_one_image_fill_the_cores_less_well():
    """Launches apart: sixteen times one image takes longer than sixteen images at once."""
    work = {}
    for batch in (1, 16):
        segments = Segments(prepared(build("resnet50", batch=batch), CHIP), CHIP)
        floors = [segments.warm_time(i) for i in range(6)]
        launches = segments.launch_s * sum(kernels for _, kernels in floors)
        work[batch] = sum(time_s for time_s, _ in floors) - launches
    assert 16 * work[1] > 1.2 * work[16]
