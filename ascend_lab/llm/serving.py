"""Steps of a language model as a server takes them: prompts and decodes by size.

A scheduler asks for thousands of steps of all sizes. They lie between the points of a grid of
powers of two, each timed once by `Model.step`:

    decode   batch x mean context, linear in both between the points
    prefill  tokens of the prompts, linear between the points

A step that reads prompt tokens beside decodes fetches weights once and starts each kernel once:

    mixed = decode + prefill - min(weights + starts + gaps of either)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ascend_lab.errors import CapacityError
from ascend_lab.llm.layer import PAGE_TOKENS
from ascend_lab.llm.memory import sequence_bytes
from ascend_lab.llm.plan import Load, decode, prefill
from ascend_lab.llm.step import Model, Step

SHARED = ("weights", "starts", "gaps")
"""Entries of the ledger that prompts and decodes of one step share."""
FEWEST_TOKENS = 16
"""The smallest prompt of the grid, and the shortest context: below it a step takes as long."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a step, and of that what a step beside it would share."""

    time_s: float
    shared_s: float


class Steps:
    """Seconds of a model's steps, for the scheduler of `deploy.serving.language`."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._decodes: dict[tuple[int, int], Cost] = {}
        self._prefills: dict[int, Cost] = {}

    def of(self, prompt_tokens: int, decodes: int, cached: int) -> float:
        """Return the seconds of a step.

        It reads `prompt_tokens`, and gives a token to each of `decodes` sequences with `cached`
        tokens in all in their caches.
        """
        parts: list[Cost] = []
        if prompt_tokens:
            parts.append(self._prefill(prompt_tokens))
        if decodes:
            # Attention is linear in the tokens it reads: 10 sequences of 1000 tokens in all read as
            # many as 10 of 100.
            parts.append(self._decode(decodes, max(1.0, cached / decodes)))
        if len(parts) < 2:
            return parts[0].time_s if parts else 0.0
        # Decode 20 ms of which 15 shared, prefill 50 ms of which 12: 20 + 50 - 12 = 58 ms.
        return sum(part.time_s for part in parts) - min(part.shared_s for part in parts)

    def pages(self) -> int:
        """Return the pages of the cache that weights and one full step's activations leave.

        Raises `CapacityError` if the weights leave no room for a page.
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
        """Return the cost of a decode step between four points of the grid."""
        # 48 sequences: half way between the points of 32 and 64.
        low, high, share = _around(float(batch), 1)
        low_cost = self._decode_row(low, context)
        if not share:
            return low_cost
        return _between(low_cost, self._decode_row(high, context), share)

    def _decode_row(self, batch: int, context: float) -> Cost:
        """Return the cost of a batch of the grid at any context."""
        low, high, share = _around(context, FEWEST_TOKENS)
        low_cost = self._decode_point(batch, low)
        if not share:
            return low_cost
        return _between(low_cost, self._decode_point(batch, high), share)

    def _decode_point(self, batch: int, context: int) -> Cost:
        """Return the cost of a point, timed at its first use."""
        key = (batch, context)
        if key not in self._decodes:
            self._decodes[key] = self._cost(decode(batch, context))
        return self._decodes[key]

    def _prefill(self, tokens: int) -> Cost:
        """Return the cost of reading prompts of so many tokens in all."""
        low, high, share = _around(float(tokens), FEWEST_TOKENS)
        low_cost = self._prefill_point(low)
        if not share:
            return low_cost
        return _between(low_cost, self._prefill_point(high), share)

    def _prefill_point(self, tokens: int) -> Cost:
        """Return the cost of a point, timed at its first use."""
        if tokens not in self._prefills:
            self._prefills[tokens] = self._cost(prefill(1, tokens))
        return self._prefills[tokens]

    def _cost(self, load: Load) -> Cost:
        """Return the cost of a load; the scheduler sees to memory, by its pages."""
        step: Step = self.model.timed(load)
        return Cost(step.time_s, sum(step.ledger[entry] for entry in SHARED))


def _around(value: float, fewest: int) -> tuple[int, int, float]:
    """Return the powers of two around a value, and where it lies between them, from 0 to 1.

    48 lies at 0.5 between 32 and 64.
    """
    value = max(value, float(fewest))
    low = 2 ** math.floor(math.log2(value))
    return low, 2 * low, value / low - 1


def _between(low_cost: Cost, high_cost: Cost, share: float) -> Cost:
    """Return the cost between two points, linear in both of its parts."""
    return Cost(
        low_cost.time_s + share * (high_cost.time_s - low_cost.time_s),
        low_cost.shared_s + share * (high_cost.shared_s - low_cost.shared_s),
    )
