"""Defines the layers from which the models are built, with seeded weights.

Every parameter is a `Seeded` constant: no number is drawn before it is read. The scales keep
activations near 1 at any depth. Weights of convolutions and fully connected layers have variance
2 / inputs (He et al. 2015). Batch norms scale by about 1, with a mean of about 0 and a variance of
about 1. The last batch norm of a residual branch scales by about `BRANCH`: without that, each sum
of branch and shortcut would double the variance.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ascend_lab.compiler.draft import GraphBuilder, Value
from ascend_lab.compiler.ir import Graph, Seeded, TensorType, Values
from ascend_lab.errors import InputError
from ascend_lab.operators.ops.formats import numpy_type

Layers = Callable[..., Value]
"""Appends layers to a `Net`, from images to logits of a number of classes; some take a width."""

NARROWEST = 0.05
WIDEST = 8.0
"""Limits of a model's width, the factor of its channels."""
BRANCH = 0.25
"""Mean scale of the batch norm that ends a residual branch."""


class Net(GraphBuilder):
    """A graph builder whose methods are layers; a layer's `name` begins the names of its nodes."""

    epsilon = 1e-5
    """The epsilon of batch norms; models published with another one set it."""

    def __getattr__(self, op: str) -> Callable[..., Value]:
        """Return the method that appends a node of an operator with one output."""
        return super().__getattr__(op)

    def split(self, x: Value, **how: Any) -> tuple[Value, ...]:
        """Append a split; return its parts."""
        parts: tuple[Value, ...] = self.add_node("split", x, **how)
        return parts

    def seeded(
        self, name: str, shape: Sequence[int], scale: float, mean: float = 0.0, dtype: str = ""
    ) -> Value:
        """Declare a parameter: normal numbers with standard deviation `scale` around `mean`."""
        # the seed is a hash of model and parameter names: equal on every machine
        data = Seeded(zlib.crc32(f"{self.name}/{name}".encode()), scale, mean)
        return self.constant(data, TensorType(tuple(shape), dtype or self.dtype), name)

    def images(self, batch: int, channels: int, size: int) -> Value:
        """Declare the input "x": a batch of square images; raise `InputError` for no pixels."""
        if batch < 1 or size < 1:
            raise InputError(f"{self.name}: batch and size >= 1", f"{batch}, {size}", "raise them")
        return self.input("x", (batch, channels, size, size))

    def conv(
        self,
        x: Value,
        features: int,
        kernel: int | tuple[int, int] = 1,
        *,
        name: str,
        bias: bool = True,
        **attrs: Any,
    ) -> Value:
        """Append a convolution; `attrs` are those of `conv2d`.

        Without `pad`, the image is padded to keep its size at stride 1.
        """
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        pads = attrs.pop("pad", (height // 2, width // 2))
        # 32 channels to 64, 3 x 3: (64, 32, 3, 3); in 4 groups (64, 8, 3, 3)
        shape = (features, x.shape[1] // attrs.get("groups", 1), height, width)
        operands = [x, self.weight(shape, f"{name}.weight")]
        if bias:
            operands.append(self.seeded(f"{name}.bias", (features,), 0.02))
        # one number for equal pads, as the default of the operator
        pad_attr = pads[0] if isinstance(pads, tuple) and pads[0] == pads[1] else pads
        attrs = {"stride": 1, "pad": pad_attr, "groups": 1, **attrs}
        return self.conv2d(*operands, name=name, **attrs)

    def norm(self, x: Value, *, name: str, scale: float = 1.0) -> Value:
        """Append a batch norm with given statistics; its parameters are fp32 in every model."""
        # name, standard deviation and mean of each parameter
        rows = (
            ("scale", 0.1 * scale, scale),
            ("bias", 0.05, 0.0),
            ("mean", 0.05, 0.0),
            ("variance", 0.05, 1.0),
        )
        channels = (x.shape[1],)
        parameters = [self.seeded(f"{name}.{key}", channels, s, m, "fp32") for key, s, m in rows]
        return self.batch_norm(x, *parameters, name=name, epsilon=self.epsilon)

    def act(self, x: Value, kind: str, *, name: str) -> Value:
        """Append an activation by its operator's name; "" appends nothing."""
        return self.add_node(kind, x, name=name) if kind else x

    def conv_norm(
        self,
        x: Value,
        features: int,
        kernel: int | tuple[int, int] = 1,
        *,
        name: str,
        act: str = "relu",
        scale: float = 1.0,
        **conv: Any,
    ) -> Value:
        """Append convolution, batch norm, activation.

        The norm has a bias; so the convolution has none unless `conv` sets one.
        """
        # the norm would subtract a bias before it together with the mean
        y = self.conv(x, features, kernel, name=f"{name}.conv", **{"bias": False, **conv})
        y = self.norm(y, name=f"{name}.bn", scale=scale)
        return self.act(y, act, name=f"{name}.{act}")

    def depthwise(self, x: Value, kernel: int | tuple[int, int] = 3, **settings: Any) -> Value:
        """Append a filter for each channel, batch norm, and an activation if one is named."""
        settings = {"act": "", "groups": x.shape[1], **settings}
        return self.conv_norm(x, x.shape[1], kernel, **settings)

    def conv_act(
        self, x: Value, features: int, kernel: int = 1, *, name: str, act: str = "relu", **conv: Any
    ) -> Value:
        """Append convolution with bias, activation."""
        return self.act(self.conv(x, features, kernel, name=name, **conv), act, name=f"{name}.act")

    def dense(self, x: Value, features: int, *, name: str, bias: bool = True) -> Value:
        """Append a fully connected layer on (rows, inputs), with weights (features, inputs)."""
        weight = self.weight((features, x.shape[1]), f"{name}.weight")
        if not bias:
            return self.matmul(x, weight, trans_b=True, name=name)
        offset = self.seeded(f"{name}.bias", (features,), 0.02)
        return self.gemm(x, weight, offset, trans_b=True, name=name)

    def pool_up(self, x: Value, kernel: int, stride: int, *, name: str) -> Value:
        """Append a max pooling whose last window may reach past the edge ("ceil mode").

        6 pixels, kernel 3, stride 2: windows at 0 and 2, and with one padded pixel at 4.
        """
        # `max_pool2d` leaves out a window that does not fit: padding makes room for it
        missing = [(kernel - n) % stride if n > kernel else max(0, kernel - n) for n in x.shape[2:]]
        pad = tuple((0, n) for n in missing) if any(missing) else 0
        return self.max_pool2d(x, kernel=kernel, stride=stride, pad=pad, name=name)

    def flat(self, x: Value, *, name: str = "flatten") -> Value:
        """Append the reshape of (n, c, h, w) to (n, c h w)."""
        return self.reshape(x, shape=(0, -1), name=name)

    def head(self, x: Value, classes: int, *, name: str = "classifier", bias: bool = True) -> Value:
        """Append the mean of each channel and a fully connected layer."""
        # (n, c, h, w) to (n, c, 1, 1) to (n, c)
        means = self.flat(self.global_avg_pool(x, name="pool"))
        return self.dense(means, classes, name=name, bias=bias)

    def squeeze_excite(self, x: Value, squeezed: int, *, name: str, act: str, gate: str) -> Value:
        """Append the scaling of channels by factors computed from their means (Hu et al. 2018)."""
        # (n, c, 1, 1) to (n, squeezed, 1, 1) and back: one factor for each channel of an image
        inner = self.conv_act(self.global_avg_pool(x), squeezed, name=f"{name}.fc1", act=act)
        outer = self.conv_act(inner, x.shape[1], name=f"{name}.fc2", act=gate)
        return self.mul(x, outer, name=f"{name}.mul")

    def branch(self, start: Value, x: Value, *, name: str, shape: Sequence[int] = ()) -> Value:
        """Append start + g x: a layer scale, g of `shape` (default: one for each channel)."""
        # a scale of about 1/4, like the batch norm of other residual branches
        gamma = self.seeded(f"{name}.gamma", shape or (1, x.shape[1], 1, 1), 0.02, BRANCH)
        return self.add(start, self.mul(x, gamma, name=f"{name}.scale"), name=f"{name}.add")

    def attention_weights(
        self, q: Value, k: Value, mask: Value | None = None, *, name: str, **how: bool
    ) -> Value:
        """Append softmax(q k / sqrt(depth) + mask)."""
        # k is (..., length, depth) if the product transposes it, else (..., depth, length)
        depth = k.shape[-1 if how.get("trans_b") else -2]
        scores = self.batch_matmul(q, k, name=f"{name}.scores", **how)
        scores = self.muls(scores, number=1.0 / math.sqrt(depth), name=f"{name}.scale")
        if mask is not None:
            scores = self.add(scores, mask, name=f"{name}.mask")
        return self.softmax(scores, axis=-1, name=f"{name}.softmax")

    def channel_shuffle(self, x: Value, groups: int, *, name: str) -> Value:
        """Append the shuffle of channels between groups: reshape, transpose, reshape."""
        # 6 channels in 2 groups, 012 345, become 03 14 25: each group then reads from both
        n, c, h, w = x.shape
        x = self.reshape(x, shape=(n, groups, c // groups, h, w), name=f"{name}.groups")
        x = self.transpose(x, perm=(0, 2, 1, 3, 4), name=f"{name}.turned")
        return self.reshape(x, shape=(n, c, h, w), name=f"{name}.shuffled")

    def resized(self, x: Value, weights: Values, *, name: str) -> Value:
        """Append the product of each image's height and width with a matrix (out, size)."""
        table = self.constant(weights.T.astype(numpy_type(self.dtype)), name=f"{name}.table")
        # resize the last axis, then transpose the image; so the second round resizes the other axis
        for axis in ("width", "height"):
            n, c, h, w = x.shape
            rows = self.matmul(self.reshape(x, shape=(n * c * h, w)), table, name=f"{name}.{axis}")
            x = self.transpose(self.reshape(rows, shape=(n, c, h, len(weights))), perm=(0, 1, 3, 2))
        return x

    def finish(self, *outputs: Value) -> Graph:
        """Declare the outputs; return the verified graph."""
        self.output(*outputs)
        return self.build()


def image_network(
    *, size: int = 224, multiple: int = 1, scaled: bool = False, name: str = ""
) -> Callable[[Layers], Callable[..., Graph]]:
    """Return a decorator that turns a function that appends layers into a builder of a graph.

    The builder takes batch, size (a multiple of `multiple`), number format and classes; with
    `scaled` also the width, a factor of its channels. Its name is that of the layers, or `name`.
    """
    default_size = size

    def builder_of(layers: Layers) -> Callable[..., Graph]:
        """Return the builder of the network that these layers make."""
        title: str = name or getattr(layers, "__name__", "")

        def build_graph(batch: int, size: int, dtype: str, classes: int, **more: float) -> Graph:
            if size % multiple:
                needed = f"{title}: a size divisible by {multiple}"
                raise InputError(needed, str(size), "pad the image")
            net = Net(title, dtype)
            return net.finish(layers(net, net.images(batch, 3, size), classes, **more))

        def build_plain(
            batch: int = 1, *, size: int = default_size, dtype: str = "fp32", classes: int = 1000
        ) -> Graph:
            return build_graph(batch, size, dtype, classes)

        def build_scaled(
            batch: int = 1,
            *,
            size: int = default_size,
            width: float = 1.0,
            dtype: str = "fp32",
            classes: int = 1000,
        ) -> Graph:
            if not NARROWEST <= width <= WIDEST:
                needed = f"{title}: a width from {NARROWEST} to {WIDEST}"
                raise InputError(needed, str(width), "choose another")
            return build_graph(batch, size, dtype, classes, width=width)

        builder: Callable[..., Graph] = build_scaled if scaled else build_plain
        builder.__name__ = builder.__qualname__ = title
        builder.__doc__ = getattr(layers, "func", layers).__doc__
        return builder

    return builder_of


def family(
    prefix: str, layers: Layers, rows: Mapping[str, tuple[Any, ...]], **how: Any
) -> tuple[Callable[..., Graph], ...]:
    """Return the builders of a family: each calls the layers with its row as first arguments.

    `how` holds the arguments of `image_network`.
    """
    return tuple(
        image_network(name=f"{prefix}{name}", **how)(partial(layers, *row))
        for name, row in rows.items()
    )


def rounded(channels: float, divisor: int = 8, most_lost: float = 0.1) -> int:
    """Return channels rounded to a multiple of `divisor`, as MobileNet V2 does.

    It never loses more than the share `most_lost`: 11 channels become 16, as 8 would lose 27 %.
    """
    # 100 channels: (100 + 4) // 8 * 8 = 104
    nearest = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return nearest + divisor if nearest < (1 - most_lost) * channels else nearest
