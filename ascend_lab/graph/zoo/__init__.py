"""The models: builders of well-known networks with seeded weights.

`build("resnet50", batch=2)` returns a graph; `ZOO` holds every builder by name. The structures
and parameter counts are the published ones, the weights are not: no file is read.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from ascend_lab.errors import InputError
from ascend_lab.graph.counts import macs, parameters
from ascend_lab.graph.ir import Graph
from ascend_lab.graph.zoo import convolutional as c
from ascend_lab.graph.zoo import transformers as t
from ascend_lab.graph.zoo import vit as v

# fmt: off
_BUILDERS: tuple[Callable[..., Graph], ...] = (
    c.alexnet, c.vgg16, c.resnet18, c.resnet50, c.mobilenet_v1, c.mobilenet_v2,
    c.mobilenet_v3_large, c.shufflenet_v2, c.squeezenet, c.efficientnet_b0, c.inception_v1,
    c.densenet121, c.unet, t.bert_base, t.bert_large, t.gpt2_small, v.vit_b16, v.mobilevit_block,
    v.mobilevit_s,
)
# fmt: on
ZOO = {builder.__name__: builder for builder in _BUILDERS}
"""Every model's builder by name."""


def find(name: str) -> Callable[..., Graph]:
    """Return a model's builder function; raise `InputError` with near names for an unknown one."""
    if name not in ZOO:
        near = difflib.get_close_matches(name, ZOO, 3, 0.5)
        remedy = f"did you mean {' or '.join(near)}?" if near else ", ".join(ZOO)
        raise InputError(f"one of the {len(ZOO)} models", repr(name), remedy)
    return ZOO[name]


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
