"""Tuning sessions with the published sequence of calls, and the bank a session writes to.

initialize, create_session, set_tuning_graph, set_tuning_graph_input, tuning_graph,
destroy_session, finalize. A thin layer over `engine.tune`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.aoe.bank import BankEntry, BankKey, Knowledge, Outcome, Written, bank_file
from ascend_lab.aoe.bank.place import ROOT_VARIABLE
from ascend_lab.aoe.settings import Settings
from ascend_lab.aoe.trace import Trial
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.graph import Graph

if TYPE_CHECKING:
    from ascend_lab.aoe.engine import Tuning


class Ledger(Knowledge):
    """Both banks, and what a run wrote to the custom one, by key.

    Trials of an interrupted run are answered from the bank only if `resume`.
    """

    def __init__(self, custom: str | Path | None = None, *, resume: bool = False) -> None:
        """Open the bank file `custom` (made if missing); None keeps results in memory only."""
        super().__init__(custom)
        self.resume = resume
        self.written: dict[BankKey, Outcome] = {}

    def __enter__(self) -> Ledger:
        return self

    def keep(self, entry: BankEntry) -> Written:
        """Write `entry` if it is better, and note what that was for the report."""
        known = self.find(entry.key) is not None
        written = super().keep(entry)
        new: Outcome = "add" if entry.improved else "unsatisfied"
        self.written[entry.key] = written if written == "reserved" else "update" if known else new
        return written

    def trials(self, run_id: str) -> tuple[Trial, ...]:
        """Return the trials of an interrupted run, if the user wants to go on with it."""
        return super().trials(run_id) if self.resume else ()


def open_ledger(environ: Mapping[str, str] | None = None, *, resume: bool = False) -> Ledger:
    """Open the banks where the environment says (see `bank.place`).

    Raises `InputError` for a `TUNE_BANK_PATH` that cannot be used; without it, a place that cannot
    be made leaves a warning.
    """
    environ = os.environ if environ is None else environ
    try:
        return Ledger(bank_file(environ), resume=resume)
    except InputError as error:
        if environ.get(ROOT_VARIABLE) or type(error) is not InputError:
            raise
        ledger = Ledger(None, resume=resume)
        ledger.warnings.append(f"{error}; tuning goes on, results are not stored in the bank")
        return ledger


class Status(IntEnum):
    """What a call returns. Names and numbers as published where they are; the rest are ours."""

    AOE_SUCCESS = 0
    AOE_FAILURE = -1
    AOE_ERROR_NON_OPTIMIZE_GRAPH = 100
    """The graph has nothing to tune."""
    NOT_INITIALIZED = 101
    NO_SESSION = 102
    NO_GRAPH = 103
    ALREADY_INITIALIZED = 104
    WRONG_OPTION = 301
    REPEATED_GRAPH = 401
    COMPILER_ERROR = 2000
    VALUES_DIFFER = 3000


class SessionError(AscendLabError):
    """A call came in the wrong order or with wrong options; `status` says which."""

    def __init__(self, status: Status, needed: str, got: str = "", remedy: str = "") -> None:
        """Build the message as every error here does."""
        super().__init__(f"{status.name} ({status.value}): {needed}", got, remedy)
        self.status = status


@dataclass
class _Session:
    graph: Graph | None = None
    inputs: Mapping[str, Any] | None = None
    tuning: Tuning | None = None


OPTIONS = ("chip", "job_type", "settings", "bank", "executor", "dtype", "wanted", "progress")
"""What `initialize` and `tuning_graph` take; see `engine.tune`."""
_SESSIONS: dict[int, _Session] = {}
_STATE: dict[str, Any] = {"options": None, "next": 0}


def initialize(options: Mapping[str, Any] | None = None) -> Status:
    """Begin; `options` hold for all sessions."""
    if _STATE["options"] is not None:
        status = Status.ALREADY_INITIALIZED
        raise SessionError(status, "one initialize", "a second one", "call finalize before")
    _STATE["options"] = _checked(options or {})
    return Status.AOE_SUCCESS


def create_session() -> int:
    """Return the number of a new session."""
    if _STATE["options"] is None:
        raise SessionError(Status.NOT_INITIALIZED, "initialize first", "create_session")
    _STATE["next"] += 1
    _SESSIONS[_STATE["next"]] = _Session()
    return int(_STATE["next"])


def set_tuning_graph(session_id: int, graph: Graph) -> Status:
    """Give a session the graph to tune: one only."""
    session = _session(session_id)
    if session.graph is not None:
        remedy = "create another session for it"
        raise SessionError(Status.REPEATED_GRAPH, "one graph a session", "a second one", remedy)
    session.graph = graph
    return Status.AOE_SUCCESS


def set_tuning_graph_input(session_id: int, inputs: Mapping[str, Any]) -> Status:
    """Give arrays by input name: the tuned network is then run on them and its values compared."""
    _with_graph(session_id).inputs = dict(inputs)
    return Status.AOE_SUCCESS


def tuning_graph(session_id: int, options: Mapping[str, Any] | None = None) -> Status:
    """Tune; `options` go before those of `initialize`. `tuning_of` returns what was found.

    Returns AOE_SUCCESS, AOE_ERROR_NON_OPTIMIZE_GRAPH if the graph has nothing to tune,
    COMPILER_ERROR if it does not compile, VALUES_DIFFER if the inputs given yield other values.
    """
    from ascend_lab.aoe.engine import tune

    session = _with_graph(session_id)
    assert session.graph is not None
    given = {"chip": "Ascend910A", "job_type": "2", **_STATE["options"], **_checked(options or {})}
    job = given.pop("job_type")
    try:
        session.tuning = tune(session.graph, job=job, **given)
    except InputError as error:
        status = Status.WRONG_OPTION
        raise SessionError(status, error.needed, error.got, error.remedy) from error
    except AscendLabError:
        return Status.COMPILER_ERROR
    if session.inputs is not None and not _same_values(session, given.get("dtype", "fp16")):
        return Status.VALUES_DIFFER
    found = session.tuning.operators
    if session.tuning.subgraph is None and not (
        found and any(r.operator.unit for r in found.results)
    ):
        return Status.AOE_ERROR_NON_OPTIMIZE_GRAPH
    return Status.AOE_SUCCESS


def tuning_of(session_id: int) -> Tuning:
    """Return what `tuning_graph` found."""
    tuning = _session(session_id).tuning
    if tuning is None:
        raise SessionError(Status.NO_GRAPH, "tuning_graph first", "tuning_of")
    return tuning


def destroy_session(session_id: int) -> Status:
    """Forget a session."""
    _session(session_id)
    del _SESSIONS[session_id]
    return Status.AOE_SUCCESS


def finalize() -> Status:
    """End; sessions that are left are destroyed."""
    if _STATE["options"] is None:
        raise SessionError(Status.NOT_INITIALIZED, "initialize first", "finalize")
    _SESSIONS.clear()
    _STATE["options"] = None
    return Status.AOE_SUCCESS


def _session(session_id: int) -> _Session:
    if _STATE["options"] is None:
        raise SessionError(Status.NOT_INITIALIZED, "initialize first", f"session {session_id}")
    if session_id not in _SESSIONS:
        known = ", ".join(map(str, _SESSIONS)) or "none"
        raise SessionError(Status.NO_SESSION, f"a session among {known}", str(session_id))
    return _SESSIONS[session_id]


def _with_graph(session_id: int) -> _Session:
    session = _session(session_id)
    if session.graph is None:
        raise SessionError(Status.NO_GRAPH, "set_tuning_graph first", f"session {session_id}")
    return session


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        needed = f"options among {', '.join(OPTIONS)}"
        raise SessionError(Status.WRONG_OPTION, needed, ", ".join(unknown), "drop them")
    if not isinstance(options.get("settings", Settings()), Settings):
        raise SessionError(Status.WRONG_OPTION, "settings as a Settings", "something else")
    return dict(options)


def _same_values(session: _Session, dtype: str) -> bool:
    """Tell whether the tuned network computes what the default one does, on the inputs given."""
    from ascend_lab.aoe.values import TOLERANCE
    from ascend_lab.graph import compile_graph, run_tasks

    assert session.graph is not None and session.inputs is not None and session.tuning is not None
    chip = session.tuning.compiled.chip
    default = run_tasks(compile_graph(session.graph, chip, dtype=dtype), session.inputs)
    tuned = run_tasks(session.tuning.compiled, session.inputs)
    for wanted, got in zip(default.values(), tuned.values(), strict=True):
        a, b = wanted.astype(np.float64), got.astype(np.float64)
        limit = TOLERANCE.get(str(wanted.dtype).replace("float", "fp"), 0.0)
        if not np.abs(a - b).max(initial=0.0) <= limit * max(1.0, np.abs(a).max(initial=0.0)):
            return False
    return True
