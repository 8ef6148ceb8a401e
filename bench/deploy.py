"""Deployed int8 against fp16, mixed precision against the bisection: `lab.py bench`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ascend_lab.compiler import Graph, zoo
from ascend_lab.deploy.compress import LayerPlan, Plan, Quantised, at_batch, quantise_graph
from ascend_lab.deploy.compress.deployed import costs_before_and_after
from ascend_lab.deploy.compress.digits import convolutional, load_digits, trained, transformer
from ascend_lab.deploy.compress.mixed import choose
from bench.table import Figure

BATCH = 16
RANGES = Plan(LayerPlan("minmax"))
"""Scales by the range seen, with an offset: found fast; here times count, and errors per layer."""
CHIPS = ("Ascend310", "Ascend310P3", "Ascend910A")
NETWORKS = (
    "resnet18",
    "resnet50",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "squeezenet",
    "shufflenet_v2",
    "ghostnet",
    "mobilevit_block",
)
"""Networks of the zoo; the two trained on digits make them ten."""


def noise(graph: Graph, seed: int) -> dict[str, Any]:
    """Return one feed of normal numbers."""
    rng = np.random.default_rng(seed)
    return {n: rng.normal(size=graph.types[n].shape).astype(np.float32) for n in graph.inputs}


def calibrated(graph: Graph, seed: int = 0) -> Quantised:
    """Return a network calibrated on noise: scales for times and errors, not for accuracy."""
    return quantise_graph(graph, [noise(graph, seed)], RANGES)


def _resnet50() -> Iterator[Figure]:
    small = calibrated(zoo.build("resnet50", batch=1))
    found = at_batch(small, zoo.build("resnet50", batch=BATCH), Plan())
    for chip in CHIPS:
        half, byte = costs_before_and_after(found.graph, found.layers, chip)
        ratio = half.time_s / byte.time_s
        weights = byte.weight_bytes / half.weight_bytes
        title = f"ResNet-50 int8 of fp16, batch {BATCH}, {chip}"
        yield Figure(title, f"{ratio:.3f}x", ">= 1.5", ratio >= 1.5)
        yield Figure("  bytes of weights", f"{weights:.2f}x", "<= 0.51", weights <= 0.51)


def _mixed(chip: str = "Ascend310P3", share: float = 0.3) -> Iterator[Figure]:
    never = True
    gains = []
    learn, _ = load_digits()
    cases = [(name, zoo.build(name)) for name in NETWORKS]
    cases += [(make.__name__, trained(make(), learn)) for make in (convolutional, transformer)]
    for name, graph in cases:
        feeds = learn.feeds[:2] if graph.name.startswith("digits") else [noise(graph, 1)]
        choice = choose(quantise_graph(graph, feeds, RANGES), feeds, chip, share)
        never &= choice.time_s <= choice.published_s * (1 + 1e-12)
        never &= choice.exact.time_s <= choice.published.time_s * (1 + 1e-12)
        gains.append(choice.published_s / choice.time_s)
        shown = [f"{s * 1e6:.0f}" for s in (choice.float_s, choice.published_s, choice.time_s)]
        yield Figure(f"  {name}: us in fp16, published, chosen", " ".join(shown), "", None)
    value = f"{min(gains):.3f}x to {max(gains):.3f}x"
    yield Figure(
        f"mixed precision against bisection, {len(cases)} networks", value, "never slower", never
    )


def deploy_figures() -> Iterator[Figure]:
    """Yield the int8 networks' times against fp16, and exact mixed precision on ten networks."""
    yield from _resnet50()
    yield from _mixed()
