"""Values on many devices: groups, mixed precision, routing, and planted mistakes."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from values_cases import SGD, case, distance

from ascend_lab.cluster.parallel import values
from ascend_lab.cluster.parallel.values import (
    Group,
    MixedRun,
    Net,
    Plan,
    Tape,
    Traffic,
    Var,
    models,
    weights,
)
from ascend_lab.cluster.parallel.values.group import (
    copy_in,
    exchange,
    gather_in,
    grid,
    part,
    parts,
    same,
    scatter_out,
    send,
    sum_out,
)
from ascend_lab.cluster.parallel.values.models import capacity_of, cross_entropy, route
from ascend_lab.cluster.train import DynamicLossScale
from ascend_lab.errors import ClusterError
from ascend_lab.operators import ops

RNG = np.random.default_rng(3)


def group_of(ranks: int, teams: int = 1, algorithm: str = "ring") -> Group:
    members = tuple(tuple(range(t * ranks, (t + 1) * ranks)) for t in range(teams))
    return Group("team", members, Traffic(), algorithm)


def draw(ranks: int, *shape: int) -> list:
    return [RNG.normal(size=shape) for _ in range(ranks)]


# -- operations -----------------------------------------------------------------------------------
@pytest.mark.parametrize(("ranks", "axis"), [(1, 0), (2, 1), (3, 2), (5, 0), (8, 1)])
def test_operations_equal_numpy(ranks: int, axis: int) -> None:
    group = group_of(ranks)
    x = draw(ranks, 2 * ranks, ranks, 3 * ranks)
    total = sum(x)
    for found in group.all_reduce(x):
        np.testing.assert_allclose(found, total, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(
        group.reduce_scatter(x, axis), np.split(total, ranks, axis), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
    for found in group.all_gather(x, axis):
        np.testing.assert_array_equal(found, np.concatenate(x, axis))
    found = group.all_to_all(x)
    for r in range(ranks):
        wanted = [np.split(one, ranks, 0)[r] for one in x]
        np.testing.assert_array_equal(found[r], np.concatenate(wanted, 0))


def test_a_grid_has_one_group_an_axis() -> None:
    groups = grid({"data": 2, "tensor": 3}, Traffic())
    assert groups["data"].members == ((0, 3), (1, 4), (2, 5))
    assert groups["tensor"].members == ((0, 1, 2), (3, 4, 5))
    assert [groups["tensor"].place(r) for r in range(6)] == [0, 1, 2, 0, 1, 2]


def test_parts_and_copies() -> None:
    x = RNG.normal(size=(4, 6))
    cut = parts(x, group_of(2, teams=2), 1)
    np.testing.assert_array_equal(cut[3], x[:, 3:])
    assert same([x, x + 1e-15]) and not same([x, x + 1e-9])
    with pytest.raises(ClusterError, match="divisible by 4 ranks; got 6"):
        part(x, 4, 0, 1)
    with pytest.raises(ClusterError, match="divisible by 3"):
        group_of(3).reduce_scatter(draw(3, 4))
    with pytest.raises(ClusterError, match="divisible by 3"):
        group_of(3).all_to_all(draw(3, 4))


# -- traffic --------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_bytes_of_a_ring(ranks: int) -> None:
    group = group_of(ranks)
    x = draw(ranks, 24, 2)
    size_bytes = x[0].nbytes
    group.all_reduce(x)
    group.reduce_scatter(x)
    group.all_gather([one[: 24 // ranks] for one in x])
    group.all_to_all(x)
    share = (ranks - 1) / ranks * size_bytes
    wanted = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
    for op, times in wanted.items():
        count = group.traffic.of("team", op)
        assert (count.calls, count.size_bytes) == (1, size_bytes)
        assert count.sent_bytes == pytest.approx(times * share, abs=0.5)


def test_one_rank_sends_nothing_and_a_message_is_counted() -> None:
    group = group_of(1)
    x = draw(1, 4)
    assert group.all_reduce(x) is not None and group.all_to_all(x) is not None
    assert group.traffic.counts == {}
    np.testing.assert_array_equal(send(x, group.traffic)[0], x[0])
    assert group.traffic.of("stage", "send").size_bytes == 32
    assert group.traffic.sent_bytes("stage") == 32 and group.traffic.sent_bytes("team") == 0


# -- the tape -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "step",
    [
        copy_in,
        sum_out,
        exchange,
        lambda t, x, g: gather_in(t, x, g, 1),
        lambda t, x, g: scatter_out(t, x, g, 1),
    ],
    ids=["copy", "sum", "exchange", "gather", "scatter"],
)
def test_a_step_and_its_conjugate_are_adjoint(step) -> None:
    """<step(x), g> = <x, conjugate(g)>: summed over ranks where x or y differ by rank.

    `copy_in` and `sum_out` count a quantity that all ranks share once, so that one of the two inner
    products is taken on one rank only.
    """
    group = group_of(4)
    tape = Tape()
    shared = draw(1, 4, 8)[0]
    x = Var([shared] * 4 if step is copy_in else draw(4, 4, 8))
    y = step(tape, x, group)
    grads = (
        [g for g in draw(1, *y.shape) for _ in range(4)] if step is sum_out else draw(4, *y.shape)
    )
    tape.backward(y, grads)
    left = [float((a * g).sum()) for a, g in zip(y.values, grads, strict=True)]
    right = [float((a * g).sum()) for a, g in zip(x.values, x.grads, strict=True)]
    one = left[0] if step is sum_out else sum(left)
    other = right[0] if step is copy_in else sum(right)
    assert one == pytest.approx(other, rel=1e-12)


# -- cross-entropy --------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_cross_entropy_equals_the_operator(ranks: int) -> None:
    tokens = 7
    words = 12
    logits = 30 * RNG.normal(size=(tokens, words))
    targets = RNG.integers(words, size=tokens)
    one_hot = np.eye(words)[targets]
    weights = RNG.normal(size=tokens)
    operator = ops.get("cross_entropy")
    wanted = operator.reference(logits, one_hot)
    slope, _ = ops.gradient(operator, [weights], [logits, one_hot], [wanted])
    group = group_of(ranks)
    tape = Tape()
    x = Var(parts(logits, group, 1))
    y = cross_entropy(tape, x, [targets] * ranks, group)
    tape.backward(y, [weights] * ranks)
    for r in range(ranks):
        np.testing.assert_allclose(y.values[r], wanted, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.concatenate(x.grads, 1), slope, rtol=1e-12, atol=1e-12)


ADAM = values.Adam(lr=0.01)
MODEL = values.transformer(layers=1)
DATA = values.sentences(12)


@cache
def mixed(ranks: int, start: float, interval: int = 1000) -> MixedRun:
    scale = DynamicLossScale(start, growth_interval=interval)
    return values.train_mixed(MODEL, DATA, ADAM, ranks, scale)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_losses_follow_those_of_fp64(ranks: int) -> None:
    wanted = values.train_single(MODEL, DATA, ADAM).losses
    found = mixed(ranks, 2.0**10)
    assert not any(found.skipped)
    np.testing.assert_allclose(found.losses, wanted, rtol=0.01)
    assert all(w.dtype == np.float32 for w in found.parameters.values())


@pytest.mark.parametrize("ranks", [2, 4])
def test_overflow_skips_the_step_on_all_ranks_and_halves_the_scale(ranks: int) -> None:
    run = mixed(ranks, 2.0**24)
    skips = run.skipped.index(False)
    assert 0 < skips < len(DATA) and not any(run.skipped[skips:])
    assert run.scales == tuple(2.0 ** (24 - min(n, skips)) for n in range(len(DATA)))
    # skipped steps leave no trace: training as if it began there, with the scale it ended at
    later = values.train_mixed(
        MODEL, DATA[skips:], ADAM, ranks, DynamicLossScale(2.0 ** (24 - skips))
    )
    assert later.losses == run.losses[skips:]
    for key, weight in later.parameters.items():
        np.testing.assert_array_equal(run.parameters[key], weight)


def test_a_scale_that_is_too_small_loses_the_gradients() -> None:
    assert mixed(1, 2.0**-16).zeros[0] > 0.1 + mixed(1, 2.0**10).zeros[0]
    lost = mixed(1, 2.0**-26)
    assert set(lost.zeros) == {1.0}
    for key, weight in MODEL.weights.items():
        np.testing.assert_array_equal(lost.parameters[key], weight.astype(np.float32))


def test_a_batch_that_ranks_do_not_divide() -> None:
    with pytest.raises(ClusterError, match="a batch divisible by 3"):
        mixed(3, 1.0)


def test_first_choices_and_earlier_tokens_come_first() -> None:
    chances = np.array([[[0.6, 0.4, 0.0], [0.7, 0.1, 0.2], [0.1, 0.5, 0.4]]])
    sent = route(chances, top=2, capacity=2)[0]
    # expert 0 is full with the first choices of tokens 0 and 1, expert 1 with 2's and 0's
    assert sent[:, 0].tolist() == [[1, 0], [0, 1], [0, 0]]
    assert sent[:, 1].tolist() == [[0, 1], [0, 0], [1, 0]]
    assert sent[:, 2].tolist() == [[0, 0], [1, 0], [0, 1]]


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 6))
def test_slots_hold_one_token_and_tokens_go_to_their_best(
    seed: int, top: int, capacity: int
) -> None:
    chances = np.random.default_rng(seed).random((2, 7, 4))
    sent = route(chances, top, capacity)
    assert sent.sum(axis=1).max() <= 1
    went = sent.sum(axis=-1)
    assert went.max() <= 1 and went.sum(axis=-1).max() <= top
    best = np.argsort(-chances, axis=-1)[..., :top]
    allowed = np.zeros_like(went)
    np.put_along_axis(allowed, best, 1, axis=-1)
    assert (went <= allowed).all()
    # a token is dropped only where the expert is full
    full = sent.sum(axis=(1, 3)) == capacity
    assert (full[:, None] | (went == allowed)).all()


@pytest.mark.parametrize(("factor", "slots"), [(1.0, 4), (1.25, 5), (0.01, 1), (2.0, 8)])
def test_capacity(factor: float, slots: int) -> None:
    assert capacity_of(tokens=8, experts=4, top=2, factor=factor) == slots


def keep(tape: Tape, x: Var, *rest: object) -> Var:
    return tape.record([x], x.values, lambda g: [g])


def own_slice(group: Group, arrays: list, axis: int = 0) -> list:
    return [np.split(a, group.ranks, axis)[group.place(r)] for r, a in enumerate(arrays)]


def last_only(self: weights.Replicas, key: str, var: Var) -> None:
    self.grads[key] = var.grads


def no_sums(wanted: str) -> Callable[..., tuple[str, ...]]:
    right = weights.Sharding.reduction_groups
    return lambda self, piece, name: tuple(a for a in right(self, piece, name) if a != wanted)


def biased_leave(net: Net, x: Var) -> Var:
    """Add the bias on every rank before the sum: it counts once a rank."""
    y = net.enter(net.norm(x, "mlp.norm"))
    y = net.linear(net.apply("gelu", net.linear(y, "up", "up.bias")), "down", "down.bias")
    return net.apply("add", x, net.leave(y))


def first_positions(net: Net, length: int) -> Var:
    """Give every rank the positions of the first one's part of the sequence."""
    position = net["position"]
    rest = (len(position.values[0]) - length, position.shape[1])

    def slope(grads: list) -> list:
        return [[np.concatenate([g, np.zeros(rest)]) for g in grads]]

    return net.tape.record([position], [v[:length] for v in position.values], slope)


TENSOR = Plan(tensor=2)
DATA_GROUP = Plan(data=2)
MISTAKES = {
    "no all-reduce backward": (values.group, "copy_in", keep, TENSOR, "transformer"),
    "no all-reduce forward": (values.group, "sum_out", keep, TENSOR, "transformer"),
    "bias before the sum": (models, "mlp", biased_leave, TENSOR, "transformer"),
    "own maximum": (Group, "all_gather", lambda g, a, axis=0: a, TENSOR, "transformer"),
    "norms not summed": (
        *(weights.Sharding, "reduction_groups", no_sums("tensor")),
        *(Plan(tensor=2, sequence=True), "transformer"),
    ),
    "gradients not summed": (
        weights.Sharding,
        "reduction_groups",
        no_sums("data"),
        DATA_GROUP,
        "transformer",
    ),
    "experts summed by nobody": (
        *(weights.Sharding, "reduction_groups", no_sums("replica")),
        *(Plan(data=4, expert=2), "experts"),
    ),
    "scatter without a sum": (
        *(Group, "reduce_scatter", own_slice),
        *(Plan(data=2, zero_stage=3), "transformer"),
    ),
    "last micro-batch only": (
        *(weights.Replicas, "keep", last_only),
        *(Plan(micro_batches=4), "transformer"),
    ),
    "experts at home": (models, "exchange", keep, Plan(data=2, expert=2), "experts"),
    "positions of the first rank": (
        *(models, "_positions", first_positions),
        *(Plan(tensor=2, sequence=True), "transformer"),
    ),
}


COPIES_DIFFER = (
    "no all-reduce backward",
    "no all-reduce forward",
    "norms not summed",
    "gradients not summed",
    "experts summed by nobody",
)
"""Mistakes after which ranks that should hold equal arrays do not."""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(name: str, monkeypatch) -> None:
    owner, attribute, wrong, plan, model_name = MISTAKES[name]
    model, data, single = case(model_name)
    monkeypatch.setattr(owner, attribute, wrong)
    if name in COPIES_DIFFER:
        with pytest.raises(ClusterError, match="equal copies"):
            values.train(model, data, SGD, plan)
    else:
        run = values.train(model, data, SGD, plan)
        assert distance(run, single) > 1e-4


def test_parameters_dropped_too_early_are_missed(monkeypatch) -> None:
    """Stage 3 must gather again for the backward pass: the dropped weights are really gone."""
    monkeypatch.setattr(weights.Sharded, "release", lambda self, tape, piece, found: drop(found))
    model, data, _ = case("perceptron")
    with pytest.raises((ValueError, IndexError)):
        values.train(model, data, SGD, Plan(data=2, zero_stage=3))


def drop(found: dict[str, Var]) -> None:
    for var in found.values():
        var.values = []


def test_small_gradients_vanish_without_a_scale() -> None:
    grads = {"w": np.array([0.0, 1e-9, 1e-7, 1e-3])}
    assert values.vanishing(grads) == pytest.approx(1 / 3)
    assert values.vanishing(grads, 2.0**10) == 0.0
