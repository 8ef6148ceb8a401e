"""What `quantize` is about: a model, its graph at the size of a feed, and samples for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.cli import common, inputs
from ascend_lab.errors import AscendLabError, InputError

if TYPE_CHECKING:
    from onnx import ModelProto

    from ascend_lab.compiler import Graph
    from ascend_lab.deploy.compress import LeftOut, Plan, Quantised
    from ascend_lab.deploy.compress.samples import Batch, Sizes

CLOSE = 1e-4
"""How far a model in a newer operator set may be off, as a share of its outputs."""
MOST_REASONS = 5
"""Reasons told where no layer is left."""
Feeds = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Subject:
    """A model as ONNX and as a graph, and the feeds to calibrate with.

    `sizes` are those that the model states for its inputs, `batch_axes` where samples lie in them.
    `fixed_because` says why the file has the sizes of the samples though the model leaves some
    open, "" if it does not.
    """

    source: ModelProto
    graph: Graph
    feeds: Feeds
    sizes: Mapping[str, Sizes]
    batch_axes: Batch
    fixed_because: str = ""

    @property
    def batch(self) -> int | str | None:
        """The first size of what the written model takes, or "any" if it leaves sizes open."""
        stated = [size for sizes in self.sizes.values() for size in sizes]
        if any(isinstance(size, str) for size in stated) and not self.fixed_because:
            return "any"
        shapes = (self.graph.types[name].shape for name in self.graph.inputs)
        return next((int(shape[0]) for shape in shapes if shape), None)

    def quantised(self, plan: Plan) -> tuple[Quantised, Sequence[LeftOut]]:
        """Return the network in eight bits, and what stays in floating point with the reasons."""
        from ascend_lab.deploy import compress as c

        ready = c.made_ready(self.graph, plan)
        rows, apart = c.left_out(self.source, ready, plan)
        if all(n.name in apart or plan.of(n) is None for n in c.layers_of(ready)):
            reasons = "; ".join(f"{row.name}: {row.reason}" for row in rows[:MOST_REASONS])
            remedy = "skip fewer, or give a model with convolutions or products of constant weights"
            raise InputError(f"{ready.name}: a layer to quantise", reasons or "none", remedy)
        skipping = replace(plan, skip_layers=plan.skip_layers | apart)
        return c.quantise_graph(self.graph, self.own(self.feeds), skipping), rows

    def own(self, feeds: Feeds) -> Feeds:
        """Return feeds without the inputs that steer shapes: the graph has their values."""
        return [{name: feed[name] for name in self.graph.inputs} for feed in feeds]

    def with_pairs(self, plan: Plan) -> Subject:
        """Return the model in an operator set that has the pairs of a plan.

        An old one is converted, and compared; where that fails the file is written from the graph.
        """
        from ascend_lab.compiler.onnx import export_onnx
        from ascend_lab.deploy import compress as c

        bits = max(
            layer.bits for layer in (plan.common, *plan.types.values(), *plan.layers.values())
        )
        newer = c.upgraded(self.source, bits)
        if newer is self.source:
            return self
        if newer is not None:
            with suppress(AscendLabError):
                graph = _graph_of(newer, self.feeds)
                if c.output_error(self.graph, graph, self.own(self.feeds[:1])) <= CLOSE:
                    return replace(self, source=newer, graph=graph)
        why = "its operator set has no pairs, and no newer one that we can convert it to says it"
        return replace(self, source=export_onnx(self.graph), fixed_because=why)

    def held_out(self, path: str | None, plan: Plan) -> Feeds:
        """Return feeds that scales are not chosen on: those of a file, and those left over."""
        from ascend_lab.deploy.compress.samples import feeds_of

        feeds = list(self.feeds[plan.batches :]) if plan.batches is not None else []
        if path is None:
            return feeds
        arrays = common.wanted(self.sizes, inputs.load_arrays(path), "--held-out")
        for name, array in arrays.items():
            if not np.isfinite(np.asarray(array, np.float64)).all():
                raise InputError(f"--held-out: finite numbers of {name}", "nan or inf", "drop them")
        feeds_of_file = feeds_of(self.sizes, self.batch_axes, arrays, "--held-out")
        for name in self.graph.inputs:
            calibrated_shape = self.graph.types[name].shape
            if (shape := feeds_of_file[0][name].shape) != calibrated_shape:
                needed = (
                    f"--held-out: {name} in feeds of {calibrated_shape}, as for the calibration"
                )
                raise InputError(needed, str(shape), "hold out as many samples, or a multiple")
        return [*feeds, *feeds_of_file]

    def error(self, model: ModelProto, quantised: Quantised, feeds: Feeds) -> float:
        """Return how far the outputs of the written model are off on some feeds."""
        from ascend_lab.compiler.onnx import import_pinning
        from ascend_lab.deploy import compress as c

        inputs_of_graph = self.own(feeds)
        if any(layer.bits != 8 for layer in quantised.layers):
            return c.output_error(self.graph, c.fake_quantised(quantised), inputs_of_graph)
        shapes = {name: np.shape(value) for name, value in self.feeds[0].items()}
        written_graph = import_pinning(model, self.feeds[0], shapes=shapes).graph
        return c.output_error(self.graph, written_graph, inputs_of_graph)


def subject_of(model: str, calibration: str) -> Subject:
    """Return a model and its samples; raise `InputError` for samples that do not fit it."""
    from ascend_lab.compiler.onnx import export_onnx, host, tensors
    from ascend_lab.compiler.zoo import PREFIX

    arrays = inputs.load_arrays(calibration)
    if model.startswith(PREFIX):
        graph = common.import_with(model).graph
        stated: dict[str, Any] = {name: graph.types[name].shape for name in graph.inputs}
        batch, feeds = _cut(stated, (), arrays)
        return Subject(export_onnx(graph), graph, feeds, stated, batch)
    source = host.whole_model(model)
    entries = {entry.name: tensors.sizes_of(entry) for entry in tensors.inputs_of(source.graph)}
    common.wanted(entries, arrays, "--calibration")
    stated = {
        name: ("",) * np.ndim(arrays[name]) if sizes is None else sizes
        for name, sizes in entries.items()
    }
    batch, feeds = _cut(stated, [tensors.sizes_of(e) for e in source.graph.output], arrays)
    return Subject(source, _graph_of(source, feeds), feeds, stated, batch)


def _cut(
    stated: Mapping[str, Any], outputs: Sequence[Any], arrays: Mapping[str, Any]
) -> tuple[Batch, Feeds]:
    from ascend_lab.deploy.compress.samples import batch_of, feeds_of

    samples = common.wanted(stated, arrays, "--calibration")
    batch = batch_of(stated, outputs)
    return batch, feeds_of(stated, batch, samples, "--calibration")


def _graph_of(source: ModelProto, feeds: Feeds) -> Graph:
    """Return the graph for the sizes of a feed; inputs that steer shapes must not change."""
    from ascend_lab.compiler.onnx import import_pinning

    shapes = {name: np.shape(value) for name, value in feeds[0].items()}
    graph = import_pinning(source, feeds[0], shapes=shapes).graph
    for name in feeds[0].keys() - set(graph.inputs):
        if any(not np.array_equal(feed[name], feeds[0][name]) for feed in feeds):
            needed = f"--calibration: one value of {name}, which steers shapes"
            raise InputError(needed, "several", "quantise for each by itself")
    return graph
