"""How far networks are from their bounds, by the default compiler: part of `lab.py bench`.

trivial bound = max(multiply-accumulates / cube peak, bytes of weights / memory rate)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from statistics import geometric_mean

from ascend_lab.chip import load_chip
from ascend_lab.graph import bound_of, compile_stages, ledger, weight_bytes, zoo
from ascend_lab.graph.counts import macs
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


def case_of(name: str, batch: int, chip_name: str) -> Case:
    """Return a network of the zoo, compiled by default."""
    chip = load_chip(chip_name)
    stages = compile_stages(zoo.build(name, batch=batch), chip)
    cube_s = 2 * macs(stages.rewritten) / chip.peak_ops_per_s("fp16")
    memory_s = weight_bytes(stages.rewritten) / chip.device_memory.rate_bytes_per_s
    line, bound = stages.timeline(), bound_of(stages.rewritten, chip)
    return Case(name, batch, chip_name, line.time_s, max(cube_s, memory_s), bound.time_s,
                ledger(line, bound))  # fmt: skip


def cases() -> Iterator[Case]:
    """Yield every network, batch and chip."""
    for name, batch, chip in product(NETWORKS, BATCHES, CHIPS):
        yield case_of(name, batch, chip)


def bound_figures() -> list[Figure]:
    """Times over both bounds, geometric means, and the largest causes of what lies between."""
    found = list(cases())
    trivial = geometric_mean(case.time_s / case.trivial_s for case in found)
    certified = geometric_mean(case.time_s / case.bound_s for case in found)
    return [
        times(f"time / trivial bound, {len(found)} cases", trivial),
        times("  / certified bound", certified),
        *(
            times(f"    {network}", geometric_mean(
                case.time_s / case.bound_s for case in found if case.name == network
            ))
            for network in NETWORKS
        ),
    ]  # fmt: skip
