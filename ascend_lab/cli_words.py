"""How a command spells the Python arguments that messages of the library name."""

from __future__ import annotations

import re
from argparse import Namespace

_ARGUMENT = re.compile(
    r"\b(shapes|batch|pinned|resume)="
    r"(\{'(?P<key>[^'\\]*)': (\((?P<sizes>[\d, ]*)\)|array)\}|\d+|True)"
)
_FLAGS = {
    "ascend-lab": {"shapes": "--input-shape", "batch": "--batch", "pinned": "--inputs"},
    "aoe": {"shapes": "--input_shape", "batch": "--dynamic_batch_size", "resume": "--reload"},
}
CLUSTER_FILE = (
    "A cluster of your own is a .toml file with name, devices (names or a count), switches, "
    "servers (lists of devices), gamma_s_per_byte (adding a byte), and entries [[links]] with "
    "from, to, alpha_us or alpha_s, gbytes_per_s or beta_s_per_byte, one_way. An example stands "
    "in book/bring_your_own.md."
)


def in_flags(text: str, program: str, given: Namespace | None = None) -> str:
    """Return a message in one line, its arguments as the flags that the verb has for them.

    `given`: the verb's parsed arguments; without them it has all flags of the program.
    """

    def flag(found: re.Match[str]) -> str:
        name, value, word = found[1], found[2], _FLAGS[program].get(found[1], "")
        if word == "--reload":
            return word
        if not word or (given is not None and word[2:].replace("-", "_") not in given):
            return f"{found[0]} in Python"
        if found["sizes"] is not None:
            value = f"{found['key']}:{found['sizes'].replace(' ', '').rstrip(',')}"
        return f"{word} {'F.npz' if name == 'pinned' else value}"

    return _ARGUMENT.sub(flag, " ".join(text.split()))
