"""NumPy's types for the hardware's number formats; bfloat16 comes from `ml_dtypes`, when needed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from ascend_lab.errors import InputError

_TYPES: Mapping[str, Any] = {
    "fp16": np.float16,
    "fp32": np.float32,
    "int8": np.int8,
    "uint8": np.uint8,
    "int32": np.int32,
}


@cache
def numpy_type(dtype: str) -> Any:
    """Return the NumPy type of a number format such as "fp16"; raise `InputError` for others.

    "bf16" is `ml_dtypes.bfloat16`: fp32 with the lower 16 bits rounded away, to nearest even.
    """
    if dtype == "bf16":
        return import_module("ml_dtypes").bfloat16
    if dtype not in _TYPES:
        raise InputError("a number format", repr(dtype), f"use {', '.join((*_TYPES, 'bf16'))}")
    return _TYPES[dtype]
