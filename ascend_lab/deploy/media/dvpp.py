"""DVPP, the media units of a chip: how many cards does a stream of pictures need?

A card is one chip: its media units, the copy from the host and the network each are a station with
servers, one behind another. The formula asks for the mean; the simulation plays every picture and
says how long they wait. A batch is counted as its share of a picture.

    cards = max over stations of ceil(rate t / servers)      t: a server's seconds for a picture

5,000 pictures a second on two decoders that take 8 ms each need ceil(5000 x 0.008 / 2) = 20 cards.

Sources of the rates: CANN 5.0.x, performance of JPEGD, VDEC, VENC and VPC (Ascend310), of VPC and
JPEGE (Atlas inference products); CANN 8.0, copies from host to device.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.errors import InputError

HD = 1920 * 1080
"""Pixels of a picture of 1080p, in which the documents count rates."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A media unit: its servers, each for one picture at a time, and the pixels a second of one."""

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
"""Least width and height that a unit reads, and largest width and height."""
COPY_BYTES_PER_S = 3.1e9
"""From host to device: 1000 decoded pictures of 1080p a second, of 1.5 bytes a pixel."""


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
    """Return a media unit as a station for pictures of some size.

    Raises `InputError` for a unit without a published rate, and for a size that it does not read.
    """
    rates = UNITS.get(chip, {}).get(unit)
    if rates is None:
        rated_units = ", ".join(UNITS.get(chip, {})) or "none"
        raise InputError(
            f"a unit of {chip} with a published rate ({rated_units})", unit, "measure it"
        )
    low_w, low_h, most_w, most_h = SIZES.get(unit, (1, 1, math.inf, math.inf))
    if not (low_w <= width <= most_w and low_h <= height <= most_h):
        needed = f"{unit}: from {low_w} x {low_h} to {most_w:g} x {most_h:g} pixels"
        raise InputError(needed, f"{width} x {height}", "use the host")
    # a 1080p JPEG takes one of the two decoders of Ascend310 1/128 s = 7.8 ms
    return Station(unit, rates.servers, width * height / rates.pixels_per_s)


def copy_station(picture_bytes: float) -> Station:
    """Return the copy from host to device as a station."""
    return Station("copy", 1, picture_bytes / COPY_BYTES_PER_S)


def network_station(batch_s: float, batch: int = 1) -> Station:
    """Return a network as a station, from the seconds of one batch."""
    # a batch of 8 in 20 ms counts as 2.5 ms a picture, though the first waits for the eighth
    return Station("network", 1, batch_s / batch)


@dataclass(frozen=True, slots=True)
class Answer:
    """How many cards a rate needs: those of the station that needs most, the bottleneck."""

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
    # 3000 pictures a second at 256 a second are a load of 11.7 cards
    loads = {s.name: rate_per_s / s.rate_per_s for s in stations}
    # 3.0000000000000004 of float arithmetic are three cards, not four
    cards = {name: math.ceil(round(load, 9)) for name, load in loads.items()}
    most_cards = max(cards.values())
    bottleneck = max(loads, key=lambda name: loads[name])
    busy = {name: load / most_cards for name, load in loads.items()}
    return Answer(most_cards, bottleneck, cards, busy)


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
