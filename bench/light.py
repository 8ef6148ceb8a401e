"""Times of the light networks, and what a placement saves: part of `lab.py bench`."""

from __future__ import annotations

from ascend_lab.compiler import GraphBuilder, compile_graph, simulate_graph, zoo
from ascend_lab.compiler.hosted import place_model
from ascend_lab.compiler.onnx.export import export_onnx
from ascend_lab.compiler.zoo import why, why_lines
from ascend_lab.machine.chip import load_chip
from bench.table import Figure, times

NETWORKS = (
    "resnet18",
    "mobilenet_v1",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mobilenet_v4_conv_small",
    "shufflenet_v1_g3_x1_0",
    "shufflenet_v2",
    "ghostnet",
    "efficientnet_b0",
    "efficientnet_v2_b0",
    "squeezenet",
    "mobilevit_xxs",
    "mobile_former_26m",
    "efficientformer_l1",
)
CHIPS = ("Ascend310", "Ascend910A")


def light_figures() -> list[Figure]:
    """Return what `lab.py bench` prints of the light networks: kernels for all, MACs and time."""
    found = 0
    for chip in CHIPS:
        rows = why(NETWORKS, chip)
        print("\n" + "\n".join([f"light networks on {chip}, batch 1 (model)", *why_lines(rows)]))
        for name in NETWORKS:
            found += not simulate_graph(compile_graph(zoo.build(name), chip)).on_ai_cpu
        plain = rows[0]
        light = rows[NETWORKS.index("mobilenet_v2")]
    print()
    wanted = len(NETWORKS) * len(CHIPS)
    return [
        Figure("light networks all in kernels", f"{found} of {wanted}", "all", found == wanted),
        times("ResNet-18 / MobileNet V2, MACs", plain["macs"] / light["macs"]),
        times("  time on the last chip", plain["time_s"] / light["time_s"], 6.0),
        times("exact placement / cheapest engine", _placement_ratio(), 1.0 + 1e-9),
    ]


def _placement_ratio() -> float:
    """Return the exact placement's seconds over the rule's: NonZero of what a layer finds."""
    from onnx import TensorProto, helper

    net = GraphBuilder("found")
    x = net.input("x", (1, 3, 64, 64))
    net.output(net.relu(net.conv2d(x, net.weight((5, 3, 3, 3)), pad=1, name="c"), name="r"))
    model = export_onnx(net.build())
    model.graph.node.append(helper.make_node("NonZero", ["r"], ["places"]))
    model.graph.output.append(helper.make_tensor_value_info("places", TensorProto.INT64, None))
    problem = place_model(model, load_chip("Ascend310")).problem
    return problem.exact().time_s / problem.cheapest_engine().time_s
