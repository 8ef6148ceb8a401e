"""The knowledge bank: what tuning has found, kept in one file, so that it is found once."""

# fmt: off
# isort: off
from ascend_lab.aoe.bank.knowledge import (
    Knowledge, Origin, Outcome, bank_file, open_knowledge, repeat_tune, repo_summary, settle,
)
from ascend_lab.aoe.bank.records import (
    BUILTIN_FILE, MODEL_VERSION, BankEntry, BankError, BankKey, builtin_entries, canonical,
    chip_digest, write_builtin,
)
from ascend_lab.aoe.bank.store import FILE_NAME, Store, Written

__all__ = [
    "BUILTIN_FILE", "FILE_NAME", "MODEL_VERSION", "BankEntry", "BankError", "BankKey",
    "Knowledge", "Origin", "Outcome", "Store", "Written", "bank_file", "builtin_entries",
    "canonical", "chip_digest", "open_knowledge", "repeat_tune", "repo_summary", "settle",
    "write_builtin",
]
