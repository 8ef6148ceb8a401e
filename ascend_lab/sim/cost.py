"""Cycles and energy of one instruction. Every duration is a whole number of cycles.

    occupancy = startup + work / rate,   result visible `latency` cycles later

A published cost that depends on whether the pipe was idle (the head of mmad and of vector
instructions) is charged every time: that keeps time linear, and is at most a few percent high.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ascend_lab.chip import BLOCK_BYTES, Chip, VectorCost
from ascend_lab.isa.instructions import mmad_shape
from ascend_lab.isa.memory import Region
from ascend_lab.isa.opcodes import WHOLE_BLOCKS
from ascend_lab.isa.program import Instruction


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an instruction's time depends on beyond itself.

    `active_cores` share L2 and memory; `fresh` is the share of a tensor's bytes that comes from
    memory; `memory_slowdown` >= 1 stretches memory time where memory is the limit.
    """

    active_cores: int = 1
    fresh: Mapping[str, float] = field(default_factory=dict)
    memory_slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Cycles the pipe is taken, extra cycles until the result is visible, energy in pJ."""

    occupancy_cycles: int
    latency_cycles: int = 0
    energy_pj: float = 0.0


def instruction_cost(chip: Chip, instruction: Instruction, around: Surroundings) -> Cost:
    """Return the cost of one instruction on `chip`."""
    op = instruction.op
    if op in ("set_flag", "wait_flag"):
        return Cost(chip.flag_cycles)
    if op == "barrier":
        return Cost(chip.barrier_cycles)
    if op == "scalar":
        return Cost(chip.scalar_cycles * instruction.number("steps", 1))
    if op == "mmad":
        return _mmad_cost(chip, instruction)
    if instruction.pipe == "V" and op != "data_copy":
        return _vector_cost(chip, instruction)
    return _move_cost(chip, instruction, around)


def _mmad_cost(chip: Chip, instruction: Instruction) -> Cost:
    """cycles = head + ceil(m/m0) * ceil(k/k0) * ceil(n/n0)   (PTO cost model)."""
    dtype = instruction.srcs[0].buffer.dtype
    shape = mmad_shape(instruction)
    steps = math.prod(
        -(-size // side) for size, side in zip(shape, chip.cube_shape(dtype), strict=True)
    )
    return Cost(chip.cube_head_cycles + steps, 0, math.prod(shape) * chip.mac_energy_pj[dtype])


def _vector_cost(chip: Chip, instruction: Instruction) -> Cost:
    """cycles = head + slope * repeats, visible tail later   (PTO cost model)."""
    cost = chip.vector_costs.get(instruction.op, chip.vector_costs["default"])
    if instruction.op in WHOLE_BLOCKS:
        return _whole_blocks_cost(chip, instruction, cost)
    main = instruction.srcs[0] if instruction.op.startswith("vc") and instruction.srcs else None
    region = main or instruction.dst
    assert region is not None
    energy = region.size_bytes * chip.vector_energy_pj_per_byte
    return Cost(cost.head_cycles + cost.slope_cycles * region.sizes[0], cost.tail_cycles, energy)


def _whole_blocks_cost(chip: Chip, instruction: Instruction, cost: VectorCost) -> Cost:
    """One repeat per 8 blocks written: vbrcb writes a block an element, vtranspose 16 blocks."""
    assert instruction.dst is not None
    size = instruction.dst.size_bytes
    repeats = -(-size // chip.vector_bytes_per_repeat)
    energy = size * chip.vector_energy_pj_per_byte
    return Cost(cost.head_cycles + cost.slope_cycles * repeats, cost.tail_cycles, energy)


def _moved_bytes(region: Region) -> int:
    """Bytes on the wires: every run is rounded up to whole 32-byte blocks."""
    run = region.run_bytes
    blocks = -(-run // BLOCK_BYTES)
    return region.size_bytes // run * blocks * BLOCK_BYTES


def _move_cost(chip: Chip, instruction: Instruction, around: Surroundings) -> Cost:
    src, dst = instruction.srcs[0], instruction.dst
    assert dst is not None
    path = chip.path(src.space, dst.space)
    size = _moved_bytes(dst)
    if instruction.op == "data_copy":
        size = max(size, _moved_bytes(src))
    if src.space == "L0C":
        size = dst.size_bytes
    cycles_per_byte = 1.0 / path.rate_bytes_per_cycle
    energy = path.energy_pj_per_byte
    latency = float(path.latency_cycles)
    n = around.active_cores
    if "GM" in (src.space, dst.space):
        shared = chip.shared_rate_bytes_per_cycle("L2", n)
        cycles_per_byte = max(cycles_per_byte, 1.0 / shared)
        energy += chip.l2.energy_pj_per_byte
        latency += chip.l2.latency_cycles
    if src.space == "GM":
        fresh = around.fresh.get(src.buffer.name, 1.0)
        memory = max(
            1.0 / path.rate_bytes_per_cycle,
            around.memory_slowdown / chip.shared_rate_bytes_per_cycle("memory", n),
        )
        cycles_per_byte = fresh * memory + (1.0 - fresh) * cycles_per_byte
        energy += fresh * chip.device_memory.energy_pj_per_byte
        latency += fresh * (chip.device_memory.latency_cycles - chip.l2.latency_cycles)
    occupancy = path.startup_cycles + math.ceil(size * cycles_per_byte - 1e-9)
    return Cost(occupancy, round(latency), size * energy)
