"""Interpolates the times of the many steps of a simulated server from a few timed ones.

A simulated server takes thousands of steps of all sizes. `Model` times the points of a grid of
powers of two, each once, and a step's time is interpolated between its neighbours:

    decode   bilinear in batch and mean context
    prefill  linear in the tokens of the prompts

A step that does both fetches the weights once and starts each kernel once. Both parts would spend
seconds on this (weights, starts and gaps), which they share in one step:

    time = decode + prefill - min(shared seconds of decode, shared seconds of prefill)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ascend_lab.errors import CapacityError
from ascend_lab.llm.layer import PAGE_TOKENS
from ascend_lab.llm.memory import sequence_bytes
from ascend_lab.llm.plan import Load, decode, prefill
from ascend_lab.llm.step import Model, Step

SHARED_ENTRIES = ("weights", "starts", "gaps")
"""Entries of a step's ledger that a prefill and a decode in one step share."""
SMALLEST_GRID_TOKENS = 16
"""The smallest prompt and the shortest context of the grid; smaller ones are timed as this one."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a step, and the part of them that it can share with another."""

    time_s: float
    shared_s: float


class Steps:
    """Interpolated times of a model's steps, for the scheduler of `deploy.serving.language`."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._decodes: dict[tuple[int, int], Cost] = {}
        self._prefills: dict[int, Cost] = {}

    def seconds_of(self, prompt_tokens: int, decodes: int, cached: int) -> float:
        """Return the seconds of a step.

        The step reads `prompt_tokens` and computes one new token for each of `decodes` sequences,
        which have `cached` tokens in their caches, all together.
        """
        costs: list[Cost] = []
        if prompt_tokens:
            costs.append(self._prefill(prompt_tokens))
        if decodes:
            # Attention's time is linear in the tokens it reads, so only their sum matters: 10
            # sequences with 1000 tokens in all take as long as 10 sequences of 100 tokens each.
            costs.append(self._decode(decodes, max(1.0, cached / decodes)))
        if len(costs) < 2:
            return costs[0].time_s if costs else 0.0
        # Decode 20 ms, of which 15 ms are shared, prefill 50 ms, of which 12 ms are shared:
        # 20 + 50 - 12 = 58 ms.
        return sum(part.time_s for part in costs) - min(part.shared_s for part in costs)

    def pages(self) -> int:
        """Return the number of cache pages that fit into memory with the weights and activations.

        Raises `CapacityError` if not even one page fits.
        """
        model = self.model
        memory = model.memory(decode(model.plan.dp, PAGE_TOKENS))
        free_bytes = memory.device_bytes - memory.weights_bytes - memory.activations_bytes
        page_bytes = sequence_bytes(model.decoder, model.shard, PAGE_TOKENS, model.format)
        # Each data-parallel group has a cache of its own.
        pages = int(free_bytes // page_bytes) * model.plan.dp
        if pages < 1:
            raise CapacityError(
                f"room for a page of the cache beside {memory.weights_bytes / 2**30:.1f} GiB of "
                "weights",
                f"{memory.device_bytes / 2**30:.0f} GiB",
                "raise tp or pp, or take a format with smaller weights",
            )
        return pages

    # -- the grid ----------------------------------------------------------------------------------
    def _decode(self, batch: int, context: float) -> Cost:
        """Return the cost of a decode step, interpolated between four points of the grid."""
        # 48 sequences: half way between the points of 32 and 64.
        low, high, fraction = _grid_neighbours(float(batch), 1)
        low_cost = self._decode_row(low, context)
        if not fraction:
            return low_cost
        return _interpolated(low_cost, self._decode_row(high, context), fraction)

    def _decode_row(self, batch: int, context: float) -> Cost:
        """Return the cost of a decode step whose batch is on the grid, at any context."""
        low, high, fraction = _grid_neighbours(context, SMALLEST_GRID_TOKENS)
        low_cost = self._decode_point(batch, low)
        if not fraction:
            return low_cost
        return _interpolated(low_cost, self._decode_point(batch, high), fraction)

    def _decode_point(self, batch: int, context: int) -> Cost:
        """Return the cost of a point, timed at its first use."""
        key = (batch, context)
        if key not in self._decodes:
            self._decodes[key] = self._cost(decode(batch, context))
        return self._decodes[key]

    def _prefill(self, tokens: int) -> Cost:
        """Return the cost of a prefill with this many prompt tokens in all."""
        low, high, fraction = _grid_neighbours(float(tokens), SMALLEST_GRID_TOKENS)
        low_cost = self._prefill_point(low)
        if not fraction:
            return low_cost
        return _interpolated(low_cost, self._prefill_point(high), fraction)

    def _prefill_point(self, tokens: int) -> Cost:
        """Return the cost of a point, timed at its first use."""
        if tokens not in self._prefills:
            self._prefills[tokens] = self._cost(prefill(1, tokens))
        return self._prefills[tokens]

    def _cost(self, load: Load) -> Cost:
        """Return the cost of a load; the scheduler, not this model, checks the memory."""
        step: Step = self.model.time_step(load)
        return Cost(step.time_s, sum(step.ledger[entry] for entry in SHARED_ENTRIES))


def _grid_neighbours(value: float, fewest: int) -> tuple[int, int, float]:
    """Return the powers of two around a value, and its position between them, from 0 to 1.

    For example, 48 gives 32, 64 and 0.5. A value below `fewest` counts as `fewest`.
    """
    on_grid = max(value, float(fewest))
    low = 2 ** math.floor(math.log2(on_grid))
    return low, 2 * low, on_grid / low - 1


def _interpolated(low_cost: Cost, high_cost: Cost, fraction: float) -> Cost:
    """Return the linear interpolation of two costs."""
    return Cost(
        low_cost.time_s + fraction * (high_cost.time_s - low_cost.time_s),
        low_cost.shared_s + fraction * (high_cost.shared_s - low_cost.shared_s),
    )
