"""How far networks are from their bounds, by default and tuned: part of `lab.py bench`.

trivial bound = max(multiply-accumulates / cube peak, bytes of weights / memory rate)

By default every network is compiled once. `lab.py bench --tuned S` tunes each for S seconds, slices
and launches first: 12 s each are about eight minutes on one core that does nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from statistics import geometric_mean

from ascend_lab.aoe.drive import Settings
from ascend_lab.aoe.engine import tune
from ascend_lab.compiler import bound_of, compile_stages, zoo
from ascend_lab.compiler.compile import ledger
from ascend_lab.compiler.counts import macs
from ascend_lab.compiler.placement import weight_bytes
from ascend_lab.machine.chip import load_chip
from bench.table import CHIPS, Figure, times

NETWORKS = ("resnet50", "vgg16", "bert_base", "mobilenet_v2", "efficientnet_b0")
BATCHES = (1, 16)


@dataclass(frozen=True, slots=True)
class Case:
    """A network on a chip: seconds of the model, of both bounds, and by cause."""

    name: str
    batch: int
    chip: str
    time_s: float
    trivial_s: float
    bound_s: float
    ledger: dict[str, float]


def case_of(name: str, batch: int, chip_name: str, tuned_s: float = 0.0) -> Case:
    """Return a network of the zoo, compiled by default, or tuned for so many seconds."""
    chip = load_chip(chip_name)
    graph = zoo.build(name, batch=batch)
    stages = compile_stages(graph, chip)
    cube_s = 2 * macs(stages.rewritten) / chip.peak_ops_per_s("fp16")
    memory_s = weight_bytes(stages.rewritten) / chip.device_memory.rate_bytes_per_s
    trivial_s = max(cube_s, memory_s)
    if tuned_s:
        found = tune(graph, chip, "1,2", settings=Settings(time_limit_s=tuned_s))
        return Case(
            name,
            batch,
            chip_name,
            found.result_s,
            trivial_s,
            found.bound_s,
            dict(found.ledgers.after),
        )
    line = stages.timeline()
    bound = bound_of(stages.rewritten, chip)
    return Case(name, batch, chip_name, line.time_s, trivial_s, bound.time_s, ledger(line, bound))


def cases(tuned_s: float = 0.0) -> Iterator[Case]:
    """Yield every network, batch and chip."""
    for name, batch, chip in product(NETWORKS, BATCHES, CHIPS):
        yield case_of(name, batch, chip, tuned_s)


def bound_figures() -> list[Figure]:
    """Times by default over both bounds: geometric means, of all and by network."""
    return means(list(cases()), "")


def tuned_figures(tuned_s: float) -> Iterator[Figure]:
    """Yield the same, each case tuned for so many seconds, and the cases that have targets."""
    found = list[Case]()
    for case in cases(tuned_s):
        found.append(case)
        target = TARGETS.get((case.name, case.batch, case.chip))
        label = f"{case.name} {case.batch} {case.chip}"
        yield times(f"  {label}", case.time_s / case.trivial_s, target)
    yield from means(found, ", tuned", 3.0, 1.6)


TARGETS = {
    ("resnet50", 16, "Ascend310"): 1.19,  # 19 ms
    ("resnet50", 16, "Ascend310P3"): 1.8,
    ("resnet50", 16, "Ascend910A"): 1.8,
    ("resnet50", 16, "Ascend910B2"): 2.2,
    **{(name, 16, chip): 6.0 for name in NETWORKS[3:] for chip in CHIPS[:2]},
}
"""Times over the trivial bound that tuning is to reach."""


def means(
    found: list[Case], how: str, trivial: float | None = None, certified: float | None = None
) -> list[Figure]:
    """Return geometric means over both bounds, of all cases and of each network."""

    def mean(bound: str, name: str = "") -> float:
        some = (case for case in found if name in ("", case.name))
        return geometric_mean(case.time_s / getattr(case, bound) for case in some)

    return [
        times(f"time / trivial bound, {len(found)} cases{how}", mean("trivial_s"), trivial),
        times("  / certified bound", mean("bound_s"), certified),
        *(times(f"    {name}", mean("bound_s", name)) for name in NETWORKS),
    ]
