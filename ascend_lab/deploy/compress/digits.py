"""A small real task for trying quantisation: classifying 1,797 scanned digits of 8 x 8 pixels.

Two networks learn it in seconds: a convolutional one and a transformer. The images come with
scikit-learn (Alpaydin and Kaynak, UCI, 1998); nothing is downloaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ascend_lab.compiler import Graph, GraphBuilder, evaluate
from ascend_lab.compiler.draft import Value
from ascend_lab.compiler.ir import Values
from ascend_lab.deploy.compress.layers import with_values
from ascend_lab.deploy.compress.learned import Schedule, cross_entropy, fit, trained_weights
from ascend_lab.errors import UnsupportedError

BATCH = 50
"""Images of a batch."""
TRAIN = 1250
"""Number of images to train on: the first ones."""
TEST = 500
"""Number of test images: the last ones, by other writers than the first ones."""


@dataclass(frozen=True, slots=True)
class Digits:
    """Images in batches, as feeds of the networks, and their labels."""

    feeds: Sequence[Mapping[str, Values]]
    labels: Sequence[Values]


def load_digits() -> tuple[Digits, Digits]:
    """Return the images to train on and those to test on; pixels are from 0 to 1.

    Raises `UnsupportedError` if scikit-learn is not installed.
    """
    # The table is read without importing scikit-learn, which takes longer than training on it.
    package = find_spec("sklearn")
    folder = Path(package.origin).parent if package and package.origin else None
    if folder is None:
        needed = "scikit-learn for the digits"
        raise UnsupportedError(needed, "none", "pip install 'ascend_lab[compress]'")
    # a row is 64 pixels from 0 to 16, then the label
    table = np.loadtxt(folder / "datasets/data/digits.csv.gz", delimiter=",")
    images = (table[:, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    labels = table[:, -1].astype(np.int64)
    return (
        _batches(images[:TRAIN], labels[:TRAIN]),
        _batches(images[-TEST:], labels[-TEST:]),
    )


def _batches(images: Values, labels: Values) -> Digits:
    """Return images and labels in batches of `BATCH`."""
    starts = range(0, len(images), BATCH)
    return Digits(
        [{"image": images[i : i + BATCH]} for i in starts],
        [labels[i : i + BATCH] for i in starts],
    )


# -- networks -------------------------------------------------------------------------------------
def convolutional() -> Graph:
    """Return a network of two plain convolutions, a depthwise one between them, and a product."""
    net = GraphBuilder("digits_cnn")

    def bias(size: int) -> Value:
        return net.constant(np.zeros(size, np.float32), name="bias")

    y = net.input("image", (BATCH, 1, 8, 8))
    y = net.relu(net.conv2d(y, net.weight((12, 1, 3, 3)), bias(12), pad=1, name="first"))
    y = net.max_pool2d(y, kernel=2, stride=2)
    y = net.relu(net.depthwise_conv2d(y, net.weight((12, 1, 3, 3)), pad=1, name="deep"))
    y = net.relu(net.conv2d(y, net.weight((32, 12, 1, 1)), bias(32), name="wide"))
    # 32 channels of 4 x 4 pixels: pooling has halved the 8 x 8
    y = net.reshape(y, shape=(BATCH, 32 * 16))
    net.output(net.gemm(y, net.weight((32 * 16, 10)), bias(10), name="last"))
    return net.build()


def transformer(width: int = 24) -> Graph:
    """Return a transformer of one layer that reads an image as a sequence of its eight rows."""
    net = GraphBuilder("digits_transformer")
    tokens = BATCH * 8

    def linear(x: Value, inputs: int, outputs: int, name: str) -> Value:
        """Append a product with weights, and a bias."""
        bias = net.constant(np.zeros(outputs, np.float32), name="bias")
        weight = net.weight((inputs, outputs), scale=(1 / inputs) ** 0.5)
        y: Value = net.gemm(x, weight, bias, name=name)
        return y

    def normed(x: Value) -> Value:
        """Append a layer norm with gain 1 and shift 0."""
        gain = net.constant(np.full(width, 1, np.float32))
        shift = net.constant(np.full(width, 0, np.float32))
        y: Value = net.layer_norm(x, gain, shift)
        return y

    image = net.reshape(net.input("image", (BATCH, 1, 8, 8)), shape=(tokens, 8))
    x = linear(image, 8, width, "rows")
    # attention ignores the order of rows: a vector added to each of the eight tells which it is
    places = net.constant((np.eye(8, width) * 0.5).astype(np.float32), name="places")
    x = net.add(net.reshape(x, shape=(BATCH, 8, width)), places)
    x = net.reshape(x, shape=(tokens, width))
    # attention: softmax(q k^T / sqrt(width)) v
    y = normed(x)

    def projected(name: str) -> Value:
        """Append a projection of y, as (batch, rows, width)."""
        rows: Value = net.reshape(linear(y, width, width, name), shape=(BATCH, 8, width))
        return rows

    q = projected("query")
    k = projected("key")
    v = projected("value")
    shares = net.softmax(net.muls(net.batch_matmul(q, k, trans_b=True), number=width**-0.5))
    y = net.reshape(net.batch_matmul(shares, v), shape=(tokens, width))
    x = net.add(x, linear(y, width, width, "mixed"))
    y = net.gelu(linear(normed(x), width, 2 * width, "up"))
    x = normed(net.add(x, linear(y, 2 * width, width, "down")))
    net.output(linear(net.reshape(x, shape=(BATCH, 8 * width)), 8 * width, 10, "last"))
    return net.build()


# -- training and testing -------------------------------------------------------------------------
def trained(graph: Graph, data: Digits, steps: int = 250, rate: float = 0.005) -> Graph:
    """Return a network trained by `steps` steps of Adam at the learning rate `rate`."""
    loss = cross_entropy(data.labels)
    values, _ = fit(graph, data.feeds, loss, trained_weights(graph), Schedule(steps, rate))
    return with_values(graph, values)


def accuracy(graph: Graph, data: Digits) -> float:
    """Return the share of images that a network classifies correctly."""
    correct = 0
    for feed, labels in zip(data.feeds, data.labels, strict=True):
        (logits,) = evaluate(graph, feed).values()
        correct += int(np.sum(logits.argmax(axis=1) == labels))
    return correct / sum(map(len, data.labels))
