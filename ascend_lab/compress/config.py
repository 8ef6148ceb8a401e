"""The simplified configuration file of AMCT as a plan: protobuf text, the keys that mean something.

    batch_num: 2
    skip_layers: "fc"
    common_config { arq_quantize { channel_wise: true } hfmg_quantize { num_of_bins: 4096 } }
    override_layer_types { layer_type: "Conv2d" calibration_config { ifmr_quantize { } } }

Source: github hicann/amct, calibration_config_pytorch.proto. Without `batch_num` all samples count.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab.compress.layers import LayerPlan, Plan
from ascend_lab.compress.prototext import read_text
from ascend_lab.compress.weights import STRONGEST, WEAKEST, Rounding
from ascend_lab.errors import InputError
from ascend_lab.limits import TABLE_BYTES, read_file

_ACTIVATION = {"asymmetric": bool, "dst_type": ("INT8", "INT16")}
_LAYER: Mapping[str, Any] = {
    "ifmr_quantize": {
        **dict.fromkeys(("search_range_start", "search_range_end", "search_step"), float),
        **dict.fromkeys(("max_percentile", "min_percentile"), float),
        **_ACTIVATION,
    },
    "hfmg_quantize": {"num_of_bins": int, **_ACTIVATION},
    "arq_quantize": {"channel_wise": bool, "quant_bits": int},
    "ada_quantize": {
        "num_iteration": int,
        **dict.fromkeys(("reg_param", "beta_range_start", "beta_range_end", "warm_start"), float),
        "channel_wise": bool,
    },
    "dmq_balancer": {"migration_strength": float},
    "nuq_quantize": "the algorithm of non-uniform weights is not public",
}
_FILE: Mapping[str, Any] = {
    "batch_num": int,
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
    many: dict[str, dict[str, LayerPlan]] = {"layer_type": {}, "layer_name": {}}
    for key, name in (
        ("override_layer_types", "layer_type"),
        ("override_layer_configs", "layer_name"),
    ):
        for one in found.get(key, []):
            if name not in one or one[name] in many[name]:
                raise InputError(f"{where}: {key}: {name}, each once", str(one.get(name, "none")))
            many[name][one[name]] = _layer(one.get("calibration_config", {}), base, where)
    batches = found.get("batch_num")
    _within(where, "batch_num", 1 if batches is None else batches, 1, 1e6)
    return Plan(
        base, many["layer_type"], many["layer_name"],
        frozenset(found.get("skip_layers", ())), frozenset(found.get("skip_layer_types", ())),
        found.get("do_fusion", True), frozenset(found.get("skip_fusion_layers", ())), batches,
    )  # fmt: skip


def _within(where: str, key: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise InputError(f"{where}: {key} from {least:g} to {most:g}", f"{value:g}")


def _layer(found: Mapping[str, Any], plan: LayerPlan, where: str) -> LayerPlan:
    """Return a plan changed by what a calibration config says."""
    for pair in (("ifmr_quantize", "hfmg_quantize"), ("arq_quantize", "ada_quantize")):
        if all(key in found for key in pair):
            raise InputError(f"{where}: {pair[0]} or {pair[1]}", "both", "keep one")
    for method in ("ifmr", "hfmg"):
        if (given := found.get(f"{method}_quantize")) is not None:
            options = (_ifmr if method == "ifmr" else _hfmg)(given, where)
            plan = replace(
                plan, method=method, options=options,
                asymmetric=given.get("asymmetric", plan.asymmetric),
                bits=16 if given.get("dst_type") == "INT16" else 8,
            )  # fmt: skip
    if (arq := found.get("arq_quantize")) is not None:
        bits = arq.get("quant_bits", 8)
        _within(where, "quant_bits", bits, 6, 8)
        each = arq.get("channel_wise", plan.channel_wise)
        plan = replace(plan, weight_bits=bits, channel_wise=each, rounding=None)
    if (ada := found.get("ada_quantize")) is not None:
        each = ada.get("channel_wise", plan.channel_wise)
        plan = replace(plan, weight_bits=8, channel_wise=each, rounding=_rounding(ada, where))
    if (dmq := found.get("dmq_balancer")) is not None:
        strength = dmq.get("migration_strength", 0.5)
        _within(where, "migration_strength", strength, WEAKEST, STRONGEST)
        plan = replace(plan, strength=strength)
    return plan


def _ifmr(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    first, last, step = (
        given.get(key, value)
        for key, value in (
            ("search_range_start", 0.7),
            ("search_range_end", 1.3),
            ("search_step", 0.01),
        )
    )
    _within(where, "search_range_start", first, 1e-3, 1e3)
    _within(where, "search_range_end", last, first, 1e3)
    _within(where, "search_step", step, (last - first) / 1e4 or 1e-6, 1e3)
    shares = tuple(given.get(f"{end}_percentile", 0.999999) for end in ("max", "min"))
    for share in shares:
        _within(where, "max_percentile and min_percentile", share, 0.5, 1)
    count = max(1, int(np.ceil((last - first) / step - 1e-6)))
    return {"shares": shares, "ratios": tuple((first + step * np.arange(count)).tolist())}


def _hfmg(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    bins = given.get("num_of_bins", 4096)
    if bins not in BINS:
        raise InputError(f"{where}: num_of_bins among {', '.join(map(str, BINS))}", str(bins))
    return {"bins": bins}


def _rounding(given: Mapping[str, Any], where: str) -> Rounding:
    how = Rounding(
        given.get("num_iteration", 10000), given.get("reg_param", 0.01),
        (given.get("beta_range_start", 20.0), given.get("beta_range_end", 2.0)),
        given.get("warm_start", 0.2),
    )  # fmt: skip
    _within(where, "num_iteration", how.iterations, 1, 1e6)
    _within(where, "reg_param", how.push, 0, 1e3)
    _within(where, "beta_range_end", how.beta[1], 1, how.beta[0])
    _within(where, "beta_range_start", how.beta[0], how.beta[1], 1e3)
    _within(where, "warm_start", how.warm, 0, 0.99)
    return how
