"""How a text that comes from a hand-in is shown: short, and without what a terminal would obey."""

MOST = 400


def shown(text: str, most: int = MOST) -> str:
    """Return a text as one short line of what can be printed.

    Line ends become spaces; other control characters, marks that turn the direction of writing and
    lone surrogates become escapes such as `\\x1b`.
    """
    if len(text) > most:
        text = text[: most - 3] + "..."
    return "".join(
        letter if letter.isprintable() else _escaped(letter) for letter in text.replace("\n", " ")
    )


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
