"""Groups, the tape's conjugate steps, and the cross-entropy of a cut vocabulary."""

import numpy as np
import pytest

from ascend_lab import ops
from ascend_lab.errors import ClusterError
from ascend_lab.parallel.values import Group, Tape, Traffic, Var
from ascend_lab.parallel.values.group import (
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
from ascend_lab.parallel.values.layers import cross_entropy

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


def test_teams_work_apart() -> None:
    x = draw(6, 4)
    found = group_of(3, teams=2).all_reduce(x)
    np.testing.assert_allclose(found[0], x[0] + x[1] + x[2])
    np.testing.assert_allclose(found[5], x[3] + x[4] + x[5])


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
    group, x = group_of(ranks), draw(ranks, 24, 2)
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
    group, x = group_of(1), draw(1, 4)
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
    group, tape = group_of(4), Tape()
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


def test_a_variable_used_twice_adds_its_gradients() -> None:
    tape, x = Tape(), Var([np.array([[2.0, 3.0]])])
    tape.backward(tape.apply("mul", x, x), [np.ones((1, 2))])
    np.testing.assert_array_equal(x.grads[0], [[4.0, 6.0]])


# -- cross-entropy --------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_cross_entropy_equals_the_operator(ranks: int) -> None:
    tokens, words = 7, 12
    logits, targets = 30 * RNG.normal(size=(tokens, words)), RNG.integers(words, size=tokens)
    one_hot, weights = np.eye(words)[targets], RNG.normal(size=tokens)
    operator = ops.get("cross_entropy")
    wanted = operator.reference(logits, one_hot)
    slope, _ = ops.gradient(operator, [weights], [logits, one_hot], [wanted])
    group, tape = group_of(ranks), Tape()
    x = Var(parts(logits, group, 1))
    y = cross_entropy(tape, x, [targets] * ranks, group)
    tape.backward(y, [weights] * ranks)
    for r in range(ranks):
        np.testing.assert_allclose(y.values[r], wanted, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.concatenate(x.grads, 1), slope, rtol=1e-12, atol=1e-12)
