"""Job 4: from a model to a plan, with the profile from the bank where it is known."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_lab.aoe.bank import BankEntry, Knowledge, Store
from ascend_lab.aoe.gradient import AlphaBeta
from ascend_lab.aoe.gradient.tuning import (
    cluster_cost,
    key_of_profile,
    known_profile,
    profiled,
    section,
    tune_gradients,
    tuning_text,
)
from ascend_lab.chip import load_chip
from ascend_lab.cli import aoe
from ascend_lab.cluster import collective_time, load_topology
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.graph import Graph, GraphBuilder

CHIP = load_chip("Toy")


def network(batch: int = 4, name: str = "net") -> Graph:
    """Return a network of two layers, the nodes named after it."""
    net = GraphBuilder(name)
    x = net.input(f"{name}_x", (batch, 16), "fp16")
    net.output(net.relu(net.matmul(x, net.constant(np.zeros((16, 8), np.float16)))))
    return net.build()


@dataclass(frozen=True)
class Row:
    name: str
    ready_s: float
    size_bytes: int


@dataclass(frozen=True)
class Step:
    forward_s: float
    backward_s: float
    update_s: float
    gradients: tuple[Row, ...]


class Counting:
    """A profiler that counts how often it is asked."""

    def __init__(self, count: int = 12) -> None:
        rows = tuple(Row(f"w{i}", 1e-4 * (i + 1), 100_000 * (i + 1)) for i in range(count))
        self.step, self.asked = Step(5e-4, 1.3e-3, 1e-4, rows), 0

    def __call__(self, graph: Graph, chip: Any, **settings: Any) -> Step:
        self.asked += 1
        return self.step


def test_a_new_cluster_is_planned_without_profiling_again(tmp_path: Path) -> None:
    ask = Counting()
    with Knowledge(tmp_path / "b.db", None) as bank:
        first = tune_gradients(network(), CHIP, "star:8", knowledge=bank, profiler=ask)
        assert (first.outcome, ask.asked) == ("add", 1)
    with Knowledge(tmp_path / "b.db", None) as bank:  # another run, another size of cluster
        second = tune_gradients(network(), CHIP, "star:32", knowledge=bank, profiler=ask)
        assert (second.outcome, ask.asked) == ("hit", 1)
        assert second.profile == first.profile
        assert second.plan.end_s > first.plan.end_s
        again = tune_gradients(network(), CHIP, "star:8", knowledge=bank, profiler=ask, repeat=True)
        assert (again.outcome, ask.asked) == ("reserved", 2)
        assert again.plan == first.plan


def test_the_key_is_of_network_batch_chip_and_training() -> None:
    key = key_of_profile(network(), CHIP, "dtype=fp16")
    assert key == key_of_profile(network(name="other"), CHIP, "dtype=fp16")
    others = {
        key_of_profile(network(5), CHIP, "dtype=fp16"),
        key_of_profile(network(), load_chip("Ascend910A"), "dtype=fp16"),
        key_of_profile(network(), CHIP, "dtype=bf16"),
    }
    assert len(others | {key}) == 4


def test_profiles_travel_with_the_bank(tmp_path: Path, capsys: Any) -> None:
    ask, settings = Counting(), {"dtype": "bf16"}
    with Knowledge(tmp_path / "a.db", None) as bank:
        found, _ = profiled(network(), CHIP, bank, profiler=ask, settings=settings)
        assert {row.dtype for row in found.gradients} == {"bf16"}
    lines, other = tmp_path / "a.jsonl", tmp_path / "b.db"
    assert aoe(["bank", "export", str(lines), "--bank", str(tmp_path / "a.db")]) == 0
    assert aoe(["bank", "import", str(lines), "--bank", str(other)]) == 0
    assert aoe(["bank", "list", "--bank", str(other)]) == 0
    assert "training" in capsys.readouterr().out
    with Knowledge(other, None) as bank:
        again, outcome = profiled(network(), CHIP, bank, profiler=ask, settings=settings)
        assert (again, outcome, ask.asked) == (found, "hit", 1)


def test_an_entry_that_is_no_profile_is_profiled_anew(tmp_path: Path) -> None:
    key = key_of_profile(network(), CHIP, "")
    with Store(tmp_path / "b.db") as store:
        store.put(BankEntry(key, {"times_s": 3}, 1, 1, None, False, "", 0, 1, "", ""))
    with Knowledge(tmp_path / "b.db", None) as bank:
        assert known_profile(bank, key) is None
        ask = Counting()
        found, outcome = profiled(network(), CHIP, bank, profiler=ask)
        assert (len(found.gradients), outcome, ask.asked) == (12, "reserved", 1)


def test_a_step_is_forward_backward_or_the_exchange_and_update() -> None:
    found = tune_gradients(
        network(), CHIP, "star:4", profiler=Counting(), cost=AlphaBeta(1e-4, 1e-10)
    )
    assert found.single_s == pytest.approx(1.9e-3)
    assert found.step_s() == pytest.approx(6e-4 + found.plan.end_s)
    assert found.step_s("per_layer") >= found.step_s()
    assert found.gain("hccl_default") >= 0
    assert 0 < found.scaling < 1
    assert found.bound_s <= found.plan.end_s
    assert len(found.plan.segments) <= 8
    free = tune_gradients(
        network(), CHIP, "star:4", max_segments=None, profiler=Counting(), cost=lambda n: 0.0
    )
    assert free.scaling == 1.0


def test_all_reduces_cost_what_the_cluster_takes() -> None:
    topology = load_topology("910a-roce:16")
    table = cluster_cost(topology, 2e7)
    for size in (3e3, 7e4, 1.1e6, 2e7):
        exact = collective_time("all_reduce", topology, size).time_s
        assert table(size) == pytest.approx(exact, rel=0.1)
    found = tune_gradients(network(), CHIP, topology, profiler=Counting())
    assert found.cost_error < 0.1
    assert tune_gradients(network(), CHIP, "star:1", profiler=Counting()).scaling == 1.0


def test_the_report_has_the_published_fields_and_text() -> None:
    found = tune_gradients(network(), CHIP, "ring:16", profiler=Counting())
    data = json.loads(json.dumps(section(found), allow_nan=False))
    assert set(data) == {"basic", "GDAT", "ascend_lab"}
    own = data["ascend_lab"]
    assert own["devices"] == 16
    assert own["optimal"] is True
    assert own["segments"][-1][1] == 11
    assert own["gradient_bytes"] == sum(100_000 * (i + 1) for i in range(12))
    before = data["GDAT"]["model_baseline_performance(ms)"]
    assert before >= data["GDAT"]["model_result_performance(ms)"]
    text = "\n".join(tuning_text(found))
    assert "optimal (among splits into at most 8 segments)" in text
    assert "(breaks the limit: not among splits into at most 8 segments)" in text
    (marked,) = [line for line in text.splitlines() if "(= before)" in line]
    assert marked.split()[0] == "hccl_default"
    assert "needs no search, for any number of segments" in text
    for word in ("16 devices", "gdat process finished", "optimal", "set_split_strategy_by_idx"):
        assert word in text


def test_a_network_without_parameters_has_nothing_to_send() -> None:
    with pytest.raises(InputError, match="parameters to train"):
        tune_gradients(network(), CHIP, "star:2", profiler=Counting(0))
    with pytest.raises(AscendLabError, match="topology"):
        tune_gradients(network(), CHIP, "moon:2", profiler=Counting())


# -- the command -----------------------------------------------------------------------------------


def run(capsys: Any, *words: object) -> tuple[int, str, str]:
    code = aoe([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_tunes_and_reports(capsys: Any, small: Path, tmp_path: Path) -> None:
    words = ("-j", "4", "-m", small, "--output", tmp_path, "--cluster", "910a-roce")
    code, out, err = run(capsys, *words, "--devices", "16")
    assert (code, err) == (0, "")
    assert "16 devices of 910a-roce:16" in out
    assert "profile: add" in out
    (report,) = tmp_path.glob("aoe_result_gdat_*.json")
    (found,) = json.loads(report.read_text("utf-8"))
    assert found["basic"]["tuning_name"] == small.stem
    code, out, _ = run(capsys, *words, "--devices", "64", "--max_segments", "1")
    assert code == 0
    assert "profile: hit" in out
    assert "in 1 segments" in out


BAD = {
    "cluster": (["-j", "4"], "`ascend-lab topologies` lists them"),
    "together": (["-j", "2,4", "--cluster", "star:4"], "by itself"),
    "other job": (["-j", "2", "--cluster", "star:4"], "--cluster only with --job_type 4"),
    "devices": (["-j", "4", "--cluster", "star", "--devices", "0"], "--devices of at least 1"),
    "twice": (["-j", "4", "--cluster", "star:4", "--devices", "8"], "--devices 4, as --cluster"),
    "unknown": (["-j", "4", "--cluster", "moon"], "a topology by name"),
    "unknown size": (["-j", "4", "--cluster", "moon", "--devices", "8"], "a topology by name"),
    "fixed": (["-j", "4", "--cluster", "910a-server", "--devices", "4"], "910a-server"),
    "segments": (["-j", "4", "--cluster", "star:4", "--max_segments", "-2"], "at least 1 segment"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_calls_are_one_line(capsys: Any, small: Path, tmp_path: Path, case: str) -> None:
    words, message = BAD[case]
    code, _, err = run(capsys, *words, "-m", small, "--output", tmp_path)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_a_chip_that_the_cluster_has_not_is_said(capsys: Any, small: Path, tmp_path: Path) -> None:
    words = ("-j", "4", "-m", small, "--output", tmp_path, "--cluster", "910a-roce:2")
    code, _, err = run(capsys, *words, "--soc_version", "Ascend310")
    assert code == 0
    assert err.count("\n") == 1
    assert "warning: the devices of 910a-roce:2 are Ascend910A, --soc_version is Ascend310" in err


def test_single_operators_are_not_trained(capsys: Any, tmp_path: Path) -> None:
    words = ("-j", "4", "--cluster", "star:4", "--singleop", tmp_path / "op.json")
    code, _, err = run(capsys, *words)
    assert code == 2
    assert "--model or --model_path for job 4" in err


def test_the_number_of_a_fixed_cluster_may_be_said(
    capsys: Any, small: Path, tmp_path: Path
) -> None:
    words = ("-j", "4", "--cluster", "910a-server", "--devices", "8", "--output", tmp_path)
    code, out, _ = run(capsys, *words, "-m", small)
    assert code == 0
    assert "8 devices of 910a-server" in out
