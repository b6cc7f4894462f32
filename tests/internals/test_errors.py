"""Checks raise errors of one form, SUBJECT: expected X, got Y. FIX; every error can be pickled."""

import math
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.unchecked import unchecked

from rankwise import errors
from rankwise.auditing import Audit, AuditError, Provenance
from rankwise.errors import InputError, RankwiseError, SkipError, in_range, instance_of, one_of, whole_number

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "an unknown name": (
        lambda: one_of("`mask`", "casual", ["full", "causal"]),
        "`mask`: expected one of full, causal, got 'casual'. Did you mean causal? Known: causal, full.",
    ),
    "a name of another type": (
        lambda: one_of("`flag`", 1, [True, False]),
        "`flag`: expected one of True, False, got 1. Known: False, True.",
    ),
    **{
        f"{value} in {interval}": (
            partial(in_range, "`x`", value, interval, **fix),
            f"`x`: expected a number in {shown}, got {value}. {fix.get('fix', 'Change it.')}",
        )
        for value, interval, shown, fix in (
            (0.0, "(0, 1]", "(0, 1]", {"fix": "Pass a share."}),
            (1.5, "(0, 1]", "(0, 1]", {}),
            (math.nan, "(0, inf)", "(0, ∞)", {}),
            (math.inf, "(0, inf)", "(0, ∞)", {}),
        )
    },
    **{
        f"{value!r} as a whole number": (
            partial(whole_number, "`n`", value, *bounds),
            f"`n`: expected a whole number {shown}, got {value}. Change it.",
        )
        for value, bounds, shown in (
            (0, (), "of at least 1"),
            (9, (1, 8), "from 1 to 8"),
            (True, (), "of at least 1"),
        )
    },
    "another type": (
        lambda: instance_of("`model`", 3, str, "a name", fix="Pass one."),
        "`model`: expected a name, got int. Pass one.",
    ),
    "a missing package": (
        lambda: errors.need_package("no_such_package", "--ray", "ray"),
        "--ray: expected the package no_such_package, got No module named 'no_such_package'. "
        "pip install 'rankwise[ray]'.",
    ),
    "a missing file": (
        lambda: errors.readable_file("nowhere.txt", "a text"),
        "nowhere.txt: expected a text, got no such file. Check the path.",
    ),
    "a folder": (
        lambda: errors.readable_file(Path(__file__).parent, "a text"),
        f"{Path(__file__).parent}: expected a text, got a folder. Check the path.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_check_names_subject_and_fix(name: str) -> None:
    call, text = REFUSED[name]
    with unchecked(), pytest.raises(InputError) as refused:
        call()
    assert str(refused.value) == text


def test_a_check_returns_its_value(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"text")
    assert one_of("`mask`", "full", ["full", "causal"]) == "full"
    assert in_range("`keep`", 1.0, "(0, 1]") == 1.0
    assert in_range("`share`", 0.0, "[0, 1)") == 0.0
    assert whole_number("`every`", 8, 1, 8) == 8
    assert instance_of("`model`", "gpt2", str, "a name", fix="") == "gpt2"
    assert errors.need_package("math", "sums", "cpu") is math
    assert errors.readable_file(tmp_path / "a.txt", "a text") == b"text"


def test_a_check_raises_the_error_of_its_caller() -> None:
    with pytest.raises(SkipError):
        one_of("`kind`", "soft", ["fixed"], error=SkipError)


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RankwiseError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling(kind: type[RankwiseError]) -> None:
    error = kind("model", expected="a name", got="none", fix="Pass one.")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error) == "model: expected a name, got none. Pass one."
    assert (again.subject, again.expected, again.got, again.fix) == ("model", "a name", "none", "Pass one.")


def test_an_error_with_an_audit_survives_pickling() -> None:
    audit = Audit(provenance=Provenance(model="m", delta=0.01), heads=[], states=[], findings=[])
    error = AuditError(RankwiseError("model", expected="numbers", got="none", fix=""), audit)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (AuditError, "model: expected numbers, got none.")
    assert again.audit.model_dump_json() == audit.model_dump_json()


def test_messages_do_not_move_the_cursor_or_ring() -> None:
    error = InputError("layer\x1b[2J\x07", expected="a name", got="two\nlines\u202e", fix="\udcff")
    assert str(error) == "layer�[2J�: expected a name, got two\nlines�. �"
    str(pickle.loads(pickle.dumps(error))).encode()  # no lone surrogate is left
