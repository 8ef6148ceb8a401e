"""Checks of chapter 16a: slots of a ring, its times, stuck cores, orders of four stages."""

from collections.abc import Mapping, Sequence
from typing import Any

from ascend_lab.lab.checks import core as ex

Job = tuple[str, int]
"""A stage of attention, and the number of its tile."""
CUBE_STAGES = ("QK", "PV")
VECTOR_STAGES = ("P", "GU")
SLACK = 1.02
"""How much longer than ours an order may take."""


# -- 16a.1 and 16a.2: slots and times of a ring ----------------------------------------------------
@ex.against(
    edges=[(100, 100, 0), (100, 100, 300), (400, 100, 1), (1, 1000, 0), (7, 5, 1)],
    make=range(1, 500),
    use=range(1, 500),
    trip=range(1500),
)
def check_ex_16a_1(make: int, use: int, trip: int) -> int:
    """Check `fn(make, use, trip)`: the fewest slots with which the slower side never waits."""
    slots = 1
    while make + use + 2 * trip > slots * max(make, use):
        slots += 1
    return slots


def ring_time(make: Sequence[int], use: Sequence[int], slots: int, trip: int) -> int:
    """Return when the last tile has been used; see exercise 16a.2."""
    made = 0
    used = list[int]()
    for tile, (making, using) in enumerate(zip(make, use, strict=True)):
        if tile >= slots:
            made = max(made, used[tile - slots] + trip)
        made += making
        free_at = used[-1] if used else 0
        used.append(max(free_at, made + trip) + using)
    return used[-1]


@ex.against(
    ring_time,
    edges=[([100], [50], 1, 10), ([9, 1, 1], [1, 9, 1], 1, 5), ([5] * 6, [1] * 6, 2, 100)],
)
def check_ex_16a_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(make, use, slots, trip)`: when the last tile of a ring has been used."""
    tiles = int(rng.integers(1, 30))
    make, use = (rng.integers(1, 200, tiles).tolist() for _ in range(2))
    return {"make": make, "use": use, **ex.drawn(rng, slots=range(1, 6), trip=range(300))}


# -- 16a.3: cores that wait for each other ---------------------------------------------------------
Step = tuple[str, int]
"""("set", flag) or ("wait", flag)."""


def is_stuck(cores: Sequence[Sequence[Step]]) -> bool:
    """Tell whether some core never reaches its end: a wait takes one set of its flag."""
    counts = dict[int, int]()
    places = [0] * len(cores)
    moved = True
    while moved:
        moved = False
        for core, steps in enumerate(cores):
            while places[core] < len(steps):
                kind, flag = steps[places[core]]
                if kind == "wait" and not counts.get(flag, 0):
                    break
                counts[flag] = counts.get(flag, 0) + (1 if kind == "set" else -1)
                places[core] += 1
                moved = True
    return any(place < len(steps) for place, steps in zip(places, cores, strict=True))


def _flags(rng: ex.Rng, length: int) -> list[list[Step]]:
    """Return two cores that end if they start in the right order, or nearly so."""
    first = list[Step]()
    second = list[Step]()
    for _ in range(length):
        setter, waiter = (first, second) if rng.random() < 0.5 else (second, first)
        flag = int(rng.integers(3))
        setter.append(("set", flag))
        waiter.append(("wait", flag))
    if rng.random() < 0.5:  # one step moves to another place: often a circle
        core = first if rng.random() < 0.5 and first else second or first
        core.insert(int(rng.integers(len(core))), core.pop(int(rng.integers(len(core)))))
    return [first, second]


@ex.against(
    is_stuck,
    edges=[
        ([[("wait", 0), ("set", 1)], [("wait", 1), ("set", 0)]],),
        ([[("set", 1), ("wait", 0)], [("set", 0), ("wait", 1)]],),
        ([[("set", 0)], [("wait", 0), ("wait", 0)]],),
        ([[("set", 0), ("set", 0)], [("wait", 0)]],),
        ([[], []],),
        ([[("wait", 0), ("set", 0)]],),  # a core may wait for itself
        ([[("set", 0), ("wait", 0)]],),
        ([[("wait", 0)], [("wait", 1), ("set", 0)], [("set", 1)]],),
    ],
)
def check_ex_16a_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(cores)`: whether some core waits for ever."""
    return {"cores": _flags(rng, int(rng.integers(1, 12)))}


# -- 16a.4: an order of four stages ----------------------------------------------------------------
Times = Mapping[str, int]
"""Cycles of a tile in each stage."""


def run_orders(
    times: Times, orders: Sequence[Sequence[Job]], tiles: int, slots: int, trip: int
) -> int | None:
    """Return when both cores have done their jobs in these orders, None if they are stuck.

    QK, P, PV and GU of a tile follow each other, `trip` cycles between one core and the other. QK
    of a tile needs a slot: it waits for GU of the tile `slots` before.
    """
    before = {"P": "QK", "PV": "P", "GU": "PV"}
    done = dict[Job, int]()
    clocks = [0] * len(orders)
    places = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for core, order in enumerate(orders):
            while places[core] < len(order):
                stage, tile = order[places[core]]
                needed = (before[stage], tile) if stage in before else ("GU", tile - slots)
                if needed[1] >= 0 and needed not in done:
                    break
                ready = done[needed] + trip if needed[1] >= 0 else 0
                clocks[core] = max(clocks[core], ready) + times[stage]
                done[stage, tile] = clocks[core]
                places[core] += 1
                moved = True
    return max(clocks) if len(done) == 4 * tiles else None


def order_of(first: str, second: str, tiles: int, ahead: int) -> list[Job]:
    """Return all jobs of two stages of one core, the first stage `ahead` tiles before the other."""
    jobs = list[Job]()
    for turn in range(tiles + ahead):
        if turn < tiles:
            jobs.append((first, turn))
        if turn >= ahead:
            jobs.append((second, turn - ahead))
    return jobs


def best_time(times: Times, tiles: int, slots: int, trip: int) -> int:
    """Return the least time of all pairs of orders in which a stage runs a fixed number ahead."""
    found = [
        run_orders(
            times,
            (order_of(*CUBE_STAGES, tiles, cube), order_of(*VECTOR_STAGES, tiles, vector)),
            tiles,
            slots,
            trip,
        )
        for cube in range(slots + 1)
        for vector in range(slots + 1)
    ]
    return min(time for time in found if time is not None)


def _judge_orders(got: Any, case: ex.Case) -> str | None:
    """Judge the orders of two cores' jobs: complete, and nearly as quick as ours."""
    (times, tiles, slots, trip) = case.values()
    cube, vector = ([(str(stage), int(tile)) for stage, tile in order] for order in got)
    for name, order, stages in (("cube", cube, CUBE_STAGES), ("vector", vector, VECTOR_STAGES)):
        wanted = sorted((stage, tile) for stage in stages for tile in range(tiles))
        if sorted(order) != wanted:
            return f"and the {name} core has not each job of {' and '.join(stages)} once"
    took = run_orders(times, (cube, vector), tiles, slots, trip)
    if took is None:
        return "and with these orders both cores wait for ever"
    ours = best_time(times, tiles, slots, trip)
    if took > SLACK * ours:
        return f"and that takes {took:,} cycles; ours takes {ours:,}"
    return None


def _stages(rng: ex.Rng) -> ex.Case:
    times = {stage: int(rng.integers(20, 200)) for stage in ("QK", "P", "PV", "GU")}
    tiles = int(rng.integers(1, 24))
    slots = int(rng.integers(1, 7))
    return {"times": times, "tiles": tiles, "slots": slots, "trip": int(rng.integers(0, 400))}


EQUAL = {"QK": 100, "P": 100, "PV": 100, "GU": 100}


@ex.judged(
    _judge_orders,
    edges=[(EQUAL, 16, 8, 50), (EQUAL, 16, 1, 50), (EQUAL, 1, 4, 0), (EQUAL, 12, 4, 0)],
)
def check_ex_16a_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(times, tiles, slots, trip)`: orders of the jobs of a cube and a vector core."""
    return _stages(rng)
