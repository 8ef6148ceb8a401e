"""Times networks with and without special kernels.

A special kernel is written for one shape or one operator. Without them every operator has the
general kernel of its kind.
"""

import math
from collections.abc import Iterable, Mapping

from ascend_lab.compiler import compile_graph, simulate_graph, zoo
from ascend_lab.machine.chip import load_chip
from ascend_lab.plugins import without_special_kernels

Row = tuple[str, int, str]
"""A network, its batch size, a chip."""
NETWORKS = ("alexnet", "mobilevit_block", "shufflenet_v2", "squeezenet")
CHIPS = ("Ascend310P3", "Ascend910A", "Ascend910B2")
SMALL_ROWS: tuple[Row, ...] = tuple((name, 1, chip) for name in NETWORKS for chip in CHIPS)
"""A dozen of the rows of `tests/data/golden_zoo.json`, which are timed within seconds."""


def time_ratios(rows: Iterable[Row] = SMALL_ROWS) -> Mapping[Row, float]:
    """Return for each row the time without special kernels over the time with them."""
    ratios = dict[Row, float]()
    for network, batch, chip in rows:
        full_s = _time_s(network, batch, chip)
        with without_special_kernels():
            plain_s = _time_s(network, batch, chip)
        ratios[network, batch, chip] = plain_s / full_s
    return ratios


def geometric_mean(ratios: Mapping[Row, float]) -> float:
    """Return the geometric mean of the ratios: twice as slow and twice as quick make 1."""
    return math.exp(sum(math.log(ratio) for ratio in ratios.values()) / len(ratios))


def _time_s(network: str, batch: int, chip: str) -> float:
    """Return the seconds of a network of the zoo on a chip."""
    compiled = compile_graph(zoo.build(network, batch=batch), load_chip(chip))
    return simulate_graph(compiled).time_s
