"""Checks of exercises that take an evening: the pass manager of chapter 14, 15's allocator."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ascend_lab.errors import InputError
from ascend_lab.graph import evaluate, random_inputs
from ascend_lab.graph.passes import Draft, sweep
from ascend_lab.lab.checks import core as ex
from ascend_lab.lab.checks.chapter13_14 import chain_graph, merge_transposes

Life = tuple[int, int, int]
"""When a buffer is born, when it is dead, and its size."""
MOST = 500
"""Matches after which rules count as endless."""


# -- the pass manager -----------------------------------------------------------------------------
def _twice(rw: Draft, node: Any) -> bool:
    """Let what a second relu, or a second neg, writes be what the first one wrote, or read."""
    first = rw.maker(node.inputs[0]) if node.op in ("relu", "neg") else None
    if first is None or first.op != node.op:
        return False
    return rw.forward(node, node.inputs[0] if node.op == "relu" else first.inputs[0])


def _turned(rw: Draft, node: Any) -> bool:
    return node.op == "transpose" and merge_transposes(rw, node)


def _earlier(rw: Draft, node: Any) -> bool:
    """Let a transpose of a relu or neg be the relu or neg of a new transpose."""
    first = rw.maker(node.inputs[0]) if node.op == "transpose" else None
    if first is None or first.op not in ("relu", "neg"):
        return False
    inner = rw.insert("transpose", first.inputs, node.attrs)
    return rw.become(node, first.op, [inner])


def _restless(rw: Draft, node: Any) -> bool:
    return node.op == "exp" and rw.become(node, "exp", node.inputs)


RULES = (_twice, _turned, _earlier)


def _managed(fn: Any) -> Any:
    def run(steps: Sequence[int], reads: Sequence[int], endless: bool) -> Any:
        rw, answers = Draft(chain_graph(steps, reads)), list[bool]()

        def counted(rule: Any) -> Any:
            def offer(draft: Draft, node: Any) -> bool:
                answers.append(bool(rule(draft, node)))
                return answers[-1]

            return offer

        done = fn(rw, [counted(rule) for rule in (*RULES, *[_restless] * endless)], MOST)
        return done, len(answers), sum(answers), rw.finish()

    return run


def _judge_14_5(got: Any, case: ex.Case) -> str | None:
    done, offers, matches, graph = got
    if case["endless"]:
        right = done is False and matches == MOST
        return None if right else f"after {matches} matches of rules that never end; stop at {MOST}"
    before = chain_graph(case["steps"], case["reads"])
    given = random_inputs(before, 14)
    wanted, found = evaluate(before, given), evaluate(graph, given)
    if any(not np.array_equal(found[name], values) for name, values in wanted.items()):
        return "and the graph computes something else"
    if any(sweep(rule)(graph)[1] for rule in RULES) or done is not True:
        return "and a rule still fits" if done is True else "expected True: nothing fits any more"
    most = len(RULES) * (len(before.nodes) + 4 * matches)
    return None if offers <= most else f"after {offers} offers for {matches} matches, not {most}"


@ex.judged(
    _judge_14_5,
    edges=ex.rows(
        "steps reads endless",
        ([7, 7, 7], [], False),
        ([8, 3, 8, 4], [], False),
        ([8, 7] * 12 + [3], [], False),
        ([7, 6, 7], [], True),
        ([3, 8, 8, 4] * 8, [], False),
    ),
    cases=20,
    wrap=_managed,
)
def check_ex_14_5(rng: ex.Rng) -> ex.Case:
    """Check `fn(rw, rules, most)`, a pass manager: what is left, and how many offers it took."""
    steps = rng.integers(0, 9, rng.integers(6, 30)).tolist()
    return {"steps": steps, "reads": rng.integers(0, 9, 2).tolist(), "endless": False}


# -- the allocator --------------------------------------------------------------------------------
MOST_PUTS = 5_000
"""Placements an allocator may try in a case."""


def cut_apart(rng: np.random.Generator, pieces: int, height: int = 64, tasks: int = 40) -> ex.Case:
    """Return a rectangle of address by time, cut into buffers: nothing is left over."""
    parts = [(0, tasks, 0, height)]
    while len(parts) < pieces:
        born, dead, low, high = parts.pop(int(rng.integers(len(parts))))
        by_time = dead - born > 1 and (high - low < 2 or rng.random() < 0.5)
        if by_time:
            at = int(rng.integers(born + 1, dead))
            parts += [(born, at, low, high), (at, dead, low, high)]
        elif high - low > 1:
            at = int(rng.integers(low + 1, high))
            parts += [(born, dead, low, at), (born, dead, at, high)]
        else:
            parts.append((born, dead, low, high))
    order = rng.permutation(len(parts))
    lives = [(a, b, high - low) for a, b, low, high in (parts[i] for i in order)]
    return {"lives": lives, "height": height, "there": True}


def _counted(fn: Any) -> Any:
    def run(lives: Sequence[Life], height: int, there: bool) -> Any:
        puts = 0

        def put(i: int, at: int) -> None:
            nonlocal puts
            puts += 1
            if puts > MOST_PUTS:
                raise InputError(f"an answer within {MOST_PUTS} placements", "more", "cut earlier")

        return fn(lives, height, put)

    return run


def _judge_15_2(got: Any, case: ex.Case) -> str | None:
    lives, height = case["lives"], case["height"]
    if got is None:
        return "though there is a plan" if case["there"] else None
    try:
        offsets = [int(at) for at in got]
    except (TypeError, ValueError):
        return "expected offsets, or None"
    if len(offsets) != len(lives) or min(offsets, default=0) < 0:
        return f"expected {len(lives)} offsets from 0 on"
    if any(at + life[2] > height for at, life in zip(offsets, lives, strict=True)):
        return f"which is higher than {height}"
    for i, k in itertools.combinations(range(len(lives)), 2):
        (a, b, size), (c, d, other) = lives[i], lives[k]
        apart = offsets[i] + size <= offsets[k] or offsets[k] + other <= offsets[i]
        if a < d and c < b and not apart:
            return f"where buffers {i} and {k} live together and overlap"
    return None


EIGHT = [(0, 1, 3), (0, 4, 1), (1, 3, 2), (1, 5, 1), (3, 6, 1), (3, 4, 1), (4, 5, 2), (5, 6, 3)]
TOY = [(0, 3, 2), (1, 3, 3), (2, 4, 1), (3, 5, 6), (4, 6, 1), (5, 6, 3)]


@ex.judged(
    _judge_15_2,
    edges=ex.rows(
        "lives height there",
        ([], 0, True),
        ([(0, 2, 4), (2, 3, 5)], 5, True),
        ([(0, 2, 4), (1, 3, 5)], 8, False),
        (TOY, 7, True),
        (EIGHT, 5, True),
        (EIGHT, 4, False),
    ),
    cases=12,
    wrap=_counted,
)
def check_ex_15_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(lives, height, put)`: offsets of all buffers within a height, or None.

    The random cases are rectangles cut apart, so that a plan exists and wastes no byte; every
    placement that is tried is told to `put`, which counts them.
    """
    return cut_apart(rng, int(rng.integers(12, 31)))
