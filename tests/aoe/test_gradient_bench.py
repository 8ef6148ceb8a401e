"""What `lab.py bench` says of the gradient tuner, on small cases."""

from functools import partial
from pathlib import Path

from test_gradient_tuning import Counting, network

from ascend_lab.aoe.gradient import BASELINES
from ascend_lab.aoe.gradient.tuning import tune_gradients
from bench import gradient as bench_gradient
from bench.gradient import beyond, chain, exact_cases, line_of, plan_s, row_of, tuned


def test_small_cases_are_exact_and_searched() -> None:
    assert exact_cases(12) == 0
    plan_gap, search_gap = beyond(cases=2, count=6)
    assert 0 <= search_gap <= min(0.01, plan_gap)
    assert plan_s(20, 4) > 0
    assert sum(row.size_bytes for row in chain(50)) > 4.9e8


def test_a_row_of_the_table_has_a_gain_for_every_baseline(monkeypatch, tmp_path: Path) -> None:
    ask = Counting()
    monkeypatch.setattr(bench_gradient, "NETWORKS", {"small": 4})
    monkeypatch.setattr(bench_gradient, "CLUSTERS", ("star", "ring"))
    monkeypatch.setattr(bench_gradient, "SIZES", (4, 8))
    monkeypatch.setattr(bench_gradient.zoo, "build", lambda name, batch: network(batch, name))
    with_fake = partial(tune_gradients, profiler=ask)
    monkeypatch.setattr(bench_gradient, "tune_gradients", with_fake)
    rows = [row_of(where, found) for where, found in tuned(["small"], tmp_path / "p.db")]
    assert [row["cluster"] for row in rows] == ["star:4", "star:8", "ring:4", "ring:8"]
    assert ask.asked == 1
    for row in rows:
        assert set(row["gains"]) == set(BASELINES)
        assert min(row["gains"].values()) >= -1e-9
        assert row["hccl_loss"] >= -1e-9
        assert "small" in line_of(row)
