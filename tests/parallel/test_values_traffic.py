"""What each plan sends and holds, against closed forms."""

import numpy as np
import pytest
from values_cases import SGD, case

from ascend_lab.parallel import values
from ascend_lab.parallel.values import Plan, Run
from ascend_lab.parallel.values.training import _Chunk
from ascend_lab.parallel.values.weights import Cuts

FP64_BYTES = 8
BATCH, LENGTH, WIDTH = 8, 8, 16
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


@pytest.mark.parametrize(
    ("sequence", "wanted"),
    [
        (False, [{"all_reduce": 2}, {"all_reduce": 4}]),
        (True, [{"all_gather": 2, "reduce_scatter": 2}, {"all_gather": 4, "reduce_scatter": 4}]),
    ],
)
def test_half_of_them_forward_and_half_backward(sequence: bool, wanted: list) -> None:
    layer = values.transformer().pieces[1:2]
    cuts, traffic = Cuts(Plan(tensor=2, sequence=sequence)), values.Traffic()
    chunk = _Chunk(layer, cuts.groups(traffic), cuts, SGD)
    x = [np.ones((BATCH, LENGTH // 2 if sequence else LENGTH, WIDTH))] * 2
    for half, run in enumerate((lambda: chunk.forward(0, x, x), lambda: chunk.backward(0, x))):
        run()
        assert {op: count.calls for (_, op), count in traffic.counts.items()} == wanted[half]


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


def test_the_table_shows_all() -> None:
    text = str(one_step(Plan(data=2, tensor=2, pipeline=2)).traffic)
    assert [line.split()[:2] for line in text.splitlines()[1:]] == [
        ["data", "all_reduce"],
        ["stage", "send"],
        ["tensor", "all_gather"],
        ["tensor", "all_reduce"],
    ]


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


def test_1f1b_holds_fewer_outputs_than_gpipe() -> None:
    late, early = (
        one_step(Plan(pipeline=2, micro_batches=4, schedule=name)) for name in ("gpipe", "1f1b")
    )
    assert (late.flights, early.flights) == ((4, 4), (2, 1))
    assert early.outputs == (late.outputs[0] / 2, late.outputs[1] / 4)
