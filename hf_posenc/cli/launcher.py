"""`accelerate launch` without its tracebacks: what went wrong was said by the process that it happened in."""

from __future__ import annotations

import logging
import sys


def main() -> None:
    """Do what `accelerate launch` does with the arguments of this process."""
    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Here alone, not in the processes that are started: torch reports each of them that ends with an error.
    logging.disable(logging.ERROR)
    try:
        launch.main()
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            # One that is killed, for its memory for instance, cannot say so itself.
            sys.stderr.write(f"hf-posenc: process {rank} was ended by {failure.signal_name()}.\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
