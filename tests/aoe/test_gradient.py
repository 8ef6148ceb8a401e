"""The gradient tuner: splits, scenarios, tuning and its bench."""

import json
import math
from collections import namedtuple

import numpy as np
import pytest
from gradient_cases import costs, profiles, rows_of, waiting_chain
from hypothesis import given, settings, strategies as st

from ascend_lab.aoe import gradient
from ascend_lab.aoe.bank import BankEntry, Knowledge, Store
from ascend_lab.aoe.gradient import (
    AlphaBeta,
    Gradient,
    Piecewise,
    ProfileSource,
    Scenario,
    end_of,
    evaluate,
    plan,
    profile_key,
    training_profile,
    tune_gradients,
)
from ascend_lab.aoe.gradient.planning import MIB, baseline, best_cap, by_cap, with_format_cuts
from ascend_lab.aoe.gradient.scenario import scorer
from ascend_lab.aoe.gradient.splits import all_splits, brute_force, end_s, price_of, table_of
from ascend_lab.cli import aoe
from ascend_lab.cluster import collective_time, load_topology
from ascend_lab.cluster.buckets import checked
from ascend_lab.compiler import GraphBuilder
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.machine.chip import load_chip

limits = st.one_of(st.none(), st.integers(1, 5))


@settings(max_examples=100)
@given(profiles(), costs(), limits)
def test_the_plan_is_as_good_as_the_best_of_all_splits(rows, cost, most):
    found = plan(rows, cost, most)
    table = table_of(rows)
    price = price_of(cost)
    _, end = brute_force(table, lambda split: end_s(table, price, split), most)
    assert found.end_s == pytest.approx(end, rel=1e-12)
    assert end_of(found.segments, rows, cost) == found.end_s
    assert most is None or len(found.segments) <= most


@settings(max_examples=100)
@given(profiles(formats=2), costs(), st.integers(1, 2000))
def test_formats_and_sizes_are_kept_apart(rows, cost, most_bytes):
    found = plan(rows, cost, max_bytes=most_bytes)
    table = table_of(rows, most_bytes)
    price = price_of(cost)
    _, end = brute_force(table, lambda split: end_s(table, price, split))
    assert found.end_s == pytest.approx(end, rel=1e-12)
    for first, last in found.segments:
        bucket = rows[first : last + 1]
        assert len({row.dtype for row in bucket}) == 1
        assert first == last or sum(row.size_bytes for row in bucket) <= most_bytes


@given(profiles(most=30, formats=2), costs(), st.one_of(st.none(), st.integers(30, 40)))
def test_no_baseline_within_the_limits_is_better(rows, cost, most):
    found = plan(rows, cost, most)
    assert set(found.baselines) == set(gradient.BASELINES)
    for name, end in found.baselines.items():
        assert name in found.over_limit or found.end_s <= end * (1 + 1e-12)
        assert found.gain(name) >= -1e-9 or name in found.over_limit
    assert not found.over_limit  # there are at most 30 buckets, and baselines cut at formats


@settings(max_examples=100)
@given(profiles(most=14), costs())
def test_the_bound_is_below_and_the_tail_above_zero(rows, cost):
    found = plan(rows, cost)
    assert gradient.bound(rows, cost) <= found.end_s * (1 + 1e-12)
    assert found.ready_s == max(row.ready_s for row in rows)
    assert found.tail_s >= 0


@given(profiles(most=12), costs())
def test_more_segments_are_never_worse(rows, cost):
    ends = [plan(rows, cost, most).end_s for most in range(1, len(rows) + 1)]
    assert ends == sorted(ends, reverse=True)
    assert ends[-1] == plan(rows, cost).end_s


@pytest.mark.parametrize(("count", "merged"), [(3, 12.8), (13, 21.8)])
def test_the_local_merge_rule_waits_for_ever(count, merged):
    """Each gradient is ready less than a startup after the one before, so all is merged."""
    found = plan(waiting_chain(count), AlphaBeta(1.0, 1.0))
    assert found.end_s == 12.0
    assert found.baselines["mg_wfbp"] == pytest.approx(merged)
    assert found.segments == ((0, 0), (1, count - 1))


def test_ties_are_broken_for_few_segments():
    rows = rows_of([0, 1, 2, 3, 100], [1] * 5)  # all but the last can be sent in many ways in time
    assert plan(rows, AlphaBeta(0.0, 1.0)).segments == ((0, 3), (4, 4))
    assert plan(rows, AlphaBeta(0.0, 0.0)).segments == ((0, 4),)


def test_one_gradient_and_gradients_without_bytes():
    assert plan(rows_of([2.0], [8]), AlphaBeta(1.0, 1.0)).segments == ((0, 0),)
    found = plan(rows_of([0, 1, 2], [0, 0, 0]), AlphaBeta(1.0, 1.0))
    assert (found.segments, found.end_s) == (((0, 2),), 3.0)
    assert plan(rows_of([0, 0], [0, 0]), AlphaBeta(0.0, 0.0)).gain("one_bucket") == 0.0


@settings(max_examples=100)
@given(profiles(most=8), costs())
def test_times_out_of_order_are_their_running_maximum(rows, cost):
    ready = np.maximum.accumulate([row.ready_s for row in rows]).tolist()
    ordered = rows_of(ready, [row.size_bytes for row in rows])
    assert plan(rows, cost).end_s == plan(ordered, cost).end_s
    assert gradient.splits.out_of_order(ordered) == 0
    late = sum(row.ready_s < high for row, high in zip(rows, ready, strict=True))
    assert gradient.splits.out_of_order(rows) == late


def test_baselines_split_as_their_rules_say():
    mib = [MIB] * 60
    table = table_of(rows_of([0.0] * 60, mib))
    cost = AlphaBeta(1.0, 0.0)
    assert baseline("ddp_25mb", table, cost) == ((0, 0), (1, 25), (26, 50), (51, 59))
    assert baseline("hccl_default", table, cost) == ((0, 57), (58, 59))  # 58 of 60 is 96.67 %
    assert baseline("one_bucket", table, cost) == ((0, 59),)
    assert len(baseline("per_layer", table, cost)) == 60
    assert by_cap(table, 1.5 * MIB)[:2] == ((0, 1), (2, 3))  # closed by the one that reaches it
    assert by_cap(table, 1)[:2] == ((0, 0), (1, 1))


def resnet50_bytes():
    """Return the bytes of ResNet-50's fp32 gradients, last registered first."""
    counts = [64 * 3 * 49, 64, 64]
    width = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for i, o, k in ((width, planes, 1), (planes, planes, 9), (planes, 4 * planes, 1)):
                counts += [i * o * k, o, o]
            if block == 0:
                counts += [width * 4 * planes, 4 * planes, 4 * planes]
            width = 4 * planes
    return [4 * n for n in reversed([*counts, 2048 * 1000, 1000])]


def test_ddp_buckets_of_resnet50_are_those_of_a_real_trace():
    """Sizes of a profiled DDP step (HolisticTraceAnalysis, tests/data/nccl_parser_config)."""
    sizes = resnet50_bytes()
    table = table_of(rows_of([0.0] * len(sizes), sizes))
    found = table.sizes_bytes(baseline("ddp_25mb", table, AlphaBeta(1.0, 1.0))).tolist()
    assert found == [8196000, 31502336, 26255360, 26550272, 9724160]


def test_gdat_fills_the_time_the_bucket_before_is_sent_in():
    rows = rows_of([0, 1, 2, 3, 4, 5], [1] * 6)
    found = plan(rows, AlphaBeta(0.0, 1.0))
    split = baseline("gdat", table_of(rows), AlphaBeta(0.0, 1.0))
    assert end_of(split, rows, AlphaBeta(0.0, 1.0)) == found.end_s == 6.0
    slow = rows_of([0, 100, 101], [1, 1, 1])
    assert baseline("gdat", table_of(slow), AlphaBeta(0.1, 1.0))[0] == (0, 0)


def test_the_best_threshold_is_the_best_of_its_grid():
    rng = np.random.default_rng(1)
    rows = rows_of(np.cumsum(rng.exponential(1, 40)).tolist(), rng.integers(1, 99, 40).tolist())
    table = table_of(rows)
    cost = AlphaBeta(2.0, 0.03)
    cap, split, end = best_cap(table, price_of(cost))
    grid = [end_s(table, price_of(cost), by_cap(table, c)) for c in np.geomspace(1, 4000, 20)]
    assert split == by_cap(table, cap)
    assert end <= min(grid) * 1.05
    assert end == plan(rows, cost).baselines["best_threshold"]


def test_baselines_above_the_limit_are_marked():
    rows = rows_of(range(10), [5] * 10)
    found = plan(rows, AlphaBeta(0.0, 0.1), 2)
    assert "per_layer" in found.over_limit
    assert found.baselines["per_layer"] < found.end_s
    assert "one_bucket" not in found.over_limit
    mixed = rows_of([0, 0], [1, 1], ["fp16", "fp32"])
    assert plan(mixed, AlphaBeta(1.0, 0.0)).baselines["one_bucket"] == 2.0
    with pytest.raises(InputError, match="at most 1 segments"):
        plan(mixed, AlphaBeta(1.0, 0.0), 1)
    assert with_format_cuts(table_of(mixed), ((0, 1),)) == ((0, 0), (1, 1))


def test_measured_tables_are_made_to_rise():
    table = Piecewise((1.0, 2.0, 4.0), (1.0, 5.0, 3.0))
    assert [table(x) for x in (0, 1, 2, 4, 8)] == [1.0, 1.0, 4.0, 4.0, 8.0]
    assert table(1.5) == 2.5
    line = gradient.sampled(AlphaBeta(1.0, 0.5), 1e6)
    assert line(12_345) == pytest.approx(1 + 0.5 * 12_345)
    assert line(0) == line(1) == 1.5


@settings(max_examples=100)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=12))
def test_a_table_never_falls(values):
    table = Piecewise(tuple(map(float, range(1, len(values) + 1))), tuple(values))
    found = table.many(np.linspace(0, 20, 101))
    assert np.all(np.diff(found) >= -1e-12)
    if values == sorted(values):
        assert table.many(np.arange(1.0, len(values) + 1)).tolist() == pytest.approx(values)


BAD = {
    "no rows": (lambda: plan((), AlphaBeta(1, 1)), "at least one gradient"),
    "nan": (lambda: rows_of([math.nan], [1]), "ready time"),
    "negative time": (lambda: rows_of([-1.0], [1]), "ready time"),
    "negative size": (lambda: rows_of([0.0], [-1]), "whole number of bytes"),
    "half a byte": (lambda: Gradient("g", 0.0, 0.5), "whole number of bytes"),  # type: ignore
    "infinite size": (lambda: Gradient("g", 0.0, math.inf), "whole number"),  # type: ignore
    "no segments": (lambda: plan(rows_of([0], [1]), AlphaBeta(1, 1), 0), "at least 1 segment"),
    "no bytes": (lambda: plan(rows_of([0], [1]), AlphaBeta(1, 1), max_bytes=0), "more than 0"),
    "alpha": (lambda: AlphaBeta(-1.0, 0.0), "alpha and beta"),
    "beta": (lambda: AlphaBeta(0.0, math.inf), "alpha and beta"),
    "cost": (lambda: plan(rows_of([0], [1]), lambda n: -1.0), "cost of at least 0"),
    "nan cost": (lambda: plan(rows_of([0], [1]), lambda n: math.nan), "cost of at least 0"),
    "no table": (lambda: Piecewise((), ()), "a time for each size"),
    "unordered": (lambda: Piecewise((2.0, 1.0), (1.0, 1.0)), "each above"),
    "table time": (lambda: Piecewise((1.0,), (-1.0,)), "times of at least 0"),
    "too many": (lambda: list(all_splits(40)), "to try all splits"),
    "gap": (lambda: checked([[0, 0], [2, 2]], 3), "that are gradients 0 to 2"),
    "short": (lambda: checked([[0, 1]], 3), "that are gradients 0 to 2"),
    "none": (lambda: checked([], 3), "that are gradients 0 to 2"),
    "backwards": (lambda: checked([[0, 2], [3, 1], [2, 2]], 3), "gradients 0 to 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_means_nothing_is_refused(case):
    action, message = BAD[case]
    with pytest.raises(InputError, match=message):
        action()


def test_all_splits_are_all_and_different():
    found = list(all_splits(6))
    assert len(set(found)) == len(found) == 32
    assert {len(s) for s in all_splits(6, 2)} == {1, 2}
    assert gradient.splits.split_at([0, 2]) == ((0, 0), (1, 2))


ONE = AlphaBeta(1.0, 1.0)


@settings(max_examples=100)
@given(profiles(), costs())
def test_undisturbed_it_is_what_the_plan_minimises(rows, cost):
    scenario = Scenario(cost)
    for split in list(all_splits(len(rows)))[:8]:
        assert evaluate(split, rows, scenario) == pytest.approx(end_of(split, rows, cost))


@settings(max_examples=100)
@given(profiles(), costs(), st.integers(1, 4), st.floats(0, 1))
def test_free_sharing_never_hurts_and_losses_never_help(rows, cost, streams, slowdown):
    split = tuple((i, i) for i in range(len(rows)))
    alone = evaluate(split, rows, Scenario(cost))
    free = evaluate(split, rows, Scenario(cost, streams=streams, sharing=0.0))
    assert free <= alone * (1 + 1e-9)
    slowed = evaluate(split, rows, Scenario(cost, slowdown=slowdown))
    assert slowed >= alone * (1 - 1e-9)


def test_two_streams_share_the_link_and_overlap_their_startups():
    rows = rows_of([0, 0], [10, 10])
    split = ((0, 0), (1, 1))
    assert evaluate(split, rows, Scenario(ONE)) == 22.0
    assert evaluate(split, rows, Scenario(ONE, streams=2)) == pytest.approx(21.0)
    half = evaluate(split, rows, Scenario(ONE, streams=2, sharing=0.5))
    assert half == pytest.approx(1 + 1.5 * 10)  # as measured: alpha + 1.5 beta n, both of them


def test_backward_is_slowed_while_something_is_sent():
    rows = rows_of([0, 10], [4, 0])
    split = ((0, 0), (1, 1))
    # 5 s of sending slow backward to half its pace: 2.5 s are lost
    assert evaluate(split, rows, Scenario(ONE, slowdown=1.0)) == pytest.approx(12.5 + 1)
    assert evaluate(((0, 1),), rows, Scenario(ONE, slowdown=1.0)) == pytest.approx(15.0)


def test_noise_is_drawn_from_the_seed_and_has_mean_one():
    rows = rows_of(np.arange(1.0, 400.0).tolist(), [0] * 399)
    split = ((0, 398),)
    still = Scenario(AlphaBeta(0.0, 0.0))
    noisy = Scenario(AlphaBeta(0.0, 0.0), noise=0.3, samples=20, seed=1)
    assert evaluate(split, rows, still) == 399.0
    assert evaluate(split, rows, noisy) == evaluate(split, rows, noisy)
    assert evaluate(split, rows, noisy) != 399.0
    assert evaluate(split, rows, noisy) == pytest.approx(399.0, rel=0.02)


how = st.integers(1, 3), st.floats(0, 1), st.floats(0, 0.5), st.sampled_from([0.0, 0.2]), st.just(3)
scenarios = st.builds(Scenario, costs(), *how)


@given(profiles(most=7), scenarios, st.one_of(st.none(), st.integers(1, 4)))
def test_the_search_is_never_worse_than_the_plan_nor_better_than_all(rows, scenario, most):
    found = gradient.improve(rows, scenario, max_segments=most, budget=200)
    planned = evaluate(plan(rows, scenario.cost, most).segments, rows, scenario)
    _, best = brute_force(table_of(rows), scorer(table_of(rows), scenario), most)
    assert best <= found.end_s * (1 + 1e-12)
    assert found.end_s <= found.start_s == planned
    assert found.end_s == evaluate(found.segments, rows, scenario)
    assert most is None or len(found.segments) <= most
    assert found.tried <= 200


def test_the_search_finds_the_best_of_small_cases():
    rng = np.random.default_rng(0)
    gaps = []
    gained = 0
    for _ in range(8):
        ready = np.cumsum(rng.exponential(1, 9))
        sizes = rng.lognormal(1, 1.5, 9).astype(int)
        rows = rows_of(ready.tolist(), sizes.tolist())
        scenario = Scenario(AlphaBeta(1.0, 0.2), streams=2, sharing=0.5, slowdown=0.3)
        found = gradient.improve(rows, scenario, budget=80)
        _, best = brute_force(table_of(rows), scorer(table_of(rows), scenario))
        gaps.append(found.end_s / best - 1)
        gained += found.gain > 0.01
    assert max(gaps) < 0.01
    assert gained >= 2  # the plan for one stream is not the best for two


def test_the_search_keeps_formats_apart_and_its_budget():
    rows = rows_of([0, 1, 2, 3], [5] * 4, ["fp16", "fp16", "fp32", "fp32"])
    found = gradient.improve(rows, Scenario(ONE, streams=2), budget=3)
    assert found.tried <= 3
    assert all(rows[first].dtype == rows[last].dtype for first, last in found.segments)
    again = gradient.improve(rows, Scenario(ONE, streams=2), budget=50)
    assert again == gradient.improve(rows, Scenario(ONE, streams=2), budget=50)


BAD_SCENARIOS = {
    "streams": lambda: Scenario(ONE, streams=0),
    "samples": lambda: Scenario(ONE, samples=0),
    "sharing": lambda: Scenario(ONE, sharing=-0.1),
    "slowdown": lambda: Scenario(ONE, slowdown=float("nan")),
    "noise": lambda: Scenario(ONE, noise=float("inf")),
    "budget": lambda: gradient.improve(rows_of([0], [1]), Scenario(ONE), budget=0),
    "split": lambda: evaluate([[0, 1]], rows_of([0], [1]), Scenario(ONE)),
}


@pytest.mark.parametrize("case", BAD_SCENARIOS)
def test_a_scenario_that_means_nothing_is_refused(case):
    with pytest.raises(InputError):
        BAD_SCENARIOS[case]()


CHIP = load_chip("Toy")


def network(batch=4, name="net"):
    """Return a network of two layers, the nodes named after it."""
    net = GraphBuilder(name)
    x = net.input(f"{name}_x", (batch, 16), "fp16")
    net.output(net.relu(net.matmul(x, net.constant(np.zeros((16, 8), np.float16)))))
    return net.build()


Row = namedtuple("Row", "name ready_s size_bytes")
Step = namedtuple("Step", "forward_s backward_s update_s gradients")


class Counting:
    """A profiler that counts how often it is asked."""

    def __init__(self, count=12):
        rows = tuple(Row(f"w{i}", 1e-4 * (i + 1), 100_000 * (i + 1)) for i in range(count))
        self.step = Step(5e-4, 1.3e-3, 1e-4, rows)
        self.asked = 0

    def __call__(self, graph, chip, **settings):
        self.asked += 1
        return self.step


def test_a_new_cluster_is_planned_without_profiling_again(tmp_path):
    ask = Counting()
    with Knowledge(tmp_path / "b.db", None) as bank:
        first = tune_gradients(
            network(), CHIP, "star:8", source=ProfileSource(knowledge=bank, profiler=ask)
        )
        assert (first.outcome, ask.asked) == ("add", 1)
    with Knowledge(tmp_path / "b.db", None) as bank:  # another run, another size of cluster
        second = tune_gradients(
            network(), CHIP, "star:32", source=ProfileSource(knowledge=bank, profiler=ask)
        )
        assert (second.outcome, ask.asked) == ("hit", 1)
        assert second.profile == first.profile
        assert second.plan.end_s > first.plan.end_s
        again = tune_gradients(
            network(),
            CHIP,
            "star:8",
            source=ProfileSource(knowledge=bank, profiler=ask, repeat=True),
        )
        assert (again.outcome, ask.asked) == ("reserved", 2)
        assert again.plan == first.plan


def test_the_key_is_of_network_batch_chip_and_training():
    key = profile_key(network(), CHIP, "dtype=fp16")
    assert key == profile_key(network(name="other"), CHIP, "dtype=fp16")
    others = {
        profile_key(network(5), CHIP, "dtype=fp16"),
        profile_key(network(), load_chip("Ascend910A"), "dtype=fp16"),
        profile_key(network(), CHIP, "dtype=bf16"),
    }
    assert len(others | {key}) == 4


def test_an_entry_that_is_no_profile_is_profiled_anew(tmp_path):
    key = profile_key(network(), CHIP, "")
    with Store(tmp_path / "b.db") as store:
        store.put(BankEntry(key, {"times_s": 3}, 1, 1, None, False, "", 0, 1, "", ""))
    with Knowledge(tmp_path / "b.db", None) as bank:
        assert gradient.stored_profile(bank, key) is None
        ask = Counting()
        found, outcome = training_profile(network(), CHIP, ProfileSource(bank, profiler=ask))
        assert (len(found.gradients), outcome, ask.asked) == (12, "reserved", 1)


def test_a_step_is_forward_backward_or_the_exchange_and_update():
    found = tune_gradients(
        network(),
        CHIP,
        "star:4",
        cost=AlphaBeta(1e-4, 1e-10),
        source=ProfileSource(profiler=Counting()),
    )
    assert found.single_s == pytest.approx(1.9e-3)
    assert found.step_s() == pytest.approx(6e-4 + found.plan.end_s)
    assert found.step_s("per_layer") >= found.step_s()
    assert found.gain("hccl_default") >= 0
    assert 0 < found.scaling < 1
    assert found.bound_s <= found.plan.end_s
    assert len(found.plan.segments) <= 8
    free = tune_gradients(
        network(),
        CHIP,
        "star:4",
        max_segments=None,
        cost=lambda n: 0.0,
        source=ProfileSource(profiler=Counting()),
    )
    assert free.scaling == 1.0


def test_all_reduces_cost_what_the_cluster_takes():
    topology = load_topology("910a-roce:16")
    table = gradient.cluster_cost(topology, 2e7)
    for size in (3e3, 7e4, 1.1e6, 2e7):
        exact = collective_time("all_reduce", topology, size).time_s
        assert table(size) == pytest.approx(exact, rel=0.1)
    found = tune_gradients(network(), CHIP, topology, source=ProfileSource(profiler=Counting()))
    assert found.cost_error < 0.1
    assert (
        tune_gradients(network(), CHIP, "star:1", source=ProfileSource(profiler=Counting())).scaling
        == 1.0
    )


def test_the_report_has_the_published_fields_and_text():
    found = tune_gradients(network(), CHIP, "ring:16", source=ProfileSource(profiler=Counting()))
    data = json.loads(json.dumps(gradient.section(found), allow_nan=False))
    assert set(data) == {"basic", "GDAT", "ascend_lab"}
    own = data["ascend_lab"]
    assert own["devices"] == 16
    assert own["optimal"] is True
    assert own["segments"][-1][1] == 11
    assert own["gradient_bytes"] == sum(100_000 * (i + 1) for i in range(12))
    before = data["GDAT"]["model_baseline_performance(ms)"]
    assert before >= data["GDAT"]["model_result_performance(ms)"]
    text = "\n".join(gradient.tuning_text(found))
    assert "optimal (among splits into at most 8 segments)" in text
    assert "(breaks the limit: not among splits into at most 8 segments)" in text
    (marked,) = [line for line in text.splitlines() if "(= before)" in line]
    assert marked.split()[0] == "hccl_default"
    assert "needs no search, for any number of segments" in text
    for word in ("16 devices", "gdat process finished", "optimal", "set_split_strategy_by_idx"):
        assert word in text


def test_a_network_without_parameters_has_nothing_to_send():
    with pytest.raises(InputError, match="parameters to train"):
        tune_gradients(network(), CHIP, "star:2", source=ProfileSource(profiler=Counting(0)))
    with pytest.raises(AscendLabError, match="topology"):
        tune_gradients(network(), CHIP, "moon:2", source=ProfileSource(profiler=Counting()))


# -- the command -----------------------------------------------------------------------------------
def run(capsys, *words):
    code = aoe([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_tunes_and_reports(capsys, small, tmp_path):
    words = ("-j", "4", "-m", small, "--output", tmp_path, "--cluster", "910a-roce")
    code, out, err = run(capsys, *words, "--devices", "16")
    assert (code, err) == (0, "")
    assert "16 devices of 910a-roce:16" in out
    assert "profile timed anew" in out
    (report,) = tmp_path.glob("aoe_result_gdat_*.json")
    (found,) = json.loads(report.read_text("utf-8"))
    assert found["basic"]["tuning_name"] == small.stem
    code, out, _ = run(capsys, *words, "--devices", "64", "--max_segments", "1")
    assert code == 0
    assert "profile from the bank" in out
    assert "in 1 segments" in out


def test_a_chip_that_the_cluster_has_not_is_said(capsys, small, tmp_path):
    words = ("-j", "4", "-m", small, "--output", tmp_path, "--cluster", "910a-roce:2")
    code, _, err = run(capsys, *words, "--soc_version", "Ascend310")
    assert code == 0
    assert err.count("\n") == 1
    assert "warning: the devices of 910a-roce:2 are Ascend910A, --soc_version is Ascend310" in err
