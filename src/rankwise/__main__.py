"""The command `rankwise`, also `python -m rankwise`. Ctrl-C ends it with one line and status 130.

The handler for Ctrl-C is defined before slow imports, because importing PyTorch takes seconds.
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
"""What is printed for a character that the encoding of the terminal or pipe lacks; otherwise "?"."""
TWICE = 0.25
"""Signals within so many seconds are one press: `timeout -s INT` signals the process, then its group."""


def _pressed(_: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: the first lets the command save results, the second stops saving, the third exits."""
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
    # the module may not be imported yet
    getattr(sys.modules.get("rankwise.cli.output"), "remove_empty_folders", list)()
    with suppress(OSError):  # standard error may be closed
        os.write(2, b"rankwise: interrupted\n")
    os._exit(INTERRUPTED)


def _is_importing(frame: FrameType | None) -> bool:
    """Return True while Python imports a module: an error while PyTorch is imported can crash Python."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Return what is printed for characters that cannot be encoded, and the place after them."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


def main() -> None:
    """Run the command line with a handler for Ctrl-C, and with output that any encoding can hold."""
    global _running
    codecs.register_error("plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None without a console
            stream.reconfigure(errors="plain")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # under nohup SIGINT is ignored
        signal.signal(signal.SIGINT, _pressed)
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        # Threads that spin while they wait take the cores from each other if other programs use some of them.
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
            _leave()  # libraries may have turned KeyboardInterrupt into another exception
        raise


if __name__ == "__main__":
    main()
