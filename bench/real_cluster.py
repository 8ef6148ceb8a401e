"""Collectives for real: `python3 lab.py real-cluster` starts processes on this machine.

They all-reduce over the loopback interface (PyTorch's gloo, or MPI), alpha and beta are fitted to
what that took, and the step of a small model with its gradients in buckets is predicted:

    step = computing, measured alone + sum over buckets of 2 (p - 1) alpha + 2 (p - 1) / p n beta

Nothing overlaps: the processor that computes is the one that sends. Skipped, with a message, where
neither library is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ascend_lab.cluster.fit import CollectiveFit, Measured, fit_collective, held_out, mape
from ascend_lab.errors import AscendLabError, InputError
from bench.real_worker import READY_BYTES, Settings

MISSING = (
    "real-cluster: skipped, neither PyTorch nor mpi4py with mpiexec is installed. Either will do:\n"
    "  .venv/bin/python -m pip install torch     (large), or\n"
    "  .venv/bin/python -m pip install mpi4py    and an MPI (Debian: sudo apt install openmpi-bin)"
)
POLL_S = 0.05
GRACE_S = 3.0
MAX_RANKS = 16
LONGEST_S = 3600.0


class RealClusterError(AscendLabError):
    """The processes on this machine did not do what they were started for."""


@dataclass(frozen=True, slots=True)
class Step:
    """The model's step with its gradients in these buckets, predicted and measured."""

    buckets_bytes: tuple[int, ...]
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured and what the fit says of it."""

    backend: str
    ranks: int
    rows: tuple[Measured, ...]
    fit: CollectiveFit
    held_out_mape: float | None
    compute_s: float
    steps: tuple[Step, ...]


def backend_here(
    find_spec: Callable[[str], object] = importlib.util.find_spec,
    which: Callable[[str], str | None] = shutil.which,
) -> str | None:
    """Return "torch", "mpi" or, where neither is installed, None."""
    if find_spec("torch") is not None:
        return "torch"
    if find_spec("mpi4py") is not None and which("mpiexec"):
        return "mpi"
    return None


def run(backend: str, ranks: int = 4, limit_s: float = 120.0) -> Report:
    """Start the processes, measure, fit, predict.

    Raises `RealClusterError` if one fails or time runs out; no process outlives this call.
    """
    with tempfile.TemporaryDirectory(prefix="ascend-lab-") as folder:
        found = _measured(backend, ranks, folder, limit_s)
    return report(backend, ranks, found)


def report(backend: str, ranks: int, found: dict[str, Any]) -> Report:
    """Fit what the workers measured and predict their steps."""
    rows = tuple(Measured(size, ranks, seconds) for size, seconds in found["rows"])
    fit = fit_collective(rows)
    cost = fit.cost(ranks)
    compute_s = max(0.0, float(found["compute_s"]) - cost(READY_BYTES))
    steps = []
    for step in found["steps"]:
        buckets = tuple(step["buckets_bytes"])
        steps.append(Step(buckets, compute_s + sum(map(cost, buckets)), float(step["time_s"])))
    return Report(backend, ranks, rows, fit, mape(held_out(rows)), compute_s, tuple(steps))


# -- processes ------------------------------------------------------------------------------------
def _measured(backend: str, ranks: int, folder: str, limit_s: float) -> dict[str, Any]:
    with Path(folder, "errors").open("w+", encoding="utf-8") as errors:
        commands = _commands(backend, ranks, folder, limit_s)
        with _processes(commands, errors) as started:
            _wait(started, limit_s)
        errors.seek(0)
        said = [line for line in errors.read().splitlines() if any(map(str.isalpha, line))]
    if any(process.returncode for process in started):
        got = said[-1] if said else f"exit codes {[p.returncode for p in started]}"
        raise RealClusterError(
            f"{ranks} processes that all-reduce by {backend}", got, "correct that"
        )
    text = Path(folder, "result.json").read_text("utf-8")
    return dict(json.loads(text))


def _commands(backend: str, ranks: int, folder: str, limit_s: float) -> list[list[str]]:
    """Return what to start: one command a rank, or MPI's launcher."""
    worker = [sys.executable, "-m", "bench.real_worker"]
    told = [asdict(Settings(backend, rank, ranks, folder, limit_s)) for rank in range(ranks)]
    if backend == "mpi":
        return [["mpiexec", "-n", str(ranks), *worker, json.dumps(told[0])]]
    return [[*worker, json.dumps(one)] for one in told]


def _start(command: Sequence[str], errors: Any) -> subprocess.Popen[bytes]:
    null = subprocess.DEVNULL
    return subprocess.Popen(command, env=_environment(), stdin=null, stdout=null, stderr=errors)


@contextlib.contextmanager
def _processes(
    commands: Sequence[Sequence[str]], errors: Any
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start processes; whatever happens, none is left when the block is over."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            process = _start(command, errors)
            started.append(process)
        yield started
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _environment() -> dict[str, str]:
    """Return the variables of the workers: loopback only, one thread each, this package."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": loopback,
        "OMPI_MCA_btl_tcp_if_include": loopback,
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }


def _wait(started: Sequence[subprocess.Popen[bytes]], limit_s: float) -> None:
    """Return when all are done or one has failed; raise `RealClusterError` when time is over."""
    deadline = time.monotonic() + limit_s
    while True:
        codes = [process.poll() for process in started]
        if any(codes) or None not in codes:
            return
        if time.monotonic() > deadline:
            what = f"all processes done within {limit_s:g} s"
            raise RealClusterError(
                what, f"{codes.count(None)} at work", "raise --time-limit or free the processor"
            )
        time.sleep(POLL_S)


# -- command line ---------------------------------------------------------------------------------
def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; return 0 (done or skipped), 1 (a process failed) or 2 (bad arguments)."""
    parser = argparse.ArgumentParser(prog="real-cluster", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--ranks", type=int, default=4, help="processes (4)")
    parser.add_argument(
        "--time-limit", type=float, default=120.0, metavar="S", help="seconds (120)"
    )
    arguments = parser.parse_args(argv)
    try:
        _check(arguments)
        backend = backend_here()
        if backend is None:
            print(MISSING)
            return 0
        print(text_of(run(backend, arguments.ranks, arguments.time_limit)))
    except AscendLabError as error:
        print(f"real-cluster: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if not 2 <= arguments.ranks <= MAX_RANKS:
        raise InputError(f"--ranks from 2 to {MAX_RANKS}", str(arguments.ranks))
    if not 0 < arguments.time_limit <= LONGEST_S:
        raise InputError(f"--time-limit up to {LONGEST_S:g} s", str(arguments.time_limit))


def text_of(found: Report) -> str:
    """Return the report as lines."""
    lines = [f"{found.ranks} processes on this machine, all-reduce by {found.backend} (loopback)"]
    lines.append("      bytes   measured       fit")
    for row in found.rows:
        says = found.fit.time_s(row.size_bytes, row.ranks)
        lines.append(f"  {row.size_bytes:9.0f} {row.time_s * 1e6:7.0f} us {says * 1e6:7.0f} us")
    for band in found.fit.bands:
        rate = 1e-9 / band.beta_s_per_byte if band.beta_s_per_byte else float("inf")
        span = f"{band.bytes_from:.0f} to {band.bytes_to:.0f} B"
        lines.append(f"  {span}: alpha {band.alpha_s * 1e6:.1f} us, 1/beta {rate:.2f} GB/s")
    if found.held_out_mape is not None:
        lines.append(f"  error on sizes left out: {found.held_out_mape:.1%}")
    lines.append(f"step of a small model: computing {found.compute_s * 1e3:.2f} ms, and")
    lines.append("  buckets  predicted   measured   error")
    lines += [_step_line(step) for step in found.steps]
    return "\n".join(lines)


def _step_line(step: Step) -> str:
    times = f"{step.predicted_s * 1e3:7.2f} ms {step.measured_s * 1e3:7.2f} ms"
    return f"  {len(step.buckets_bytes):7} {times}  {step.error:+.1%}"


if __name__ == "__main__":
    sys.exit(main())
