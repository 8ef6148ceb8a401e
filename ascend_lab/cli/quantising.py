"""Quantises a model for the verb `quantize`, with samples that determine its scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.cli import array_files, common
from ascend_lab.errors import AscendLabError, InputError

if TYPE_CHECKING:
    from onnx import ModelProto

    from ascend_lab.compiler import Graph
    from ascend_lab.deploy.compress import LeftOut, Plan, Quantised
    from ascend_lab.deploy.compress.samples import Batch, Sizes

CLOSE = 1e-4
"""Largest relative error of outputs after a model is converted to a newer operator set."""
MAX_REASONS = 5
"""Most reasons that are printed if no layer can be quantised."""
Feeds = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Subject:
    """A model as ONNX and as a graph, and the feeds to calibrate with.

    A feed is a batch: an array for each input. `sizes` are those that the model states for its
    inputs, symbols such as "N" where it leaves them open; `batch_axes` says along which axis of an
    input samples lie. `fixed_because` is the reason why the written file has the sizes of the
    samples though the model leaves some open, "" if it keeps them open.
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
        # An input may be a number, without any size.
        shapes = (self.graph.types[name].shape for name in self.graph.inputs)
        return next((int(shape[0]) for shape in shapes if shape), None)

    def quantised(self, plan: Plan) -> tuple[Quantised, Sequence[LeftOut]]:
        """Return the network in eight bits, and the layers left in floating point with reasons."""
        from ascend_lab.deploy import compress as c

        ready = c.made_ready(self.graph, plan)
        rows, unquantisable = c.left_out(self.source, ready, plan)
        # Left out: layers that the plan skips, and products of the graph that are not operators of
        # the file, such as those inside an LSTM.
        if all(n.name in unquantisable or plan.of(n) is None for n in c.layers_of(ready)):
            reasons = "; ".join(f"{row.name}: {row.reason}" for row in rows[:MAX_REASONS])
            remedy = "skip fewer, or give a model with convolutions or products of constant weights"
            raise InputError(f"{ready.name}: a layer to quantise", reasons or "none", remedy)
        skipping = replace(plan, skip_layers=plan.skip_layers | unquantisable)
        return c.quantise_graph(self.graph, self.own(self.feeds), skipping), rows

    def own(self, feeds: Feeds) -> Feeds:
        """Return feeds without inputs on which shapes depend: the graph holds their values."""
        return [{name: feed[name] for name in self.graph.inputs} for feed in feeds]

    def with_pairs(self, plan: Plan) -> Subject:
        """Return the model in an operator set that has the pairs of a plan.

        A pair is QuantizeLinear and DequantizeLinear before a layer; operator set 13 has them for
        8 bits, 21 for 16. A model in an older set is converted, and its outputs compared; where
        that fails the file is written from the graph.
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
                # A converter may change the meaning of a node: comparing outputs shows this.
                if c.output_error(self.graph, graph, self.own(self.feeds[:1])) <= CLOSE:
                    return replace(self, source=newer, graph=graph)
        why = "its operator set has no pairs, and no newer one that we can convert it to says it"
        return replace(self, source=export_onnx(self.graph), fixed_because=why)

    def held_out(self, path: str | None, plan: Plan) -> Feeds:
        """Return feeds not used to choose scales: a file's, and calibration feeds left over."""
        from ascend_lab.deploy.compress.samples import feeds_of

        # Of 8 batches with batch_num 6 the last two choose no scale: errors on them are honest.
        feeds = list(self.feeds[plan.batches :]) if plan.batches is not None else []
        if path is None:
            return feeds
        # An infinity in one sample would make the error of all of them infinite.
        arrays = common.arrays_named(self.sizes, array_files.load_arrays(path), "--held-out")
        for name, array in arrays.items():
            if not np.isfinite(np.asarray(array, np.float64)).all():
                raise InputError(f"--held-out: finite numbers of {name}", "nan or inf", "drop them")
        feeds_of_file = feeds_of(self.sizes, self.batch_axes, arrays, "--held-out")
        # The graph has fixed sizes: a feed of another size would not run on it.
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
        # Integer kernels have 8 bits: layers of other widths are rounded to their steps and
        # computed in floating point.
        if any(layer.bits != 8 for layer in quantised.layers):
            return c.output_error(self.graph, c.fake_quantised(quantised), inputs_of_graph)
        # The error is that of the written file, not of the graph from which it was written.
        shapes = {name: np.shape(value) for name, value in self.feeds[0].items()}
        written_graph = import_pinning(model, self.feeds[0], shapes=shapes).graph
        return c.output_error(self.graph, written_graph, inputs_of_graph)


def subject_of(model: str, calibration: str) -> Subject:
    """Return a model and its samples; raise `InputError` for samples that do not fit it."""
    from ascend_lab.compiler.onnx import export_onnx, host, tensors
    from ascend_lab.compiler.zoo import ZOO_PREFIX

    arrays = array_files.load_arrays(calibration)
    # A model of the zoo has an ONNX file only once it is exported.
    if model.startswith(ZOO_PREFIX):
        graph = common.import_with(model).graph
        stated: dict[str, Any] = {name: graph.types[name].shape for name in graph.inputs}
        batch, feeds = _cut(stated, (), arrays)
        return Subject(export_onnx(graph), graph, feeds, stated, batch)
    source = host.whole_model(model)
    entries = {entry.name: tensors.sizes_of(entry) for entry in tensors.inputs_of(source.graph)}
    common.arrays_named(entries, arrays, "--calibration")
    # If the model does not even state the rank of an input, all axes of its samples are open.
    stated = {
        name: ("",) * np.ndim(arrays[name]) if sizes is None else sizes
        for name, sizes in entries.items()
    }
    batch, feeds = _cut(stated, [tensors.sizes_of(e) for e in source.graph.output], arrays)
    return Subject(source, _graph_of(source, feeds), feeds, stated, batch)


def _cut(
    stated: Mapping[str, Any], outputs: Sequence[Any], arrays: Mapping[str, Any]
) -> tuple[Batch, Feeds]:
    """Return the axes along which samples are stacked, and the arrays cut into feeds.

    1000 images for a model of batch 8 are 125 feeds.
    """
    from ascend_lab.deploy.compress.samples import batch_of, feeds_of

    samples = common.arrays_named(stated, arrays, "--calibration")
    batch = batch_of(stated, outputs)
    return batch, feeds_of(stated, batch, samples, "--calibration")


def _graph_of(source: ModelProto, feeds: Feeds) -> Graph:
    """Return the graph for the sizes of a feed; inputs on which shapes depend must not change."""
    from ascend_lab.compiler.onnx import import_pinning

    shapes = {name: np.shape(value) for name, value in feeds[0].items()}
    graph = import_pinning(source, feeds[0], shapes=shapes).graph
    # A Reshape to a shape that comes as an input: its value is part of the graph.
    for name in feeds[0].keys() - set(graph.inputs):
        if any(not np.array_equal(feed[name], feeds[0][name]) for feed in feeds):
            needed = f"--calibration: one value of {name}, which steers shapes"
            raise InputError(needed, "several", "quantise for each by itself")
    return graph
