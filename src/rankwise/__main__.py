"""The command `rankwise`, also `python -m rankwise`: Ctrl-C ends it in one line, with status 130.

Nothing is imported here before Ctrl-C is looked after: loading PyTorch takes seconds.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

INTERRUPTED = 130
"""128 + SIGINT, what a shell gives a command that Ctrl-C ended."""
ANSWERED = 2
"""Times Ctrl-C may interrupt a command: once to write what it has, once more to leave that as well."""


class Interrupts:
    """What Ctrl-C does: it interrupts a command that runs, and ends a process that has none to interrupt."""

    def __init__(self) -> None:
        self.count = 0
        self.running = False
        """Whether a command is there that can put its files in order."""
        self._leaving = False

    def watch(self) -> None:
        """Take over Ctrl-C; not from a caller that has it ignored, such as nohup."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._pressed)
            sys.unraisablehook = self._lost

    def _pressed(self, _: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.running and self.count <= ANSWERED and not _is_importing(frame):
            raise KeyboardInterrupt
        self.leave()

    def _lost(self, what: "sys.UnraisableHookArgs") -> None:
        """An interrupt that came while Python tidied up cannot be raised: it ends the process."""
        if what.exc_type is KeyboardInterrupt:
            self.leave()
        sys.__unraisablehook__(what)

    def leave(self) -> None:
        """End the process, whatever it is in the middle of: Python's own way out can be interrupted again."""
        if not self._leaving:
            self._leaving = True
            with suppress(OSError):  # standard error may be closed
                os.write(2, b"rankwise: interrupted\n")
            os._exit(INTERRUPTED)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported: an exception there can end in C++, as an abort of PyTorch."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def main() -> None:
    """Run a command."""
    interrupts = Interrupts()
    interrupts.watch()
    from rankwise.cli import main as run

    status: Any = None
    interrupts.running = True
    try:
        run()
    except SystemExit as leaving:
        interrupts.running = False
        status = leaving.code
    except BaseException:
        interrupts.running = False
        if not interrupts.count:
            raise
        status = INTERRUPTED  # whatever an interrupt was turned into on its way
    interrupts.running = False
    if status == INTERRUPTED:
        with suppress(OSError):  # its reader may be gone
            sys.stdout.flush()
        interrupts.leave()
    sys.exit(status)


if __name__ == "__main__":
    main()
