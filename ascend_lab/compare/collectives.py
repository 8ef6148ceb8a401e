"""Measured collectives: the quickest algorithm on a topology."""

from ascend_lab.compare.estimates import Estimate
from ascend_lab.compare.rows import Work
from ascend_lab.compare.words import chip_of, is_told
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.limits import shown
from ascend_lab.machine.chip import Chip

OF_EXPERTS = ("ep", "tokens", "hidden", "topk")
"""Words on the experts whose tokens a collective moves: the bytes are what counts."""
OTHER_TOPOLOGIES = {"A3 pod, HCCS": "a3-pod"}
"""Words of a source for its topology -> the preset, with as many devices as ranks."""


def collective(work: Work, own: Chip | None) -> Estimate:
    """Time a collective by the quickest algorithm on a topology, its first devices if fewer."""
    from ascend_lab.cluster import collective_time, load_topology
    from ascend_lab.cluster.loader import TOPOLOGIES

    for word, value in work.attributes.items():
        if word not in ("ranks", "topology", *OF_EXPERTS) and not is_told(word):
            needed = f"{work.operator}: attributes ranks and topology"
            raise UnsupportedError(needed, f"{word}={shown(value)}", "what it changes is unknown")
    name, ranks = work.attributes.get("topology"), work.attributes.get("ranks")
    if work.size_bytes is None:
        raise InputError(f"{work.operator}: inputs as bytes=N", "none", "mend that row")
    marks = []
    if name in OTHER_TOPOLOGIES and type(ranks) is int:
        marks.append(f"topology: as {OTHER_TOPOLOGIES[name]}")
        name = f"{OTHER_TOPOLOGIES[name]}:{ranks}"
    if not isinstance(name, str) or name.partition(":")[0] not in TOPOLOGIES:
        needed = f"{work.operator}: a topology among {', '.join(TOPOLOGIES)}"
        raise InputError(needed, shown(name), "none is guessed")
    topology = load_topology(name)
    if type(ranks) is not int or not 2 <= ranks <= topology.size:
        needed = f"{work.operator}: ranks from 2 to {topology.size}, the devices of {name}"
        raise InputError(needed, shown(ranks), "mend that row")
    found = collective_time(work.operator, topology, work.size_bytes, placement=range(ranks))
    marks.append(f"{found.algorithm}, the quickest of the model")
    launch_s = 0.0
    if work.timing != "kernel":
        try:
            chip, of_chip = chip_of(work.chip, own)
        except InputError:
            marks.append("the launch of this chip is unknown: none counted")
        else:
            launch_s = chip.launch_overhead_s
            marks += [*of_chip, "of the host's work a launch, no library's"]
    return Estimate(
        found.time_s + launch_s, found.lower_bound_s + launch_s, "links", {}, tuple(marks)
    )
