"""Oracles for operators: element by element in plain Python, straight from the definitions.

Inputs and results are nested lists turned into fp64 arrays; no broadcasting, no windows, no
matrix products of NumPy are used, so that an error of the references cannot repeat itself here.
"""

import itertools
import math

import numpy as np


def each(shape, formula):
    """Return the array whose element at index i is formula(*i)."""
    out = np.zeros(shape)
    for index in itertools.product(*map(range, shape)):
        out[index] = formula(*index)
    return out


def pairs(value):
    return (value, value) if isinstance(value, int) else value


def sides(pad):
    return tuple(pairs(side) for side in pairs(pad))


def pixel(x, n, c, i, j, outside=0.0):
    inside = 0 <= i < x.shape[2] and 0 <= j < x.shape[3]
    return float(x[n, c, i, j]) if inside else outside


def conv2d(x, w, bias=None, *, stride=1, pad=0, dilation=1, groups=1):
    (sh, sw), (dh, dw), ((top, bottom), (left, right)) = pairs(stride), pairs(dilation), sides(pad)
    k, cg, r, s = w.shape
    oh = (x.shape[2] + top + bottom - dh * (r - 1) - 1) // sh + 1
    ow = (x.shape[3] + left + right - dw * (s - 1) - 1) // sw + 1

    def value(n, o, i, j):
        base = o // (k // groups) * cg
        total = 0.0 if bias is None else float(bias[o])
        for c, a, b in itertools.product(range(cg), range(r), range(s)):
            at = i * sh + a * dh - top, j * sw + b * dw - left
            total += pixel(x, n, base + c, *at) * float(w[o, c, a, b])
        return total

    return each((x.shape[0], k, oh, ow), value)


def conv_transpose2d(x, w, *, stride=1, pad=0, dilation=1, groups=1, output_padding=0):
    (sh, sw), (dh, dw), ((top, bottom), (left, right)) = pairs(stride), pairs(dilation), sides(pad)
    c, kg, r, s = w.shape
    n, _, h, width = x.shape
    oh = (h - 1) * sh + dh * (r - 1) + 1 - top - bottom + output_padding
    ow = (width - 1) * sw + dw * (s - 1) + 1 - left - right + output_padding
    out = np.zeros((n, kg * groups, oh, ow))
    for b, ci, i, j, o, p, q in itertools.product(*map(range, (n, c, h, width, kg, r, s))):
        y, z = i * sh + p * dh - top, j * sw + q * dw - left
        if 0 <= y < oh and 0 <= z < ow:
            group = ci // (c // groups)
            out[b, group * kg + o, y, z] += float(x[b, ci, i, j]) * float(w[ci, o, p, q])
    return out


def pool(x, kind, *, kernel, stride=None, pad=0, count_include_pad=False):
    (kh, kw), ((top, bottom), (left, right)) = pairs(kernel), sides(pad)
    sh, sw = pairs(kernel if stride is None else stride)
    oh = (x.shape[2] + top + bottom - kh) // sh + 1
    ow = (x.shape[3] + left + right - kw) // sw + 1

    def value(n, c, i, j):
        seen, cells = [], 0
        for a, b in itertools.product(range(kh), range(kw)):
            y, z = i * sh + a - top, j * sw + b - left
            if 0 <= y < x.shape[2] and 0 <= z < x.shape[3]:
                seen.append(float(x[n, c, y, z]))
            cells += 1
        if kind == "max":
            return max(seen)
        return sum(seen) / (cells if count_include_pad else len(seen))

    return each((*x.shape[:2], oh, ow), value)


def matmul(a, b):
    return each(
        (a.shape[0], b.shape[1]),
        lambda i, j: math.fsum(float(a[i, k]) * float(b[k, j]) for k in range(a.shape[1])),
    )


def softmax_rows(x):
    out = []
    for row in x:
        power = [math.exp(float(v)) for v in row]
        out.append([p / math.fsum(power) for p in power])
    return np.array(out)


def layer_norm_rows(x, scale, bias, epsilon):
    out = []
    for row in x:
        mean = math.fsum(row) / len(row)
        var = math.fsum((v - mean) ** 2 for v in row) / len(row)
        out.append(
            [
                (v - mean) / math.sqrt(var + epsilon) * s + b
                for v, s, b in zip(row, scale, bias, strict=True)
            ]
        )
    return np.array(out)


SCALAR = {
    "abs": abs,
    "neg": lambda x: -x,
    "relu": lambda x: x if x > 0 else 0.0,
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "rec": lambda x: 1 / x,
    "square": lambda x: x * x,
    "ceil": math.ceil,
    "floor": math.floor,
    "round": round,
    "sign": lambda x: (x > 0) - (x < 0),
    "adds": lambda x: x + 1.0,
    "muls": lambda x: x * 2.0,
    "clip": lambda x: min(max(x, -1.0), 1.0),
    "relu6": lambda x: min(max(x, 0.0), 6.0),
    "leaky_relu": lambda x: x if x > 0 else 0.01 * x,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "tanh": math.tanh,
    "erf": math.erf,
    "gelu": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "softplus": lambda x: math.log(1 + math.exp(x)),
    "elu": lambda x: x if x > 0 else math.exp(x) - 1,
    "hard_sigmoid": lambda x: max(0.0, min(1.0, x / 6 + 0.5)),
    "hard_swish": lambda x: x * max(0.0, min(1.0, x / 6 + 0.5)),
}
"""One number in, one out: Python's own functions."""

TWO = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "max": max,
    "min": min,
    "pow": lambda x, y: math.exp(y * math.log(x)),
    "equal": lambda x, y: x == y,
    "not_equal": lambda x, y: x != y,
    "greater": lambda x, y: x > y,
    "greater_equal": lambda x, y: x >= y,
    "less": lambda x, y: x < y,
    "less_equal": lambda x, y: x <= y,
}
