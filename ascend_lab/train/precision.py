"""Mixed precision: a graph in a narrow format with wide masters, and the scale of its loss.

The step computes in fp16 from copies of fp32 parameters, and updates the fp32 ones: a change
smaller than half the distance of neighbouring fp16 numbers would otherwise be lost. Gradients that
fp16 would round to 0 survive because the loss is multiplied by a scale, and they are divided by it
in fp32 (Micikevicius et al. 2018).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ascend_lab.errors import InputError
from ascend_lab.graph import Constant, Graph
from ascend_lab.graph.passes import convert
from ascend_lab.graph.passes.precision import in_format

FORMATS = ("fp16", "bf16", "fp32")
LARGEST_SCALE = 2.0**24
"""The scale never grows beyond: 1 / scale must stay exact in fp32 and the loss finite."""


def in_compute_format(forward: Graph, dtype: str) -> Graph:
    """Return the forward graph computing in a format; what has a format of its own keeps it."""
    if dtype not in FORMATS:
        raise InputError(f"dtype {', '.join(FORMATS)}", dtype, "choose one")
    for source in FORMATS:
        forward = forward if source == dtype else convert(forward, dtype, source)[0]
    return forward


def master_of(name: str, forward: Graph) -> str:
    """Return the name that a constant of the converted graph had before."""
    found = re.fullmatch(r"(.+)_(?:fp16|bf16|fp32)(?:_\d+)?", name)
    return name if name in forward.constants or found is None else found[1]


def copies_named(
    typed: Graph, masters: Mapping[str, str], dtype: str
) -> tuple[Graph, dict[str, str]]:
    """Return the graph with w.fp16 for the copy of w, where masters are of another format.

    With it: the master of each parameter, by the name under which the graph reads it.
    """
    formats = {name: typed.types[name].dtype for name in masters}
    names = {n: m if formats[n] == dtype else f"{m}.{formats[n]}" for n, m in masters.items()}
    nodes = tuple(
        replace(node, inputs=tuple(names.get(n, n) for n in node.inputs)) for node in typed.nodes
    )
    types = {names.get(n, n): kind for n, kind in typed.types.items()}
    constants = {names.get(n, n): constant for n, constant in typed.constants.items()}
    made = replace(typed, nodes=nodes, types=types, constants=constants)
    return made, {names[n]: master for n, master in masters.items()}


def master_constant(constant: Constant, dtype: str) -> Constant:
    """Return the initial values of a parameter in its master format."""
    return constant if constant.type.dtype == dtype else in_format(constant, dtype)


@dataclass(frozen=True, slots=True)
class DynamicLossScale:
    """A loss scale that halves when a gradient overflows and doubles after many good steps.

    `good_steps` counts steps since the last change. The defaults are those of the usual libraries:
    double after 2000 steps without infinity or NaN (Micikevicius et al. 2018).
    """

    scale: float = 65536.0
    good_steps: int = 0
    growth_interval: int = 2000
    growth: float = 2.0
    backoff: float = 0.5

    def __post_init__(self) -> None:
        if not self.scale > 0 or self.growth_interval < 1:
            got = f"{self.scale}, {self.growth_interval}"
            raise InputError("a scale above 0 and a growth interval of at least 1", got, "raise it")
        if not (self.growth >= 1.0 and 0.0 < self.backoff < 1.0):
            got = f"{self.growth}, {self.backoff}"
            raise InputError("growth of at least 1, backoff between 0 and 1", got, "change them")

    def next(self, found_inf: bool) -> DynamicLossScale:
        """Return the scale for the next step; after an overflow this step's update is skipped."""
        if found_inf:
            return replace(self, scale=max(1.0, self.scale * self.backoff), good_steps=0)
        if self.good_steps + 1 < self.growth_interval:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, scale=min(LARGEST_SCALE, self.scale * self.growth), good_steps=0)


def found_inf(values: Mapping[str, Any]) -> bool:
    """Tell whether any array holds an infinity or NaN: a gradient overflowed in the step."""
    return any(not np.isfinite(np.asarray(v, np.float64)).all() for v in values.values())
