"""Checks of chapters 1 and 2.

1: bracket and upgrade, masks and repeats, divergence, coalescing, a warp scheduler.
2: a route for convolution data, a missing flag, the largest double buffer, a long product.

A judge (`_judge_...`) returns None for a right answer, else the end of the sentence "your function
returned ..., ", for example "but two steps issue in one cycle".
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from ascend_lab import errors
from ascend_lab.lab.checks import core as ex
from ascend_lab.lab.checks.chapter03_04 import wrong_run
from ascend_lab.lab.machines import Simt, VectorOp, plain_ops, run_vector, simt, units_touched
from ascend_lab.machine import isa, sim
from ascend_lab.machine.chip import DTYPE_BYTES, PRESETS, load_chip
from ascend_lab.operators import kernels

# -- chapter 1 -------------------------------------------------------------------------------------
WARP = 32
SECTOR_BYTES = 32
ITEM_BYTES = 4
FEW_ELEMENTS = 1000
"""A size for which one instruction (25 repeats of 40 lanes) does what `plain_ops` does in
two, so that exercise 1.2 asks for one."""


def _bracket_and_upgrade(compute: int, move: int, wait: int) -> tuple[float, float, str, float]:
    """Return both ends of the bracket, the part whose halving lowers the left end most, its gain.

    The left end is the longest part (all overlap), the right end the sum (nothing overlaps).
    """
    parts = {"compute": compute, "move": move, "wait": wait}
    low = max(parts.values())
    high = sum(parts.values())
    gains = dict[str, float]()
    for name, cycles in parts.items():
        halved = {**parts, name: cycles / 2}
        gains[name] = low / max(halved.values())
    best = max(gains, key=lambda name: gains[name])
    if gains[best] > 1:
        return low, high, best, gains[best]
    return low, high, "none", 1.0


@ex.against(
    _bracket_and_upgrade,
    edges=[(100, 30, 20), (10, 100, 90), (7, 7, 7), (90, 30, 30)],
    rel_tol=1e-9,
)
def check_ex_01_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(compute, move, wait) -> (low, high, upgrade, gain)`."""
    values = rng.integers(1, 1000, 3)
    if rng.random() < 0.25:
        values[rng.integers(3)] = values.max()
    return dict(zip(("compute", "move", "wait"), map(int, values), strict=True))


def _add_case(n: int) -> ex.Case:
    """Return the places of x, y and z, each padded to whole blocks of 8 floats and one more."""
    padded = -(-n // 8) * 8 + 8
    return {"n": n, "x": 0, "y": padded, "z": 2 * padded}


def _judge_add(got: Any, case: ex.Case) -> str | None:
    """Judge instructions by the buffer after them, padding included, and by their number."""
    n, x, y, z = case.values()
    rng = np.random.default_rng(n)
    if not isinstance(got, Sequence) or not all(isinstance(op, VectorOp) for op in got):
        return "expected a list of VectorOp"
    before = rng.integers(-9, 10, z + y).astype(np.float32)
    expected = before.copy()
    expected[z : z + n] = before[x : x + n] + before[y : y + n]
    try:
        after = run_vector(got, before)
    except errors.MachineError as error:
        return f"which the vector unit refuses: {error}"
    for index in np.flatnonzero(after != expected):
        place = f"z[{index - z}]" if index >= z else f"element {index} of the buffer"
        return f"after which {place} is {ex.show(after[index])}, not {ex.show(expected[index])}"
    limit = 1 if n == FEW_ELEMENTS else len(plain_ops("add", n, z, x, y, "float32"))
    if len(got) > limit:
        return f"which is {len(got)} instructions where {limit} will do"
    return None


@ex.judged(
    _judge_add,
    edges=[_add_case(n) for n in (FEW_ELEMENTS, 1, 63, 64, 65, 1024, 64 * 255, 64 * 300)],
)
def check_ex_01_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(n, x, y, z)`: vector instructions for z = x + y on float32, few of them."""
    return _add_case(int(rng.integers(1, 2000)))


@ex.against(
    edges=[
        (np.ones(32, bool), 3, 5),
        (np.arange(64) == 40, 3, 5),
        (np.arange(64) == 31, 3, 5),
        (np.ones(33, bool), 2, 7),
    ],
    mask=lambda rng: rng.random(int(rng.integers(1, 200))) < rng.choice([0.0, 0.02, 0.5, 1.0]),
    then=range(9),
    other=range(9),
)
def check_ex_01_3(mask: Any, then: int, other: int) -> int:
    """Check `fn(mask, then, other)`: instructions that the warps of a branch issue."""
    warps = [mask[start : start + WARP] for start in range(0, len(mask), WARP)]
    # A warp issues the branch itself, and each side that any of its lanes takes.
    return sum(1 + then * bool(np.any(w)) + other * bool(not np.all(w)) for w in warps)


@ex.against(
    edges=[(1, 0), (1, 1), (0, 5), (8, 7), (-3, 93)],  # -3: an array read from its end
    stride=range(40),
    offset=range(20),
)
def check_ex_01_4(stride: int, offset: int) -> int:
    """Check `fn(stride, offset)`: sectors one warp touches when lane i loads x[stride*i+offset]."""
    address = ITEM_BYTES * (stride * np.arange(WARP) + offset)[None, :]
    return int(units_touched(address, np.ones_like(address, bool), SECTOR_BYTES)[0])


SCHEDULE_SLACK = 1.1
"""A warp schedule may end this many times as late as that of our scheduler, not more."""


def _judge_issue(got: Any, case: ex.Case) -> str | None:
    """Replay a schedule by the rules of exercise 1.6, then compare its last cycle with ours."""
    steps, warps, resident = (case[name] for name in ("steps", "warps", "resident"))
    if not isinstance(got, list | tuple) or [len(cycles) for cycles in got] != [len(steps)] * warps:
        return f"expected {warps} lists of {len(steps)} cycles"
    if any(cycle != int(cycle) or cycle < 0 for issue_cycles in got for cycle in issue_cycles):
        return "expected whole cycles from 0 on"
    for warp, issue_cycles in enumerate(got):
        for step, (_, needs) in enumerate(steps):
            cycle = issue_cycles[step]
            before_operand = any(cycle < issue_cycles[n] + steps[n][0] for n in needs)
            if before_operand or (step and cycle <= issue_cycles[step - 1]):
                return f"but step {step} of warp {warp} issues too early, at cycle {cycle}"
    all_cycles = [cycle for issue_cycles in got for cycle in issue_cycles]
    if len(set(all_cycles)) < len(all_cycles):
        return "but two steps issue in one cycle"
    for cycle in all_cycles:
        under_way = sum(issue_cycles[0] <= cycle <= issue_cycles[-1] for issue_cycles in got)
        if under_way > resident:
            return f"but more than {resident} warps are under way in cycle {cycle}"
    end = max(
        cycle + latency
        for issue_cycles in got
        for cycle, (latency, _) in zip(issue_cycles, steps, strict=True)
    )
    our_steps = [simt.Step("", 0, latency, tuple(needs)) for latency, needs in steps]
    spans = simt.schedule_steps(our_steps, Simt(lanes=WARP), warps, resident)
    our_end = max(span.ready for span in spans)
    if end > SCHEDULE_SLACK * our_end:
        return f"whose last result comes at cycle {end}; {our_end} is possible"
    return None


SAXPY = [(1, []), (1, []), (300, []), (300, []), (4, [2, 3]), (1, [4]), (1, [])]
"""Steps (latency, steps whose results it needs) of y = a x + y: two loads of 300 cycles."""


@ex.judged(
    _judge_issue,
    edges=[
        (SAXPY, 8, 8),
        (SAXPY, 40, 16),
        (SAXPY, 3, 1),
        ([(5, [])], 4, 2),
        (SAXPY, 3, 8),
        ([(300, []), (4, []), (1, [0, 1])], 8, 4),  # the last of `needs` is not the latest
    ],
    cases=13,
)
def check_ex_01_6(rng: ex.Rng) -> ex.Case:
    """Check `fn(steps, warps, resident)`: cycles at which each warp's steps issue."""
    steps = [
        (int(rng.choice([1, 4, 30, 200])), [] if s == 0 or rng.random() < 0.4 else [s - 1])
        for s in range(int(rng.integers(2, 12)))
    ]
    warps = int(rng.integers(2, 30))
    return {"steps": steps, "warps": warps, "resident": int(rng.integers(1, warps + 1))}


# -- chapter 2 -------------------------------------------------------------------------------------


def im2col_hops(
    chip_name: str, c1: int, height: int, width: int, kernel: int, stride: int
) -> list[tuple[str, str, str, int]]:
    """Return the moves (source, destination, pipe, bytes) that bring an im2col matrix to L0A.

    Only load3d unfolds, and only from L1 to L0A, so the image (C1, H, W, 16) crosses GM->L1 once
    and the matrix, of 16-row fractals, crosses L1->L0A.
    """
    chip = load_chip(chip_name)
    out_height = (height - kernel) // stride + 1
    out_width = (width - kernel) // stride + 1
    rows = -(-out_height * out_width // 16) * 16
    block_bytes = 32  # 16 channels in fp16
    image_bytes = c1 * height * width * block_bytes
    matrix_bytes = rows * c1 * kernel**2 * block_bytes
    return [
        ("GM", "L1", chip.path("GM", "L1").pipe, image_bytes),
        ("L1", "L0A", chip.path("L1", "L0A").pipe, matrix_bytes),
    ]


def _judge_hops(hops: Any, case: ex.Case) -> str | None:
    """Judge a route hop by hop, without giving it away."""
    is_list_of_hops = isinstance(hops, list | tuple) and all(
        isinstance(hop, list | tuple) and len(hop) == 4 for hop in hops
    )
    if not is_list_of_hops or not hops:
        return "expected a list of tuples (source, destination, pipe, size_bytes)"
    chip = load_chip(case["chip_name"])
    for src, dst, pipe, _ in hops:
        if (src, dst) not in chip.paths:
            return f"but {chip.name} has no path {src}->{dst}"
        if pipe != chip.paths[src, dst].pipe:
            return f"but {src}->{dst} is not a path of pipe {pipe}"
    ends = [tuple(hop[:2]) for hop in hops]
    chained = all(first[1] == second[0] for first, second in pairwise(ends))
    if ends[0][0] != "GM" or ends[-1][1] != "L0A" or not chained:
        return "expected a chain that starts in GM and ends in L0A"
    expected = im2col_hops(**case)
    if ends != [hop[:2] for hop in expected]:
        return "but on this way nothing unfolds the image: which instruction does, and from where?"
    for (src, dst, _, size_bytes), expected_hop in zip(hops, expected, strict=True):
        expected_bytes = expected_hop[3]
        if isinstance(size_bytes, bool) or size_bytes != expected_bytes:
            return f"but {expected_bytes} bytes cross {src}->{dst}"
    return None


@ex.judged(_judge_hops, edges=[("Ascend910A", 1, 6, 6, 3, 1)])
def check_ex_02_1(rng: ex.Rng) -> ex.Case:
    """Check the moves of an im2col tile against the paths of the chip."""
    kernel = int(rng.integers(1, 6))
    sides = range(kernel, kernel + 12)
    given = {"chip_name": PRESETS, "c1": range(1, 5), "height": sides, "width": sides}
    return ex.drawn(rng, **given, kernel=[kernel], stride=range(1, 4))


TILE = 256
"""Elements of one tile in exercise 2.2."""
PROGRAM_SEEDS = (None, 1, 2, 3)
"""Orders of the pipes in which exercise 2.2 is run for values."""


@ex.judged(edges=[(2,)], cases=4, tiles=range(1, 9))
def check_ex_02_2(program: Any, case: ex.Case) -> str | None:
    """Check that the in-place relu program keeps all its dependences by flags alone."""
    if not isinstance(program, isa.Program):
        return "expected the Program that k.finish() returns"
    if any(instruction.op == "barrier" for instruction, _ in program.instructions()):
        return "use a flag: a barrier stops all pipes"
    x = np.random.default_rng(case["tiles"]).standard_normal(case["tiles"] * TILE)
    feed = {"x": x.astype(np.float16)}
    right = np.maximum(x.astype(np.float16), 0)
    return wrong_run(program, load_chip("Toy"), feed, "y = max(x, 0)", right, PROGRAM_SEEDS)


def largest_k(chip_name: str, dtype: str, m: int, n: int) -> int:
    """Return the largest k with which two tiles of A fit L0A, two of B L0B, and C fits L0C.

    It is a multiple of C0, and 0 if C does not fit.
    """
    chip = load_chip(chip_name)
    itemsize = DTYPE_BYTES[dtype]
    c0 = isa.c0_of(dtype)
    if 4 * m * n > chip.buffers["L0C"]:  # 4 bytes for each sum
        return 0
    largest = min(chip.buffers["L0A"] // (2 * m), chip.buffers["L0B"] // (2 * n)) // itemsize
    return largest - largest % c0


@ex.against(
    largest_k,
    edges=[
        ("Ascend910A", "fp16", 128, 256),
        ("Toy", "int8", 256, 256),
        ("Toy", "fp16", 16, 192),
        ("Ascend910A", "int8", 128, 512),
    ],
)
def check_ex_02_3(rng: ex.Rng) -> ex.Case:
    """Check the depth of the largest double-buffered tile."""
    sides = range(16, 640, 16)
    return ex.drawn(rng, chip_name=PRESETS, dtype=("fp16", "int8"), m=sides, n=sides)


LONG_SLACK = 1.2
"""A long product may take this many times the cycles of ours, not more."""


@cache
def _long_cycles(m: int, k: int, n: int) -> int:
    """Return the cycles of our long product: the chip's own matmul on one core, two slots."""
    chip = load_chip("Ascend910A")
    # One tile holds all of C; K passes in steps of 128, the deepest for which two tiles of a side
    # of 128 fit into L0A.
    schedule = kernels.GemmSchedule(
        base_m=m, base_k=128, base_n=n, step_k=1, grid_rows=1, grid_cols=1
    )
    launch = kernels.gemm_launch(kernels.GemmShape(m, k, n), chip, schedule)
    return sim.simulate(launch, chip).cycles


def _judge_long(program: Any, case: ex.Case) -> str | None:
    """Judge C = A B on one core of an Ascend910A: findings, values, cycles."""
    if not isinstance(program, isa.Program):
        return "expected the Program that finish() returns"
    chip = load_chip("Ascend910A")
    (m, k, n) = (case[side] for side in "mkn")
    tensors = {t.name: (t.dtype, t.elements) for t in program.tensors}
    expected_tensors = {"a": ("fp16", m * k), "b": ("fp16", n * k), "c": ("fp32", m * n)}
    if tensors != expected_tensors:
        return f"expected tensors {expected_tensors}"
    rng = np.random.default_rng(k)
    a = rng.integers(-4, 5, (m, k))
    b = rng.integers(-4, 5, (n, k))
    feed = {"a": a.astype(np.float16), "b": b.astype(np.float16)}
    if wrong := wrong_run(program, chip, feed, "c = a b", (a @ b.T).ravel(), (None, 1), "c"):
        return wrong
    cycles = sim.simulate(program, chip).cycles
    limit = LONG_SLACK * _long_cycles(m, k, n)
    return f"expected at most {int(limit)} cycles, it takes {cycles}" if cycles > limit else None


@ex.judged(_judge_long, edges=[(128, 2048, 128), (64, 256, 32), (32, 256, 64)], cases=3)
def check_ex_02_5(rng: ex.Rng) -> ex.Case:
    """Check `fn(m, k, n)`: the program of a product whose k does not fit into L0."""
    m, n = (16 * int(side) for side in rng.integers(1, 9, 2))
    return {"m": m, "k": 256 * int(rng.integers(1, 9)), "n": n}
