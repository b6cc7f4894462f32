"""Run the command `rankwise` or `python -m rankwise`. Ctrl-C ends the command with one line and status 130.

The handler for Ctrl-C is defined before PyTorch is imported, because this import takes seconds.
"""

import codecs
import io
import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from rankwise.errors import INTERRUPTED

_running = False
"""True while a command runs that can still save its results after Ctrl-C."""
_presses = 0
_last = -1.0
PLAIN = {"λ": "lambda", "μ": "mu", "×": "x", "≤": "<=", "≥": ">=", "→": "->", "−": "-", "–": "-", "…": "..."}
"""Replacements of characters that a terminal or pipe cannot encode; other such characters become "?"."""
TWICE = 0.25
"""Seconds in which signals count as one press: `timeout -s INT` signals the process and then its group."""


def _pressed(_: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: the first press lets a command save results, the second ends saving, the third exits.

    The first press already exits if no command runs, or if Python is importing a module.
    """
    global _presses, _last
    now = time.monotonic()
    if _presses and now - _last < TWICE:
        return
    _presses, _last = _presses + 1, now
    if _running and _presses <= 2 and not _is_importing(frame):
        raise KeyboardInterrupt
    _leave()


def _leave() -> NoReturn:
    """End the process at once, because another Ctrl-C could interrupt Python's normal exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # If this module is not imported yet, no folder was created, and `list` does nothing.
    getattr(sys.modules.get("rankwise.cli.output"), "remove_empty_folders", list)()
    with suppress(OSError):  # standard error may be closed
        os.write(2, b"rankwise: interrupted\n")
    os._exit(INTERRUPTED)


def _is_importing(frame: FrameType | None) -> bool:
    """Return True while Python imports a module, because an error in PyTorch's import can crash Python."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Return replacements of characters that cannot be encoded, and the index after these characters."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


def main() -> None:
    """Run the command line with a handler for Ctrl-C. Replace characters that the output cannot encode."""
    global _running
    codecs.register_error("plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # without a console, the stream is None
            stream.reconfigure(errors="plain")
    # a script ignores SIGINT for the jobs that it starts with &, and such jobs must keep ignoring it
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _pressed)
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        # If other programs use some cores, waiting threads that spin would take cores from working threads.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    from rankwise.cli import main as run

    try:
        _running = True
        run()
    except BaseException as error:
        _running = False
        status = error.code if isinstance(error, SystemExit) else INTERRUPTED
        if status == INTERRUPTED and (_presses or isinstance(error, SystemExit)):
            with suppress(OSError):  # standard output may be a pipe that is closed already
                sys.stdout.flush()
            _leave()  # even if a library turned KeyboardInterrupt into another exception
        raise


if __name__ == "__main__":
    main()
