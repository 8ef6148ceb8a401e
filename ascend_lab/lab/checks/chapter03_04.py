"""Checks of chapters 3 and 4.

3: the smallest tile that leaves the cube busy, bytes per level, bytes that device memory delivers,
alignment; all are judged by what programs count.
4: slots needed, a deadlocked kernel to repair, a power in the (max, +) algebra, a simulator.

A judge returns None for a right answer, else the end of the sentence
"your function returned ..., ", for example "but 96 is enough".
"""

import math
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from ascend_lab import errors
from ascend_lab.lab.checks import core as ex
from ascend_lab.machine import isa, sim
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.machine.sim.compiled import SET, WAIT, WORK, Nest
from ascend_lab.operators.kernels import GemmSchedule, GemmShape, gemm_launch

# -- chapter 3 -------------------------------------------------------------------------------------
STEP = 16
"""Side of a fractal of fp16 numbers: the step of tile sides."""
DEPTH = 64
"""The k of the products on which a tile is tried."""


def _shortcoming(chip: Chip, side: int) -> str | None:
    """Return why a square tile is no answer to exercise 3.1, or None.

    It overflows a buffer, or the wires into L0 or L1 need longer than the cube.
    """
    shape = GemmShape(side, DEPTH, side, "fp16", "fp16")
    try:
        launch = gemm_launch(shape, chip, GemmSchedule(side, STEP, side, 1, 1, 1))
    except errors.CapacityError as error:
        return f"it does not fit: {error}"
    moved = sim.analyse(launch, chip).path_bytes
    cube_cycles = side * side * DEPTH / chip.macs_per_cycle("fp16")

    def path_cycles(src: str, dst: str) -> float:
        return moved[src, dst] / chip.path(src, dst).rate_bytes_per_cycle

    wire_cycles = {
        "L0": path_cycles("L1", "L0A") + path_cycles("L1", "L0B"),
        "L1": path_cycles("GM", "L1"),
    }
    for level, cycles in wire_cycles.items():
        if cycles > cube_cycles * (1 + 1e-9):
            slow = f"with tiles of {side} the wires into {level} need {cycles:.1f} cycles"
            return f"{slow} while the cube needs {cube_cycles:.1f}, both for {DEPTH} steps of k"
    return None


def _counted(m: int, k: int, n: int, tile_m: int, tile_n: int) -> tuple[int, int, int]:
    """Return what the program on one core moves into L0A, L0B and L1."""
    chip = load_chip("Ascend910A")
    schedule = GemmSchedule(tile_m, STEP, tile_n, 4, 1, 1)
    moved = sim.analyse(gemm_launch(GemmShape(m, k, n), chip, schedule), chip).path_bytes
    return moved["L1", "L0A"], moved["L1", "L0B"], moved["GM", "L1"]


Nodes = list[tuple[Any, ...]]
"""Nodes ("read", tensor, size_bytes, loops) and ("loop", name, count, body)."""


def _fetched(nest: Nodes, l2_bytes: int) -> int:
    """Return the bytes that device memory delivers for a nest, written as a program on one core."""
    base = load_chip("Ascend910A")
    chip = replace(base, l2=replace(base.l2, size_bytes=l2_bytes))
    k = isa.KernelBuilder("nest", chip)
    tile = k.buffer("tile", "UB", "fp16", 4096)

    def write(nodes: Nodes, loops: dict[str, tuple[Any, int]]) -> None:
        """Write nodes inside of `loops`: name -> (index, count)."""
        for node in nodes:
            if node[0] == "loop":
                _, name, count, body = node
                with k.loop(name, count) as index:
                    write(body, {**loops, name: (index, count)})
                continue
            _, name, size_bytes, read_loops = node
            elements = size_bytes // 2
            # The tensor has one piece for each step of the loops that its read depends on.
            pieces = math.prod(loops[loop][1] for loop in read_loops)
            tensor = k.tensor(name, "fp16", pieces * elements)
            start = 0
            stride = elements
            for loop in read_loops:
                index, count = loops[loop]
                start = index * stride + start
                stride *= count
            k.copy(tile.region(0, elements), tensor.region(start, elements))

    write(nest, {})
    launch = isa.Launch("nest", (isa.Part(k.finish(), (isa.binding_of({}),)),))
    return sim.analyse(launch, chip).memory_read_bytes


def _sizes(nodes: Nodes, inside: dict[str, int]) -> list[int]:
    """Return the bytes that each list of nodes touches in one pass, those of the whole nest last.

    `inside` are the counts of the loops whose steps belong to the pass.
    """
    sizes = list[int]()
    total = 0
    for node in nodes:
        if node[0] == "loop":
            _, name, count, body = node
            sizes += _sizes(body, {})
            total += _sizes(body, {**inside, name: count})[-1]
        else:
            _, _, size_bytes, read_loops = node
            total += size_bytes * math.prod(inside.get(loop, 1) for loop in read_loops)
    return [*sizes, total]


def _nest(rng: ex.Rng, depth: int, around: tuple[str, ...] = ()) -> Nodes:
    """Draw reads, and a loop or two with a nest of its own inside."""
    nodes: Nodes = []
    for _ in range(int(rng.integers(1, 3))):
        loops = tuple(loop for loop in around if rng.random() < 0.5)
        size = 32 * int(rng.integers(1, 200))
        nodes.append(("read", f"t{rng.integers(1 << 60)}", size, loops))
    for _ in range(int(rng.integers(1, 3)) if depth else 0):
        name = f"i{rng.integers(1 << 60)}"
        body = _nest(rng, depth - 1, (*around, name))
        place = int(rng.integers(len(nodes) + 1))
        nodes.insert(place, ("loop", name, int(rng.integers(2, 9)), body))
    return nodes


CLIFF: Nodes = [
    (
        "loop",
        "strip",
        4,
        [
            ("read", "a", 1024, ("strip",)),
            ("loop", "column", 8, [("read", "w", 4096, ("column",))]),
        ],
    ),
]
"""Four strips of rows that pass over all weights, 33,792 bytes a pass."""


def useful_share(side: int, dtype: str) -> float:
    """Return the share of the cube's multiply-accumulates that a cubic product needs.

    The cube works on whole fractals: a product of side 17 takes as long as one of side 32 in fp16.
    """
    m1, k1, n1 = GemmShape(side, side, side, dtype).fractals
    m0, k0, n0 = load_chip("Ascend910A").cube_shape(dtype)
    return float(side**3 / (m1 * m0 * k1 * k0 * n1 * n0))


@ex.judged(
    edges=[
        (512.0, 256.0, 110.0, 262144),  # Ascend910A
        (256.0, 128.0, 80.5, 131072),  # a tile of 208 would not fit
        (512.0, 256.0, 128.0, 65536),  # exactly on the ridge, and it just fits
        (128.0, 96.0, 900.0, 262144),  # L0 is the narrow place
    ],
    to_l0a=ex.between(60, 600),
    to_l0b=ex.between(60, 600),
    to_l1=ex.between(50, 400),
    l0c_bytes=[1024 * kib for kib in (16, 64, 128, 256)],
)
def check_ex_03_1(got: Any, case: ex.Case) -> str | None:
    """Check `fn(to_l0a, to_l0b, to_l1, l0c_bytes)`: side of the smallest clearing square tile."""
    base = load_chip("Ascend910A")  # with the rates and the L0C of the case
    rates = {("L1", "L0A"): "to_l0a", ("L1", "L0B"): "to_l0b", ("GM", "L1"): "to_l1"}
    paths = dict(base.paths)
    for ends, rate in rates.items():
        paths[ends] = replace(base.path(*ends), rate_bytes_per_cycle=case[rate])
    buffers = {**base.buffers, "L0C": case["l0c_bytes"]}
    chip = replace(base, paths=paths, buffers=buffers)
    if got is not None and (isinstance(got, bool) or not isinstance(got, int | np.integer)):
        return "expected a whole number or None"
    if got is None:
        side = next((t for t in range(STEP, 1024, STEP) if _shortcoming(chip, t) is None), None)
        return None if side is None else f"but a tile of {side} x {side} fits and clears both"
    if got < STEP or got % STEP:
        return f"expected a positive multiple of {STEP}"
    if wrong := _shortcoming(chip, int(got)):
        return f"but {wrong}"
    less = got > STEP and _shortcoming(chip, int(got) - STEP) is None
    return f"but {got - STEP} is enough" if less else None


@ex.against(_counted, edges=[(256, 128, 256, 64, 128), (16, 16, 16, 64, 64), (100, 50, 70, 48, 32)])
def check_ex_03_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(m, k, n, tile_m, tile_n)`: bytes a tiled matmul copies into L0A, L0B and L1."""
    m, k, n = (int(side) for side in rng.integers(1, 300, 3))
    tile_m, tile_n = (16 * int(side) for side in rng.integers(1, 9, 2))
    return {"m": m, "k": k, "n": n, "tile_m": tile_m, "tile_n": tile_n}


@ex.against(
    lambda limit, dtype: max(n for n in range(1, limit + 1) if useful_share(n, dtype) < 0.5),
    edges=[(limit, d) for d in ("fp16", "int8") for limit in (1, 16, 17, 300)],
)
def check_ex_03_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(limit, dtype)`: largest side of a cubic matmul that wastes over half the cube."""
    return ex.drawn(rng, limit=range(1, 90), dtype=("fp16", "int8"))


@ex.against(
    _fetched, edges=[(CLIFF, size) for size in (33791, 33792, 36863, 36864, 1023)], cases=30
)
def check_ex_03_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(nest, l2_bytes)`: bytes that a loop nest fetches from device memory."""
    nest = _nest(rng, int(rng.integers(1, 4)))
    edge = int(rng.choice(_sizes(nest, {})))
    return {"nest": nest, "l2_bytes": edge - int(rng.integers(0, 2))}


# -- chapter 4 -------------------------------------------------------------------------------------
Matrix = np.ndarray
TILE = 1024
"""Elements of one tile of the ping-pong kernel."""
SLACK = 1.05
"""A repaired kernel may take this many times the cycles of ours, not more."""


def max_plus_product(a: Matrix, b: Matrix) -> Matrix:
    """Return the (max, +) product, c_ij = max_k (a_ik + b_kj), of two square matrices."""
    return np.asarray((a[:, :, None] + b[None, :, :]).max(axis=1))


def _power_case(a: Matrix, n: int) -> ex.Case:
    """Return a case with a product whose calls are counted, each at a price of 1."""

    def product(a: Matrix, b: Matrix) -> Matrix:
        return max_plus_product(a, b)

    return {"product": ex.counting(product, lambda *_: 1), "a": a, "n": n}


def _judge_power(got: Any, case: ex.Case) -> str | None:
    """Judge a power by its value, and by the products that it took."""
    a = case["a"]
    n = case["n"]
    calls = ex.spent(case["product"])
    expected = a
    for _ in range(n - 1):
        expected = max_plus_product(expected, a)
    if wrong := ex.equal_to(expected)(got):
        return wrong
    # Repeated squaring takes a square, and at most one more product, for each binary digit of n.
    allowed = 2 * math.floor(math.log2(n)) + 2
    return None if calls <= allowed else f"with {calls} products, expected at most {allowed}"


def wrong_run(
    program: isa.Program | isa.Launch,
    chip: Chip,
    feed: dict[str, np.ndarray],
    what: str,
    right: np.ndarray,
    orders: tuple[int | None, ...] = (1,),
    name: str = "y",
) -> str | None:
    """Return what is wrong with a program, its findings or its values, or None.

    It is run once for each of `orders`, seeds of the order in which its pipes take turns; `what`
    says in words what it should compute.
    """
    try:
        findings = isa.sanitize(program, chip, filled=set(feed))
        outputs = list[np.ndarray]()
        if not findings:
            outputs = [sim.execute(program, feed, chip, seed=order)[name] for order in orders]
    except errors.AscendLabError as error:
        return f"expected a program that runs, but: {error}"
    if findings:
        worst = next((f for f in findings if f.kind == "deadlock"), findings[0])
        return f"expected no findings, the sanitizer has {len(findings)}, for example {worst}"
    for order, values in zip(orders, outputs, strict=True):
        if wrong := int((values != right).sum()):
            differ = f"{wrong} of {right.size} elements differ with execute(..., seed={order})"
            return f"expected {what}, {differ}"
    return None


@cache
def _our_cycles(pairs: int) -> int:
    """Return the cycles of relu in place on two slots, with flags as exercise 4.2 asks for."""
    k = isa.KernelBuilder("ping_pong", load_chip("Toy"))
    x, y = (k.tensor(name, "fp16", 2 * pairs * TILE) for name in "xy")
    slots = [k.buffer(f"slot{s}", "UB", "fp16", TILE) for s in (0, 1)]
    for s in (0, 1):
        k.set_flag("MTE3", "MTE2", s)
    with k.loop("i", pairs) as i:
        for s, slot in enumerate(slots):
            start = (2 * i + s) * TILE
            lanes = slot.region(0, (TILE // 128, 128))
            k.wait_flag("MTE3", "MTE2", s)
            k.copy(slot.region(), x.region(start, TILE))
            k.set_flag("MTE2", "V", s)
            k.wait_flag("MTE2", "V", s)
            k.vector("vrelu", lanes, lanes)
            k.set_flag("V", "MTE3", s)
            k.wait_flag("V", "MTE3", s)
            k.copy(y.region(start, TILE), slot.region())
            k.set_flag("MTE3", "MTE2", s)
    for s in (0, 1):
        k.wait_flag("MTE3", "MTE2", s)
    return sim.simulate(k.finish(), load_chip("Toy")).cycles


KINDS = {WORK: "work", SET: "set", WAIT: "wait"}


class Queues(dict[str, list[tuple[Any, ...]]]):
    """The steps of each pipe of a kernel, loops unrolled; `cycles` is what `simulate` says."""

    cycles: int | None = None


def _queues(compiled: sim.Compiled) -> Queues:
    """Return the queues of a compiled program."""
    queues = Queues({pipe: [] for pipe in compiled.pipes})

    def visit(nodes: tuple[int | Nest, ...]) -> None:
        for node in nodes:
            if isinstance(node, Nest):
                for _ in range(compiled.counts[node.loop]):
                    visit(node.body)
                continue
            step = compiled.steps[node]
            cycles = compiled.cycles[node]
            flag = () if step.kind == WORK else (step.event,)
            more = (compiled.latency[node],) if step.kind == SET else ()
            queues[compiled.pipes[step.pipe]].append((KINDS[step.kind], *flag, cycles, *more))

    visit(compiled.tree)
    with suppress(errors.SyncError):
        queues.cycles = sim.run_reference(compiled)[0]
    return queues


def _untaken_case() -> ex.Case:
    """Return one pipe that raises a flag for nobody: the kernel ends with the pipe, at cycle 6."""
    queues = Queues({"V": [("work", 5), ("set", 0, 1, 50)]})
    queues.cycles = 6
    return {"queues": queues}


def _kernel_case(rounds: int, depths: tuple[int, int], works: int, damaged: bool) -> ex.Case:
    """Return the queues of a load, `works` vector instructions and a store, `rounds` times."""
    chip = load_chip("Toy")
    k = isa.KernelBuilder("kernel", chip)
    x, y = (k.tensor(name, "fp16", 512 * rounds) for name in "xy")
    x_in = k.queue("x_in", "UB", "fp16", 512, src="MTE2", dst="V", depth=depths[0])
    y_out = k.queue("y_out", "UB", "fp16", 512, src="V", dst="MTE3", depth=depths[1])
    with k.loop("i", rounds) as i:
        k.copy(x_in.alloc().region(), x.region(i * 512, 512))
        x_in.enqueue()
        tile = x_in.dequeue().region(0, (4, 128))
        out = y_out.alloc().region(0, (4, 128))
        for _ in range(works):
            k.vector("vrelu", out, tile)
        x_in.free()
        y_out.enqueue()
        k.copy(y.region(i * 512, 512), y_out.dequeue().region())
        y_out.free()
    text = str(k.finish())
    start = next(line for line in text.splitlines() if line.startswith("set_flag V>MTE2"))
    program = isa.parse_program(text.replace(f"{start}\n", "", 1) if damaged else text)
    return {"queues": _queues(sim.compile_program(program, chip, sim.Surroundings()))}


@ex.against(
    edges=[
        (140, 202, 140, 0, 18),
        (100, 60, 10, 140, 1),  # 300 cycles on a pipe of 100: three, not four
        (20, 60, 200, 0, 1),  # the trip of y_out is the longer one
        (50, 20, 10, 400, 18),
        (1, 60, 1, 0, 0),  # both trips take 60 cycles, as long as V: one slot is enough
        (2000, 1, 1, 2000, 1),  # a trip one cycle longer than two tiles of the slowest pipe
    ],
    cases=40,
    load=range(1, 400),
    compute=range(1, 400),
    store=range(1, 400),
    latency=range(400),
    tail=range(1, 400),
)
def check_ex_04_1(load: int, compute: int, store: int, latency: int, tail: int) -> int:
    """Check `fn(load, compute, store, latency, tail)`: slots with which a pipe sets the period."""
    # A slot of x is used again after a load, the latency and the computation of a tile; one of y
    # after its computation and its store. The longer trip takes several periods of the slowest
    # pipe, and each of them needs a slot.
    until_free = compute - 1 + tail
    trip = max(load + latency + until_free, until_free + store)
    return math.ceil(trip / max(load, compute, store))


@ex.judged(cases=6, pairs=range(1, 7))
def check_ex_04_2(got: Any, case: ex.Case) -> str | None:
    """Check a repaired ping-pong kernel: `fn(pairs)` returns a `Program` for the Toy chip."""
    if not isinstance(got, isa.Program):
        return "expected a Program (end with k.finish())"
    chip = load_chip("Toy")
    pairs = case["pairs"]
    tensors = sorted((t.name, t.dtype, t.elements) for t in got.tensors)
    size = 2 * pairs * TILE
    if tensors != [("x", "fp16", size), ("y", "fp16", size)]:
        return f"expected fp16 tensors x and y of {size} elements"
    x = np.random.default_rng(size).standard_normal(size).astype(np.float16)
    if wrong := wrong_run(got, chip, {"x": x}, "y = relu(x)", np.maximum(x, 0), (None, 1, 2)):
        return wrong
    cycles = sim.simulate(got, chip).cycles
    ours = _our_cycles(pairs)
    slow = f"expected tiles that overlap: {cycles} cycles, {ours} are enough"
    return slow if cycles > SLACK * ours else None


TWO_BY_TWO = np.array([[3.0, -np.inf], [5.0, 4.0]])


@ex.judged(_judge_power, edges=[_power_case(TWO_BY_TWO, n) for n in (1, 2, 3, 64, 127)])
def check_ex_04_3(rng: ex.Rng) -> ex.Case:
    """Check a power: `fn(product, a, n)` returns the n-th (max, +) power of a, n >= 1."""
    n = int(rng.integers(1, 2 ** int(rng.integers(2, 12))))
    size = int(rng.integers(1, 6))
    a = rng.integers(0, 500, (size, size)).astype(np.float64)
    a[rng.random((size, size)) < 0.4] = -np.inf
    return _power_case(a, n)


@ex.judged(
    lambda got, case: ex.equal_to(case["queues"].cycles)(got),
    edges=[
        _kernel_case(3, (1, 1), 1, damaged=False),
        _kernel_case(8, (2, 2), 3, damaged=False),
        _kernel_case(2, (1, 2), 1, damaged=True),
        _untaken_case(),
    ],
    cases=20,
)
def check_ex_04_7(rng: ex.Rng) -> ex.Case:
    """Check `fn(queues)`: the last cycle of a kernel, or None if it never ends."""
    rounds = int(rng.integers(1, 10))
    works = int(rng.integers(1, 6))
    depths = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    return _kernel_case(rounds, depths, works, damaged=bool(rng.random() < 0.2))
