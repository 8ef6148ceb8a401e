"""Which passes and fusion rules are on: files in the two forms of `fusion_switch.cfg`.

    SoftmaxFusionPass:off

    {"Switch": {"GraphFusion": {"ALL": "off", "SoftmaxFusionPass": "on"}, "UBFusion": {...}}}

`ALL` sets what is not named. Source: CANN documentation, --fusion_switch_file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ascend_lab.errors import InputError
from ascend_lab.limits import TOML_BYTES, json_of, read_file

SCOPES = ("GraphFusion", "UBFusion")
FORM = '{"Switch": {"GraphFusion": {...}, "UBFusion": {...}}}'


@dataclass(frozen=True, slots=True)
class Switches:
    """On or off by scope and name; what no file names is on."""

    named: Mapping[tuple[str, str], bool] = field(default_factory=dict)

    def is_on(self, name: str, scope: str = "UBFusion") -> bool:
        """Tell whether a rule runs."""
        return self.named.get((scope, name), self.named.get((scope, "ALL"), True))


def read_switches(path: str | Path) -> Switches:
    """Return the switches of a file; raise `InputError` naming what cannot be read."""
    data = read_file(path, "a fusion switch file", TOML_BYTES)
    try:
        return parse_switches(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(
            "a fusion switch file", str(error), "check the path; it is UTF-8"
        ) from error


def parse_switches(text: str) -> Switches:
    """Return the switches of a text in either form."""
    found: dict[tuple[str, str], bool] = {}
    if text.lstrip().startswith(("{", "[")):
        whole = json_of(text, FORM, "mend the JSON")
        scopes = whole.get("Switch") if isinstance(whole, dict) else None
        if not isinstance(scopes, dict) or not all(isinstance(v, dict) for v in scopes.values()):
            raise InputError(FORM, text.strip()[:60], "mend the JSON")
        wrong = next((s for s, names in scopes.items() if names and s not in SCOPES), None)
        if wrong is not None:
            raise InputError(f"a scope {' or '.join(SCOPES)}", wrong, "rename it")
        for scope, names in scopes.items():
            found.update({(scope, name): _state(str(v), name) for name, v in names.items()})
        return Switches(found)
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, _, state = line.partition(":")
            on = _state(state, f"line {number}")
            found.update({(scope, name.strip()): on for scope in SCOPES})
    return Switches(found)


def _state(text: str, where: str) -> bool:
    if text.strip().lower() not in ("on", "off"):
        raise InputError(f"{where}: on or off", repr(text.strip()), "write Name:on or Name:off")
    return text.strip().lower() == "on"
