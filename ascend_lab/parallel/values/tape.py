"""Reverse-mode differentiation of a program that several ranks run in step.

Operators and their gradients are the operator library's; what is added here is the pair of
communication steps: whatever a step moves forward, its conjugate moves back.

    forward                 backward
    copy (nothing)          all-reduce
    all-reduce              copy (nothing)
    all-gather              reduce-scatter
    reduce-scatter          all-gather
    all-to-all              all-to-all
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ascend_lab import ops
from ascend_lab.parallel.values.group import Group, Ranked

VIEWS = ("reshape", "transpose")
"""Operators whose output is their input, seen otherwise."""


class Var:
    """A quantity on the tape: `values` and, after the backward pass, `grads`, one array a rank."""

    __slots__ = ("grads", "values")

    def __init__(self, values: Ranked) -> None:
        self.values = values
        self.grads: Ranked | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on each rank."""
        return self.values[0].shape

    def add(self, grads: Ranked) -> None:
        """Add to the gradient."""
        old = self.grads
        self.grads = grads if old is None else [a + b for a, b in zip(old, grads, strict=True)]


class Tape:
    """The steps of a forward pass, each with what undoes it; `backward` runs them in reverse."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []
        self.elements = 0  # of all outputs kept on the first rank

    def record(
        self,
        inputs: Sequence[Var],
        out: Ranked,
        slope: Callable[[Ranked], Any],
        new: bool = True,
    ) -> Var:
        """Return a variable; `slope(grads)` gives one gradient (or None) for each input.

        `new`: the output needs memory of its own (it is not another view of an input).
        """
        var = Var(out)
        if new and not any(np.may_share_memory(out[0], one.values[0]) for one in inputs):
            self.elements += out[0].size

        def back() -> None:
            if var.grads is None:
                return
            found = slope(var.grads)
            for one, grads in zip(inputs, found, strict=True):
                if grads is not None:
                    one.add(grads)

        self.steps.append(back)
        return var

    def apply(self, name: str, *inputs: Var, **attrs: Any) -> Var:
        """Apply an operator of the library on every rank."""
        operator = ops.get(name)
        given = list(zip(*(var.values for var in inputs), strict=True))
        out = [operator.reference(*arrays, **attrs) for arrays in given]

        def slope(grads: Ranked) -> list[Ranked | None]:
            # read again: a gathered parameter was dropped and gathered anew in the meantime
            arrays = zip(*(var.values for var in inputs), strict=True)
            rows = [
                ops.gradient(operator, [g], xs, [y], **attrs)
                for g, xs, y in zip(grads, arrays, out, strict=True)
            ]
            return [None if one[0] is None else list(one) for one in zip(*rows, strict=True)]

        return self.record(inputs, out, slope, name not in VIEWS)

    def backward(self, last: Var, grads: Ranked) -> None:
        """Run the steps in reverse from the gradient of the last variable."""
        last.add(grads)
        for step in reversed(self.steps):
            step()


def copy_in(tape: Tape, x: Var, group: Group) -> Var:
    """Enter a region where ranks do different work on equal x: all-reduce on the way back."""
    return tape.record([x], x.values, lambda g: [group.all_reduce(g)])


def sum_out(tape: Tape, x: Var, group: Group) -> Var:
    """Leave it: add up the partial results, nothing on the way back."""
    return tape.record([x], group.all_reduce(x.values), lambda g: [g])


def gather_in(tape: Tape, x: Var, group: Group, axis: int) -> Var:
    """Enter it with x split along an axis: all-gather, and reduce-scatter on the way back."""
    return tape.record(
        [x], group.all_gather(x.values, axis), lambda g: [group.reduce_scatter(g, axis)]
    )


def scatter_out(tape: Tape, x: Var, group: Group, axis: int) -> Var:
    """Leave it with the sum split along an axis: reduce-scatter, and all-gather back."""
    return tape.record(
        [x], group.reduce_scatter(x.values, axis), lambda g: [group.all_gather(g, axis)]
    )


def exchange(tape: Tape, x: Var, group: Group) -> Var:
    """Send part i of axis 0 to rank i: its own conjugate."""
    return tape.record([x], group.all_to_all(x.values), lambda g: [group.all_to_all(g)])
