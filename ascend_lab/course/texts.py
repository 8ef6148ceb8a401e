"""Prepares texts from a hand-in for printing: shortens them, and escapes control characters."""

MAX_LENGTH = 400


def shown(text: str, max_length: int = MAX_LENGTH) -> str:
    """Return a text as one short line of printable characters.

    Line ends become spaces. Control characters, marks that change the direction of writing and lone
    surrogates become escapes such as `\\x1b`.
    """
    if len(text) > max_length:
        text = text[: max_length - 3] + "..."
    return "".join(
        letter if letter.isprintable() else _escaped(letter) for letter in text.replace("\n", " ")
    )


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
