"""The knowledge bank: what tuning has found, kept in one file, so that it is found once."""

from ascend_lab.aoe.bank.builtin import BUILTIN_FILE, builtin_entries, write_builtin
from ascend_lab.aoe.bank.errors import BankError
from ascend_lab.aoe.bank.flow import Decision, decide, repo_summary, settle
from ascend_lab.aoe.bank.knowledge import Knowledge, Origin, Outcome
from ascend_lab.aoe.bank.place import bank_file, open_knowledge, repeat_tune
from ascend_lab.aoe.bank.records import MODEL_VERSION, BankEntry, BankKey, canonical, chip_digest
from ascend_lab.aoe.bank.store import FILE_NAME, Store, Written

__all__ = [
    "BUILTIN_FILE",
    "FILE_NAME",
    "MODEL_VERSION",
    "BankEntry",
    "BankError",
    "BankKey",
    "Decision",
    "Knowledge",
    "Origin",
    "Outcome",
    "Store",
    "Written",
    "bank_file",
    "builtin_entries",
    "canonical",
    "chip_digest",
    "decide",
    "open_knowledge",
    "repeat_tune",
    "repo_summary",
    "settle",
    "write_builtin",
]
