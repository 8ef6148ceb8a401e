"""Computes the number of cards that a stream of pictures needs, from the rates of DVPP.

DVPP (digital vision pre-processing) has a chip's media units, for example its JPEG decoders. A card
is one chip, modelled as stations in a row: media units, the copy from the host and the network,
each with one or more servers. The formula uses mean rates; the simulation follows every picture and
also gives its waiting time.

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

PIXELS_1080P = 1920 * 1080
"""Pixels of a 1080p picture, for which the documents state rates."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A media unit: a number of servers, each for one picture at a time, and the rate of one."""

    servers: int
    pixels_per_s: float


UNITS: Mapping[str, Mapping[str, Unit]] = {
    "Ascend310": {
        "JPEGD": Unit(2, 128.0 * PIXELS_1080P),
        "VDEC": Unit(1, 480.0 * PIXELS_1080P),
        "VENC": Unit(1, 30.0 * PIXELS_1080P),
        "VPC": Unit(1, 1440.0 * PIXELS_1080P),
        "software JPEG": Unit(1, 15.0 * PIXELS_1080P),
    },
    "Ascend310P3": {"VPC": Unit(12, 360.0 * PIXELS_1080P), "JPEGE": Unit(8, 128.0 * PIXELS_1080P)},
}
"""Published rates by chip and unit; for other units no published rate is known."""
SIZE_LIMITS = {
    "JPEGD": (32, 32, 8192, 8192),
    "VDEC": (128, 128, 4096, 4096),
    "VPC": (10, 6, 8192, 8192),
}
"""Smallest width and height that a unit reads, and largest width and height."""
COPY_BYTES_PER_S = 3.1e9
"""Rate of copies from host to device: 1000 pictures of 1080p a second, 1.5 bytes a pixel."""


@dataclass(frozen=True, slots=True)
class Station:
    """A step that every picture passes on a card; `time_s` are a server's seconds for a picture."""

    name: str
    servers: int
    time_s: float

    @property
    def rate_per_s(self) -> float:
        """Return the pictures per second of all servers together."""
        return self.servers / self.time_s


def unit_station(chip: str, unit: str, width: int, height: int) -> Station:
    """Return a media unit as a station for pictures of a size.

    Raises `InputError` for a unit without a published rate, and for a size that it cannot read.
    """
    media_unit = UNITS.get(chip, {}).get(unit)
    if media_unit is None:
        rated_units = ", ".join(UNITS.get(chip, {})) or "none"
        raise InputError(
            f"a unit of {chip} with a published rate ({rated_units})", unit, "measure it"
        )
    min_w, min_h, max_w, max_h = SIZE_LIMITS.get(unit, (1, 1, math.inf, math.inf))
    if not (min_w <= width <= max_w and min_h <= height <= max_h):
        needed = f"{unit}: from {min_w} x {min_h} to {max_w:g} x {max_h:g} pixels"
        raise InputError(needed, f"{width} x {height}", "use the host")
    # A 1080p JPEG occupies one of the two decoders of Ascend310 for 1/128 s = 7.8 ms.
    return Station(unit, media_unit.servers, width * height / media_unit.pixels_per_s)


def copy_station(picture_bytes: float) -> Station:
    """Return the copy from host to device as a station."""
    return Station("copy", 1, picture_bytes / COPY_BYTES_PER_S)


def network_station(batch_s: float, batch: int = 1) -> Station:
    """Return a network as a station, from the seconds of one batch."""
    # A batch of 8 in 20 ms counts as 2.5 ms a picture, although the first waits for the eighth.
    return Station("network", 1, batch_s / batch)


@dataclass(frozen=True, slots=True)
class CardCount:
    """The cards for a rate of pictures; the bottleneck is the station that needs most of them."""

    cards: int
    bottleneck: str
    by_station: Mapping[str, int]
    busy: Mapping[str, float]
    """Station -> its utilisation with this number of cards."""


def cards_needed(stations: Sequence[Station], rate_per_s: float) -> CardCount:
    """Return the cards for a mean rate; raises `InputError` for stations that take no time."""
    if not stations or not all(s.time_s > 0 and s.servers > 0 for s in stations):
        raise InputError("stations that take time", str([s.name for s in stations]))
    if not 0 < rate_per_s < math.inf:
        raise InputError("a rate above 0 pictures a second", str(rate_per_s))
    # 3000 pictures a second on a station of 256 a second are a load of 11.7 cards.
    loads = {s.name: rate_per_s / s.rate_per_s for s in stations}
    # Rounding errors must not add a card: 3.0000000000000004 are three cards, not four.
    cards = {name: math.ceil(round(load, 9)) for name, load in loads.items()}
    max_cards = max(cards.values())
    bottleneck = max(loads, key=lambda name: loads[name])
    busy = {name: load / max_cards for name, load in loads.items()}
    return CardCount(max_cards, bottleneck, cards, busy)


@dataclass(frozen=True, slots=True)
class CardSimulation:
    """The result of a simulation of one card.

    `busy` is the utilisation of each station, `waited_s` the mean waiting time before it, and
    `latencies_s` the time of each picture from its arrival to its end.
    """

    throughput_per_s: float
    busy: Mapping[str, float]
    waited_s: Mapping[str, float]
    latencies_s: tuple[float, ...]


def simulate_card(
    stations: Sequence[Station], rate_per_s: float, pictures: int, seed: int | None = 0
) -> CardSimulation:
    """Simulate pictures that pass the stations of one card, first come, first served.

    They arrive at random (as a Poisson process with a seed) or, if `seed` is None, evenly.
    """
    gaps_s = np.full(pictures, 1 / rate_per_s)
    if seed is not None:
        gaps_s = np.random.default_rng(seed).exponential(1 / rate_per_s, pictures)
    arrivals_s = np.cumsum(gaps_s).tolist()
    station_arrivals_s = arrivals_s
    waited_s = {}
    # At a station all pictures take equally long, so none overtakes another.
    for station in stations:
        ends_s: list[float] = []
        total_wait_s = 0.0
        for i, arrival_s in enumerate(station_arrivals_s):
            # Two servers: picture 5 waits until picture 3 has ended.
            start_s = (
                arrival_s if i < station.servers else max(arrival_s, ends_s[i - station.servers])
            )
            total_wait_s += start_s - arrival_s
            ends_s.append(start_s + station.time_s)
        station_arrivals_s = ends_s
        waited_s[station.name] = total_wait_s / pictures
    span_s = max(station_arrivals_s) - arrivals_s[0]
    # 100 pictures of 8 ms on two servers in 0.5 s: each server is busy for 0.8 of the time.
    busy = {s.name: pictures * s.time_s / s.servers / span_s for s in stations}
    latencies = tuple(
        end - start for start, end in zip(arrivals_s, station_arrivals_s, strict=True)
    )
    return CardSimulation(pictures / span_s, busy, waited_s, latencies)
