"""Compiles as the vendor's compiler CANN does, with the rules, tilings and launches it documents.

`compile` is this package's compiler. Published measurements are of networks compiled by CANN, which
has other rules: it fuses what its list of passes names, tiles a product by a published function,
and lacks the kernels that are ideas of this package. `cann_road` returns a `Road` with these:

    stage    what CANN does                                         source
    passes   those of `NAMED` in scope GraphFusion                  its documents, `canndev`
    layout   first layers read pixels of 4 channels only if asked   enable_small_channel, off
    fuse     those of `NAMED` in scope UBFusion                     UB fusion patterns, GE
    lower    basic blocks of MatMulV3, also for convolutions        ops-nn, `matmul_v3_base_tiling`
    time     one trigger by the host, then a queue (as here)        aclmdlExecute; sink mode
             no hints to the cache about last reads                 GE, `l2_cache_kernel_launch`

Every pass and rule of this package is either in `NAMED` or in `OURS`; a test checks that.
No number here comes from a measured network.

What the vendor does not publish is not guessed: the tilings of batched products, of vector
operators and of pooling, and the memory plan, are those of this package. So the times may be too
short or too long there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ascend_lab.compiler.compile import Layouts, Road
from ascend_lab.compiler.lower import CONVOLUTIONS, PRODUCTS, Choice
from ascend_lab.compiler.lower.conv import conv_shape_of
from ascend_lab.compiler.lower.matmul import is_plain, is_weight_gradient, product_job
from ascend_lab.compiler.lower.piece import Piece
from ascend_lab.compiler.rules import SMALL_FIRST_LAYERS
from ascend_lab.compiler.switches import Switches
from ascend_lab.compiler.tasks import Compiled, CpuKernel, lowered_once, with_choices
from ascend_lab.errors import AscendLabError, CapacityError
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa import FRACTAL, ceil_div
from ascend_lab.operators.kernels.conv_shape import ConvShape
from ascend_lab.operators.kernels.gemm_schedule import GemmSchedule, GemmShape, check_schedule

# -- which passes and rules the vendor has ---------------------------------------------------------
GRAPH = "GraphFusion"
UB = "UBFusion"
DOCUMENT = "CANN documentation, list of graph and UB fusion patterns"
CANNDEV = "canndev, ops/built-in/fusion_pass"
ONNX_PARSER = "canndev, ops/built-in/fusion_pass, *_onnx_fusion_pass"
ENGINE = "hicann/ge, graph optimisation"
CLEAN_UP = "any compiler's: folding, removal and merging of nodes, which GE does under other names"

NAMED: Mapping[tuple[str, str], str] = {
    (GRAPH, "RequantFusionPass"): DOCUMENT,
    (GRAPH, "DeadCodeEliminationPass"): ENGINE + ": prune_pass",
    (GRAPH, "ConstantFoldingPass"): ENGINE + ": constant_folding_pass",
    (GRAPH, "CommonSubexpressionEliminationPass"): ENGINE + ": common_subexpression_elimination",
    (GRAPH, "IdentityEliminationPass"): ENGINE + ": identity_pass",
    (GRAPH, "ScalarOperandPass"): CLEAN_UP,
    (GRAPH, "AlgebraicSimplificationPass"): CLEAN_UP,
    (GRAPH, "ReassociationPass"): CLEAN_UP,
    (GRAPH, "PermutePass"): ENGINE + ": permute_pass",
    (GRAPH, "ReshapeRemovePass"): ENGINE + ": reshape_remove_pass",
    (GRAPH, "CastRemovePass"): ENGINE + ": cast_remove_pass",
    (GRAPH, "PadConv2dFusionPass"): DOCUMENT,
    (GRAPH, "BatchnormScaleFusionPass"): DOCUMENT,
    (GRAPH, "ConvBatchnormFusionPass"): DOCUMENT,
    (GRAPH, "ConvScaleFusionPass"): DOCUMENT,
    (GRAPH, "AABiasaddConvFusion"): DOCUMENT,
    (GRAPH, "ConvToFullyConnectionFusionPass"): DOCUMENT,
    (GRAPH, "AReduceMeanFusionPass"): DOCUMENT,
    (GRAPH, "GlobalPoolingPass"): ENGINE + ": global average pooling",
    (GRAPH, "LayerNormFusionPass"): ONNX_PARSER,
    (GRAPH, "GeluFusionPass"): ONNX_PARSER,
    (GRAPH, "ActivationFusionPass"): CANNDEV,
    (GRAPH, "BatchMatMulToMatMulPass"): CANNDEV,
    (GRAPH, "GemmToMatMulPass"): CANNDEV,
    (GRAPH, "MatMulBiasAddFusionPass"): DOCUMENT,
    (GRAPH, "PoolingToConvPass"): CANNDEV + ", avg_pool_pass",
    (GRAPH, "GeluErfToTanhPass"): "op_select_implmode=high_performance for Gelu",
    (GRAPH, "Fp16ConversionPass"): "precision_mode=force_fp16, the default of inference",
    (GRAPH, "Bf16ConversionPass"): "precision_mode_v2",
    (GRAPH, "Int8ConversionPass"): "AMCT, Ascend Model Compression Toolkit",
    (UB, "TbeEltwiseQuantFusionPass"): DOCUMENT,
    (UB, "ConfusionTransposeTransDataFusionPass"): CANNDEV + ", confusion_transpose_d_fusion",
    (UB, "TbeConv2dAddRelu6MulMulFusionPass"): DOCUMENT,
    (UB, "TbeConvDoubleInFusionPass"): DOCUMENT,
    (UB, "TbeConvElemwiseFusionPass"): DOCUMENT,
    (UB, "TbeDepthwiseConvElemwiseFusionPass"): DOCUMENT,
    (UB, "TbeConv2DBackpropElemwiseFusionPass"): DOCUMENT,
    (UB, "ATbeMatMulElemwiseFusionPass"): DOCUMENT,
    (UB, "TbeBatchMatmulElementWiseFusionPass"): DOCUMENT,
    (UB, "AutomaticUbFusion"): "hicann/ge, buffer_fusion: auto fusion of one-op patterns",
}
"""Passes and rules, by (scope, name), that a document of the vendor names, and which document."""
OURS: Mapping[tuple[str, str], str] = {
    (GRAPH, "FlashAttentionFusionPass"): "CANN 7.0.RC1 has it for the 910B alone, 6.0 not at all",
    (UB, "FlashAttentionTransposeFusionPass"): "no document has moves inside of attention",
    (UB, "TandemConvolutionFusionPass"): "no document fuses a 1x1 and a depthwise convolution",
    (UB, "ChannelGatesFusionPass"): "no document fuses means, two products and what they scale",
    (UB, "JointConvolutionFusionPass"): "no document adds two convolutions in L0C",
    (UB, "PooledConvolutionFusionPass"): (
        "behind AIPP, of pooling as Caffe and TensorFlow state it; ONNX's is MaxPoolV3, which "
        "tbe_aipp_conv_relu_maxpooling_fusion_pass refuses"
    ),
}
"""Passes and rules that only this package has, and what the vendor has instead."""
ATTENTION = ((GRAPH, "FlashAttentionFusionPass"),)
FUSED_ATTENTION = "Ascend910B"
"""CANN 7 has the attention kernel for chips of this family."""


def switches(chip: Chip) -> Switches:
    """Return switches that turn off all passes and rules that no document of the vendor names."""
    # a name in neither list stays on: a test fails if there is one
    named = dict.fromkeys(NAMED, True) | dict.fromkeys(OURS, False)
    named |= dict.fromkeys(ATTENTION, chip.family.startswith(FUSED_ATTENTION))
    return Switches(named)


# -- tilings ---------------------------------------------------------------------------------------
BLOCK = 128
LONG_BLOCK = 256
DEPTH_BYTES = 128
"""Sides of the basic block in elements, `BLOCK` x `LONG_BLOCK`, and its bytes along K."""
LARGE_L0C_BYTES = 256 * 1024
LEAST_SIDE = 256
"""Products with a side below this many elements are balanced like those of few blocks."""


def product_tiling(shape: GemmShape, chip: Chip) -> GemmSchedule:
    """Return the basic-block tiling of a product.

    The block of L0 is 128 x 256, with 128 bytes of K; with 256 KiB of L0C it is 256 x 256, and the
    sums have no second buffer. If m or n is below 256, or there are fewer blocks than cores, the
    sides of a block are chosen to balance the product over the cores. Each operand gets half of L1,
    in two buffers; both get the smaller of their numbers of blocks along K. Blocks of C are
    distributed to the cores in rounds.
    Source: hicann/ops-nn, matmul_v3_base_tiling.cpp (SetBaseBlockTiling, BalanceBaseBlockTiling,
    CalL1Tiling). Left out: the sides are not swapped for transposed operands, no operand is kept
    whole in L1, K is not split among cores, and there are no tiles for L2.
    """
    # 1000 x 64 x 512 in fp16: 63 x 4 x 32 fractals of 16 x 16
    m1, k1, n1 = shape.fractals
    return _tiling(m1, n1, k1, chip, shape.dtype)


def tiling_of_operator(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[str], chip: Chip, attrs: Mapping[str, Any]
) -> GemmSchedule:
    """Return the tiling of the operator `matmul` that fits a chip; raises as `check_schedule`."""
    (m, k), (_, n) = (
        tuple(reversed(shape)) if attrs.get(name) else tuple(shape)
        for shape, name in zip(shapes, ("trans_a", "trans_b"), strict=True)
    )
    shape = GemmShape(m, k, n, dtypes[0])
    tiling = product_tiling(shape, chip)
    # the vendor's block is made for the largest buffers: on smaller chips its longer side is halved
    while True:
        try:
            check_schedule(shape, tiling, chip)
        except CapacityError:
            smaller = _smaller(tiling)
            if smaller is None:
                raise
            tiling = smaller
        else:
            return tiling


def convolution_tiling(shape: ConvShape, chip: Chip) -> GemmSchedule:
    """Return the same tiling for a convolution: pixels are rows of the product, taps its depth.

    No rule for convolutions is published for these chips: using that of products is an assumption.
    Tiles do not span images.
    """
    product = shape.gemm
    m1, k1, n1 = product.fractals
    height, width = shape.out_hw
    return _tiling(min(m1, ceil_div(height * width, FRACTAL)), n1, k1, chip, shape.dtype, shape.n)


def _tiling(m1: int, n1: int, k1: int, chip: Chip, dtype: str, images: int = 1) -> GemmSchedule:
    """Return the tiling of `images` products of m1 x k1 by k1 x n1 fractals."""
    element_bytes = DTYPE_BYTES[dtype]
    has_large_l0c = chip.buffers["L0C"] >= LARGE_L0C_BYTES
    base_m = min((LONG_BLOCK if has_large_l0c else BLOCK) // FRACTAL, m1)
    base_n = min(LONG_BLOCK // FRACTAL, n1)
    # the number of blocks of C, which are distributed to the cores
    blocks = images * ceil_div(m1, base_m) * ceil_div(n1, base_n)
    # a block takes a whole core, even if few of its rows are filled
    is_short = min(m1, n1) * FRACTAL < LEAST_SIDE
    if is_short or blocks < chip.core_count:
        # 8 blocks on 20 cores would leave 12 idle: smaller blocks
        share_rows, share_columns = _balanced(images * m1, n1, chip.core_count)
        base_m = min(base_m, ceil_div(images * m1, share_rows))
        base_n = min(base_n, ceil_div(n1, share_columns))
    block_bytes = max(base_m, base_n) * FRACTAL * DEPTH_BYTES
    # half of L1 for each operand, in two buffers
    max_steps = max(1, chip.buffers["L1"] // 2 // block_bytes // 2)
    # a fractal is 32 bytes deep: 16 numbers of fp16, 32 of int8
    k_elements = k1 * (32 // element_bytes)
    base_k = min(DEPTH_BYTES // element_bytes, k_elements)
    core_rows, core_columns = _fewest_rounds(
        images * ceil_div(m1, base_m), ceil_div(n1, base_n), chip.core_count
    )
    return GemmSchedule(
        base_m=base_m * FRACTAL,
        base_k=base_k,
        base_n=base_n * FRACTAL,
        step_k=min(max_steps, ceil_div(k_elements, base_k)),
        grid_rows=core_rows,
        grid_cols=core_columns,
    )


def _grids(cores: int) -> Iterator[tuple[int, int]]:
    """Yield every grid (rows, columns) of at most this many cores."""
    for rows in range(1, cores + 1):
        for columns in range(1, cores // rows + 1):
            yield rows, columns


def _balanced(m1: int, n1: int, cores: int) -> tuple[int, int]:
    """Return the grid whose largest share of fractals is smallest; of equal ones the squarest."""

    def cost(grid: tuple[int, int]) -> tuple[int, int]:
        rows = ceil_div(m1, grid[0])
        columns = ceil_div(n1, grid[1])
        return rows * columns, rows + columns

    # 40 x 40 fractals on 20 cores: 4 x 5, shares of 10 x 8
    return min(_grids(cores), key=cost)


def _fewest_rounds(rows: int, columns: int, cores: int) -> tuple[int, int]:
    """Return the grid of cores that works through the blocks of C in the fewest rounds."""

    def rounds(grid: tuple[int, int]) -> tuple[int, int]:
        # if two grids need equally many rounds, take the one with fewer cores
        return ceil_div(rows, grid[0]) * ceil_div(columns, grid[1]), grid[0] * grid[1]

    return min(_grids(cores), key=rounds)


# -- the road --------------------------------------------------------------------------------------
def tiling_of(piece: Piece, chip: Chip) -> GemmSchedule | None:
    """Return the published tiling of a piece's product or convolution; None if there is none."""
    head = piece.graph.nodes[0]
    if head.op in CONVOLUTIONS and piece.graph.nodes[0].inputs[1] in piece.constants:
        return convolution_tiling(conv_shape_of(piece, head, piece.type(head.output).dtype), chip)
    # a transposed or batched product has no published rule
    if head.op in PRODUCTS:
        if is_weight_gradient(head, [piece.type(name) for name in head.inputs]) or not is_plain(
            piece
        ):
            return None
        return product_tiling(product_job(piece, chip)[0], chip)
    return None


def with_tilings(compiled: Compiled) -> Compiled:
    """Return a compiled network with the published tilings, where kernels can take them.

    If the results of a block do not fit the unified buffer, the block's longer side is halved.
    """
    choices: dict[str, Choice] = {}
    for task in compiled.tasks:
        if task.lowered is None or isinstance(task.lowered.kernel, CpuKernel):
            continue
        # repeated blocks of a network are equal pieces: one look is enough
        if task.piece.key in choices:
            continue
        tiling = tiling_of(task.piece, compiled.chip)
        while tiling is not None:
            try:
                lowered_once(task.piece, compiled.chip, Choice(tiling))
            except AscendLabError:
                tiling = _smaller(tiling)
            else:
                choices[task.piece.key] = Choice(tiling)
                break
    return replace(with_choices(compiled, choices), hints=False)


def _smaller(tiling: GemmSchedule) -> GemmSchedule | None:
    """Return a tiling with fewer steps, else with half a side, to save memory; None if neither."""
    if tiling.step_k > 1:
        return replace(tiling, step_k=tiling.step_k // 2)
    m = tiling.base_m // FRACTAL
    n = tiling.base_n // FRACTAL
    if max(m, n) == 1:
        return None
    if m >= n:
        return replace(tiling, base_m=ceil_div(m, 2) * FRACTAL)
    return replace(tiling, base_n=ceil_div(n, 2) * FRACTAL)


def cann_road(chip: Chip, dtype: str = "fp16", *, small_channel: bool = False) -> Road:
    """Return the `Road` that compiles for a chip as CANN does.

    With `small_channel` the first layer reads pixels of 4 channels, as enable_small_channel=1 asks.
    """
    # off by default in CANN
    left_out = frozenset() if small_channel else frozenset({SMALL_FIRST_LAYERS})
    return Road(
        switches=switches(chip),
        dtype=dtype,
        layouts=Layouts(left_out=left_out),
        finish=with_tilings,
    )
