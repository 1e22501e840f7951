"""torchrun for the launch scripts: it hands on the signals that ask for a stop, and ends in a sentence, not a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mezzotint.launch.parent import stop_with_script

SIGNALS = "SIGTERM,SIGINT,SIGUSR1,SIGUSR2"
SAVE_SECONDS = "600"  # for a checkpoint after a signal; torchrun's own 30 kill in the middle of a large one
CRASHED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """`arguments` are torchrun's, by default those of the command line."""
    # by environment: a version of torch that lacks one of them takes no offence
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", SIGNALS)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SAVE_SECONDS)
    stop_with_script()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(list(sys.argv[1:] if arguments is None else arguments))
    except SignalException as error:
        print(f"torchrun: {error.sigval.name} came; the ranks were asked to stop and have ended", file=sys.stderr)
        return CRASHED
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            print(f"torchrun: rank {rank} (process {failure.pid}) ended with {failure.exitcode}", file=sys.stderr)
        return CRASHED
    return 0


if __name__ == "__main__":
    sys.exit(main())
