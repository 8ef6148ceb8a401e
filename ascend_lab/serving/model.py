"""A model as servers see it: its tensors in the words of KServe v2, its values, its seconds.

A model takes batches if its first sizes follow the batch and rows do not touch each other, which is
tried once. Batches run in gears of 1, 2, 4, ... rows: what is missing repeats the last row.

Its seconds are its own time on a chip, batch by batch, and the line through them:

    tau(b) ~ mean_s + per_item_s * b

Sizes between those that are timed get what lies between; each instance has a chip to itself. The
steps of a language model are fitted likewise: a prompt is GPT-2's graph as it is; a decoding step
is the same layers on one row a request, with the cache of every request as inputs, all as long as
the mean.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ascend_lab.chip import Chip, load_chip
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.graph import Graph, evaluate, onnx, random_inputs, run_tasks, tiled, zoo
from ascend_lab.graph.compile import Road, compile_graph, compile_stages, front_stages
from ascend_lab.graph.onnx.tensors import NUMPY
from ascend_lab.graph.zoo.blocks import Net
from ascend_lab.graph.zoo.transformers import GPT_WORDS, SPREAD, gpt2_small, linear, mlp, norm
from ascend_lab.limits import shown

Arrays = dict[str, np.ndarray]
DATATYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64",
    "int8": "INT8", "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16",
    "float32": "FP32", "double": "FP64", "bfloat16": "BF16",
}  # fmt: skip
"""KServe's name of each ONNX element type."""
KINDS = {"BOOL": "b", "INT": "iu", "UINT": "iu"}
WORDS = {"b": "true and false", "iu": "whole numbers", "iuf": "numbers"}
FOUND = {"b": "true and false", "i": "whole numbers", "u": "whole numbers", "f": "fractions",
         "U": "values, text among them"}  # fmt: skip
"""What a list holds, by numpy's kind."""


@dataclass(frozen=True, slots=True)
class Port:
    """A tensor that goes in or out; the shape is that of one row, or whole without a batch."""

    name: str
    element: str
    shape: tuple[int, ...]
    batched: bool

    @property
    def datatype(self) -> str:
        """KServe's name of the element type."""
        return DATATYPES[self.element]

    def described(self) -> dict[str, Any]:
        """Return what the metadata says."""
        shape = [-1, *self.shape[1:]] if self.batched else list(self.shape)
        return {"name": self.name, "datatype": self.datatype, "shape": shape}

    def read(self, tensor: Mapping[str, Any], most: int) -> np.ndarray:
        """Return the array of a request's tensor; raise `InputError` unless it fits."""
        name, shape, rest = shown(self.name), tensor.get("shape"), slice(int(self.batched), None)
        if tensor.get("datatype") != self.datatype:
            got = shown(tensor.get("datatype"))
            raise InputError(f"input {name}: datatype {self.datatype}", got)
        whole = isinstance(shape, list) and all(type(n) is int for n in shape)
        sizes: tuple[int, ...] = tuple(shape or ()) if whole else (0,)
        fits = len(sizes) == len(self.shape) and sizes[rest] == self.shape[rest]
        if not fits or (self.batched and not 1 <= sizes[0] <= most):
            limit = f" (at most {most} in the first)" if self.batched else ""
            wanted = self.described()["shape"]
            raise InputError(f"input {name}: shape {wanted}{limit}", shown(shape))
        return self._array(tensor.get("data"), sizes)

    def _array(self, data: object, shape: tuple[int, ...]) -> np.ndarray:
        name, number = shown(self.name), math.prod(shape)
        try:
            found = np.array(data if isinstance(data, list) else None)
        except (ValueError, OverflowError):
            found = np.array(None)
        kinds = KINDS.get(self.datatype.rstrip("0123456789"), "iuf")
        if found.size != number or (found.dtype.kind not in kinds and number):
            word = FOUND.get(found.dtype.kind)
            got = f"{found.size} {word}" if isinstance(data, list) and word else shown(data)
            raise InputError(f"input {name}: data, a list of {number} {WORDS[kinds]}", got)
        with np.errstate(all="ignore"):
            cast = found.astype(NUMPY[self.element])
            wide = cast.astype(np.float64) if kinds == "iuf" else cast
        if not (np.isfinite(wide).all() if kinds == "iuf" else (cast == found).all()):
            raise InputError(f"input {name}: values that {self.datatype} holds", "others")
        return cast.reshape(shape)


@dataclass(slots=True)
class Model:
    """A version being served; `run` takes arrays with up to `max_batch` rows in the first axis."""

    name: str
    platform: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    max_batch: int
    gear_of: Callable[[int], Callable[[Arrays], Arrays]]
    gears: dict[int, Callable[[Arrays], Arrays]] = field(default_factory=dict)

    @property
    def batched(self) -> bool:
        """Tell whether rows of several requests may run together."""
        return self.max_batch > 0

    def run(self, inputs: Arrays) -> Arrays:
        """Return the outputs of some rows, or of the whole if the model takes no batches."""
        rows = len(next(iter(inputs.values()))) if self.batched else 1
        gear = 1 << (rows - 1).bit_length()
        if gear not in self.gears:
            self.gears[gear] = self.gear_of(gear)
        padded = inputs
        if gear > rows:
            more = (gear - rows,)
            padded = {
                n: np.concatenate([a, np.broadcast_to(a[-1:], more + a.shape[1:])])
                for n, a in inputs.items()
            }
        found = self.gears[gear](padded)
        cut = slice(rows) if self.batched else ...
        # numbers become bool by being other than 0
        return {
            p.name: np.asarray(found[p.name]).astype(NUMPY[p.element])[cut] for p in self.outputs
        }


def open_model(
    path: str,
    chip: str | None = None,
    max_batch: int = 8,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Model:
    """Return a file or zoo:NAME ready to be asked: evaluated, or as its kernels compute on a chip.

    With `max_batch` 1, or `shapes` of its own, it is taken as it is. Raises as `load_model`.
    """
    loaded: dict[int, onnx.Imported] = {}
    batched = False
    if max_batch > 1 and not shapes:
        try:
            loaded = {rows: zoo.load_model(path, batch=rows) for rows in (1, 2)}
            batched = _rows_apart(loaded[1].graph, loaded[2].graph)
        except AscendLabError:
            batched = False
    if not batched:
        loaded = {1: zoo.load_model(path, shapes=shapes)}

    def gear_of(rows: int) -> Callable[[Arrays], Arrays]:
        return _runner((loaded.get(rows) or zoo.load_model(path, batch=rows)).graph, chip)

    graph = loaded[1].graph

    def ports(types: Mapping[str, str]) -> tuple[Port, ...]:
        return tuple(
            Port(name, element, graph.types[name].shape, batched) for name, element in types.items()
        )

    first = {1: gear_of(1)}  # a chip that cannot run it says so now
    return Model(
        zoo.model_name(path), f"ascend_lab_{chip or 'reference'}", ports(loaded[1].input_types),
        ports(loaded[1].output_types), max_batch if batched else 0, gear_of, first,
    )  # fmt: skip


def _runner(graph: Graph, chip: str | None) -> Callable[[Arrays], Arrays]:
    if chip is None:
        return lambda inputs: evaluate(graph, inputs)
    compiled = compile_graph(graph, chip)
    return lambda inputs: run_tasks(compiled, inputs, graph.outputs)


def _rows_apart(one: Graph, two: Graph) -> bool:
    """Tell whether two rows together give what each gives alone; this warms the model up too."""
    for name in (*one.inputs, *one.outputs):
        shape, other = one.types[name].shape, two.types[name].shape
        if not shape or (shape[0], other[0]) != (1, 2) or shape[1:] != other[1:]:
            return False
    given = [random_inputs(one, seed) for seed in (0, 1)]
    alone = [evaluate(one, inputs) for inputs in given]
    pair = evaluate(two, {n: np.concatenate([g[n] for g in given]) for n in one.inputs})
    return all(
        np.allclose(pair[n][k], alone[k][n][0], rtol=1e-2, atol=1e-3, equal_nan=True)
        for n in one.outputs
        for k in (0, 1)
    )


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
    width, least = scaled.shape[1], np.inf
    best = np.zeros(width)
    for face in range(1, 2**width):
        used = [k for k in range(width) if face >> k & 1]
        part = np.linalg.lstsq(scaled[:, used], np.ones(len(scaled)), rcond=None)[0]
        error = float(((scaled[:, used] @ part - 1) ** 2).sum())
        if (part >= 0).all() and error < least - 1e-12:
            best, least = np.zeros(width), error
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
WIDTH, HEADS, EPSILON = 768, 12, 1e-5
PROMPTS = (64, 256, 1024)
DECODES = ((1, 128), (1, 1024), (8, 128), (8, 1024), (32, 128), (32, 1024))
"""Requests, and tokens that stand in the cache of each."""


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
            self.start_s + prompt_tokens * self.prompt_token_s
            + decodes * self.decode_s + cached * self.cached_token_s
        )  # fmt: skip


def decode_graph(batch: int, cached: int, layers: int = 12, vocabulary: int = GPT_WORDS) -> Graph:
    """Return a step of GPT-2 small: a row a request, and caches, to the scores of the next token.

    Keys come as (batch, heads, depth, cached), values as (batch, heads, cached, depth), those of
    the new tokens already in their places; they also go out.
    """
    net, depth = Net("gpt2_small", "fp32"), WIDTH // HEADS
    x, new = net.input("x", (batch, WIDTH), "fp32"), []
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
