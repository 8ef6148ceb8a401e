"""Reads the file of switches with which a user turns passes and fusion rules off.

The file has one of the two forms of the vendor's `fusion_switch.cfg`:

    SoftmaxFusionPass:off

    {"Switch": {"GraphFusion": {"ALL": "off", "SoftmaxFusionPass": "on"}, "UBFusion": {...}}}

`ALL` sets all names that the file does not list. Source: CANN documentation, --fusion_switch_file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ascend_lab import limits
from ascend_lab.errors import InputError

SCOPES = ("GraphFusion", "UBFusion")
"""Passes belong to the first scope, fusion rules to the second."""
FORM = '{"Switch": {"GraphFusion": {...}, "UBFusion": {...}}}'


@dataclass(frozen=True, slots=True)
class Switches:
    """Switches by scope and name; a name that is not listed is on."""

    named: Mapping[tuple[str, str], bool] = field(default_factory=dict)

    def is_on(self, name: str, scope: str = "UBFusion") -> bool:
        """Tell whether a pass or rule runs."""
        # the switch of the name, else ALL of its scope, else on
        return self.named.get((scope, name), self.named.get((scope, "ALL"), True))


def read_switches(path: str | Path) -> Switches:
    """Return the switches of a file; raise `InputError` naming what cannot be read."""
    data = limits.read_file(path, "a fusion switch file", limits.TOML_BYTES)
    with limits.naming(path):
        try:
            return parse_switches(data.decode("utf-8"))
        except UnicodeDecodeError as error:
            remedy = "check the path; it is UTF-8"
            raise InputError("a fusion switch file", str(error), remedy) from error


def parse_switches(text: str) -> Switches:
    """Return the switches of a text in either form."""
    # a rule's name cannot begin with a bracket
    return _from_json(text) if text.lstrip().startswith(("{", "[")) else _from_lines(text)


def _from_json(text: str) -> Switches:
    """Return the switches of the JSON form; raise `InputError` for any other document."""
    document = limits.json_of(text, FORM, "correct the JSON")
    scopes = document.get("Switch") if isinstance(document, dict) else None
    if not isinstance(scopes, dict) or not all(isinstance(v, dict) for v in scopes.values()):
        raise InputError(FORM, text.strip()[:60], "correct the JSON")
    # an empty scope with an unknown name is ignored
    wrong = next((s for s, names in scopes.items() if names and s not in SCOPES), None)
    if wrong is not None:
        raise InputError(f"a scope {' or '.join(SCOPES)}", wrong, "rename it")
    return Switches(
        {
            (scope, name): _is_on(str(state), name)
            for scope, states in scopes.items()
            for name, state in states.items()
        }
    )


def _from_lines(text: str) -> Switches:
    """Return the switches of lines such as SoftmaxFusionPass:off; # begins a remark."""
    named: dict[tuple[str, str], bool] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, _, state = line.partition(":")
            on = _is_on(state, f"line {number}")
            # a line does not say whether its name is a pass or a rule
            named.update({(scope, name.strip()): on for scope in SCOPES})
    return Switches(named)


def _is_on(text: str, where: str) -> bool:
    if text.strip().lower() not in ("on", "off"):
        raise InputError(f"{where}: on or off", repr(text.strip()), "write Name:on or Name:off")
    return text.strip().lower() == "on"
