"""Does a tuned kernel compute what the default one computes? Both run on the same random inputs.

The operators' definitions are computed first, which is quicker: only a kernel that is not close to
these is compared with the default one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.aoe.operators import Operator, base_name
from ascend_lab.errors import AscendLabError
from ascend_lab.graph import TensorType
from ascend_lab.graph.evaluate import evaluate
from ascend_lab.graph.lower import Choice, Lowered, Piece, lower, packed
from ascend_lab.layout import unpack
from ascend_lab.ops.formats import numpy_type
from ascend_lab.sim import execute

Values = NDArray[Any]
TOLERANCE = {"fp32": 1e-4, "fp16": 4e-3, "bf16": 3e-2}
"""Share of the largest value by which results may differ: sums in another order, then rounded."""


def agree(operator: Operator, choice: Choice, seed: int = 0) -> str:
    """Return "" if the chosen kernel gives the default's values, else what differs."""
    piece, chip = operator.piece, operator.chip
    inputs = random_inputs(piece, np.random.default_rng(seed))
    try:
        tuned = run(lower(piece, chip, choice), piece, inputs, operator)
        # half the tolerance: the default may be as far on the other side
        if not _differs(piece, tuned, evaluate(piece.graph, inputs), 0.5):
            return ""
        return _differs(piece, tuned, run(lower(piece, chip), piece, inputs, operator))
    except AscendLabError as error:
        return str(error)


def _differs(
    piece: Piece, tuned: Mapping[str, Values], wanted: Mapping[str, Values], share: float = 1.0
) -> str:
    """Return "" if values agree within a share of the tolerance, else what differs."""
    for name, values in wanted.items():
        apart = _apart(tuned[name], values)
        if not apart <= share * TOLERANCE.get(piece.type(name).dtype, 0.0):
            return f"{piece.names[name]} differs by {apart:.2g} of its largest value"
    return ""


def _apart(got: Values, wanted: Values) -> float:
    """Return the largest difference as a share of the largest finite value.

    What is infinite or no number on both sides, as formulas may say, is no difference.
    """
    got, wanted = (a.astype(np.float64).reshape(-1) for a in (got, wanted))
    other = ~((got == wanted) | (np.isnan(got) & np.isnan(wanted)))
    if not other.any():
        return 0.0
    scale = max(1.0, float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)))
    return float(np.abs(got[other] - wanted[other]).max()) / scale


def random_inputs(piece: Piece, rng: np.random.Generator) -> dict[str, Values]:
    """Return an array per input: small numbers, or indices and counts that every operator takes."""
    found = {}
    for name in piece.graph.inputs:
        kind = piece.type(name)
        if kind.dtype.startswith(("int", "uint")):
            array = rng.integers(0, 2, kind.shape)
        else:
            array = rng.uniform(0.1, 1.0, kind.shape) * rng.choice([-1.0, 1.0], kind.shape)
            array = np.abs(array) if _needs_positive(piece, name) else array
        found[name] = array.astype(numpy_type(kind.dtype))
    return found


def _needs_positive(piece: Piece, name: str) -> bool:
    """Tell whether an operator that reads the tensor takes positive numbers only."""
    return any(
        n.op in ("log", "sqrt", "rsqrt", "pow") for n in piece.graph.nodes if name in n.inputs
    )


def run(
    lowered: Lowered, piece: Piece, inputs: Mapping[str, Values], operator: Operator
) -> dict[str, Values]:
    """Return what a kernel writes, on poisoned memory, operands stored as it asks."""
    tensors = dict(lowered.extra)
    for buffer in lowered.kernel.tensors:
        base = base_name(buffer)
        if base in inputs and buffer.name not in tensors:
            form = lowered.forms.get(buffer.name)
            array = inputs[base]
            tensors[buffer.name] = form(array) if form else packed(piece.type(base), array)
    memory = execute(lowered.kernel, tensors, operator.chip)
    return {n: _logical(piece.type(n), np.asarray(memory[n])) for n in piece.graph.outputs}


def _logical(kind: TensorType, stored: Values) -> Values:
    """Return a tensor as operators see it: what pads its layout is left out."""
    flat = stored.reshape(-1)
    return flat if kind.layout == "ND" else unpack(kind.map, flat)
