"""Mixed precision: fp16 weights, activations and gradients; fp32 masters; dynamic loss scaling.

The loss is multiplied by a scale so that small gradients do not vanish in fp16, and gradients are
divided by it in fp32. A gradient that overflows makes all ranks skip the step and halve the scale;
many good steps in a row double it. Micikevicius et al., "Mixed precision training", 2018.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.parallel.plans.plan import Plan
from ascend_lab.parallel.values.group import Group, Ranked, Traffic, Values, part
from ascend_lab.parallel.values.layers import Batch, Model, Net
from ascend_lab.parallel.values.tape import Tape, Var
from ascend_lab.parallel.values.weights import Cuts, Optimizer, State, flatten, unflatten
from ascend_lab.train.step import DynamicLossScale


@dataclass(frozen=True, slots=True)
class MixedRun:
    """A loss, a scale, whether the step was skipped, and the share of zero gradients, each step."""

    losses: tuple[float, ...]
    scales: tuple[float, ...]
    skipped: tuple[bool, ...]
    zeros: tuple[float, ...]
    parameters: dict[str, Values]
    traffic: Traffic


def train_mixed(
    model: Model,
    batches: Sequence[Batch],
    optimizer: Optimizer,
    ranks: int = 1,
    scale: DynamicLossScale | None = None,
    agree: bool = True,
) -> MixedRun:
    """Train data parallel in fp16; each rank has its part of the fp32 masters (ZeRO stage 1).

    An overflow shows only in some ranks' part of the gradient; `agree=False` leaves out the
    all-reduce of one number that tells the others, and ranks then update alone.
    """
    scale, traffic = scale or DynamicLossScale(), Traffic()
    group = Cuts(Plan(data=ranks)).groups(traffic)["data"]
    flat = flatten([w.astype(np.float32) for w in model.weights.values()], ranks)
    masters = [part(flat, ranks, r, 0) for r in range(ranks)]
    states: list[State] = [optimizer.start(m) for m in masters]
    half, taken = [flat.astype(np.float16)] * ranks, [0] * ranks
    rows: list[tuple[float, float, bool, float]] = []
    for batch in batches:
        loss, grads = _pass(model, half, batch, group, scale.scale)
        zeros = float(np.mean([g == 0 for g in grads]))
        with np.errstate(all="ignore"):  # sums of fp16 may overflow too
            own = group.reduce_scatter([np.pad(g, (0, -len(g) % ranks)) for g in grads])
        bad = _overflows(own, group, agree)
        rows.append((loss, scale.scale, any(bad), zeros))
        for r in range(ranks):
            if not bad[r]:
                taken[r] += 1
                grad = own[r].astype(np.float32) / np.float32(scale.scale)
                masters[r], states[r] = optimizer.update(masters[r], grad, states[r], taken[r])
        half = group.all_gather([m.astype(np.float16) for m in masters])
        scale = scale.next(any(bad))
    losses, scales, skipped, zero_shares = zip(*rows, strict=True)
    parameters = _named(model, np.concatenate(masters))
    return MixedRun(losses, scales, skipped, zero_shares, parameters, traffic)


def vanishing(gradients: Mapping[str, Values], scale: float = 1.0) -> float:
    """Return the share of gradients other than 0 that are 0 in fp16 after scaling."""
    flat = flatten(list(gradients.values()))
    with np.errstate(all="ignore"):
        return float(np.mean((flat[flat != 0] * scale).astype(np.float16) == 0))


def _named(model: Model, flat: Values) -> dict[str, Values]:
    shapes = [w.shape for w in model.weights.values()]
    return dict(zip(model.weights, unflatten(flat, shapes), strict=True))


def _pass(
    model: Model, half: Ranked, batch: Batch, group: Group, scale: float
) -> tuple[float, Ranked]:
    """Return the mean loss and every rank's flat fp16 gradients, multiplied by the scale."""
    ranks = range(group.ranks)
    rows = [part(batch.inputs, group.ranks, r, 0, "a batch") for r in ranks]
    targets = [part(batch.targets, group.ranks, r, 0, "a batch") for r in ranks]
    if rows[0].dtype.kind == "f":
        rows = [row.astype(np.float16) for row in rows]
    named = [_named(model, one) for one in half]
    found = {key: Var([weights[key] for weights in named]) for key in model.weights}
    tape, x = Tape(), Var(rows)
    alone = Cuts(Plan(data=group.ranks)).groups(Traffic())
    with np.errstate(all="ignore"):  # fp16 may overflow: that is what the scale reacts to
        for piece in model.pieces:
            own = {name: found[f"{piece.name}.{name}"] for name in piece.weights}
            x = piece.forward(Net(tape, own, alone), x, targets)
        tape.backward(x, [np.full_like(v, scale / batch.targets.size) for v in x.values])
    loss = sum(float(v.sum()) for v in x.values) / batch.targets.size
    return loss, [flatten([var.grads[r] for var in found.values() if var.grads]) for r in ranks]


def _overflows(own: Ranked, group: Group, agree: bool) -> list[bool]:
    """Return for each rank whether it must skip the step."""
    seen = [np.array([float(not np.isfinite(g).all())], np.float32) for g in own]
    return [bool(flag[0] > 0) for flag in (group.all_reduce(seen) if agree else seen)]
