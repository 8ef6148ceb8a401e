"""Rules of matrix products, and of attention, which is made of them."""

from __future__ import annotations

import math

from ascend_lab.graph import Value
from ascend_lab.train.rules import Grads, Site, rule
from ascend_lab.train.rules_norms import softmax_grad


def slopes(s: Site, op: str, grad: Value, turn_a: bool, turn_b: bool) -> Grads:
    """Return dA = G B^T and dB = A^T G as the same operator writes them, as A and B lie.

    B is the weight: its gradient comes first.
    """
    net, left, right = s.net, None, None
    grad = net.in_format(grad, s.kind().dtype)
    if s.wanted[1]:
        b = (grad, s.x(0)) if turn_b else (s.x(0), grad)
        turns = (True, turn_a) if turn_b else (not turn_a, False)
        right = net.add_node(op, *b, trans_a=turns[0], trans_b=turns[1])
        right = net.summed_to(right, s.shape(1))
    if s.wanted[0]:
        a = (s.x(1), grad) if turn_a else (grad, s.x(1))
        turns = (turn_b, True) if turn_a else (False, not turn_b)
        left = net.add_node(op, *a, trans_a=turns[0], trans_b=turns[1])
        left = net.summed_to(left, s.shape(0))
    return left, right


@rule("matmul", "batch_matmul")
def _product(s: Site) -> Grads:
    return slopes(s, s.node.op, s.g, s.attrs["trans_a"], s.attrs["trans_b"])


@rule("gemm")
def _gemm(s: Site) -> Grads:
    """Return the product's gradients times alpha, and the bias's: the rows' sum times beta."""
    net, alpha, beta = s.net, s.attrs["alpha"], s.attrs["beta"]
    bias = net.scaled(net.summed_to(s.g, s.shape(2)), beta) if s.wanted[2] else None
    left, right = slopes(
        s, "matmul", net.scaled(s.g, alpha), s.attrs["trans_a"], s.attrs["trans_b"]
    )
    return left, right, bias


# -- attention ------------------------------------------------------------------------------------
def _scale(s: Site) -> float:
    given = s.attrs["scale"]
    return 1.0 / math.sqrt(s.shape()[-1]) if given is None else float(given)


@rule("attention_scores")
def _scores(s: Site) -> Grads:
    return slopes(s, "batch_matmul", s.net.scaled(s.g, _scale(s)), False, True)


@rule("attention_context")
def _context(s: Site) -> Grads:
    return slopes(s, "batch_matmul", s.g, False, False)


@rule("attention", "flash_attention")
def _attention(s: Site) -> Grads:
    """Return the gradients of q, k, v: the probabilities are computed again, not kept."""
    net, scale, dtype = s.net, _scale(s), s.kind().dtype
    q, k, v = s.x(0), s.x(1), s.x(2)
    scores = net.scaled(net.batch_matmul(q, k, trans_b=True), scale)
    masked = len(s.node.inputs) > 3
    scores = net.add(scores, s.x(3)) if masked else scores
    shares = net.wide(net.softmax(scores, axis=-1))
    dv = net.batch_matmul(net.in_format(shares, dtype), s.g, trans_a=True)
    dshares = net.wide(net.batch_matmul(s.g, v, trans_b=True))
    dscores = net.in_format(softmax_grad(s, dshares, shares, len(shares.shape) - 1), dtype)
    dmask = net.summed_to(dscores, s.shape(3)) if masked and s.wanted[3] else None
    inner = net.scaled(dscores, scale)
    dq, dk = net.batch_matmul(inner, k), net.batch_matmul(inner, q, trans_a=True)
    found = [net.summed_to(d, s.shape(i)) for i, d in enumerate((dq, dk, dv))]
    return [*found, dmask] if masked else found
