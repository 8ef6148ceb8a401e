"""Plans with one mistake each: the checks of the other tests notice every one."""

from collections.abc import Callable

import numpy as np
import pytest
from values_cases import SGD, case, distance

from ascend_lab.errors import ClusterError
from ascend_lab.parallel import values
from ascend_lab.parallel.values import Net, Plan, layers, models, weights
from ascend_lab.parallel.values.group import Group, Tape, Var


def keep(tape: Tape, x: Var, *rest: object) -> Var:
    return tape.record([x], x.values, lambda g: [g])


def own_slice(group: Group, arrays: list, axis: int = 0) -> list:
    return [np.split(a, group.ranks, axis)[group.place(r)] for r, a in enumerate(arrays)]


def last_only(self: weights.Replicas, key: str, var: Var) -> None:
    self.grads[key] = var.grads


def no_sums(wanted: str) -> Callable[..., tuple[str, ...]]:
    right = weights.Cuts.sums
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


TENSOR, DATA = Plan(tensor=2), Plan(data=2)
MISTAKES = {
    "no all-reduce backward": (layers, "copy_in", keep, TENSOR, "transformer"),
    "no all-reduce forward": (layers, "sum_out", keep, TENSOR, "transformer"),
    "bias before the sum": (layers, "mlp", biased_leave, TENSOR, "transformer"),
    "own maximum": (Group, "all_gather", lambda g, a, axis=0: a, TENSOR, "transformer"),
    "norms not summed": (
        *(weights.Cuts, "sums", no_sums("tensor")),
        *(Plan(tensor=2, sequence=True), "transformer"),
    ),
    "gradients not summed": (weights.Cuts, "sums", no_sums("data"), DATA, "transformer"),
    "experts summed by nobody": (
        *(weights.Cuts, "sums", no_sums("replica")),
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
        *(layers, "_positions", first_positions),
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
