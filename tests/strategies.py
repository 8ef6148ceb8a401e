"""Hypothesis strategies: random legal kernels, launches of several cores, raw flag programs.

A kernel is drawn as a plan (a tree of loops and tile steps) and written down with the builder, so
every draw is legal, free of races, and has queues of 1-3 slots, tails and barriers in odd places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.machine.isa import (
    Affine,
    Event,
    Instruction,
    KernelBuilder,
    Launch,
    Loop,
    Node,
    Part,
    Program,
    Queue,
    Region,
    binding_of,
)
from ascend_lab.machine.sim import Timeline
from ascend_lab.machine.sim.compiled import WORK
from ascend_lab.operators.kernels import GemmSchedule, GemmShape

Values = NDArray[Any]
TILE = 128
TILES = 512
VECTOR_CHIPS = ("Toy", "Ascend310", "Ascend910A", "Ascend910B2")
COUNTS = (0, 1, 2, 3, 4, 5, 7, 13, 29, 50)


@dataclass(frozen=True)
class Step:
    """One tile through the pipeline; `at` are coefficients of the loop variables around it."""

    kind: str
    op: str = "vadd"
    lanes: int = TILE
    at: tuple[int, int, int] = (0, 0, 0)
    base: int = 0


@dataclass(frozen=True)
class Repeat:
    """A loop of the plan."""

    count: int
    body: tuple[Step | Repeat, ...]


Plan = tuple[Step | Repeat, ...]


class Case:
    """A program or launch and its chip; prints as the reader of a failed test wants it."""

    def __init__(self, program: Program | Launch, chip: Chip, plan: Plan = ()) -> None:
        self.program = program
        self.chip = chip
        self.plan = plan

    def __repr__(self) -> str:
        parts = self.program.parts if isinstance(self.program, Launch) else ()
        texts = [f"{p.bindings}\n{p.program}" for p in parts] or [str(self.program)]
        return f"on {self.chip.name}:\n" + "\n".join(texts)

    def __iter__(self) -> Iterator[object]:
        return iter((self.program, self.chip))


def _steps(kinds: tuple[str, ...]) -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        kind=st.sampled_from(kinds),
        op=st.sampled_from(("vadd", "vmul", "vmax", "vsub")),
        lanes=st.sampled_from((TILE, TILE, 16, 112)),
        at=st.tuples(*[st.integers(0, 2)] * 3),
        base=st.integers(0, 100),
    )


def plans(kinds: tuple[str, ...], depth: int = 3) -> st.SearchStrategy[Plan]:
    """Draw a tree of loops up to `depth` deep with 1-3 items a level."""
    items: st.SearchStrategy[Step | Repeat] = _steps(kinds)
    for _ in range(depth):
        body = st.lists(items, min_size=1, max_size=3).map(tuple)
        items = st.one_of(_steps(kinds), st.builds(Repeat, st.sampled_from(COUNTS), body))
    loop = st.builds(
        Repeat, st.sampled_from(COUNTS), st.lists(items, min_size=1, max_size=3).map(tuple)
    )
    return st.tuples(st.lists(_steps(kinds), max_size=1), loop, st.lists(items, max_size=2)).map(
        lambda parts: (*parts[0], parts[1], *parts[2])
    )


def limited(plan: Plan, budget: int) -> Plan:
    """Return the plan with trip counts cut so that at most `budget` steps run, and nest <= 3."""

    def cut(items: Plan, times: int, level: int) -> Plan:
        out: list[Step | Repeat] = []
        for item in items:
            if isinstance(item, Step):
                out.append(item)
            elif level < 3:
                count = min(item.count, max(budget // (times * max(len(item.body), 1)), 1))
                out.append(Repeat(count, cut(item.body, times * max(count, 1), level + 1)))
        return tuple(out) or (Step("tile"),)

    return cut(plan, len(plan), 0)


def through(
    k: KernelBuilder,
    target: Region,
    *sources: Region,
    work: Callable[..., object] | None = None,
    depth: int = 1,
    **store: Any,
) -> None:
    """Write: regions of GM come to UB, `work(out, *tiles)` on V, and the result goes to GM.

    Without `work` the only source is stored as it came; `store` are options of that copy.
    """
    queues = []
    for number, source in enumerate(sources):
        name = f"{target.buffer.name}{number}_ub"
        buffer = source.buffer
        dst = "V" if work else "MTE3"
        queues.append(
            k.queue(name, "UB", buffer.dtype, source.elements, src="MTE2", dst=dst, depth=depth)
        )
        k.copy(queues[-1].alloc().region(0, source.sizes), source)
        queues[-1].enqueue()
    if work:
        name = f"{target.buffer.name}_ub"
        tiles = [queue.dequeue() for queue in queues]
        args = (target.buffer.dtype, target.elements)
        out = k.queue(name, "UB", *args, src="V", dst="MTE3", depth=depth)
        work(out.alloc(), *tiles)
        for queue in queues:
            queue.free()
        out.enqueue()
        queues = [out]
    k.copy(target, queues[0].dequeue().region(0, target.sizes), **store)
    queues[0].free()


class _Writer:
    """Turns a plan into a program; a subclass knows its queues and what a step does."""

    def __init__(self, name: str, chip: Chip, depths: tuple[int, ...], cores: int) -> None:
        self.k = KernelBuilder(name, chip)
        self.chip = chip
        self.depths = tuple(min(d, chip.event_ids // 2) for d in depths)
        self.core = self.k.param("core", cores) if cores > 1 else Affine()

    def write(self, plan: Plan) -> Program:
        self.items(plan, ())
        return self.k.finish()

    def items(self, plan: Plan, scope: tuple[Affine, ...]) -> None:
        for item in plan:
            if isinstance(item, Repeat):
                with self.k.loop(f"i{len(scope)}", item.count) as index:
                    self.items(item.body, (*scope, index))
            elif item.kind == "barrier":
                self.k.barrier()
            elif item.kind == "pipe barrier":
                self.k.barrier("V" if self.chip.combined else "MTE2")
            elif item.kind == "scalar":
                self.k.scalar(steps=1 + item.base)
            else:
                self.step(item, self.offset(item, scope))

    def offset(self, step: Step, scope: tuple[Affine, ...]) -> Affine:
        place = Affine(step.base)
        for coefficient, index in zip(step.at, scope, strict=False):
            place = place + index * coefficient
        return place * TILE

    def step(self, step: Step, at: Affine) -> None:
        raise NotImplementedError


class _Vector(_Writer):
    """MTE2 > V > MTE3: two inputs, one output, and a sum kept in UB between barriers."""

    def __init__(self, chip: Chip, depths: tuple[int, ...], cores: int) -> None:
        super().__init__("vectors", chip, depths, cores)
        k = self.k
        depths = self.depths
        self.x, self.w = (k.tensor(name, "fp16", TILES * TILE) for name in "xw")
        self.y = k.tensor("y", "fp16", TILES * TILE * cores)
        self.sums = k.tensor("sums", "fp16", TILE * cores)
        self.x_ub = k.queue("x_ub", "UB", "fp16", TILE, src="MTE2", dst="V", depth=depths[0])
        self.w_ub = k.queue("w_ub", "UB", "fp16", TILE, src="MTE2", dst="V", depth=depths[1])
        self.y_ub = k.queue("y_ub", "UB", "fp16", TILE, src="V", dst="MTE3", depth=depths[2])
        self.total = k.buffer("total", "UB", "fp16", TILE).region(0, (1, TILE))

    def step(self, step: Step, at: Affine) -> None:
        k = self.k
        size = step.lanes
        shape = (1, step.lanes)
        if step.kind == "sum":
            k.vector("vdup", self.total, scalar=float(step.base))
            k.barrier()
            k.copy(self.sums.region(self.core * TILE, (1, TILE)), self.total)
            k.barrier()
            return
        queues: list[tuple[Queue, object]] = [(self.x_ub, self.x)]
        if step.kind == "tile":
            queues.append((self.w_ub, self.w))
        for queue, tensor in queues:
            k.copy(queue.alloc().region(0, size), tensor.region(at, size))
            queue.enqueue()
        held = [queue.dequeue() for queue, _ in queues]
        sources = [tile.region(0, shape) for tile in held]
        out = self.y_ub.alloc().region(0, shape)
        if step.kind == "tile":
            k.vector(step.op, out, *sources)
        else:
            k.vector("vrelu", out, *sources)
            k.vector("vmuls", out, out, scalar=1.5)
        for queue, _ in reversed(queues):
            queue.free()
        self.y_ub.enqueue()
        place = self.core * (TILES * TILE) + at
        k.copy(self.y.region(place, size), self.y_ub.dequeue().region(0, size))
        self.y_ub.free()


class _Cube(_Writer):
    """MTE2 > MTE1 > M > V or FIX (> MTE3): one fractal of A and of B a step, sums in L0C."""

    def __init__(self, chip: Chip, depths: tuple[int, ...], cores: int) -> None:
        super().__init__("cubes", chip, depths, cores)
        k = self.k
        d = self.depths
        self.a, self.b = (k.tensor(name, "fp16", 256 * TILES) for name in "ab")
        self.c = k.tensor("c", "fp16", 256 * TILES * cores)
        self.l1 = [
            k.queue(f"{n}_l1", "L1", "fp16", 256, src="MTE2", dst="MTE1", depth=d[0]) for n in "ab"
        ]
        self.l0 = [
            k.queue(f"{n}_l0", f"L0{n.upper()}", "fp16", 256, src="MTE1", dst="M", depth=d[1])
            for n in "ab"
        ]
        drain = "V" if chip.combined else "FIX"
        self.acc = k.queue("c_l0", "L0C", "fp32", 256, src="M", dst=drain, depth=d[2])
        self.out = None
        if chip.combined:
            self.out = k.queue("c_ub", "UB", "fp16", 256, src="V", dst="MTE3", depth=d[0])

    def step(self, step: Step, at: Affine) -> None:
        k = self.k
        acc = self.acc.alloc().region(0, (1, 1, 16, 16))
        if step.kind == "reduce":
            with k.loop("r", 1 + step.base % 4) as index:
                self.multiply(acc, at, index)
        else:
            self.multiply(acc, at, Affine())
        self.acc.enqueue()
        source = self.acc.dequeue().region(0, 256)
        place = self.c.region(self.core * (256 * TILES) + at, 256)
        if self.out is None:
            k.fixpipe(place, source, relu=step.op == "vmax")
            self.acc.free()
            return
        k.copy(self.out.alloc().region(), source)
        self.acc.free()
        self.out.enqueue()
        k.copy(place, self.out.dequeue().region())
        self.out.free()

    def multiply(self, acc: object, at: Affine, index: Affine) -> None:
        k = self.k
        for queue, tensor in zip(self.l1, (self.a, self.b), strict=True):
            k.copy(queue.alloc().region(), tensor.region(at + index * 256, 256))
            queue.enqueue()
        for staged, loaded in zip(self.l1, self.l0, strict=True):
            held = staged.dequeue().region(0, (1, 256))
            k.load2d(loaded.alloc().region(0, (1, 256)), held)
            staged.free()
            loaded.enqueue()
        a, b = (queue.dequeue().region(0, (1, 1, 16, 16)) for queue in self.l0)
        k.mmad(acc, a, b, accumulate=index)
        for queue in self.l0:
            queue.free()


WRITERS: dict[str, tuple[Callable[..., _Writer], tuple[str, ...]]] = {
    "vector": (_Vector, ("tile", "tile", "scale", "sum", "barrier", "pipe barrier", "scalar")),
    "cube": (_Cube, ("tile", "reduce", "reduce", "barrier", "pipe barrier", "scalar")),
}


@st.composite
def kernels(draw: st.DrawFn, *, budget: int = 150, kind: str | None = None) -> Case:
    """Draw a program for one core and its chip."""
    writer, kinds = WRITERS[kind or draw(st.sampled_from(sorted(WRITERS)))]
    chip = load_chip(draw(st.sampled_from(VECTOR_CHIPS)))
    depths = draw(st.tuples(*[st.integers(1, 3)] * 3))
    plan = limited(draw(plans(kinds)), budget)
    return Case(writer(chip, depths, 1).write(plan), chip, plan)


@st.composite
def launches(draw: st.DrawFn, *, budget: int = 80) -> Case:
    """Draw a launch: some cores run one plan, the last ones a shorter one (a tail)."""
    writer, kinds = WRITERS[draw(st.sampled_from(sorted(WRITERS)))]
    chip = load_chip(draw(st.sampled_from(VECTOR_CHIPS)))
    depths = draw(st.tuples(*[st.integers(1, 3)] * 3))
    cores = draw(st.integers(2, chip.core_count))
    split = draw(st.integers(1, cores - 1))
    parts = []
    for first, last in ((0, split), (split, cores)):
        plan = limited(draw(plans(kinds, depth=2)), budget)
        program = writer(chip, depths, cores).write(plan)
        parts.append(
            Part(program, tuple(binding_of({"core": core}) for core in range(first, last)))
        )
    return Case(Launch("random", tuple(parts)), chip)


def vector_values(plan: Plan, x: Values, w: Values) -> dict[str, Values]:
    """What a "vector" kernel of this plan leaves in y and sums, by plain NumPy in plan order."""
    poison = np.frombuffer(b"\xff\xff", np.float16)[0]
    y = np.full(TILES * TILE, poison, np.float16)
    sums = np.full(TILE, poison, np.float16)
    wide = {"vadd": np.add, "vmul": np.multiply, "vmax": np.maximum, "vsub": np.subtract}

    def visit(items: Plan, scope: tuple[int, ...]) -> None:
        for item in items:
            if isinstance(item, Repeat):
                for index in range(item.count):
                    visit(item.body, (*scope, index))
            elif item.kind == "sum":
                sums[:] = item.base
            elif item.kind in ("tile", "scale"):
                turns = sum(c * i for c, i in zip(item.at, scope, strict=False))
                start = (item.base + turns) * TILE
                part = slice(start, start + item.lanes)
                a, b = (t[part].astype(np.float32) for t in (x, w))
                if item.kind == "tile":
                    y[part] = wide[item.op](a, b)
                else:
                    y[part] = np.maximum(a, 0).astype(np.float16).astype(np.float32) * 1.5

    visit(plan, ())
    return {"y": y, "sums": sums}


PIPES = ("S", "V", "MTE2")


@st.composite
def flag_programs(draw: st.DrawFn) -> Program:
    """Draw sets, waits and work on three pipes with no plan at all: most deadlock, some do not."""
    events = [Event(a, b, i) for a in PIPES for b in PIPES if a != b for i in range(2)]
    event = st.sampled_from(events)
    leaf: st.SearchStrategy[Node] = st.one_of(
        event.map(lambda e: Instruction("set_flag", e.src, event=e)),
        event.map(lambda e: Instruction("set_flag", e.src, event=e)),
        event.map(lambda e: Instruction("wait_flag", e.dst, event=e)),
        st.sampled_from((*PIPES, "ALL")).map(lambda p: Instruction("barrier", p)),
        st.integers(1, 40).map(lambda n: Instruction("scalar", "S", attrs=(("steps", n),))),
    )
    inner = st.builds(Loop, st.just("j"), st.integers(0, 4), st.lists(leaf, max_size=4).map(tuple))
    middle = st.lists(st.one_of(leaf, leaf, inner), max_size=5).map(tuple)
    outer = st.builds(Loop, st.just("i"), st.integers(0, 5), middle)
    pair = event.map(
        lambda e: (
            Instruction("set_flag", e.src, event=e),
            Instruction("wait_flag", e.dst, event=e),
        )
    )
    groups = draw(st.lists(st.one_of(pair, st.tuples(leaf), st.tuples(outer)), max_size=8))
    return Program("flags", (), tuple(node for group in groups for node in group))


@st.composite
def gemm_cases(draw: st.DrawFn, *, largest: int = 70) -> tuple[GemmShape, GemmSchedule, Chip]:
    """Draw a matrix product with a tiling that fits every chip, odd sizes preferred."""
    chip = load_chip(draw(st.sampled_from(("Toy", "Ascend910A", "Ascend910B2"))))
    sizes = st.one_of(
        st.sampled_from((1, 2, 15, 16, 17, 31, 32, 33, 37, 53, 64, 65)), st.integers(1, largest)
    )
    dtype = draw(st.sampled_from(("fp16", "int8")))
    shape = GemmShape(draw(sizes), draw(sizes), draw(sizes), dtype)
    rows, cols = draw(st.sampled_from(((1, 1), (1, 2), (2, 1))))
    schedule = GemmSchedule(
        draw(st.sampled_from((16, 32, 64))),
        32,
        draw(st.sampled_from((16, 32, 64))),
        draw(st.integers(1, 3)),
        rows,
        cols,
    )
    return shape, schedule, chip


def edited(program: Program, edit: Callable[[Instruction], Instruction | None]) -> Program:
    """Return the program with `edit` applied to each static instruction; None removes it."""

    def visit(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        out: list[Node] = []
        for node in nodes:
            if isinstance(node, Loop):
                out.append(replace(node, body=visit(node.body)))
            else:
                kept = edit(node)
                if kept is not None:
                    out.append(kept)
        return tuple(out)

    return replace(program, body=visit(program.body))


def without_flags(program: Program, src: str, dst: str) -> Program:
    """Return the program with every flag from pipe `src` to pipe `dst` deleted."""

    def keep(instruction: Instruction) -> Instruction | None:
        event = instruction.event
        return None if event is not None and (event.src, event.dst) == (src, dst) else instruction

    return edited(program, keep)


def assert_bounds(timeline: Timeline) -> None:
    """Work of any pipe and of memory <= cycles <= sum of work + latencies + flags."""
    program = timeline.compiled
    chip = timeline.chip
    memory_s = timeline.memory_bytes / chip.device_memory.rate_bytes_per_s
    memory_cycles = memory_s * chip.clock_hz
    work = dict.fromkeys(program.pipes, 0)
    everything = max(program.tail_latency, default=0)
    rows = zip(program.steps, program.runs(), program.cycles, program.latency, strict=True)
    for step, runs, cycles, latency in rows:
        everything += runs * (cycles + latency)
        if step.kind == WORK:
            work[program.pipes[step.pipe]] += runs * cycles
    assert all(timeline.busy_cycles[pipe] <= work[pipe] for pipe in work)
    assert max(memory_cycles, *work.values()) <= timeline.cycles + 1e-6
    assert timeline.cycles <= max(everything, math.ceil(memory_cycles))
