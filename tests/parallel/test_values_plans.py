"""Values of whole plans, and the bytes they send."""

import numpy as np
import pytest
from values_cases import SGD, case, distance, perceptron, points

from ascend_lab.cluster.parallel import values
from ascend_lab.cluster.parallel.plan import BACKWARD, FORWARD, Task, orders, state_bytes
from ascend_lab.cluster.parallel.values import Plan, Run, weights
from ascend_lab.errors import AscendLabError, ClusterError

TOLERANCE = 1e-10


def check(name: str, plan: Plan, **more: object) -> values.Run:
    model, data, single = case(name)
    run = values.train(model, data, SGD, plan, **more)
    assert distance(run, single) < TOLERANCE
    return run


# -- one device -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["transformer", "perceptron", "experts", "experts-top1"])
def test_gradients_of_one_device_equal_finite_differences(name: str) -> None:
    model, data, single = case(name)
    if name == "transformer":  # one layer says as much
        model = values.transformer(layers=1)
        single = values.train_single(model, data[:1], SGD)
    rng = np.random.default_rng(5)
    at = model.weights
    step = 1e-6
    for key, weight in at.items():
        way = rng.normal(size=weight.shape)
        ends = [
            values.loss_and_gradients(model, {**at, key: weight + s * step * way}, data[0])[0]
            for s in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / (2 * step)
        assert slope == pytest.approx((single.gradients[0][key] * way).sum(), rel=1e-4, abs=1e-7)


def test_training_reduces_the_loss() -> None:
    run = values.train_single(values.transformer(1), values.sentences(30), values.Adam())
    assert np.mean(run.losses[-5:]) < 0.5 * run.losses[0]


# -- many devices ---------------------------------------------------------------------------------
full = pytest.mark.full
PLANS = [
    ("perceptron", Plan(data=4)),
    ("transformer", Plan(data=8)),
    ("transformer", Plan(micro_batches=8)),
    ("transformer", Plan(data=2, micro_batches=4)),
    ("perceptron", Plan(tensor=2)),
    ("transformer", Plan(tensor=4)),
    ("transformer", Plan(tensor=4, sequence=True)),
    ("transformer", Plan(data=2, tensor=2, pipeline=2, micro_batches=2, schedule="gpipe")),
    ("transformer", Plan(data=2, tensor=2, pipeline=2, micro_batches=4, zero_stage=1)),
    ("transformer", Plan(2, 2, 2, sequence=True, zero_stage=3, micro_batches=2)),
    ("transformer", Plan(data=2, tensor=2, sequence=True, zero_stage=2)),
    ("experts", Plan(data=4, expert=4)),
    ("experts", Plan(data=4)),
    ("experts-top1", Plan(data=4, expert=2)),
    ("experts", Plan(4, 2, 2, expert=2, micro_batches=2, zero_stage=3)),
    pytest.param("transformer", Plan(data=2), marks=full),
    pytest.param("transformer", Plan(tensor=2, sequence=True), marks=full),
    pytest.param("transformer", Plan(data=2, tensor=2, pipeline=2), marks=full),
    pytest.param("experts", Plan(data=8, expert=2), marks=full),
    pytest.param("experts", Plan(4, 2, 2, expert=2, micro_batches=2), marks=full),
]


@pytest.mark.parametrize(("name", "plan"), PLANS)
def test_a_plan_gives_the_values_of_one_device(name: str, plan: Plan) -> None:
    run = check(name, plan)
    if plan.tensor > 1 and plan.pipeline == 1 and not plan.zero_stage:
        assert run.held["parameters"] < case(name)[0].elements * (0.5 / plan.tensor + 0.5)


@pytest.mark.parametrize("cuts", [(0,), (0, 1, 20), (0, 5, 10, 15)])
def test_segments_change_no_value(cuts: tuple[int, ...]) -> None:
    model, _, _ = case("transformer")
    ends = (*cuts[1:], len(model.weights))
    segments = tuple((a, b - 1) for a, b in zip(cuts, ends, strict=True))
    run = check("transformer", Plan(data=4), segments=segments)
    assert run.traffic.of("data", "all_reduce").calls == 3 * len(segments)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("data", "micro"), [(4, 1), (2, 4)])
def test_zero(stage: int, data: int, micro: int) -> None:
    run = check("transformer", Plan(data=data, zero_stage=stage, micro_batches=micro))
    whole = case("transformer")[0].elements
    cut = {"parameters": stage > 2, "gradients": stage > 1, "state": True}
    assert run.held == {key: whole // data if flag else whole for key, flag in cut.items()}


def test_zero_pads_what_does_not_divide() -> None:
    model = perceptron(width=5, classes=3)
    data = points(2, batch=12, classes=3)
    single = values.train_single(model, data, SGD)
    for stage in (1, 2, 3):
        run = values.train(model, data, SGD, Plan(data=4, zero_stage=stage))
        assert distance(run, single) < TOLERANCE
        assert run.held["state"] * 4 >= model.elements


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_adam(stage: int) -> None:
    """Adam makes whole steps of mere rounding where a gradient is 0: a perceptron has no such."""
    model, data, _ = case("perceptron")
    adam = values.Adam(lr=0.01)
    run = values.train(model, data, adam, Plan(data=4, zero_stage=stage))
    assert distance(run, values.train_single(model, data, adam)) < TOLERANCE
    assert run.held["state"] == 2 * model.elements // (4 if stage else 1)


@pytest.mark.parametrize(
    "algorithm", ["halving-doubling", "mesh", "nhr", "recursive-doubling", "ring"]
)
def test_any_collective_algorithm_gives_the_same(algorithm: str, monkeypatch) -> None:
    made = weights.grid
    monkeypatch.setattr(weights, "grid", lambda sizes, t: made(sizes, t, algorithm))
    check("perceptron", Plan(data=2, tensor=4))


# -- pipeline -------------------------------------------------------------------------------------
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro"), [(2, 1), (3, 8), (4, 2)])
def test_pipeline(schedule: str, stages: int, micro: int) -> None:
    run = check("transformer", Plan(pipeline=stages, micro_batches=micro, schedule=schedule))
    held = [micro if schedule == "gpipe" else min(micro, stages - s) for s in range(stages)]
    assert run.flights == tuple(held)


def test_interleaved_pipeline() -> None:
    check("transformer", Plan(pipeline=2, micro_batches=4, schedule="interleaved", virtual=2))


def test_any_order_that_can_run_gives_the_same() -> None:
    made = orders("gpipe", 2, 4)
    order = [[*reversed(row[:4]), *reversed(row[4:])] for row in made]
    check("transformer", Plan(pipeline=2, micro_batches=4), order=order)


WAITING = [[Task(0, 0, FORWARD), Task(0, 0, BACKWARD)], [Task(1, 0, BACKWARD), Task(1, 0, FORWARD)]]


@pytest.mark.parametrize(
    ("order", "what"),
    [(WAITING, "can run"), ([row[:-1] for row in orders("1f1b", 2, 1)], "all its tasks")],
    ids=["waits for itself", "leaves tasks out"],
)
def test_an_order_that_cannot_be(order: list[list[Task]], what: str) -> None:
    model, data, _ = case("perceptron")
    with pytest.raises(ClusterError, match=what):
        values.train(model, data, SGD, Plan(pipeline=2), order=order)


# -- what cannot be -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "plan", "more", "what"),
    [
        ("transformer", Plan(data=3), {}, "a batch divisible by 3"),
        ("transformer", Plan(tensor=3), {}, "axis 1 of layer0.query"),
        ("transformer", Plan(tensor=8), {}, "heads divisible by 8"),
        ("transformer", Plan(data=2, micro_batches=3), {}, "a rank's batch divisible by 3"),
        ("transformer", Plan(pipeline=5), {}, "at least 5 pieces"),
        (
            *("transformer", Plan(pipeline=2, schedule="interleaved", virtual=3, micro_batches=2)),
            *({}, "6 pieces"),
        ),
        ("transformer", Plan(data=2, zero_stage=2), {"segments": ((0, 0),)}, "segments"),
        ("transformer", Plan(data=2), {"segments": ((0, 3), (5, 9))}, "in order"),
        ("experts", Plan(data=8, expert=8), {}, "up"),
        ("experts", Plan(data=2, expert=2, tensor=2, sequence=True), {}, "whole sequences"),
    ],
)
def test_a_plan_that_does_not_fit(name: str, plan: Plan, more: dict, what: str) -> None:
    model, data, _ = case(name)
    with pytest.raises(AscendLabError, match=what):
        values.train(model, data, SGD, plan, **more)


def test_a_width_that_heads_do_not_divide() -> None:
    with pytest.raises(ClusterError, match="heads"):
        values.transformer(width=16, heads=3)


# -- the model of memory --------------------------------------------------------------------------
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("data", "expert"), [(4, 2), pytest.param(4, 4, marks=full)])
def test_what_is_held_is_what_the_memory_model_says(stage: int, data: int, expert: int) -> None:
    """In fp64 with momentum a weight, its gradient and its state are one element each."""
    model, _, _ = case("experts")
    run = check("experts", Plan(data=data, expert=expert, zero_stage=stage))
    own = sum(model.weights[f"layer0.{name}"].size for name in ("up", "down"))
    wanted = [0.0, 0.0, 0.0]
    for parameters, sharers in ((model.elements - own, data), (own / expert, data // expert)):
        sizes = state_bytes(parameters, sharers, stage)
        wanted = [a + b / c for a, b, c in zip(wanted, sizes, (2, 2, 12), strict=True)]
    assert list(run.held.values()) == wanted


FP64_BYTES = 8
BATCH = 8
LENGTH = 8
WIDTH = 16
ACTIVATION_BYTES = BATCH * LENGTH * WIDTH * FP64_BYTES
WEIGHTS_BYTES = case("transformer")[0].elements * FP64_BYTES


def one_step(plan: Plan, layers: int = 2) -> Run:
    return values.train(values.transformer(layers), values.sentences(1), SGD, plan)


def a_layer(plan: Plan, op: str) -> tuple[int, int, int]:
    """Return (calls, tensor bytes, sent bytes) of the tensor group that one layer more makes."""
    more, less = (one_step(plan, n).traffic.of("tensor", op) for n in (2, 1))
    return (
        more.calls - less.calls,
        more.size_bytes - less.size_bytes,
        more.sent_bytes - less.sent_bytes,
    )


def test_one_device_sends_nothing() -> None:
    assert one_step(Plan(micro_batches=4)).traffic.counts == {}


# -- data parallel and ZeRO -----------------------------------------------------------------------
def test_data_parallel_sends_twice_the_weights_but_one_share() -> None:
    run = one_step(Plan(data=4))
    count = run.traffic.of("data", "all_reduce")
    assert run.traffic.counts.keys() == {("data", "all_reduce")}
    assert (count.calls, count.size_bytes) == (len(case("transformer")[0].weights), WEIGHTS_BYTES)
    assert count.sent_bytes == 2 * 3 * WEIGHTS_BYTES // 4


@pytest.mark.parametrize(("stage", "share"), [(1, 1.0), (2, 1.0), (3, 1.5)])
def test_zero_sends_as_much_as_data_parallel_and_stage_3_half_more(
    stage: int, share: float
) -> None:
    run = one_step(Plan(data=4, zero_stage=stage))
    assert run.traffic.sent_bytes("data") == share * 2 * 3 * WEIGHTS_BYTES // 4
    assert {op for _, op in run.traffic.counts} == {"reduce_scatter", "all_gather"}


def test_stage_2_scatters_after_every_micro_batch_and_stage_1_once() -> None:
    sent = [
        one_step(Plan(data=2, zero_stage=stage, micro_batches=micro))
        .traffic.of("data", "reduce_scatter")
        .sent_bytes
        for stage, micro in ((1, 4), (2, 1), (2, 4))
    ]
    assert sent[0] == sent[1] == sent[2] / 4


# -- tensor, sequence -----------------------------------------------------------------------------
def test_a_layer_all_reduces_four_activations_or_sends_the_same_bytes_in_two_steps() -> None:
    reduces = a_layer(Plan(tensor=4), "all_reduce")
    assert reduces == (4, 4 * ACTIVATION_BYTES, 4 * 2 * 3 * ACTIVATION_BYTES // 4)
    plan = Plan(tensor=4, sequence=True)
    gathers, scatters = (a_layer(plan, op) for op in ("all_gather", "reduce_scatter"))
    assert gathers[:2] == scatters[:2] == (4, 4 * ACTIVATION_BYTES)
    assert gathers[2] + scatters[2] == reduces[2]
    assert a_layer(plan, "all_reduce")[0] == 0


def test_the_vocabulary_exchanges_three_numbers_a_token() -> None:
    traffic = one_step(Plan(tensor=4), layers=0).traffic
    tokens_bytes = BATCH * LENGTH * FP64_BYTES
    sums, maxima = (traffic.of("tensor", op) for op in ("all_reduce", "all_gather"))
    # embedding forward, input of the head backward; sums of exponentials, logits of targets
    assert (sums.calls, sums.size_bytes) == (4, 2 * ACTIVATION_BYTES + 2 * tokens_bytes)
    assert (maxima.calls, maxima.size_bytes) == (1, 4 * tokens_bytes)


# -- pipeline and experts -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("schedule", "stages", "micro", "virtual", "hops"),
    [("gpipe", 4, 4, 1, 3), ("1f1b", 2, 1, 1, 1), ("interleaved", 2, 2, 2, 3)],
)
def test_a_pipeline_sends_one_activation_each_way(
    schedule: str, stages: int, micro: int, virtual: int, hops: int
) -> None:
    plan = Plan(pipeline=stages, micro_batches=micro, schedule=schedule, virtual=virtual)
    sent = one_step(plan).traffic.of("stage", "send")
    assert (sent.calls, sent.size_bytes) == (2 * hops * micro, 2 * hops * ACTIVATION_BYTES)


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_exchange_slots_four_times(ranks: int) -> None:
    model, data, _ = case("experts")
    run = values.train(model, data[:1], SGD, Plan(data=ranks, expert=ranks))
    slots = 5  # 1.25 x 2 choices x 8 tokens / 4 experts
    rows_bytes = 4 * (BATCH // ranks) * slots * WIDTH * FP64_BYTES
    count = run.traffic.of("expert", "all_to_all")
    assert (count.calls, count.size_bytes) == (4, 4 * rows_bytes)
    assert count.sent_bytes == 4 * (ranks - 1) * rows_bytes // ranks
    own = ("layer0.up", "layer0.down")
    shared = sum(w.size for key, w in model.weights.items() if key not in own)
    assert run.traffic.of("data", "all_reduce").size_bytes == shared * FP64_BYTES


# -- outputs held for the backward pass -----------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 4])
def test_outputs_of_a_layer(ranks: int) -> None:
    """Of a layer's outputs 19 activations are cut by heads or hidden units, the rest is not.

    Sequence parallelism cuts 8 of these too; left are two gathered inputs, two partial sums.
    """

    def a_layers(plan: Plan) -> float:
        more, less = (one_step(plan, n).outputs[0] for n in (2, 1))
        return (more - less) * FP64_BYTES / ACTIVATION_BYTES

    assert a_layers(Plan(tensor=ranks)) == (8 if ranks == 1 else 10) + 19 / ranks
    if ranks > 1:
        assert a_layers(Plan(tensor=ranks, sequence=True)) == 4 + (8 + 19) / ranks
