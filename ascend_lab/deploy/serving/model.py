"""Computes the service times of a simulated server from simulated runs of a model on a chip.

Some batch sizes of a network are simulated. Others are interpolated, and a line is fitted:

    seconds of a batch of b = mean_s + per_item_s * b

Each instance of a server has a chip of its own. The costs of GPT-2's steps are fitted in the same
way: a prompt is the graph of GPT-2; a decoding step has the same layers with one row for each
request, and inputs for the caches of keys and values, which all have the same length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ascend_lab.compiler import Graph, tiled, zoo
from ascend_lab.compiler.compile import Road, compile_stages, front_stages
from ascend_lab.compiler.zoo.blocks import Net
from ascend_lab.compiler.zoo.transformers import (
    GPT_VOCABULARY,
    WEIGHT_DEVIATION,
    gpt2_small,
    linear,
    mlp,
    norm,
)
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import Chip, load_chip


# -- seconds of batches ----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Line:
    """A fitted line, and the largest relative error of the points that it was fitted to."""

    mean_s: float
    per_item_s: float
    worst_error: float


def fit_line(points: dict[int, float]) -> Line:
    """Return the line fitted to seconds by batch size; raises `InputError` without any."""
    (mean_s, per_item_s), worst_error = fit([(1, b) for b in points], list(points.values()))
    return Line(mean_s, per_item_s, worst_error)


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Return a cost of at least 0 for each column, and the largest relative error.

    The costs minimise the sum of squared relative errors, rows @ costs against `seconds`. Raises
    `InputError` without rows.
    """
    if not rows:
        raise InputError("a time to fit to", "none", "time a size")
    # Rows are divided by their seconds, so that scaled @ costs - 1 is the relative error.
    scaled = np.array(rows, float) / np.array(seconds)[:, None]
    width = scaled.shape[1]
    smallest_error = np.inf
    best_costs = np.zeros(width)
    # Plain least squares may give negative costs. At the minimum with costs of at least 0, some
    # columns have cost 0 and the others are a plain least-squares fit: with at most 4 columns, all
    # 15 subsets of columns are tried.
    for subset in range(1, 2**width):
        # The bits of `subset` choose columns: 5 = 0b101 stands for columns 0 and 2.
        used_columns = [k for k in range(width) if subset >> k & 1]
        costs = np.linalg.lstsq(scaled[:, used_columns], np.ones(len(scaled)), rcond=None)[0]
        error = float(((scaled[:, used_columns] @ costs - 1) ** 2).sum())
        if (costs >= 0).all() and error < smallest_error - 1e-12:
            best_costs = np.zeros(width)
            best_costs[used_columns] = costs
            smallest_error = error
    return best_costs.tolist(), float(np.abs(scaled @ best_costs - 1).max())


def batch_sizes(largest: int) -> list[int]:
    """Return the batch sizes to simulate: 1, 2, 4, ... and the largest."""
    # Up to 6 these are 1, 2, 4 and 6.
    sizes = [1]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return sizes if largest == 1 else [*sizes, largest]


def network_seconds(
    model: str, chip: Chip | str, largest: int, dtype: str = "fp16"
) -> tuple[tuple[float, ...], dict[int, float]]:
    """Return the seconds of batches 1 to `largest` of a file or zoo:NAME, and the simulated ones.

    Raises errors of loading and of compiling the model.
    """
    chip = load_chip(chip) if isinstance(chip, str) else chip
    road = Road(dtype=dtype)
    simulated_s: dict[int, float] = {}
    for size in batch_sizes(largest):
        graph = zoo.load_model(model, batch=size).graph
        times, _ = tiled.simulate_within(front_stages(graph, chip, road), chip, None, road)
        simulated_s[size] = times.time_s
    all_s = np.interp(np.arange(1, largest + 1), list(simulated_s), list(simulated_s.values()))
    return tuple(all_s.tolist()), simulated_s


# -- language models ------------------------------------------------------------------------------
GPT2_WIDTH = 768
GPT2_HEADS = 12
NORM_EPSILON = 1e-5
TIMED_PROMPTS = (64, 256, 1024)
TIMED_DECODES = ((1, 128), (1, 1024), (8, 128), (8, 1024), (32, 128), (32, 1024))
"""Timed decoding steps: pairs of (requests, cached tokens of each); a fit needs both to vary."""


class StepTimer(Protocol):
    """An object with the seconds of a language model's steps: fitted costs, or `llm.serving`."""

    def seconds_of(self, prompt_tokens: int, decodes: int, cached: int) -> float:
        """Return the seconds of a step with these prompt tokens, decodes and cached tokens."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The costs of a step in seconds: its start, and each token or request in it."""

    start_s: float = 0.0
    prompt_token_s: float = 0.0
    decode_s: float = 0.0
    cached_token_s: float = 0.0

    def seconds_of(self, prompt_tokens: int, decodes: int, cached: int) -> float:
        """Return the seconds of a step."""
        return (
            self.start_s
            + prompt_tokens * self.prompt_token_s
            + decodes * self.decode_s
            + cached * self.cached_token_s
        )


def decode_graph(
    batch: int, cached: int, layers: int = 12, vocabulary: int = GPT_VOCABULARY
) -> Graph:
    """Return the graph of a decoding step of GPT-2 small, with scores of the next token as output.

    The caches are inputs: keys (batch, heads, depth, cached), values (batch, heads, cached, depth).
    They include the new tokens, whose keys and values are also outputs.
    """
    net = Net("gpt2_small", "fp32")
    depth = GPT2_WIDTH // GPT2_HEADS
    x = net.input("x", (batch, GPT2_WIDTH), "fp32")
    new_keys_values = []
    for layer in range(layers):
        y = norm(net, x, NORM_EPSILON, name=f"h{layer}.norm1")
        qkv = linear(net, y, 3 * GPT2_WIDTH, name=f"h{layer}.attn.qkv")
        q, k, v = net.split(qkv, sizes=3, axis=1, name=f"h{layer}.split")
        new_keys_values += [k, v]
        keys = net.input(f"h{layer}.keys", (batch, GPT2_HEADS, depth, cached), "fp32")
        values = net.input(f"h{layer}.values", (batch, GPT2_HEADS, cached, depth), "fp32")
        row = net.reshape(q, shape=(batch, GPT2_HEADS, 1, depth), name=f"h{layer}.q")
        scores = net.batch_matmul(row, keys, name=f"h{layer}.scores")
        # A score is a sum of `depth` products; 1 / sqrt(depth) keeps the variance of one product.
        scores = net.muls(scores, number=depth**-0.5, name=f"h{layer}.scale")
        weights = net.softmax(scores, axis=-1, name=f"h{layer}.softmax")
        context = net.batch_matmul(weights, values, name=f"h{layer}.context")
        context = net.reshape(context, shape=(batch, GPT2_WIDTH), name=f"h{layer}.rows")
        x = net.add(
            x, linear(net, context, GPT2_WIDTH, name=f"h{layer}.attn.out"), name=f"h{layer}.add1"
        )
        y = norm(net, x, NORM_EPSILON, name=f"h{layer}.norm2")
        x = net.add(
            x, mlp(net, y, 4 * GPT2_WIDTH, "gelu", name=f"h{layer}.mlp"), name=f"h{layer}.add2"
        )
    # GPT-2 uses its embedding table again to compute a score for each word.
    words = net.seeded("wte.weight", (vocabulary, GPT2_WIDTH), WEIGHT_DEVIATION)
    x = norm(net, x, NORM_EPSILON, name="ln_f")
    return net.finish(net.matmul(x, words, trans_b=True, name="lm_head"), *new_keys_values)


@dataclass(frozen=True, slots=True)
class FittedSteps:
    """Fitted costs of steps, the times that they were fitted to, and the largest relative error."""

    time: StepTime
    prompt_seconds: dict[int, float]
    decode_seconds: dict[tuple[int, int], float]
    worst_error: float


def gpt2_steps(chip: Chip | str, layers: int = 12) -> FittedSteps:
    """Return the costs of GPT-2 small's steps on a chip, fitted to simulated times."""
    chip = load_chip(chip) if isinstance(chip, str) else chip

    def seconds(graph: Graph) -> float:
        return compile_stages(graph, chip).timeline().time_s

    prompts = {n: seconds(gpt2_small(1, n, layers=layers)) for n in TIMED_PROMPTS}
    decodes = {(b, c): seconds(decode_graph(b, c, layers)) for b, c in TIMED_DECODES}
    # Columns: start, prompt tokens, decoding requests, cached tokens of all of them.
    rows = [(1, n, 0, 0) for n in prompts] + [(1, 0, b, b * c) for b, c in decodes]
    costs, worst_error = fit(rows, [*prompts.values(), *decodes.values()])
    return FittedSteps(StepTime(*costs), prompts, decodes, worst_error)
