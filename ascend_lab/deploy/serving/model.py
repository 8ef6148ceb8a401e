"""What a model costs as a server of requests: the seconds of its batches, or of its steps.

The seconds of a batch are its own time on a chip, batch by batch, and the line through them:

    tau(b) ~ mean_s + per_item_s * b

Sizes between those that are timed get what lies between; each instance has a chip to itself. The
steps of a language model are fitted likewise: a prompt is GPT-2's graph as it is; a decoding step
is the same layers on one row a request, with the cache of every request as inputs, all as long as
the mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ascend_lab.compiler import Graph, tiled, zoo
from ascend_lab.compiler.compile import Road, compile_stages, front_stages
from ascend_lab.compiler.zoo.blocks import Net
from ascend_lab.compiler.zoo.transformers import GPT_WORDS, SPREAD, gpt2_small, linear, mlp, norm
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import Chip, load_chip


# -- its seconds ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Line:
    """The line closest to points, and the largest distance from it as a share of the point."""

    mean_s: float
    per_item_s: float
    worst_error: float


def affine(points: dict[int, float]) -> Line:
    """Return the line closest to seconds by size; raises as `fit`."""
    (mean_s, per_item_s), worst = fit([(1, b) for b in points], list(points.values()))
    return Line(mean_s, per_item_s, worst)


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Return what each column of the rows costs, nothing below 0, and the largest relative error.

    Least squares of the relative errors, on the best of all faces of the region. Raises
    `InputError` without rows.
    """
    if not rows:
        raise InputError("a time to fit to", "none", "time a size")
    scaled = np.array(rows, float) / np.array(seconds)[:, None]
    width = scaled.shape[1]
    least = np.inf
    best = np.zeros(width)
    for face in range(1, 2**width):
        used = [k for k in range(width) if face >> k & 1]
        part = np.linalg.lstsq(scaled[:, used], np.ones(len(scaled)), rcond=None)[0]
        error = float(((scaled[:, used] @ part - 1) ** 2).sum())
        if (part >= 0).all() and error < least - 1e-12:
            best = np.zeros(width)
            least = error
            best[used] = part
    return best.tolist(), float(np.abs(scaled @ best - 1).max())


def batch_sizes(most: int) -> list[int]:
    """Return the sizes to time: 1, 2, 4, ... and the largest."""
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return sizes if most == 1 else [*sizes, most]


def network_seconds(
    model: str, chip: Chip | str, most: int, dtype: str = "fp16"
) -> tuple[tuple[float, ...], dict[int, float]]:
    """Return the seconds of batches 1 to `most` of a file or zoo:NAME, and those timed.

    Raises as `load_model` and `front_stages`.
    """
    chip = load_chip(chip) if isinstance(chip, str) else chip
    road = Road(dtype=dtype)
    timed: dict[int, float] = {}
    for size in batch_sizes(most):
        graph = zoo.load_model(model, batch=size).graph
        timed[size] = tiled.simulate_within(front_stages(graph, chip, road), chip, None, road)[
            0
        ].time_s
    every = np.interp(np.arange(1, most + 1), list(timed), list(timed.values()))
    return tuple(every.tolist()), timed


# -- language models ------------------------------------------------------------------------------
WIDTH = 768
HEADS = 12
EPSILON = 1e-5
PROMPTS = (64, 256, 1024)
DECODES = ((1, 128), (1, 1024), (8, 128), (8, 1024), (32, 128), (32, 1024))
"""Requests, and tokens that stand in the cache of each."""


class StepTimer(Protocol):
    """Whatever knows the seconds of a step."""

    def of(self, prompt_tokens: int, decodes: int, cached: int) -> float:
        """Return the seconds of a step that reads and decodes so many tokens."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a step costs, in seconds."""

    start_s: float = 0.0
    prompt_token_s: float = 0.0
    decode_s: float = 0.0
    cached_token_s: float = 0.0

    def of(self, prompt_tokens: int, decodes: int, cached: int) -> float:
        """Return the seconds of a step."""
        return (
            self.start_s
            + prompt_tokens * self.prompt_token_s
            + decodes * self.decode_s
            + cached * self.cached_token_s
        )


def decode_graph(batch: int, cached: int, layers: int = 12, vocabulary: int = GPT_WORDS) -> Graph:
    """Return a step of GPT-2 small: a row a request, and caches, to the scores of the next token.

    Keys come as (batch, heads, depth, cached), values as (batch, heads, cached, depth), those of
    the new tokens already in their places; they also go out.
    """
    net = Net("gpt2_small", "fp32")
    depth = WIDTH // HEADS
    x = net.input("x", (batch, WIDTH), "fp32")
    new = []
    for i in range(layers):
        y = norm(net, x, EPSILON, name=f"h{i}.norm1")
        wide = linear(net, y, 3 * WIDTH, name=f"h{i}.attn.qkv")
        q, k, v = net.split(wide, sizes=3, axis=1, name=f"h{i}.split")
        new += [k, v]
        keys = net.input(f"h{i}.keys", (batch, HEADS, depth, cached), "fp32")
        values = net.input(f"h{i}.values", (batch, HEADS, cached, depth), "fp32")
        row = net.reshape(q, shape=(batch, HEADS, 1, depth), name=f"h{i}.q")
        scores = net.batch_matmul(row, keys, name=f"h{i}.scores")
        scores = net.muls(scores, number=depth**-0.5, name=f"h{i}.scale")
        shares = net.softmax(scores, axis=-1, name=f"h{i}.softmax")
        found = net.batch_matmul(shares, values, name=f"h{i}.context")
        found = net.reshape(found, shape=(batch, WIDTH), name=f"h{i}.rows")
        x = net.add(x, linear(net, found, WIDTH, name=f"h{i}.attn.out"), name=f"h{i}.add1")
        y = norm(net, x, EPSILON, name=f"h{i}.norm2")
        x = net.add(x, mlp(net, y, 4 * WIDTH, "gelu", name=f"h{i}.mlp"), name=f"h{i}.add2")
    words = net.seeded("wte.weight", (vocabulary, WIDTH), SPREAD)
    x = norm(net, x, EPSILON, name="ln_f")
    return net.finish(net.matmul(x, words, trans_b=True, name="lm_head"), *new)


@dataclass(frozen=True, slots=True)
class Fitted:
    """Costs of steps, the times they were fitted to, and the largest error as a share of them."""

    time: StepTime
    prompts: dict[int, float]
    decodes: dict[tuple[int, int], float]
    worst_error: float


def gpt2_steps(chip: Chip | str, layers: int = 12) -> Fitted:
    """Return what GPT-2 small's steps cost on a chip: a plane through our own network times."""
    chip = load_chip(chip) if isinstance(chip, str) else chip

    def seconds(graph: Graph) -> float:
        return compile_stages(graph, chip).timeline().time_s

    prompts = {n: seconds(gpt2_small(1, n, layers=layers)) for n in PROMPTS}
    decodes = {(b, c): seconds(decode_graph(b, c, layers)) for b, c in DECODES}
    rows = [(1, n, 0, 0) for n in prompts] + [(1, 0, b, b * c) for b, c in decodes]
    costs, worst = fit(rows, [*prompts.values(), *decodes.values()])
    return Fitted(StepTime(*costs), prompts, decodes, worst)
