"""Selects the kernels that compute a product with a decoder's weights, by its number format.

    bf16, fp16  weights and activations in two bytes: one product
    w8a8        weights in int8 with a scale for each column; each token is quantised to int8 with
                its own scale (dynamic_quant), and vector cores rescale the cube's sums
    w8a8c8      the same, and the latent vectors of the cache in int8
    w4a8        weights in int4, tokens in int8: the product is computed twice, with the upper and
                with the lower four bits of each activation, at twice the rate of int8
    w4a16       weights in int4 with a scale for 128 weights of a column; the kernel converts them
                to two bytes

Embedding, head, router and norms have two bytes a number in all formats, as in published files.
"""

from __future__ import annotations

from dataclasses import dataclass

from ascend_lab.compare.rows import Work
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.limits import shown
from ascend_lab.machine.chip import Chip

WIDE_BYTES = 2
"""Bytes of a number in the two-byte formats, bf16 and fp16."""
CUBE_AND_VECTOR = "cube and vector"
"""The unit of kernels that start cube and vector cores together.

Examples are grouped products, and int8 products whose vector cores rescale the cube's sums tile by
tile: GroupedMatmul and QuantBatchMatmulV3 of CANN's operator library.
"""
INT4 = "int4"
"""The format of weights of four bits, two in a byte."""
GROUP = 128
"""Weights of a column that share a scale in w4a16."""


@dataclass(frozen=True, slots=True)
class Format:
    """A number format of weights, activations and cache.

    `main` is the two-byte format of activations between products, and `in_bytes` is true if they
    are quantised to int8, one byte each, for products. `weight_bytes` are the bytes of one weight
    with its share of a scale, `cache_bytes` those of one number of a latent vector in the cache.
    """

    name: str
    main: str
    weight_bytes: float
    in_bytes: bool = False
    cache_bytes: int = WIDE_BYTES


def format_of(name: str, chip: Chip) -> Format:
    """Return a format on a chip; raises `InputError` if it is unknown or the chip lacks it."""
    has_bf16 = "bf16" in chip.cube
    main = "bf16" if has_bf16 else "fp16"
    formats = {"bf16": Format("bf16", "bf16", WIDE_BYTES)} if has_bf16 else {}
    formats |= {
        "fp16": Format("fp16", "fp16", WIDE_BYTES),
        "w8a8": Format("w8a8", main, 1.0, in_bytes=True),
        "w8a8c8": Format("w8a8c8", main, 1.0, in_bytes=True, cache_bytes=1),
        "w4a8": Format("w4a8", main, 0.5, in_bytes=True),
        # 4 bits, and 2 bytes of a scale for 128 weights: 0.5 + 2 / 128 = 0.5156 bytes a weight.
        "w4a16": Format("w4a16", main, 0.5 + WIDE_BYTES / GROUP),
    }
    if name == "bf16" and not has_bf16:
        needed = f"a format of {chip.name}: {', '.join(formats)}"
        raise InputError(needed, "bf16", "it computes in fp16: take that format")
    if name not in formats:
        raise InputError(f"a format: {', '.join(formats)}", shown(name), "write one of them")
    return formats[name]


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel that a layer starts: its name in the layer, and the operator with its shapes.

    `weight_bytes` and `cache_bytes` are the bytes of weights and of the cache that it reads from
    memory, `macs` its multiplications. `unit` is "cube", "vector" or CUBE_AND_VECTOR.
    `fetches_code` is true for large kernels of the library, whose cores first fetch the code one
    after another (see `compare.estimates.fetched`).
    """

    name: str
    work: Work
    unit: str = "vector"
    weight_bytes: float = 0.0
    cache_bytes: float = 0.0
    macs: float = 0.0
    fetches_code: bool = False


Shapes = tuple[tuple[int, ...], ...]


class Caller:
    """Creates calls for one chip and number format."""

    def __init__(self, chip: Chip, number_format: Format) -> None:
        self.chip = chip
        self.format = number_format

    def call(
        self, name: str, operator: str, *shapes: tuple[int, ...], **attributes: object
    ) -> Call:
        """Return a call of a vector kernel on operands in the two-byte format."""
        return Call(name, self.work(operator, shapes, (self.format.main,), attributes))

    def work(
        self,
        operator: str,
        shapes: Shapes,
        dtypes: tuple[str, ...],
        attributes: dict[str, object] | None = None,
    ) -> Work:
        """Return the work of a kernel whose operands come from memory."""
        return Work(
            operator, self.chip.name, shapes, dtypes=dtypes, attributes=attributes or {}, l2="cold"
        )

    def product(self, name: str, rows: int, depth: int, columns: int) -> Call:
        """Return the kernel of y = x w in two bytes.

        The weights are stored as PyTorch stores a linear layer: (columns, depth), with the depth
        contiguous.
        """
        shapes = ((rows, depth), (columns, depth))
        work = self.work("matmul", shapes, (self.format.main,), {"trans_b": True})
        # qwen3_8b's head: 4096 * 151,936 = 622 million weights, 1.24 GB in two bytes.
        weights = depth * columns
        weight_bytes = float(WIDE_BYTES) * weights
        return Call(name, work, "cube", weight_bytes=weight_bytes, macs=float(rows) * weights)

    def linear(self, name: str, rows: int, depth: int, columns: int) -> list[Call]:
        """Return the kernels of y = x w with weights in the decoder's format."""
        if self.format.weight_bytes == WIDE_BYTES:
            return [self.product(name, rows, depth, columns)]
        # qwen3_8b, one dense block's down projection, 12288 x 4096: 101 MB in bf16, 50 MB in w8a8,
        # and 26 MB in w4a16.
        weight_bytes = self.format.weight_bytes * depth * columns
        macs = float(rows) * depth * columns
        if self.format.in_bytes:
            to_int8 = self.call(f"{name}.quantise", "dynamic_quant", (rows, depth))
            operands = ((rows, depth), (columns, depth))
            int8_work = self.work(
                "matmul", operands, self._int8_product_dtypes(), {"trans_b": True}
            )
            product = Call(name, int8_work, CUBE_AND_VECTOR, weight_bytes=weight_bytes, macs=macs)
            return [to_int8, product]
        # Activations, weights, scales: a depth of 4096 has 32 scales a column.
        shapes = ((rows, depth), (depth, columns), (depth // GROUP, columns))
        dtypes = (self.format.main, INT4, self.format.main)
        work = self.work("weight_quant_batch_matmul", shapes, dtypes)
        return [Call(name, work, "cube", weight_bytes=weight_bytes, macs=macs)]

    def _int8_product_dtypes(self) -> tuple[str, ...]:
        """Return the formats of an int8 product: one for both operands, or two if they differ."""
        return ("int8", INT4) if self.format.weight_bytes < 1 else ("int8",)

    def grouped(self, name: str, groups: int, rows: int, depth: int, columns: int) -> Call:
        """Return the kernel of `groups` products, each of `rows` rows with a matrix of its own.

        In int8 formats the rows are quantised already.
        """
        weight_bytes = self.format.weight_bytes * groups * depth * columns
        macs = float(groups) * rows * depth * columns
        operands = ((groups, rows, depth), (groups, depth, columns))
        if self.format.name == "w4a16":
            needed = "experts in bf16, fp16, w8a8 or w4a8"
            raise UnsupportedError(needed, "w4a16", "take w4a8")
        # w8a8 gives ("int8",) for both operands, w4a8 ("int8", "int4").
        dtypes = self._int8_product_dtypes() if self.format.in_bytes else (self.format.main,)
        work = self.work("batch_matmul", operands, dtypes)
        return Call(name, work, CUBE_AND_VECTOR, weight_bytes=weight_bytes, macs=macs)
