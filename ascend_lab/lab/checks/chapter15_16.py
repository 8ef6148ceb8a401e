"""Checks of chapters 15 and 16.

15: the peak of live bytes, its allocator, sharing in place, a trap.
16: merged states, loop orders, causal blocks, a flash kernel.
"""

import math
import tracemalloc
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

from ascend_lab.compiler.buffers import Buffer
from ascend_lab.compiler.memory import plan
from ascend_lab.errors import InputError
from ascend_lab.lab.checks import core as ex

Life = tuple[int, int, int]
"""When a buffer is born, when it is dead, and its size."""
Step = tuple[str, str, tuple[str, ...]]
"""A node: what it writes, its operator, what it reads."""
Values = np.ndarray
IN_PLACE = ("neg", "add")
"""Operators that compute an element from the elements at the same place."""
MAX_LIVES = 10


# -- the peak of live bytes -----------------------------------------------------------------------
def peak(lives: Sequence[Life]) -> int:
    """Return the most bytes alive at one time; a buffer is dead at the end of its life."""
    return max((sum(s for a, b, s in lives if a <= born < b) for born, _, _ in lives), default=0)


def draw_lives(rng: np.random.Generator) -> ex.Case:
    """Return up to 12 buffers, born within 9 tasks, in any order."""
    one = {"born": range(9), "tasks": range(1, 5), "size": range(1, 9)}
    drawn = (ex.drawn(rng, **one).values() for _ in range(int(rng.integers(1, 13))))
    return {"lives": [(born, born + tasks, size) for born, tasks, size in drawn]}


# -- in place, where it is safe -------------------------------------------------------------------
def pairs_in_place(
    nodes: Sequence[Step], sizes: Mapping[str, int], outputs: Sequence[str]
) -> list[tuple[str, str]]:
    """Return (read, written) where a result may overwrite what its node reads for the last time."""
    made = {name for name, _, _ in nodes}
    found = []
    for i, (name, op, reads) in enumerate(nodes):
        later = {*outputs, *(r for _, _, others in nodes[i + 1 :] for r in others)}
        free = [r for r in reads if r in made - later and sizes[r] == sizes[name]]
        if op in IN_PLACE and free:
            found.append((free[0], name))
    return found


def run_shared(
    nodes: Sequence[Step], sizes: Mapping[str, int], pairs: Sequence[tuple[str, str]]
) -> tuple[dict[str, Values], str]:
    """Run nodes over memory shared by pairs; return all tensors at the end, and who read poison."""
    over = {target: source for source, target in pairs}
    given = {name for _, _, reads in nodes for name in reads} - {name for name, _, _ in nodes}
    rng = np.random.default_rng(15)
    memory = {name: rng.uniform(1, 2, sizes[name]) for name in sorted(given)}
    truth = {name: values.copy() for name, values in memory.items()}
    for name, op, reads in nodes:
        truth[name] = _compute(op, [truth[r] for r in reads], sizes[name])
        out = memory[over[name]] if name in over else np.empty(sizes[name])
        if op == "shift":
            out[:] = np.nan
        out[: sizes[name]] = _compute(op, [memory[r] for r in reads], sizes[name])
        memory[name] = out
        if not np.array_equal(memory[name], truth[name]):
            return memory, name
    wrong = [n for n in sorted(given) if not np.array_equal(memory[n], truth[n])]
    return memory, wrong[0] if wrong else ""


def _compute(op: str, reads: Sequence[Values], size: int) -> Values:
    if op == "shift":
        return np.roll(reads[0], 1)
    tiled = [np.resize(values, size) for values in reads]
    return -tiled[0] if op == "neg" else tiled[0] + tiled[1]


def draw_nodes(rng: np.random.Generator) -> ex.Case:
    """Return up to 10 nodes over tensors of 8 elements and rows of 2, and one or two outputs."""
    sizes = {"x": 8, "row": 2}
    nodes = []
    names = ["x"]
    for i in range(int(rng.integers(1, 11))):
        op = ("neg", "add", "shift")[int(rng.integers(3))]
        reads = [names[max(0, len(names) - 1 - int(rng.integers(0, 3)))]]
        if op == "add":
            reads.append([*names, "row", "row"][int(rng.integers(len(names) + 2))])
        nodes.append((f"n{i}", op, tuple(reads)))
        sizes[f"n{i}"] = max(sizes[r] for r in reads)
        names.append(f"n{i}")
    outputs = sorted({names[-1], names[int(rng.integers(1, len(names)))]})
    return {"nodes": nodes, "sizes": sizes, "outputs": outputs}


def _pairs_judge(got: Any, case: ex.Case) -> str | None:
    nodes = case["nodes"]
    sizes = case["sizes"]
    outputs = case["outputs"]
    reads = {name: node_reads for name, _, node_reads in nodes}
    try:
        pairs = [(str(a), str(b)) for a, b in got]
    except (TypeError, ValueError):
        return "expected a list of pairs (read, written)"
    for source, target in pairs:
        if source not in reads.get(target, ()):
            return f"but {target} does not read {source}"
        if sizes[source] != sizes[target]:
            return f"but {source} and {target} differ in size"
    if len({t for _, t in pairs}) < len(pairs):
        return "but a tensor can overwrite only one"
    memory, wrong = run_shared(nodes, sizes, pairs)
    if wrong:
        return f"after which {wrong} has wrong values"
    clean, _ = run_shared(nodes, sizes, [])
    lost = [name for name in outputs if not np.array_equal(memory[name], clean[name])]
    if lost:
        return f"after which the output {lost[0]} has wrong values at the end"
    best = pairs_in_place(nodes, sizes, outputs)
    missing = len(best) - len(pairs)
    return f"expected {missing} more, such as {best}" if missing > 0 else None


# -- a trap for greedy by start -------------------------------------------------------------------
def trap(ratio: float) -> list[Life]:
    """Return three buffers for which greedy by start needs `ratio` (1 to 2) times the least."""
    n = math.ceil((2 * ratio - 2) / (2 - ratio)) + 1
    return [(0, 1, n), (0, 2, 1), (1, 2, n + 1)]


@ex.against(
    peak,
    edges=[
        ([],),
        ([(0, 2, 4), (2, 3, 5)],),
        ([(0, 9, 1), (1, 3, 2), (4, 6, 3)],),
        ([(10**6, 10**6 + 2, 4), (10**6 + 1, 10**6 + 3, 5)],),
    ],
)
def check_ex_15_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(lives)`: the most bytes alive at one time."""
    return draw_lives(rng)


SIZE8_3 = dict.fromkeys(("x", "a", "b", "c", "row"), 8)
MIXED_3 = {"x": 8, "row": 2, "a": 2, "b": 8}


@ex.judged(
    _pairs_judge,
    edges=[
        ([("a", "neg", ("x",)), ("b", "neg", ("a",))], SIZE8_3, ["b"]),
        ([("a", "neg", ("x",)), ("b", "shift", ("a",))], SIZE8_3, ["b"]),
        ([("a", "neg", ("x",)), ("b", "neg", ("a",)), ("c", "add", ("b", "a"))], SIZE8_3, ["c"]),
        ([("a", "neg", ("row",)), ("b", "add", ("x", "a"))], MIXED_3, ["b"]),
        ([("a", "neg", ("x",)), ("b", "neg", ("a",))], SIZE8_3, ["a", "b"]),
        ([("a", "neg", ("x",)), ("b", "add", ("a", "a"))], SIZE8_3, ["b"]),
    ],
)
def check_ex_15_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(nodes, sizes, outputs)`: pairs (read, written) that may share bytes."""
    return draw_nodes(rng)


@ex.judged(
    edges=[(1.05,), (1.5,), (1.99,)],
    cases=15,
    ratio=lambda rng: round(float(rng.uniform(1.05, 1.95)), 3),
)
def check_ex_15_2(got: Any, case: ex.Case) -> str | None:
    """Check `fn(ratio)`: buffers on which greedy by start loses by that ratio."""
    try:
        buffers = [Buffer(i, int(a), int(b), int(s)) for i, (a, b, s) in enumerate(got)]
    except (TypeError, ValueError):
        return "expected a list of (born, dead, size)"
    if not 0 < len(buffers) <= MAX_LIVES or sum(b.size_bytes for b in buffers) > 2**40:
        return f"expected 1 to {MAX_LIVES} buffers of moderate size"
    by_start, by_size = (plan(buffers, method=f"greedy-by-{m}") for m in ("start", "size"))
    high = by_start.height_bytes
    low = by_size.height_bytes
    bound = by_size.lower_bound_bytes
    if low > bound:
        return f"where greedy by size needs {low}, expected the bound, {bound}"
    few = f"where greedy by start needs {high}, only {high / bound:.3f} times {bound}"
    return few if high < case["ratio"] * bound else None


# -- the allocator --------------------------------------------------------------------------------
MAX_PUTS = 5_000
"""Placements an allocator may try in a case."""


def _counted(fn: Any) -> Any:
    def run(lives: Sequence[Life], height: int, there: bool) -> Any:
        puts = 0

        def put(i: int, at: int) -> None:
            nonlocal puts
            puts += 1
            if puts > MAX_PUTS:
                raise InputError(f"an answer within {MAX_PUTS} placements", "more", "cut earlier")

        return fn(lives, height, put)

    return run


def _judge_15_4(got: Any, case: ex.Case) -> str | None:
    lives = case["lives"]
    height = case["height"]
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
    for i, k in combinations(range(len(lives)), 2):
        (a, b, size) = lives[i]
        (c, d, other) = lives[k]
        apart = offsets[i] + size <= offsets[k] or offsets[k] + other <= offsets[i]
        if a < d and c < b and not apart:
            return f"where buffers {i} and {k} live together and overlap"
    return None


EIGHT = [(0, 1, 3), (0, 4, 1), (1, 3, 2), (1, 5, 1), (3, 6, 1), (3, 4, 1), (4, 5, 2), (5, 6, 3)]
PAIRS_2 = ([(0, 2, 4), (2, 3, 5)], 5, True), ([(0, 2, 4), (1, 3, 5)], 8, False)
TOY = [(0, 3, 2), (1, 3, 3), (2, 4, 1), (3, 5, 6), (4, 6, 1), (5, 6, 3)]


@ex.judged(
    _judge_15_4,
    edges=[([], 0, True), *PAIRS_2, (TOY, 7, True), (EIGHT, 5, True), (EIGHT, 4, False)],
    cases=12,
    wrap=_counted,
)
def check_ex_15_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(lives, height, put)`: offsets of all buffers within a height, or None."""
    pieces = int(rng.integers(12, 31))
    parts = [(0, 40, 0, 64)]
    while len(parts) < pieces:
        born, dead, low, high = parts.pop(int(rng.integers(len(parts))))
        if dead - born > 1 and (high - low < 2 or rng.random() < 0.5):
            at = int(rng.integers(born + 1, dead))
            parts += [(born, at, low, high), (at, dead, low, high)]
        elif high - low > 1:
            at = int(rng.integers(low + 1, high))
            parts += [(born, dead, low, at), (born, dead, at, high)]
        else:
            parts.append((born, dead, low, high))
    order = rng.permutation(len(parts))
    lives = [(a, b, high - low) for a, b, low, high in (parts[i] for i in order)]
    return {"lives": lives, "height": 64, "there": True}


# -- chapter 16 -----------------------------------------------------------------------------------
Array = np.ndarray
State = tuple[float, float, Array]
"""Maximum m, sum l of e^(s - m), and sum o of e^(s - m) v."""


def _state(rng: np.random.Generator, count: int, spread: float) -> State:
    scores = rng.normal(0, spread, count)
    values = rng.normal(0, 1, (count, 3))
    weights = np.exp(scores - scores.max())
    return float(scores.max()), float(weights.sum()), weights @ values


def merge(a: State, b: State) -> State:
    """Return the state of two blocks together: both brought to the larger maximum, and added."""
    m = max(a[0], b[0])
    if m == -math.inf:
        return a
    f = math.exp(a[0] - m)
    g = math.exp(b[0] - m)
    return m, f * a[1] + g * b[1], f * a[2] + g * b[2]


def keys_outside(n: int, t: int, d: int, keys: int) -> int:
    """Return the bytes of the loop order with keys outside."""
    blocks = -(-t // keys)
    state = 4 * n * (d + 2)
    return 2 * (2 * t * d) + blocks * 2 * n * d + 2 * (blocks - 1) * state + 2 * n * d


def _on_core(fn: Any) -> Any:
    """Return the answer with rows that are loaded and stored, and all it allocates traced."""

    def run(q: Array, k: Array, v: Array, room: int) -> tuple[Array, int, int]:
        given = {"q": q, "k": k, "v": v}
        (n, d) = q.shape
        moved = 0
        y = np.full((n, d), math.nan)

        def load(name: str, first: int, last: int) -> Array:
            nonlocal moved
            if not 0 <= first <= last <= (there := len(given[name])):
                raise IndexError(f"rows of {name} from 0 to {there}; got {first} to {last}")
            rows = given[name][first:last].copy()
            moved += rows.nbytes
            return rows

        def store(first: int, rows: Any) -> None:
            y[first : first + len(rows)] = rows

        tracemalloc.start()
        try:
            fn(load, store, n, len(k), d, room)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        return y, moved, peak

    return run


def _judge_16_4(got: Any, case: ex.Case) -> str | None:
    (y, moved, peak) = got
    (q, k, v, room) = case.values()
    (n, d) = q.shape
    t = len(k)
    scores = q @ k.T / math.sqrt(d)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    wrong = float(np.abs(y - weights / weights.sum(axis=1, keepdims=True) @ v).max())
    if not wrong <= 1e-9:
        stored = "rows that were never stored, or no numbers" if np.isnan(wrong) else f"{wrong:.3g}"
        return f"and what was stored is off: {stored}"
    if peak > room + SLACK_BYTES:
        return f"with {peak:,} bytes at a time, where the core has {room:,}"
    rows = (room // 8 - 32 * d) // (4 * d + 64)
    ours = 8 * (n * d + -(-n // rows) * 2 * t * d)
    return None if moved <= 1.2 * ours else f"after {moved:,} bytes loaded; ours loads {ours:,}"


def _heads(rng: np.random.Generator, n: int, t: int, d: int, rows: int, spread: float) -> ex.Case:
    q, k = (rng.normal(0, spread, (count, d)) for count in (n, t))
    room = 8 * (32 * d + rows * (4 * d + 64))
    return {"q": q, "k": k, "v": rng.normal(0, 1, (t, d)), "room": room}


def _read_only(fn: Any) -> Any:
    def merged(a: State, b: State) -> Any:
        for state in (a, b):
            state[2].flags.writeable = False  # whoever writes in place is told so
        return fn(a, b)

    return merged


EMPTY_1 = (-math.inf, 0.0, np.zeros(3))
SOME_1 = _state(np.random.default_rng(1), 4, 2.0)


@ex.against(
    merge,
    edges=[(a, b) for a, b in ((SOME_1, EMPTY_1), (EMPTY_1, SOME_1), (EMPTY_1, EMPTY_1))],
    rel_tol=1e-9,
    wrap=_read_only,
)
def check_ex_16_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(a, b)`: the state (m, l, o) of two blocks of scores from the states of each."""
    spread = float(rng.choice([1.0, 400.0]))
    return {name: _state(rng, int(rng.integers(1, 9)), spread) for name in "ab"}


@ex.against(keys_outside, edges=[(4096, 4096, 64, 128), (64, 100, 16, 128)])
def check_ex_16_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(n, t, d, keys)`: bytes of the order with the loop over blocks of keys outside."""
    return ex.drawn(rng, n=range(1, 5000), t=range(1, 5000), d=range(1, 257), keys=range(1, 600))


@ex.against(
    edges=[(8, 2, 2), (100, 100, 7), (100, 7, 100), (33, 16, 16)],
    n=range(1, 300),
    rows=range(1, 100),
    keys=range(1, 100),
)
def check_ex_16_3(n: int, rows: int, keys: int) -> int:
    """Check `fn(n, rows, keys)`: blocks with a score whose key is not behind its query."""
    kept = np.tri(n, dtype=bool)
    starts = product(range(0, n, rows), range(0, n, keys))
    return sum(bool(kept[i : i + rows, j : j + keys].any()) for i, j in starts)


RNG_16_4 = np.random.default_rng(16)
SLACK_BYTES = 4096
"""Python's own objects."""


_HEADS = [
    _heads(RNG_16_4, *sizes)
    for sizes in ((64, 64, 16, 16, 1.0), (100, 333, 32, 24, 1.0), (65, 50, 16, 32, 60.0))
]
# every score far below zero, so that a maximum that begins at 0 leaves no weight at all
_FAR_BELOW = {**_HEADS[2], "q": 99 * np.abs(_HEADS[2]["q"]), "k": -np.abs(_HEADS[2]["k"])}


@ex.judged(
    _judge_16_4,
    edges=[*_HEADS, _FAR_BELOW],
    cases=12,
    wrap=_on_core,
)
def check_ex_16_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(load, store, n, t, d, room)`: attention within `room` bytes, and few loads."""
    n, t = (int(x) for x in rng.integers(80, 400, 2))
    rows = int(rng.integers(16, 64))
    spread = float(rng.choice([1.0, 30.0]))
    return _heads(rng, n, t, int(rng.choice([8, 16, 32, 64])), rows, spread)
