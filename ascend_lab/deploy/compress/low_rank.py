"""Low-rank decomposition: splits a k1 x k2 convolution into a k1 x 1 and a 1 x k2 convolution.

The weights (K features, C channels, k1, k2) are unfolded into a matrix and cut to a rank r by a
truncated singular value decomposition, W = U S V^T with the r largest singular values only. The
first convolution takes U sqrt(S), the second sqrt(S) V^T:

    weights        K C k1 k2   ->   r (C k1 + K k2)        or r (C k2 + K k1), columns first
    256, 256, 3, 3, r = 128:   589,824   ->   196,608

An analytic variational Bayes estimate (EVBMF) gives the rank above the noise. It is limited to 1/7
to 1/6 of the matrix's rows (1/5 to 1/4 if the convolution is wide) and rounded to a multiple of 16.
Sources: Nakajima et al., JMLR 14 (2013) 1-37; github
hicann/amct, amct_tensor_decompose/src/tensor_decomposition.cpp.
"""

import math
from dataclasses import dataclass

import numpy as np

from ascend_lab.compiler import Graph, Node, TensorType, ir
from ascend_lab.compiler.draft import Draft
from ascend_lab.compiler.ir import Constant
from ascend_lab.errors import InputError
from ascend_lab.operators.ops.convolution import geometry

# -- low rank -------------------------------------------------------------------------------------
UNIT = 16
"""Ranks are multiples of 16, the side of the cube's blocks: fewer channels would not be faster."""
TAU_FACTOR = 2.5129
"""Factor of tau = 2.5129 sqrt(alpha), from which the limit between component and noise follows."""
WIDE = 256
"""From this many channels on both sides, a convolution keeps a larger share of its rows as rank."""
NARROW_DIVISOR = 6
WIDE_DIVISOR = 4
"""The rank is from rows / 7 to rows / 6, or from rows / 5 to rows / 4 of a wide convolution."""


@dataclass(frozen=True, slots=True)
class ConvSizes:
    """The sizes of a convolution to be split: its channels, features, and the kernel's sides."""

    features: int
    channels: int
    kernel: tuple[int, int]

    @property
    def kind(self) -> str:
        """Return the name of the four cases in AMCT: two letters for channels, two for the kernel.

        FC stands for features < channels, SC for the others; FK for a kernel with at most as many
        rows as columns, SK for the others. A 3 x 3 kernel from 64 to 128 channels is SCFK.
        """
        channel_side = "FC" if self.features < self.channels else "SC"
        return channel_side + ("FK" if self.kernel[0] <= self.kernel[1] else "SK")

    @property
    def rows_first(self) -> bool:
        """Tell whether the kernel's rows come first: k1 x 1, then 1 x k2."""
        return self.kind in ("SCFK", "FCSK")

    @property
    def matrix(self) -> tuple[int, int]:
        """Return the sizes of the unfolded weights: (min C min k, max C max k)."""
        sides = sorted((self.features, self.channels))
        taps = sorted(self.kernel)
        return sides[0] * taps[0], sides[1] * taps[1]

    def parameters(self, rank: int) -> int:
        """Return the weights of both parts together."""
        first_side, second_side = self.kernel if self.rows_first else self.kernel[::-1]
        return rank * (self.channels * first_side + self.features * second_side)


def thin_of(graph: Graph, node: Node) -> ConvSizes | None:
    """Return the sizes of a convolution that is to be split; None if splitting would not pay."""
    if node.op != "conv2d" or node.inputs[1] not in graph.constants:
        return None
    settings = ir.operator_of(node.op).settings(node.attrs)
    stride, _, dilation = geometry(settings["stride"], settings["pad"], settings["dilation"])
    features, channels, *kernel = graph.types[node.inputs[1]].shape
    shorter_side = min(kernel)
    fewer_channels = min(features, channels)
    refused = max(dilation) > 1 or settings["groups"] > 1 or shorter_side < 3 or max(stride) > 2
    small = shorter_side * fewer_channels < UNIT or (shorter_side < 7 and fewer_channels < 64)
    return None if refused or small else ConvSizes(features, channels, (kernel[0], kernel[1]))


# -- the rank -------------------------------------------------------------------------------------
def evbmf_rank(matrix: ir.Values) -> int:
    """Return how many components of a matrix stand out from noise, whose variance is estimated.

    A component stands out if its singular value g has g^2 / (columns noise) above the limit
    (1 + tau) (1 + alpha / tau), with alpha = rows / columns and tau = 2.5129 sqrt(alpha). Raises
    `InputError` for anything but a matrix of finite numbers.
    """
    array = np.asarray(matrix, np.float64)
    if array.ndim != 2 or not array.size or not np.isfinite(array).all():
        raise InputError("a matrix of finite numbers", str(array.shape), "reshape it")
    rows, columns = sorted(array.shape)
    squares = np.linalg.svd(array, compute_uv=False) ** 2
    if not squares[0] > 0:
        return 0
    # A 64 x 256 matrix: alpha = 0.25, tau = 1.26, limit = 2.26 x 1.2 = 2.71. Pure noise alone has
    # squares up to (1 + sqrt(alpha))^2 = 2.25 in these units.
    alpha = rows / columns
    tau = TAU_FACTOR * math.sqrt(alpha)
    limit = (1 + tau) * (1 + alpha / tau)
    noise = _noise(squares, rows, columns, limit)
    return int((squares > columns * noise * limit).sum())


def _noise(squares: ir.Values, rows: int, columns: int, limit: float) -> float:
    """Return the variance of the noise that makes the singular values most likely.

    It minimises, over the variance s^2, with x = g^2 / (columns s^2) of each singular value g:

        x - ln x                                                  below the limit
        x - tau + ln((tau + 1) / x) + alpha ln(tau / alpha + 1)   above it
        tau = (u + sqrt(u^2 - 4 alpha)) / 2,  u = x - (1 + alpha)
    """
    try:
        from scipy.optimize import minimize_scalar
    except ImportError as error:
        needed = "scipy, to estimate noise"
        raise InputError(needed, "not installed", "pip install 'ascend-lab[exact]'") from error
    alpha = rows / columns
    # more components than this cannot stand out: the later ones are noise
    last_candidate = min(math.ceil(rows / (1 + alpha)) - 1, rows) - 1
    tail = squares[min(max(last_candidate, 0) + 1, rows - 1) :]
    # The noise is large enough to keep the later components below the limit, and as large as their
    # mean; it is at most what all components would amount to if all were noise.
    low = max(tail[0] / (columns * limit), float(tail.mean()) / columns)
    high = float(squares.sum()) / (rows * columns)
    if not low < high:
        return high

    def energy(noise: float) -> float:
        """Return what is to be minimised, for a variance of the noise."""
        # a singular value of 0 would have the logarithm of 0
        x = np.maximum(squares / (columns * noise), np.finfo(float).tiny)
        above = x[x > limit]
        below = x[x <= limit]
        shifted = above - (1 + alpha)
        tau = 0.5 * (shifted + np.sqrt(np.maximum(shifted**2 - 4 * alpha, 0)))
        sums = (below - np.log(below)).sum() + (above - tau).sum()
        sums += np.log((tau + 1) / above).sum() + alpha * np.log(tau / alpha + 1).sum()
        return float(sums)

    return float(minimize_scalar(energy, bounds=(low, high), method="bounded").x)


def rank_of(sizes: ConvSizes, estimate: int) -> int:
    """Return the rank to use, from an estimate: a multiple of 16, near a sixth or fourth of rows.

    Rounding to the nearest multiple must not lose more than a tenth: 20 becomes 32, not 16.
    """
    # 256 to 256 channels, 3 x 3: 768 rows, so the rank is from 153 to 192 whatever the estimate
    rows = sizes.matrix[0]
    is_wide = min(sizes.features, sizes.channels) >= WIDE
    divisor = WIDE_DIVISOR if is_wide else NARROW_DIVISOR
    bounded = min(max(estimate, rows // (divisor + 1)), rows // divisor)
    rounded = max(math.floor(bounded / UNIT + 0.5) * UNIT, UNIT)
    return rounded + UNIT if rounded < 0.9 * bounded else rounded


# -- the split ------------------------------------------------------------------------------------
def _unfolded(sizes: ConvSizes, weights: ir.Values) -> ir.Values:
    """Return the weights as a matrix (channels and first taps, features and second taps)."""
    first_tap, second_tap = (2, 3) if sizes.rows_first else (3, 2)
    transposed = weights.astype(np.float64).transpose(1, first_tap, 0, second_tap)
    return transposed.reshape(transposed.shape[0] * transposed.shape[1], -1)


def split_weights(sizes: ConvSizes, weights: ir.Values, rank: int) -> tuple[ir.Values, ir.Values]:
    """Return the weights of both convolutions by a truncated SVD.

    Each takes the square root of the singular values, so that both have weights of like size.
    """
    u, s, vt = np.linalg.svd(_unfolded(sizes, weights), full_matrices=False)
    # u has a row for each (channel, first tap), vt a column for each (feature, second tap)
    root = np.sqrt(s[:rank])
    first_side, second_side = sizes.kernel if sizes.rows_first else sizes.kernel[::-1]
    u_scaled = u[:, :rank] * root
    vt_scaled = root[:, None] * vt[:rank]
    u_part = u_scaled.reshape(sizes.channels, first_side, rank).transpose(2, 0, 1)
    v_part = vt_scaled.reshape(rank, sizes.features, second_side).transpose(1, 0, 2)
    if sizes.rows_first:
        return u_part[..., None], v_part[:, :, None, :]
    return u_part[:, :, None, :], v_part[..., None]


def decomposed(graph: Graph, ranks: dict[str, int] | None = None) -> tuple[Graph, dict[str, int]]:
    """Return the graph with its large convolutions split (`thin_of`), and the ranks by convolution.

    With the `ranks` that an earlier call returned, the same convolutions are split. Convolutions
    that would not get fewer weights stay. Raises `InputError` for a rank that no such convolution
    has.
    """
    draft = Draft(graph)
    used = dict[str, int]()
    for node in graph.nodes:
        sizes = thin_of(graph, node)
        if sizes is None or (ranks is not None and node.name not in ranks):
            continue
        weights = graph.constants[node.inputs[1]].array()
        rank = ranks[node.name] if ranks else rank_of(sizes, evbmf_rank(_unfolded(sizes, weights)))
        if not 1 <= rank <= min(sizes.matrix):
            needed = f"{node.name}: a rank from 1 to {min(sizes.matrix)}"
            raise InputError(needed, str(rank), "decompose it again")
        if sizes.parameters(rank) < weights.size:
            _split(draft, node, sizes, split_weights(sizes, weights, rank))
            used[node.name] = rank
    if ranks and set(ranks) - set(used):
        raise InputError(f"{graph.name}: convolutions to split", str(set(ranks) - set(used)))
    return draft.finish(), used


def _split(draft: Draft, node: Node, sizes: ConvSizes, parts: tuple[ir.Values, ir.Values]) -> None:
    """Replace a convolution by two; stride and padding of each axis go with the kernel's axis."""
    settings = ir.operator_of(node.op).settings(node.attrs)
    stride, pads, _ = geometry(settings["stride"], settings["pad"], 1)
    kind = draft.types[node.inputs[1]].dtype
    names = [
        draft.add(Constant(TensorType(w.shape, kind), w.astype(np.float32)), f"{node.name}_{i}")
        for i, w in enumerate(parts)
    ]
    settings_of_parts: list[dict[str, object]] = [
        {"stride": (stride[0], 1), "pad": (pads[0], (0, 0))},
        {"stride": (1, stride[1]), "pad": ((0, 0), pads[1])},
    ]
    first_settings, second_settings = (
        settings_of_parts if sizes.rows_first else settings_of_parts[::-1]
    )
    x = draft.insert("conv2d", (node.inputs[0], names[0]), first_settings, f"{node.name}_low")
    draft.become(node, "conv2d", (x, names[1], *node.inputs[2:]), second_settings)
