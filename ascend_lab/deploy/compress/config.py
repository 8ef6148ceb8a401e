"""Plans how each layer is to be quantised: in Python or by AMCT's simplified configuration file.

The file is protobuf text, which `protobuf_text` reads with a table of the keys that have an effect.

    batch_num: 2
    skip_layers: "fc"
    common_config { arq_quantize { channel_wise: true } hfmg_quantize { num_of_bins: 4096 } }
    override_layer_types { layer_type: "Conv2d" calibration_config { ifmr_quantize { } } }

Source: github hicann/amct, calibration_config_pytorch.proto. Without `batch_num` all samples count.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab.compiler import Graph, Node
from ascend_lab.deploy.compress.calibrators import SYMMETRIC
from ascend_lab.deploy.compress.protobuf_text import read_text
from ascend_lab.errors import InputError
from ascend_lab.limits import TABLE_BYTES, Range, read_file

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
"""Type of a layer, as frameworks, ONNX or this library name it -> our operators."""
STRENGTHS = 0.2, 0.8
"""The least and the largest strength of a balance: see `balance`."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """How AdaRound learns (see `adaptive_rounding`): steps of Adam with the rate `lr`.

    `push` weighs the term that drives each weight up or down, `beta` is its exponent at first and
    at last, and `warm` the share of the steps without it. `rows` is the size of a minibatch.
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
    """How a layer is to be quantised: the rule (`method`) for its input, with the rule's options.

    `strength` is that of the balance between input and weights, None for no balance; without
    `rounding`, weights are rounded to the nearest.
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
        """Tell whether activations get an offset: never with a rule that has none."""
        return self.asymmetric and self.method not in SYMMETRIC


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of each layer: by its name, else by its type, else the common one.

    With `fold` batch norms are folded into layers, except into those named in `unfolded`. `batches`
    limits the samples.
    """

    common: LayerPlan = field(default_factory=LayerPlan)
    types: Mapping[str, LayerPlan] = field(default_factory=dict)
    layers: Mapping[str, LayerPlan] = field(default_factory=dict)
    skip_layers: frozenset[str] = frozenset()
    skip_types: frozenset[str] = frozenset()
    fold: bool = True
    unfolded: frozenset[str] = frozenset()
    batches: int | None = None

    def of(self, node: Node) -> LayerPlan | None:
        """Return the plan of a layer; None if it is to stay in floating point."""
        skips_type = any(node.op in TYPES[kind] for kind in self.skip_types)
        if node.name in self.skip_layers or skips_type:
            return None
        if node.name in self.layers:
            return self.layers[node.name]
        # types overlap ("Linear" and "MatMul" both hold matmul): the first that was named counts
        for kind, plan in self.types.items():
            if node.op in TYPES[kind]:
                return plan
        return self.common

    def check(self, graph: Graph) -> None:
        """Raise `InputError` if the plan names a layer or a type that the graph does not have."""
        names = {node.name for node in graph.nodes}
        for name in (*self.layers, *self.skip_layers, *self.unfolded):
            if name not in names:
                similar = difflib.get_close_matches(name, names, 3)
                remedy = f"did you mean {' or '.join(similar)}?" if similar else "check it"
                raise InputError(f"{graph.name}: a layer of the graph", repr(name), remedy)
        for kind in (*self.types, *self.skip_types):
            if kind not in TYPES:
                raise InputError(f"a type of layers among {', '.join(TYPES)}", repr(kind))


# -- the file -------------------------------------------------------------------------------------
# Tables of keys for `protobuf_text`; a text in place of a type says why a key is refused.
_ACTIVATION = {"asymmetric": bool, "dst_type": ("INT8", "INT16")}
# AMCT calls shares of the numbers percentiles: 0.999999, not 99.9999
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
"""Numbers of bins that AMCT's file may state for `hfmg`."""


def read_config(path: str | Path, common: LayerPlan | None = None) -> Plan:
    """Return the plan of a file on disk; raises the errors of `parse_config`."""
    data = read_file(path, "a configuration file", TABLE_BYTES)
    return parse_config(data.decode("utf-8", "replace"), common, str(path))


def parse_config(text: str, common: LayerPlan | None = None, where: str = "config") -> Plan:
    """Return the plan of a file's text; settings that it does not state are those of `common`.

    Raises `InputError` naming the key if it is unknown or its value is invalid, and
    `UnsupportedError` for a key of AMCT's format that has no effect here.
    """
    message = read_text(text, _FILE, where)
    common_plan = replace(common or LayerPlan())
    if "activation_offset" in message:
        common_plan = replace(common_plan, asymmetric=message["activation_offset"])
    # from the widest to the narrowest: defaults, the whole file, the common layer, types and names
    base = _layer(message.get("common_config", {}), common_plan, where)

    # settings that an override does not state are those of the common layer
    by_type = _overrides(message, "override_layer_types", "layer_type", base, where)
    by_name = _overrides(message, "override_layer_configs", "layer_name", base, where)
    return Plan(
        common=base,
        types=by_type,
        layers=by_name,
        skip_layers=frozenset(message.get("skip_layers", ())),
        skip_types=frozenset(message.get("skip_layer_types", ())),
        fold=message.get("do_fusion", True),
        unfolded=frozenset(message.get("skip_fusion_layers", ())),
        batches=message.get("batch_num"),
    )


def _overrides(
    message: Mapping[str, Any], field_name: str, target_key: str, base: LayerPlan, where: str
) -> dict[str, LayerPlan]:
    """Return the plans that a repeated field gives for types or names of layers."""
    plans: dict[str, LayerPlan] = {}
    for override in message.get(field_name, []):
        target = override.get(target_key)
        if target is None or target in plans:
            raise InputError(
                f"{where}: {field_name}: {target_key}, each once", str(target or "none")
            )
        plans[target] = _layer(override.get("calibration_config", {}), base, where)
    return plans


def _layer(message: Mapping[str, Any], plan: LayerPlan, where: str) -> LayerPlan:
    """Return a plan changed by the settings of a calibration config."""
    # at most one rule for the scales of activations, and at most one for those of weights
    for pair in (("ifmr_quantize", "hfmg_quantize"), ("arq_quantize", "ada_quantize")):
        if all(key in message for key in pair):
            raise InputError(f"{where}: {pair[0]} or {pair[1]}", "both", "keep one")
    for method in ("ifmr", "hfmg"):
        if (settings := message.get(f"{method}_quantize")) is not None:
            options = (_ifmr if method == "ifmr" else _hfmg)(settings, where)
            plan = replace(
                plan,
                method=method,
                options=options,
                asymmetric=settings.get("asymmetric", plan.asymmetric),
                bits=16 if settings.get("dst_type") == "INT16" else 8,
            )
    if (arq := message.get("arq_quantize")) is not None:
        plan = replace(
            plan,
            weight_bits=arq.get("quant_bits", 8),
            channel_wise=arq.get("channel_wise", plan.channel_wise),
            rounding=None,
        )
    if (ada := message.get("ada_quantize")) is not None:
        plan = replace(
            plan,
            weight_bits=8,
            channel_wise=ada.get("channel_wise", plan.channel_wise),
            rounding=_rounding(ada, where),
        )
    # "dmq_balancer { }" alone asks for a balance of 0.5
    if (dmq := message.get("dmq_balancer")) is not None:
        plan = replace(plan, strength=dmq.get("migration_strength", 0.5))
    return plan


def _ifmr(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the options of the rule `ifmr`."""
    # the published defaults: 0.70, 0.71, ... 1.29 of the largest number
    low_ratio = settings.get("search_range_start", 0.7)
    high_ratio = settings.get("search_range_end", 1.3)
    step = settings.get("search_step", 0.01)
    if not low_ratio <= high_ratio or step < (high_ratio - low_ratio) / 1e4:
        needed = f"{where}: search_range_start to search_range_end in at most 10,000 of search_step"
        raise InputError(needed, f"{low_ratio:g} to {high_ratio:g} by {step:g}")
    max_share = settings.get("max_percentile", 0.999999)
    min_share = settings.get("min_percentile", 0.999999)
    # 0.7 to 1.3 by 0.01 are 60 ratios, the last 1.29; 1e-6 keeps rounding from making them 61
    count = max(1, int(np.ceil((high_ratio - low_ratio) / step - 1e-6)))
    ratios = low_ratio + step * np.arange(count)
    return {"shares": (max_share, min_share), "ratios": tuple(ratios.tolist())}


def _hfmg(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the options of the rule `hfmg`."""
    bins = settings.get("num_of_bins", 4096)
    if bins not in BINS:
        raise InputError(f"{where}: num_of_bins among {', '.join(map(str, BINS))}", str(bins))
    return {"bins": bins}


def _rounding(settings: Mapping[str, Any], where: str) -> Rounding:
    """Return the settings of AdaRound."""
    rounding = Rounding(
        settings.get("num_iteration", 10000),
        settings.get("reg_param", 0.01),
        (settings.get("beta_range_start", 20.0), settings.get("beta_range_end", 2.0)),
        settings.get("warm_start", 0.2),
    )
    first_beta, last_beta = rounding.beta
    # the exponent falls from 20 to 2: rounding is free at first and hardens at the end
    if last_beta > first_beta:
        needed = f"{where}: beta_range_end of at most {first_beta:g}"
        raise InputError(needed, f"{last_beta:g}")
    return rounding
