"""The fast simulator: time as linear algebra over (max, +).

One pass of a loop body maps the times of pipes and raised flags to new times, each a maximum of
sums: y_i = max_j (A_ij + x_j). That is a matrix product in the (max, +) semiring, so n passes are
the n-th power and need about log2(n) products. Nested loops compose from the inside out. All
arrays carry a last axis of candidates, so a batch costs little more than one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import SimulationError
from ascend_lab.sim.compiled import SET, WAIT, Compiled, Nest

Array = NDArray[np.int64]
NEVER = np.int64(-(2**61))
"""Minus infinity: 'does not depend on'. Sums of two stay below every real time."""
LATEST = 2**60


class NotComposableError(SimulationError):
    """The program has waits before their sets or unbalanced loops; use the reference."""


def _times(a: Array, x: Array) -> Array:
    """(max, +) product of (i, j, b) with (j, k, b)."""
    out = a[:, 0, None, :] + x[None, 0, :, :]
    for j in range(1, a.shape[1]):
        np.maximum(out, a[:, j, None, :] + x[None, j, :, :], out=out)
    np.maximum(out, NEVER, out=out)
    return out


def _power_times(a: Array, counts: Array, x: Array) -> Array:
    """Return a^counts (x) x by binary powers; counts holds one exponent per candidate."""
    left = counts.copy()
    while True:
        odd = (left & 1).astype(bool)
        if odd.all():
            x = _times(a, x)
        elif odd.any():
            x = np.where(odd, _times(a, x), x)
        left >>= 1
        if not left.any():
            return x
        a = _times(a, a)


class _Runner:
    """Pushes a state of row vectors (one per pipe and per raised flag) through a program."""

    def __init__(self, program: Compiled, cycles: Array, latency: Array, counts: Array) -> None:
        self.program, self.cycles, self.latency, self.counts = program, cycles, latency, counts
        self.pipes: list[Array] = []
        self.flags: list[list[Array]] = [[] for _ in program.events]

    def run(self, nodes: Sequence[int | Nest]) -> None:
        steps = self.program.steps
        for node in nodes:
            if isinstance(node, Nest):
                self.loop(node)
                continue
            step = steps[node]
            if step.kind == WAIT:
                if not self.flags[step.event]:
                    raise NotComposableError("each set_flag before its wait_flag", "a wait first")
                token = self.flags[step.event].pop(0)
                self.pipes[step.pipe] = np.maximum(self.pipes[step.pipe], token)
            now = self.pipes[step.pipe] + self.cycles[node]
            self.pipes[step.pipe] = now
            if step.kind == SET:
                self.flags[step.event].append(now + self.latency[node])

    def loop(self, nest: Nest) -> None:
        """Replace n passes by the n-th power of one pass over the state the body touches.

        A body that touches nothing is skipped.
        """
        counts = self.counts[nest.loop]
        while len(nest.body) == 1 and isinstance(nest.body[0], Nest):
            nest = nest.body[0]
            counts = counts * self.counts[nest.loop]
        high = int(counts.max())
        if high == 0:
            return
        if high == 1 and int(counts.min()) == 1:
            self.run(nest.body)
            return
        pipes, events = _touched(nest, self.program)
        if not pipes:
            return
        shape = [len(self.flags[e]) for e in events]
        x = np.stack([self.pipes[p] for p in pipes] + [t for e in events for t in self.flags[e]])
        one_pass = self._matrix(nest, pipes, events, shape, x.shape[0])
        x = _power_times(one_pass, counts, x)
        self._put(pipes, events, shape, x)

    def _put(self, pipes: list[int], events: list[int], shape: list[int], x: Array) -> None:
        for row, pipe in enumerate(pipes):
            self.pipes[pipe] = x[row]
        row = len(pipes)
        for event, size in zip(events, shape, strict=True):
            self.flags[event] = [x[row + i] for i in range(size)]
            row += size

    def _matrix(
        self, nest: Nest, pipes: list[int], events: list[int], shape: list[int], size: int
    ) -> Array:
        """Return the matrix of one pass: the body applied to unit vectors."""
        batch = self.counts.shape[-1]
        unit = np.full((size, size, batch), NEVER)
        unit[np.arange(size), np.arange(size)] = 0
        inner = _Runner(self.program, self.cycles, self.latency, self.counts)
        inner.pipes = [unit[0]] * len(self.pipes)
        inner._put(pipes, events, shape, unit)
        inner.run(nest.body)
        if any(len(inner.flags[e]) != n for e, n in zip(events, shape, strict=True)):
            raise NotComposableError(
                "as many sets as waits of each flag in a loop body", "a surplus"
            )
        rows = [inner.pipes[p] for p in pipes] + [t for e in events for t in inner.flags[e]]
        return np.stack(rows)


def _touched(nest: Nest, program: Compiled) -> tuple[list[int], list[int]]:
    pipes: set[int] = set()
    events: set[int] = set()

    def visit(nodes: Sequence[int | Nest]) -> None:
        for node in nodes:
            if isinstance(node, Nest):
                visit(node.body)
            else:
                step = program.steps[node]
                pipes.add(step.pipe)
                if step.event >= 0:
                    events.add(step.event)

    visit(nest.body)
    return sorted(pipes), sorted(events)


def run_batch(
    program: Compiled,
    cycles: NDArray[np.int64],
    latency: NDArray[np.int64],
    tail_latency: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> Array:
    """Return cycles (candidates,) of one structure under many durations and trip counts.

    `cycles` and `latency` are (steps, candidates), `tail_latency` (pipes, candidates), `counts`
    (loops, candidates). Raises `NotComposableError` where only the reference engine applies.
    """
    batch = cycles.shape[-1]
    runner = _Runner(program, cycles, latency, counts.reshape(-1, batch))
    runner.pipes = [np.zeros((1, batch), np.int64) for _ in program.pipes]
    runner.run(program.tree)
    if not program.pipes:
        return np.zeros(batch, np.int64)
    ends = np.concatenate(runner.pipes) + tail_latency
    out: Array = ends.max(axis=0)
    return out


def run_fast(program: Compiled) -> int:
    """Return the cycles of one program; see `run_batch`. Refuses times near the end of int64."""
    rows = zip(program.runs(), program.cycles, program.latency, strict=True)
    work = sum(runs * (cycles + latency) for runs, cycles, latency in rows)
    if work > LATEST:
        raise SimulationError(f"at most {LATEST:.0e} cycles of work", f"{work:.0e}", "split it")
    columns = (program.cycles, program.latency, program.tail_latency, program.counts)
    return int(run_batch(program, *(np.asarray(c, np.int64).reshape(-1, 1) for c in columns))[0])
