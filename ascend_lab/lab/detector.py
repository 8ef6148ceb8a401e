"""Builds the detector of chapter 18a, an ONNX model whose last operators suit no AI Core.

Two convolutions reduce an image of 128 x 128 pixels to 8 x 8 places. Each place predicts one box
and a score for each of three classes. Non-maximum suppression then keeps the best boxes of each
class, and of these the large ones are returned, with their classes. How many boxes stay depends on
the image, so the shapes after the suppression are only known as the model runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from onnx import ModelProto

PIXELS = 128
GRID = 8
"""Boxes are predicted on a grid of 8 x 8 places."""
CLASSES = 3
CHANNELS = 32
STEPS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("Conv", "image stem_w", "stem", {"strides": [4, 4]}),
    ("Relu", "stem", "stem_relu", {}),
    ("Conv", "stem_relu body_w", "body", {"strides": [4, 4]}),
    ("Relu", "body", "body_relu", {}),
    ("Conv", "body_relu box_w", "box_maps", {}),
    ("Conv", "body_relu class_w", "class_maps", {}),
    ("Reshape", "box_maps box_shape", "box_rows", {}),
    ("Reshape", "class_maps class_shape", "class_rows", {}),
    ("Sigmoid", "box_rows", "boxes", {}),
    ("Sigmoid", "class_rows", "scores", {}),
    # which boxes stay: rows (picture, class, box)
    ("NonMaxSuppression", "boxes scores most overlap", "found", {}),
    ("Gather", "found column_2", "places", {"axis": 1}),
    ("Reshape", "boxes flat_shape", "flat", {}),
    ("Gather", "flat places", "best", {"axis": 0}),
    # of these the large ones: both sides above the limit
    ("Gather", "best widths", "sides", {"axis": 1}),
    ("ReduceMin", "sides", "side", {"axes": [1], "keepdims": 0}),
    ("Greater", "side limit", "is_large", {}),
    ("NonZero", "is_large", "large_rows", {}),
    ("Squeeze", "large_rows row", "large", {}),
    ("Gather", "best large", "large_boxes", {"axis": 0}),
    # and their classes, each once
    ("Gather", "found column_1", "classes", {"axis": 1}),
    ("Gather", "classes large", "large_classes", {"axis": 0}),
    ("Unique", "large_classes", "names", {}),
)
"""The nodes: operator, names of inputs, name of the output and of the node, attributes."""


def _constants(seed: int) -> list[tuple[str, np.ndarray]]:
    """Return the constants that `STEPS` read, by name: random weights, shapes, limits, columns."""
    rng = np.random.default_rng(seed)

    def weights(name: str, *shape: int) -> tuple[str, np.ndarray]:
        """Return random weights whose outputs are about as large as their inputs."""
        fan_in = float(np.prod(shape[1:]))
        return name, (rng.standard_normal(shape) / np.sqrt(fan_in)).astype(np.float32)

    boxes = GRID * GRID
    return [
        weights("stem_w", CHANNELS, 3, 4, 4),
        weights("body_w", CHANNELS, CHANNELS, 4, 4),
        weights("box_w", 4, CHANNELS, 1, 1),
        weights("class_w", CLASSES, CHANNELS, 1, 1),
        ("box_shape", np.array([1, boxes, 4])),
        ("class_shape", np.array([1, CLASSES, boxes])),
        ("flat_shape", np.array([boxes, 4])),
        ("most", np.array([10])),
        ("overlap", np.array([0.5], np.float32)),
        ("column_1", np.array(1)),
        ("column_2", np.array(2)),
        ("widths", np.array([2, 3])),
        ("limit", np.array(0.3, np.float32)),
        ("row", np.array([0])),
    ]


def detector(seed: int = 0) -> ModelProto:
    """Return an ONNX model with two outputs: the large boxes, and their classes, each once."""
    from onnx import TensorProto, helper, numpy_helper

    nodes = [
        helper.make_node(op, inputs.split(), [output], name=output, **attributes)
        for op, inputs, output, attributes in STEPS
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, (1, 3, PIXELS, PIXELS))
    outputs = [
        helper.make_tensor_value_info("large_boxes", TensorProto.FLOAT, None),
        helper.make_tensor_value_info("names", TensorProto.INT64, None),
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in _constants(seed)]
    graph = helper.make_graph(nodes, "detector", [image], outputs, tensors)
    version = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=version, ir_version=10)
