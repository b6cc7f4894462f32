"""Pieces of a call on several threads: who waits, who is told, and what becomes of failures."""

import threading
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from tssa_cases import Case, outputs_and_gradients

from rankwise.ops import TSSAState, tssa
from rankwise.ops.tssa.cpu import (
    arrays,
    bidirectional_back_loops,
    bidirectional_loops,
    causal,
    relay,
    threads,
)
from rankwise.ops.tssa.cpu import causal_loops as loops
from rankwise.ops.tssa.cpu.relay import board, post, posted, take, there

MANY, SUMS, BEHIND, OUTPUT = 12, 13, 16, -3  # where these stand among what the compiled loop takes
UNWRITTEN = -7.0
CASE = Case(shape=(1, 700, 3, 5), causal=True, masked=True, decayed=True, stated=True)
LINES = Case(shape=(1, 700, 3, 20), causal=True, dtype=torch.float32)
DECAYED_LINES = Case(shape=(1, 700, 3, 20), causal=True, decayed=True, dtype=torch.float32)
MASKED_LINES = Case(shape=(1, 700, 3, 23), causal=True, masked=True, decayed=True, dtype=torch.float32)
BOTH_WAYS = Case(shape=(1, 700, 3, 5), masked=True)
SOME_SHORT = Case(shape=(1, 700, 3, 5), cuts=(0, 330, 330, 331, 333, 700))


@pytest.fixture(autouse=True)
def two_threads_and_pieces_of_a_chunk(monkeypatch):
    monkeypatch.setattr(arrays, "CACHED", 1)
    monkeypatch.setattr(arrays, "PIECE", 1)
    monkeypatch.setattr(threads, "SMALL", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_piece_is_taken_once():
    places, taken = board(5), []

    def work() -> None:
        while (piece := take(places)) < 500:
            taken.append(piece)

    crew = [threading.Thread(target=work) for _ in range(4)]
    for one in crew:
        one.start()
    for one in crew:
        one.join()
    assert sorted(taken) == list(range(500))


@pytest.mark.parametrize("reached", [posted, there], ids=["waits", "looks"])
def test_a_stage_is_reached_when_it_is_posted_and_not_before(reached):
    places = board(2)
    assert not reached(places, 1, 1)
    post(places, 1, 1)
    assert reached(places, 1, 1)
    assert not reached(places, 1, 2)
    assert not reached(places, 0, 1)
    post(places, 1, 2)
    assert reached(places, 1, 1)


def recorded(monkeypatch, case: Case, loops: ModuleType = loops, name: str = "forward") -> Callable[[], list]:
    """Makes the arguments that a call on two threads hands to its compiled loop, new each time."""
    found = []

    def noted(*given) -> bool:
        found.append([part.copy() if isinstance(part, np.ndarray) else part for part in given])
        return loop(*given)

    loop = getattr(loops, name)
    with monkeypatch.context() as patch:
        patch.setattr(loops, name, noted)
        patch.setattr(relay, "together", lambda work, workers: work(lambda: False))
        outputs_and_gradients(case, "cpu") if name == "backward" else case.run("cpu")
    found[0][OUTPUT][:] = UNWRITTEN
    return lambda: [part.copy() if isinstance(part, np.ndarray) else part for part in found[0]]


@pytest.mark.parametrize("many", [False, True], ids=["two", "many"])
@pytest.mark.parametrize("case", [CASE, LINES, DECAYED_LINES], ids=["rows", "lines", "decayed lines"])
def test_threads_in_any_order_give_the_same_numbers(monkeypatch, many, case):
    """Two hands take turns; each piece is begun before the one it goes on from."""
    fresh = recorded(monkeypatch, case)
    wanted, got = fresh(), fresh()
    wanted[MANY] = got[MANY] = many
    assert len(wanted[7]) > 4  # pieces
    assert loops.forward(*wanted)
    assert not (wanted[OUTPUT] == UNWRITTEN).any()

    got[-2][0] = 2  # the first two are taken, each by a hand
    hands = [[*got[:-1], np.array([piece, 0])] for piece in (1, 0)]
    assert not loops.forward(*hands[0])
    assert hands[0][-1].tolist() == [1, loops.SQUARED]  # it has done what it could
    for _ in range(100):
        done = [loops.forward(*hand) for hand in reversed(hands)]
        if all(done):
            break
    assert all(done)
    for mine, theirs in zip(got[SUMS:-2], wanted[SUMS:-2], strict=True):  # sums, memberships, output
        assert np.array_equal(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("workers", [2, 3])
def test_more_than_two_threads_are_many(monkeypatch, workers):
    torch.set_num_threads(workers)
    assert recorded(monkeypatch, CASE)()[MANY] == (workers > 2)


@pytest.mark.parametrize("case", [CASE, LINES, DECAYED_LINES, MASKED_LINES], ids=lambda case: str(case.shape))
def test_squares_are_the_same_bits_ahead_of_scores_and_with_them(monkeypatch, case):
    """In several chunks: which way a piece goes depends on who is first."""
    given = recorded(monkeypatch, case)()
    (w, offset, temperature, mask, *decay), eps, score, membership = given[:7], given[10], *given[-5:-3]
    before, ahead, along, unused = (np.full(w.shape[1:], each) for each in (1.0, 0.0, 0.0, 0.0))
    loops.energies(w, mask, *decay, 0, 500, ahead)
    read = (w, offset, temperature, mask, *decay, 0, 500, eps)
    real = loops.assign(*read, before, along, score, membership, False, unused, unused[:, :1].copy())
    assert real == (mask[:500].sum() if mask.size else 500)
    assert np.array_equal(ahead, along)
    assert (ahead > 0).all()


@pytest.mark.parametrize("many", [False, True], ids=["two", "many"])
def test_a_piece_that_waits_twice_goes_on_where_it_was(monkeypatch, many):
    """The one before it gets as far as its scores, then to its end; only tokens behind are compared."""
    fresh = recorded(monkeypatch, CASE)
    wanted, got = fresh(), fresh()
    wanted[MANY] = got[MANY] = many
    assert loops.forward(*wanted)
    places, spot = got[-2:]
    places[0], spot[:] = 2, (1, 0)
    got[BEHIND][0] = wanted[BEHIND][0]
    post(places, 0, loops.SQUARED)
    assert not loops.forward(*got)
    assert spot.tolist() == [1, loops.ASSIGNED]
    for part in (BEHIND + 1, BEHIND + 2):
        got[part][0] = wanted[part][0]
    post(places, 0, loops.ASSIGNED)
    assert loops.forward(*got)
    assert np.array_equal(got[OUTPUT][arrays.CHUNK :], wanted[OUTPUT][arrays.CHUNK :])
    assert all(np.array_equal(got[part], wanted[part]) for part in range(SUMS, BEHIND))


OWNER = {"forward": 5, "backward": 9}  # where it stands
TURNS = pytest.mark.parametrize(
    ("loops", "name"),
    [(bidirectional_loops, "forward"), (bidirectional_back_loops, "backward")],
    ids=["forward", "backward"],
)


@TURNS
@pytest.mark.parametrize("case", [BOTH_WAYS, SOME_SHORT], ids=["masked", "packed"])
def test_whoever_needs_the_sums_of_a_late_piece_waits(monkeypatch, loops, name, case):
    """One hand holds the first piece of a sequence, then the other does."""
    fresh = recorded(monkeypatch, case, loops, name)
    loop, wanted, got = getattr(loops, name), fresh(), fresh()
    assert loop(*wanted)
    assert not (wanted[OUTPUT] == UNWRITTEN).any()
    pieces = len(wanted[-2]) - 1
    assert pieces > 4

    got[-2][0] = 1
    late, early = ([*got[:-1], np.array([held])] for held in (0, -1))
    assert not loop(*early)
    assert early[-1][0] == pieces  # the second turn of the first piece
    assert not loop(*late)
    assert late[-1][0] == 2 * pieces
    assert loop(*early)
    assert loop(*late)
    for mine, theirs in zip(got[:-2], wanted[:-2], strict=True):
        assert np.array_equal(mine, theirs, equal_nan=True)


@TURNS
def test_a_sequence_in_one_piece_waits_for_nobody(monkeypatch, loops, name):
    fresh = recorded(monkeypatch, SOME_SHORT, loops, name)
    loop, wanted, got = getattr(loops, name), fresh(), fresh()
    assert loop(*wanted)
    owner = wanted[OWNER[name]]
    (piece,) = np.flatnonzero(owner == 2)
    got[-2][0] = 3 * len(owner)  # nothing is left to take
    assert loop(*got[:-1], np.array([piece]))
    token = slice(330, 331)
    assert np.array_equal(got[OUTPUT][token], wanted[OUTPUT][token])
    assert not (got[OUTPUT][token] == UNWRITTEN).any()


@TURNS
def test_a_sequence_in_one_piece_has_its_turns_once(monkeypatch, loops, name):
    got = recorded(monkeypatch, Case(shape=(40, 7, 3, 5)), loops, name)()
    pieces = len(got[OWNER[name]])
    assert pieces == 40
    got[-2][0] = pieces  # the first turns are taken
    assert getattr(loops, name)(*got[:-1], np.array([-1]))
    assert (got[OUTPUT] == UNWRITTEN).all()


@pytest.mark.parametrize("case", [CASE, BOTH_WAYS, SOME_SHORT], ids=["causal", "masked", "packed"])
def test_runs_do_not_differ(case):
    first = outputs_and_gradients(case, "cpu")
    for _ in range(20):
        again = outputs_and_gradients(case, "cpu")
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize(
    ("loops", "case"), [(loops, CASE), (bidirectional_loops, BOTH_WAYS)], ids=["causal", "bidirectional"]
)
def test_an_interrupt_of_one_thread_ends_the_others(monkeypatch, loops, case):
    """It holds a piece, so the others would wait for that for ever."""
    holder, naps = [], []

    def take_and_never_do(*given) -> bool:
        if holder:
            return loop(*given)
        holder.append(threading.get_ident())
        take(given[-2])
        return False

    def nap(seconds: float) -> None:
        if threading.get_ident() in holder:
            raise KeyboardInterrupt
        naps.append(seconds)
        if len(naps) > 1000:
            raise TimeoutError

    loop = loops.forward
    monkeypatch.setattr(loops, "forward", take_and_never_do)
    monkeypatch.setattr(relay, "sleep", nap)
    with pytest.raises(KeyboardInterrupt):
        case.run("cpu")
    assert len(naps) < 1000


@pytest.fixture
def cuts(monkeypatch) -> list[arrays.Pieces]:
    """The pieces of every call."""
    found, cut = [], causal.relay_pieces

    def noted(problem):
        found.append(cut(problem)[0])
        return found[-1], 2

    monkeypatch.setattr(causal, "relay_pieces", noted)
    return found


def test_what_is_kept_of_pieces_does_not_grow_with_the_text(cuts):
    for tokens in (4_096, 16_384, 65_536):
        Case(shape=(1, tokens, 1, 1), causal=True).run("cpu")
    most = 2 * arrays.MOST
    assert [most // 2 <= len(pieces.first) <= most + 1 for pieces in cuts] == [True] * 3


def test_a_long_sequence_among_short_ones_is_cut_and_short_ones_are_not(cuts):
    Case(shape=(1, 700, 3, 5), causal=True, cuts=(0, 1, 1, 3, 33, 700)).run("cpu")
    assert np.bincount(cuts[0].owner).tolist() == [1, 0, 1, 1, 11]
    assert cuts[0].first.tolist() == [0, *cuts[0].last[:-1]]
    assert cuts[0].last[-1] == 700


def test_rows_that_can_be_shared_out_evenly_stay_whole(cuts):
    Case(shape=(2, 700, 3, 5), causal=True).run("cpu")
    assert cuts[0].last.tolist() == [700, 1400]
    Case(shape=(3, 700, 3, 5), causal=True).run("cpu")
    assert np.bincount(cuts[1].owner).tolist() == [11, 11, 11]
    torch.set_num_threads(1)
    Case(shape=(3, 700, 3, 5), causal=True).run("cpu")
    assert cuts[2].last.tolist() == [700, 1400, 2100]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_tokens_are_counted_in_int64(dtype):
    state = TSSAState.zeros(1, 2, 3)._replace(seen=torch.tensor([100], dtype=dtype))
    seen = tssa(torch.ones(1, 100, 2, 3), torch.ones(2), causal=True, state=state).state.seen
    assert seen.dtype == torch.int64
    assert seen.tolist() == [200]


def test_an_interrupt_before_a_callback_begins_is_not_lost(monkeypatch):
    """Ctypes prints what is raised as it enters a callback and goes on."""
    monkeypatch.setattr(threads, "_torch_threads", lambda: lambda work, data, workers, flags: None)
    with pytest.raises(KeyboardInterrupt):
        threads.together(lambda stopped: None, 2)
    assert not threads._jobs
