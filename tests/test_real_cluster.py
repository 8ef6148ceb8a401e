"""The check on real processes: its fit, its small model, and that nothing is left running."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench import real_cluster, real_worker
from bench.real_cluster import RealClusterError, backend_here, report, run, text_of
from bench.real_worker import READY_BYTES, Floats, Model, measure, medians_s

ALPHA_S = 1e-4
BETA_S_PER_BYTE = 1e-9
RANKS = 4


def ring_s(size_bytes: float) -> float:
    return 2 * (RANKS - 1) * (ALPHA_S + size_bytes / RANKS * BETA_S_PER_BYTE)


def alone(values: Floats, kind: str) -> None:
    """An all-reduce among one rank."""
    assert kind in ("sum", "max")


def test_without_a_library_it_is_skipped_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real_cluster, "backend_here", lambda: None)
    assert real_cluster.main([]) == 0
    said = capsys.readouterr().out
    assert "skipped" in said
    assert "pip install torch" in said
    assert "pip install mpi4py" in said


def test_which_library_is_taken() -> None:
    def has(*names: str) -> Callable[[str], object]:
        return lambda name: name if name in names else None

    assert backend_here(has("torch", "mpi4py"), lambda name: name) == "torch"
    assert backend_here(has("mpi4py"), lambda name: name) == "mpi"
    assert backend_here(has("mpi4py"), lambda name: None) is None
    assert backend_here(has(), lambda name: name) is None


@pytest.mark.parametrize("words", [["--ranks", "1"], ["--ranks", "99"], ["--time-limit", "nan"]])
def test_bad_arguments_are_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert real_cluster.main(words) == 2
    assert capsys.readouterr().err.startswith("real-cluster: --")


def test_the_step_is_computing_and_the_law_for_every_bucket() -> None:
    found = {
        "rows": [[2**k, ring_s(2**k)] for k in range(12, 24)],
        "compute_s": 0.01 + ring_s(READY_BYTES),
        "steps": [
            {"buckets_bytes": [10**6, 2 * 10**6], "time_s": 0.02},
            {"buckets_bytes": [3 * 10**6], "time_s": 0.01},
        ],
    }
    result = report("torch", RANKS, found)
    (band,) = result.fit.bands
    assert band.alpha_s == pytest.approx(ALPHA_S)
    assert band.beta_s_per_byte == pytest.approx(BETA_S_PER_BYTE)
    assert result.compute_s == pytest.approx(0.01)
    two, one = result.steps
    assert two.predicted_s == pytest.approx(0.01 + ring_s(1e6) + ring_s(2e6))
    assert one.predicted_s == pytest.approx(0.01 + ring_s(3e6))
    assert two.error == pytest.approx(two.predicted_s / 0.02 - 1)
    text = text_of(result)
    assert "alpha 100.0 us" in text
    assert f"{two.error:+.1%}" in text


def test_buckets_cover_the_gradients_in_order_and_close_when_full() -> None:
    model = Model(0)
    for cap in real_worker.CAPS_BYTES:
        buckets = model.buckets(cap)
        assert [b.start for b in buckets] == [0, *(b.stop for b in buckets[:-1])]
        assert buckets[-1].stop == len(model.flat)
        assert all((b.stop - b.start) * 4 >= cap for b in buckets[:-1])
    counts = [len(model.buckets(cap)) for cap in real_worker.CAPS_BYTES]
    assert counts == [6, 3, 1]


def test_gradients_are_those_of_differences() -> None:
    model = Model(0)
    model.backward()
    last = model.weights[-1]
    place = (7, 3)
    loss = []
    for nudge in (-1e-2, 1e-2):
        moved = last.copy()
        moved[place] += nudge
        hidden = model.x
        for weight in model.weights[:-1]:
            hidden = np.maximum(hidden @ weight, 0)
        error = (hidden @ moved - model.target).astype(np.float64)
        loss.append(float((error**2).sum()) / 2 / len(error))
    got = model.flat[: last.size].reshape(last.shape)[place]
    assert got == pytest.approx((loss[1] - loss[0]) / 2e-2, rel=1e-3)


def test_every_bucket_is_reduced_once_and_a_wrong_sum_is_found() -> None:
    sent: list[int] = []

    def twice(values: Floats, kind: str) -> None:
        sent.append(values.size)
        values *= 2

    model = Model(0)
    for cap in real_worker.CAPS_BYTES:
        sent.clear()
        model.check(twice, model.buckets(cap))
        assert sum(sent) == 2 * len(model.flat)

    def broken(values: Floats, kind: str) -> None:
        if values.size < len(model.flat):
            values *= 3

    with pytest.raises(RuntimeError, match="disagree"):
        model.check(broken, model.buckets(0))


def test_one_rank_measures_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_worker, "REPEATS", 3)
    monkeypatch.setattr(real_worker, "WARM_UP", 1)
    found = measure(alone, 0)
    assert [size for size, _ in found["rows"]] == list(real_worker.SIZES_BYTES)
    assert [len(step["buckets_bytes"]) for step in found["steps"]] == [6, 3, 1]
    assert found["compute_s"] > 0
    runs: list[int] = []
    (took,) = medians_s(alone, [lambda: runs.append(1)])
    assert len(runs) == 4
    assert took >= 0


# -- processes ------------------------------------------------------------------------------------
def start_instead(monkeypatch: pytest.MonkeyPatch, *programs: str) -> None:
    """Let `run` start these programs in place of the workers."""
    commands = [[sys.executable, "-c", program] for program in programs]
    monkeypatch.setattr(real_cluster, "_commands", lambda *_: commands)


def test_a_worker_that_fails_ends_the_others_and_is_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pids = tmp_path / "pid"
    sleeper = f"import os, time, pathlib; pathlib.Path({str(pids)!r}).write_text(str(os.getpid()))"
    start_instead(
        monkeypatch,
        f"{sleeper}; time.sleep(600)",
        f"import pathlib, time\nwhile not pathlib.Path({str(pids)!r}).exists(): time.sleep(0.01)\n"
        "raise SystemExit('no such interface')",
    )
    with pytest.raises(RealClusterError, match="no such interface"):
        run("torch", 2, 60.0)
    assert_gone(int(pids.read_text() or 0))


def assert_gone(pid: int) -> None:
    """Fail if the process still runs (its parent has waited for it)."""
    import os

    if os.name == "nt":
        return
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_time_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    start_instead(monkeypatch, "import time; time.sleep(600)")
    with pytest.raises(RealClusterError, match=r"--time-limit"):
        run("torch", 1, 0.2)


def test_what_rank_0_wrote_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []

    def commands(backend: str, ranks: int, folder: str, limit_s: float) -> list[list[str]]:
        seen.append(folder)
        told = (
            '{"rows": [[1000, 1e-4], [100000, 2e-4]], "compute_s": 1, '
            '"steps": [{"buckets_bytes": [1000], "time_s": 2}]}'
        )
        program = f"import pathlib; pathlib.Path({folder!r}, 'result.json').write_text({told!r})"
        return [[sys.executable, "-c", program], [sys.executable, "-c", "pass"]]

    monkeypatch.setattr(real_cluster, "_commands", commands)
    result = run("torch", 2, 60.0)
    assert [row.time_s for row in result.rows] == [1e-4, 2e-4]
    assert not Path(seen[0]).exists()


def test_workers_stay_on_this_machine() -> None:
    environment = real_cluster._environment()
    assert environment["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert environment["OMPI_MCA_btl_tcp_if_include"] in ("lo", "lo0")
    commands = real_cluster._commands("torch", 3, "folder", 60.0)
    assert len(commands) == 3
    assert len(real_cluster._commands("mpi", 3, "folder", 60.0)) == 1
