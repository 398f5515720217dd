"""`accelerate launch` without its tracebacks: the failed process has reported its error already."""

from __future__ import annotations

import logging
import sys


def main() -> None:
    """Run `accelerate launch` with the arguments of this process."""
    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # torch logs every failed process here; the started processes keep their own logs.
    logging.disable(logging.ERROR)
    try:
        launch.main()
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            # A killed process, for instance one out of memory, cannot report that itself.
            sys.stderr.write(f"hf-posenc: process {rank} was ended by {failure.signal_name()}.\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
