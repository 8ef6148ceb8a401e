"""How each layer is to be quantised: a plan, or AMCT's simplified configuration file that says it.

The file is protobuf text; read are the keys that mean something, against a table of them.

    batch_num: 2
    skip_layers: "fc"
    common_config { arq_quantize { channel_wise: true } hfmg_quantize { num_of_bins: 4096 } }
    override_layer_types { layer_type: "Conv2d" calibration_config { ifmr_quantize { } } }

Source: github hicann/amct, calibration_config_pytorch.proto. Without `batch_num` all samples count.

A table maps each key to what it holds: `str`, `bool`, `int`, `float`, a `Range`, a tuple of words
to choose from, a table of its own, a list with one of these in it (the key may be repeated), or a
text: why the key is refused.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab.compiler import Graph, Node
from ascend_lab.deploy.compress.calibrators import SYMMETRIC
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.limits import TABLE_BYTES, Range, number_of, read_file, shown, whole_of

CONVOLUTIONS = ("conv2d", "depthwise_conv2d", "conv_transpose2d")
PRODUCTS = ("matmul", "gemm", "batch_matmul")
TYPES: Mapping[str, tuple[str, ...]] = {
    **{op: (op,) for op in (*CONVOLUTIONS, *PRODUCTS)},
    **dict.fromkeys(("Conv2d", "Conv"), ("conv2d", "depthwise_conv2d")),
    **dict.fromkeys(("ConvTranspose2d", "ConvTranspose"), ("conv_transpose2d",)),
    "Linear": PRODUCTS,
    "MatMul": ("matmul", "batch_matmul"),
    "Gemm": ("gemm", "matmul"),
}
"""Operators by the names that frameworks, ONNX and this library have for types of layers."""
STRENGTHS = 0.2, 0.8
"""The least and the largest strength of a balance."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """How AdaRound learns: steps, weight of the push, beta from and to, share without push.

    `lr` is the step of Adam, `rows` the size of a minibatch.
    """

    iterations: int = 10000
    push: float = 0.01
    beta: tuple[float, float] = (20.0, 2.0)
    warm: float = 0.2
    lr: float = 1e-3
    rows: int = 32
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """How a layer is to be quantised; `options` are those of the method.

    `strength` is that of the balance with what the layer reads, None for no balance; `rounding`
    None rounds weights to the nearest.
    """

    method: str = "ifmr"
    asymmetric: bool = True
    bits: int = 8
    weight_bits: int = 8
    channel_wise: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    strength: float | None = None
    rounding: Rounding | None = None

    @property
    def with_offset(self) -> bool:
        """Tell whether activations get an offset: never by a rule that knows none."""
        return self.asymmetric and self.method not in SYMMETRIC


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with each layer: a layer's own plan beats its type's, that the common one."""

    common: LayerPlan = field(default_factory=LayerPlan)
    types: Mapping[str, LayerPlan] = field(default_factory=dict)
    layers: Mapping[str, LayerPlan] = field(default_factory=dict)
    skip_layers: frozenset[str] = frozenset()
    skip_types: frozenset[str] = frozenset()
    fold: bool = True
    unfolded: frozenset[str] = frozenset()
    batches: int | None = None

    def of(self, node: Node) -> LayerPlan | None:
        """Return the plan of a layer; None if it is to stay as it is."""
        if node.name in self.skip_layers or any(node.op in TYPES[t] for t in self.skip_types):
            return None
        if node.name in self.layers:
            return self.layers[node.name]
        return next((p for t, p in self.types.items() if node.op in TYPES[t]), self.common)

    def check(self, graph: Graph) -> None:
        """Raise `InputError` for a layer or a type of layers that is named and not there."""
        known = {node.name for node in graph.nodes}
        for name in (*self.layers, *self.skip_layers, *self.unfolded):
            if name not in known:
                near = difflib.get_close_matches(name, known, 3)
                remedy = f"did you mean {' or '.join(near)}?" if near else "check it"
                raise InputError(f"{graph.name}: a layer of the graph", repr(name), remedy)
        for kind in (*self.types, *self.skip_types):
            if kind not in TYPES:
                raise InputError(f"a type of layers among {', '.join(TYPES)}", repr(kind))


# -- the file -------------------------------------------------------------------------------------
_ACTIVATION = {"asymmetric": bool, "dst_type": ("INT8", "INT16")}
_PERCENT = Range(float, 0.5, 1)
_BETA = Range(float, 1, 1e3)
_LAYER: Mapping[str, Any] = {
    "ifmr_quantize": {
        **dict.fromkeys(("search_range_start", "search_range_end"), Range(float, 1e-3, 1e3)),
        "search_step": Range(float, 1e-6, 1e3),
        **dict.fromkeys(("max_percentile", "min_percentile"), _PERCENT),
        **_ACTIVATION,
    },
    "hfmg_quantize": {"num_of_bins": int, **_ACTIVATION},
    "arq_quantize": {"channel_wise": bool, "quant_bits": Range(int, 6, 8)},
    "ada_quantize": {
        "num_iteration": Range(int, 1, 1e6),
        "reg_param": Range(float, 0, 1e3),
        "beta_range_start": _BETA,
        "beta_range_end": _BETA,
        "warm_start": Range(float, 0, 0.99),
        "channel_wise": bool,
    },
    "dmq_balancer": {"migration_strength": Range(float, *STRENGTHS)},
    "nuq_quantize": "the algorithm of non-uniform weights is not public",
}
_FILE: Mapping[str, Any] = {
    "batch_num": Range(int, 1, 1e6),
    **dict.fromkeys(("activation_offset", "do_fusion"), bool),
    **{key: [str] for key in ("skip_layers", "skip_layer_types", "skip_fusion_layers")},
    "common_config": _LAYER,
    "override_layer_types": [{"layer_type": str, "calibration_config": _LAYER}],
    "override_layer_configs": [{"layer_name": str, "calibration_config": _LAYER}],
    "fakequant_precision_mode": "values are computed in fp32",
    "nuq_config": "the algorithm of non-uniform weights is not public",
    "joint_quant": "layers that an addition ties keep scales of their own",
    "version": "the file has one form here",
}
BINS = (1024, 2048, 4096, 8192)


def read_config(path: str | Path, common: LayerPlan | None = None) -> Plan:
    """Return the plan of a file on disk; raises as `parse_config`."""
    data = read_file(path, "a configuration file", TABLE_BYTES)
    return parse_config(data.decode("utf-8", "replace"), common, str(path))


def parse_config(text: str, common: LayerPlan | None = None, where: str = "config") -> Plan:
    """Return the plan of a file's text; what it leaves open is as in `common`.

    Raises `InputError` naming the key for one that is unknown or a value that cannot be,
    `UnsupportedError` for a key of the published form that has no meaning here.
    """
    found = read_text(text, _FILE, where)
    start = replace(common or LayerPlan())
    if "activation_offset" in found:
        start = replace(start, asymmetric=found["activation_offset"])
    base = _layer(found.get("common_config", {}), start, where)
    many: dict[str, dict[str, LayerPlan]] = {"type": {}, "name": {}}
    for key, name in (("override_layer_types", "type"), ("override_layer_configs", "name")):
        for one in found.get(key, []):
            own = one.get(f"layer_{name}")
            if own is None or own in many[name]:
                raise InputError(f"{where}: {key}: layer_{name}, each once", str(own or "none"))
            many[name][own] = _layer(one.get("calibration_config", {}), base, where)
    return Plan(
        base,
        many["type"],
        many["name"],
        frozenset(found.get("skip_layers", ())),
        frozenset(found.get("skip_layer_types", ())),
        found.get("do_fusion", True),
        frozenset(found.get("skip_fusion_layers", ())),
        found.get("batch_num"),
    )


def _layer(found: Mapping[str, Any], plan: LayerPlan, where: str) -> LayerPlan:
    """Return a plan changed by what a calibration config says."""
    for pair in (("ifmr_quantize", "hfmg_quantize"), ("arq_quantize", "ada_quantize")):
        if all(key in found for key in pair):
            raise InputError(f"{where}: {pair[0]} or {pair[1]}", "both", "keep one")
    for method in ("ifmr", "hfmg"):
        if (given := found.get(f"{method}_quantize")) is not None:
            options = (_ifmr if method == "ifmr" else _hfmg)(given, where)
            plan = replace(
                plan,
                method=method,
                options=options,
                asymmetric=given.get("asymmetric", plan.asymmetric),
                bits=16 if given.get("dst_type") == "INT16" else 8,
            )
    if (arq := found.get("arq_quantize")) is not None:
        each = arq.get("channel_wise", plan.channel_wise)
        plan = replace(plan, weight_bits=arq.get("quant_bits", 8), channel_wise=each, rounding=None)
    if (ada := found.get("ada_quantize")) is not None:
        each = ada.get("channel_wise", plan.channel_wise)
        plan = replace(plan, weight_bits=8, channel_wise=each, rounding=_rounding(ada, where))
    if (dmq := found.get("dmq_balancer")) is not None:
        plan = replace(plan, strength=dmq.get("migration_strength", 0.5))
    return plan


def _ifmr(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    usual = {"search_range_start": 0.7, "search_range_end": 1.3, "search_step": 0.01}
    first, last, step = (given.get(key, value) for key, value in usual.items())
    if not first <= last or step < (last - first) / 1e4:
        needed = f"{where}: search_range_start to search_range_end in at most 10,000 of search_step"
        raise InputError(needed, f"{first:g} to {last:g} by {step:g}")
    shares = tuple(given.get(f"{end}_percentile", 0.999999) for end in ("max", "min"))
    count = max(1, int(np.ceil((last - first) / step - 1e-6)))
    return {"shares": shares, "ratios": tuple((first + step * np.arange(count)).tolist())}


def _hfmg(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    bins = given.get("num_of_bins", 4096)
    if bins not in BINS:
        raise InputError(f"{where}: num_of_bins among {', '.join(map(str, BINS))}", str(bins))
    return {"bins": bins}


def _rounding(given: Mapping[str, Any], where: str) -> Rounding:
    how = Rounding(
        given.get("num_iteration", 10000),
        given.get("reg_param", 0.01),
        (given.get("beta_range_start", 20.0), given.get("beta_range_end", 2.0)),
        given.get("warm_start", 0.2),
    )
    if how.beta[1] > how.beta[0]:
        raise InputError(f"{where}: beta_range_end of at most {how.beta[0]:g}", f"{how.beta[1]:g}")
    return how


# -- protobuf's text form against a table of keys --------------------------------------------------
Table = Mapping[str, Any]
Message = dict[str, Any]
DEEPEST = 16
FEW = 8
"""Messages inside each other; keys that a message about an unknown one can list."""
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
    r"""|(?P<word>[-+.\w]+)|(?P<mark>[{}<>:;,\[\]])"""
)

_READERS: Mapping[type, tuple[str, Callable[[str], Any]]] = {
    str: ("a text in quotes", lambda word: None),
    bool: ("true or false", {"true": True, "false": False}.get),
    int: ("a whole number", whole_of),
    float: ("a finite number", number_of),
}
"""What each kind is called, and what reads a word of it; None: it is none."""


def read_text(text: str, table: Table, where: str) -> Message:
    """Return what a text says, by the keys of a table; repeated keys as lists.

    Raises `InputError` for a text that is none or a key with another kind of value, and for an
    unknown key; `UnsupportedError` for a key the table refuses. All name the key and the line.
    """
    reader = _Reader(text, where)
    found = reader.message(table, "")
    if reader.token:
        raise reader.error("a key", shown(reader.take()))
    return found


class _Reader:
    """A text as tokens, one ahead: `line` is that of the one at fault, `ahead` of the next."""

    def __init__(self, text: str, where: str) -> None:
        self.where = where
        self.line = 1
        self.ahead = 1
        self.depth = 0
        self.tokens = self._split(text)
        self.token = next(self.tokens, "")

    def _split(self, text: str) -> Iterator[str]:
        place = 0
        while place < len(text):
            found = _TOKEN.match(text, place)
            if found is None:
                self.line = self.ahead
                raise self.error("protobuf text", shown(text[place]))
            place = found.end()
            if found.lastgroup != "space":
                yield found[0]
            self.ahead += found[0].count("\n")

    def error(self, needed: str, got: str, remedy: str = "mend that line") -> InputError:
        return InputError(f"{self.where}: line {self.line}: {needed}", got, remedy)

    def take(self, *wanted: str) -> str:
        """Return the token, which must be one of those wanted (any if none is), and step on."""
        found = self.token
        self.line = self.ahead if found else self.line
        if not found or (wanted and found not in wanted):
            raise self.error(" or ".join(wanted) or "a value", shown(found) if found else "the end")
        self.token = next(self.tokens, "")
        return found

    def message(self, table: Table, end: str) -> Message:
        """Return the fields up to the closing mark."""
        found: Message = {}
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.error(f"at most {DEEPEST} messages inside each other", "more")
        while self.token and self.token != end:
            key = self.take()
            if key not in table:
                raise self.unknown(key, table)
            kind = table[key]
            if isinstance(kind, str):
                raise UnsupportedError(f"{self.where}: line {self.line}: no key {key}", kind)
            values = self.values(key, kind[0] if isinstance(kind, list) else kind)
            if isinstance(kind, list):
                found.setdefault(key, []).extend(values)
            elif key in found or len(values) != 1:
                raise self.error(f"{key} once", "several")
            else:
                found[key] = values[0]
            if self.token in (",", ";"):
                self.take()
        self.depth -= 1
        return found

    def unknown(self, key: str, table: Table) -> InputError:
        near = difflib.get_close_matches(key, table, 1)
        if near:
            return self.error("a known key", shown(key), f"did you mean {near[0]}? correct it")
        some = difflib.get_close_matches(key, table, FEW, 0.0)
        return self.error(f"a key such as {', '.join(some)}", shown(key), "correct it or drop it")

    def values(self, key: str, kind: Any) -> list[Any]:
        """Return what stands behind a key: one value, or those of a list in brackets."""
        if self.token == ":":
            self.take()
        elif not isinstance(kind, Mapping):
            raise self.error(f"{key}: a value behind a colon", shown(self.token))
        if self.token != "[":
            return [self.value(key, kind)]
        found: list[Any] = []
        mark = self.take()
        while mark != "]":
            if self.token == "]" and not found:
                self.take()
                break
            found.append(self.value(key, kind))
            mark = self.take(",", "]")
        return found

    def value(self, key: str, kind: Any) -> Any:
        if isinstance(kind, Mapping):
            end = "}" if self.take("{", "<") == "{" else ">"
            made = self.message(kind, end)
            self.take(end)
            return made
        word = self.take()
        if kind is str and word[0] in "\"'":
            return re.sub(r"\\(.)", r"\1", word[1:-1])
        if isinstance(kind, tuple):
            needed = " or ".join(kind)
            found = word if word in kind else None
        elif isinstance(kind, Range):
            needed = str(kind)
            found = _READERS[kind.kind][1](word)
            found = found if found in kind else None
        else:
            needed, read = _READERS[kind]
            found = read(word)
        if found is None:
            raise self.error(f"{key}: {needed}", shown(word))
        return found
