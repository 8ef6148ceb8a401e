"""A compiler whose techniques can be switched off one by one, and what each of them is worth.

Off is what a first version of a compiler does: the graph as the model states it; layouts only where
the cube needs them, so that every cube operator has its operands converted; a kernel per operator;
tiles for buffers of an eighth of their size; one slot per buffer, so that loads and use alternate.
All cores work from the first, since nobody ships a compiler that leaves some of them idle. With all
on it is the default compiler, which `tune` starts from.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import combinations
from math import comb, exp, log

from ascend_lab import dsl as te
from ascend_lab.aoe.operators import unit_of
from ascend_lab.chip import Chip
from ascend_lab.errors import InputError
from ascend_lab.graph import Compiled, Graph, simulate_graph
from ascend_lab.graph.compile import Road
from ascend_lab.graph.layout import assign_layouts
from ascend_lab.graph.lower import CONVOLUTIONS, Choice, Lowered, Piece
from ascend_lab.graph.lower.conv import conv_job
from ascend_lab.graph.lower.matmul import batched_output, product_job
from ascend_lab.graph.lower.vector import vector_outputs
from ascend_lab.graph.passes import DEFAULT
from ascend_lab.graph.tasks import CpuKernel, lowered_once
from ascend_lab.isa import Kernel
from ascend_lab.kernels import GemmSchedule
from ascend_lab.kernels.conv_schedules import conv_schedule
from ascend_lab.kernels.default_schedules import default_schedule

TECHNIQUES = ("rewriting", "layouts", "fusion", "large tiles", "double buffers")
"""In the order of the waterfall."""
SMALL = 8
"""Without large tiles a scheduler sees this fraction of L0 and UB; L1 must hold rows of images."""
BUFFERS = ("L0A", "L0B", "L0C", "UB")


def compile_with(graph: Graph, chip: Chip, on: Iterable[str], *, dtype: str = "fp16") -> Compiled:
    """Return the kernels of a graph by a compiler with only these techniques.

    Raises `InputError` for an unknown technique, and as `compile_stages`.
    """
    return _compiler(graph, chip, dtype)(frozenset(on))


def _compiler(graph: Graph, chip: Chip, dtype: str) -> Callable[[frozenset[str]], Compiled]:
    """Return what compiles a graph with the techniques it is given; slots are decided last."""

    @cache
    def doubled(on: frozenset[str]) -> Compiled:
        believed = chip if "large tiles" in on else small_chip(chip)
        follow = "layouts" in on
        road = Road(DEFAULT if "rewriting" in on else (), dtype=dtype, joined=follow,
                    layouts=partial(assign_layouts, follow=follow),
                    fusion="fusion" in on)  # fmt: skip
        return road.stages(graph, believed).compiled

    def compiled(on: frozenset[str]) -> Compiled:
        if unknown := sorted(on - set(TECHNIQUES)):
            raise InputError(", ".join(TECHNIQUES), ", ".join(unknown), "choose among them")
        found = doubled(on - {"double buffers"})
        return replace(found if "double buffers" in on else single_buffered(found), chip=chip)

    return compiled


def ladder(
    graph: Graph, chip: Chip, names: Sequence[str] = TECHNIQUES
) -> list[tuple[str, Compiled, float]]:
    """Return (technique, network, seconds) from the naive compiler on, one technique more a row."""
    build, rows = _compiler(graph, chip, "fp16"), []
    for count in range(len(names) + 1):
        compiled = build(frozenset(names[:count]))
        name = names[count - 1] if count else "naive"
        rows.append((name, compiled, simulate_graph(compiled).time_s))
    return rows


def all_times(
    graph: Graph, chip: Chip, names: Sequence[str] = TECHNIQUES
) -> dict[frozenset[str], float]:
    """Return the seconds of a graph under every subset of the techniques: 2^n networks."""
    sets = [frozenset(s) for size in range(len(names) + 1) for s in combinations(names, size)]
    build = _compiler(graph, chip, "fp16")
    return {on: simulate_graph(build(on)).time_s for on in sets}


@lru_cache(64)
def small_chip(chip: Chip) -> Chip:
    """Return the chip as a scheduler sees it that makes small tiles only."""
    sizes = {n: s // (SMALL if n in BUFFERS else 1) for n, s in chip.buffers.items()}
    return replace(chip, buffers=sizes)


def single_buffered(compiled: Compiled) -> Compiled:
    """Return a network with one slot per buffer wherever a schedule says how many there are.

    Kernels written by hand (pooling, gathering, moving) keep theirs.
    """
    chip = compiled.chip
    tasks = tuple(
        replace(t, lowered=_with_one_slot(t.piece, t.lowered, chip)) if t.lowered else t
        for t in compiled.tasks
    )
    return replace(compiled, tasks=tasks)


def _with_one_slot(piece: Piece, lowered: Lowered, chip: Chip) -> Lowered:
    if isinstance(lowered.kernel, CpuKernel):
        return lowered
    unit, _ = unit_of(piece, chip)
    if unit in ("cube", "joint"):
        one = {f"{name}_slots": 1 for name in ("a_l1", "b_l1", "a_l0", "b_l0", "c_l0")}
        tiling = replace(default_tiling(piece, chip), **one)  # type: ignore[arg-type]
        return lowered_once(piece, chip, Choice(tiling=tiling))
    if not unit:
        return lowered
    return replace(lowered, kernel=_one_slot_kernel(piece, unit, chip))


@lru_cache(1024)
def _one_slot_kernel(piece: Piece, unit: str, chip: Chip) -> Kernel:
    outputs = [batched_output(piece)] if unit == "product" else vector_outputs(piece)[0]
    steps = json.loads(te.auto_schedule(outputs, chip).to_json())
    steps["steps"] = [s for s in steps["steps"] if s[0] != "double_buffer"]
    return te.lower(te.replay(outputs, chip, json.dumps(steps)))


def default_tiling(piece: Piece, chip: Chip) -> GemmSchedule:
    """Return the tiling that a convolution or product gets without a tuner."""
    if piece.graph.nodes[0].op in CONVOLUTIONS:
        shape, epilogue, _ = conv_job(piece, chip)
        return lowered_once(piece, chip).tiling or conv_schedule(shape, chip, epilogue)
    product, epilogue = product_job(piece, chip)
    return default_schedule(product, chip, epilogue)


# -- who earned it? Credit for what several techniques reach together, whatever their order --------

Value = Callable[[frozenset[str]], float]
"""What a set of techniques is worth."""
Times = Mapping[frozenset[str], float]
"""Seconds for every set of techniques."""


def shares(value: Value, names: Sequence[str]) -> dict[str, float]:
    """Return the Shapley value of each name: what it adds to `value`, mean over all orders.

        share(i) = sum over S without i of (value(S + i) - value(S)) / (n C(n - 1, |S|))

    Shares add up to value(all) - value(none). Source: Shapley 1953.
    """
    return {
        name: sum(
            (value(before | {name}) - value(before))
            / (len(names) * comb(len(names) - 1, len(before)))
            for before in others(name, names)
        )
        for name in names
    }


def others(name: str, names: Sequence[str]) -> Iterator[frozenset[str]]:
    """Yield every set of the other names."""
    rest = [n for n in names if n != name]
    for size in range(len(rest) + 1):
        yield from map(frozenset, combinations(rest, size))


def factors(times: Times, names: Sequence[str]) -> dict[str, float]:
    """Return how many times faster each name makes it: its share of the logarithm of the speed.

    Speed-ups multiply and their logarithms add, so that the factors multiply to
    time(none) / time(all).
    """
    found = shares(lambda on: -log(times[on]), names)
    return {name: exp(share) for name, share in found.items()}


def factor_range(times: Times, name: str, names: Sequence[str]) -> tuple[float, float]:
    """Return the least and the largest factor of a name, over all sets that may stand before it."""
    found = [times[before] / times[before | {name}] for before in others(name, names)]
    return min(found), max(found)
