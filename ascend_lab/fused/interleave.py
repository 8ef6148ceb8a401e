"""Writes two lists of work in turns, so that two units of a core are busy at the same time.

For example, 12 pieces for the vector unit and 4 for the cube become 4 turns of a loop, each with 3
pieces of the one and 1 of the other.
"""

from collections.abc import Callable

from ascend_lab.machine.isa import Affine, KernelBuilder
from ascend_lab.operators.kernels.tiles import repeat

Work = tuple[int, Callable[[Affine], None]]
"""How many pieces there are, and the function that writes piece number n."""
NOTHING: Work = 0, lambda _: None


def interleave(k: KernelBuilder, first: Work, second: Work = NOTHING) -> None:
    """Write the pieces of `first` and of `second` in turns, so that both end together.

    What remains of either, 1 of 13 pieces in 4 turns, follows after the last turn.
    """
    turns = min(first[0], second[0]) or max(first[0], second[0], 1)
    with repeat(k, "turn", turns) as turn:
        for count, write in (first, second):
            pieces_per_turn = count // turns
            for position in range(pieces_per_turn):
                write(turn * pieces_per_turn + position)
    for count, write in (first, second):
        remaining = count % turns
        if remaining:
            with repeat(k, "rest", remaining) as index:
                write(index + (count - remaining))
