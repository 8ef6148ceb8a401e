"""The checks and figures of chapter 23, and what its prose claims."""

import numpy as np
import pytest

from ascend_lab.cluster import load_topology
from ascend_lab.cluster.parallel import best_plans, placements
from ascend_lab.cluster.parallel.model import GraphModel
from ascend_lab.cluster.parallel.plan import Unit, bubble_share
from ascend_lab.cluster.parallel.timing import PlanTime, TopologyCosts, plan_time
from ascend_lab.cluster.parallel.values import (
    Plan,
    Sgd,
    group as pieces,
    sentences,
    train,
    train_single,
    transformer,
)
from ascend_lab.compiler.zoo.transformers import WORDS, Size, bert
from ascend_lab.errors import ClusterError
from ascend_lab.lab.checks.chapter23_26 import least_micro_batches, sent_bytes
from ascend_lab.machine.chip import load_chip


# -- exercises -------------------------------------------------------------------------------------
def test_least_micro_batches_by_trying_all() -> None:
    for stages, bubble in ((1, 0.5), (4, 0.3), (8, 0.123), (16, 0.0499)):
        m = least_micro_batches(stages, bubble)
        assert bubble_share(stages, m) <= bubble
        assert m == 1 or bubble_share(stages, m - 1) > bubble


# -- the closed forms, and messages between arrays -------------------------------------------------
def test_closed_bytes_are_those_of_executed_messages() -> None:
    """A layer more of the small transformer (fp64, biases and norms beside the matrices)."""
    width = 16
    length = 8
    batch = 8
    layers = 1
    plan = Plan(2, 2)
    more, less = (train(transformer(n), sentences(1), Sgd(), plan).traffic for n in (3, 2))
    wanted = sent_bytes(2, 2, 1, layers, width, length, batch)
    assert more.sent_bytes("tensor") - less.sent_bytes("tensor") == 4 * wanted[1]
    others = 8 * (7 * width / 2 + 6 * width)  # biases cut in two; norms and two biases whole
    assert more.sent_bytes("data") - less.sent_bytes("data") == 4 * wanted[0] + others


@pytest.mark.parametrize(("stages", "ways"), [(2, 1), (4, 2)])
def test_a_stage_in_the_middle_sends_both_ways(stages: int, ways: int) -> None:
    wanted = sent_bytes(1, 1, stages, 4, 16, 8, 8)[2]
    assert wanted == ways * 2 * 8 * 8 * 16
    run = train(transformer(), sentences(1), Sgd(), Plan(pipeline=stages, micro_batches=2))
    # counted over all boundaries: an activation forward and a slope back, 8 bytes a number
    assert run.traffic.sent_bytes("stage") == (stages - 1) * 2 * 8 * (8 * 8 * 16)


def test_a_forgotten_all_reduce_shows_in_copies_and_not_in_the_first_loss(monkeypatch) -> None:
    model = transformer()
    data = sentences(1)
    one = train_single(model, data, Sgd())
    monkeypatch.setattr(pieces, "copy_in", lambda tape, x, group: x)
    with pytest.raises(ClusterError, match="copies that differ"):
        train(model, data, Sgd(), Plan(tensor=2))
    monkeypatch.setattr("ascend_lab.cluster.parallel.values.same", lambda copies: True)
    blind = train(model, data, Sgd(), Plan(tensor=2))
    assert blind.losses[0] == pytest.approx(one.losses[0], rel=1e-12)
    key = "layer0.attention.norm.scale"
    assert not np.allclose(blind.gradients[0][key], one.gradients[0][key])


# -- figures ---------------------------------------------------------------------------------------
class Layers:
    """Four layers of 10 million parameters that tensor parallelism may cut in two."""

    name = "layers"
    update_s_per_parameter = 0.0

    def units(self, micro_batch: int, tensor: int, sequence: bool) -> tuple[Unit, ...]:
        size = 4e6 * micro_batch
        return (
            Unit("u", 10**7 // tensor, 1e-3 / tensor, 2e-3 / tensor, size, size, size, 2, size),
        ) * 4

    def tensor_degrees(self) -> tuple[int, ...]:
        return (1, 2)


def placed() -> list[PlanTime]:
    plan = Plan(2, 4, 2, micro_batches=4)
    costs = TopologyCosts(load_topology("910a-roce:16"))
    return [plan_time(one, Layers(), costs, 8) for one in placements(plan)]


def test_tensor_innermost_is_quickest() -> None:
    timed = sorted(placed(), key=lambda one: one.step_s)
    assert timed[0].plan.axes[0] == "tensor"
    assert timed[-1].step_s > 1.2 * timed[0].step_s
    assert len({one.plan.axes for one in timed}) == 6


@pytest.mark.full
@pytest.mark.parametrize(
    ("batch", "winner"), [(256, "D8 T1 P8 interleaved v2 m32 Z1"), (512, "D64 T1 P1 Z3")]
)
def test_all_plans_of_the_package_have_the_winners_of_the_chapter(batch: int, winner: str) -> None:
    def sized(count: int) -> object:
        return bert("bert", Size(2560, 3, 40, 512, count, 1e-12), "fp32", WORDS)

    chip = load_chip("Ascend910A")
    big = GraphModel("BERT", sized, chip, layers=48)
    room = chip.device_memory.size_bytes
    topology = load_topology("910a-roce:64")
    found = best_plans(big, topology, 64, batch, memory_bytes=room, keep=1)
    assert found.best.plan.label == winner
