"""What each plan sends, against closed forms."""

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


def one_step(plan: Plan, layers: int = 2) -> Run:
    model, data = values.transformer(layers), values.sentences(1)
    return values.train(model, data, SGD, plan)


def a_layer(plan: Plan, group: str, op: str) -> tuple[int, int, int]:
    """Return (calls, tensor bytes, sent bytes) that one layer more makes."""
    more, less = (one_step(plan, n).traffic.of(group, op) for n in (3, 2))
    return (
        more.calls - less.calls,
        more.size_bytes - less.size_bytes,
        more.sent_bytes - less.sent_bytes,
    )


def test_one_device_sends_nothing() -> None:
    assert one_step(Plan(micro_batches=4)).traffic.counts == {}


# -- data parallel and ZeRO -----------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [2, 4])
def test_data_parallel_sends_twice_the_weights_but_one_share(ranks: int) -> None:
    run = one_step(Plan(data=ranks))
    count = run.traffic.of("data", "all_reduce")
    weights_bytes = case("transformer")[0].elements * FP64_BYTES
    assert run.traffic.counts.keys() == {("data", "all_reduce")}
    assert count.calls == len(case("transformer")[0].weights)
    assert count.size_bytes == weights_bytes
    assert count.sent_bytes == 2 * (ranks - 1) * weights_bytes // ranks


@pytest.mark.parametrize(("stage", "share"), [(1, 1.0), (2, 1.0), (3, 1.5)])
@pytest.mark.parametrize("ranks", [4])
def test_zero_sends_as_much_as_data_parallel_and_stage_3_half_more(
    stage: int, share: float, ranks: int
) -> None:
    plain = one_step(Plan(data=ranks)).traffic.sent_bytes("data")
    run = one_step(Plan(data=ranks, zero_stage=stage))
    assert run.traffic.sent_bytes("data") == share * plain
    assert {op for _, op in run.traffic.counts} == {"reduce_scatter", "all_gather"}


def test_stage_2_scatters_after_every_micro_batch() -> None:
    once, often = (
        one_step(Plan(data=2, zero_stage=2, micro_batches=m)).traffic.of("data", "reduce_scatter")
        for m in (1, 4)
    )
    assert often.sent_bytes == 4 * once.sent_bytes
    lazy = one_step(Plan(data=2, zero_stage=1, micro_batches=4))
    assert lazy.traffic.of("data", "reduce_scatter").sent_bytes == once.sent_bytes


# -- tensor, sequence -----------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [4])
def test_a_tensor_parallel_layer_all_reduces_four_activations(ranks: int) -> None:
    calls, size_bytes, sent_bytes = a_layer(Plan(tensor=ranks), "tensor", "all_reduce")
    assert (calls, size_bytes) == (4, 4 * ACTIVATION_BYTES)
    assert sent_bytes == 4 * 2 * (ranks - 1) * ACTIVATION_BYTES // ranks


@pytest.mark.parametrize(
    ("sequence", "wanted"),
    [
        (False, [{"all_reduce": 2}, {"all_reduce": 4}]),
        (True, [{"all_gather": 2, "reduce_scatter": 2}, {"all_gather": 4, "reduce_scatter": 4}]),
    ],
)
def test_half_of_them_forward_and_half_backward(sequence: bool, wanted: list) -> None:
    layer = values.transformer().pieces[1:2]
    cuts = Cuts(Plan(tensor=2, sequence=sequence))
    traffic = values.Traffic()
    chunk = _Chunk(layer, cuts.groups(traffic), cuts, SGD)
    shape = (BATCH, LENGTH // 2 if sequence else LENGTH, WIDTH)
    x = [np.ones(shape)] * 2
    for half, run in enumerate((lambda: chunk.forward(0, x, x), lambda: chunk.backward(0, x))):
        run()
        assert {op: count.calls for (_, op), count in traffic.counts.items()} == wanted[half]


@pytest.mark.parametrize("ranks", [4])
def test_sequence_parallel_sends_the_same_bytes(ranks: int) -> None:
    plan = Plan(tensor=ranks, sequence=True)
    wanted = a_layer(Plan(tensor=ranks), "tensor", "all_reduce")[2]
    gathers = a_layer(plan, "tensor", "all_gather")
    scatters = a_layer(plan, "tensor", "reduce_scatter")
    assert gathers[:2] == scatters[:2] == (4, 4 * ACTIVATION_BYTES)
    assert gathers[2] + scatters[2] == wanted
    assert a_layer(plan, "tensor", "all_reduce")[0] == 0


@pytest.mark.parametrize("ranks", [4])
def test_the_vocabulary_exchanges_three_numbers_a_token(ranks: int) -> None:
    traffic = one_step(Plan(tensor=ranks), layers=0).traffic
    tokens_bytes = BATCH * LENGTH * FP64_BYTES
    sums = traffic.of("tensor", "all_reduce")
    # embedding forward, input of the head backward; sums of exponentials, logits of targets
    assert (sums.calls, sums.size_bytes) == (4, 2 * ACTIVATION_BYTES + 2 * tokens_bytes)
    maxima = traffic.of("tensor", "all_gather")
    assert (maxima.calls, maxima.size_bytes) == (1, ranks * tokens_bytes)


# -- pipeline and experts -------------------------------------------------------------------------
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro"), [(2, 1), (4, 4)])
def test_a_pipeline_sends_one_activation_each_way(schedule: str, stages: int, micro: int) -> None:
    plan = Plan(pipeline=stages, micro_batches=micro, schedule=schedule)
    sent = one_step(plan).traffic.of("stage", "send")
    assert sent.calls == 2 * (stages - 1) * micro
    assert sent.size_bytes == 2 * (stages - 1) * ACTIVATION_BYTES


def test_interleaving_sends_more() -> None:
    plan = Plan(pipeline=2, micro_batches=2, schedule="interleaved", virtual=2)
    assert one_step(plan).traffic.of("stage", "send").size_bytes == 2 * 3 * ACTIVATION_BYTES


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_exchange_slots_four_times(ranks: int) -> None:
    model, data, _ = case("experts")
    run = values.train(model, data[:1], SGD, Plan(data=ranks, expert=ranks))
    slots = 5  # 1.25 x 2 choices x 8 tokens / 4 experts
    rows_bytes = 4 * (BATCH // ranks) * slots * WIDTH * FP64_BYTES
    count = run.traffic.of("expert", "all_to_all")
    assert (count.calls, count.size_bytes) == (4, 4 * rows_bytes)
    assert count.sent_bytes == 4 * (ranks - 1) * rows_bytes // ranks
    shared = sum(
        w.size for key, w in model.weights.items() if key not in ("layer0.up", "layer0.down")
    )
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
        more, less = (one_step(plan, n).outputs[0] for n in (3, 2))
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
