"""How matrix products, attention, convolutions and pooling are written in ONNX."""

from __future__ import annotations

import math
from typing import Any

from ascend_lab.errors import UnsupportedError
from ascend_lab.graph.onnx.export_site import NARROW, Result, Site, rule
from ascend_lab.ops.formats import is_float
from ascend_lab.ops.shapes import pad_pairs, pair

FP32_WHOLE = 2**24
"""Whole numbers up to here are exact in fp32."""


# -- products -------------------------------------------------------------------------------------
def _product(site: Site, names: list[str]) -> str:
    """Return a b, transposed as the attributes say; int8 sums to int32.

    Matrices of floats are a Gemm, which transposes itself: a weight two nodes share stays one.
    """
    turned = {"transA": site.attrs.get("trans_a"), "transB": site.attrs.get("trans_b")}
    matrices = all(len(kind.shape) == 2 for kind in site.given[:2]) and is_float(site.dtype)
    if matrices and any(turned.values()):
        return site.one("Gemm", *names, **{key: int(bool(v)) for key, v in turned.items()})
    sides = []
    for name, kind, key in zip(names, site.given[:2], ("trans_a", "trans_b"), strict=False):
        rank = len(kind.shape)
        perm = (*range(rank - 2), rank - 1, rank - 2)
        sides.append(site.one("Transpose", name, perm=perm) if site.attrs.get(key) else name)
    op = "MatMulInteger" if site.dtype == "int8" else "MatMul"
    return site.one(op, *sides)


@rule("matmul", "batch_matmul", "attention_context")
def _matmul(site: Site) -> Result:
    grows = site.dtype in NARROW and site.wanted[0].dtype == "fp32"
    return _product(site, site.wide() if grows else list(site.inputs))


@rule("gemm")
def _gemm(site: Site) -> Result:
    a = site.attrs
    return site.one(
        "Gemm",
        *site.inputs,
        alpha=float(a["alpha"]),
        beta=float(a["beta"]),
        transA=int(a["trans_a"]),
        transB=int(a["trans_b"]),
    )


def _scores(site: Site, q: str, k: str) -> str:
    """Return scale q k^T in fp32."""
    rank = len(site.given[1].shape)
    turned = site.one("Transpose", k, perm=(*range(rank - 2), rank - 1, rank - 2))
    scale = site.attrs["scale"]
    scale = 1.0 / math.sqrt(site.shape[-1]) if scale is None else scale
    total = site.one("MatMul", q, turned)
    return site.one("Mul", total, site.writer.number(scale, "fp32"))


@rule("attention_scores")
def _attention_scores(site: Site) -> Result:
    return site.back(_scores(site, *site.wide()))


@rule("masked_softmax")
def _masked_softmax(site: Site) -> Result:
    return site.back(site.one("Softmax", site.one("Add", *site.wide()), axis=-1))


@rule("attention", "flash_attention")
def _attention(site: Site) -> Result:
    q, k, v, *mask = site.wide()
    scores = _scores(site, q, k)
    scores = site.one("Add", scores, *mask) if mask else scores
    return site.back(site.one("MatMul", site.one("Softmax", scores, axis=-1), v))


# -- windows --------------------------------------------------------------------------------------
def _window(site: Site, **more: Any) -> dict[str, Any]:
    """Return strides, pads (top, left, bottom, right) and dilations as ONNX writes them."""
    (top, bottom), (left, right) = pad_pairs("pad", site.attrs["pad"])
    return {"pads": (top, left, bottom, right), **more}


@rule("conv2d", "depthwise_conv2d", "conv_transpose2d")
def _convolution(site: Site) -> Result:
    a = site.attrs
    attrs = _window(
        site,
        kernel_shape=site.given[1].shape[2:],
        strides=pair("stride", a["stride"]),
        dilations=pair("dilation", a["dilation"]),
        group=a.get("groups", site.shape[1]),
    )
    turned = "output_padding" in a
    if turned:
        attrs["output_padding"] = pair("output_padding", a["output_padding"], least=0)
    op = "ConvTranspose" if turned else "Conv"
    if site.dtype == "int8":
        return _whole_convolution(site, op, attrs)
    grows = site.dtype in NARROW and site.wanted[0].dtype == "fp32"
    return site.one(op, *(site.wide() if grows else site.inputs), **attrs)


def _whole_convolution(site: Site, op: str, attrs: dict[str, Any]) -> str:
    """Return an int8 convolution in int32; ONNX has no transposed one, which passes through fp32.

    Raises `UnsupportedError` where its sums could leave what fp32 holds exactly.
    """
    if op == "Conv":
        found = site.one("ConvInteger", *site.inputs[:2], **attrs)
    else:
        weight = site.given[1].shape
        largest = math.prod((weight[0] // attrs["group"], *weight[2:])) * 2**14
        if largest > FP32_WHOLE:
            raise UnsupportedError(
                f"conv_transpose2d: int8 sums up to {FP32_WHOLE:,} for ONNX",
                f"up to {largest:,}",
                "cast to fp16 first",
            )
        sides = [site.cast(name, "fp32") for name in site.inputs[:2]]
        found = site.cast(site.one(op, *sides, **attrs), "int32")
    if len(site.inputs) > 2:
        column = site.one("Reshape", site.inputs[2], site.writer.ints((1, -1, 1, 1)))
        found = site.one("Add", found, column)
    return found


@rule("max_pool2d", "avg_pool2d")
def _pool(site: Site) -> Result:
    a = site.attrs
    kernel = pair("kernel", a["kernel"])
    step = kernel if a["stride"] is None else pair("stride", a["stride"])
    attrs = _window(site, kernel_shape=kernel, strides=step)
    if "count_include_pad" not in a:
        return site.one("MaxPool", *site.inputs, **attrs)
    include = int(a["count_include_pad"])
    return site.one("AveragePool", *site.inputs, count_include_pad=include, **attrs)
