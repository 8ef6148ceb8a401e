"""Checks of chapters 19 and 20.

19: minimum-time backup, a pruning rule that is safe, a tree search.
20: repair, a crossover of legal tilings, a search that beats random.

A judge returns None for a right answer, else the end of the sentence
"your function returned ..., ", for example "expected some schedules to stay".
"""

import itertools
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ascend_lab.aoe import Point, Space, TableSpace, cube, drive, vector
from ascend_lab.aoe.cube.bound import Bounds
from ascend_lab.aoe.cube.space import CubeSpace
from ascend_lab.aoe.drive import Search
from ascend_lab.aoe.search import Mcts, random_order
from ascend_lab.lab.checks import core as ex, wall
from ascend_lab.lab.tuning import SimpleGenetic
from ascend_lab.machine import chip
from ascend_lab.operators import dsl, kernels

# -- 19.2 and 19.3: a search tree, and a pruning rule ----------------------------------------------
SHAPES = ((3, 200), (12, 512), (5, 96), (2, 600), (9, 80))
"""Sizes of elementwise operators whose spaces the pruning rule is proved on."""
REMOVED = 0.75
"""Share of the schedules that the rule has to remove."""
Tree = dict[Point, tuple[int, float]]
"""Prefix -> (visits, least cost below)."""


def _backed_up(tree: Tree, point: Point, cost: float) -> Tree:
    """Return the tree after a trial: each prefix of the point has one more visit."""
    updated = dict(tree)
    for depth in range(len(point) + 1):
        prefix = point[:depth]
        visits, least = updated.get(prefix, (0, math.inf))
        updated[prefix] = (visits + 1, min(least, cost))
    return updated


@ex.against(
    _backed_up, edges=[({}, ("A", 1), 9.0), ({(): (1, 5.0), ("A",): (1, 5.0)}, ("A",), 7.0)]
)
def check_ex_19_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(tree, point, cost)`: the tree after one more trial, backed up by the minimum."""

    def point() -> Point:
        return ("ABC"[rng.integers(3)], *(int(v) for v in rng.integers(1, 3, 2)))

    tree: Tree = {}
    for _ in range(int(rng.integers(1, 6))):
        tree = _backed_up(tree, point(), float(rng.integers(10, 99)))
    return {"tree": tree, "point": point(), "cost": float(rng.integers(10, 99))}


def pruned(space: Space, keep: Any) -> list[Point]:
    """Return the points whose values a rule keeps; values that are no options are ignored."""
    points: list[Point] = [()]
    for name in space.names:
        options = {prefix: space.options(prefix) for prefix in points}
        allowed = {prefix: tuple(keep(name, values)) for prefix, values in options.items()}
        points = [(*p, value) for p in points for value in options[p] if value in allowed[p]]
    return points


@lru_cache(maxsize=len(SHAPES))
def small_space(shape: tuple[int, int]) -> tuple[Space, dict[Point, float]]:
    """Return the space of relu on the Toy chip, and the cycles of all its schedules."""
    x = dsl.placeholder(shape, "fp16", "x")
    measure = vector.VectorMeasure((dsl.vrelu(x),), chip.load_chip("Toy"))
    space = measure.space()
    return space, {point: measure(point) for point in space.points()}


def _with_pruning(fn: Any) -> Any:
    """Return a function that prunes the space of a shape by the rule `fn`."""
    for shape in SHAPES:
        small_space(shape)  # cached in this process: the check runs in one that ends with it
    return lambda shape: pruned(small_space(shape)[0], fn)


@ex.judged(edges=[(shape,) for shape in SHAPES], cases=0, wrap=_with_pruning, shape=SHAPES[:1])
def check_ex_19_3(got: Sequence[Point], case: ex.Case) -> str | None:
    """Check `fn(name, options)`: the values of a decision worth keeping."""
    _, costs = small_space(case["shape"])
    if not got:
        return "expected some schedules to stay"
    best = min(costs[p] for p in got)
    least = min(costs.values())
    if best > least:
        return f"expected a schedule of {least:,.0f} cycles to stay: the best left has {best:,.0f}"
    many = f"expected at most a quarter of the {len(costs)} schedules to stay, {len(got)} do"
    return many if len(got) > (1 - REMOVED) * len(costs) else None


# -- a tree search --------------------------------------------------------------------------------
TREES = 60
"""Trees on which a search is judged in the mean; every other one is a trap."""
ALLOWED = 1.2
"""A search may need this many times the trials of ours to find the best leaf, in the mean."""
FINE = (100, 101)
POOR = (130, 170)
BEST = (55, 70)
"""Costs in a trap: of one way, of nearly all other leaves, of the five that hide among those."""


def _leaves(rng: np.random.Generator) -> dict[Point, float]:
    """Return the costs of 125 leaves, three answers of five deep; the first decides most."""
    answer_costs = [scale * rng.random(5) for scale in (100, 40, 15)]
    leaves = {}
    for point in itertools.product(range(5), repeat=3):
        cost = sum(costs[answer] for costs, answer in zip(answer_costs, point, strict=True))
        leaves[point] = float(cost + rng.random())
    return leaves


def _trap(rng: np.random.Generator) -> dict[Point, float]:
    """Return 125 leaves whose best ones hide: one way is fine, and in a poor one five are best.

    A search that goes where it was best so far tries all 25 leaves of the fine way first.
    """
    fine, hidden = rng.permutation(5)[:2]
    hidden_answer = int(rng.integers(5))
    costs = {}
    for point in itertools.product(range(5), repeat=3):
        way, answer, _ = point
        if way == fine:
            cost_range = FINE
        elif (way, answer) == (hidden, hidden_answer):
            cost_range = BEST
        else:
            cost_range = POOR
        costs[point] = float(rng.uniform(*cost_range))
    return costs


def _trees(rng: np.random.Generator) -> list[dict[Point, float]]:
    """Return trees as dicts from leaf to cost, ordinary ones and traps in turn."""
    return [_trap(rng) if i % 2 else _leaves(rng) for i in range(TREES)]


def _proposed(search: Any, costs: dict[Point, float], seed: int) -> list[Point]:
    """Return the points that a search proposes until it ends, or until there are too many."""
    space = TableSpace(tuple("abc"), [list(column) for column in zip(*costs, strict=True)])
    steps = search(space, np.random.default_rng(seed))
    points = list[Point]()
    answer: list[float] | None = None
    with suppress(StopIteration):
        while len(points) <= len(costs):
            batch = steps.send(answer)
            points += batch
            answer = [costs[point] for point in batch]
    return points


def _found_at(runs: Sequence[list[Point]], trees: Sequence[dict[Point, float]]) -> float:
    """Return the mean number of the trial that finds the best leaf."""
    trials = []
    for run, costs in zip(runs, trees, strict=True):
        best_leaf = min(costs, key=costs.__getitem__)
        trials.append(run.index(best_leaf) + 1)
    return float(np.mean(trials))


@cache
def _ours_at(trees: tuple[tuple[tuple[Point, float], ...], ...]) -> float:
    """Return the mean trial at which our search finds the best leaf."""
    search = Mcts(batch=1, completions=1)
    tree_costs = [dict(tree) for tree in trees]
    runs = [_proposed(search, costs, seed) for seed, costs in enumerate(tree_costs)]
    return _found_at(runs, tree_costs)


@ex.judged(
    cases=1,
    wrap=lambda fn: lambda trees: [_proposed(fn, costs, seed) for seed, costs in enumerate(trees)],
    trees=_trees,
)
def check_ex_19_5(got: Any, case: ex.Case) -> str | None:
    """Check `fn(space, rng)`, a tree search that proposes every leaf once, and good ones early."""
    runs = got
    trees = case["trees"]
    for run, costs in zip(runs, trees, strict=True):
        if len(set(run)) < len(run):
            return f"and a leaf is proposed twice within {len(run)} trials"
        if len(run) < len(costs):
            return f"and the search ends after {len(run)} of {len(costs)} leaves"
    ours = _ours_at(tuple(tuple(costs.items()) for costs in trees))
    mean = _found_at(runs, trees)
    late = f"and the best leaf comes at trial {mean:.1f} in the mean; ours finds it at {ours:.1f}"
    return late if mean > ALLOWED * ours else None


# -- chapter 20 ------------------------------------------------------------------------------------
SEEDS = 30
BUDGET = 150
SIZES = (1, 2, 4, 8, 16, 32)
FORCED = ((3, 16), (4, 64), (2, 3))
"""Options of which one must be chosen for 8: the larger is closer in ratio, then the smaller.
Of 2 and 3 the first is closer to the other parent's 1, the second to 8."""
STUDENT_95 = 2.045
"""97.5 % point of Student's t with 29 degrees of freedom."""


def _forced(last: Sequence[int]) -> ex.Case:
    """Return a crossing whose last decision wants 8, when only two other values are options."""
    mother = (1, 1, 1, 8)
    father = (1, 2, 2, 1)
    rows = [mother, father, *((1, 1, 2, value) for value in last)]
    space = TableSpace(("a", "b", "c", "d"), [list(column) for column in zip(*rows, strict=True)])
    coins = (True, True, False, True)
    return {"tilings": space, "mother": mother, "father": father, "coins": coins}


def _space(rng: np.random.Generator) -> TableSpace:
    """Return a space of four decisions among `SIZES`, with at most 30 legal points."""
    rows = rng.choice(SIZES, size=(30, 4))
    return TableSpace(("a", "b", "c", "d"), [[int(v) for v in column] for column in rows.T])


def _judge_child(got: Any, case: ex.Case) -> str | None:
    """Judge a child: each decision that of the parent named by a coin, if it is legal."""
    pairs = zip(case["mother"], case["father"], case["coins"], strict=True)
    return _follows(got, case["tilings"], [(a, b) if coin else (b, a) for a, b, coin in pairs])


def _follows(got: Any, space: Space, wishes: Sequence[tuple[int, ...]]) -> str | None:
    """Return where a point does not follow its wishes, or None.

    A decision is the first of its wishes that is legal, else the legal value closest in ratio to
    the first wish.
    """
    if not isinstance(got, tuple) or len(got) != len(wishes):
        return f"expected a tuple of {len(wishes)} values"
    for decision, wish in enumerate(wishes):
        options = space.options(got[:decision])
        value = got[decision]
        if value not in options:
            return f"expected decision {decision} among {options}: {value} is not legal there"
        legal_wish = next((wished for wished in wish if wished in options), None)
        if legal_wish is not None and value != legal_wish:
            return f"expected decision {decision} to be {legal_wish}, which is legal there"
        least_ratio = min(abs(math.log(option / wish[0])) for option in options)
        if legal_wish is None and abs(math.log(value / wish[0])) > least_ratio + 1e-12:
            return f"expected decision {decision} among {options} as close to {wish[0]} as can be"
    return None


@lru_cache(maxsize=1)
def product_costs() -> tuple[CubeSpace, np.ndarray]:
    """Return the space of a product of 256x256x256 on the 910A, and the bounds of all tilings."""
    measure = cube.CubeMeasure(kernels.GemmShape(256, 256, 256), chip.load_chip("Ascend910A"))
    space = measure.space()
    return space, Bounds(measure, space.genes).closed_form


def regrets(search: Callable[[], Search], seeds: Sequence[int]) -> np.ndarray:
    """Return log(best found / best of all) after `BUDGET` trials for each seed."""
    space, costs = product_costs()
    runs = (
        drive(search(), space, lambda point: float(costs[space.row(point)]), BUDGET, seed=seed)
        for seed in seeds
    )
    return np.asarray(np.log(np.array([run.best.cost for run in runs]) / costs.min()))


def _random() -> Search:
    search: Search = random_order
    return search


@lru_cache(4)
def _rival(search: Callable[[], Search], seeds: tuple[int, ...]) -> np.ndarray:
    """Return the regrets of a search of ours, the same for every answer."""
    return regrets(search, seeds)


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of a mean of 30 values, by Student's t."""
    half = STUDENT_95 * float(values.std(ddof=1)) / math.sqrt(len(values))
    return float(values.mean()) - half, float(values.mean()) + half


class _NoSearchError(Exception):
    """A search gave something that is no batch of points; the text says what was expected."""


def _watched(fn: Any) -> Search:
    """Return the same search, which says so when it yields anything but lists of points."""

    def search(
        space: Space, rng: np.random.Generator, start: Sequence[Point] = ()
    ) -> Generator[list[Point], list[float], None]:
        steps = fn(space, rng, start)
        if not hasattr(steps, "send"):
            raise _NoSearchError("expected a generator (use yield)")
        costs = None
        while True:
            try:
                batch = next(steps) if costs is None else steps.send(costs)
            except StopIteration:
                return
            if isinstance(batch, tuple) and not any(isinstance(v, tuple) for v in batch):
                raise _NoSearchError(f"expected a list of points, got the point {batch}")
            if not isinstance(batch, list) or not all(isinstance(p, tuple) for p in batch):
                raise _NoSearchError(f"expected a list of points, got {ex.show(batch)}")
            costs = yield batch

    return search


def check_ex_20_3(fn: Any, *, seed: int = ex.DEFAULT_SEED) -> ex.CheckResult:
    """Check `fn(tilings, rng, start)`: a search that ends below random order over 30 seeds."""
    seeds = [1000 * seed + i for i in range(SEEDS)]
    product_costs()  # cached in this process: the check runs in one that ends with it

    def run(tell: wall.Tell) -> wall.Verdict:
        def watched() -> Search:
            tell(SEEDS, "your search")
            return _watched(fn)

        try:
            mine = regrets(watched, seeds)
        except _NoSearchError as error:
            return False, str(error), SEEDS
        except Exception as error:
            return False, f"your search {ex.raised(error, fn)}", SEEDS
        tell(SEEDS, "random order")
        low, high = interval(mine - _rival(_random, tuple(seeds)))
        said = f"best costs relative to random order's, 95 % interval over {SEEDS} seeds: "
        said += f"{math.exp(low):.3f} to {math.exp(high):.3f}"
        if high >= 0:
            return False, said + ", expected an interval below 1", SEEDS
        tell(SEEDS, "our search")
        behind = interval(mine - _rival(SimpleGenetic, tuple(seeds)))[0] > 0
        return not behind, said + (", but above those of our search" if behind else ""), SEEDS

    return ex.check_behind_wall("ex_20_3", fn, run, seed)


@ex.judged(
    lambda got, case: _follows(got, case["tilings"], [(value,) for value in case["wanted"]]),
    edges=[(_forced(row)["tilings"], (1, 1, 2, 8)) for row in FORCED],
    cases=60,
)
def check_ex_20_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(tilings, wanted)`: the legal point that keeps each wanted value it can."""
    space = _space(rng)
    return {"tilings": space, "wanted": tuple(int(v) for v in rng.choice(SIZES, 4))}


@ex.judged(_judge_child, edges=[_forced(row) for row in FORCED], cases=60)
def check_ex_20_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(tilings, mother, father, coins)`: a legal child of two legal parents."""
    space = _space(rng)
    mother = space.sample(rng)
    father = space.sample(rng)
    coins = tuple(bool(p) for p in rng.integers(0, 2, 4))
    return {"tilings": space, "mother": mother, "father": father, "coins": coins}
