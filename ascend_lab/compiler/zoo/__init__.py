"""The zoo: well-known networks with seeded weights, and the loader of any model by its name.

`build("resnet50", batch=2)` returns a graph; `ZOO` holds every builder by name; `load_model` takes
a name as commands and servers do: "zoo:resnet50", or the path of an ONNX file. Structures and
parameter counts are those published; the weights are seeded random numbers, so that no file is
read. `SOURCES` names the publication of each family, and the implementation that has the same
parameter counts.
"""

import csv
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ascend_lab.compiler import bound, ir, onnx
from ascend_lab.compiler.compile import compile_stages
from ascend_lab.compiler.counts import macs, parameters, published_macs
from ascend_lab.compiler.onnx.tensors import FORMATS, check_size
from ascend_lab.compiler.zoo import convolutional as c, formers, mobile, transformers as t
from ascend_lab.data import data_path
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import Chip, load_chip

_TORCH = "torchvision's definition"
_TIMM = "the definition in pytorch-image-models (timm)"
SOURCES = {
    "alexnet": f"Krizhevsky 2014, arXiv 1404.5997; {_TORCH}",
    "vgg": f"Simonyan & Zisserman 2015, arXiv 1409.1556; {_TORCH}",
    "resnet": f"He et al. 2016, arXiv 1512.03385; {_TORCH}",
    "resnext": f"Xie et al. 2017, arXiv 1611.05431; {_TORCH}",
    "mobilenet_v1": f"Howard et al. 2017, arXiv 1704.04861; {_TIMM}",
    "mobilenet_v2": f"Sandler et al. 2018, arXiv 1801.04381; {_TORCH}",
    "mobilenet_v3": f"Howard et al. 2019, arXiv 1905.02244; {_TORCH}",
    "mobilenet_v4": f"Qin et al. 2024, arXiv 2404.10518; {_TIMM}",
    "mnasnet": f"Tan et al. 2019, arXiv 1807.11626; {_TORCH}",
    "shufflenet_v1": "Zhang et al. 2018, arXiv 1707.01083; megvii-model/ShuffleNet-Series",
    "shufflenet_v2": f"Ma et al. 2018, arXiv 1807.11164; {_TORCH}",
    "squeezenet": f"Iandola et al. 2016, arXiv 1602.07360; {_TORCH}",
    "ghostnet": f"Han et al. 2020, arXiv 1911.11907; {_TIMM}",
    "ghostnet_v2": f"Tang et al. 2022, arXiv 2211.12905; {_TIMM}",
    "efficientnet": f"Tan & Le 2019, arXiv 1905.11946; {_TIMM}",
    "efficientnet_v2": f"Tan & Le 2021, arXiv 2104.00298; {_TIMM}",
    "inception": f"Szegedy et al. 2015, arXiv 1409.4842; {_TORCH}",
    "densenet": f"Huang et al. 2017, arXiv 1608.06993; {_TORCH}",
    "unet": "Ronneberger et al. 2015, arXiv 1505.04597",
    "bert": "Devlin et al. 2019, arXiv 1810.04805; Hugging Face's model card",
    "gpt2": "Radford et al. 2019; Hugging Face's model card",
    "vit": f"Dosovitskiy et al. 2021, arXiv 2010.11929; {_TORCH}",
    "mobilevit": f"Mehta & Rastegari 2022, arXiv 2110.02178; {_TIMM}",
    "mobilevit_v2": f"Mehta & Rastegari 2022, arXiv 2206.02680; {_TIMM}",
    "mobile_former": "Chen et al. 2022, arXiv 2108.05895; AAboys/MobileFormer",
    "efficientformer": f"Li et al. 2022, arXiv 2206.01191; {_TIMM}",
    "efficientformer_v2": f"Li et al. 2023, arXiv 2212.08059; {_TIMM}",
}
"""The source of a model, by the beginning of its name; the longest key that fits is used."""
_BUILDERS: tuple[Callable[..., ir.Graph], ...] = (
    c.alexnet,
    c.vgg16,
    c.resnet18,
    c.resnet50,
    c.resnext50,
    *mobile.BUILDERS,
    *c.SHUFFLED,
    *c.SQUEEZENETS,
    c.inception_v1,
    c.densenet121,
    c.unet,
    t.bert_base,
    t.bert_large,
    t.gpt2_small,
    t.vit_b16,
    t.mobilevit_block,
    *t.MOBILEVITS,
    *formers.BUILDERS,
)
ZOO = {builder.__name__: builder for builder in _BUILDERS}
"""Every model's builder by name."""


def _spelling_key(name: str) -> str:
    """Return a name in lower case, without punctuation and the x of x0.5 or 0.5x.

    Spellings of one model, such as "ResNet-50" and "resnet50", have the same key.
    """
    # "ShuffleNet-V2 0.5x" and "shufflenet_v2_x0_5" both become "shufflenetv205"
    return re.sub(r"[\W_]|x(?=\d)|(?<=\d)x", "", re.sub(r"\W", "_", name.lower()))


_NAME_OF_SPELLING = {_spelling_key(name): name for name in ZOO}


def find(name: str) -> Callable[..., ir.Graph]:
    """Return a model's builder; raise `InputError` with similar names for an unknown one."""
    # "ResNet-50" and "resnet50" have the same letters.
    model = name if name in ZOO else _NAME_OF_SPELLING.get(_spelling_key(name), "")
    if not model:
        close_names = difflib.get_close_matches(name.lower(), ZOO, 3, 0.5)
        remedy = (
            f"did you mean {' or '.join(close_names)}?"
            if close_names
            else f"e.g. {', '.join([*ZOO][:12])}"
        )
        raise InputError(f"one of the {len(ZOO)} models", repr(name[:80]), remedy)
    return ZOO[model]


def _builder_and_width(name: str) -> tuple[Callable[..., ir.Graph], dict[str, Any]]:
    """Return a builder and the width that a name such as mobilenet_v2_0_75 ends with."""
    plain = name.lower().replace(".", "_")
    # mobilenet_v2_0_75 and MobileNetV2 0.75x have the width 0.75; mobilenet_v1 has none
    with_width = re.fullmatch(r"(.+?)_?x?(\d)_(\d+)x?", plain)
    if with_width and _spelling_key(name) not in _NAME_OF_SPELLING:
        builder = ZOO.get(_NAME_OF_SPELLING.get(_spelling_key(with_width[1]), ""))
        if builder is not None and builder.__annotations__.get("width") is float:
            return builder, {"width": float(f"{with_width[2]}.{with_width[3]}")}
    return find(name), {}


def build(name: str, *args: Any, **settings: Any) -> ir.Graph:
    """Return the graph of a model by name, built with its builder's arguments.

    A name may end with the width: mobilenet_v2_0_75. Raises `InputError` for an unknown model or
    argument.
    """
    builder, width_setting = _builder_and_width(name)
    settings = width_setting | settings
    try:
        return builder(*args, **settings)
    except TypeError as error:
        # Python names a wrong argument only in the text; any other TypeError is a bug in a builder
        if "argument" not in str(error):
            raise
        arguments = ", ".join(n for n in builder.__annotations__ if n != "return")
        # "resnet50() got an unexpected keyword argument 'depth'": from "an unexpected" on
        got = str(error).partition("() ")[2].removeprefix("got ")
        raise InputError(f"{name}: arguments among {arguments}", got, "rename it") from error


def counts_of(
    name: str, *, batch: int = 1, width: float | None = None, size: int | None = None
) -> dict[str, Any]:
    """Return a model's name, parameters, multiply-accumulates, first input and source.

    `width` scales the channels and `size` sets the pixels of families that have them; raises
    `InputError` for others.
    """
    graph = sized(name, batch=batch, width=width, size=size)
    model = _builder_and_width(name)[0].__name__
    return {
        "name": model,
        "parameters": parameters(graph),
        "macs": published_macs(graph),
        "input_name": graph.inputs[0],
        "input_shape": list(graph.types[graph.inputs[0]].shape),
        "source": source_of(model),
    }


def stored_counts() -> dict[str, dict[str, Any]]:
    """Return `counts_of` every model for batch 1, read from a table, as building all is slow."""
    with data_path("zoo/counts.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    return {
        name: {
            "name": name,
            "parameters": int(row["parameters"]),
            "macs": int(row["macs"]),
            "input_name": row["input_name"],
            # "1x3x224x224" is [1, 3, 224, 224]
            "input_shape": [int(size) for size in row["input_shape"].split("x")],
            "source": source_of(name),
        }
        for name, row in rows.items()
    }


def sized(
    name: str, *, batch: int = 1, width: float | None = None, size: int | None = None
) -> ir.Graph:
    """Return a model with this batch, width and size; raises as `counts_of`."""
    builder, sizes = _builder_and_width(name)
    settings: dict[str, Any] = {"batch": batch, **sizes}
    for key, value, value_type in (("width", width, float), ("size", size, int)):
        if value is not None:
            if builder.__annotations__.get(key) is not value_type:
                raise InputError(f"a model with a {key} to choose", builder.__name__, "drop it")
            settings[key] = value
    return builder(**settings)


def source_of(name: str) -> str:
    """Return the publication of a model, and the definition that its counts are compared with."""
    # mobilevit_v2 begins with mobilevit and with mobilevit_v2: the longer one is its source.
    return SOURCES[max((family for family in SOURCES if name.startswith(family)), key=len)]


# -- why a model is slow, in one row of a table ----------------------------------------------------
def why(
    names: Iterable[str], chip: Chip | str, *, dtype: str = "fp16", **sizes: Any
) -> list[dict[str, Any]]:
    """Return a row for each model: its counts, its time, and the lower bound of its time.

    - cube_fill: products of the model / products that the cubes could do in the
      time
    - padded: products that the cubes do for each product of the model
    - launch_share, vector_share: shares of the time, of launches and of kernels without a cube

    `sizes` are those of `sized`: batch, width, size. Raises as `sized` and `compile_stages`.
    """
    loaded_chip = load_chip(chip) if isinstance(chip, str) else chip
    rows = []
    for name in names:
        graph = sized(name, **sizes)
        stages = compile_stages(graph, loaded_chip, dtype=dtype)
        times = stages.timeline()
        model_macs = published_macs(graph)
        bound_s = bound.bound_of(stages.rewritten, loaded_chip).time_s
        # a multiply-accumulate is two operations
        peak = loaded_chip.peak_ops_per_s(dtype) / 2
        without_cube = [op for op in times.operators if not op.timeline.macs]
        rows.append(
            {
                "name": graph.name,
                "macs": model_macs,
                "time_s": times.time_s,
                "bound_s": bound_s,
                "over_bound": times.time_s / bound_s,
                "memory_bytes": times.memory_bytes,
                "launches": times.launches,
                "launch_share": times.launch_s / times.time_s,
                "vector_share": sum(op.time_s for op in without_cube) / times.time_s,
                "cube_fill": model_macs / (peak * times.time_s),
                "padded": times.macs / model_macs if model_macs else 0.0,
            }
        )
    return rows


def why_lines(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return the rows of `why` as a table."""
    header = (
        f"{'model':<19}{'GMAC':>7}{'time us':>9}{'bound':>8}{'MB':>7}{'launches':>9}"
        f"{'of time':>8}{'no cube':>8}{'fill':>6}{'padded':>7}"
    )
    return [header] + [
        f"{row['name']:<19}{row['macs'] / 1e9:>7.3f}{row['time_s'] * 1e6:>9.1f}"
        f"{row['bound_s'] * 1e6:>8.1f}{row['memory_bytes'] / 1e6:>7.1f}{row['launches']:>9}"
        f"{row['launch_share']:>8.0%}{row['vector_share']:>8.0%}{row['cube_fill']:>6.1%}"
        f"{row['padded']:>7.1f}"
        for row in rows
    ]


# -- a file, or `zoo:NAME` -----------------------------------------------------------------------
ZOO_PREFIX = "zoo:"
# a graph holds int64 and bool as int32, too: here int32 must mean ONNX's int32
ONNX_ELEMENTS = {dtype: elem for elem, dtype in FORMATS.items() if elem not in ("int64", "bool")}
"""The ONNX element type of each number format."""


def model_name(model: str) -> str:
    """Return what a model is called: its name in the zoo, or its file's without the ending."""
    return model.removeprefix(ZOO_PREFIX) if model.startswith(ZOO_PREFIX) else Path(model).stem


def load_model(
    model: str,
    *,
    given: Mapping[str, Any] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    batch: int | None = None,
) -> onnx.Imported:
    """Return the graph of an ONNX file or of `zoo:NAME`, and its ONNX element types.

    `shapes`, and the arrays `given` by input name, set the model's symbolic sizes; inputs
    whose values decide shapes are fixed to the given values. Raises `InputError` for an unknown
    name, and as `import_onnx`.
    """
    sizes = {**{name: array.shape for name, array in (given or {}).items()}, **(shapes or {})}
    if model.startswith(ZOO_PREFIX):
        graph = _built(model.removeprefix(ZOO_PREFIX), sizes, batch)
        inputs = {name: ONNX_ELEMENTS[graph.types[name].dtype] for name in graph.inputs}
        outputs = {name: ONNX_ELEMENTS[graph.types[name].dtype] for name in graph.outputs}
        return onnx.Imported(graph, inputs, outputs)
    if model in ZOO and not Path(model).exists():
        raise InputError(
            "a model file", f"{model}: no such file", f"did you mean {ZOO_PREFIX}{model}?"
        )
    return onnx.import_pinning(model, given or {}, shapes=sizes, batch=batch)


def _built(name: str, sizes: Mapping[str, tuple[int, ...]], batch: int | None) -> ir.Graph:
    """Return a model of the zoo with these input shapes, which its builder must accept."""
    settings: dict[str, Any] = {} if batch is None else {"batch": batch}
    parameter_types = _builder_and_width(name)[0].__annotations__
    for shape in sizes.values():
        # a shape (batch, length) is that of tokens, (n, c, size, size) that of images
        argument = {2: "length", 4: "size"}.get(len(shape), "")
        if argument in parameter_types:
            settings = {"batch": shape[0], argument: shape[-1], **settings}
    graph = build(name, **settings)
    for node in graph.nodes:
        for kind in graph.out_types(node):
            check_size(f"{name}, node {node.name}", kind.shape)
    for key, shape in sizes.items():
        if key not in graph.inputs or graph.types[key].shape != tuple(shape):
            needed = ", ".join(f"{n}{list(graph.types[n].shape)}" for n in graph.inputs)
            got = f"{key}{list(shape)}"
            raise InputError(f"{name}: inputs {needed}", got, "correct the name or the shape")
    return graph


__all__ = [
    "ZOO",
    "build",
    "counts_of",
    "find",
    "load_model",
    "macs",
    "model_name",
    "parameters",
    "sized",
    "stored_counts",
    "why",
    "why_lines",
]
