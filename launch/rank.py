"""One process of the launch scripts: `mezzotint-train`, whose agreed ends a launcher does not take for failures."""

from __future__ import annotations

import sys

from mezzotint.launch import train
from mezzotint.training.outcome import DIVERGED, STOPPED


def main() -> int:
    """The code of `mezzotint-train`, 0 for ends that all ranks come to together: the scripts read `outcome.json`.

    A launcher calls any other code a crash: it kills the ranks that are not out yet and reports at length.
    """
    code = train.main()
    return 0 if code in (STOPPED, DIVERGED) else code


if __name__ == "__main__":
    sys.exit(main())
