"""DVPP, the media units of a chip: their pictures, and how many cards a stream of them needs.

The decoder writes rows of a padded width, and rows more than the picture has; what pads is junk.
Whoever reads the buffer has to be told the true size, or the junk is resized into the border.

    bytes = stride_w stride_h f     f = 1.5 (4:2:0), 2 (4:2:2, 4:4:0), 3 (4:4:4)

Sources: CANN documentation, JPEGD and VPC functions and restrictions, acl.media.dvpp_*.

Colour conversion in whole numbers: matrices from the standards, a product, a shift by 8.

    YUV -> RGB   out_i = (sum_j m_ij (in_j - in_bias_j)) >> 8
    RGB -> YUV   out_i = ((sum_j m_ij in_j) >> 8) + out_bias_i

The shift is arithmetic (it rounds down) and the result is limited to 0..255; the documents state
neither, so both are our assumption. Every entry is round(256 c) of the standard's real coefficient
c, but for two that the vendor's table raises by one. Source: CANN, AIPP, CSC_config.

Resizing as OpenCV does it, which is what the vendor measures its VPC against.

    x = (i + 1/2) in / out - 1/2          where result i looks, between floor(x) and the next
    bilinear: 11-bit weights across, then down, the sum rounded once; nearest: floor(i in / out)

There is no low-pass filter: shrinking to a tenth looks at one pixel pair in ten.

A card is one chip: its media units, the copy from the host and the network each are a station with
servers, one behind another. The formula asks for the mean; the simulation plays every picture and
says how long they wait. A batch is counted as its share of a picture.

    cards = max over stations of ceil(rate t / servers)      t: a server's seconds for a picture

Sources of the rates: CANN 5.0.x, performance of JPEGD, VDEC, VENC and VPC (Ascend310), of VPC and
JPEGE (Atlas inference products); CANN 8.0, copies from host to device.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.compiler.memory import aligned
from ascend_lab.errors import InputError

Image = NDArray[Any]
Row = tuple[int, int, int]
WEIGHTS = {"601": (0.299, 0.114), "709": (0.2126, 0.0722)}
"""Shares of red and blue in luma (ITU-R BT.601, BT.709)."""
STANDARDS = tuple(f"{name} {reach}" for name in WEIGHTS for reach in ("narrow", "wide"))
"""Names of the conversions: a standard, and how far its numbers reach."""
RAISED = {"709 wide": (1, 0, 1)}
"""What the published luma row has more than the rounded coefficients: 55 and 19."""
NEUTRAL: Row = (0, 128, 128)


@dataclass(frozen=True, slots=True)
class Csc:
    """A conversion: rows of the matrix in 1/256, what is subtracted before, added behind."""

    matrix: tuple[Row, Row, Row]
    in_bias: Row = (0, 0, 0)
    out_bias: Row = (0, 0, 0)


def csc_of(standard: str, to: str) -> Csc:
    """Return the conversion of a standard to RGB or BGR (from YUV), or to YUV or YVU (from RGB).

    `standard` is one of `STANDARDS`; JPEG images are "601 wide". Raises `InputError` for others.
    """
    if standard not in STANDARDS or to not in ("RGB", "BGR", "YUV", "YVU"):
        needed = f"one of {', '.join(STANDARDS)} to RGB, BGR, YUV or YVU"
        raise InputError(needed, f"{standard} to {to}", "JPEG images are 601 wide")
    name, reach = standard.split()
    (red, blue) = WEIGHTS[name]
    narrow = reach == "narrow"
    luma, chroma = (219 / 255, 224 / 255) if narrow else (1.0, 1.0)
    shares = np.array([red, 1 - red - blue, blue])
    bias: Row = (16, 128, 128) if narrow else NEUTRAL
    behind = np.vstack(
        [
            shares * luma,
            (np.array([0, 0, 1]) - shares) / (2 * (1 - blue)) * chroma,
            (np.array([1, 0, 0]) - shares) / (2 * (1 - red)) * chroma,
        ]
    )
    real = np.linalg.inv(behind) if "R" in to else behind
    whole = np.rint(256 * real).astype(int)
    if "Y" in to:
        whole[0] += RAISED.get(standard, (0, 0, 0))
    order = {"RGB": [0, 1, 2], "BGR": [2, 1, 0], "YUV": [0, 1, 2], "YVU": [0, 2, 1]}[to]
    rows = tuple(tuple(int(v) for v in row) for row in whole[order])
    return Csc(rows, bias) if "R" in to else Csc(rows, out_bias=bias)  # type: ignore[arg-type]


def convert(image: Image, csc: Csc) -> Image:
    """Return an image (n, 3, h, w) of 0..255 in another colour space, as uint8."""
    wide = image[:, :3].astype(np.int32) - _column(csc.in_bias)
    mixed = np.einsum("ij,njhw->nihw", np.array(csc.matrix, np.int32), wide) >> 8
    found: Image = np.clip(mixed + _column(csc.out_bias), 0, 255).astype(np.uint8)
    return found


def _column(numbers: Row) -> Image:
    return np.array(numbers, np.int32).reshape(3, 1, 1)


# -- sizes ----------------------------------------------------------------------------------------
BITS = 11
"""Of a weight, as OpenCV has them for 8-bit images."""
METHODS = ("bilinear", "nearest")


def resize(image: Image, width: int, height: int, method: str = "bilinear") -> Image:
    """Return a uint8 image (..., h, w) in another size; raises `InputError` for bad sizes."""
    if method not in METHODS:
        raise InputError(f"a method of {', '.join(METHODS)}", repr(method))
    if image.dtype != np.uint8 or image.ndim < 2 or 0 in image.shape[-2:]:
        raise InputError("a uint8 image (..., h, w)", f"{image.dtype}{image.shape}", "convert it")
    if min(width, height) < 1:
        raise InputError("a width and a height of at least 1", f"{width} x {height}")
    (h, w) = image.shape[-2:]
    sizes = (height, width)
    if method == "nearest":
        rows, columns = (
            np.minimum(np.floor(np.arange(out) * _step(size, out)).astype(np.intp), size - 1)
            for size, out in zip((h, w), sizes, strict=True)
        )
        return image[..., rows[:, None], columns]
    left, right, weights = _looks(w, width, inside=True)
    wide = image.astype(np.int32)
    across = (wide[..., left] * weights[0] + wide[..., right] * weights[1]) >> 4
    upper, lower, weights = _looks(h, height, inside=False)
    first, second = (
        across[..., rows, :] * part[:, None] >> 16
        for rows, part in ((upper, weights[0]), (lower, weights[1]))
    )
    found: Image = np.clip((first + second + 2) >> 2, 0, 255).astype(np.uint8)
    return found


def _step(size: int, out: int) -> float:
    """Return how far apart results look; rounded as OpenCV does, which decides ties."""
    return 1.0 / (out / size)


def _looks(
    size: int, out: int, *, inside: bool
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.int32]]:
    """Return the two pixels each result mixes along one axis, and their weights (2, out).

    `inside`: what looks over an edge takes the edge's pixel alone, not twice (each part rounds).
    """
    x = ((np.arange(out) + 0.5) * _step(size, out) - 0.5).astype(np.float32)
    low = np.floor(x)
    part = x - low
    if inside:
        part = np.where((low < 0) | (low >= size - 1), np.float32(0), part)
    weights = np.rint(np.stack([1 - part, part]) * np.float32(2**BITS)).astype(np.int32)
    first, second = (np.clip(low + i, 0, size - 1).astype(np.intp) for i in (0, 1))
    return first, second, weights


# -- buffers --------------------------------------------------------------------------------------
JPEGD_ALIGN: Mapping[str, tuple[int, int]] = {"Ascend310": (128, 16), "Ascend910A": (128, 16)}
"""What the decoder rounds width and height up to; other chips round widths to 64."""
LATER = (64, 16)
SAMPLINGS = {"4:2:0": 1.5, "4:2:2": 2.0, "4:4:0": 2.0, "4:4:4": 3.0}
LARGEST = {"Ascend310": 8192, "Ascend310DK": 8192, "Ascend310P3": 8192, "Ascend910A": 8192}
"""Most pixels along a side of a JPEG, and of what VPC reads; later chips decode twice as many."""
VPC_LEAST = (10, 6)
VPC_OUT = (4096, 4096)
LEAST_STRIDE = 32


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture in device memory: its true size in pixels, its strides, its bytes per pixel."""

    width: int
    height: int
    stride_w: int
    stride_h: int
    factor: float = 1.5

    @property
    def size_bytes(self) -> int:
        """Bytes of the buffer."""
        return int(self.stride_w * self.stride_h * self.factor)


def jpegd_picture(width: int, height: int, chip: str, sampling: str = "4:2:0") -> Picture:
    """Return what the JPEG decoder of a chip writes; raises `InputError` for sizes it refuses."""
    if sampling not in SAMPLINGS:
        raise InputError(f"a sampling of {', '.join(SAMPLINGS)}", repr(sampling))
    most = LARGEST.get(chip, 16384)
    if not (32 <= width <= most and 32 <= height <= most):
        needed = f"a JPEG from 32 x 32 to {most} x {most} on {chip}"
        raise InputError(needed, f"{width} x {height}", "decode it on the host")
    wide, high = JPEGD_ALIGN.get(chip, LATER)
    return Picture(width, height, aligned(width, wide), aligned(height, high), SAMPLINGS[sampling])


def vpc_picture(width: int, height: int) -> Picture:
    """Return a YUV420SP picture as VPC writes it: widths to 16, heights to 2."""
    if width % 2 or height % 2:
        raise InputError("an even width and height for YUV420SP", f"{width} x {height}")
    if width < VPC_LEAST[0] or height < VPC_LEAST[1] or width > VPC_OUT[0] or height > VPC_OUT[1]:
        needed = "a size from {} x {} to {} x {}".format(*VPC_LEAST, *VPC_OUT)
        raise InputError(needed, f"{width} x {height}", "resize in steps")
    return Picture(width, height, max(LEAST_STRIDE, aligned(width, 16)), height)


def crop_box(left: int, top: int, width: int, height: int) -> tuple[int, int, int, int]:
    """Return VPC's box (left, right, top, bottom), both ends inside: even ones first, odd last."""
    if min(left, top) < 0 or left % 2 or top % 2 or width % 2 or height % 2:
        needed = "an even place and an even size"
        raise InputError(needed, f"({left}, {top}), {width} x {height}", "round them down")
    return left, left + width - 1, top, top + height - 1


def vpc_crop_and_resize(
    raw: Image, picture: Picture, box: tuple[int, int, int, int], out: Picture
) -> Image:
    """Return the box of an NV12 picture in another size, as a flat buffer with the strides of out.

    Luma and chroma are resized apart, each as OpenCV would, and what pads is 0. Raises
    `InputError` for a buffer of another size or a box that leaves the picture.
    """
    left, right, top, bottom = box
    if raw.size != picture.size_bytes or picture.factor != 1.5 or out.factor != 1.5:
        raise InputError(f"an NV12 buffer of {picture.size_bytes:,} bytes", f"{raw.size:,}")
    inside = 0 <= left < right < picture.width and 0 <= top < bottom < picture.height
    if not inside or (left % 2, right % 2, top % 2, bottom % 2) != (0, 1, 0, 1):
        needed = f"an even box inside {picture.width} x {picture.height}"
        raise InputError(needed, f"left {left}, right {right}, top {top}, bottom {bottom}")
    rows = raw.reshape(-1, picture.stride_w)
    luma = rows[top : bottom + 1, left : right + 1]
    chroma = rows[picture.stride_h + top // 2 : picture.stride_h + (bottom + 1) // 2]
    pairs = chroma[:, left : right + 1].reshape(len(chroma), -1, 2).transpose(2, 0, 1)
    found = np.zeros((out.size_bytes // out.stride_w, out.stride_w), np.uint8)
    found[: out.height, : out.width] = resize(luma, out.width, out.height)
    small = resize(pairs, out.width // 2, out.height // 2).transpose(1, 2, 0)
    found[out.stride_h : out.stride_h + out.height // 2, : out.width] = small.reshape(
        out.height // 2, out.width
    )
    return found.reshape(-1)


# -- cards ----------------------------------------------------------------------------------------
HD = 1920 * 1080


@dataclass(frozen=True, slots=True)
class Unit:
    """A media unit: how many pictures at once, and pixels a second of each of these servers."""

    servers: int
    pixels_per_s: float


UNITS: Mapping[str, Mapping[str, Unit]] = {
    "Ascend310": {
        "JPEGD": Unit(2, 128.0 * HD),
        "VDEC": Unit(1, 480.0 * HD),
        "VENC": Unit(1, 30.0 * HD),
        "VPC": Unit(1, 1440.0 * HD),
        "software JPEG": Unit(1, 15.0 * HD),
    },
    "Ascend310P3": {"VPC": Unit(12, 360.0 * HD), "JPEGE": Unit(8, 128.0 * HD)},
}
"""Published rates by chip and unit; a unit that is missing has none that we found."""
SIZES = {"JPEGD": (32, 32, 8192, 8192), "VDEC": (128, 128, 4096, 4096), "VPC": (10, 6, 8192, 8192)}
"""Least width and height a unit reads, and largest."""
COPY_BYTES_PER_S = 3.1e9
"""From host to device: 1000 decoded pictures of 1080p a second."""


@dataclass(frozen=True, slots=True)
class Station:
    """A step that every picture takes on one card: servers, and seconds of one for a picture."""

    name: str
    servers: int
    time_s: float

    @property
    def rate_per_s(self) -> float:
        """Pictures a second of all its servers."""
        return self.servers / self.time_s


def unit_station(chip: str, unit: str, width: int, height: int) -> Station:
    """Return a media unit as a station; raises `InputError` for one without a published rate.

    And for a picture of a size that the unit does not read.
    """
    found = UNITS.get(chip, {}).get(unit)
    if found is None:
        known = ", ".join(UNITS.get(chip, {})) or "none"
        raise InputError(f"a unit of {chip} with a published rate ({known})", unit, "measure it")
    low_w, low_h, most_w, most_h = SIZES.get(unit, (1, 1, math.inf, math.inf))
    if not (low_w <= width <= most_w and low_h <= height <= most_h):
        needed = f"{unit}: from {low_w} x {low_h} to {most_w:g} x {most_h:g} pixels"
        raise InputError(needed, f"{width} x {height}", "use the host")
    return Station(unit, found.servers, width * height / found.pixels_per_s)


def copy_station(picture_bytes: float) -> Station:
    """Return the copy from host to device as a station."""
    return Station("copy", 1, picture_bytes / COPY_BYTES_PER_S)


def network_station(batch_s: float, batch: int = 1) -> Station:
    """Return a network as a station, from the seconds of one batch."""
    return Station("network", 1, batch_s / batch)


@dataclass(frozen=True, slots=True)
class Answer:
    """How many cards each station alone would need, the most of them, and whose that is."""

    cards: int
    bottleneck: str
    by_station: Mapping[str, int]
    busy: Mapping[str, float]
    """Share of its time that each station works, with so many cards."""


def cards_needed(stations: Sequence[Station], rate_per_s: float) -> Answer:
    """Return the cards for a rate, by the mean; raises `InputError` for stations that take none."""
    if not stations or not all(s.time_s > 0 and s.servers > 0 for s in stations):
        raise InputError("stations that take time", str([s.name for s in stations]))
    if not 0 < rate_per_s < math.inf:
        raise InputError("a rate above 0 pictures a second", str(rate_per_s))
    loads = {s.name: rate_per_s / s.rate_per_s for s in stations}
    cards = {name: math.ceil(round(load, 9)) for name, load in loads.items()}
    most = max(cards.values())
    worst = max(loads, key=lambda name: loads[name])
    return Answer(most, worst, cards, {name: load / most for name, load in loads.items()})


@dataclass(frozen=True, slots=True)
class Played:
    """What a simulation saw of one card: pictures a second, shares of time, seconds a picture."""

    throughput_per_s: float
    busy: Mapping[str, float]
    waited_s: Mapping[str, float]
    latencies_s: tuple[float, ...]


def play(
    stations: Sequence[Station], rate_per_s: float, pictures: int, seed: int | None = 0
) -> Played:
    """Play pictures through the stations of one card, first come, first served.

    They come at random (a Poisson stream of that seed) or, without a seed, evenly.
    """
    gaps = np.full(pictures, 1 / rate_per_s)
    if seed is not None:
        gaps = np.random.default_rng(seed).exponential(1 / rate_per_s, pictures)
    starts = np.cumsum(gaps).tolist()
    times = starts
    waited_s = {}
    for station in stations:  # all take as long there, so nobody overtakes
        ends: list[float] = []
        total = 0.0
        for i, came in enumerate(times):
            begin = came if i < station.servers else max(came, ends[i - station.servers])
            total += begin - came
            ends.append(begin + station.time_s)
        times = ends
        waited_s[station.name] = total / pictures
    span = max(times) - starts[0]
    busy = {s.name: pictures * s.time_s / s.servers / span for s in stations}
    latencies = tuple(end - start for start, end in zip(starts, times, strict=True))
    return Played(pictures / span, busy, waited_s, latencies)
