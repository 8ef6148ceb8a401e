"""The errors of the runtime: AscendCL's published codes inside our family of errors."""

from ascend_lab.errors import AscendLabError

CODES = {
    100000: "invalid parameter",
    100001: "not initialised",
    100002: "initialised twice",
    100011: "invalid model id",
    100017: "input does not match the model",
    100018: "output does not match the model",
    100019: "not a dynamic model",
    100024: "operator not found",
    100033: "subscribed twice",
    100037: "finalised twice",
    148048: "queue of operators out of range",
    200000: "no memory",
    200004: "resources do not belong together",
    500000: "internal error",
}
"""Codes as AscendCL publishes them: 1xxxxx the caller, 2xxxxx resources, 5xxxxx inside.

Source: CANN runtime documentation, aclError.
"""
(INVALID, UNINITIALISED, TWICE, NO_MODEL, INPUTS, OUTPUTS, STATIC, NO_OPERATOR, SUBSCRIBED,
 FINALISED, QUEUE, NO_MEMORY, MISMATCH, INTERNAL) = CODES  # fmt: skip


class AclError(AscendLabError):
    """A call of the runtime that cannot be done; `code` is AscendCL's."""

    def __init__(self, code: int, needed: str, got: str = "", remedy: str = "") -> None:
        """Build the message, the code and its meaning in front."""
        self.code = code
        super().__init__(f"ACL error {code} ({CODES[code]}): {needed}", got, remedy)


def need(fine: bool, code: int, needed: str, got: str = "", remedy: str = "") -> None:
    """Raise the `AclError` of a code unless something is fine."""
    if not fine:
        raise AclError(code, needed, got, remedy)


class DeadlockError(AclError):
    """Streams that wait for each other, or for a thread that nobody subscribed."""

    def __init__(self, needed: str, got: str, remedy: str) -> None:
        """Build the message; the code is the one for what has no other."""
        super().__init__(INTERNAL, needed, got, remedy)
