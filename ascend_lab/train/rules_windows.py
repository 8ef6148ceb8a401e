"""Rules of convolutions and pooling: what a window read gets its share of the gradient."""

from __future__ import annotations

from typing import Any

from ascend_lab.graph import Value
from ascend_lab.ops.conv_gradient import input_remainder
from ascend_lab.train.rules import Grads, Site, rule


def _window_attrs(s: Site) -> dict[str, Any]:
    """Return stride, padding, dilation, groups; a depthwise convolution has a group a channel."""
    groups = s.attrs.get("groups", s.shape()[1])
    return {"groups": groups, **{key: s.attrs[key] for key in ("stride", "pad", "dilation")}}


def _bias(s: Site) -> list[Value | None]:
    """Return places for the gradients; that of a bias is the sum per channel."""
    found: list[Value | None] = [None] * len(s.node.inputs)
    if len(found) > 2 and s.wanted[2]:
        sums = s.net.channel_sums(s.net.wide(s.g))
        found[2] = s.net.shaped(sums, s.shape(2))
    return found


@rule("conv2d", "depthwise_conv2d")
def _conv(s: Site) -> Grads:
    """Return dx: the transposed convolution of the gradient; dw; db."""
    net, attrs, found = s.net, _window_attrs(s), _bias(s)
    grad, kernel = net.in_format(s.g, s.kind().dtype), (s.shape(1)[2], s.shape(1)[3])
    if s.wanted[1]:
        found[1] = net.conv2d_grad_weight(s.x(0), grad, kernel=kernel, **attrs)
    if s.wanted[0]:
        size = (s.shape()[2], s.shape()[3])
        extra = input_remainder(size, kernel, attrs["stride"], attrs["pad"], attrs["dilation"])
        found[0] = net.conv_transpose2d(grad, s.x(1), output_padding=extra, **attrs)
    return found


@rule("conv_transpose2d")
def _conv_transpose(s: Site) -> Grads:
    """Return dx: the convolution of the gradient; dw with image and gradient exchanged; db."""
    net, attrs, found = s.net, _window_attrs(s), _bias(s)
    grad, image = net.in_format(s.g, s.kind().dtype), s.shape()
    dx = net.conv2d(grad, s.x(1), **attrs)
    if dx.shape != image:  # output_padding left pixels that no window reaches
        dx = net.slice(dx, begin=(0, 0, 0, 0), end=image)
        grad = _reached(s, grad)
    if s.wanted[1]:
        kernel = (s.shape(1)[2], s.shape(1)[3])
        found[1] = net.conv2d_grad_weight(grad, s.x(0), kernel=kernel, **attrs)
    found[0] = dx
    return found


def _reached(s: Site, grad: Value) -> Value:
    """Return the gradient without the rows and columns of more than one stride of padding."""
    extra, step = s.attrs["output_padding"], s.attrs["stride"]
    extra = (extra, extra) if isinstance(extra, int) else tuple(extra)
    step = (step, step) if isinstance(step, int) else tuple(step)
    over = tuple(e - e % n for e, n in zip(extra, step, strict=True))
    end = (*grad.shape[:2], grad.shape[2] - over[0], grad.shape[3] - over[1])
    out: Value = s.net.slice(grad, begin=(0, 0, 0, 0), end=end)
    return out


@rule("max_pool2d")
def _max_pool(s: Site) -> Grads:
    return (s.net.max_pool2d_grad(s.x(), s.y(), s.g, **s.attrs),)


@rule("avg_pool2d")
def _avg_pool(s: Site) -> Grads:
    return (s.net.avg_pool2d_grad(s.g, size=s.shape()[2:], **s.attrs),)
