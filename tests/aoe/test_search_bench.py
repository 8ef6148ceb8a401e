"""The comparison of searches: how curves are counted, and how it talks to other tuners."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import search_cases as cases

from ascend_lab.aoe.search import SEARCHES
from ascend_lab.data import data_path
from bench import search as bench
from bench.peers import Peer, PeerSkippedError
from bench.search import _TALK

SPACE = cases.table()
CASE = ("small", SPACE, np.array([cases.cost(point) for point in SPACE.points()]))
PLAYER = """
def run(seed):
    sizes = about["sizes"]
    for i in range(seed, 10**6):
        ask([i % sizes[0], i // sizes[0] % sizes[1], i // sizes[0] // sizes[1] % sizes[2]])
runs(run)
"""
QUITTER = "def run(seed):\n    ask([0, 0, 0])\nruns(run)\n"
STUCK = "def run(seed):\n    while True:\n        ask([0, 0, 0])\nruns(run)\n"


def run_program(program: str, budget: int, seeds=(0, 1)) -> bench.Result:
    peer = Peer("Player", (), 0, "", _TALK + program)
    return bench.run_peer(CASE, peer, Path(sys.executable), budget, seeds)


def test_a_peer_is_charged_for_new_legal_points_only():
    found = run_program(PLAYER, 1000)
    assert found.curves.shape == (2, 1000) and (found.curves[:, SPACE.size :] == 1).all()
    assert (np.diff(found.curves) <= 0).all() and found.curves[0, 0] > 1
    few = run_program(PLAYER, 5)
    assert few.curves.shape == (2, 5) and (few.curves == found.curves[:, :5]).all()


@pytest.mark.parametrize("program", [QUITTER, STUCK])
def test_a_peer_that_gives_up_or_repeats_itself_stays_where_it_is(program):
    found = run_program(program, 6)
    first = cases.cost(SPACE.point(0)) / cases.optimum(SPACE)
    assert (found.curves == first).all() and found.curves.shape == (2, 6)


def test_a_peer_that_dies_is_reported():
    with pytest.raises(RuntimeError, match="Player on small ended before its time"):
        run_program("sys.exit(3)", 5)


def test_curves_of_ours_and_the_table():
    results = [
        bench.run_ours(CASE, name, SEARCHES[name], 100, range(3)) for name in ("random", "mcts")
    ]
    for found in results:
        assert found.mean(100) == found.at(500).max() == 1.0 and found.mean(1) > 1.0
    text = bench.table(results, 100)
    assert text.splitlines()[0].split() == ["geometric", "mean", "after", "50", "100"]
    assert {row.split()[0] for row in text.splitlines()[1:]} == {"random", "mcts"}


def test_curve_and_mean():
    assert bench.curve([math.inf, 4.0, 6.0, 2.0], 6, 2.0) == [math.inf, 2.0, 2.0, 1.0, 1.0, 1.0]
    assert bench.curve([4.0, 2.0], 1, 2.0) == [2.0]
    assert bench.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)


def test_the_report_skips_peers_that_cannot_be_installed(tmp_path, capsys, monkeypatch):
    def none(peer, folder):
        raise PeerSkippedError(f"{peer.name} cannot be installed here")

    monkeypatch.setattr(bench, "environment", none)
    monkeypatch.setattr(bench, "NAMES", ("random", "genetic"))
    assert bench.report([CASE], 20, 2, json_file=str(tmp_path / "r.json")) == 0
    printed = capsys.readouterr().out
    assert "skipped: Optuna" in printed and "skipped: KernelTuner" in printed
    rows = json.loads((tmp_path / "r.json").read_text())
    assert [r["search"] for r in rows] == ["random", "genetic", *bench.PLAIN]
    assert all(len(r["mean"]) == 20 for r in rows)


def test_the_recorded_spaces_are_cases():
    folder = data_path("autotune_bruteforce/README.md").parent
    found = bench.recorded_cases(folder)
    assert [case[0] for case in found] == ["conv2d_A100", "dedispersion_MI250X", "gemm_RTX_3090"]
    assert all(len(costs) == space.size for _, space, costs in found)
