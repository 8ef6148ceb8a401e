"""Kernels of several phases: launches one after another on the same GM tensors."""

from __future__ import annotations

from dataclasses import dataclass

from ascend_lab.errors import ProgramError
from ascend_lab.isa.memory import Buffer
from ascend_lab.isa.program import Launch, Program, as_launch


@dataclass(frozen=True, slots=True)
class Kernel:
    """Phases that run one after another; between two of them all cores wait for each other.

    A phase reads what earlier phases wrote to GM, on whatever core: partial sums first, then their
    sum. The host launches the whole once.
    """

    name: str
    phases: tuple[Launch, ...]

    def __post_init__(self) -> None:
        """Check that there is a phase, and that a tensor is the same one in all phases."""
        if not self.phases:
            raise ProgramError(f"{self.name}: a kernel of at least one phase", "none", "add one")
        seen: dict[str, Buffer] = {}
        for phase in self.phases:
            for tensor in phase.tensors:
                first = seen.setdefault(tensor.name, tensor)
                if first != tensor:
                    raise ProgramError(
                        f"{self.name}: one size and format of tensor {tensor.name} in all phases",
                        f"{first.elements} {first.dtype} and {tensor.elements} {tensor.dtype}",
                        "rename one, or view the tensor with sizes and strides",
                    )

    @property
    def core_count(self) -> int:
        """Cores of the phase that uses most of them."""
        return max(phase.core_count for phase in self.phases)

    @property
    def event_count(self) -> int:
        """Dynamic instructions of all phases on all cores, flags included."""
        return sum(phase.event_count for phase in self.phases)

    @property
    def tensors(self) -> tuple[Buffer, ...]:
        """GM tensors of all phases, each once."""
        return tuple({b.name: b for phase in self.phases for b in phase.tensors}.values())


def as_kernel(program: Program | Launch | Kernel) -> Kernel:
    """Return `program` as a kernel of one phase unless it is a kernel already."""
    if isinstance(program, Kernel):
        return program
    launch = as_launch(program)
    return Kernel(launch.name, (launch,))
