"""Error classes for users, and checks that raise them with subject, expected and actual value, and fix."""

import unicodedata
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended: 128 plus 2, the number of the signal SIGINT."""

_CONTROL = {"Cc", "Cf", "Cs", "Zl", "Zp"}


class RankwiseError(ValueError):
    """Base class of all errors that a user can fix. Their text is "SUBJECT: expected X, got Y. FIX"."""

    def __init__(self, subject: str, *, expected: str, got: str, fix: str) -> None:
        self.subject, self.expected, self.got, self.fix = subject, expected, got, fix
        stop = "" if got.endswith(".") else "."  # messages of other libraries may end in a full stop
        message = f"{subject}: expected {expected}, got {got}{stop} {fix}".rstrip()
        super().__init__("\n".join(map(strip_control, message.split("\n"))))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle needs to restore the error, including its keyword arguments."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ShapeError(RankwiseError):
    """A tensor or operator has the wrong shape or dtype."""


class CaptureError(RankwiseError):
    """The mixing matrices (operators) of a model cannot be captured."""


class SkipError(RankwiseError):
    """λ-skips cannot be added, removed, saved or loaded."""


class CompressionError(RankwiseError):
    """A model cannot be compressed, or compressed weights cannot be saved or loaded."""


class InputError(RankwiseError):
    """A text, image, data set, model, folder or argument cannot be used."""


class RecordError(RankwiseError):
    """A saved file does not have the expected content."""


def one_of(subject: str, value: T, known: Iterable[T], *, error: type[RankwiseError] = InputError) -> T:
    """Return ``value`` if it is in ``known``; otherwise raise an error that suggests similar known values.

    Examples:
        >>> one_of("`mask`", "causal", ["full", "causal"])
        'causal'
    """
    choices = list(known)
    if not any(type(choice) is type(value) and choice == value for choice in choices):
        names = [str(choice) for choice in choices]
        listed = f"one of {', '.join(names)}" if len(names) <= 8 else "a known name"
        fix = did_you_mean(str(value), names) or "Change it."
        raise error(subject, expected=listed, got=repr(value), fix=fix)
    return value


def in_range(
    subject: str, value: int | float, interval: str, *, fix: str = "", error: type[RankwiseError] = InputError
) -> float:
    """Return ``value`` if it is in an interval such as "(0, 1]" or "[0, inf)"; otherwise raise an error.

    NaN and booleans are in no interval.

    Examples:
        >>> in_range("`keep`", 0.5, "(0, 1]")
        0.5
    """
    low, high = (float(end) for end in interval[1:-1].split(","))
    real = isinstance(value, int | float) and not isinstance(value, bool)
    above = real and (value >= low if interval[0] == "[" else value > low)
    if not (above and (value <= high if interval[-1] == "]" else value < high)):
        shown = interval.replace("inf", "∞")
        raise error(subject, expected=f"a number in {shown}", got=repr(value), fix=fix or "Change it.")
    return value


def whole_number(
    subject: str,
    value: int,
    least: int = 1,
    most: int | None = None,
    *,
    fix: str = "",
    error: type[RankwiseError] = InputError,
) -> int:
    """Return ``value`` if it is an integer from ``least`` to ``most``; otherwise raise an error.

    A boolean does not count as an integer. If ``most`` is None, there is no upper limit.

    Examples:
        >>> whole_number("`every`", 500)
        500
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        limits = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise error(subject, expected=f"a whole number {limits}", got=repr(value), fix=fix or "Change it.")
    return value


def instance_of(
    subject: str,
    value: T,
    kind: type | tuple[type, ...],
    expected: str,
    *,
    fix: str,
    error: type[RankwiseError] = InputError,
) -> T:
    """Return ``value`` if it is an instance of ``kind``; otherwise raise an error with text ``expected``."""
    if not isinstance(value, kind):
        raise error(subject, expected=expected, got=type(value).__name__, fix=fix)
    return value


def need_package(name: str, subject: str, extra: str) -> ModuleType:
    """Import and return an optional package. Raise InputError with the pip command if it is missing."""
    try:
        return import_module(name)
    except ImportError as error:
        raise InputError(
            subject,
            expected=f"the package {name}",
            got=first_line(error),
            fix=f"pip install 'rankwise[{extra}]'.",
        ) from error


def readable_file(path: str | Path, kind: str, *, fix: str = "Check the path.") -> bytes:
    """Return the bytes of a file. Raise InputError if it is missing, a folder or not readable."""
    path = Path(path)
    try:
        return path.read_bytes()
    except OSError as error:
        # The class of the error is not enough, because Windows raises PermissionError for a folder.
        got = "a folder" if path.is_dir() else "no such file" if not path.exists() else first_line(error)
        raise InputError(str(path), expected=kind, got=got, fix=fix) from error


def strip_control(name: str) -> str:
    r"""Replace line breaks and control characters, such as terminal escape sequences, with the mark �.

    Examples:
        >>> strip_control("layer\x1b[31m")
        'layer�[31m'
    """
    return "".join("�" if unicodedata.category(c) in _CONTROL else c for c in name)


def described(value: object) -> str:
    """Return the type of a value, and its shape if it has one, for error messages."""
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} {tuple(shape)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return text that suggests similar names and lists up to 24 known names. Return "" without known names.

    Examples:
        >>> did_you_mean("COLAPSE", ["COLLAPSE", "SINK"])
        'Did you mean COLLAPSE? Known: COLLAPSE, SINK.'
    """
    names = sorted(name for name in known if name)  # omits the root module, whose name is empty
    near = get_close_matches(name, names, n=3, cutoff=0.6)
    guess = f"Did you mean {' or '.join(near)}?" if near else ""
    listing = f"Known: {', '.join(names[:24])}{' …' if len(names) > 24 else ''}." if names else ""
    return " ".join(part for part in (guess, listing) if part)
