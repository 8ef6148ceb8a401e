"""Checks of chapters 15 and 16.

15: the peak of live bytes, pairs of tensors that share memory, an input on which a greedy allocator
does badly, an exact allocator.
16: merged states of a softmax, bytes of a loop order, causal blocks, an attention kernel.

A judge returns None for a right answer, else the end of the sentence
"your function returned ..., ", for example "which is higher than 64".
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
"""The first task that needs a buffer, the first that no longer does, and its size."""


# -- 15.1: the peak of live bytes -----------------------------------------------------------------
def peak(lives: Sequence[Life]) -> int:
    """Return the most bytes alive at one time; it is reached where a buffer's life begins."""
    most = 0
    for time, _, _ in lives:
        alive = sum(size for born, dead, size in lives if born <= time < dead)
        most = max(most, alive)
    return most


def draw_lives(rng: np.random.Generator) -> ex.Case:
    """Return up to 12 buffers, born within 9 tasks, in any order."""
    choices = {"born": range(9), "tasks": range(1, 5), "size": range(1, 9)}
    lives = []
    for _ in range(int(rng.integers(1, 13))):
        born, tasks, size = ex.drawn(rng, **choices).values()
        lives.append((born, born + tasks, size))
    return {"lives": lives}


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


# -- 15.3: in place, where it is safe -------------------------------------------------------------
Step = tuple[str, str, tuple[str, ...]]
"""A node: what it writes, its operator, what it reads."""
Values = np.ndarray
IN_PLACE = ("neg", "add")
"""Operators that compute an element from the elements at the same place."""


def pairs_in_place(
    nodes: Sequence[Step], sizes: Mapping[str, int], outputs: Sequence[str]
) -> list[tuple[str, str]]:
    """Return (read, written) where a result may overwrite what its node reads for the last time."""
    results = {name for name, _, _ in nodes}  # inputs of the network must stay
    pairs = []
    for i, (name, op, reads) in enumerate(nodes):
        read_later = set(outputs)
        for _, _, later_reads in nodes[i + 1 :]:
            read_later.update(later_reads)
        free = [r for r in reads if r in results - read_later and sizes[r] == sizes[name]]
        if op in IN_PLACE and free:
            pairs.append((free[0], name))
    return pairs


def run_shared(
    nodes: Sequence[Step], sizes: Mapping[str, int], pairs: Sequence[tuple[str, str]]
) -> tuple[dict[str, Values], str]:
    """Run nodes over memory shared by pairs.

    Return all tensors as they are at the end, and the first that is wrong when it is written, or
    an input that was overwritten, or "".
    """
    source_of = {target: source for source, target in pairs}
    read_names = {name for _, _, reads in nodes for name in reads}
    inputs = read_names - {name for name, _, _ in nodes}
    rng = np.random.default_rng(15)
    memory = {name: rng.uniform(1, 2, sizes[name]) for name in sorted(inputs)}
    truth = {name: values.copy() for name, values in memory.items()}
    for name, op, reads in nodes:
        truth[name] = _compute(op, [truth[r] for r in reads], sizes[name])
        out = memory[source_of[name]] if name in source_of else np.empty(sizes[name])
        if op == "shift":  # it reads elements after it has written others, so it must not share
            out[:] = np.nan
        out[: sizes[name]] = _compute(op, [memory[r] for r in reads], sizes[name])
        memory[name] = out
        if not np.array_equal(memory[name], truth[name]):
            return memory, name
    overwritten = [n for n in sorted(inputs) if not np.array_equal(memory[n], truth[n])]
    return memory, overwritten[0] if overwritten else ""


def _compute(op: str, reads: Sequence[Values], size: int) -> Values:
    """Return the result of an operator; a tensor of 2 elements is repeated to 8."""
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


def _judge_pairs(got: Any, case: ex.Case) -> str | None:
    """Judge pairs by running the nodes over shared memory, and by their number."""
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


ALL_OF_8 = dict.fromkeys(("x", "a", "b", "c", "row"), 8)
SIZES_2_AND_8 = {"x": 8, "row": 2, "a": 2, "b": 8}


@ex.judged(
    _judge_pairs,
    edges=[
        ([("a", "neg", ("x",)), ("b", "neg", ("a",))], ALL_OF_8, ["b"]),
        ([("a", "neg", ("x",)), ("b", "shift", ("a",))], ALL_OF_8, ["b"]),
        ([("a", "neg", ("x",)), ("b", "neg", ("a",)), ("c", "add", ("b", "a"))], ALL_OF_8, ["c"]),
        ([("a", "neg", ("row",)), ("b", "add", ("x", "a"))], SIZES_2_AND_8, ["b"]),
        ([("a", "neg", ("x",)), ("b", "neg", ("a",))], ALL_OF_8, ["a", "b"]),
        ([("a", "neg", ("x",)), ("b", "add", ("a", "a"))], ALL_OF_8, ["b"]),
    ],
)
def check_ex_15_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(nodes, sizes, outputs)`: pairs (read, written) that may share bytes."""
    return draw_nodes(rng)


# -- 15.2: an input on which greedy by start does badly -------------------------------------------
MAX_LIVES = 10


def trap(ratio: float) -> list[Life]:
    """Return three buffers for which greedy by start needs `ratio` (1 to 2) times the least.

    It puts the first at 0, the second above it at n, and the third, which is too large for the gap
    of n below the second, at n + 1: it needs 2 n + 2 where n + 2 are enough. 2 n + 2 >= ratio
    (n + 2) gives the n of the first line.
    """
    n = math.ceil((2 * ratio - 2) / (2 - ratio)) + 1
    return [(0, 1, n), (0, 2, 1), (1, 2, n + 1)]


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
    if high < case["ratio"] * bound:
        return f"where greedy by start needs {high}, only {high / bound:.3f} times {bound}"
    return None


# -- 15.4: the allocator --------------------------------------------------------------------------
MAX_PUTS = 5_000
"""Placements an allocator may try in a case."""


def _with_put(fn: Any) -> Any:
    """Return an answer to exercise 15.4 that is given `put`, which counts its calls.

    `there`, whether a plan exists, is for the judge only.
    """

    def run(lives: Sequence[Life], height: int, there: bool) -> Any:
        puts = 0

        def put(i: int, at: int) -> None:
            nonlocal puts
            puts += 1
            if puts > MAX_PUTS:
                raise InputError(f"an answer within {MAX_PUTS} placements", "more", "cut earlier")

        return fn(lives, height, put)

    return run


def _judge_plan(got: Any, case: ex.Case) -> str | None:
    """Judge offsets: inside the height, and apart for buffers that live at the same time."""
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
    ends = [offset + size for offset, (_, _, size) in zip(offsets, lives, strict=True)]
    if any(end > height for end in ends):
        return f"which is higher than {height}"
    for i, k in combinations(range(len(lives)), 2):
        (born_i, dead_i, _) = lives[i]
        (born_k, dead_k, _) = lives[k]
        live_together = born_i < dead_k and born_k < dead_i
        overlap = offsets[i] < ends[k] and offsets[k] < ends[i]
        if live_together and overlap:
            return f"where buffers {i} and {k} live together and overlap"
    return None


EIGHT_LIVES = [
    (0, 1, 3),
    (0, 4, 1),
    (1, 3, 2),
    (1, 5, 1),
    (3, 6, 1),
    (3, 4, 1),
    (4, 5, 2),
    (5, 6, 3),
]
SIX_LIVES = [(0, 3, 2), (1, 3, 3), (2, 4, 1), (3, 5, 6), (4, 6, 1), (5, 6, 3)]


@ex.judged(
    _judge_plan,
    edges=[
        ([], 0, True),
        ([(0, 2, 4), (2, 3, 5)], 5, True),  # one after the other: they may share
        ([(0, 2, 4), (1, 3, 5)], 8, False),
        (SIX_LIVES, 7, True),
        (EIGHT_LIVES, 5, True),
        (EIGHT_LIVES, 4, False),
    ],
    cases=12,
    wrap=_with_put,
)
def check_ex_15_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(lives, height, put)`: offsets of all buffers within a height, or None.

    The buffers are the pieces of a rectangle of 40 tasks and 64 bytes, cut at random, so that they
    fill the height at every time and a plan exists.
    """
    count = int(rng.integers(12, 31))
    pieces = [(0, 40, 0, 64)]
    while len(pieces) < count:
        born, dead, low, high = pieces.pop(int(rng.integers(len(pieces))))
        if dead - born > 1 and (high - low < 2 or rng.random() < 0.5):
            time = int(rng.integers(born + 1, dead))
            pieces += [(born, time, low, high), (time, dead, low, high)]
        elif high - low > 1:
            offset = int(rng.integers(low + 1, high))
            pieces += [(born, dead, low, offset), (born, dead, offset, high)]
        else:
            pieces.append((born, dead, low, high))
    shuffled = [pieces[i] for i in rng.permutation(len(pieces))]
    lives = [(born, dead, high - low) for born, dead, low, high in shuffled]
    return {"lives": lives, "height": 64, "there": True}


# -- chapter 16 -----------------------------------------------------------------------------------
Array = np.ndarray
State = tuple[float, float, Array]
"""Maximum m, sum l of e^(s - m), and sum o of e^(s - m) v."""


def _state(rng: np.random.Generator, count: int, spread: float) -> State:
    """Return the state of a block of random scores, with values of three numbers."""
    scores = rng.normal(0, spread, count)
    values = rng.normal(0, 1, (count, 3))
    weights = np.exp(scores - scores.max())
    return float(scores.max()), float(weights.sum()), weights @ values


def merge(a: State, b: State) -> State:
    """Return the state of two blocks together: both brought to the larger maximum, and added."""
    (m_a, l_a, o_a) = a
    (m_b, l_b, o_b) = b
    m = max(m_a, m_b)
    if m == -math.inf:
        return a
    scale_a = math.exp(m_a - m)
    scale_b = math.exp(m_b - m)
    return m, scale_a * l_a + scale_b * l_b, scale_a * o_a + scale_b * o_b


def _read_only(fn: Any) -> Any:
    """Return an answer to exercise 16.1 whose arrays cannot be written."""

    def merged(a: State, b: State) -> Any:
        for state in (a, b):
            state[2].flags.writeable = False  # whoever writes in place is told so
        return fn(a, b)

    return merged


EMPTY = (-math.inf, 0.0, np.zeros(3))
FOUR_SCORES = _state(np.random.default_rng(1), 4, 2.0)


@ex.against(
    merge,
    edges=[(FOUR_SCORES, EMPTY), (EMPTY, FOUR_SCORES), (EMPTY, EMPTY)],
    rel_tol=1e-9,
    wrap=_read_only,
)
def check_ex_16_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(a, b)`: the state (m, l, o) of two blocks of scores from the states of each."""
    spread = float(rng.choice([1.0, 400.0]))
    return {name: _state(rng, int(rng.integers(1, 9)), spread) for name in "ab"}


def keys_outside(n: int, t: int, d: int, keys: int) -> int:
    """Return the bytes of attention whose outer loop goes over blocks of keys, in fp16.

    K and V are loaded once, Q for every block, the result is stored once. The states (m, l and o of
    every query, in fp32) are stored and loaded between two blocks.
    """
    blocks = -(-t // keys)
    matrix_bytes = 2 * n * d  # Q, and the result
    key_value_bytes = 2 * (2 * t * d)
    state_bytes = 4 * n * (d + 2)
    return key_value_bytes + blocks * matrix_bytes + 2 * (blocks - 1) * state_bytes + matrix_bytes


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
    """Check `fn(n, rows, keys)`: blocks with a score whose key does not come after its query."""
    causal = np.tri(n, dtype=bool)
    starts = product(range(0, n, rows), range(0, n, keys))
    return sum(bool(causal[i : i + rows, j : j + keys].any()) for i, j in starts)


def _on_core(fn: Any) -> Any:
    """Return a function that runs an attention kernel with `load` and `store` for its rows.

    It returns what was stored, the bytes loaded, and the most bytes allocated at one time.
    """

    def run(q: Array, k: Array, v: Array, room: int) -> tuple[Array, int, int]:
        matrices = {"q": q, "k": k, "v": v}
        (n, d) = q.shape
        moved = 0
        y = np.full((n, d), math.nan)

        def load(name: str, first: int, last: int) -> Array:
            nonlocal moved
            count = len(matrices[name])
            if not 0 <= first <= last <= count:
                raise IndexError(f"rows of {name} from 0 to {count}; got {first} to {last}")
            rows = matrices[name][first:last].copy()
            moved += rows.nbytes
            return rows

        def store(first: int, rows: Any) -> None:
            y[first : first + len(rows)] = rows

        tracemalloc.start()
        try:
            fn(load, store, n, len(k), d, room)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        return y, moved, peak_bytes

    return run


def _judge_attention(got: Any, case: ex.Case) -> str | None:
    """Judge an attention kernel by what it stored, the memory it used, and the bytes it loaded."""
    (y, moved, peak_bytes) = got
    (q, k, v, room) = case.values()
    (n, d) = q.shape
    t = len(k)
    scores = q @ k.T / math.sqrt(d)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    wrong = float(np.abs(y - weights / weights.sum(axis=1, keepdims=True) @ v).max())
    if not wrong <= 1e-9:
        stored = "rows that were never stored, or no numbers" if np.isnan(wrong) else f"{wrong:.3g}"
        return f"and what was stored is off: {stored}"
    if peak_bytes > room + SLACK_BYTES:
        return f"with {peak_bytes:,} bytes at a time, where the core has {room:,}"
    # Ours loads Q once, and K and V once for every block of as many rows as have room.
    rows = (room // 8 - 32 * d) // (4 * d + 64)
    ours = 8 * (n * d + -(-n // rows) * 2 * t * d)
    if moved > LOAD_SLACK * ours:
        return f"after {moved:,} bytes loaded; ours loads {ours:,}"
    return None


def _room_bytes(rows: int, d: int) -> int:
    """Return the bytes, in fp64, for blocks of so many queries.

    32 d numbers are for blocks of keys and values, 4 d + 64 for each query.
    """
    return 8 * (32 * d + rows * (4 * d + 64))


def _heads(rng: np.random.Generator, n: int, t: int, d: int, rows: int, spread: float) -> ex.Case:
    """Return n queries and t keys of d numbers, and room for blocks of `rows` queries."""
    q, k = (rng.normal(0, spread, (count, d)) for count in (n, t))
    return {"q": q, "k": k, "v": rng.normal(0, 1, (t, d)), "room": _room_bytes(rows, d)}


RNG_16_4 = np.random.default_rng(16)
SLACK_BYTES = 4096
"""Memory of Python's own objects."""
LOAD_SLACK = 1.2
"""An attention kernel may load this many times the bytes of ours, not more."""
_HEADS = [
    _heads(RNG_16_4, *sizes)
    for sizes in ((64, 64, 16, 16, 1.0), (100, 333, 32, 24, 1.0), (65, 50, 16, 32, 60.0))
]
# Every score is far below zero, so that a maximum that begins at 0 leaves no weight at all.
_FAR_BELOW = {**_HEADS[2], "q": 99 * np.abs(_HEADS[2]["q"]), "k": -np.abs(_HEADS[2]["k"])}


@ex.judged(
    _judge_attention,
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
