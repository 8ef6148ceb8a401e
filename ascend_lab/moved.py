"""Redirects old names of packages: `ascend_lab.chip` is `ascend_lab.machine.chip` since 0.27.

A reader's notebook that imports an old name gets the new package and a `DeprecationWarning`.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing `typing` for it would delay the commands' handling of Ctrl-C
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

MOVED = {
    "chip": "machine.chip",
    "isa": "machine.isa",
    "sim": "machine.sim",
    "layout": "machine.layout",
    "dsl": "operators.dsl",
    "ops": "operators.ops",
    "kernels": "operators.kernels",
    "graph": "compiler",
    "train": "cluster.train",
    "parallel": "cluster.parallel",
    "compress": "deploy.compress",
    "media": "deploy.media",
    "runtime": "deploy.runtime",
    "serving": "deploy.serving",
}
"""Old name of a package of `ascend_lab` -> its new name."""
MOVED_NAMES = {
    "compiler": {
        "bound": "Bound",
        "compile": "Road Stages finish_stages front_stages ledger",
        "counts": "table",
        "draft": "Draft Value ordered pruned",
        "evaluate": "evaluate_all",
        "fusion": "rules_restored",
        "ir": "Constant Fill Seeded infer rules_of to_text verify",
        "network": "NetworkTimeline OperatorTime",
        "placement": "buffers_of constant_bytes in_place_pairs live_bytes plan_network "
        "weight_bytes",
        "switches": "parse_switches",
        "tasks": "Compiled Task",
        "text_form": "from_text",
        "values": "run_tasks",
    },
    "aoe": {
        "cube": "CubeJob",
        "drive": "Bars Rules Trace Trial",
        "engine": "NetworkResult Session Tuning tune_network",
        "operators": "Tunable operators_of",
        "search": "Annealing Genetic Mcts random_order",
        "space": "completed crossed mutated nearest random_completion read_recorded",
        "tuning": "Result",
        "vector": "VectorJob VectorMeasure",
        "vendor_bank": "Decision held_against",
        "workers": "Workers workers_of",
    },
    "cluster": {
        "buckets": "closed checked",
        "cost": "Interpolated",
        "fit": "held_out mape read_table",
        "loader": "TOPOLOGIES",
        "schedule": "ALGORITHMS OPS LinkCosts Round closed_form_s merge_rounds",
        "timing": "CollectiveTime",
        "topology": "Link",
    },
    "course": {
        "assignment": "Case Judged draw",
        "grade": "CaseResult Enrolled Mark mark",
        "sandbox": "Answer Call Limits Wall answers_of standing_wall",
    },
    "llm": {"machine": "GAPS", "models": "decoder_names"},
}
"""By package: module that has them -> names that the package itself offered before 0.31."""


class _Moved:
    """An import finder for `ascend_lab.OLD` and modules below it.

    `import ascend_lab.chip.model` yields the very module `ascend_lab.machine.chip.model`, not a
    copy: a class has one identity under both names.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, below = name.partition(".")
        old_package = below.partition(".")[0]
        if package != "ascend_lab" or old_package not in MOVED:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        import warnings
        from importlib import import_module

        _, old_package, *below = spec.name.split(".")
        new_name = ".".join(("ascend_lab", MOVED[old_package], *below))
        warnings.warn(f"{spec.name} is {new_name} now", DeprecationWarning, stacklevel=2)
        module = import_module(new_name)
        spec.loader_state = module.__spec__  # Python is about to write the old name over it
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's spec under its new name; its code has run already."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def find_old_names() -> None:
    """Install the finder, so that imports of old names work."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        # ahead of Python's finder of files, which does not know the old names
        sys.meta_path.insert(0, _Moved())
