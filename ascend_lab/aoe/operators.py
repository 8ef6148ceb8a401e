"""Lists the distinct kernels of a network as tuning tasks, and checks a tuned kernel's values.

An operator is timed alone, so that the contents of L2 at its start must be assumed. An input counts
as present if at least half of its bytes hit L2 when the whole network is simulated. All candidates
and the default schedule start from the same state.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab import errors
from ascend_lab.aoe.drive import Trial
from ascend_lab.compiler import evaluate, ir, lower as lowering, network, tasks
from ascend_lab.compiler.lower import (
    CONVOLUTIONS,
    PRODUCTS,
    Choice,
    Lowered,
    Piece,
    lower,
)
from ascend_lab.compiler.lower.conv import by_vector, conv_shape_of
from ascend_lab.compiler.lower.matmul import is_plain, is_weight_gradient
from ascend_lab.compiler.lower.piece import packed
from ascend_lab.compiler.lower.vector import mixed_blocks
from ascend_lab.compiler.rules import special_form
from ascend_lab.compiler.tasks import Compiled, Task
from ascend_lab.machine import isa, layout, sim
from ascend_lab.machine.chip import Chip
from ascend_lab.operators.ops import formats, matmul

WARM_SHARE = 0.5
"""A tensor counts as held by L2 if at least this share of its bytes hits."""
NO_PARAMETERS = "it has no kernel and runs on the AI CPU, without parameters"


@dataclass(frozen=True, slots=True)
class Tunable:
    """An operator to tune: a kernel that occurs `count` times in a network.

    `warm` names the inputs that L2 holds at the start. `unit` says which tuner suits: "cube" (one
    product or convolution), "product" (a batch of products), "joint" (two convolutions whose
    results are added), "vector", or "" if there is nothing to tune, for the given `reason`.
    """

    name: str
    op: str
    piece: Piece
    chip: Chip
    count: int
    warm: frozenset[str]
    default_cycles: int
    unit: str
    reason: str = ""

    @property
    def problem(self) -> str:
        """A text that is equal for equal tuning problems, in whatever networks they occur."""
        return f"{self.piece.key} warm {' '.join(sorted(self.warm))}"

    def cycles(self, kernel: isa.Kernel) -> int:
        """Return the cycles of a kernel for this operator, launch included."""
        return matmul.warm_cycles(kernel, self.chip, self.warm)

    def cycles_of(self, choice: Choice) -> int:
        """Return the cycles of the kernel with a schedule, launch included; raises as `lower`."""
        return self.cycles(lower(self.piece, self.chip, choice).kernel)

    def bounded(
        self, lower_bound: int, trials: Sequence[Trial], size: int | None
    ) -> tuple[int, bool]:
        """Return a lower bound on all schedules, and whether the best trial is proven optimal.

        It is proven if all `size` points of the space ran, or if its time is the `lower_bound`.
        """
        best_cycles = int(min([self.default_cycles, *(t.cost for t in trials)]))
        if sum(t.cost < math.inf for t in trials) == size:
            return best_cycles, True
        return min(lower_bound, best_cycles), best_cycles <= lower_bound


def operators_of(compiled: Compiled) -> tuple[Tunable, ...]:
    """Return the distinct kernels of a network, in order of their first occurrence."""
    groups: dict[str, list[tuple[Task, frozenset[str]]]] = {}
    timelines = {op.name: op.timeline for op in network.simulate_graph(compiled).operators}
    for task in compiled.tasks:
        if task.lowered is not None:
            # A tensor named "w.0" is a part of "w": both count under the name in front of the dot.
            warm = frozenset(
                name.partition(".")[0]
                for name, hit_share in timelines[task.name].hits.items()
                if hit_share >= WARM_SHARE
            )
            groups.setdefault(task.piece.key, []).append((task, warm))
    return tuple(_operator(compiled.chip, group) for group in groups.values())


def _operator(chip: Chip, group: list[tuple[Task, frozenset[str]]]) -> Tunable:
    """Return the tuning task of equal kernels, given with the inputs that each finds in L2."""
    task = group[0][0]
    assert task.lowered is not None
    # The most frequent state of L2 is taken: of 12 equal kernels, 11 may find their input in L2 and
    # only the first may not.
    warm = Counter(warm_names for _, warm_names in group).most_common(1)[0][0]
    kernel = task.lowered.kernel
    if isinstance(kernel, tasks.CpuKernel):
        unit = ""
        reason = NO_PARAMETERS
        cycles = tasks.time_cpu(kernel, chip).total_cycles
    else:
        unit, reason = unit_of(task.piece, chip, task.lowered)
        cycles = matmul.warm_cycles(kernel, chip, warm)
    return Tunable(
        name=task.name,
        op=task.op,
        piece=task.piece,
        chip=chip,
        count=len(group),
        warm=warm,
        default_cycles=cycles,
        unit=unit,
        reason=reason,
    )


def unit_of(piece: Piece, chip: Chip, lowered: Lowered | None = None) -> tuple[str, str]:
    """Return which tuner suits a piece, or "" and the reason why none does."""
    nodes = piece.graph.nodes
    op = nodes[0].op
    special = special_form(piece.graph, nodes)
    if special and special[0].no_tuning_reason:
        return "", special[0].no_tuning_reason
    if op in CONVOLUTIONS:
        # two convolutions in one kernel: the tuner chooses the tiling of both
        if special:
            return "joint", ""
        if nodes[0].inputs[1] not in piece.constants:
            return "", "its weights are computed, not constant"
        shape = conv_shape_of(piece, nodes[0], piece.output.dtype)
        lowered = lowered or tasks.lowered_once(piece, chip)
        if by_vector(shape) and not _uses_cube(lowered.kernel):
            return "", "a depthwise convolution on the vector unit has no parameters"
        return "cube", ""
    if op in PRODUCTS:
        if is_weight_gradient(nodes[0], [piece.type(n) for n in nodes[0].inputs]):
            return "", "a product a^T b has a hand-written kernel without parameters"
        return ("cube" if is_plain(piece) else "product"), ""
    if mixed_blocks(piece):
        return "", "bytes beside wider numbers: they change blocks in kernels without parameters"
    by_cube = False
    if op == "layer_norm":
        lowered = lowered or tasks.lowered_once(piece, chip)
        by_cube = _uses_cube(lowered.kernel)
    only_moves = all(node.op in ir.MOVES for node in nodes)
    if only_moves or by_cube or lowering.by_template(piece, chip):
        return "", "it has a hand-written kernel without parameters"
    return "vector", ""


def _uses_cube(kernel: isa.Kernel) -> bool:
    """Tell whether a kernel has instructions for the cube unit."""
    programs = (core_part.program for phase in kernel.phases for core_part in phase.parts)
    return any(
        instruction.op == "mmad"
        for program in programs
        for instruction, _ in program.instructions()
    )


# -- does a tuned kernel compute what the default one computes? ----------------------------------

Values = np.ndarray
POSITIVE_ONLY = frozenset(("log", "sqrt", "rsqrt", "pow"))
"""Operators that are only tested with positive numbers."""
TOLERANCE = {"fp32": 1e-4, "fp16": 4e-3, "bf16": 3e-2}
"""Largest allowed difference relative to the largest value: the order of sums changes rounding."""


def difference_of(operator: Tunable, choice: Choice, seed: int = 0) -> str:
    """Return "" if the chosen kernel computes the default kernel's values, else what differs.

    Both get the same random inputs. The kernel is first compared with NumPy's values for its
    operators, which takes less time; only if they are not close, the default kernel is run as well.
    """
    piece = operator.piece
    chip = operator.chip
    inputs = random_inputs(piece, np.random.default_rng(seed))
    try:
        tuned = outputs_of(lower(piece, chip, choice), inputs, operator)
        # Half the tolerance, because the default may differ from NumPy by as much in the other
        # direction.
        if not _differs(piece, tuned, evaluate(piece.graph, inputs), 0.5):
            return ""
        return _differs(piece, tuned, outputs_of(lower(piece, chip), inputs, operator))
    except errors.AscendLabError as error:
        return str(error)


def _differs(
    piece: Piece, tuned: Mapping[str, Values], expected: Mapping[str, Values], share: float = 1.0
) -> str:
    """Return "" if values agree within a share of the tolerance, else what differs."""
    for name, values in expected.items():
        difference = _relative_difference(tuned[name], values)
        if not difference <= share * TOLERANCE.get(piece.type(name).dtype, 0.0):
            return f"{piece.names[name]} differs by {difference:.2g} of its largest value"
    return ""


def _relative_difference(got: Values, expected: Values) -> float:
    """Return the largest difference as a share of the largest finite value; NaN equals NaN."""
    got = got.reshape(-1)
    expected = expected.reshape(-1)
    indices = np.flatnonzero(got != expected)
    differing_got = got[indices].astype(np.float64)
    differing_expected = expected[indices].astype(np.float64)
    both_nan = np.isnan(differing_got) & np.isnan(differing_expected)
    differing_got = differing_got[~both_nan]
    differing_expected = differing_expected[~both_nan]
    if not differing_got.size:
        return 0.0
    magnitudes = np.abs(expected, where=np.isfinite(expected), out=np.zeros_like(expected))
    # A difference of 0.1 is rounding for sums near 100. Results below 1 count as 1, or tiny
    # results would fail.
    scale = max(1.0, float(magnitudes.max(initial=0)))
    return float(np.abs(differing_got - differing_expected).max()) / scale


def random_inputs(piece: Piece, rng: np.random.Generator) -> dict[str, Values]:
    """Return a random array per input, within what every operator accepts as a number or index."""
    arrays = {}
    for name in piece.graph.inputs:
        tensor_type = piece.type(name)
        shape = tensor_type.shape
        if tensor_type.dtype.startswith(("int", "uint")):
            # Indices of 0 and 1 are legal for every table of at least two rows.
            array = rng.integers(0, 2, shape)
        else:
            # No zeros: divided by them, both kernels would give infinity, which hides differences.
            array = rng.uniform(0.1, 1.0, shape) * rng.choice([-1.0, 1.0], shape)
            readers = {n.op for n in piece.graph.nodes if name in n.inputs}
            array = np.abs(array) if readers & POSITIVE_ONLY else array
        arrays[name] = array.astype(formats.numpy_type(tensor_type.dtype))
    return arrays


def outputs_of(
    lowered: Lowered, inputs: Mapping[str, Values], operator: Tunable
) -> dict[str, Values]:
    """Execute a kernel of an operator and return its outputs by name.

    Inputs are stored in the layouts that the kernel expects.
    """
    piece = operator.piece
    # `extra` are the kernel's tables and constants; all other tensors are the piece's inputs.
    tensors = dict(lowered.extra)
    for buffer in lowered.kernel.tensors:
        base = matmul.base_name(buffer)
        if base in inputs and buffer.name not in tensors:
            form = lowered.forms.get(buffer.name)
            array = inputs[base]
            tensors[buffer.name] = form(array) if form else packed(piece.type(base), array)
    # The memory is not zero at the start: a kernel that reads uninitialised memory fails the check.
    memory = sim.execute(lowered.kernel, tensors, operator.chip)
    results = {}
    for name in piece.graph.outputs:  # padding of a layout is not compared
        tensor_type = piece.type(name)
        flat = np.asarray(memory[name]).reshape(-1)
        is_plain = tensor_type.layout == "ND"
        results[name] = flat if is_plain else layout.unpack(tensor_type.map, flat)
    return results
