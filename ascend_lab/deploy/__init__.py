"""Deploys trained models: compression, image pre-processing, a simulated runtime and servers.

- `compress`: quantisation, pruning and low-rank decomposition, and their loss of accuracy.
- `media`: the conversion of a camera's bytes into a network's input.
- `runtime`: offline models, streams and events in the manner of AscendCL.
- `serving`: a simulated server, also of language models, and a real HTTP server.

Without half of its channels a ResNet-18 has less than 30 % of its multiply-accumulate operations
(MACs):

>>> from ascend_lab.compiler import zoo
>>> from ascend_lab.deploy import prune
>>> graph = zoo.build("resnet18")
>>> pruned = prune(graph, 0.5)
>>> zoo.macs(pruned.graph) < 0.3 * zoo.macs(graph)
True
"""

from ascend_lab.facade import names_of

__all__ = [
    "Aipp",
    "OfflineModel",
    "Scenario",
    "compile_offline",
    "converse",
    "load_offline",
    "prune",
    "qdq_model",
    "quantise_graph",
    "read_scenario",
    "run_streams",
    "simulate_serving",
]

__getattr__ = names_of(
    __name__,
    {
        "compress": "prune qdq_model quantise_graph",
        "media": "Aipp",
        "runtime": "OfflineModel compile_offline load_offline run_streams",
        "serving": "Scenario converse read_scenario simulate_serving",
    },
)


def __dir__() -> list[str]:
    """Return the public names, including those that are not imported yet."""
    return sorted(__all__)
