"""A model by its name, wherever a command or a server takes one: a file, or `zoo:NAME`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_lab.errors import InputError
from ascend_lab.graph import zoo
from ascend_lab.graph.onnx import Imported, NeedsConstant, import_model
from ascend_lab.graph.onnx.tensors import FORMATS, Limits, check_size

if TYPE_CHECKING:
    from ascend_lab.graph.ir import Graph

ZOO = "zoo:"
ELEMENTS = {dtype: elem for elem, dtype in FORMATS.items() if elem not in ("int64", "bool")}
"""The ONNX element type of each number format."""


def model_name(model: str) -> str:
    """Return what a model is called: its name in the zoo, or its file's without the ending."""
    return model.removeprefix(ZOO) if model.startswith(ZOO) else Path(model).stem


def load_model(
    model: str,
    *,
    given: Mapping[str, Any] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    batch: int | None = None,
) -> Imported:
    """Return the graph of an ONNX file or of `zoo:NAME`, and its ONNX element types.

    `shapes` and the arrays `given` by input name say the sizes that the model leaves open; inputs
    that steer shapes are pinned to the values given. Raises `InputError` for an unknown name, and
    as `import_onnx`.
    """
    sizes = {**{name: array.shape for name, array in (given or {}).items()}, **(shapes or {})}
    if model.startswith(ZOO):
        graph = _built(model.removeprefix(ZOO), sizes, batch)
        inputs, outputs = (
            {name: ELEMENTS[graph.types[name].dtype] for name in names}
            for names in (graph.inputs, graph.outputs)
        )
        return Imported(graph, inputs, outputs)
    pinned: dict[str, Any] = {}
    while True:
        try:
            return import_model(model, shapes=sizes, batch=batch, pinned=pinned)
        except NeedsConstant as error:
            new = {name: given[name] for name in error.names if name in given} if given else {}
            if not new.keys() - pinned.keys():
                raise
            pinned |= new


def _built(name: str, sizes: Mapping[str, tuple[int, ...]], batch: int | None) -> Graph:
    """Return a model of the zoo; the sizes given must be ones that its builder can take."""
    settings: dict[str, Any] = {} if batch is None else {"batch": batch}
    for shape in sizes.values():
        if len(shape) in (2, 4):
            inner = "length" if len(shape) == 2 else "size"
            settings = {"batch": shape[0], inner: shape[-1], **settings}
    graph = zoo.build(name, **settings)
    for node in graph.nodes:
        for kind in graph.out_types(node):
            check_size(f"{name}, node {node.name}", kind.shape, Limits())
    for key, shape in sizes.items():
        if key not in graph.inputs or graph.types[key].shape != tuple(shape):
            wanted = ", ".join(f"{n}{list(graph.types[n].shape)}" for n in graph.inputs)
            raise InputError(f"{name}: inputs {wanted}", f"{key}{list(shape)}", "mend the shape")
    return graph
