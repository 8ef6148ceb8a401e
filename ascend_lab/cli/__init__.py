"""The command lines `ascend-lab` and `aoe` as functions: they take arguments, return exit codes."""

from ascend_lab.cli.main import aoe, ascend_lab

__all__ = ["aoe", "ascend_lab"]
