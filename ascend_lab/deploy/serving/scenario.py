"""What is to be simulated, as data, and read from a TOML file: every key known, numbers in range.

What the tables in `FILE` mean says the help of `ascend-lab serve-sim`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.deploy.serving.model import Line, affine, network_seconds
from ascend_lab.deploy.serving.queues import Failure, Level, Policy
from ascend_lab.errors import InputError
from ascend_lab.limits import HUGE, TINY, Range, decoded, naming, shown, toml_of

Floats = NDArray[np.float64]
CHUNK = 4096
"""Random numbers drawn at once."""
LAWS: dict[str, Callable[[np.random.Generator, float, int], Floats]] = {
    "exponential": lambda rng, shape, n: rng.standard_exponential(n),
    "deterministic": lambda rng, shape, n: np.ones(n),
    "erlang": lambda rng, shape, n: rng.gamma(shape, 1 / shape, n),
    "gamma": lambda rng, shape, n: rng.gamma(shape, 1 / shape, n),
}
"""Laws with mean 1; the squared coefficient of variation of the last two is 1/shape."""


@dataclass(frozen=True, slots=True)
class Service:
    """How long a batch takes: of b items `mean_s + per_item_s * b` on average, in all of a law.

    `seconds` by batch size, from 1, take the place of that line.
    """

    law: str = "deterministic"
    mean_s: float = 0.0
    per_item_s: float = 0.0
    shape: float = 1.0
    seconds: tuple[float, ...] = ()

    def batch_s(self, items: int) -> float:
        """Return the mean seconds of a batch."""
        if self.seconds:
            return self.seconds[items - 1]
        return self.mean_s + self.per_item_s * items

    def noise(self, rng: np.random.Generator) -> Iterator[float]:
        """Yield factors with mean 1, one a batch."""
        while True:
            yield from LAWS[self.law](rng, self.shape, CHUNK).tolist()

    def sampler(self, rng: np.random.Generator, max_batch: int) -> Callable[[int], float]:
        """Return a function that draws the seconds of a batch, given its size."""
        means_s = [0.0, *(self.batch_s(size) for size in range(1, max_batch + 1))]
        factors = self.noise(rng)
        return lambda items: means_s[items] * next(factors)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Who asks: a Poisson stream, given times, or `clients` that wait for the answer and think.

    `items` lists the sizes of requests, each as likely as the others.
    """

    law: str = "poisson"
    rate_per_s: float = 1.0
    clients: int = 1
    think_s: float = 0.0
    think_law: str = "deterministic"
    items: tuple[int, ...] = (1,)
    times_s: tuple[float, ...] = ()


ONE = Policy()


@dataclass(frozen=True, slots=True)
class Step:
    """A model of an ensemble; it starts on a request when the steps named `after` have ended."""

    name: str
    service: Service
    policy: Policy = ONE
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a model that errs on a share of its requests."""

    name: str
    error_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Canary:
    """Shares the new version gets, one a window of its answers, and what stops it.

    `users` send the requests, each as often as the others.
    """

    stages: tuple[float, ...] = (0.05, 0.25, 1.0)
    window: int = 200
    max_error_rate: float = 0.01
    max_p95_s: float = float("inf")
    users: int = 1000
    salt: str = "canary"


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to simulate: steps of an ensemble (mostly one), or versions that a canary compares."""

    arrivals: Arrivals
    steps: tuple[Step, ...]
    requests: int
    seed: int = 0
    warmup: int = 0
    versions: tuple[Version, ...] = ()
    canary: Canary | None = None


# -- the file -------------------------------------------------------------------------------------
REQUESTS = 2_000_000
MOST_TIMED = 256
"""Most requests a file may ask for; the largest batch whose time is modelled."""
SHARES = 1e-9
"""How far the sum of all shares may lie from 1."""
IDLE = {"poisson": ("clients", "think_s", "think_law"), "closed": ("rate_per_s",)}
"""Keys of arrivals that change nothing under a law."""
_BATCH = Range(int, 1, 4096)
_COUNT = Range(int, 0, REQUESTS)
_SHARE = Range(float, 0, 1)
_TIME = Range(float, 0, HUGE)
_POSITIVE = Range(float, TINY, HUGE)
_SERVICE: dict[str, Any] = {
    "law": tuple(LAWS),
    "mean_s": _TIME,
    "per_item_s": _TIME,
    "shape": Range(float, 1e-3, 1e6),
    "model": str,
    "chip": str,
    "dtype": ("fp16", "bf16", "int8"),
}
_SERVER: dict[str, Any] = {
    "instances": Range(int, 1, 10_000),
    "max_batch": _BATCH,
    "max_delay_s": _TIME,
    "queue_limit": _COUNT,
    "loss": bool,
    "preferred": [_BATCH],
}
FILE: dict[str, Any] = {
    "service": _SERVICE,
    "server": _SERVER,
    "arrivals": {
        "law": tuple(IDLE),
        "rate_per_s": _POSITIVE,
        "clients": Range(int, 1, 100_000),
        "think_s": _TIME,
        "think_law": ("exponential", "deterministic"),
        "items": [_BATCH],
    },
    "run": {"requests": Range(int, 1, REQUESTS), "seed": Range(int, 0, 2**53), "warmup": _COUNT},
    "priorities": [
        {
            "share": _POSITIVE,
            "timeout_s": _TIME,
            "queue_limit": _COUNT,
            "action": ("reject", "delay"),
        }
    ],
    "failures": [{"instance": _COUNT, "at_s": _TIME, "repair_s": _TIME}],
    "canary": {
        "stages": [_SHARE],
        "window": Range(int, 20, REQUESTS),
        "max_error_rate": _SHARE,
        "max_p95_s": _POSITIVE,
        "users": Range(int, 1, 1_000_000),
        "salt": str,
    },
    "steps": [{"name": str, "service": _SERVICE, "server": _SERVER, "after": [str]}],
    "versions": [{"name": str, "service": _SERVICE, "server": _SERVER, "error_rate": _SHARE}],
}
"""Every table, its keys, and what each may be."""
Timed = dict[str, tuple[dict[int, float], Line]]


@dataclass(frozen=True, slots=True)
class Read:
    """A scenario read from a file; the times of networks in it, by step, with their lines.

    `notes` say what will surprise: keys that change nothing, more work than can be done.
    """

    scenario: Scenario
    timed: Timed = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_scenario(path: str | Path) -> Read:
    """Return the scenario of a TOML file; networks in it are timed on their chips.

    Raises `InputError` naming the file, table and key at fault, and what loading a model raises.
    """
    tables = toml_of(path, f"{path}: a TOML file of a scenario", InputError)
    with naming(path):
        return _scenario(decoded(FILE, _with_model(tables)), Path(path).parent)


def _with_model(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the tables, a model and chip at the top, or in [model], as part of [service]."""
    model = tables.pop("model", {})
    own = tables.get("service", {})
    model = {"name": model} if not isinstance(model, dict) else model
    named = {"model" if key == "name" else key: value for key, value in model.items()}
    named |= {"chip": tables.pop("chip")} if "chip" in tables else {}
    return {**tables, "service": {**named, **own} if isinstance(own, dict) else own}


def _needs(where: str, table: Mapping[str, Any], *keys: str) -> None:
    if missing := [key for key in keys if key not in table]:
        raise InputError(f"[{where}] with {', '.join(missing)}", "none", "add it")


def _scenario(file: Mapping[str, Any], folder: Path) -> Read:
    run = file.get("run", {})
    found = file.get("arrivals", {})
    _needs("arrivals", found, "clients" if found.get("law") == "closed" else "rate_per_s")
    arrivals = Arrivals(**found)
    requests = run.get("requests", 100_000)
    timed: Timed = {}
    steps = tuple(_step(row, file, folder, timed) for row in _rows(file))
    rows = file.get("versions", ())
    versions = tuple(Version(row["name"], row.get("error_rate", 0.0)) for row in rows)
    if bool(versions) != ("canary" in file) or len(versions) not in (0, 2):
        got = f"{len(versions)} [[versions]]"
        raise InputError("[canary] and two [[versions]], the old one first", got, "or none")
    canary = Canary(**file["canary"]) if versions else None
    most = min(step.policy.max_batch for step in steps)
    if max(arrivals.items) > most:
        needed = f"[arrivals] items of at most max_batch {most}"
        raise InputError(needed, str(max(arrivals.items)), "raise max_batch")
    warmup = run.get("warmup", requests // 10)
    made = Scenario(arrivals, steps, requests, run.get("seed", 0), warmup, versions, canary)
    idle = [key for key in IDLE[arrivals.law] if key in found]
    notes = [f"[arrivals] {key} changes nothing with law {arrivals.law}" for key in idle]
    return Read(made, timed, (*notes, *_overload(made)))


def _rows(file: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the steps or versions, one if there are none; names are new, `after` above."""
    kinds = [kind for kind in ("steps", "versions") if kind in file]
    if len(kinds) > 1:
        raise InputError("[[steps]] or [[versions]]", "both", "choose one")
    rows = list(file[kinds[0]]) if kinds else [{"name": "model"}]
    for n, row in enumerate(rows):
        _needs(kinds[0] if kinds else "", row, "name")
        names = [other["name"] for other in rows[:n]]
        unknown = [name for name in row.get("after", ()) if name not in names]
        if row["name"] in names or unknown:
            got = f"{shown(row['name'])} after {', '.join(unknown) or 'one of that name'}"
            raise InputError(f"[[{kinds[0]}]] with names, after steps above", got, "mend it")
    return rows


def _step(row: Mapping[str, Any], file: Mapping[str, Any], folder: Path, timed: Timed) -> Step:
    """Return a step: its own keys, and what they leave out as the file has it for all."""
    policy = _policy({**file.get("server", {}), **row.get("server", {})}, file)
    table = {**file["service"], **row.get("service", {})}
    if "model" not in table:
        return Step(row["name"], _given(table), policy, row.get("after", ()))
    model = table.pop("model")
    chip = table.pop("chip", "")
    dtype = table.pop("dtype", "fp16")
    if not chip:
        raise InputError("a chip for the model", "none", 'add chip = "Ascend310"')
    if {"mean_s", "per_item_s"} & table.keys():
        raise InputError("[service] a model, or mean_s and per_item_s", "both", "choose one")
    if policy.max_batch > MOST_TIMED:
        needed = f"max_batch of at most {MOST_TIMED} for a model"
        raise InputError(needed, f"{policy.max_batch:,}", "lower it")
    local = folder / model
    place = str(local) if not model.startswith("zoo:") and local.exists() else model
    seconds, points = network_seconds(place, chip, policy.max_batch, dtype)
    timed[row["name"]] = points, affine(points)
    return Step(row["name"], Service(**table, seconds=seconds), policy, row.get("after", ()))


def _policy(table: dict[str, Any], file: Mapping[str, Any]) -> Policy:
    limit = table.pop("queue_limit", 0)
    most = table.get("max_batch", 1)
    if max(table.get("preferred", (1,))) > most:
        got = shown(list(table["preferred"]))
        raise InputError(f"[server] preferred of at most max_batch {most}", got, "mend it")
    given = file.get("priorities", ({},))
    levels = tuple(Level(**row) for row in given)
    total = sum(level.share for level in levels)
    if any("share" in row for row in given) and abs(total - 1) > SHARES:
        needed = "[[priorities]] whose shares sum to 1"
        raise InputError(needed, f"a sum of {total:.12g}", "mend them, or give none")
    levels = tuple(replace(one, queue_limit=one.queue_limit or limit) for one in levels)
    for row in file.get("failures", ()):
        _needs("failures", row, "instance", "at_s", "repair_s")
        if row["instance"] >= table.get("instances", 1):
            got = str(row["instance"])
            raise InputError("[[failures]] instance below [server] instances", got, "from 0")
    failures = tuple(Failure(**row) for row in file.get("failures", ()))
    return Policy(**table, levels=levels, failures=failures)


def _given(found: dict[str, Any]) -> Service:
    """Return the service that a file states in seconds."""
    _needs("service", found, "law")
    law = found["law"]
    shape = found.get("shape")
    if law in ("erlang", "gamma") and (shape is None or (law == "erlang" and shape % 1)):
        needed = f"[service] law {law} with a {'whole ' * (law == 'erlang')}shape"
        raise InputError(needed, shown(shape), "add it")
    if not found.get("mean_s", 0.0) + found.get("per_item_s", 0.0) > 0:
        raise InputError("[service] mean_s or per_item_s above 0", "none", "add one")
    return Service(**{key: value for key, value in found.items() if key not in ("chip", "dtype")})


def _overload(scenario: Scenario) -> list[str]:
    """Return a note for each step that more items come to than full batches could bear."""
    arrivals = scenario.arrivals
    notes = []
    if arrivals.law == "closed" or scenario.versions:
        return []
    rate = arrivals.rate_per_s * sum(arrivals.items) / len(arrivals.items)
    for step in scenario.steps:
        sizes = range(1, step.policy.max_batch + 1)
        most = step.policy.instances * max(n / (step.service.batch_s(n) or TINY) for n in sizes)
        if rate > most:
            notes.append(
                f"overload: {rate:.6g} items/s come to {step.name}, which bears {most:.6g} at "
                "most: waits grow with the run, unless requests are lost"
            )
    return notes
