"""A training step's profile, its timeline, and the published numbers."""

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from ascend_lab.cluster import star
from ascend_lab.cluster.cost import Interpolated
from ascend_lab.cluster.train import (
    GradientRow,
    OperatorRow,
    StepProfile,
    all_reduce_cost,
    bucketed,
    equal_layers,
    layer_prefix,
    profile_layers,
    profile_training,
    step_timeline,
    update_s,
)
from ascend_lab.compiler import Graph, GraphBuilder, zoo
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.lab.validation import (
    norms_s,
    published,
    training_validation_rows,
    training_validation_table,
)
from ascend_lab.machine.chip import load_chip

CHIP = load_chip("Ascend910A")


def layers(count: int, batch: int = 32) -> Graph:
    """Return linear layers of width 64."""
    net = GraphBuilder("layers")
    x = net.input("x", (batch, 64))
    for i in range(count):
        weight = net.weight((64, 64), f"w{i}")
        bias = net.weight((64,), f"b{i}")
        x = net.relu(net.add(net.matmul(x, weight, name=f"mm{i}"), bias, name=f"add{i}"))
    net.output(x)
    return net.build()


@pytest.fixture(scope="module")
def profile() -> StepProfile:
    return profile_training(layers(4), CHIP)


def test_gradients_come_from_the_last_layer_to_the_first(profile: StepProfile) -> None:
    names = [row.name for row in profile.gradients]
    assert sorted(names) == sorted(f"{kind}{i}" for kind in "wb" for i in range(4))
    assert [int(name[1]) for name in names] == sorted((int(n[1]) for n in names), reverse=True)
    ready = [row.ready_s for row in profile.gradients]
    assert ready == sorted(ready) and 0 < ready[0] < ready[-1] <= profile.backward_s


def test_phases_are_the_sums_of_their_kernels(profile: StepProfile) -> None:
    for phase, total in (("forward", profile.forward_s), ("backward", profile.backward_s)):
        kernels = [row.time_s for row in profile.operators if row.phase == phase]
        assert kernels and sum(kernels) == pytest.approx(total)
    assert profile.backward_s > profile.forward_s > 0 and profile.update_s > 0
    assert profile.step_s == profile.forward_s + profile.backward_s + profile.update_s
    order = [row.phase for row in profile.operators]
    assert order == sorted(order, key=("forward", "backward", "update").index)


def test_updates_read_and_write_masters_and_states() -> None:
    many = 2**24  # many times what L2 holds: of fewer, what is written last stays there
    for optimizer, moved in (("sgd", 2 + 2 * 4 + 2 * 4 + 2), ("adam", 2 + 3 * 4 + 3 * 4 + 2)):
        least_s = many * moved / CHIP.device_memory.rate_bytes_per_s
        found_s = update_s(many, CHIP, optimizer)
        assert least_s <= found_s < 2 * least_s


def test_adam_differs_from_sgd_in_the_update_only(profile: StepProfile) -> None:
    adam = profile_training(layers(4), CHIP, optimizer="adam")
    assert adam.update_s > profile.update_s
    assert adam.gradients == profile.gradients and adam.forward_s == profile.forward_s


@pytest.mark.parametrize("settings", [{"dtype": "fp32"}, {"dtype": "int8"}, {"optimizer": "lion"}])
def test_what_cannot_be_profiled(settings: dict[str, str]) -> None:
    with pytest.raises(AscendLabError):
        profile_training(layers(1), CHIP, **settings)


def test_convolutions_have_profiles() -> None:
    net = GraphBuilder("images")
    x = net.input("x", (2, 3, 16, 16))
    x = net.relu(net.conv2d(x, net.weight((16, 3, 3, 3), "k0"), pad=1, name="c0"))
    x = net.conv2d(x, net.weight((16, 16, 3, 3), "k1"), pad=1, name="c1")
    x = net.reshape(net.global_avg_pool(x), shape=(2, 16))
    net.output(net.matmul(x, net.weight((16, 16), "w")))
    found = profile_training(net.build(), CHIP)
    assert [row.name for row in found.gradients] == ["w", "k1", "k0"]


def test_three_layers_stand_for_many() -> None:
    def build(count: int) -> Graph:
        return zoo.build("bert_base", 1, 32, layers=count, vocabulary=512)

    short = profile_layers(build, 5, CHIP, optimizer="adam")
    whole = profile_training(build(5), CHIP, optimizer="adam")
    for name in ("forward_s", "backward_s", "update_s"):
        assert getattr(short, name) == pytest.approx(getattr(whole, name), rel=0.02)
    assert [r.name for r in short.gradients] == [r.name for r in whole.gradients]
    assert short.gradient_bytes == whole.gradient_bytes
    for mine, other in zip(short.gradients, whole.gradients, strict=True):
        assert mine.ready_s == pytest.approx(other.ready_s, rel=0.02)
    for phase, total in (("forward", short.forward_s), ("backward", short.backward_s)):
        assert sum(r.time_s for r in short.operators if r.phase == phase) == pytest.approx(total)
    assert len(short.operators) == len(whole.operators)


def test_layers_are_found_by_their_names() -> None:
    assert layer_prefix(["a", "h0.x", "h1.x", "h2.x", "head"]) == "h"
    assert equal_layers("bert_large") == 24 and equal_layers("resnet50") == 0
    with pytest.raises(InputError):
        layer_prefix(["a.b", "h0.x"])


ROWS = tuple(GradientRow(f"g{i}", 0.001 * (i + 1), 10**6 * (i + 1)) for i in range(4))
STEP = StepProfile("step", "chip", 0.002, 0.004, 0.001, ROWS)


def cost(size_bytes: float) -> float:
    """Return 0.1 ms + 1 ns a byte."""
    return 1e-4 + 1e-9 * size_bytes


def test_separate_buckets_by_hand() -> None:
    found = step_timeline(STEP, cost, [(i, i) for i in range(len(ROWS))])
    # ready 3, 4, 5, 6 ms after the start of the step; 1.1, 2.1, 3.1, 4.1 ms long
    spans = [
        (round(s.start_s * 1e3, 6), round(s.end_s * 1e3, 6)) for s in found.lane("communication")
    ]
    assert spans == [(3.0, 4.1), (4.1, 6.2), (6.2, 9.3), (9.3, 13.4)]
    assert found.step_s == pytest.approx(0.0144)
    assert found.tail_s == pytest.approx(0.0074) == found.exposed_s


@settings(max_examples=100)
@given(cuts=st.sets(st.integers(1, 3)), beta=st.floats(0, 1e-8))
def test_lanes_never_overlap_and_bandwidth_never_hurts(cuts: set[int], beta: float) -> None:
    edges = [0, *sorted(cuts), 4]
    segments = [(a, b - 1) for a, b in itertools.pairwise(edges)]
    found = step_timeline(STEP, lambda n: 1e-5 + beta * n, segments)
    quick = step_timeline(STEP, lambda n: 1e-5 + beta / 2 * n, segments)
    assert quick.step_s <= found.step_s
    for lane in ("compute", "communication"):
        spans = found.lane(lane)
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(spans))
    assert STEP.step_s <= found.step_s <= STEP.step_s + found.communication_s + 1e-12
    assert found.exposed_s == pytest.approx(found.tail_s)


@pytest.mark.parametrize("segments", [[(0, 1)], [(0, 1), (3, 3)], [(1, 3)], [(0, 3), (3, 3)], []])
def test_segments_that_leave_gaps(segments: list[tuple[int, int]]) -> None:
    with pytest.raises(InputError):
        step_timeline(STEP, cost, segments)


def test_buckets_close_when_they_are_full() -> None:
    assert bucketed(ROWS, 5 * 10**6, 10**6) == ((0, 0), (1, 2), (3, 3))
    assert bucketed(ROWS) == ((0, 1), (2, 3))
    assert bucketed(()) == ()


def test_the_cost_of_an_all_reduce_keeps_to_its_bound() -> None:
    found = all_reduce_cost(star(4, 1e-6, 1e-9))
    for size in (10.0**4, 10.0**6, 10.0**8):
        assert found(size) >= 2 * 3 / 4 * size * 1e-9
    assert all_reduce_cost(star(1, 1e-6, 1e-9))(1e9) == 0.0


@settings(max_examples=100)
@given(size=st.floats(1.0, 1e9))
def test_straight_lines_are_interpolated_exactly(size: float) -> None:
    calls: list[float] = []

    def line(n: float) -> float:
        calls.append(n)
        return 1e-5 + 1e-9 * n

    found = Interpolated(line)
    assert found(size) == pytest.approx(line(size))
    found(size)
    assert len(calls) == 3 and found(0) == 0.0


def fake(batch: int) -> StepProfile:
    """Return a step of 50 us an image, half of it a batch norm, with 51 MB of gradients."""
    half_s = batch * 25e-6
    kernels = (OperatorRow(("fc",), "forward", half_s), OperatorRow(("a.bn",), "backward", half_s))
    rows = tuple(GradientRow(f"g{i}", half_s * (i + 1) / 10, 5_100_000) for i in range(10))
    return StepProfile("fake", "Ascend910A", half_s, half_s, 0.0, rows, kernels)


def test_the_table_holds_every_row_against_the_model() -> None:
    rows = training_validation_rows({batch: fake(batch) for batch in (32, 256)})
    by_name = {row.name: row for row in rows}
    one = by_name["ResNet-50, 1 x 910, batch 256"]
    assert 256 / one.model_s == pytest.approx(20_000) and one.model_efficiency == 1.0
    assert one.time_error == pytest.approx(2115 / 20_000 - 1)
    assert one.norms_s == pytest.approx(one.model_s / 2) == norms_s(fake(256))
    eight = by_name["ResNet-50, 8 x 910, batch 32"]
    assert 0.2 < eight.model_efficiency < 1.0
    assert 8 * 32 / eight.model_s == pytest.approx(8 * 20_000 * eight.model_efficiency)
    text = training_validation_table(rows)
    assert len(rows) == len(published("cluster.train")["row"]) == 5
    assert all(row.name in text for row in rows) and "-89%" in text and "norms" in text
    assert " 0.958" in text.splitlines()[-1]  # 13689 / (8 x 1787), not the source's 0.95
    assert all(len(line) <= 88 for line in text.splitlines())
