"""A scenario from a TOML file: every key known, every number in range, one line if not.

The tables and their keys stand in `_KEYS`, what they mean in the help of `ascend-lab serve-sim`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ascend_lab.errors import InputError
from ascend_lab.limits import HUGE, TINY, json_number, shown, toml_of
from ascend_lab.serving.rollout import Canary, Version
from ascend_lab.serving.simulate import LAWS, Arrivals, Scenario, Service, Step
from ascend_lab.serving.station import Failure, Level, Policy
from ascend_lab.serving.times import Line, affine, network_seconds

REQUESTS, MOST_BATCH, MOST_TIMED, CLIENTS, MOST_TABLES = 2_000_000, 4096, 256, 100_000, 64
"""Most of each that a file may ask for; `MOST_TIMED`: the largest batch whose time is modelled."""
SHARES = 1e-9
"""How far the sum of all shares may lie from 1."""
IDLE = {"poisson": ("clients", "think_s", "think_law"), "closed": ("rate_per_s",)}
"""Keys of arrivals that change nothing under a law."""
Reader = Callable[[str, Any], Any]


def _wrong(where: str, needed: str, value: Any) -> InputError:
    return InputError(f"{where}: {needed}", shown(value), "mend it")


def _number(low: float = 0.0, high: float = HUGE) -> Reader:
    def read(where: str, value: Any) -> float:
        number = json_number(value)
        if number is None or not low <= number <= high or 0 < abs(number) < TINY:
            raise _wrong(where, f"a number from {low:g} to {high:g}", value)
        return number

    return read


def _whole(low: int = 0, high: int = REQUESTS) -> Reader:
    def read(where: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _wrong(where, f"a whole number from {low} to {high:,}", value)
        return value

    return read


def _word(*words: str) -> Reader:
    def read(where: str, value: Any) -> str:
        if not isinstance(value, str) or (words and value not in words) or not value.isprintable():
            raise _wrong(where, f"one of {', '.join(words)}" if words else "a text", value)
        return value

    return read


def _some(one: Reader) -> Reader:
    def read(where: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or not 0 < len(value) <= MOST_TABLES:
            raise _wrong(where, f"a list of 1 to {MOST_TABLES}", value)
        return tuple(one(f"{where}[{n}]", item) for n, item in enumerate(value))

    return read


def _flag(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(where, "true or false", value)
    return value


def _any(where: str, value: Any) -> Any:
    return value


_BATCH, _TIME, _POSITIVE, _SHARE = _whole(1, MOST_BATCH), _number(), _number(TINY), _number(0, 1)
_KEYS: dict[str, dict[str, Reader]] = {
    "service": {
        "law": _word(*LAWS), "mean_s": _TIME, "per_item_s": _TIME, "shape": _number(1e-3, 1e6),
        "model": _word(), "chip": _word(), "dtype": _word("fp16", "bf16", "int8"),
    },
    "server": {
        "instances": _whole(1, 10_000), "max_batch": _BATCH, "max_delay_s": _TIME,
        "queue_limit": _whole(), "loss": _flag, "preferred": _some(_BATCH),
    },
    "arrivals": {
        "law": _word("poisson", "closed"), "rate_per_s": _POSITIVE, "clients": _whole(1, CLIENTS),
        "think_s": _TIME, "think_law": _word("exponential", "deterministic"),
        "items": _some(_BATCH),
    },
    "run": {"requests": _whole(1), "seed": _whole(0, 2**53), "warmup": _whole()},
    "priorities": {
        "share": _POSITIVE, "timeout_s": _TIME, "queue_limit": _whole(),
        "action": _word("reject", "delay"),
    },
    "failures": {"instance": _whole(), "at_s": _TIME, "repair_s": _TIME},
    "canary": {
        "stages": _some(_SHARE), "window": _whole(20), "max_error_rate": _SHARE,
        "max_p95_s": _POSITIVE, "users": _whole(1, 1_000_000), "salt": _word(),
    },
    "steps": {"name": _word(), "service": _any, "server": _any, "after": _some(_word())},
    "versions": {"name": _word(), "service": _any, "server": _any, "error_rate": _SHARE},
    "model": {}, "chip": {},
}  # fmt: skip
"""Every table's keys, and what reads each."""


@dataclass(frozen=True, slots=True)
class Read:
    """A scenario read from a file; the times of networks in it, by step, with their lines.

    `notes` say what will surprise: keys that change nothing, more work than can be done.
    """

    scenario: Scenario
    timed: Mapping[str, tuple[dict[int, float], Line]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def _unknown(where: str, known: Mapping[str, Any], key: str) -> InputError:
    near = get_close_matches(key, known, 1)
    remedy = f"did you mean {near[0]}?" if near else ""
    return InputError(f"{where} among {', '.join(known)}", shown(key), remedy)


def _table(name: str, table: Any) -> dict[str, Any]:
    """Return the values of a table, each read as its key says."""
    for key in _plain(name, table):
        if key not in _KEYS[name]:
            raise _unknown(f"[{name}]: keys", _KEYS[name], key)
    return {key: _KEYS[name][key](f"[{name}] {key}", value) for key, value in table.items()}


def _plain(name: str, table: Any) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise InputError(f"a table [{name}]", shown(table), "write keys and values")
    return table


def _needs(where: str, table: Mapping[str, Any], *keys: str) -> None:
    missing = [key for key in keys if key not in table]
    if missing:
        raise InputError(f"[{where}] with {', '.join(missing)}", "none", "add it")


def read_scenario(path: str | Path) -> Read:
    """Return the scenario of a TOML file; networks in it are timed on their chips.

    Raises `InputError` naming the file, table and key at fault, and what loading a model raises.
    """
    tables = toml_of(path, f"{path}: a TOML file of a scenario", InputError)
    try:
        return _Reading(tables, Path(path).parent).read()
    except InputError as error:
        raise InputError(f"{path}: {error.needed}", error.got, error.remedy) from None


class _Reading:
    """The tables of a file, on their way into a scenario."""

    def __init__(self, tables: dict[str, Any], folder: Path) -> None:
        if unknown := tables.keys() - _KEYS.keys():
            raise _unknown("tables", _KEYS, min(unknown))
        self.tables, self.folder = tables, folder
        self.timed: dict[str, tuple[dict[int, float], Line]] = {}
        named = {key: tables[key] for key in ("model", "chip") if key in tables}
        self.tables["service"] = {**named, **self._own("service")}
        levels = [_table("priorities", table) for table in self._many("priorities")]
        self.levels = tuple(Level(**level) for level in levels) or (Level(),)
        total = sum(level.share for level in self.levels)
        if any("share" in level for level in levels) and abs(total - 1) > SHARES:
            needed = "[[priorities]] whose shares sum to 1"
            raise InputError(needed, f"a sum of {total:.12g}", "mend them, or give none")

    def _own(self, name: str) -> dict[str, Any]:
        return _plain(name, self.tables.get(name, {}))

    def _many(self, name: str) -> list[Any]:
        found = self.tables.get(name, [])
        if not isinstance(found, list) or len(found) > MOST_TABLES:
            raise InputError(
                f"at most {MOST_TABLES} tables [[{name}]]", shown(found), "write [[ ]]"
            )
        return found

    def read(self) -> Read:
        run, arrivals = _table("run", self._own("run")), self._arrivals()
        requests = run.get("requests", 100_000)
        steps, versions = self._steps()
        if bool(versions) != ("canary" in self.tables) or len(versions) not in (0, 2):
            got = f"{len(versions)} [[versions]]"
            raise InputError("[canary] and two [[versions]], the old one first", got, "or none")
        canary = Canary(**_table("canary", self._own("canary"))) if versions else None
        most = min(step.policy.max_batch for step in steps)
        if max(arrivals.items) > most:
            needed = f"[arrivals] items of at most max_batch {most}"
            raise InputError(needed, str(max(arrivals.items)), "raise max_batch")
        warmup, seed = run.get("warmup", requests // 10), run.get("seed", 0)
        scenario = Scenario(arrivals, steps, requests, seed, warmup, versions, canary)
        idle = [key for key in IDLE[arrivals.law] if key in self._own("arrivals")]
        notes = [f"[arrivals] {key} changes nothing with law {arrivals.law}" for key in idle]
        return Read(scenario, self.timed, (*notes, *_overload(scenario)))

    def _arrivals(self) -> Arrivals:
        found = _table("arrivals", self._own("arrivals"))
        _needs("arrivals", found, "clients" if found.get("law") == "closed" else "rate_per_s")
        return Arrivals(**found)

    def _steps(self) -> tuple[tuple[Step, ...], tuple[Version, ...]]:
        """Return the steps, and the versions if those are what the file lists."""
        kinds = [kind for kind in ("steps", "versions") if self._many(kind)]
        if len(kinds) > 1:
            raise InputError("[[steps]] or [[versions]]", "both", "choose one")
        if not kinds:
            return (self._step({"name": "model"}),), ()
        rows = [_table(kinds[0], table) for table in self._many(kinds[0])]
        names: list[str] = []
        for row in rows:
            _needs(kinds[0], row, "name")
            unknown = [name for name in row.get("after", ()) if name not in names]
            if row["name"] in names or unknown:
                got = f"{shown(row['name'])} after {', '.join(unknown) or 'one of that name'}"
                raise InputError(f"[[{kinds[0]}]] with names, after steps above", got, "mend it")
            names.append(row["name"])
        steps = tuple(map(self._step, rows))
        if kinds == ["steps"]:
            return steps, ()
        return steps, tuple(Version(row["name"], row.get("error_rate", 0.0)) for row in rows)

    def _step(self, row: dict[str, Any]) -> Step:
        """Return a step: its own keys, and what they leave out as the file has it for all."""
        own = {name: _plain(name, row.get(name, {})) for name in ("server", "service")}
        policy = self._policy({**self._own("server"), **own["server"]})
        service = self._service({**self._own("service"), **own["service"]}, policy, row["name"])
        return Step(row["name"], service, policy, row.get("after", ()))

    def _policy(self, table: dict[str, Any]) -> Policy:
        found = _table("server", table)
        limit, most = found.pop("queue_limit", 0), found.get("max_batch", 1)
        if max(found.get("preferred", (1,))) > most:
            got = shown(list(found["preferred"]))
            raise InputError(f"[server] preferred of at most max_batch {most}", got, "mend it")
        levels = tuple(replace(one, queue_limit=one.queue_limit or limit) for one in self.levels)
        failures = [_table("failures", row) for row in self._many("failures")]
        for row in failures:
            _needs("failures", row, *_KEYS["failures"])
            if row["instance"] >= found.get("instances", 1):
                got = str(row["instance"])
                raise InputError("[[failures]] instance below [server] instances", got, "from 0")
        return Policy(**found, levels=levels, failures=tuple(Failure(**row) for row in failures))

    def _service(self, table: dict[str, Any], policy: Policy, name: str) -> Service:
        if isinstance(named := table.get("model"), dict):  # [model] name, chip
            table = {**table, "model": named.get("name"), **{k: v for k, v in named.items()
                                                             if k != "name"}}  # fmt: skip
        found = _table("service", table)
        model, chip = found.pop("model", ""), found.pop("chip", "")
        dtype = found.pop("dtype", "fp16")
        if not model:
            return _given(found)
        if not chip:
            raise InputError("a chip for the model", "none", 'add chip = "Ascend310"')
        if {"mean_s", "per_item_s"} & found.keys():
            raise InputError("[service] a model, or mean_s and per_item_s", "both", "choose one")
        if policy.max_batch > MOST_TIMED:
            needed = f"max_batch of at most {MOST_TIMED} for a model"
            raise InputError(needed, f"{policy.max_batch:,}", "lower it")
        local = self.folder / model
        place = str(local) if not model.startswith("zoo:") and local.exists() else model
        seconds, timed = network_seconds(place, chip, policy.max_batch, dtype)
        self.timed[name] = (timed, affine(timed))
        return Service(**found, seconds=seconds)


def _overload(scenario: Scenario) -> list[str]:
    """Return a note for each step that more items come to than full batches could bear."""
    arrivals, notes = scenario.arrivals, []
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


def _given(found: dict[str, Any]) -> Service:
    """Return the service that a file states in seconds."""
    _needs("service", found, "law")
    law, shape = found["law"], found.get("shape")
    if law in ("erlang", "gamma") and (shape is None or (law == "erlang" and shape % 1)):
        needed = f"[service] law {law} with a {'whole ' * (law == 'erlang')}shape"
        raise InputError(needed, shown(shape), "add it")
    if not found.get("mean_s", 0.0) + found.get("per_item_s", 0.0) > 0:
        raise InputError("[service] mean_s or per_item_s above 0", "none", "add one")
    return Service(**found)
