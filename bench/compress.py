"""Accuracy of quantised networks on real data, and scales against published ones: `lab.py bench`.

Digits of scikit-learn with two networks trained here, and Magika's model of file types (Fratantonio
et al., arXiv 2409.13768), as its package brings it, on files of this Python installation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab.compiler.evaluate import evaluate_all
from ascend_lab.compiler.onnx import import_onnx
from ascend_lab.deploy.compress import (
    LayerPlan,
    Plan,
    Quantised,
    calibrate,
    fake_quantised,
    qdq_model,
    quantise_graph,
)
from ascend_lab.deploy.compress.digits import (
    accuracy,
    convolutional,
    load_digits,
    trained,
    transformer,
)
from bench.table import Figure

METHODS = ("minmax", "ifmr", "hfmg", "kl", "percentile")
TYPES = {
    ".py": "python",
    ".pyc": "pythonbytecode",
    ".json": "json",
    ".md": "markdown",
    ".c": "c",
    ".html": "html",
    ".css": "css",
    ".js": "javascript",
    ".rst": "rst",
    ".so": "elf",
    ".png": "png",
    ".gz": "gzip",
    ".svg": "svg",
    ".ttf": "ttf",
    ".npy": "npy",
    ".toml": "toml",
    ".csv": "csv",
    ".xml": "xml",
    ".wav": "wav",
    ".sh": "shell",
    ".tex": "latex",
    ".pdf": "pdf",
}
"""Endings whose type is beyond doubt, in Magika's words."""
BATCH = 8


def known_files(each: int) -> Iterator[tuple[Path, str]]:
    """Yield so many files of each type, spread over this installation, and their types."""
    found: dict[str, list[Path]] = {ending: [] for ending in TYPES}
    for root in (Path(sys.base_prefix, "lib"), Path(sys.prefix, "lib")):
        for path in sorted(root.rglob("*.*")):
            if path.suffix in found and path.is_file() and path.stat().st_size >= 200:
                found[path.suffix].append(path)
    for ending, paths in found.items():
        for path in paths[:: max(1, len(paths) // each)][:each]:
            yield path, TYPES[ending]


def magika_model() -> tuple[Path, list[str]]:
    """Return the file of Magika's model and the types it tells apart."""
    import magika

    own = magika.Magika()
    folder = Path(str(magika.__file__)).parent / "models" / own.get_model_name()
    return folder / "model.onnx", [str(one) for one in own._model_config.target_labels_space]


def features(path: Path) -> list[int]:
    """Return what Magika's own extraction reads of a file: 1,024 bytes of each end."""
    from magika import Magika
    from magika.types import Seekable

    with path.open("rb") as file:
        sizes = {"beg_size": 1024, "mid_size": 0, "end_size": 1024, "block_size": 4096}
        found = Magika._extract_features_from_seekable(
            Seekable(file), padding_token=256, use_inputs_at_offsets=False, **sizes
        )
    return [*found.beg, *found.end]


def session(model: Any) -> Any:
    """Return a model in ONNX Runtime, on one thread, int8 sums exact on every processor."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.x64quantprecision", "1")
    data = model.read_bytes() if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def named_rightly(model: Any, rows: Any, labels: Sequence[int]) -> float:
    """Return the share of files that a model in ONNX Runtime names rightly."""
    run = session(model)
    right = 0
    for i in range(0, len(rows) - BATCH + 1, BATCH):
        (found,) = run.run(None, {"bytes": rows[i : i + BATCH]})
        right += int(np.sum(found.argmax(axis=1) == labels[i : i + BATCH]))
    return right / (len(rows) // BATCH * BATCH)


def magika_drops(
    each: int, methods: Sequence[str] = METHODS
) -> tuple[float, dict[str, float], int]:
    """Return the float model's accuracy, what each method costs in points, and how many files.

    Calibrated on a sixth of the files, tried on the others.
    """
    path, types = magika_model()
    files = [(p, types.index(kind)) for p, kind in known_files(each)]
    rows = np.array([features(p) for p, _ in files], np.int32)
    labels = np.array([label for _, label in files])
    mine = np.arange(len(rows)) % 6 == 0
    graph = import_onnx(path, batch=BATCH)
    samples = np.random.default_rng(0).permutation(rows[mine])[: 2 * BATCH]
    feeds = [{"bytes": samples[i : i + BATCH]} for i in (0, BATCH)]
    before = named_rightly(path, rows[~mine], labels[~mine])
    drops = {}
    for method in methods:
        model = qdq_model(quantise_graph(graph, feeds, Plan(LayerPlan(method))))
        drops[method] = 100 * (before - named_rightly(model, rows[~mine], labels[~mine]))
    return before, drops, int((~mine).sum())


def steps_apart(found: Quantised, feed: Mapping[str, Any]) -> float:
    """Return how many steps ONNX Runtime and we are apart at most, in what any layer reads."""
    from onnx import ValueInfoProto

    mine = evaluate_all(fake_quantised(found), feed)
    model = qdq_model(found)
    most = 0.0
    reads = {found.graph.node(layer.name).inputs[0]: layer.scale for layer in found.layers}
    model.graph.output.extend(ValueInfoProto(name=f"{name}_dequantised") for name in reads)
    theirs = session(model).run([f"{name}_dequantised" for name in reads], dict(feed))
    for (name, scale), values in zip(reads.items(), theirs, strict=True):
        most = max(most, float(np.abs(values - mine[f"{name}_fake"]).max()) / scale)
    return most


def _rows(name: str, before: float, drops: dict[str, float]) -> Iterator[Figure]:
    shown = " ".join(f"{method} {drop:.1f}" for method, drop in drops.items())
    yield Figure(f"{name}, float: right", f"{before:.1%}", "", None)
    yield Figure(
        f"{name}, int8 kl: points lost", f"{drops['kl']:.2f}", "<= 0.5", drops["kl"] <= 0.5
    )
    yield Figure(f"{name}, lost by", shown, "", None)


def compression_figures() -> Iterator[Figure]:
    """Yield accuracies in eight bits, the distance from ONNX Runtime, and known scales."""
    learn, test = load_digits()
    for make in (convolutional, transformer):
        graph = trained(make(), learn)
        before = accuracy(graph, test)
        drops = {}
        apart = 0.0
        for method in METHODS:
            found = quantise_graph(graph, learn.feeds[:4], Plan(LayerPlan(method)))
            fake = fake_quantised(found)
            drops[method] = 100 * (before - accuracy(fake, test))
            apart = max(apart, steps_apart(found, test.feeds[0]))
        yield from _rows(graph.name.replace("_", " "), before, drops)
        yield Figure("  ONNX Runtime apart, steps", f"{apart:.2g}", "<= 1", apart < 1.001)
    before, drops, count = magika_drops(15, ("minmax", "ifmr", "kl"))
    yield from _rows(f"Magika on {count} files", before, drops)
    u = (np.arange(4096) + 0.5) / 4096
    logistic = np.log(u / (1 - u)).astype(np.float32)
    known = {"minmax": 0.0709511116, "ifmr": 0.0702416003, "hfmg": 0.0703968033, "kl": 0.0701218173}
    off = max(abs(calibrate(logistic, m).scale / scale - 1) for m, scale in known.items())
    yield Figure("scales against AMCT's, relative", f"{off:.1e}", "<= 1e-6", off <= 1e-6)
