"""Reads a serving scenario from a TOML file, and checks all keys and numbers.

The help of `ascend-lab serve-sim` explains the tables in `SCHEMA`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ascend_lab.deploy.serving.model import Line, fit_line, network_seconds
from ascend_lab.deploy.serving.queues import Failure, Level, Policy
from ascend_lab.deploy.serving.scenario import (
    LAWS,
    Arrivals,
    Canary,
    Scenario,
    Service,
    Step,
    Version,
)
from ascend_lab.errors import InputError
from ascend_lab.limits import HUGE, TINY, Range, decoded, naming, shown, toml_of

MAX_REQUESTS = 2_000_000
"""Largest number of requests of a file."""
MAX_TIMED_BATCH = 256
"""Largest batch of a model that is timed on a chip."""
SHARE_TOLERANCE = 1e-9
"""Tolerance of the sum of shares: in floating point 0.1 + 0.2 + 0.7 is not exactly 1."""
UNUSED_KEYS = {"poisson": ("clients", "think_s", "think_law"), "closed": ("rate_per_s",)}
"""Law of arrivals -> the keys that have no effect with it."""
_BATCH = Range(int, 1, 4096)
_COUNT = Range(int, 0, MAX_REQUESTS)
_SHARE = Range(float, 0, 1)
_TIME = Range(float, 0, HUGE)
_POSITIVE = Range(float, TINY, HUGE)
_SERVICE_KEYS: dict[str, Any] = {
    "law": tuple(LAWS),
    "mean_s": _TIME,
    "per_item_s": _TIME,
    "shape": Range(float, 1e-3, 1e6),
    "model": str,
    "chip": str,
    "dtype": ("fp16", "bf16", "int8"),
}
_SERVER_KEYS: dict[str, Any] = {
    "instances": Range(int, 1, 10_000),
    "max_batch": _BATCH,
    "max_delay_s": _TIME,
    "queue_limit": _COUNT,
    "loss": bool,
    "preferred": [_BATCH],
}
SCHEMA: dict[str, Any] = {
    "service": _SERVICE_KEYS,
    "server": _SERVER_KEYS,
    "arrivals": {
        "law": tuple(UNUSED_KEYS),
        "rate_per_s": _POSITIVE,
        "clients": Range(int, 1, 100_000),
        "think_s": _TIME,
        "think_law": ("exponential", "deterministic"),
        "items": [_BATCH],
    },
    "run": {
        "requests": Range(int, 1, MAX_REQUESTS),
        "seed": Range(int, 0, 2**53),
        "warmup": _COUNT,
    },
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
        "window": Range(int, 20, MAX_REQUESTS),
        "max_error_rate": _SHARE,
        "max_p95_s": _POSITIVE,
        "users": Range(int, 1, 1_000_000),
        "salt": str,
    },
    "steps": [{"name": str, "service": _SERVICE_KEYS, "server": _SERVER_KEYS, "after": [str]}],
    "versions": [
        {"name": str, "service": _SERVICE_KEYS, "server": _SERVER_KEYS, "error_rate": _SHARE}
    ],
}
"""Tables of the file -> their keys -> the allowed values, as `limits.decoded` takes them."""
TimedSteps = dict[str, tuple[dict[int, float], Line]]
"""Step -> (batch size -> simulated seconds, fitted line)."""


@dataclass(frozen=True, slots=True)
class ScenarioFile:
    """A scenario from a file, with the simulated times of its networks and warnings.

    `timed` maps a step to its simulated times and their fitted line. `notes` are warnings, for
    example of keys without an effect or of overload.
    """

    scenario: Scenario
    timed: TimedSteps = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_scenario(path: str | Path) -> ScenarioFile:
    """Return the scenario of a TOML file, with its networks timed on their chips.

    Raises `InputError` naming file, table and key, and errors of loading a model.
    """
    tables = toml_of(path, f"{path}: a TOML file of a scenario", InputError)
    with naming(path):
        return _scenario(decoded(SCHEMA, _with_model(tables)), Path(path).parent)


def _with_model(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the tables with a model and chip moved into [service].

    A file may have them at its top, as keys or as a table [model].
    """
    model = tables.pop("model", {})
    service = tables.get("service", {})
    model = {"name": model} if not isinstance(model, dict) else model
    model_keys = {"model" if key == "name" else key: value for key, value in model.items()}
    model_keys |= {"chip": tables.pop("chip")} if "chip" in tables else {}
    # Keys in [service] take precedence; if it is not a table, `decoded` raises an error.
    return {
        **tables,
        "service": {**model_keys, **service} if isinstance(service, dict) else service,
    }


def _check_keys(where: str, table: Mapping[str, Any], *keys: str) -> None:
    """Raise `InputError` if one of the keys is missing in a table."""
    if missing := [key for key in keys if key not in table]:
        raise InputError(f"[{where}] with {', '.join(missing)}", "none", "add it")


def _scenario(file: Mapping[str, Any], folder: Path) -> ScenarioFile:
    """Return the scenario of checked tables; paths of networks are relative to `folder`."""
    run = file.get("run", {})
    table = file.get("arrivals", {})
    _check_keys("arrivals", table, "clients" if table.get("law") == "closed" else "rate_per_s")
    # `decoded` has checked the table, whose keys are the fields of the record.
    arrivals = Arrivals(**table)
    requests = run.get("requests", 100_000)
    timed: TimedSteps = {}
    steps = tuple(_step(row, file, folder, timed) for row in _rows(file))
    versions = _versions(file)
    canary = Canary(**file["canary"]) if versions else None
    # A request is never split: the largest one must fit into the batches of every step.
    max_batch = min(step.policy.max_batch for step in steps)
    if max(arrivals.items) > max_batch:
        needed = f"[arrivals] items of at most max_batch {max_batch}"
        raise InputError(needed, str(max(arrivals.items)), "raise max_batch")
    # By default a tenth of the requests, in addition to the measured ones.
    warmup = run.get("warmup", requests // 10)
    scenario = Scenario(
        arrivals=arrivals,
        steps=steps,
        requests=requests,
        seed=run.get("seed", 0),
        warmup=warmup,
        versions=versions,
        canary=canary,
    )
    notes = (*_unused_key_notes(arrivals, table), *_overload(scenario))
    return ScenarioFile(scenario, timed, notes)


def _versions(file: Mapping[str, Any]) -> tuple[Version, ...]:
    """Return the two versions of a file with a canary; () for a file without."""
    rows = file.get("versions", ())
    versions = tuple(Version(row["name"], row.get("error_rate", 0.0)) for row in rows)
    if bool(versions) != ("canary" in file) or len(versions) not in (0, 2):
        got = f"{len(versions)} [[versions]]"
        raise InputError("[canary] and two [[versions]], the old one first", got, "or none")
    return versions


def _unused_key_notes(arrivals: Arrivals, table: Mapping[str, Any]) -> list[str]:
    """Return a warning for each key of [arrivals] that has no effect with its law."""
    unused_keys = [key for key in UNUSED_KEYS[arrivals.law] if key in table]
    return [f"[arrivals] {key} changes nothing with law {arrivals.law}" for key in unused_keys]


def _rows(file: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of [[steps]] or [[versions]], or one row named "model" if there are none.

    Raises `InputError` for a repeated name, and for a step that waits for one that is not above it;
    so there are no cycles.
    """
    kinds = [kind for kind in ("steps", "versions") if kind in file]
    if len(kinds) > 1:
        raise InputError("[[steps]] or [[versions]]", "both", "choose one")
    rows = list(file[kinds[0]]) if kinds else [{"name": "model"}]
    for n, row in enumerate(rows):
        _check_keys(kinds[0] if kinds else "", row, "name")
        names = [row_above["name"] for row_above in rows[:n]]
        unknown = [name for name in row.get("after", ()) if name not in names]
        if row["name"] in names or unknown:
            got = f"{shown(row['name'])} after {', '.join(unknown) or 'one of that name'}"
            raise InputError(f"[[{kinds[0]}]] with names, after steps above", got, "correct it")
    return rows


def _step(row: Mapping[str, Any], file: Mapping[str, Any], folder: Path, timed: TimedSteps) -> Step:
    """Return a step from its row, with missing keys from the tables of the whole file."""
    policy = _policy({**file.get("server", {}), **row.get("server", {})}, file)
    table = {**file["service"], **row.get("service", {})}
    if "model" not in table:
        return Step(row["name"], _stated_service(table), policy, row.get("after", ()))
    model = table.pop("model")
    chip = table.pop("chip", "")
    dtype = table.pop("dtype", "fp16")
    if not chip:
        raise InputError("a chip for the model", "none", 'add chip = "Ascend310"')
    if {"mean_s", "per_item_s"} & table.keys():
        raise InputError("[service] a model, or mean_s and per_item_s", "both", "choose one")
    if policy.max_batch > MAX_TIMED_BATCH:
        needed = f"max_batch of at most {MAX_TIMED_BATCH} for a model"
        raise InputError(needed, f"{policy.max_batch:,}", "lower it")
    # Paths are relative to the scenario's file, not to the working directory.
    local_path = folder / model
    is_local = not model.startswith("zoo:") and local_path.exists()
    model_path = str(local_path) if is_local else model
    seconds, points = network_seconds(model_path, chip, policy.max_batch, dtype)
    timed[row["name"]] = points, fit_line(points)
    return Step(row["name"], Service(**table, seconds=seconds), policy, row.get("after", ()))


def _policy(table: dict[str, Any], file: Mapping[str, Any]) -> Policy:
    """Return the policy of a step's server table, with the file's priorities and failures."""
    limit = table.pop("queue_limit", 0)
    max_batch = table.get("max_batch", 1)
    if max(table.get("preferred", (1,))) > max_batch:
        got = shown(list(table["preferred"]))
        raise InputError(f"[server] preferred of at most max_batch {max_batch}", got, "correct it")
    rows = file.get("priorities", ({},))
    stated_levels = tuple(Level(**row) for row in rows)
    total = sum(level.share for level in stated_levels)
    # Without shares all levels have 1.0, which is normalised later to equal shares.
    if any("share" in row for row in rows) and abs(total - 1) > SHARE_TOLERANCE:
        needed = "[[priorities]] whose shares sum to 1"
        raise InputError(needed, f"a sum of {total:.12g}", "correct them, or give none")
    # The queue_limit of [server] applies to each level without a limit of its own.
    levels = tuple(
        replace(level, queue_limit=level.queue_limit or limit) for level in stated_levels
    )
    for row in file.get("failures", ()):
        _check_keys("failures", row, "instance", "at_s", "repair_s")
        if row["instance"] >= table.get("instances", 1):
            got = str(row["instance"])
            raise InputError("[[failures]] instance below [server] instances", got, "from 0")
    failures = tuple(Failure(**row) for row in file.get("failures", ()))
    return Policy(**table, levels=levels, failures=failures)


def _stated_service(table: dict[str, Any]) -> Service:
    """Return the service of a table that states seconds instead of a model."""
    _check_keys("service", table, "law")
    law = table["law"]
    shape = table.get("shape")
    # A sum of k exponential times has an Erlang law with shape k, so k is an integer.
    if law in ("erlang", "gamma") and (shape is None or (law == "erlang" and shape % 1)):
        needed_shape = "whole shape" if law == "erlang" else "shape"
        needed = f"[service] law {law} with a {needed_shape}"
        raise InputError(needed, shown(shape), "add it")
    if not table.get("mean_s", 0.0) + table.get("per_item_s", 0.0) > 0:
        raise InputError("[service] mean_s or per_item_s above 0", "none", "add one")
    # Keys chip and dtype apply only to steps with a model.
    return Service(**{key: value for key, value in table.items() if key not in ("chip", "dtype")})


def _overload(scenario: Scenario) -> list[str]:
    """Return a warning for each step to which items come faster than it can serve them."""
    arrivals = scenario.arrivals
    notes = []
    # Clients of a closed system wait for their answers; the load of a version varies.
    if arrivals.law == "closed" or scenario.versions:
        return []
    rate = arrivals.rate_per_s * sum(arrivals.items) / len(arrivals.items)
    for step in scenario.steps:
        sizes = range(1, step.policy.max_batch + 1)
        # The capacity at the best batch size: 8 items in 4 ms on 2 instances are 4,000 items/s.
        capacity = step.policy.instances * max(n / (step.service.batch_s(n) or TINY) for n in sizes)
        if rate > capacity:
            notes.append(
                f"overload: {rate:.6g} items/s come to {step.name}, which bears {capacity:.6g} at "
                "most: waits grow with the run, unless requests are lost"
            )
    return notes
