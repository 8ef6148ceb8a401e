"""Cuts samples of a model's inputs into feeds along the axis of the batch.

A feed is the arrays of all inputs for one run. A model may leave sizes open:
("batch", 3, 224, 224). An open size is taken for the batch under these rules:

- It has a name such as "batch", or is the first size of some input.
- It occurs at most once in any input: the n of a mask (n, n) is not a batch, and the mask is not
  cut.
- If all sizes of all outputs are stated, there is no batch.

Inputs without the batch are given once for all feeds, or once for each feed along a first axis of
their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ascend_lab.compiler.ir import Values
from ascend_lab.compiler.onnx.tensors import BATCH_NAME
from ascend_lab.errors import InputError

Sizes = Sequence[int | str]
"""The sizes of a tensor as a model states them; "" stands for an open size without a name."""
ROWS = 16
"""Samples in a feed if the model leaves their number open."""


@dataclass(frozen=True, slots=True)
class Batch:
    """For each input the axis along which samples lie, or None if it has no batch."""

    axes: Mapping[str, int | None]


def batch_of(inputs: Mapping[str, Sizes], outputs: Sequence[Sizes | None]) -> Batch:
    """Return the axes of the batch in a model's inputs; `outputs` holds stated sizes of outputs."""
    closed = [s is not None and all(isinstance(n, int) for n in s) for s in outputs]
    if outputs and all(closed):
        return Batch(dict.fromkeys(inputs))
    places: dict[str, list[tuple[str, int]]] = {}
    for name, sizes in inputs.items():
        for axis, size in enumerate(sizes):
            if isinstance(size, str) and size:
                places.setdefault(size, []).append((name, axis))

    # by name first, then by standing first in an input, then by the number of inputs that have it
    def rank(symbol: str) -> tuple[bool, bool, int]:
        """Return how likely a symbol is the batch: by name, as a first size, by uses."""
        axes = [axis for _, axis in places[symbol]]
        return BATCH_NAME.fullmatch(symbol) is not None, 0 in axes, len(axes)

    # the same symbol twice in one input, as in a mask (n, n), rules it out
    once = [s for s, uses in places.items() if len(dict(uses)) == len(uses)]
    symbols = [symbol for symbol in once if any(rank(symbol)[:2])]
    chosen = dict(places[max(symbols, key=rank)]) if symbols else {}
    # a first size without a name is taken for the batch as well, input by input
    unnamed = {name: 0 for name, sizes in inputs.items() if sizes and sizes[0] == ""}
    return Batch({name: (unnamed | chosen).get(name) for name in inputs})


def feeds_of(
    inputs: Mapping[str, Sizes], batch: Batch, arrays: Mapping[str, Any], flag: str = "samples"
) -> list[dict[str, Values]]:
    """Return arrays of many samples as feeds of 16; the rest that fills no feed is left out.

    40 samples are two feeds of 16, and 5 samples are one feed of 5. `flag` is the name of the
    arrays in messages: the option of a command that named their file.

    Raises `InputError` for arrays of shapes that the inputs do not have, for inputs with different
    numbers of samples, and for zero samples.
    """
    parts: dict[str, list[Values]] = {}
    counts: dict[str, int] = {}
    for name, sizes in inputs.items():
        array = np.asarray(arrays[name])
        axis = batch.axes[name]
        if axis is None:
            parts[name] = _whole(f"{flag} of {name}", sizes, array)
            continue
        if array.ndim != len(sizes) or not _fits(sizes, array.shape):
            raise InputError(f"{flag} of {name} as {_text(sizes)}", str(array.shape), "reshape")
        # 40 samples: rows 16, ends at 16 and 32; the last 8 fill no feed
        counts[name] = array.shape[axis]
        rows = min(ROWS, counts[name])
        ends = range(rows, counts[name] + 1, rows) if rows else ()
        samples = np.moveaxis(array, axis, 0)
        parts[name] = [np.moveaxis(samples[end - rows : end], 0, axis) for end in ends]
    if len(set(counts.values())) > 1:
        got = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise InputError(f"{flag}: as many of each input", got, "give every sample all inputs")
    feed_counts = {
        len(blocks) for name, blocks in parts.items() if len(blocks) > 1 or name in counts
    }
    if not feed_counts:  # no input has the batch, and each is given once: a single feed
        feed_counts = {1}
    if len(feed_counts) != 1 or 0 in feed_counts:
        got = ", ".join(f"{name}: {len(blocks)}" for name, blocks in parts.items())
        needed = f"{flag}: as many whole batches of each input, at least one"
        raise InputError(needed, got, "give every input as many samples")
    total = feed_counts.pop()
    return [
        {name: blocks[i if len(blocks) > 1 else 0] for name, blocks in parts.items()}
        for i in range(total)
    ]


def _whole(name: str, sizes: Sizes, array: Values) -> list[Values]:
    """Return an input without a batch as blocks, one for each feed or one for all.

    An input (2, 3) may be given as (2, 3), once; as (5, 2, 3), once for each of 5 feeds; or as
    (10, 3), which is cut into 5 of (2, 3).
    """
    if array.ndim == len(sizes) + 1 and _fits(sizes, array.shape[1:]):
        return list(array)
    if array.ndim == len(sizes) and _fits(sizes, array.shape):
        return [array]
    # whole batches one after another: only the first axis may be longer than in the model
    head = sizes[0] if sizes else 0
    same_rest = array.ndim == len(sizes) and _fits(sizes[1:], array.shape[1:])
    if same_rest and isinstance(head, int) and head and array.shape[0] >= head:
        return [array[i : i + head] for i in range(0, array.shape[0] - head + 1, head)]
    raise InputError(f"{name} as {_text(sizes)}, or rows of that", str(array.shape), "reshape")


def _fits(sizes: Sizes, shape: Sequence[int]) -> bool:
    return all(isinstance(size, str) or size == n for size, n in zip(sizes, shape, strict=True))


def _text(sizes: Sizes) -> str:
    return f"({', '.join(str(size) or '?' for size in sizes)})"
