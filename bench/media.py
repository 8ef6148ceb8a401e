"""AIPP against published pixels, resizing against OpenCV, cameras against cards."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ascend_lab.compiler import compile_graph, simulate_graph, zoo
from ascend_lab.deploy.media import (
    Aipp,
    AippOp,
    aipp,
    cards_needed,
    convert,
    csc_of,
    insert_aipp,
    network_station,
    resize,
    unit_station,
)
from bench.table import Figure, median_s, times

GOLDEN = {
    "601 narrow": ((254, 0, 0), (0, 255, 1)),
    "601 wide": ((238, 14, 13), (13, 237, 13)),
    "709 narrow": ((255, 24, 0), (0, 216, 0)),
    "709 wide": ((255, 35, 10), (0, 202, 7)),
}
"""RGB of YUV (81, 90, 240) and (145, 54, 34), by the published matrices."""
IMAGES = 200


def media_figures() -> Iterator[Figure]:
    """Yield the figures of the media path."""
    pair = np.array([[81, 145], [90, 54], [240, 34]], np.uint8).reshape(1, 3, 2, 1)
    right = sum(
        np.array_equal(convert(pair, csc_of(name, "RGB"))[0, :, :, 0].T, rgb)
        for name, rgb in GOLDEN.items()
    )
    yield Figure("AIPP golden pixels", f"{right} of {len(GOLDEN)}", "all", right == len(GOLDEN))
    off = max(_off_opencv(seed) for seed in range(IMAGES))
    yield Figure(f"resize off OpenCV, {IMAGES} images", str(off), "<= 1", off <= 1)
    frame = np.zeros(1920 * 1080 * 3 // 2, np.uint8)
    whole = Aipp("YUV420SP_U8", 1920, 1080, csc_of("601 narrow", "RGB"))
    seconds = median_s(lambda: aipp(frame, whole), 3)
    yield Figure("AIPP of a 1080p frame", f"{seconds:.2f} s", "", None)
    graph = zoo.build("resnet50")
    op = [AippOp(0, Aipp("RGB888_U8", 0, 0))]
    ways = (graph, insert_aipp(graph, op), insert_aipp(graph, op, small_channel=True))
    plain, fed, small = (simulate_graph(compile_graph(g, "Ascend310")).time_s for g in ways)
    yield times("ResNet-50 on 310 with AIPP", fed / plain)  # plain images come in small channels
    yield times("  and small channels", small / plain, 1.0)
    decode = unit_station("Ascend310", "JPEGD", 1920, 1080)
    answer = cards_needed([decode, network_station(small)], 3000)
    yield Figure("310s for 3000 images a second", str(answer.cards), answer.bottleneck, None)


def _off_opencv(seed: int) -> int:
    import cv2

    rng = np.random.default_rng(seed)
    h, w, height, width = map(int, rng.integers(1, 200, 4))
    image = rng.integers(0, 256, (h, w)).astype(np.uint8)
    other = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
    return int(
        np.abs(resize(image, width, height) - other.reshape(height, width).astype(int)).max()
    )
