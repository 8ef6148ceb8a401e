"""Hypothesis strategies for operators: random legal shapes and attributes of every family."""

import math
from collections.abc import Callable
from typing import Any

from hypothesis import assume, strategies as st

from ascend_lab.operators import ops

SIZES = (1, 2, 3, 5, 7, 13, 15, 16, 17, 31, 32, 33, 127, 128, 129)
SMALL = (1, 2, 3, 4, 5, 7, 8, 9)
CHANNELS = (1, 3, 16, 17)
LIMIT = 3000
Case = tuple[tuple[tuple[int, ...], ...], dict[str, Any]]


def size(choices=SIZES):
    return st.sampled_from(choices)


def shape(draw, least=1, most=4, *, empty=False):
    """A shape of at most LIMIT elements, with one size 0 now and then if `empty`."""
    sizes = draw(st.lists(size(), min_size=least, max_size=most))
    while math.prod(sizes) > LIMIT:
        sizes[sizes.index(max(sizes))] = draw(size(SMALL))
    if empty and draw(st.integers(0, 9)) == 0:
        sizes[draw(st.integers(0, len(sizes) - 1))] = 0
    return tuple(sizes)


def one_tensor(draw):
    return (shape(draw, empty=True),), {}


def broadcast(draw, count=2):
    """Shapes that broadcast: axes of a common shape set to 1 or left off in front."""
    common = shape(draw, empty=True)
    found = []
    for _ in range(count):
        kept = tuple(n if draw(st.integers(0, 3)) else 1 for n in common)
        found.append(kept[draw(st.integers(0, len(common) - 1)) if draw(st.booleans()) else 0 :])
    return tuple(found), {}


def cast(draw):
    target = draw(st.sampled_from(("fp16", "fp32", "int32", "int8", "uint8")))
    mode = "rint"
    if "int" in target:
        mode = draw(st.sampled_from(("rint", "floor", "ceil", "trunc")))
    return (shape(draw, most=3),), {"dtype": target, "round": mode}


def whole(draw, count):
    x = shape(draw, empty=True)
    return (x,) * count, {"scale": draw(st.floats(0.01, 2)), "offset": draw(st.integers(-128, 127))}


def reduce(draw):
    x = shape(draw)
    several = st.lists(st.integers(0, len(x) - 1), min_size=1, unique=True).map(tuple)
    axis = draw(st.one_of(st.none(), st.integers(-len(x), len(x) - 1), several))
    return (x,), {"axis": axis, "keepdims": draw(st.booleans())}


def along_axis(draw):
    x = shape(draw)
    return (x,), {"axis": draw(st.integers(-len(x), len(x) - 1))}


def lrn(draw):
    x = shape(draw, least=2)
    size = draw(st.integers(1, min(7, 2 * x[1] + 1)))
    return (x,), {"size": size, "alpha": draw(st.sampled_from((1e-4, 0.5, 2.0)))}


def norm(draw, count):
    x = shape(draw)
    axis = draw(st.integers(0, len(x) - 1))
    return (x, *(x[axis:],) * count), {"axis": axis}


def batch(draw):
    x = shape(draw, 2, 4)
    assume(math.prod(x) > x[1])
    return (x, *((x[1],),) * 4), {}


def transpose(draw):
    x = shape(draw)
    return (x,), {"perm": tuple(draw(st.permutations(range(len(x)))))}


def reshape(draw):
    x = shape(draw)
    total = math.prod(x)
    target = []
    for _ in range(draw(st.integers(0, 2))):
        divisor = draw(st.sampled_from([d for d in (1, 2, 3, 5, 7, 16) if total % d == 0]))
        target.append(divisor)
        total //= divisor
    target.insert(draw(st.integers(0, len(target))), -1)
    return (x,), {"shape": tuple(target)}


def expand(draw):
    common = shape(draw)
    x = tuple(n if draw(st.booleans()) else 1 for n in common)
    return (x,), {"shape": common}


def concat(draw):
    x = shape(draw, 1, 3)
    axis = draw(st.integers(-len(x), len(x) - 1))
    at = axis % len(x)
    sizes = draw(st.lists(size((1, 3, 8, 16, 17)), min_size=1, max_size=3))
    return tuple((*x[:at], n, *x[at + 1 :]) for n in sizes), {"axis": axis}


def split(draw):
    x = shape(draw, 1, 3)
    axis = draw(st.integers(0, len(x) - 1))
    sizes = draw(st.lists(size((1, 3, 8, 16, 17)), min_size=1, max_size=3))
    return ((*x[:axis], sum(sizes), *x[axis + 1 :]),), {"sizes": tuple(sizes), "axis": axis}


def slices(draw):
    x = shape(draw, 1, 3)
    begin = tuple(draw(st.integers(0, n - 1)) for n in x)
    end = tuple(draw(st.integers(b + 1, n)) for b, n in zip(begin, x, strict=True))
    step = tuple(draw(st.integers(1, 3)) for _ in x)
    return (x,), {"begin": begin, "end": end, "step": draw(st.sampled_from((None, step)))}


def pad(draw):
    x = shape(draw, 1, 3)
    pads = tuple((draw(st.integers(0, 3)), draw(st.integers(0, 17))) for _ in x)
    return (x,), {"pads": pads, "value": draw(st.sampled_from((0, 1, -2)))}


def gather(draw):
    x = shape(draw, 1, 3)
    indices = tuple(draw(st.lists(size(SMALL), min_size=1, max_size=2)))
    return (x, indices), {"axis": draw(st.integers(-len(x), len(x) - 1))}


def rows(draw):
    x = shape(draw, 1, 3)
    count = (draw(size(SMALL)),)
    return (x, count, (*count, *x[1:])), {}


def embedding(draw):
    return ((draw(size()), draw(size())), (draw(size(SMALL)), draw(size(SMALL)))), {}


def one_hot(draw):
    dtype = draw(st.sampled_from(("fp16", "fp32", "int32")))
    return (shape(draw, 1, 2),), {"depth": draw(size(SMALL)), "dtype": dtype}


def image(draw):
    return (draw(size((1, 2))), draw(size(CHANNELS)), draw(size(SMALL)), draw(size(SMALL)))


def one_image(draw):
    return (image(draw),), {}


def statistics(draw):
    x = image(draw)
    return (x, x, *((1, x[1], 1, 1),) * 2), {"epsilon": 1e-3}


def pool(draw, average=False):
    x = image(draw)
    kernel = tuple(draw(st.integers(1, min(3, n))) for n in x[2:])
    pads = tuple(tuple(draw(st.integers(0, k - 1)) for _ in range(2)) for k in kernel)
    stride = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    attrs = {"kernel": kernel, "stride": stride, "pad": pads}
    if average:
        attrs["count_include_pad"] = draw(st.booleans())
    return (x,), attrs


def matmul(draw, batches=False):
    m, k, n = (draw(size()) for _ in range(3))
    flags = {"trans_a": draw(st.booleans()), "trans_b": draw(st.booleans())}
    a = (k, m) if flags["trans_a"] else (m, k)
    b = (n, k) if flags["trans_b"] else (k, n)
    if batches:
        lead = tuple(draw(st.lists(size((1, 2, 3)), min_size=1, max_size=2)))
        a = (*lead, *a)
        b = (*(x if draw(st.booleans()) else 1 for x in lead), *b)
    return (a, b), flags


def gemm(draw):
    (a, b), flags = matmul(draw)
    m = a[1 if flags["trans_a"] else 0]
    n = b[0 if flags["trans_b"] else 1]
    bias = draw(st.sampled_from(((n,), (1, n), (m, 1), (m, n), (1,))))
    return (a, b, bias), {**flags, "alpha": draw(st.sampled_from((1.0, 0.5)))}


def conv(draw):
    groups = 1
    kind = draw(st.integers(0, 3))
    n, c, h, w = image(draw)
    k = draw(size(CHANNELS))
    if kind == 0:
        groups = k = c
    elif kind == 1:
        groups = 2
        c = 2 * draw(size((1, 3)))
        k = 2 * draw(size((1, 3)))
    r, s = (draw(st.integers(1, min(3, m))) for m in (h, w))
    dilation = draw(st.sampled_from((1, 1, 2)))
    spans = [(k0 - 1) * dilation + 1 for k0 in (r, s)]
    low = [max(0, span - m) for span, m in zip(spans, (h, w), strict=True)]
    pads = tuple(
        (draw(st.integers(0, min(2, span - 1))), max(less, draw(st.integers(0, min(2, span - 1)))))
        for span, less in zip(spans, low, strict=True)
    )
    stride = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    attrs = {"stride": stride, "pad": pads, "dilation": dilation, "groups": groups}
    bias = ((k,),) if draw(st.integers(0, 3)) == 0 else ()
    return ((n, c, h, w), (k, c // groups, r, s), *bias), attrs


def weight_gradient(draw):
    (x, weight, *_), attrs = conv(draw)
    (y,) = ops.get("conv2d").infer(x, weight, **attrs)
    return (x, y), {**attrs, "kernel": weight[2:]}


def pool_gradient(draw, average=False):
    (x,), attrs = pool(draw, average)
    (y,) = ops.get("avg_pool2d" if average else "max_pool2d").infer(x, **attrs)
    return ((y,), {**attrs, "size": x[2:]}) if average else ((x, y, y), attrs)


def depthwise(draw):
    """A convolution with as many groups as channels, its weights (c, 1, r, s)."""
    n, c, h, w = image(draw)
    r, s = (draw(st.integers(1, min(3, m))) for m in (h, w))
    attrs = {"stride": draw(st.integers(1, 2)), "pad": (r - 1, (0, s - 1))}
    return ((n, c, h, w), (c, 1, r, s)), attrs


def deconv(draw):
    n, c, h, w = image(draw)
    h = min(h, 5)
    w = min(w, 5)
    groups = c if draw(st.integers(0, 3)) == 0 else 1
    k = draw(size((1, 2, 5)))
    r = draw(st.integers(1, 3))
    s = draw(st.integers(1, 3))
    stride = draw(st.integers(1, 3))
    dilation = draw(st.sampled_from((1, 1, 2)))
    extra = draw(st.integers(0, stride - 1))
    most = [(m - 1) * stride + (k0 - 1) * dilation >= 2 for m, k0 in ((h, r), (w, s))]
    pads = tuple(tuple(draw(st.integers(0, int(m))) for _ in range(2)) for m in most)
    attrs = {"stride": stride, "pad": pads, "dilation": dilation, "groups": groups}
    return ((n, c, h, w), (c, k, r, s)), {**attrs, "output_padding": extra}


def attention(draw, name="attention"):
    lead = tuple(draw(st.lists(size((1, 2)), max_size=2)))
    s, t, d, e = (draw(size((1, 3, 16, 17, 33))) for _ in range(4))
    if name == "attention_scores":
        return ((*lead, s, d), (*lead, t, d)), {}
    if name == "attention_context":
        return ((*lead, s, t), (*lead, t, e)), {}
    mask = ((s, t),) if draw(st.booleans()) else ()
    return ((*lead, s, d), (*lead, t, d), (*lead, t, e), *mask), {}


def masked(draw):
    x = shape(draw, 2, 3)
    return (x, x[draw(st.integers(0, len(x) - 1)) :]), {}


def same(draw, count, rank=None):
    x = shape(draw, rank or 1, rank or 3)
    return (x,) * count, {}


def numbered(draw, name, choices):
    return (shape(draw, empty=True),), {name: draw(st.sampled_from(choices))}


BUILDERS: dict[str, Callable[..., Case]] = {
    "adds": lambda draw: numbered(draw, "number", (1.0, 0.1, -3.7)),
    "muls": lambda draw: numbered(draw, "number", (2.0, 0.1, -3.7)),
    "leaky_relu": lambda draw: numbered(draw, "alpha", (0.01, 0.3, 1.5)),
    "elu": lambda draw: numbered(draw, "alpha", (1.0, 0.3)),
    "clip": lambda draw: numbered(draw, "high", (1.0, 0.1)),
    "select": lambda draw: broadcast(draw, 3), "cast": cast,
    "quantise": lambda draw: whole(draw, 1), "dequantise": lambda draw: whole(draw, 1),
    "requantise": lambda draw: whole(draw, 1), "add_dequantised": lambda draw: whole(draw, 2),
    "softmax": along_axis, "log_softmax": along_axis, "lrn": lrn,
    "layer_norm": lambda draw: norm(draw, 2), "rms_norm": lambda draw: norm(draw, 1),
    "batch_norm": batch, "batch_norm_training": batch,
    "bn_training_reduce": one_image,
    "bn_training_update_grad": statistics,
    "transpose": transpose, "reshape": reshape, "expand": expand,
    "concat": concat, "split": split, "slice": slices, "pad": pad,
    "gather": gather, "embedding": embedding, "one_hot": one_hot,
    "scatter_update": rows, "scatter_add": rows,
    "max_pool2d": pool, "avg_pool2d": lambda draw: pool(draw, average=True),
    "global_max_pool": one_image, "global_avg_pool": one_image,
    "max_pool2d_grad": pool_gradient,
    "avg_pool2d_grad": lambda draw: pool_gradient(draw, average=True),
    "matmul": matmul, "batch_matmul": lambda draw: matmul(draw, batches=True), "gemm": gemm,
    "conv2d": conv, "depthwise_conv2d": depthwise, "conv_transpose2d": deconv,
    "conv2d_grad_weight": weight_gradient,
    "attention": attention, "flash_attention": attention,
    "attention_scores": lambda draw: attention(draw, "attention_scores"),
    "attention_context": lambda draw: attention(draw, "attention_context"),
    "masked_softmax": masked, "cross_entropy": lambda draw: same(draw, 2, 2),
    "sgd_momentum": lambda draw: same(draw, 3), "adam": lambda draw: same(draw, 4),
    **{f"reduce_{kind}": reduce for kind in ("sum", "mean", "max", "min", "prod")},
}  # fmt: skip


def case_of(name: str) -> st.SearchStrategy[Case]:
    """Return the strategy of an operator: its family's, else by its number of inputs."""
    usual = one_tensor if len(ops.get(name).inputs) == 1 else broadcast
    return st.composite(BUILDERS.get(name, usual))()
