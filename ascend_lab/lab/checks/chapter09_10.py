"""Checks of chapters 9 and 10: layouts, and operators fused.

9: the address of a weight, ND to FRACTAL_NZ, the loops of any conversion.
10: what fusing a chain gains, a gradient as one nest, a shift in place.

A judge returns None for a right answer, else the end of the sentence
"your function returned ..., ", for example "with 5 loops; 3 are enough".
"""

import math
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from ascend_lab import errors
from ascend_lab.lab.checks import chapter03_04, chapter06_06a, core as ex
from ascend_lab.machine import isa, sim
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.layout import (
    AddressMap,
    address,
    address_map,
    addresses as addresses_of,
    pack,
)
from ascend_lab.operators import dsl

TYPES = {"int8": np.int8, "fp16": np.float16, "fp32": np.float32}
SIDES = (1, 7, 15, 16, 17, 30, 31, 32, 33, 50, 100)


def _numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return an array of the numbers 1 to 97, over and over: 0 would look like padding."""
    return (np.arange(math.prod(shape)) % 97 + 1).reshape(shape).astype(TYPES[dtype])


def _judge_weight_address(got: Any, case: ex.Case) -> str | None:
    """Judge the address of a weight in FRACTAL_Z by the package's map."""
    if not isinstance(got, int | np.integer):
        return f"expected a whole number, got a {type(got).__name__}"
    weights = address_map("FRACTAL_Z", case["shape"], "fp16", c0=case["c0"])
    return ex.equal_to(int(address(weights, case["index"])))(got)


@ex.judged(_judge_weight_address)
def check_ex_09_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(index, shape, c0)`: the address of weight (n, c, h, w) in FRACTAL_Z."""
    sides = (1, 70), (1, 70), (1, 8), (1, 8)
    shape = tuple(int(rng.integers(low, high)) for low, high in sides)
    index = tuple(int(rng.integers(0, n)) for n in shape)
    return {"index": index, "shape": shape, "c0": int(rng.choice((8, 16, 32)))}


def nest(source: AddressMap, target: AddressMap) -> list[tuple[int, int, int]]:
    """Return the fewest loops (count, source step, target step) that visit every element."""
    loops = []
    for axis, size in enumerate(source.shape):
        maps = [[p for p in own.pieces if p.axis == axis] for own in (source, target)]
        marks = sorted({size, *(p.step for pieces in maps for p in pieces)})
        for low, high in pairwise(marks):
            found = (max((p for p in own if p.step <= low), key=lambda p: p.step) for own in maps)
            loops.append((high // low, *(p.stride * (low // p.step) for p in found)))
    # A loop joins the one around it if that goes on where this one ends, in both layouts.
    merged: list[tuple[int, int, int]] = []
    for count, source_step, target_step in sorted(loops, key=lambda loop: -loop[2]):
        if merged and merged[-1][1:] == (count * source_step, count * target_step):
            outer_count, _, _ = merged.pop()
            merged.append((outer_count * count, source_step, target_step))
        else:
            merged.append((count, source_step, target_step))
    return merged


def _judge_loops(got: Any, case: ex.Case) -> str | None:
    """Judge the loops of a conversion by the pairs of addresses they visit, number and order."""
    maps = (case["source"], case["target"])
    visited = np.zeros((2, 1), int)  # source and target addresses, in the order of the loops
    for count, *steps in got:
        offsets = np.multiply.outer(steps, np.arange(count))[:, None]
        visited = (visited[:, :, None] + offsets).reshape(2, -1)
    expected = np.stack([addresses_of(layout_map).ravel() for layout_map in maps])
    if visited.shape != expected.shape:
        return f"which visits {visited.shape[1]:,} elements, expected {expected.shape[1]:,}"
    visited_by_target = visited[:, visited[1].argsort()]
    expected_by_target = expected[:, expected[1].argsort()]
    if not np.array_equal(visited_by_target, expected_by_target):
        return "which takes elements to wrong places"
    if len(got) > (fewest := len(nest(*maps))):
        return f"with {len(got)} loops; {fewest} are enough"
    steps = [loop[2] for loop in got]
    return None if steps == sorted(steps, reverse=True) else "expected the target in rising order"


MATRICES = "ND", "FRACTAL_NZ", "FRACTAL_ZZ", "FRACTAL_ZN"
IMAGES = "NCHW", "NHWC", "NC1HWC0", "FRACTAL_Z"


def _maps(source: str, target: str, shape: tuple[int, ...], dtype: str = "fp16") -> ex.Case:
    """Return the address maps of one shape in two layouts."""
    return {
        "source": address_map(source, shape, dtype),
        "target": address_map(target, shape, dtype),
    }


@ex.judged(
    _judge_loops,
    edges=[
        _maps("ND", "FRACTAL_NZ", (32, 48)),
        _maps("FRACTAL_ZZ", "FRACTAL_ZN", (64, 64), "int8"),
        _maps("NCHW", "NCHW", (2, 3, 4, 5)),
        _maps("NHWC", "FRACTAL_Z", (16, 32, 1, 3)),
        _maps("ND", "FRACTAL_NZ", (3, 16, 16)),
    ],
    cases=20,
)
def check_ex_09_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(source, target)`: the loops of a conversion between two layouts without padding."""
    lead, high, wide, side = (int(n) for n in rng.integers(1, 4, 4))
    if rng.integers(0, 2):
        layouts = MATRICES
        shape: tuple[int, ...] = (lead, 32 * high, 32 * wide)
    else:
        layouts = IMAGES
        shape = (16 * lead, 32 * high, wide, side)
    source, target = (str(name) for name in rng.choice(layouts, 2))
    return _maps(source, target, shape, str(rng.choice(list(TYPES))))


def _judge_fractal_array(got: Any, case: ex.Case) -> str | None:
    """Judge an array in FRACTAL_NZ by values, shape and dtype."""
    x = case["x"]
    name = next(name for name, dtype in TYPES.items() if x.dtype == dtype)
    expected = pack(address_map("FRACTAL_NZ", x.shape, name), x)
    wrong = ex.equal_to(expected)(got)
    if wrong is None and got.dtype != expected.dtype:
        wrong = f"of {got.dtype}, expected {expected.dtype}"
    return wrong


@ex.judged(
    _judge_fractal_array,
    edges=[
        (_numbers((1, 1), "fp16"),),
        (_numbers((16, 32), "int8"),),
        (_numbers((8, 100, 30), "fp16"),),
        (_numbers((8, 100, 30), "int8"),),
    ],
    cases=20,
)
def check_ex_09_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(x)`: an array of two or more axes in FRACTAL_NZ, (..., N1, M1, 16, C0)."""
    lead = [int(n) for n in rng.integers(1, 4, int(rng.integers(0, 3)))]
    shape = (*lead, *(int(n) for n in rng.choice(SIDES, 2)))
    return {"x": _numbers(shape, str(rng.choice(list(TYPES))))}


# -- chapter 10 -----------------------------------------------------------------------------------
CORES = 32
TILE = 1024
SLACK = 1.05
"""A schedule may take this many times the cycles of ours, not more."""


def gain(inputs: list[int]) -> float:
    """Return the bytes of a chain as separate kernels over those of one kernel.

    `inputs` has for each operator the tensors it reads beside the result before it. Separate
    kernels read these and the results between them, and write every result; one kernel reads the
    inputs and writes the last result. All tensors have one size.
    """
    links = len(inputs) - 1
    separate_tensors = sum(inputs) + links + len(inputs)
    fused_tensors = sum(inputs) + 1
    return separate_tensors / fused_tensors


# -- the gradient of tanh --------------------------------------------------------------------------
def tanh_gradient(elements: int) -> dsl.Tensor:
    """Return y = dy * (1 - t * t) with t = tanh(x), which is read twice."""
    x, dy = (dsl.placeholder((elements,), name=name) for name in ("x", "dy"))
    power = dsl.vadds(dsl.vexp(dsl.vmuls(x, -2.0)), 1.0)
    t = dsl.renamed(dsl.vadds(dsl.vmuls(dsl.vrec(power), 2.0), -1.0), "t")
    square = dsl.vmul(t, t)
    return dsl.renamed(dsl.vmul(dy, dsl.vadds(dsl.vmuls(square, -1.0), 1.0)), "y")


@cache
def _our_gradient(count: int) -> dsl.Schedule:
    """Return the schedule exercise 10.3 asks for: t is a tile with two slots, computed once."""
    s = dsl.create_schedule(tanh_gradient(count), load_chip("Ascend910A"))
    for stage in [stage.name for stage in s.state.stages]:
        if stage not in ("t", "y"):
            s = dsl.inline(s, stage)
    s = dsl.split(s, "y", "i", count // CORES)
    s = dsl.split(dsl.bind(s, "y", "i_o"), "y", "i_i", 8192)
    s = dsl.double_buffer(dsl.vectorise(s, "y", "i_i_i"), "y")
    return dsl.double_buffer(dsl.compute_at(s, "t", "y", "i_i_o"), "t")


# -- in place --------------------------------------------------------------------------------------
@ex.against(gain, edges=[(i,) for i in ([2, 0], [2], [1, 0, 0, 0], [2, 1, 1, 1])], rel_tol=1e-9)
def check_ex_10_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(inputs)`: bytes apart over bytes fused, given each operator's own inputs."""
    first = int(rng.integers(1, 4))
    return {"inputs": [first, *rng.integers(0, 4, int(rng.integers(0, 12))).tolist()]}


@ex.judged(cases=2, elements=range(2 * CORES * 8192, 9 * CORES * 8192, CORES * 8192))
def check_ex_10_3(got: Any, case: ex.Case) -> str | None:
    """Check `fn(elements)`: a schedule of the gradient of tanh on the 910A, as fast as ours."""
    if not isinstance(got, dsl.Schedule) or got.chip.name != "Ascend910A":
        return "expected a Schedule for the Ascend910A"
    count = case["elements"]
    ends = {"x": (-3, 3), "dy": (2, -1)}
    feed = {name: np.linspace(*two, count).astype(np.float16) for name, two in ends.items()}
    right = feed["dy"] * (1 - np.tanh(feed["x"].astype(np.float32)) ** 2)
    with suppress(errors.AscendLabError):
        if (phases := len(dsl.lower(got).phases)) > 1:
            return f"expected one phase, there are {phases}: t goes through memory"
    wrong = chapter06_06a.wrong_schedule(got, feed, right, 0.01, _our_gradient(count), SLACK)
    if wrong is None and "t" not in [stage.name for stage in got.state.stages]:
        wrong = "expected a stage t, computed in a tile: it is inlined"
    return wrong


@ex.judged(
    edges=[(1, 16), (3, 0), (4, 16), (4, 1024), (3, 2048)],
    cases=6,
    tiles=range(2, 7),
    shift=range(0, 3200, 16),
)
def check_ex_10_4(got: Any, case: ex.Case) -> str | None:
    """Check `fn(tiles, shift)`: x[shift + i] = relu(x[i] + b[i]) in place, three copies a tile."""
    if not isinstance(got, isa.Program):
        return "expected a Program (end with k.finish())"
    chip = load_chip("Toy")
    count = case["tiles"] * TILE
    shift = case["shift"]
    tensors = sorted((t.name, t.dtype, t.elements) for t in got.tensors)
    if tensors != [("b", "fp16", count), ("x", "fp16", count + shift)]:
        return f"expected fp16 tensors x of {count + shift} and b of {count} elements"
    rng = np.random.default_rng(count + shift)
    x, b = (rng.standard_normal(n).astype(np.float16) for n in (count + shift, count))
    expected = x.copy()
    expected[shift:] = np.maximum(x[:count] + b, 0)
    what = f"relu(x + b) from place {shift} on"
    if wrong := chapter03_04.wrong_run(got, chip, {"x": x, "b": b}, what, expected, name="x"):
        return wrong
    moved = sum(sim.simulate(got, chip).path_bytes.values())
    expected_bytes = 3 * 2 * count  # x and b are loaded, x is stored, in fp16
    if moved != expected_bytes:
        return f"expected {expected_bytes} bytes moved, three copies of each tile, it moves {moved}"
    return None
