"""Matrix products on the cube: matmul, batch_matmul and gemm, and the choice of their schedules.

A kernel can divide K over groups of cores (split-K). This helps if a product has fewer tiles of C
than the chip has cores, or if every core reads much of A and B for its few tiles. Each group then
multiplies a part of K: the cube's phase stores partial sums, and a second phase on the vector unit
adds them and applies the epilogue.

The last tiles are not balanced: with 40 tiles on 32 cores, 8 cores compute a second tile while 24
wait. Stream-K (CUTLASS, CATLASS) would divide K of those last 8 tiles over all cores.

The default schedule is the one that is fastest in simulation, among a few with low estimates.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ascend_lab.errors import AscendLabError, CapacityError, ShapeError, TypeMismatchError
from ascend_lab.machine import isa
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.sim import DeviceMemory, simulate_kernel
from ascend_lab.machine.sim.timeline import Start, start_cycles
from ascend_lab.operators import dsl as te
from ascend_lab.operators.dsl import Tensor
from ascend_lab.operators.kernels import GemmSchedule, GemmShape, default_schedules, gemm
from ascend_lab.operators.kernels.epilogue import Epilogue
from ascend_lab.operators.ops import formats as forms, gradients
from ascend_lab.operators.ops.expressions import narrow
from ascend_lab.operators.ops.formats import Shape, TypeRule, Values, rounded
from ascend_lab.operators.ops.operator import Example, Grads, define
from ascend_lab.operators.ops.slicing import AxisRule, Reduction, SliceRules, Source, following

SUMS = rounded(fp32_ulps=64, atol=2.0**-14)
"""Sums of k products in fp32 have errors of up to k units of the largest partial sum: `atol`."""


def cube_result(main: str, attrs: Mapping[str, Any]) -> str:
    """Return the output format: out_dtype if it is given, else the operands' (int8: int32)."""
    allowed = ("int32",) if main == "int8" else (main, "fp32")
    out_dtype = attrs.get("out_dtype") or allowed[0]
    if out_dtype not in allowed:
        needed = f"out_dtype {' or '.join(allowed)} for {main} operands"
        raise TypeMismatchError(needed, str(out_dtype), "cast the result")
    return str(out_dtype)


CUBE_TYPES = TypeRule(forms.CUBE_INPUTS, result=cube_result, unit="cube")


def product_shape(a: Shape, b: Shape, trans_a: bool, trans_b: bool) -> Shape:
    """Return (..., m, n); raise `ShapeError` with both shapes if the inner sizes differ."""
    # a (3, 5, 4), b (4, 7) give (3, 5, 7). With both transposed, a (4, 5), b (7, 4) give (5, 7).
    m, ka = a[-2:][::-1] if trans_a else a[-2:]
    kb, n = b[-2:][::-1] if trans_b else b[-2:]
    if ka != kb:
        got = f"{ka} in a {a} and {kb} in b {b}"
        raise ShapeError("equal inner sizes", got, "transpose or reshape one")
    return (*forms.broadcast_shape("batches", a[:-2], b[:-2]), m, n)


def _matrices(a: Shape, b: Shape, *, trans_a: bool, trans_b: bool, **attrs: Any) -> Shape:
    forms.check_rank("a (m, k)", a, 2)
    forms.check_rank("b (k, n)", b, 2)
    return product_shape(a, b, trans_a, trans_b)


def _batches(a: Shape, b: Shape, *, trans_a: bool, trans_b: bool, **attrs: Any) -> Shape:
    for name, shape in (("a", a), ("b", b)):
        if len(shape) < 2:
            needed = f"{name}: a batch of matrices (..., rows, columns)"
            raise ShapeError(needed, str(shape), "reshape it")
    return product_shape(a, b, trans_a, trans_b)


def transposed_if(x: Values, trans: bool) -> Values:
    """Return x, with its last two axes exchanged if `trans`."""
    return np.swapaxes(x, -1, -2) if trans else x


def product(a: Values, b: Values, *, trans_a: bool, trans_b: bool, **attrs: Any) -> Values:
    """Return the matrix product in NumPy."""
    result: Values = transposed_if(a, trans_a) @ transposed_if(b, trans_b)
    return result


def product_gradients(s: gradients.Site, op: str, grad: Any, trans_a: bool, trans_b: bool) -> Grads:
    """Return dA = G B^T and dB = A^T G, each in the orientation in which A and B are stored.

    If B is stored as B^T, its gradient is G^T A. No transposes are needed, because operator `op`
    reads transposed operands. B is usually the weight, so its gradient comes first.
    """
    net = s.net
    grad_a = None
    grad_b = None
    grad = net.in_format(grad, s.kind().dtype)
    if s.needs_gradient[1]:
        if trans_b:  # b holds B^T: its gradient is G^T A, and A is read transposed if a holds A^T
            grad_b = net.add_node(op, grad, s.x(0), trans_a=True, trans_b=trans_a)
        else:
            grad_b = net.add_node(op, s.x(0), grad, trans_a=not trans_a, trans_b=False)
        grad_b = net.summed_to(grad_b, s.shape(1))
    if s.needs_gradient[0]:
        if trans_a:  # a holds A^T: its gradient is B G^T
            grad_a = net.add_node(op, s.x(1), grad, trans_a=trans_b, trans_b=True)
        else:
            grad_a = net.add_node(op, grad, s.x(1), trans_a=False, trans_b=not trans_b)
        grad_a = net.summed_to(grad_a, s.shape(0))
    return grad_a, grad_b


def matmul_rules(a: Shape, b: Shape, trans_a: bool, trans_b: bool, **others: Any) -> SliceRules:
    """Return rules: batch axes, rows and columns are free; pieces of the inner axis are summed."""
    out_shape = product_shape(a, b, trans_a, trans_b)
    batch_sources = following((a[:-2], b[:-2]), out_shape[:-2])
    # positions of the axes m and k in a, then n and k in b
    row, inner_a = (len(a) - 1, len(a) - 2) if trans_a else (len(a) - 2, len(a) - 1)
    column, inner_b = (len(b) - 2, len(b) - 1) if trans_b else (len(b) - 1, len(b) - 2)
    column_axis = len(out_shape) - 1
    axes = (
        *(AxisRule(i, "free", sources, (i,)) for i, sources in enumerate(batch_sources)),
        AxisRule(column_axis - 1, "free", (Source(0, row),), (column_axis - 1,)),
        AxisRule(column_axis, "free", (Source(1, column),), (column_axis,)),
    )
    return SliceRules("CubeMatmul", axes, (Reduction(((0, inner_a), (1, inner_b)), "sum"),))


def batched_product(
    a: Tensor, b: Tensor, trans_a: bool, trans_b: bool, out_dtype: str | None
) -> Tensor:
    """Return a @ b, with batch axes broadcast to a common shape."""
    batch = forms.broadcast_shape("batches", a.shape[:-2], b.shape[:-2])
    stretched_a, stretched_b = (te.broadcast(t, (*batch, *t.shape[-2:])) for t in (a, b))
    return te.matmul(stretched_a, stretched_b, trans_a, trans_b, out_dtype)


_ATTRS = {"trans_a": False, "trans_b": False, "out_dtype": None}
_SIZES = ((1, 1, 1), (16, 16, 16), (17, 33, 31), (32, 64, 48), (5, 130, 7))


def _register(name: str, summary: str, rule: Any, examples: tuple[Example, ...]) -> None:
    define(
        name,
        ("a", "b"),
        product,
        batched_product,
        summary,
        outputs=("c",),
        attrs=_ATTRS,
        shape_rule=rule,
        types=CUBE_TYPES,
        slicing=lambda shapes, **attrs: matmul_rules(*shapes, **attrs),
        backward=lambda s: product_gradients(s, s.op, s.g, s.attrs["trans_a"], s.attrs["trans_b"]),
        traits=("product",),
        weights=(0, 1),
        tolerances=SUMS,
        examples=examples,
    )


_register(
    "matmul",
    "c = a b for a (m, k), b (k, n); trans_a, trans_b: stored (k, m), (n, k)",
    _matrices,
    (
        *(Example(((m, k), (k, n))) for m, k, n in _SIZES),
        Example(((33, 17), (33, 5)), {"trans_a": True}),
        Example(((17, 33), (5, 33)), {"trans_b": True}),
        Example(((40, 24), (8, 40)), {"trans_a": True, "trans_b": True}),
    ),
)
_register(
    "batch_matmul",
    "a batch of products (..., m, k) (..., k, n); batch axes broadcast",
    _batches,
    (
        Example(((1, 1, 1), (1, 1, 1))),
        Example(((3, 17, 16), (3, 16, 33))),
        Example(((2, 3, 7, 5), (3, 5, 4))),
        Example(((2, 1, 16, 8), (1, 2, 9, 8)), {"trans_b": True}),
    ),
)


# -- gemm -----------------------------------------------------------------------------------------
def _gemm_shape(
    a: Shape, b: Shape, bias: Shape, *, trans_a: bool, trans_b: bool, **attrs: Any
) -> Shape:
    out_shape = _matrices(a, b, trans_a=trans_a, trans_b=trans_b)
    if forms.broadcast_shape("bias and product", out_shape, bias) != out_shape:
        raise ShapeError(f"a bias that broadcasts to {out_shape}", str(bias), "reshape it")
    return out_shape


def _gemm_values(
    a: Values, b: Values, bias: Values, *, alpha: float, beta: float, **attrs: Any
) -> Values:
    result: Values = alpha * product(a, b, **attrs) + beta * bias
    return result


def _gemm(
    a: Tensor, b: Tensor, bias: Tensor, *, alpha: float, beta: float, **transposes: bool
) -> Tensor:
    """Return alpha a b + beta bias, scaled and added in fp32 and rounded once."""
    sums = te.matmul(a, b, transposes["trans_a"], transposes["trans_b"], "fp32")
    wide_bias = te.broadcast(te.cast_to(bias, "fp32"), sums.shape)
    scaled = sums if alpha == 1 else te.vmuls(sums, alpha)
    return narrow(te.vadd(scaled, wide_bias if beta == 1 else te.vmuls(wide_bias, beta)), a.dtype)


def _gemm_slices(
    shapes: tuple[Shape, ...], *, trans_a: bool, trans_b: bool, **attrs: Any
) -> SliceRules:
    a, b, bias = shapes
    rules = matmul_rules(a, b, trans_a, trans_b)
    out_shape = product_shape(a, b, trans_a, trans_b)
    # A bias (n,) is cut with the columns, a bias (m, n) with rows and columns.
    bias_sources = following((bias,), out_shape)
    axes = []
    for rule in rules.axes:
        sources_of_bias = (Source(2, source.axis) for source in bias_sources[rule.axis])
        sources = (*rule.sources, *sources_of_bias)
        axes.append(AxisRule(rule.axis, rule.kind, sources, rule.joins))
    return SliceRules("CubeMatmul", tuple(axes))


def _gemm_slopes(s: gradients.Site) -> Grads:
    """Return alpha dA, alpha dB and dbias = beta times the sum of g over its broadcast axes."""
    net = s.net
    alpha = s.attrs["alpha"]
    beta = s.attrs["beta"]
    # A bias (n,) was added to each of m rows: its gradient is the sum of these rows.
    bias = net.scaled(net.summed_to(s.g, s.shape(2)), beta) if s.needs_gradient[2] else None
    flags = s.attrs["trans_a"], s.attrs["trans_b"]
    return *product_gradients(s, "matmul", net.scaled(s.g, alpha), *flags), bias


define(
    "gemm",
    ("a", "b", "bias"),
    _gemm_values,
    _gemm,
    "alpha a b + beta bias, bias broadcast over rows: a fully connected layer",
    outputs=("c",),
    attrs={"alpha": 1.0, "beta": 1.0, "trans_a": False, "trans_b": False},
    shape_rule=_gemm_shape,
    types=TypeRule(("fp16", "bf16"), unit="cube"),
    slicing=_gemm_slices,
    backward=_gemm_slopes,
    traits=("product",),
    weights=(0, 1, 2),
    tolerances=SUMS,
    examples=(
        Example(((1, 1), (1, 1), (1,))),
        Example(((17, 33), (33, 16), (16,))),
        Example(((5, 16), (7, 16), (5, 7)), {"trans_b": True, "alpha": 0.5, "beta": 2.0}),
    ),
)


# -- the kernel ------------------------------------------------------------------------------------
Finish = Callable[[Tensor], Tensor]
"""The epilogue of split-K: from sums (N1, M1, 16, 16) in the accumulator's format to C."""
K_PARTS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
"""Numbers of parts of K to try."""
SPLIT_K_THRESHOLD = 1.25
"""Split-K is tried for products whose time is more than 1.25 times their lower bound."""
SMALLEST_PART_FRACTALS = 8
"""The smallest part of K, in fractals: 8 x 16 = 128 elements in fp16."""
SUMMING_PHASE_CYCLES = 500
"""Estimated cycles of the summing phase in addition to its loads."""
K_TILINGS = ((5, 1), (5, 2), (6, 3), (3, 3))
"""Pairs (K tile in fractals, K tiles per stage) to try with the best tile of C.

They are simulated, because the estimates do not model the first load and the last store well.
"""
TIMED_SPLITS = 3
"""Number of split-K schedules that are simulated."""


@lru_cache(32)
def product_kernel(
    shape: GemmShape,
    chip: Chip,
    schedule: GemmSchedule,
    epilogue: Epilogue | None = None,
    finish: Finish | None = None,
) -> isa.Kernel:
    """Return the kernel of a product with output "c".

    Without split-K it has one phase with the `epilogue`. With split-K, further phases add the
    partial sums and apply `finish` instead, by default a cast to the output's format. Raises the
    errors of `gemm_launch`.
    """
    if schedule.split_k == 1:
        launch = gemm.gemm_launch(shape, chip, schedule, epilogue)
        return isa.Kernel(launch.name, (launch,))
    launch = gemm.gemm_launch(shape, chip, schedule)
    return isa.Kernel(launch.name, (launch, *_summing_phases(shape, chip, schedule, finish)))


def _summing_phases(
    shape: GemmShape, chip: Chip, schedule: GemmSchedule, finish: Finish | None
) -> tuple[isa.Launch, ...]:
    """Return the phases that add the partial sums of C."""
    m1, _, n1 = shape.fractals
    # (parts of K, N1, M1, 16, 16), summed over the first axis.
    partial_shape = (gemm.partial_count(shape, schedule), n1, m1, isa.FRACTAL, isa.FRACTAL)
    sums = te.reduce_sum(te.placeholder(partial_shape, isa.ACCUMULATOR[shape.dtype], "partial"), 0)
    finish_sums = finish or partial(narrow, dtype=shape.out_dtype)
    return te.lower(te.auto_schedule(te.renamed(finish_sums(sums), "c"), chip)).phases


def default_product(
    shape: GemmShape,
    chip: Chip,
    epilogue: Epilogue | None = None,
    finish: Finish | None = None,
    warm: frozenset[str] = frozenset(),
    start: Start = "cold",
) -> GemmSchedule:
    """Return the fastest schedule in simulation, with the tensors `warm` in L2.

    On chips with separate cube and vector cores, a split-K kernel needs both types of cores, which
    makes its `start` longer. Split-K is not tried if there is an epilogue but no `finish` to apply
    it to the sums. Raises the errors of `default_schedule`.
    """

    def cycles(schedule: GemmSchedule) -> int:
        kernel = product_kernel(shape, chip, schedule, epilogue, finish)
        return warm_cycles(kernel, chip, warm, start)

    estimates = default_schedules.promising(shape, chip, epilogue, warm)
    cycles_of = {s: cycles(s) for _, s in estimates}
    best = min(cycles_of, key=cycles_of.__getitem__)
    for fractals, step in K_TILINGS:
        k_tiled = replace(best, base_k=fractals * isa.c0_of(shape.dtype), step_k=step)
        with suppress(CapacityError):
            cycles_of[k_tiled] = cycles(k_tiled)
    # K is divided only if the bound leaves something to gain, and if even a divided product at the
    # bound, with one synchronisation of all cores between its phases, would win
    best_cycles = min(cycles_of.values())
    bound_cycles = least_cycles(shape, chip, warm)
    if best_cycles - start_cycles(chip, start) <= SPLIT_K_THRESHOLD * bound_cycles:
        return min(cycles_of, key=cycles_of.__getitem__)
    vector_start_cycles = 0 if chip.combined else round(chip.mix_start_s * chip.clock_hz)
    split_bound_cycles = (
        start_cycles(chip, start, vector_start_cycles) + bound_cycles + chip.all_cores_cycles
    )
    if (epilogue is None or finish is not None) and split_bound_cycles < best_cycles:
        for _, schedule in split_k_schedules(shape, chip, estimates[0][0], warm):
            try:
                cycles_of[schedule] = cycles(schedule)
            except AscendLabError:  # the summing phase or `finish` has no schedule: keep K whole
                break
    return min(cycles_of, key=cycles_of.__getitem__)


def _chip_share(chip: Chip, parts: int) -> Chip:
    """Return a chip with one of `parts` shares of the cores and of the memories' rates."""
    l2, memory = (
        replace(m, rate_bytes_per_s=m.rate_bytes_per_s / parts)
        for m in (chip.l2, chip.device_memory)
    )
    return replace(chip, core_count=chip.core_count // parts, l2=l2, device_memory=memory)


def split_k_schedules(
    shape: GemmShape, chip: Chip, limit_cycles: float, warm: frozenset[str] = frozenset()
) -> tuple[tuple[float, GemmSchedule], ...]:
    """Return pairs (estimated cycles, split-K schedule), the best first.

    At most `TIMED_SPLITS` are returned, all with estimates below `limit_cycles`.
    """
    m1, k1, n1 = shape.fractals
    load_bytes_per_cycle = chip.path("GM", "UB").rate_bytes_per_cycle * chip.cores_of("vector")
    # each part stores C once in fp32, 4 bytes an element, and the summing phase loads it again
    adding_cycles = m1 * n1 * isa.FRACTAL * isa.FRACTAL * 4 / load_bytes_per_cycle
    estimates = []
    for parts in K_PARTS:
        # K of 1024 is 64 fractals: at most 8 parts of 8 fractals.
        if parts <= min(chip.core_count, k1 // SMALLEST_PART_FRACTALS):
            # one part: k / parts on a share of the chip, with unrounded sums as its output
            share_shape = replace(
                shape, k=-(-shape.k // parts), out_dtype=isa.ACCUMULATOR[shape.dtype]
            )
            share = _chip_share(chip, parts)
            promising = default_schedules.promising(share_shape, share, None, warm, 1)
            part_cycles, schedule = promising[0]
            cycles = part_cycles + parts * adding_cycles + SUMMING_PHASE_CYCLES
            estimates.append((cycles, replace(schedule, split_k=parts)))
    estimates.sort(key=lambda pair: pair[0])
    return tuple(pair for pair in estimates[:TIMED_SPLITS] if pair[0] < limit_cycles)


def least_cycles(shape: GemmShape, chip: Chip, warm: Collection[str] = ()) -> float:
    """Return a lower bound on cycles: max(macs / peak macs per cycle, cold bytes / memory rate)."""
    sizes = {"a": shape.m * shape.k, "b": shape.k * shape.n}
    cold_elements = sum(size for name, size in sizes.items() if name not in warm)
    cold_bytes = cold_elements * DTYPE_BYTES[shape.dtype]
    memory_cycles = cold_bytes / chip.device_memory.rate_bytes_per_s * chip.clock_hz
    macs = shape.ops // 2
    # 1024^3 on a 910A in fp16: 2^30 macs / (4096 * 32 a cycle) = 8192 cycles; reading a and b, 4.2
    # MB at 1.2 kB a cycle, takes less than half of that.
    return max(macs / (chip.macs_per_cycle(shape.dtype) * chip.core_count), memory_cycles)


def warm_cycles(
    kernel: isa.Kernel, chip: Chip, warm: Collection[str], start: Start = "cold"
) -> int:
    """Return the cycles of a kernel, including its start, with the `warm` tensors in L2."""
    tensors = kernel.tensors
    in_l2 = {b.name for b in tensors if not {b.name, base_name(b)}.isdisjoint(warm)}
    timeline = simulate_kernel(kernel, chip, DeviceMemory.holding(chip, tensors, in_l2))
    return replace(timeline, start=start).total_cycles


def base_name(buffer: isa.Buffer) -> str:
    """Return the part of a name before its dot: a kernel may store one tensor in several forms."""
    return buffer.name.partition(".")[0]
