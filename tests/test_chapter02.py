"""Chapter 2: the core map draws the chip file, no more; the checks tell right from wrong."""

from collections import Counter
from itertools import pairwise, permutations, product

import pytest
from matplotlib.text import Text
from page_checks import assert_apart

from ascend_lab.errors import PathError
from ascend_lab.lab.checks import chapter01_02 as chapter02
from ascend_lab.lab.figures import fig_core_map
from ascend_lab.lab.figures.core import find_route, move_over
from ascend_lab.lab.figures.style import LabFigure
from ascend_lab.machine.chip import PRESETS, Chip, load_chip
from ascend_lab.machine.isa import KernelBuilder
from ascend_lab.machine.sim import Surroundings, instruction_cost, simulate

KIB = 1024


def visible_texts(fig: LabFigure) -> list[Text]:
    """Return labels and titles; the tick labels of an axis that is off do not count."""
    return [t for ax in fig.axes for t in (*ax.texts, ax._left_title) if t.get_text()]


def arrow_labels(fig: LabFigure) -> Counter[str]:
    pipes = ("V", "MTE1", "MTE2", "MTE3", "FIX")
    words = [t.get_text().split(" ") for t in visible_texts(fig)]
    return Counter(" ".join(w) for w in words if len(w) == 2 and w[0] in pipes)


# -- the map ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PRESETS)
def test_map_shows_every_path_of_the_chip_file_and_no_other(name: str) -> None:
    chip = load_chip(name)
    fig = fig_core_map((name,))
    expected = Counter(f"{p.pipe} {p.rate_bytes_per_cycle:g}" for p in chip.paths.values())
    assert arrow_labels(fig) == expected
    for src, dst in chip.paths:
        assert f"{src} to {dst} " in fig.alt_text
    for space, size in chip.buffers.items():
        shown = [t.get_text().split() for t in visible_texts(fig)]
        assert [space, str(size // KIB), "KiB"] in shown


@pytest.mark.parametrize("name", PRESETS)
def test_labels_of_the_map_do_not_overlap(name: str) -> None:
    fig = fig_core_map((name,))
    assert_apart(fig, visible_texts(fig))


# -- one path, or a chain of them -----------------------------------------------------------------
def simulated_cost(chip: Chip, src: str, dst: str, size_bytes: int) -> tuple[int, int]:
    """Occupied and latency cycles of one move as the simulator charges it."""
    k = KernelBuilder("move", chip)
    elements = size_bytes // 2
    ends = [
        k.tensor(f"t{i}", "fp16", elements)
        if space == "GM"
        else k.buffer(f"b{i}", space, "fp16", elements)
        for i, space in enumerate((src, dst))
    ]
    if dst in ("L0A", "L0B"):
        shape: tuple[int, ...] = (size_bytes // 512, 16, 16)
        k.load2d(ends[1].region(0, shape), ends[0].region(0, shape))
    elif chip.path(src, dst).pipe == "FIX":
        k.fixpipe(ends[1].region(), ends[0].region())
    else:
        k.copy(ends[1].region(), ends[0].region())
    program = k.finish()
    instruction = next(i for i, _ in program.instructions())
    cost = instruction_cost(chip, instruction, Surroundings())
    assert simulate(program, chip).cycles >= cost.occupancy_cycles
    return cost.occupancy_cycles, cost.latency_cycles


@pytest.mark.parametrize("name", PRESETS)
def test_cycles_on_the_map_are_the_simulators(name: str) -> None:
    chip = load_chip(name)
    for src, dst in chip.paths:
        for size_bytes in (512, 3072, 4096):
            if dst == "BT" and size_bytes > chip.buffers["BT"]:
                continue
            move = move_over(chip, (src, dst), size_bytes)
            expected = simulated_cost(chip, src, dst, size_bytes)
            assert (move.occupied_cycles, move.latency_cycles) == expected, (src, dst)


@pytest.mark.parametrize("name", PRESETS)
def test_route_is_the_shortest_legal_chain(name: str) -> None:
    chip = load_chip(name)
    spaces = ["GM", *chip.buffers]
    for src, dst in product(spaces, spaces):
        chains = [
            (src, *middle, dst)
            for count in range(len(spaces))
            for middle in permutations([s for s in spaces if s not in (src, dst)], count)
        ]
        legal = [
            list(pairwise(chain))
            for chain in chains
            if all(hop in chip.paths for hop in pairwise(chain))
        ]
        if not legal:
            with pytest.raises(PathError, match=f"{src}->{dst}"):
                find_route(chip, src, dst, KIB)
            continue
        found = find_route(chip, src, dst, KIB)
        assert [move.hop for move in found] in legal
        hops = min(len(chain) for chain in legal)
        assert len(found) == hops
        best = min(
            sum(move_over(chip, hop, KIB).occupied_cycles for hop in chain)
            for chain in legal
            if len(chain) == hops
        )
        assert sum(move.occupied_cycles for move in found) == best


# -- the checks of the exercises ---------------------------------------------------------------


def test_largest_k_leaves_room_for_two_and_not_for_one_block_more() -> None:
    for name, dtype, m, n in product(PRESETS, ("fp16", "int8"), (16, 64, 128), (16, 128, 256)):
        chip = load_chip(name)
        (itemsize, c0) = {"fp16": (2, 16), "int8": (1, 32)}[dtype]
        k = chapter02.largest_k(name, dtype, m, n)
        if 4 * m * n > chip.buffers["L0C"]:
            assert k == 0
            continue
        fits = [
            2 * itemsize * m * depth <= chip.buffers["L0A"]
            and 2 * itemsize * depth * n <= chip.buffers["L0B"]
            for depth in (k, k + c0)
        ]
        assert fits == [True, False]
        assert k % c0 == 0
        if k:
            builder = KernelBuilder("two", chip)
            builder.buffer("a", "L0A", dtype, m * k, slots=2)
            builder.buffer("b", "L0B", dtype, k * n, slots=2)
            builder.buffer("c", "L0C", "int32", m * n)
