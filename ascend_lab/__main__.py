"""`python -m ascend_lab` is the command `ascend-lab`."""

import sys

from ascend_lab.cli import ascend_lab

if __name__ == "__main__":
    sys.exit(ascend_lab())
