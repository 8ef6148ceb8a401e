"""The models: builders of well-known networks with seeded weights.

`build("resnet50", batch=2)` returns a graph; `ZOO` holds every builder by name. The structures
and parameter counts are the published ones, the weights are not: no file is read.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ascend_lab.errors import InputError
from ascend_lab.graph.counts import macs, parameters
from ascend_lab.graph.ir import Graph

_MODULES = {
    "alexnet": "plain",
    "vgg16": "plain",
    "resnet18": "resnet",
    "resnet50": "resnet",
    "mobilenet_v1": "mobilenet",
    "mobilenet_v2": "mobilenet",
    "mobilenet_v3_large": "mobilenet",
    "shufflenet_v2": "branching",
    "squeezenet": "plain",
    "efficientnet_b0": "mobilenet",
    "inception_v1": "branching",
    "densenet121": "branching",
    "unet": "unet",
    "bert_base": "bert",
    "bert_large": "bert",
    "gpt2_small": "gpt2",
    "vit_b16": "vit",
    "mobilevit_block": "vit",
    "mobilevit_s": "vit",
}


def _lazy(name: str) -> Callable[..., Graph]:
    """Return a builder that imports its module when it is called."""

    def builder(*args: Any, **settings: Any) -> Graph:
        graph: Graph = find(name)(*args, **settings)
        return graph

    builder.__name__ = builder.__qualname__ = name
    builder.__doc__ = f"Build {name}; see `zoo.find({name!r})` for its arguments."
    return builder


ZOO: dict[str, Callable[..., Graph]] = {name: _lazy(name) for name in _MODULES}
"""Every model's builder by name."""


def find(name: str) -> Callable[..., Graph]:
    """Return a model's builder function; raise `InputError` with near names for an unknown one."""
    if name not in _MODULES:
        near = difflib.get_close_matches(name, _MODULES, 3, 0.5)
        remedy = f"did you mean {' or '.join(near)}?" if near else ", ".join(_MODULES)
        raise InputError(f"one of the {len(_MODULES)} models", repr(name), remedy)
    module = import_module(f"ascend_lab.graph.zoo.{_MODULES[name]}")
    found: Callable[..., Graph] = getattr(module, name)
    return found


def build(name: str, *args: Any, **settings: Any) -> Graph:
    """Return a model by name, arguments as its builder takes them.

    Raises `InputError` for an unknown model or argument.
    """
    builder = find(name)
    try:
        return builder(*args, **settings)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        wanted = ", ".join(builder.__annotations__.keys() - {"return"})
        raise InputError(f"{name}: arguments among {wanted}", str(error), "rename it") from error


__all__ = ["ZOO", "build", "find", "macs", "parameters"]
