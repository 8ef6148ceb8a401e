"""A real task that fits on a page: 1,797 scanned digits of 8 x 8 pixels, and two networks for it.

The images come with scikit-learn (Alpaydin and Kaynak, UCI, 1998). Nothing is downloaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ascend_lab.compress.learned import cross_entropy, fit, trained_weights, with_values
from ascend_lab.errors import UnsupportedError
from ascend_lab.graph import Graph, GraphBuilder, Value, evaluate
from ascend_lab.graph.ir import Values

BATCH = 50
TRAIN, TEST = 1250, 500
"""Images to learn from, and the last ones, by other writers, to be tried on."""


@dataclass(frozen=True, slots=True)
class Digits:
    """Images in batches as feeds of the networks, and their labels."""

    feeds: Sequence[Mapping[str, Values]]
    labels: Sequence[Values]


def load_digits() -> tuple[Digits, Digits]:
    """Return the images to train on and those to test on; pixels are 0 to 1.

    The table is read by itself: importing scikit-learn takes longer than training on it. Raises
    `UnsupportedError` where scikit-learn is not installed.
    """
    package = find_spec("sklearn")
    folder = Path(package.origin).parent if package and package.origin else None
    if folder is None:
        needed = "scikit-learn for the digits"
        raise UnsupportedError(needed, "none", "pip install 'ascend_lab[compress]'")
    table = np.loadtxt(folder / "datasets/data/digits.csv.gz", delimiter=",")
    images = (table[:, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    labels = table[:, -1].astype(np.int64)
    return _cut(images, labels, 0, TRAIN), _cut(images, labels, -TEST, TEST)


def _cut(images: Values, labels: Values, start: int, count: int) -> Digits:
    images, labels = images[start:][:count], labels[start:][:count]
    places = range(0, count, BATCH)
    return Digits(
        [{"image": images[i : i + BATCH]} for i in places], [labels[i : i + BATCH] for i in places]
    )


def convolutional() -> Graph:
    """Return a network of a plain, a depthwise and two pointwise convolutions, and a product."""
    net = GraphBuilder("digits_cnn")

    def bias(size: int) -> Value:
        return net.constant(np.zeros(size, np.float32), name="bias")

    y = net.input("image", (BATCH, 1, 8, 8))
    y = net.relu(net.conv2d(y, net.weight((12, 1, 3, 3)), bias(12), pad=1, name="first"))
    y = net.max_pool2d(y, kernel=2, stride=2)
    y = net.relu(net.depthwise_conv2d(y, net.weight((12, 1, 3, 3)), pad=1, name="deep"))
    y = net.relu(net.conv2d(y, net.weight((32, 12, 1, 1)), bias(32), name="wide"))
    y = net.reshape(y, shape=(BATCH, 32 * 16))
    net.output(net.gemm(y, net.weight((32 * 16, 10)), bias(10), name="last"))
    return net.build()


def transformer(width: int = 24) -> Graph:
    """Return one layer of attention over the eight rows of an image, and one of two products."""
    net, rows = GraphBuilder("digits_transformer"), BATCH * 8

    def linear(x: Value, inputs: int, outputs: int, name: str) -> Value:
        bias = net.constant(np.zeros(outputs, np.float32), name="bias")
        weight = net.weight((inputs, outputs), scale=(1 / inputs) ** 0.5)
        found: Value = net.gemm(x, weight, bias, name=name)
        return found

    def normed(x: Value) -> Value:
        both = (net.constant(np.full(width, one, np.float32)) for one in (1, 0))
        found: Value = net.layer_norm(x, *both)
        return found

    x = linear(net.reshape(net.input("image", (BATCH, 1, 8, 8)), shape=(rows, 8)), 8, width, "rows")
    places = net.constant((np.eye(8, width) * 0.5).astype(np.float32), name="places")
    x = net.reshape(net.add(net.reshape(x, shape=(BATCH, 8, width)), places), shape=(rows, width))
    y = normed(x)
    q, k, v = (
        net.reshape(linear(y, width, width, name), shape=(BATCH, 8, width))
        for name in ("query", "key", "value")
    )
    shares = net.softmax(net.muls(net.batch_matmul(q, k, trans_b=True), number=width**-0.5))
    y = net.reshape(net.batch_matmul(shares, v), shape=(rows, width))
    x = net.add(x, linear(y, width, width, "mixed"))
    y = net.gelu(linear(normed(x), width, 2 * width, "up"))
    x = normed(net.add(x, linear(y, 2 * width, width, "down")))
    net.output(linear(net.reshape(x, shape=(BATCH, 8 * width)), 8 * width, 10, "last"))
    return net.build()


def trained(graph: Graph, data: Digits, steps: int = 250, rate: float = 0.005) -> Graph:
    """Return a network after so many steps of Adam."""
    weights = trained_weights(graph)
    loss = cross_entropy(data.labels)
    values, _ = fit(graph, data.feeds, loss, steps=steps, parameters=weights, rate=rate)
    return with_values(graph, values)


def accuracy(graph: Graph, data: Digits) -> float:
    """Return the share of images that a network names rightly."""
    right = 0
    for feed, labels in zip(data.feeds, data.labels, strict=True):
        (logits,) = evaluate(graph, feed).values()
        right += int(np.sum(logits.argmax(axis=1) == labels))
    return right / sum(map(len, data.labels))
