"""Three turns of every piece, each but the first in need of what all pieces of its sequence did in the last.

Threads take the first turns of all pieces, then the second ones, then the third. The only piece of a sequence
needs nobody: it has all its turns at once, when it is taken first and in the cache.
"""

from typing import no_type_check

from rankwise.ops.tssa.cpu.compiled import inlined
from rankwise.ops.tssa.cpu.relay import posted, take

TURNS = 3


@inlined
@no_type_check
def relatives(owner, i):
    """The pieces of the same sequence: from low up to high."""
    low, high = i, i + 1
    while low > 0 and owner[low - 1] == owner[i]:
        low -= 1
    while high < len(owner) and owner[high] == owner[i]:
        high += 1
    return low, high


@inlined
@no_type_check
def next_turn(board, owner, spot):
    """A turn, its piece and that one's relatives; a turn of -1 when nothing is left.

    What ``spot`` holds comes again until that is set to -1.
    """
    while True:
        if spot[0] < 0:
            spot[0] = take(board)
        if spot[0] >= TURNS * len(owner):
            return -1, 0, 0, 0
        turn, i = spot[0] // len(owner), spot[0] % len(owner)
        low, high = relatives(owner, i)
        if turn == 0 or high - low > 1:
            return turn, i, low, high
        spot[0] = -1


@inlined
@no_type_check
def all_posted(board, low, high, turns):
    """Whether all pieces from low up to high have had that many turns; waits a little for each."""
    for piece in range(low, high):  # noqa: SIM110 - a compiled loop knows no all()
        if not posted(board, piece, turns):
            return False
    return True
