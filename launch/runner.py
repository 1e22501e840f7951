"""DeepSpeed's launcher for the launch script: it ends with the script, and the ranks, which watch it, save and follow."""

from __future__ import annotations

import os
import runpy
import sys

from mezzotint.launch.parent import stop_with_script
from mezzotint.training.stop import RUNNER

COMMAND = "deepspeed.launcher.runner"  # run as `python -m` does, in this process


def main() -> int:
    """The command line is that of `deepspeed`; a code other than 0 leaves by SystemExit, as DeepSpeed has it."""
    stop_with_script()
    os.environ[RUNNER] = str(os.getpid())
    runpy.run_module(COMMAND, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
