"""Random kernels in which cube and vector cores pass tiles to each other, and what they compute."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import Affine, KernelBuilder, Launch, Program, Queue, Ring, spread

CHIP = load_chip("Ascend910B2")
AREA = 256
Values = NDArray[Any]


@dataclass(frozen=True)
class Relay:
    """Tiles go x -> cube -> vector (-> cube -> vector) -> y; the last two stages stay `lag` behind.

    `tiles` is what each AI core does, `cut` where the second vector core begins in a tile.
    """

    tiles: tuple[int, ...]
    stages: int = 2
    lag: int = 0
    slots: int = 2
    cut: int = 128
    delays: tuple[int, int] = (0, 0)
    inner: int = 1

    @property
    def rings(self) -> list[Ring]:
        """One for every pass from core to core."""
        kinds = ["fp32", "fp16", "fp32"][: self.stages - 1]
        slots = [self.slots, self.slots + self.lag, self.slots]
        return [
            Ring(f"ring{i}", dtype, AREA, slots[i], len(self.tiles), 2 * i, 2 * i + 1)
            for i, dtype in enumerate(kinds)
        ]

    def launch(self) -> Launch:
        """Return the kernel: one program for cores with equally many tiles."""
        most = max(self.tiles)
        return spread("relay", {"core": self.tiles}, lambda share: self._team(share[0], most))

    def _team(self, size: int, most: int) -> tuple[Program, Program, Program]:
        cube = self._program("cube", size, most, _cube_stage, 0)
        even = self.cut == AREA // 2
        one = self._program("vector0", size, most, _vector_stage, 0)
        return cube, one, one if even else self._program("vector1", size, most, _vector_stage, 1)

    def _program(
        self, name: str, size: int, most: int, stage: Callable[..., Any], number: int
    ) -> Program:
        k = KernelBuilder(name, CHIP)
        core = k.param("core", len(self.tiles))
        start = (0, self.cut)
        width = (self.cut, AREA - self.cut)
        side: Any = (start[number], width[number])
        if name != "cube" and self.cut == AREA // 2:
            side = (k.param("aiv", 2) * self.cut, self.cut)
        kinds = range(name != "cube", self.stages, 2)
        steps = [stage(self, k, core, core * most, side, s) for s in kinds]
        rounds = size + (self.lag if self.stages == 4 else 0)
        for at in _rounds(k, rounds, self.lag, self.inner):
            for number, step in enumerate(steps):
                t = at - number * self.lag
                inside = at.terms or 0 <= t.const < size
                if inside and not (at.terms and self.lag and self.stages == 4 and size <= self.lag):
                    step(t)
        return k.finish()

    def expected(self, x: Values) -> Values:
        """What y holds, exactly: all numbers are small and whole."""
        return x.astype(np.float32) * 2 + 1 if self.stages == 2 else (x * 2 + 1) * 2.0 + 1

    @property
    def x(self) -> Values:
        """The input: small whole numbers."""
        count = len(self.tiles) * max(self.tiles) * AREA
        return (np.arange(count) % 61 - 30).astype(np.float16)

    def mask(self) -> Values:
        """The elements of y that some core writes."""
        most = max(self.tiles)
        return np.concatenate([np.arange(most * AREA) < t * AREA for t in self.tiles])


def _rounds(k: KernelBuilder, rounds: int, lag: int, inner: int) -> Iterator[Affine]:
    """Yield the rounds: the first and last `lag` one by one, those between as loops."""
    steady = rounds - 2 * lag
    if steady < 1:
        yield from map(Affine, range(rounds))
        return
    yield from map(Affine, range(lag))
    if inner > 1 and steady % inner == 0:
        with k.loop("outer", steady // inner) as i, k.loop("inner", inner) as j:
            yield i * inner + j + lag
    else:
        with k.loop("t", steady) as i:
            yield i + lag
    yield from map(Affine, range(rounds - lag, rounds))


def _cube_stage(
    case: Relay, k: KernelBuilder, core: Affine, first: Affine, _: Any, s: int
) -> Callable[[Affine], None]:
    """Multiply a tile by twice the unit matrix."""
    length = len(case.tiles) * max(case.tiles) * AREA
    x: Any = k.tensor("x", "fp16", length) if s == 0 else k.ring_in(case.rings[s - 1], core, "MTE2")
    out = k.ring_out(case.rings[s], core, "FIX")
    stage = k.queue(f"l1_{s}", "L1", "fp16", AREA, src="MTE2", dst="MTE1")
    a = k.queue(f"l0a_{s}", "L0A", "fp16", AREA, src="MTE1", dst="M")
    b = k.queue(f"l0b_{s}", "L0B", "fp16", AREA, src="MTE1", dst="M")
    c = k.queue(f"l0c_{s}", "L0C", "fp32", AREA, src="M", dst="FIX")
    twice = k.tensor(f"twice{s}", "fp16", AREA)
    square = k.queue(f"w_{s}", "L1", "fp16", AREA, src="MTE2", dst="MTE1")

    def step(t: Affine) -> None:
        for queue, near, region in ((square, b, twice.region()), (stage, a, None)):
            tile = queue.alloc()
            if region is None and s:
                k.copy(tile.region(), x.dequeue().region())
                x.free()
            else:
                k.copy(tile.region(), region or x.region((first + t) * AREA, AREA))
            queue.enqueue()
            k.load2d(near.alloc().region(0, (1, AREA)), queue.dequeue().region(0, (1, AREA)))
            queue.free()
            near.enqueue()
        shape = (1, 1, 16, 16)
        left = a.dequeue()
        right = b.dequeue()
        sums = c.alloc()
        for _ in range(case.delays[0] + 1):
            k.mmad(sums.region(0, shape), left.region(0, shape), right.region(0, shape))
        a.free()
        b.free()
        c.enqueue()
        sums = c.dequeue()
        slot = out.alloc()
        k.fixpipe(slot.region(), sums.region())
        c.free()
        out.enqueue()

    return step


def _vector_stage(
    case: Relay, k: KernelBuilder, core: Affine, first: Affine, side: Any, s: int
) -> Callable[[Affine], None]:
    """Add 1 to a part of a tile; between cube cores it goes on as fp16."""
    start, width = side
    last = s == case.stages - 1
    length = len(case.tiles) * max(case.tiles) * AREA
    dtype = "fp32" if last else "fp16"
    y: Any = k.tensor("y", dtype, length) if last else k.ring_out(case.rings[s], core, "MTE3")
    source = k.ring_in(case.rings[s - 1], core, "MTE2")
    near = k.queue(f"in_{s}", "UB", "fp32", width, src="MTE2", dst="V")
    out: Queue = k.queue(f"out_{s}", "UB", dtype, width, src="V", dst="MTE3")

    def step(t: Affine) -> None:
        k.copy(near.alloc().region(), source.dequeue().region(start, width))
        source.free()
        near.enqueue()
        tile = near.dequeue()
        done = out.alloc()
        for _ in range(case.delays[1]):
            k.each("vadds", width, (tile, 0), (tile, 0), scalar=0.0)
        if last:
            k.each("vadds", width, (done, 0), (tile, 0), scalar=1.0)
        else:
            k.each("vadds", width, (tile, 0), (tile, 0), scalar=1.0)
            k.each("vconv", width, (done, 0), (tile, 0))
        near.free()
        out.enqueue()
        tile = out.dequeue()
        place = y.region((first + t) * AREA + start, width) if last else None
        k.copy(place or y.alloc().region(start, width), tile.region())
        out.free()
        if not last:
            y.enqueue()

    return step


@st.composite
def relays(draw: st.DrawFn) -> Relay:
    """Draw a kernel of 1 to 3 AI cores."""
    most = draw(st.sampled_from([1, 2, 3, 5, 8, 20, 47]))
    count = draw(st.integers(1, 3))
    few = draw(st.sampled_from([most, max(1, most // 2)]))
    stages = draw(st.sampled_from([2, 4]))
    return Relay(
        tiles=tuple([most, few, most][:count]),
        stages=stages,
        lag=draw(st.integers(0, 2)) if stages == 4 else 0,
        slots=draw(st.integers(1, 4)),
        cut=draw(st.sampled_from([128, 64, 192])),
        delays=(draw(st.integers(0, 9)), draw(st.integers(0, 9))),
        inner=draw(st.sampled_from([1, 3, 4])),
    )
