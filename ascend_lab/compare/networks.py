"""Times measured networks of the model zoo, compiled as the command `simulate` compiles them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ascend_lab.compare.estimates import Estimate, at_peak, of_tasks
from ascend_lab.compare.rows import Work
from ascend_lab.compare.words import is_measurement
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.limits import shown
from ascend_lab.machine.chip import Chip

if TYPE_CHECKING:
    from ascend_lab.compiler import Graph

SMALL_CHANNEL = "small_channel"
"""Attribute of a network's row; 1 means that the first layer reads pixels of 4 channels.

It states the option --enable_small_channel of the vendor's compiler;
our compiler decides this by itself.
"""
NETWORK_DTYPES = ("fp16", "bf16", "int8")


def network(work: Work, chip: Chip, like: str) -> Estimate:
    """Return the time of a network of the zoo, compiled as the command `simulate` compiles it."""
    from ascend_lab.compiler import bound_of, placement, tiled
    from ascend_lab.compiler.compile import Road, finish_stages, front_stages
    from ascend_lab.compiler.like_cann import cann_road

    if "training" in work.group:
        needed = f"{work.operator}: inference"
        raise UnsupportedError(needed, work.group, "a step of training is more than its network")
    # one format for the whole network
    dtype = work.dtypes[0] if len(work.dtypes) == 1 else ", ".join(work.dtypes) or "none"
    if dtype not in NETWORK_DTYPES:
        needed = f"{work.operator}: a network in {', '.join(NETWORK_DTYPES)}"
        raise UnsupportedError(needed, dtype, "networks run in no other format")
    graph = _graph(work)
    small = work.attributes.get(SMALL_CHANNEL, 0) == 1
    road = cann_road(chip, dtype, small_channel=small) if like else Road(dtype=dtype)
    front = front_stages(graph, chip, road)
    # a network whose tensors exceed device memory is timed in tiles of the batch or the image
    if placement.too_large(front.laid_out, chip.device_memory.size_bytes):
        times, _ = tiled.simulate_within(front, chip, None, road)
    else:
        times = finish_stages(front, chip, road).timeline()
    bound = bound_of(front.rewritten, at_peak(chip))
    return of_tasks(work, chip, times, bound)


def _graph(work: Work) -> Graph:
    """Return the zoo's network at the row's batch and sizes; raise if these contradict it."""
    from ascend_lab.compiler import zoo

    batch: Any = None
    for word, value in work.attributes.items():
        if word == "batch":
            batch = value
        elif not is_measurement(word) and not _changes_nothing(work, word, value):
            needed = f"{work.operator}: attributes that its time on one device depends on"
            raise UnsupportedError(needed, f"{word}={shown(value)}", "none is guessed")
    # (8, 3, 224, 224) states batch 8 without the attribute `batch`
    if batch is None and work.shapes:
        batch = work.shapes[0][0]
    # bool is a subclass of int in Python: batch=True is not a batch
    is_integer = isinstance(batch, int) and not isinstance(batch, bool)
    if not is_integer or batch < 1 or (work.shapes and work.shapes[0][0] != batch):
        shape_words = f", inputs of {work.shapes[0][0]}" if work.shapes else ""
        needed = f"{work.operator}: a batch above 0 that inputs and attributes agree on"
        raise InputError(needed, f"batch={shown(batch)}{shape_words}", "correct that row")
    graph = zoo.load_model(work.operator, batch=batch).graph
    name = graph.inputs[0]
    # another image size than the zoo's: 3 x 299 x 299, say
    if work.shapes and graph.types[name].shape != work.shapes[0]:
        graph = zoo.load_model(work.operator, shapes={name: work.shapes[0]}).graph
    return graph


def _changes_nothing(work: Work, word: str, value: Any) -> bool:
    """Tell whether an attribute changes nothing: one device, or the length that the shapes have.

    An attribute on how the first layer was compiled changes nothing, too.
    """
    if word == SMALL_CHANNEL:
        return value in (0, 1)
    if word == "context":
        return bool(work.shapes) and work.shapes[0][-1] == value
    return word in ("cards", "ranks", "tp") and value == 1
