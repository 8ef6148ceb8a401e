"""Whole networks held against published rates, row by row, hits and misses alike.

The rates are of networks compiled operator by operator, as by our default compiler; first layers
read pixels of 4 channels only where the source says so. No constant of the model is fitted to a
row. What a row has above its bound stands in its ledger.
"""

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ascend_lab.chip import load_chip
from ascend_lab.graph import zoo
from ascend_lab.graph.bound import bound_of
from ascend_lab.graph.compile import Road, finish_stages, front_stages
from ascend_lab.graph.ledger import ledger

GOALS = {"dense": 0.3, "light": 0.5}
"""How far off the rate may be, by kind of network."""


@dataclass(frozen=True, slots=True)
class NetworkRow:
    """A published rate per second and chip, and the model's; `terms` is its ledger in seconds."""

    name: str
    chip: str
    batch: int
    kind: str
    published_per_s: float
    model_per_s: float
    terms: dict[str, float]

    @property
    def error(self) -> float:
        """model / published - 1."""
        return self.model_per_s / self.published_per_s - 1.0

    @property
    def missing_s(self) -> float:
        """Seconds of a batch that the published time has more than the model's."""
        return self.batch / self.published_per_s - self.batch / self.model_per_s

    @property
    def misses(self) -> bool:
        """Whether the error is beyond the goal for networks of its kind."""
        return abs(self.error) > GOALS[self.kind]

    @property
    def cause(self) -> str:
        """The largest term above the bound, and its share of the time."""
        above = {name: s for name, s in self.terms.items() if name != "bound"}
        name = max(above, key=lambda term: above[term])
        return f"{name} {above[name] / sum(self.terms.values()):.0%}"


def published_networks() -> list[dict[str, Any]]:
    """Return the published networks as they are written down: `per_s` by batch."""
    text = (resources.files("ascend_lab.graph") / "published.toml").read_text("utf-8")
    rows: list[dict[str, Any]] = tomllib.loads(text)["network"]
    return rows


def network_rows(names: Iterable[str] = ()) -> Iterator[NetworkRow]:
    """Yield each published network at batch 1 and at its best batch; of all names, or some."""
    wanted = set(names)
    for entry in published_networks():
        rates = {int(batch): float(rate) for batch, rate in entry["per_s"].items()}
        best = max(rates, key=lambda batch: rates[batch])
        for batch in sorted({1, best} & set(rates)):
            if not wanted or entry["name"] in wanted:
                yield network_row(entry, batch, rates[batch])


def network_row(entry: dict[str, Any], batch: int, published_per_s: float) -> NetworkRow:
    """Return what the model says of a published rate."""
    chip = load_chip(entry["chip"])
    graph = zoo.build(entry["name"], batch=batch, **entry.get("settings", {}))
    road = Road(small=entry.get("small_channel", False))
    stages = finish_stages(front_stages(graph, chip, road), chip, road)
    times = stages.timeline()
    terms = ledger(times, bound_of(stages.rewritten, chip))
    rate = batch / times.time_s
    return NetworkRow(entry["name"], chip.name, batch, entry["kind"], published_per_s, rate, terms)


def network_table(rows: Iterable[NetworkRow]) -> str:
    """Return rows as text: rates, error (starred if too large), time missing, time over bound."""
    head = f"{'network':<15}{'chip':<7}{'batch':>5}{'model/s':>9}{'publ./s':>9}{'error':>7} "
    lines = [f"{head}{'missing':>9}{'/bound':>8}  largest above"]
    for row in rows:
        over = sum(row.terms.values()) / row.terms["bound"]
        lines.append(
            f"{row.name:<15}{row.chip.removeprefix('Ascend'):<7}{row.batch:>5}"
            f"{row.model_per_s:>9.0f}{row.published_per_s:>9.0f}{row.error:>+7.0%}"
            f"{'*' if row.misses else ' '}{row.missing_s * 1e6:>+7.0f}us{over:>8.2f}  {row.cause}"
        )
    return "\n".join(lines)
