"""The command `rankwise`, also `python -m rankwise`: Ctrl-C ends it in one line, with status 130.

The handler of Ctrl-C comes before all other imports: loading PyTorch takes seconds.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
"""128 + SIGINT, the status of a command that Ctrl-C ended."""
_running = False
"""True while a command runs that can save its results after Ctrl-C."""
_presses = 0


def _pressed(_: int, frame: FrameType | None) -> None:
    """Interrupt the command twice: to write its results, and to stop writing. Otherwise end the process."""
    global _presses
    _presses += 1
    if _running and _presses <= 2 and not _is_importing(frame):
        raise KeyboardInterrupt
    _leave()


def _leave() -> NoReturn:
    """End the process at once: Python's own exit could be interrupted again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):  # standard error may be closed
        os.write(2, b"rankwise: interrupted\n")
    os._exit(INTERRUPTED)


def _is_importing(frame: FrameType | None) -> bool:
    """Return True during an import: an exception in PyTorch's import can abort in C++."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def main() -> None:
    """Run a command."""
    global _running
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # under nohup SIGINT stays ignored
        signal.signal(signal.SIGINT, _pressed)
    from rankwise.cli import main as run

    try:
        _running = True
        run()
    except BaseException as error:
        _running = False
        status = error.code if isinstance(error, SystemExit) else INTERRUPTED
        if status == INTERRUPTED and (_presses or isinstance(error, SystemExit)):
            with suppress(OSError):  # the reader of standard output may be closed
                sys.stdout.flush()
            _leave()  # whatever the interrupt became on its way up
        raise


if __name__ == "__main__":
    main()
