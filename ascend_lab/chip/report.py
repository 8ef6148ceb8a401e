"""Chips as text and plain data, every number with source and trust."""

from collections.abc import Iterable
from typing import Any

from ascend_lab.chip.model import Chip


def chip_dict(chip: Chip) -> dict[str, Any]:
    """Return a chip as plain data for JSON; `facts` holds {value, source, trust} by key."""
    return {
        "name": chip.name,
        "summary": chip.summary,
        "combined": chip.combined,
        "cores": chip.core_count,
        "clock_hz": chip.clock_hz,
        "peak_ops_per_s": {dtype: chip.peak_ops_per_s(dtype) for dtype in chip.cube},
        "buffers_bytes": dict(chip.buffers),
        "l2_bytes": chip.l2.size_bytes,
        "memory_bytes": chip.device_memory.size_bytes,
        "memory_rate_bytes_per_s": chip.device_memory.rate_bytes_per_s,
        "paths": {
            f"{src}->{dst}": {
                "pipe": path.pipe,
                "unit": path.unit,
                "rate_bytes_per_cycle": path.rate_bytes_per_cycle,
                "startup_cycles": path.startup_cycles,
                "latency_cycles": path.latency_cycles,
            }
            for (src, dst), path in chip.paths.items()
        },
        "facts": {
            key: {"value": fact.value, "source": fact.source, "trust": fact.trust}
            for key, fact in chip.facts.items()
        },
        "sources": dict(chip.sources),
    }


def chip_table(chips: Iterable[Chip]) -> list[str]:
    """Return one line per chip: cores, clock, fp16 peak, memory."""
    lines = [f"{'chip':<12} {'cores':>5} {'MHz':>6} {'fp16 TFLOPS':>12} {'memory GB/s':>12}  about"]
    lines += [
        f"{chip.name:<12} {chip.core_count:>5} {chip.clock_hz / 1e6:>6.0f} "
        f"{chip.peak_ops_per_s('fp16') / 1e12:>12.1f} "
        f"{chip.device_memory.rate_bytes_per_s / 1e9:>12.1f}  {chip.summary}"
        for chip in chips
    ]
    return lines


def chip_lines(chip: Chip) -> list[str]:
    """Return every number of a chip, one a line: key, value, trust, source."""
    lines = [f"{chip.name}: {chip.summary}"]
    lines += [
        f"  {key:<44} {fact.value:<16g} {fact.trust:<10} {fact.source}"
        for key, fact in chip.facts.items()
    ]
    lines.append("sources:")
    used = {fact.source for fact in chip.facts.values()}
    lines += [f"  {key:<9} {text}" for key, text in chip.sources.items() if key in used]
    return lines
