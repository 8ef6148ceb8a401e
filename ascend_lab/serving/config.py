"""A scenario from a TOML file: every key known, every number in range, one line if not.

[service]   law, mean_s, per_item_s, shape; or model, chip, dtype: our own times per batch
[arrivals]  law, rate_per_s, clients, think_s, think_law, items
[server]    instances, max_batch, max_delay_s, queue_limit, preferred, loss
[run]       requests, seed, warmup
[[priorities]]  share, timeout_s, action, queue_limit
[[failures]]    instance, at_s, repair_s
[[steps]]       name, after, service, server: an ensemble
[[versions]]    name, error_rate, service, server; with [canary] stages, window, ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ascend_lab.errors import InputError
from ascend_lab.limits import HUGE, TINY, shown, toml_of
from ascend_lab.serving.rollout import Canary, Version
from ascend_lab.serving.simulate import LAWS, Arrivals, Scenario, Service, Step
from ascend_lab.serving.station import Failure, Level, Policy
from ascend_lab.serving.times import Line, affine, network_seconds

REQUESTS, MOST_BATCH, MOST_TIMED, CLIENTS = 4_000_000, 4096, 256, 100_000
"""Most of each that a file may ask for; `MOST_TIMED`: the largest batch whose time is modelled."""
Reader = Callable[[str, Any], Any]


def _number(where: str, value: Any, low: float = 0.0, high: float = HUGE) -> float:
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fine or not low <= value <= high or 0 < abs(value) < TINY:
        raise InputError(f"{where}: a number from {low:g} to {high:g}", shown(value), "mend it")
    return float(value)


def _whole(where: str, value: Any, low: int = 0, high: int = REQUESTS) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        needed = f"{where}: a whole number from {low} to {high:,}"
        raise InputError(needed, shown(value), "mend it")
    return value


def _word(where: str, value: Any, *words: str) -> str:
    if not isinstance(value, str) or (words and value not in words) or not value.isprintable():
        among = f"one of {', '.join(words)}" if words else "a text"
        raise InputError(f"{where}: {among}", shown(value), "mend it")
    return value


def _flag(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{where}: true or false", shown(value), "mend it")
    return value


def _some(where: str, value: Any, one: Reader, most: int = 64) -> tuple[Any, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= most:
        raise InputError(f"{where}: a list of 1 to {most}", shown(value), "mend it")
    return tuple(one(f"{where}[{n}]", item) for n, item in enumerate(value))


_POSITIVE = partial(_number, low=TINY)
_SHARE = partial(_number, high=1.0)
_SERVICE: dict[str, Reader] = {
    "law": lambda where, value: _word(where, value, *LAWS),
    "mean_s": _number, "per_item_s": _number, "shape": partial(_number, low=1e-3, high=1e6),
    "model": _word, "chip": _word,
    "dtype": lambda where, value: _word(where, value, "fp16", "bf16", "int8"),
}  # fmt: skip
_SERVER: dict[str, Reader] = {
    "instances": partial(_whole, low=1, high=10_000),
    "max_batch": partial(_whole, low=1, high=MOST_BATCH),
    "max_delay_s": _number, "queue_limit": _whole, "loss": _flag,
    "preferred": lambda where, value: _some(where, value, partial(_whole, low=1, high=MOST_BATCH)),
}  # fmt: skip
_ARRIVALS: dict[str, Reader] = {
    "law": lambda where, value: _word(where, value, "poisson", "closed"),
    "rate_per_s": _POSITIVE, "clients": partial(_whole, low=1, high=CLIENTS), "think_s": _number,
    "think_law": lambda where, value: _word(where, value, "exponential", "deterministic"),
    "items": lambda where, value: _some(where, value, partial(_whole, low=1, high=MOST_BATCH)),
}  # fmt: skip
_RUN: dict[str, Reader] = {
    "requests": partial(_whole, low=1), "seed": partial(_whole, high=2**53), "warmup": _whole,
}  # fmt: skip
_LEVEL: dict[str, Reader] = {
    "share": _POSITIVE, "timeout_s": _number, "queue_limit": _whole,
    "action": lambda where, value: _word(where, value, "reject", "delay"),
}  # fmt: skip
_FAILURE: dict[str, Reader] = {"instance": _whole, "at_s": _number, "repair_s": _number}
_CANARY: dict[str, Reader] = {
    "stages": lambda where, value: _some(where, value, _SHARE),
    "window": partial(_whole, low=20), "max_error_rate": _SHARE, "max_p95_s": _POSITIVE,
    "users": partial(_whole, low=1, high=1_000_000), "salt": _word,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Read:
    """A scenario read from a file; the times of networks in it, by step, with their lines."""

    scenario: Scenario
    timed: Mapping[str, tuple[dict[int, float], Line]] = field(default_factory=dict)


def _table(where: str, table: Any, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Return the values of a table, each read as its key says."""
    if not isinstance(table, dict):
        raise InputError(f"a table [{where}]", shown(table), "write keys and values")
    for key in table:
        if key not in readers:
            remedy = f"there are {', '.join(readers)}"
            raise InputError(f"[{where}]: known keys", shown(key), remedy)
    return {key: readers[key](f"[{where}] {key}", value) for key, value in table.items()}


def _needs(where: str, table: Mapping[str, Any], *keys: str) -> None:
    missing = [key for key in keys if key not in table]
    if missing:
        raise InputError(f"[{where}] with {', '.join(missing)}", "none", "add it")


def read_scenario(path: str | Path) -> Read:
    """Return the scenario of a TOML file; networks in it are timed on their chips.

    Raises `InputError` naming the table and key at fault, and what loading a model raises.
    """
    tables = toml_of(path, f"{path}: a TOML file of a scenario", InputError)
    return _Reading(tables, Path(path).parent).read()


class _Reading:
    """The tables of a file, on their way into a scenario."""

    def __init__(self, tables: dict[str, Any], folder: Path) -> None:
        known = ("service", "arrivals", "server", "run", "priorities", "failures", "steps",
                 "versions", "canary", "model", "chip")  # fmt: skip
        _table("the file", tables, dict.fromkeys(known, lambda where, value: value))
        self.tables, self.folder = tables, folder
        self.timed: dict[str, tuple[dict[int, float], Line]] = {}
        named = {key: tables[key] for key in ("model", "chip") if key in tables}
        self.tables["service"] = {**named, **self._own("service")}
        levels = [_table("priorities", t, _LEVEL) for t in self._many("priorities")]
        self.levels = tuple(Level(**level) for level in levels)

    def _own(self, name: str) -> dict[str, Any]:
        found = self.tables.get(name, {})
        if not isinstance(found, dict):
            raise InputError(f"a table [{name}]", shown(found), "write keys and values")
        return found

    def _many(self, name: str) -> list[Any]:
        found = self.tables.get(name, [])
        if not isinstance(found, list) or len(found) > 64:
            raise InputError(f"at most 64 tables [[{name}]]", shown(found), "write [[ ]]")
        return found

    def read(self) -> Read:
        run = _table("run", self._own("run"), _RUN)
        requests = run.get("requests", 100_000)
        arrivals = self._arrivals()
        steps, versions = self._steps()
        canary = Canary(**_table("canary", self._own("canary"), _CANARY)) if versions else None
        if bool(versions) != ("canary" in self.tables) or len(versions) not in (0, 2):
            got = f"{len(versions)} [[versions]]"
            raise InputError("[canary] and two [[versions]], the old one first", got, "or none")
        most = min(step.policy.max_batch for step in steps)
        if max(arrivals.items) > most:
            raise InputError(
                f"[arrivals] items of at most max_batch {most}", f"{max(arrivals.items)}"
            )
        warmup = run.get("warmup", requests // 10)
        scenario = Scenario(
            arrivals, steps, requests, run.get("seed", 0), warmup, versions, canary
        )  # fmt: skip
        return Read(scenario, self.timed)

    def _arrivals(self) -> Arrivals:
        found = _table("arrivals", self._own("arrivals"), _ARRIVALS)
        law = found.get("law", "poisson")
        _needs("arrivals", found, "clients" if law == "closed" else "rate_per_s")
        return Arrivals(**found)

    def _steps(self) -> tuple[tuple[Step, ...], tuple[Version, ...]]:
        """Return the steps, and the versions if those are what the file lists."""
        listed, versions = self._many("steps"), self._many("versions")
        if listed and versions:
            raise InputError("[[steps]] or [[versions]]", "both", "choose one")
        if not listed and not versions:
            return (self._step("", {}, {}),), ()
        kind, tables = ("steps", listed) if listed else ("versions", versions)
        keep: Reader = lambda where, value: value  # noqa: E731
        more: dict[str, Reader] = {"name": _word, "service": keep, "server": keep}
        own = {"after": lambda where, value: _some(where, value, _word)} if listed else {
            "error_rate": _SHARE}  # fmt: skip
        rows = [_table(kind, table, {**more, **own}) for table in tables]
        for row in rows:
            _needs(kind, row, "name")
        names = [row["name"] for row in rows]
        for n, row in enumerate(rows):
            unknown = [name for name in row.get("after", ()) if name not in names[:n]]
            if names.index(row["name"]) < n or unknown:
                got = f"{shown(row['name'])} after {', '.join(unknown) or 'one of that name'}"
                raise InputError(f"[[{kind}]] with names, after steps above", got, "mend it")
        steps = tuple(
            self._step(row["name"], row.get("service", {}), row.get("server", {}),
                       row.get("after", ())) for row in rows
        )  # fmt: skip
        if listed:
            return steps, ()
        return steps, tuple(Version(row["name"], row.get("error_rate", 0.0)) for row in rows)

    def _step(self, name: str, service: Any, server: Any, after: tuple[str, ...] = ()) -> Step:
        """Return a step: its own keys, and what they leave out as the file has it for all."""
        for table in (service, server):
            _table(name, table, dict.fromkeys(table, lambda where, value: value))
        policy = self._policy({**self._own("server"), **server})
        given = {**self._own("service"), **service}
        return Step(name or "model", self._service(given, policy, name), policy, after)

    def _policy(self, table: dict[str, Any]) -> Policy:
        found = _table("server", table, _SERVER)
        limit, most = found.pop("queue_limit", 0), found.get("max_batch", 1)
        if max(found.get("preferred", (1,))) > most:
            got = shown(list(found["preferred"]))
            raise InputError(f"[server] preferred of at most max_batch {most}", got, "mend it")
        levels = self.levels or (Level(),)
        levels = tuple(
            Level(one.share, one.timeout_s, one.action, one.queue_limit or limit) for one in levels
        )
        failures = []
        for row in self._many("failures"):
            values = _table("failures", row, _FAILURE)
            _needs("failures", values, *_FAILURE)
            if values["instance"] >= found.get("instances", 1):
                got = str(values["instance"])
                raise InputError("[[failures]] instance below [server] instances", got, "from 0")
            failures.append(Failure(**values))
        return Policy(**found, levels=levels, failures=tuple(failures))

    def _service(self, table: dict[str, Any], policy: Policy, name: str) -> Service:
        if isinstance(table.get("model"), dict):  # [model] name, chip
            table = {**table, **table["model"], "model": table["model"].get("name")}
            table.pop("name", None)
        found = _table("service", table, _SERVICE)
        model, chip = found.pop("model", ""), found.pop("chip", "")
        dtype = found.pop("dtype", "fp16")
        if not model:
            return _given(found)
        if not chip:
            raise InputError("a chip for the model", "none", 'add chip = "Ascend310"')
        if {"mean_s", "per_item_s"} & found.keys():
            got = "both"
            raise InputError("[service] a model, or mean_s and per_item_s", got, "choose one")
        if policy.max_batch > MOST_TIMED:
            got = f"{policy.max_batch:,}"
            raise InputError(f"max_batch of at most {MOST_TIMED} for a model", got, "lower it")
        local = self.folder / model
        place = str(local) if not model.startswith("zoo:") and local.exists() else model
        seconds, timed = network_seconds(place, chip, policy.max_batch, dtype)
        self.timed[name or "model"] = (timed, affine(timed))
        return Service(**found, seconds=seconds)


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
