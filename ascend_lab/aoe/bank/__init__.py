"""The knowledge bank: what tuning has found, kept in one file, so that it is found once."""

# fmt: off
# isort: off
from ascend_lab.aoe.bank.knowledge import (
    BUILTIN_FILE, Knowledge, Origin, Outcome, bank_file, builtin_entries, open_knowledge,
    repeat_tune, repo_summary, settle, write_builtin,
)
from ascend_lab.aoe.bank.records import (
    MODEL_VERSION, BankEntry, BankError, BankKey, canonical, chip_digest,
)
from ascend_lab.aoe.bank.store import FILE_NAME, Store, Written

__all__ = [
    "BUILTIN_FILE", "FILE_NAME", "MODEL_VERSION", "BankEntry", "BankError", "BankKey",
    "Knowledge", "Origin", "Outcome", "Store", "Written", "bank_file", "builtin_entries",
    "canonical", "chip_digest", "open_knowledge", "repeat_tune", "repo_summary", "settle",
    "write_builtin",
]
