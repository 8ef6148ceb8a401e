"""What L2 holds between phases and kernels: against an LRU of single bytes, and in time."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st
from message_lists import assert_messages
from strategies import gemm_cases, launches

from ascend_lab.lab.figures.fusing import chain_kernels
from ascend_lab.machine.chip import load_chip, presets
from ascend_lab.machine.isa import Buffer, Kernel, KernelBuilder, Launch, as_launch
from ascend_lab.machine.sim import (
    L2,
    Access,
    DeviceMemory,
    KernelTimeline,
    analyse,
    simulate,
    simulate_kernel,
)
from ascend_lab.machine.sim.cost import lowest_bytes
from ascend_lab.machine.sim.l2 import PIECE_COUNT
from ascend_lab.operators.kernels import GemmShape, elementwise_launch, gemm_launch

TOY = load_chip("Toy")
MIB = 1 << 20


# -- the cache -------------------------------------------------------------------------------------
class Bytewise:
    """The same rule with a list of single units of memory, most recently used last."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.order: list[int] = []
        self.dirty: set[int] = set()

    def touch(self, accesses, unit=1):
        steps = []
        for rank, a in enumerate(accesses):
            first = a.address_bytes // unit
            count = a.size_bytes // unit
            steps += [(i / count, a.is_write, rank, first + i) for i in range(count)]
        hit = {a.name: 0 for a in accesses if not a.is_write}
        written = 0
        for _, is_write, rank, where in sorted(steps):
            if where in self.order:
                self.order.remove(where)
                if not is_write:
                    hit[accesses[rank].name] += unit
            if accesses[rank].is_last:
                self.dirty.discard(where)
                continue
            self.order.append(where)
            if is_write:
                self.dirty.add(where)
            if len(self.order) > self.size // unit:
                gone = self.order.pop(0)
                written += unit * (gone in self.dirty)
                self.dirty.discard(gone)
        sizes = {a.name: a.size_bytes for a in accesses if not a.is_write}
        return {n: hit[n] / size for n, size in sizes.items() if size}, written


SLOT = 60


@st.composite
def phases(draw: st.DrawFn, unit: int = 1) -> list[list[Access]]:
    """Draw phases that read some slots of memory and write some, in place or not."""
    found = []
    for _ in range(draw(st.integers(1, 5))):
        sizes = [draw(st.integers(0, SLOT)) for _ in range(4)]
        accesses = []
        for is_write in (False, True):
            for slot in draw(st.lists(st.integers(0, 3), max_size=4, unique=True)):
                name = f"{'out' if is_write else 'in'}{slot}"
                low = slot * SLOT
                last = not is_write and draw(st.booleans())
                accesses.append(Access(name, low * unit, sizes[slot] * unit, is_write, last))
        found.append(accesses)
    return found


def assert_same(case: list[list[Access]], size: int, unit: int) -> None:
    l2 = L2(size * unit, unit)
    plain = Bytewise(size * unit)
    for accesses in case:
        got = l2.touch(accesses)
        (hits, written) = plain.touch(accesses, unit)
        assert got.hits == hits
        assert got.write_back_bytes == written
        assert l2.held_bytes == len(plain.order) * unit
    assert l2.copy().flush() == l2.flush() == len(plain.dirty) * unit
    assert l2.flush() == 0


@settings(max_examples=100)
@given(st.sampled_from((1, 8)), st.data(), st.integers(1, 150))
def test_it_is_an_lru_of_bytes_or_of_whole_pieces(unit, data, size):
    assert_same(data.draw(phases(unit=unit)), size, unit)


@settings(max_examples=100)
@given(phases(), st.integers(1, 150), st.lists(st.tuples(*[st.integers(0, 4 * SLOT)] * 2)))
def test_what_is_discarded_is_neither_held_nor_written(case, size, ranges):
    l2 = L2(size, 7 if size > 7 else 1)
    plain = Bytewise(size)
    large = L2(size, 1)
    for accesses, (low, count) in zip(case, ranges, strict=False):
        large.touch(accesses), plain.touch(accesses), l2.touch(accesses)
        large.discard(low, count), l2.discard(low, count)
        gone = set(range(low, low + count))
        plain.order = [at for at in plain.order if at not in gone]
        plain.dirty -= gone
        assert large.held_bytes == len(plain.order)
        held = [part for piece in l2._pieces.values() for part in piece]
        assert l2.held_bytes == sum(b - a for a, b, _, _ in held)
        assert not any(a < low + count and low < b for a, b, _, _ in held if count)
        assert all(a <= c <= d <= b for a, b, c, d in held)
    assert large.flush() == len(plain.dirty)
    l2.discard(0, 10**9)
    assert l2.held_bytes == l2.flush() == 0


def test_what_is_skipped_in_the_middle_of_a_large_phase_is_counted():
    """Six slots of L2 and more stream by; none of the pieces in the middle is visited."""
    case = [
        [Access("x", 0, 5, False), Access("y", 100, 9, True)],
        [Access("x", 0, 700, False), Access("b", 2000, 3, False), Access("z", 1000, 600, True)],
        [Access("z", 1000, 600, False), Access("y", 2000, 3, True)],
    ]
    assert_same(case, 20, 1)
    big = [
        replace(a, address_bytes=a.address_bytes * MIB, size_bytes=a.size_bytes * MIB)
        for a in case[1]
    ]
    l2 = L2.of(TOY)
    visited = []
    run = l2._keys
    l2._keys = lambda *given: (visited.append(len(run(*given))), run(*given))[1]
    assert l2.touch(big).write_back_bytes > 598 * MIB
    assert sum(sorted(visited)[:-3]) < 8 * PIECE_COUNT < 700 * MIB // l2.piece_bytes


@settings(max_examples=100)
@given(phases(), st.integers(8, 200), st.integers(1, 8))
def test_odd_tensors_never_hold_more_than_fits(case, size, piece):
    l2 = L2(size, piece)
    first = l2.touch([Access("x", 3, size // 2, False)])
    assert first.hits == {"x": 0.0}
    assert l2.held_bytes == size // 2
    assert l2.touch([Access("x", 3, size // 2, False)]).hits == {"x": 1.0}
    for accesses in case:
        assert all(0 <= share <= 1 for share in l2.touch(accesses).hits.values())
        ranges = [r for held in l2._pieces.values() for r in held]
        assert l2.held_bytes == sum(b - a for a, b, _, _ in ranges) <= size
        assert all(a <= c <= d <= b for a, b, c, d in ranges)


def test_what_lies_between_two_tensors_of_a_piece_is_no_hit():
    """Tensors of one piece, the outer two touched: the one between was never read."""
    l2 = L2(1 << 20, 1 << 18)
    outer = [Access("x", 0, 4096, False), Access("z", 1 << 16, 4096, False)]
    l2.touch(outer)
    assert l2.touch([Access("y", 1 << 14, 4096, False)]).hits == {"y": 0.0}
    assert l2.touch(outer).hits == {"x": 1.0, "z": 1.0}
    assert l2.held_bytes == 3 * 4096


# -- a launch on a warm L2 -------------------------------------------------------------------------
def shares(names, low, high):
    return st.fixed_dictionaries({name: st.floats(low, high) for name in names})


@given(st.data())
def test_warmer_is_never_slower(data):
    if data.draw(st.booleans()):
        shape, schedule, chip = data.draw(gemm_cases())
        launch = gemm_launch(shape, chip, schedule)
    else:
        launch, chip = data.draw(launches(budget=20))
    if data.draw(st.booleans()):
        chip = replace(chip, l2=replace(chip.l2, size_bytes=4096))
    names = sorted(b.name for b in launch.tensors)
    first = data.draw(shares(names, 0.0, 1.0))
    second = {n: data.draw(st.floats(first[n], 1.0)) for n in names}
    levels = [None, first, second, dict.fromkeys(names, 1.0)]
    runs = [simulate(launch, chip, warm=w) for w in levels]
    for colder, warmer in pairwise(runs):
        assert warmer.cycles <= colder.cycles
        assert warmer.memory_bytes <= colder.memory_bytes
        assert warmer.l2_bytes >= colder.l2_bytes
    assert runs[1].cycles == simulate(launch, chip, warm=first, engine="reference").cycles
    assert simulate(launch, chip, warm=dict.fromkeys(names, 0.0)).cycles == runs[0].cycles


def test_a_launch_that_finds_everything_in_l2_reads_no_memory():
    launch = gemm_launch(GemmShape(256, 256, 256), TOY)
    cold = simulate(launch, TOY)
    warm = simulate(launch, TOY, warm={"a": 1.0, "b": 1.0, "w": 1.0})
    assert warm.memory_bytes == 0 < cold.memory_bytes
    assert warm.cycles < cold.cycles
    half = analyse(launch, TOY).warmed({"a": 0.5})
    assert half.memory_read_bytes == 256 * 256 * 2 * 1.5
    assert half.memory_share["a"] * 2 == analyse(launch, TOY).memory_share["a"]


def test_a_tensor_fetched_again_is_saved_once():
    """Each pass over B fetches it anew; what lay in L2 at the start helps the first pass."""
    tiny = replace(TOY, l2=replace(TOY.l2, size_bytes=4096))
    cold = analyse(gemm_launch(GemmShape(256, 256, 256), tiny), tiny)
    warm = cold.warmed({"b": 1.0})
    assert cold.fetched["b"] > cold.read_once["b"] == 256 * 256 * 2
    assert cold.memory_read_bytes - warm.memory_read_bytes == 256 * 256 * 2


# -- kernels on one memory -------------------------------------------------------------------------
@given(st.one_of(gemm_cases().map(lambda c: (gemm_launch(c[0], c[2], c[1]), c[2])), launches()))
def test_a_first_kernel_on_a_cold_memory_takes_what_it_takes_alone(case):
    launch, chip = case
    alone = simulate_kernel(launch, chip)
    first = simulate_kernel(launch, chip, DeviceMemory.of(chip))
    assert first.cycles == alone.cycles
    assert first.memory_bytes == alone.memory_bytes
    assert first.l2_hit_rate == alone.l2_hit_rate
    small = replace(chip, l2=replace(chip.l2, size_bytes=4096))
    cold = simulate_kernel(launch, small, DeviceMemory.of(small))
    assert cold.cycles <= simulate_kernel(launch, small).cycles


def two_in_a_row(elements: int, chip=TOY) -> tuple[KernelTimeline, KernelTimeline]:
    """Return y = relu(x), and x = relu(y) after it."""
    kernel = elementwise_launch(chip, elements, op="vrelu")
    size = 2 * elements
    memory = DeviceMemory.of(chip)
    (low, high) = ((0, size), (size, size))
    first = simulate_kernel(kernel, chip, memory.at({"x1": low, "y": high}))
    return first, simulate_kernel(kernel, chip, memory.at({"x1": high, "y": low}))


@pytest.mark.parametrize("name", presets())
def test_a_chain_is_faster_if_what_it_passes_on_fits(name):
    chip = load_chip(name)
    cores = 2048 * chip.core_count * chip.vector_cores_per_core
    fits, streams = (int(chip.l2.size_bytes * s) // 2 // cores * cores for s in (0.3, 2))
    alone, after = two_in_a_row(fits, chip)
    assert after.l2_hit_rate == 1.0
    assert alone.l2_hit_rate == after.memory_bytes == 0
    assert after.cycles < 0.8 * alone.cycles
    alone, after = two_in_a_row(streams, chip)
    assert after.l2_hit_rate == 0.0
    assert after.memory_bytes > alone.memory_bytes  # now it writes what the first one left dirty
    whole = simulate_kernel(elementwise_launch(chip, streams, op="vrelu"), chip)
    assert after.cycles == pytest.approx(whole.cycles, rel=0.01)
    assert after.memory_bytes == pytest.approx(4 * streams, rel=0.01)


def test_phases_of_a_kernel_share_l2_on_a_memory():
    kernel, fused = chain_kernels(TOY, 4, 1 << 16, "relu")
    apart = simulate_kernel(kernel, TOY)
    shared = simulate_kernel(kernel, TOY, DeviceMemory.of(TOY))
    assert [phase.l2_bytes for phase in apart.phases] == [0] * 4
    assert [phase.l2_bytes for phase in shared.phases] == [0] + [2 << 16] * 3
    assert shared.l2_hit_rate == 3 / 5
    assert shared.memory_bytes == simulate_kernel(fused, TOY).memory_bytes
    assert simulate_kernel(fused, TOY).cycles < shared.cycles < apart.cycles
    assert (
        shared.cycles
        == simulate_kernel(kernel, TOY, DeviceMemory.of(TOY), engine="reference").cycles
    )


def test_half_a_tensor_written_is_half_a_tensor_found():
    def copy(source: str, target: str, first: int, count: int) -> Launch:
        k = KernelBuilder(f"{source} to {target}", TOY)
        x = k.tensor(source, "fp16", 4096)
        y = k.tensor(target, "fp16", 4096)
        t = k.buffer("t", "UB", "fp16", 2048)
        with k.loop("i", count) as i:
            k.copy(t.region(), x.region(2048 * i + first, 2048))
            k.copy(y.region(2048 * i + first, 2048), t.region())
        return as_launch(k.finish())

    assert lowest_bytes(copy("x", "y", 2048, 1)) == {("x", False): 4096, ("y", True): 4096}
    upper = Kernel("upper", (copy("x", "y", 2048, 1),))
    lower = copy("y", "z", 0, 1)
    for after, expected in (
        (lower, 0.0),
        (copy("y", "z", 2048, 1), 1.0),
        (copy("y", "z", 0, 2), 0.5),
    ):
        memory = DeviceMemory.of(TOY)
        simulate_kernel(upper, TOY, memory)
        at = {"y": (4096 * 2, 4096 * 2), "z": (1 << 20, 4096 * 2)}
        assert simulate_kernel(after, TOY, memory.at(at)).l2_hit_rate == expected


def test_tensors_without_an_address_stand_behind_the_others():
    buffers = [Buffer(n, "GM", "fp16", 100) for n in "abc"]
    memory = DeviceMemory.of(TOY)
    assert memory.addresses(buffers) == {"a": 0, "b": 512, "c": 1024}
    assert memory.at({"b": (900, 200)}).addresses(buffers) == {"a": 1536, "b": 900, "c": 2048}
    apart = DeviceMemory.of(TOY, workspace_bytes=1 << 30).at({"b": (900, 200)})
    assert apart.addresses(buffers) == {"a": 1 << 30, "b": 900, "c": (1 << 30) + 512}
    assert apart.at({}).l2 is apart.l2


def test_what_is_refused_says_what_is_needed():
    square = gemm_launch(GemmShape(16, 16, 16), TOY)
    buffers = [Buffer(n, "GM", "fp16", 100) for n in "abc"]
    memory = DeviceMemory.of(TOY)
    calls = {
        "pieces of no bytes": lambda: L2(64, 0),
        "pieces larger than L2": lambda: L2(64, 65),
        "no L2": lambda: L2(0, 1),
        "more than all of a tensor": lambda: simulate(square, TOY, warm={"a": 1.1}),
        "less than none of it": lambda: simulate(square, TOY, warm={"a": -0.1}),
        "fewer than no bytes": lambda: simulate(square, TOY, write_back_bytes=-1),
        "a place too small": lambda: memory.at({"b": (0, 199)}).addresses(buffers),
        "a place below 0": lambda: memory.at({"b": (-1, 200)}).addresses(buffers),
        "a place for no tensor": lambda: memory.at({"d": (0, 200)}).addresses(buffers),
    }
    assert_messages("isa", "test_l2", calls)
