"""Products by default schedules held against published whole-task times, hits and misses alike.

The chips are bins of one: cores and clock are theirs, all else is the preset's. A row with a tile
gets the best grid for it.
"""

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import resources

from ascend_lab.chip import load_chip
from ascend_lab.kernels import GemmSchedule, GemmShape, best_grid
from ascend_lab.ops.matmul import default_product, product_kernel, warm_cycles

GOAL = 0.15
STAGES = 4
"""Base tiles a stage of L1 has where the source gives a tile."""


@dataclass(frozen=True, slots=True)
class ProductRow:
    """A published time and the model's, both with the launch; (m, n, k), and parts of K."""

    name: str
    device: str
    size: tuple[int, int, int]
    parts: int
    published_s: float
    model_s: float

    @property
    def error(self) -> float:
        """model / published - 1."""
        return self.model_s / self.published_s - 1.0


def product_rows() -> Iterator[ProductRow]:
    """Yield the published rows with the model's times, in the file's order."""
    text = (resources.files("ascend_lab.ops") / "published.toml").read_text("utf-8")
    data, preset = tomllib.loads(text), load_chip("Ascend910B2")
    for row in data["product"]:
        own, (m, n, k) = data["device"][row["device"]], row["size"]
        chip = replace(preset, name=row["device"], core_count=own["cores"], clock_hz=own["hz"])
        shape = GemmShape(m, k, n, row.get("dtype", "fp16"))
        if "tile" in row:
            base_m, base_k, base_n = row["tile"]
            given = GemmSchedule(base_m, base_k, base_n, STAGES, 1, 1)
            schedule = best_grid(shape, chip, given)
        else:
            schedule = default_product(shape, chip)
        cycles = warm_cycles(product_kernel(shape, chip, schedule), chip, ())
        times = row["time_us"] * 1e-6, cycles / chip.clock_hz
        yield ProductRow(row["name"], row["device"], (m, n, k), schedule.split_k, *times)


def product_table(rows: Iterable[ProductRow]) -> str:
    """Return the rows as text: times, error, what was published; a star where it misses."""
    lines = [f"{'m x n x k':<17}{'chip':<12}{'model':>9}{'publ.':>9}{'error':>7}  what"]
    for row in rows:
        size, mark = "x".join(map(str, row.size)), " *" if abs(row.error) > GOAL else ""
        lines.append(
            f"{size:<17}{row.device.removeprefix('Ascend'):<12}{row.model_s * 1e6:>7.1f}us"
            f"{row.published_s * 1e6:>7.1f}us{row.error:>+7.0%}  {row.name}{mark}"
        )
    return "\n".join(lines)
