"""Lowers convolutions and transposed convolutions on NC1HWC0 images to kernels.

The elementwise operators after a convolution run in the same kernel as its epilogue: relu(conv(x))
is one kernel. It may also compute a second convolution whose sums are added in L0C: `second_nodes`
holds its nodes, `ConvShape.beside` its shape.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ascend_lab.compiler import ir
from ascend_lab.compiler.lower import epilogue as ep
from ascend_lab.compiler.lower.piece import Form, Lowered, Piece, maps_between, near_memory
from ascend_lab.compiler.lower.vector import expressions
from ascend_lab.errors import AscendLabError, UnsupportedError
from ascend_lab.machine import isa, sim
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.layout import address_map, maps_launch, pack
from ascend_lab.machine.sim.timeline import Start, start_cycles
from ascend_lab.operators import dsl as te, kernels
from ascend_lab.operators.kernels import conv_schedules, deconv, dense_placement, epilogue_plan
from ascend_lab.operators.kernels.conv_shape import bundles_of, thinned, units_of
from ascend_lab.operators.kernels.epilogue import PAIR, PLAIN, Epilogue, Operand, unsupported_reason
from ascend_lab.operators.kernels.operand_packing import pack_weights
from ascend_lab.operators.kernels.pool_gradient import PoolGradient, pool_gradient_launch
from ascend_lab.operators.ops import conv_gradient, operator
from ascend_lab.operators.ops.convolution import geometry
from ascend_lab.operators.ops.expressions import narrow
from ascend_lab.operators.ops.formats import numpy_type

PACKED = "packed"
"""Name of the tensor (C1, r, s, 16) in which a kernel stores the weights that it packs."""
FULL_TILE_FRACTALS = 64
"""Fractals of sums in a full tile, roughly."""
HEAD_CYCLES = 12
"""Cycles to begin work on a tile, roughly."""


def conv_shape_of(piece: Piece, node: ir.Node, out_dtype: str) -> kernels.ConvShape:
    """Return the node's convolution as the kernels describe it."""
    (n, c, h, w), (k, _, r, s) = (piece.type(name).shape for name in node.inputs[:2])
    defaults = (("stride", 1), ("pad", 0), ("dilation", 1))
    stride, pads, dilation = geometry(*(node.attr(key, default) for key, default in defaults))
    groups = c if node.op == "depthwise_conv2d" else node.attr("groups", 1)
    dtype = piece.type(node.inputs[0]).dtype
    flat_pads = (*pads[0], *pads[1])
    pad_value = node.attr("pad_value", 0)
    # images of 3 channels are stored with 4 numbers a pixel, all others (fp16) with 16
    lanes = isa.SMALL_C0 if piece.type(node.inputs[0]).layout == ir.SMALL_PIXELS else 0
    shape = kernels.ConvShape(
        n=n,
        c=c,
        h=h,
        w=w,
        k=k,
        r=r,
        s=s,
        stride=stride,
        pad=flat_pads,
        dtype=dtype,
        out_dtype=out_dtype,
        dilation=dilation,
        groups=groups,
    )
    if pad_value or lanes:
        shape = replace(shape, pad_value=pad_value, lanes=lanes)
    return thinned(shape)


def in_pairs(shape: kernels.ConvShape) -> kernels.ConvShape:
    """Return a convolution whose features (or groups) are padded until they fill blocks of 32."""
    if shape.groups == 1:
        return replace(shape, k=isa.ceil_div(shape.k, PAIR) * PAIR)
    # narrow groups are computed several at a time: of 4 channels each, 8 groups fill 32 channels
    bundle_groups = bundles_of(shape).groups
    groups = isa.ceil_div(shape.groups, bundle_groups) * bundle_groups
    c, k = (size // shape.groups * groups for size in (shape.c, shape.k))
    if isa.ceil_div(c, PAIR) != isa.ceil_div(shape.c, PAIR) or k % PAIR:
        got = f"{shape.groups} groups of {shape.k} features"
        raise UnsupportedError("groups that fill blocks of 32 channels", got, "keep them in fp16")
    return replace(shape, c=c, k=k, groups=groups)


def by_vector(shape: kernels.ConvShape) -> bool:
    """Tell whether every channel is its own group (depthwise): the vector unit can compute it."""
    return shape.groups == shape.c == shape.k and (shape.dtype, shape.out_dtype) == ("fp16",) * 2


def lower_conv(
    piece: Piece,
    chip: Chip,
    tiling: kernels.GemmSchedule | None = None,
    start: Start = "queued",
) -> Lowered:
    """Return the kernel of a piece that begins with a convolution; the rest is its epilogue.

    A depthwise convolution can run on the cube, with zeros between the channels of a block, or on
    the vector unit: the faster one is taken. With a given tiling it runs on the cube. The times
    include the `start`, which takes longer if vector cores compute the epilogue.
    """
    node = piece.graph.nodes[0]
    is_depthwise = by_vector(conv_shape_of(piece, node, piece.output.dtype))
    is_constant = node.inputs[1] in piece.constants
    # weights that another kernel computes can be packed on the chip only for the vector unit
    if piece.type(node.inputs[1]).layout != "FRACTAL_Z":
        if not is_constant and is_depthwise:
            return write_conv(piece, chip, vector=True)
        refuse_computed(piece, node.inputs[1])
    if tiling or not is_constant or not is_depthwise:
        return by_cube(piece, chip, tiling)
    candidates = list[Lowered]()
    failure = None
    writers = partial(write_conv, piece, chip, vector=True), partial(by_cube, piece, chip, None)
    for write in writers:
        # one unit may lack memory or an operation of the epilogue, where the other does not
        try:
            candidates.append(write())
        except AscendLabError as error:
            failure = error
    if not candidates and failure:
        raise failure
    if len(candidates) == 1:
        return candidates[0]
    timed = [_timed(candidate, piece, chip) for candidate in candidates]
    return min(timed, key=lambda candidate: _near_total(candidate, chip, start))


def by_cube(
    piece: Piece,
    chip: Chip,
    tiling: kernels.GemmSchedule | None,
    second_nodes: Sequence[ir.Node] = (),
) -> Lowered:
    """Return the kernel of a convolution on the cube.

    Without a tiling the default one and a few others are timed, and the fastest is taken.
    `second_nodes` are a second convolution whose sums are added and, in int8, the node that scales
    its sums.
    """
    best = write_conv(piece, chip, vector=False, tiling=tiling, second_nodes=second_nodes)
    if tiling:
        return best
    for candidate in _promising(piece, chip, second_nodes):
        best = _timed(best, piece, chip)
        kernel = write_conv(piece, chip, vector=False, tiling=candidate, second_nodes=second_nodes)
        trial = _timed(replace(kernel, tiling=candidate), piece, chip)
        assert best.near and trial.near
        # in a network L2 may hold more than it does for a kernel that is timed alone
        if trial.near < best.near and (
            candidate.window == "stacked"
            or _all_hit_cycles(trial, piece, chip) <= _all_hit_cycles(best, piece, chip)
        ):
            best = trial
    return best


def _promising(
    piece: Piece, chip: Chip, second_nodes: Sequence[ir.Node]
) -> Iterator[kernels.GemmSchedule]:
    """Yield tilings other than the default: one for an image in L2, one across all images."""
    shape, epilogue, _ = conv_job(piece, chip, second_nodes=second_nodes)
    image = piece.type(piece.graph.nodes[0].inputs[0])
    if 2 * image.size_bytes <= chip.l2.size_bytes:
        # if the image is in L2, reading it twice may cost less than small tiles
        image_in_l2 = conv_schedules.schedule_for_l2(shape, chip, epilogue)
        if image_in_l2 is not None:
            yield image_in_l2
    # 7 x 7 pixels fill 49 of 64 rows; tiles that continue in the next image fill nearly all
    across_images = conv_schedules.stacked_schedule(shape, chip, epilogue)
    if across_images is not None:
        yield across_images


def _timed(lowered: Lowered, piece: Piece, chip: Chip) -> Lowered:
    """Return a kernel with its cycles, timed with L2 holding what other kernels wrote."""
    if lowered.near is not None:
        return lowered
    timeline = sim.simulate_kernel(lowered.kernel, chip, near_memory(lowered.kernel, piece, chip))
    return replace(lowered, near=(timeline.cycles, timeline.mix_cycles))


def _near_total(lowered: Lowered, chip: Chip, start: Start) -> int:
    """Return the cycles of a timed kernel, those of its start included."""
    assert lowered.near is not None
    cycles, mix_cycles = lowered.near
    return cycles + start_cycles(chip, start, mix_cycles)


def _all_hit_cycles(lowered: Lowered, piece: Piece, chip: Chip) -> int:
    """Return the cycles of a kernel if L2 holds everything that it reads."""
    memory = sim.DeviceMemory.holding(chip, lowered.kernel.tensors, {*piece.graph.inputs})
    return sim.simulate_kernel(lowered.kernel, chip, memory).cycles


def near_cycles(kernel: isa.Kernel, piece: Piece, chip: Chip) -> int:
    """Return the cycles of a queued kernel if L2 holds what other kernels wrote for it."""
    timeline = sim.simulate_kernel(kernel, chip, near_memory(kernel, piece, chip))
    return timeline.cycles + start_cycles(chip, "queued", timeline.mix_cycles)


def write_conv(
    piece: Piece,
    chip: Chip,
    *,
    vector: bool,
    tiling: kernels.GemmSchedule | None = None,
    pool: kernels.ConvShape | None = None,
    second_nodes: Sequence[ir.Node] = (),
) -> Lowered:
    """Return the kernel of a convolution on the cube or, with `vector`, on the vector unit.

    With `pool` the kernel also computes the maximum pooling with these windows.
    """
    y = piece.graph.outputs[0]
    shape, epilogue, operands = conv_job(piece, chip, vector=vector, second_nodes=second_nodes)
    if pool:
        shape = replace(shape, pool=pool)
        epilogue = epilogue or PLAIN
    node = piece.graph.nodes[0]
    x, weight = node.inputs[:2]
    # the vector unit reads weights (c, 1, 3, 3) as an image of 3 x 3 pixels, the cube as a matrix
    form: Form = _depthwise_weights if vector else partial(packed_weights, shape)
    if vector:
        launch = kernels.depthwise_launch(shape, chip, dense=True, epilogue=epilogue)
    else:
        launch = kernels.conv_launch(shape, chip, tiling, dense_placement(shape), epilogue)
    is_constant = weight in piece.constants
    # constants are packed before the network runs, computed weights by a phase of the kernel
    packing = (pack_launch(piece.type(weight), weight, chip),) if vector and not is_constant else ()
    names = {"x": x, "weight": PACKED if packing else weight, "y": y}
    forms = {weight: form, **operands} if is_constant else operands
    if second_nodes and shape.beside:
        second_x, second_weight = second_nodes[0].inputs[:2]
        refuse_computed(piece, second_weight)
        names |= {"beside": second_x, "beside_weight": second_weight}
        forms[second_weight] = partial(packed_weights, shape.beside)
    return Lowered(isa.Kernel(node.op, (*packing, isa.renamed(launch, names))), forms)


def refuse_computed(piece: Piece, weight: str) -> None:
    """Raise `UnsupportedError` for weights that are not constants: only those can be packed."""
    if weight not in piece.constants:
        got = f"{piece.names[weight]}: {piece.type(weight)}"
        raise UnsupportedError("constant weights, or neither groups nor phases", got, "fix them")


def pack_launch(kind: ir.TensorType, weight: str, chip: Chip) -> isa.Launch:
    """Return the phase that packs weights (c, 1, r, s) as an image (1, c, r, s) in NC1HWC0."""
    c, _, r, s = kind.shape
    image = ir.TensorType((1, c, r, s), kind.dtype)
    maps = maps_between(image, replace(image, layout="NC1HWC0"))
    return isa.renamed(maps_launch(*maps, chip, "pack_weights"), {"x": weight, "y": PACKED})


def _depthwise_weights(array: ir.Values) -> ir.Values:
    # (c, 1, 3, 3) becomes an image (1, c, 3, 3): 16 channels of a tap are adjacent
    image = array.reshape(1, array.shape[0], *array.shape[2:])
    return pack(address_map("NC1HWC0", image.shape, "fp16"), image).reshape(-1)


def packed_weights(shape: kernels.ConvShape, array: ir.Values) -> ir.Values:
    """Return the weights packed for the cube; those of padded features are 0."""
    # 20 features of bytes are computed as 32: `in_pairs` has added 12
    padded = np.pad(array, ((0, shape.k - len(array)), (0, 0), (0, 0), (0, 0)))
    return pack_weights(shape, padded.astype(numpy_type(shape.dtype), copy=False))


def conv_job(
    piece: Piece,
    chip: Chip,
    *,
    vector: bool = False,
    cube_adds: bool | None = None,
    second_nodes: Sequence[ir.Node] = (),
) -> tuple[kernels.ConvShape, Epilogue | None, dict[str, Form]]:
    """Return a piece's convolution, the epilogue after it, and the forms of its operands.

    Sums that pass UB are rounded to the result's format on the way, and the vector unit adds a bias
    to the rounded sums: half the work of adding it in fp32, but two roundings. The cube can add the
    bias instead, without either cost. It does so if that is faster, or, with `cube_adds`, whenever
    the bias fits into a quarter of L1.
    """
    node, *followers = piece.graph.nodes
    bias = node.inputs[2:3]
    conv_dtype = piece.type(node.output).dtype
    second = conv_shape_of(piece, second_nodes[0], conv_dtype) if second_nodes else None
    # int8 convolutions sum in int32, and the next node scales the sums
    if followers and followers[0].op in ep.DEQUANTISING and not bias:
        return _int8_job(piece, chip, second, *second_nodes[1:])
    if not followers and not bias:
        return replace(conv_shape_of(piece, node, piece.output.dtype), beside=second), None, {}
    epilogue, forms = _followers_epilogue(piece, chip, bias, vector=vector)
    shape = replace(conv_shape_of(piece, node, epilogue.out_dtype), beside=second)
    # chips with vector cores have a bias table, which costs nothing: there is no choice
    may_move = cube_adds is not False and chip.combined and shape.dtype == shape.out_dtype
    if bias and may_move and not vector:
        without_bias, other_forms = _followers_epilogue(piece, chip)
        vector_adds_cycles, cube_adds_cycles = _cycles_per_fractal(
            shape, (epilogue, without_bias), chip
        )
        if cube_adds_cycles < (math.inf if cube_adds else vector_adds_cycles):
            bias_bytes = epilogue_plan.bias_bytes(shape)
            epilogue = replace(without_bias, bias=bias[0], bias_bytes=bias_bytes)
            forms = other_forms | {bias[0]: partial(epilogue_plan.pack_bias, shape)}
    return shape, epilogue, forms


def follows_free(piece: Piece, alone: Piece, chip: Chip) -> bool:
    """Tell whether `piece` takes as long as `alone`, the same convolution with fewer followers.

    True if the fix pipe computes the rest while it moves the sums, at no cost.
    """
    heads = tuple(node for node in piece.graph.nodes if node.has("convolution"))
    if chip.combined or heads != piece.graph.nodes[:1]:
        return False
    (shape, epilogue, _) = conv_job(piece, chip)
    (shape_alone, epilogue_alone, _) = conv_job(alone, chip)
    if epilogue is None or epilogue_alone is None or shape != shape_alone or by_vector(shape):
        return False
    sums = isa.ACCUMULATOR[shape.dtype]
    # a ReLU after a bias needs no memory and no cycles beyond those of the bias
    both = (epilogue, epilogue_alone)
    demand, demand_alone = (epilogue_plan.demand_of(e, chip, sums) for e in both)
    return demand == demand_alone and not any(unsupported_reason(e, chip, sums) for e in both)


def _followers_epilogue(
    piece: Piece, chip: Chip, added: Sequence[str] = (), *, vector: bool = False
) -> tuple[Epilogue, dict[str, Form]]:
    """Return the epilogue of the nodes after the first one, and the forms of its operands.

    `added` names constants with one number per channel that are added first, such as a bias.
    """
    node, *followers = piece.graph.nodes
    conv_type = piece.type(node.output)
    wide = isa.ACCUMULATOR[piece.type(node.inputs[0]).dtype]
    # blocks of 16 channels, as the cube writes them, whatever format the result has
    main = replace(conv_type, layout="NC1HWC0", dtype="fp16")
    sums = te.placeholder(main.map.piece_shape, "fp16" if vector else wide, "sums")
    tensors, operands = ep.operands_of(piece, followers, main)
    # combined chips round sums on their way to UB; elsewhere the fix pipe adds a bias to fp32 sums
    y = narrow(sums, conv_type.dtype) if chip.combined or vector else sums
    for name in added:
        column = te.placeholder(ep.channels(main), y.dtype, name)
        operands[column] = Operand(name, "channel", y.dtype)
        y = te.vadd(y, te.broadcast(column, y.shape))
    tensors[node.output] = narrow(y, conv_type.dtype)
    outputs = expressions(followers, tensors, main)
    epilogue = ep.epilogue_of(outputs[piece.graph.outputs[-1]], sums, operands)
    return epilogue, ep.operand_forms(epilogue.operands, piece, main)


def _int8_job(
    piece: Piece, chip: Chip, second: kernels.ConvShape | None, second_scale: ir.Node | None = None
) -> tuple[kernels.ConvShape, Epilogue | None, dict[str, Form]]:
    """Return an int8 convolution, the epilogue of its int32 sums, and the forms of operands."""
    node, scaled = piece.graph.nodes[:2]
    epilogue, main = ep.int8_epilogue(piece, "NC1HWC0", second_scale)
    shape = conv_shape_of(piece, node, epilogue.out_dtype)
    second_shape = second
    # an int8 result has blocks of 32 channels: two of the blocks of 16 that the cube writes
    if epilogue.width == PAIR:
        shape = in_pairs(shape)
        second_shape = in_pairs(second) if second else None
    shape = replace(shape, beside=second_shape)
    forms = ep.operand_forms(epilogue.operands, piece, main)
    if scaled.attr("small_bias", False):
        epilogue = _with_bias_on_cube(shape, epilogue, chip)
    if epilogue.bias:
        forms[epilogue.bias] = partial(epilogue_plan.pack_bias, shape)
    return shape, epilogue, forms


def _cycles_per_fractal(
    shape: kernels.ConvShape, epilogues: tuple[Epilogue, Epilogue], chip: Chip
) -> tuple[float, float]:
    """Return cycles per fractal of sums if the vector unit adds the bias, and if the cube does.

    Cube and vector unit work on different tiles of sums at the same time: the one with more work
    sets the pace. If the cube adds the bias, it needs one more step per fractal. After the last
    tile the vector unit works alone; this time is left out for convolutions in groups, where loads
    to L0 dominate. The second number is infinite if the bias fills more than a quarter of L1.
    """
    fractal_cycles = list[float]()
    depth = units_of(shape).total_depth
    # 56 x 56 pixels and 64 channels are 196 x 4 fractals of sums: 25 for each of 32 cores
    core_fractals = isa.ceil_div(
        isa.ceil_div(shape.gemm.m, isa.FRACTAL) * shape.blocks[1], chip.core_count
    )
    tile = min(core_fractals, FULL_TILE_FRACTALS)
    is_dense = shape.groups == 1
    for epilogue, steps in zip(epilogues, (depth, depth + 1 + HEAD_CYCLES / tile), strict=True):
        demand = epilogue_plan.demand_of(epilogue, chip, isa.ACCUMULATOR[shape.dtype])
        cycles = demand.cycles * isa.FRACTAL**2 if demand else 0.0
        if demand and is_dense:
            cycles += demand.instructions * HEAD_CYCLES / tile
        # the work on a core's last tile, spread over all of its fractals
        last_tile_cycles = cycles * tile / core_fractals if is_dense else 0.0
        fractal_cycles.append(max(cycles, steps) + last_tile_cycles)
    bias_fits = epilogue_plan.bias_bytes(shape) <= chip.buffers["L1"] // 4
    return fractal_cycles[0], fractal_cycles[1] if bias_fits else math.inf


def _with_bias_on_cube(shape: kernels.ConvShape, epilogue: Epilogue, chip: Chip) -> Epilogue:
    """Return an epilogue of int32 sums; the cube adds the bias if this saves over a cycle."""
    deq = epilogue.deq
    if deq is None or not deq.bias or not chip.combined:
        return epilogue
    operands = tuple(o for o in epilogue.operands if o.name != deq.bias)
    moved = replace(
        epilogue,
        operands=operands,
        deq=replace(deq, bias=""),
        bias=deq.bias,
        bias_bytes=epilogue_plan.bias_bytes(shape),
    )
    vector_adds_cycles, cube_adds_cycles = _cycles_per_fractal(shape, (epilogue, moved), chip)
    return moved if cube_adds_cycles + 1 < vector_adds_cycles else epilogue


# -- transposed convolutions ----------------------------------------------------------------------
def lower_deconv(piece: Piece, chip: Chip) -> Lowered:
    """Return a transposed convolution as one plain convolution for each phase of the stride.

    Each phase has some of the weights, and the nodes that follow as its epilogue. A depthwise one
    with computed weights runs on the vector unit instead, which adds each tap's products to the
    pixels that they belong to; there products and sums are rounded to fp16 one by one.
    """
    node, *followers = piece.graph.nodes
    (x, weight) = node.inputs
    image_type = piece.type(node.output)
    y = piece.graph.outputs[0]
    types = [piece.type(n) for n in node.inputs]
    settings = ir.operator_of(node.op).settings(node.attrs)
    is_depthwise = types[1].shape[1] == 1 and settings["groups"] == types[0].shape[1]
    formats = {types[0].dtype, types[1].dtype, image_type.dtype}
    _, _, dilation = geometry(settings["stride"], settings["pad"], settings["dilation"])
    is_plain_fp16 = formats == {"fp16"} and dilation == (1, 1) and not followers
    if weight not in piece.constants and is_depthwise and is_plain_fp16:
        return _depthwise_deconv(piece, settings, chip)
    refuse_computed(piece, weight)
    shapes = tuple(t.shape for t in types)
    dtypes = tuple(t.dtype for t in types)
    shape = conv_gradient.deconv_shape(operator.Call(shapes, dtypes, settings, (image_type.shape,)))
    oh, ow = shape.out_hw
    launches = []
    epilogue = None
    forms = dict[str, Form]()
    if followers:
        epilogue, forms = _followers_epilogue(piece, chip)
    # a stride of 2 has 4 phases: even and odd rows, even and odd columns of the result
    for number, phase in enumerate(deconv.phases_of(shape)):
        name = f"{weight}.{number}"
        place = replace(phase.place, plane=oh * ow)
        names = {"x": x, phase.place.weight: name, "y": y}
        launch = kernels.conv_launch(phase.conv, chip, place=place, epilogue=epilogue)
        launches.append(isa.renamed(launch, names))
        forms[name] = partial(_phase_weights, shape, phase.place.weight)
    return Lowered(isa.Kernel(node.op, tuple(launches)), forms)


def _depthwise_deconv(piece: Piece, settings: Mapping[str, Any], chip: Chip) -> Lowered:
    """Return a depthwise transposed convolution with computed weights, on the vector unit."""
    node = piece.graph.nodes[0]
    (x, weight) = node.inputs
    (n, c, h, w) = piece.type(node.output).shape
    (r, s) = piece.type(weight).shape[2:]
    stride, pads, _ = geometry(settings["stride"], settings["pad"], settings["dilation"])
    flat_pads = (*pads[0], *pads[1])
    image = kernels.ConvShape(
        n=n, c=c, h=h, w=w, k=c, r=r, s=s, stride=stride, pad=flat_pads, groups=c
    )
    launch = pool_gradient_launch(PoolGradient(image, False, has_weights=True), chip)
    names = {"grad": x, "weight": PACKED, "y": piece.graph.outputs[0]}
    packing = pack_launch(piece.type(weight), weight, chip)
    return Lowered(isa.Kernel(node.op, (packing, isa.renamed(launch, names))))


def _phase_weights(shape: kernels.DeconvShape, name: str, array: ir.Values) -> ir.Values:
    # `pack_deconv` packs image and weights together: the image may be any, as only weights are used
    image = np.zeros((shape.n, shape.c, shape.h, shape.w), array.dtype)
    return kernels.pack_deconv(shape, image, array)[name].reshape(-1)
