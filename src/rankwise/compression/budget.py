"""One budget over several parts: bytes are taken where they cost the model's outputs least, measured.

The unit of what is saved is the byte: of all weights, and of the cache at a number of tokens. The unit of
what it costs is that of `OutputPrice`. Each part is tried alone at some shares on the model as it is; between
them its price is taken on the lower hull, as widths of heads are. What the first part gets is done, and the
others are tried again on the model that it left.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from rankwise._internals.forward import device_of, first_sequences, to_device
from rankwise.compression.latency import longest_input
from rankwise.compression.output_price import OutputPrice
from rankwise.compression.outputs import cache_bytes
from rankwise.compression.parts import Job, PartResult, Prepared, parts
from rankwise.compression.qk_solve import widths_for_tolerance, widths_under_budget
from rankwise.compression.records import Budget, PartShare
from rankwise.errors import CompressionError

SHARES = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0.2, 0.125, 0.06)
"""At which each part is tried."""
STEP = 0.02
"""By which a share changes until its whole numbers fit."""
NEARLY_ALL = 0.99
"""A share from which a part is left as it is."""
UNITS = 10**9
"""Of the logarithm of a share, so that it is a whole number."""
LONGEST = 2048
"""Tokens of the cache that count, at most, where nobody says how many."""


@dataclass(frozen=True)
class Offer:
    """What a part can leave of the model as it is, and what that costs."""

    keeps: list[float]
    """Shares, ascending; the last is 1."""
    left: list[int]
    """Bytes of the model and its cache at each, ascending."""
    prices: list[float]
    """Added to what was paid before."""

    def keep_at(self, bytes_left: int) -> float:
        """The share that leaves so many bytes.

        Args:
            bytes_left: of the model and its cache.
        """
        for (low, below), (high, above) in pairwise(zip(self.left, self.keeps, strict=True)):
            if bytes_left <= high:
                return below + (above - below) * max(0.0, (bytes_left - low) / (high - low))
        return 1.0


class SharedBudget:
    """What is spent on the parts of a model, and what is left of it.

    Args:
        job: what to do; ``keep`` is a share of the bytes, ``tolerance`` the price of all parts together.
        tokens: of the cache that count.
    """

    def __init__(self, job: Job, tokens: int | None) -> None:
        self.job = job
        self.batch = to_device(first_sequences(job.batches[0], 1), device_of(job.model))
        self.tokens = tokens or min(longest_input(job.model) or LONGEST, LONGEST)
        self.price = OutputPrice(job.model, job.batches)
        self.has_cache = cache_bytes(job.model, self.batch) > 0
        self.start = self.memory()
        self.whole, self.layers, self.shares = 0, 0, list[PartShare]()

    def memory(self) -> int:
        """Bytes of all weights, and of the cache."""
        weights = sum(weight.numel() * weight.element_size() for weight in self.job.model.parameters())
        return weights + self.tokens * cache_bytes(self.job.model, self.batch)

    def do(self, names: list[str]) -> list[PartResult]:
        """Do the parts, each with the share that its price earns it.

        Under a tolerance, half of it is tried as well, and half of that, while this leaves fewer bytes: whole
        heads may spend at once what narrower layers would have saved more with.

        Args:
            names: in the order they are done.

        Raises:
            CompressionError: if a part cannot be done, or all together cannot save enough. The model is then
                as it was.
        """
        asked = self.job
        done = self._spend(names)
        while self.job.tolerance is not None and all(result.complete for result in done):
            left, shares = self.memory(), self.shares
            if left == self.start:
                break
            for result in reversed(done):
                result.undo()
            self.job, self.shares = replace(self.job, tolerance=self.job.tolerance / 2), []
            tried = self._spend(names)
            if self.memory() < left:
                done = tried
                continue
            for result in reversed(tried):
                result.undo()
            for result in done:
                result.redo()
            self.shares = shares
            break
        self.job = asked
        return done

    def _spend(self, names: list[str]) -> list[PartResult]:
        """Do the parts once within the budget of the job; if that fails, the model is as it was."""
        done: list[PartResult] = []
        try:
            for at, name in enumerate(names):
                ready = {other: parts()[other](self.job) for other in names[at:]}
                if not self.whole:
                    self._count(ready)
                offers = {other: self._offer(other, prepared) for other, prepared in ready.items()}
                done.append(self._do(name, ready[name], offers))
        except BaseException:
            for result in reversed(done):
                result.undo()
            raise
        return done

    def record(self) -> Budget:
        """What was asked, shared out and paid."""
        return Budget(
            keep=self.job.keep,
            tolerance=self.job.tolerance,
            unit=self.price.unit,
            cache_tokens=self.tokens if self.has_cache else 0,
            layers=self.layers,
            bytes_before=self.whole,
            bytes_after=self.whole - (self.start - self.memory()),
            shares=self.shares,
            price=self.price.now(),
        )

    def _count(self, ready: dict[str, Prepared]) -> None:
        """Bytes that ``keep`` is a share of: the linear layers that parts make smaller, and the cache."""
        names = set().union(*(prepared.linear for prepared in ready.values()))
        weights = {
            id(weight): weight.numel() * weight.element_size()
            for name in names
            for weight in self.job.model.get_submodule(name).parameters()
        }
        self.layers = len(names)
        self.whole = sum(weights.values()) + self.tokens * cache_bytes(self.job.model, self.batch)

    def _offer(self, name: str, prepared: Prepared) -> Offer:
        """Try a part at some shares, in closed form, without steps of calibration."""
        paid = self.price.now()
        points = [(self.memory(), 1.0, 0.0)]
        for keep in SHARES:
            self.job.on_step(f"trying {name} at {keep:g}")
            try:
                change = prepared.change(keep)
            except CompressionError:  # too little for one direction of each head or layer
                continue
            change.apply()
            try:
                points.append((self.memory(), keep, max(0.0, self.price.now() - paid)))
            finally:
                change.undo()
        points = sorted(point for point in points if point[0] < points[0][0]) + points[:1]
        points = [point for at, point in enumerate(points) if at == 0 or point[0] > points[at - 1][0]]
        left, keeps, prices = zip(*points, strict=True)
        return Offer(list(keeps), list(left), list(prices))

    def _do(self, name: str, prepared: Prepared, offers: dict[str, Offer]) -> PartResult:
        now, paid = self.memory(), self.price.now()
        wanted = self._bytes_left(now, paid, offers)[name]
        keep = self._fitting(prepared, offers[name], wanted, self._most_left(name, now, offers))
        keep, result = self._finished(prepared, keep)
        if result is None:
            result = PartResult(notes=[f"{name}: left as it is: at this budget it costs too much."])
        self.shares.append(
            PartShare(part=name, keep=keep, bytes_saved=now - self.memory(), price=self.price.now() - paid)
        )
        return result

    def _finished(self, prepared: Prepared, keep: float) -> tuple[float, PartResult | None]:
        """Do a part for good, and measure its price again: heads are then chosen in rounds, anew.

        Above the tolerance it is taken back, and half as much is tried; None where nothing is within it.
        """
        while keep < 1:
            result = prepared.finish(replace(self.job, keep=keep, tolerance=None))
            if self.job.tolerance is None or self.price.now() <= self.job.tolerance:
                return keep, result
            result.undo()
            keep = (1 + keep) / 2 if keep < NEARLY_ALL else 1.0
        return 1.0, None

    def _fitting(self, prepared: Prepared, offer: Offer, wanted: int, most: int) -> float:
        """The share for some bytes; widths and heads are whole numbers, so that it is looked for in steps.

        Under ``keep`` no more than ``most`` bytes are left: what other parts cannot make up for. Under a
        tolerance it costs no more than that, and is 1 where nothing does.
        """
        keep, step = offer.keep_at(wanted), -STEP if self.job.tolerance is None else STEP
        while offer.keeps[0] <= keep < 1 or (step < 0 and keep == 1):
            change = prepared.change(keep)
            change.apply()
            try:
                fits = self.memory() <= most if step < 0 else self.price.now() <= (self.job.tolerance or 0)
            finally:
                change.undo()
            if fits:
                break
            keep += step
        return min(max(keep, offer.keeps[0]), 1.0)

    def _most_left(self, name: str, now: int, offers: dict[str, Offer]) -> int:
        """Bytes that a part may leave, given all that the parts behind it can save."""
        if self.job.keep is None:
            return now
        room = round((1 - self.job.keep) * self.whole) - (self.start - now)
        whole = self.whole - (self.start - now)
        others = self._together(now, [offer.left[0] for other, offer in offers.items() if other != name])
        return now - math.ceil((room - others) / (1 - others / whole))

    def _bytes_left(self, now: int, paid: float, offers: dict[str, Offer]) -> dict[str, int]:
        """Bytes that each part, alone, is to leave, so that all together meet the budget.

        Parts work on the same bytes: what one has taken another cannot save. Shares that are left multiply,
        so that their logarithms add up, as widths of heads do.
        """
        whole = self.whole - (self.start - now)
        logs = [[_log(1 - (now - left) / whole) for left in offer.left] for offer in offers.values()]
        curves = [(own, offer.prices) for own, offer in zip(logs, offers.values(), strict=True)]
        if self.job.tolerance is not None:
            chosen = widths_for_tolerance(curves, max(self.job.tolerance - paid, 0.0) / len(curves))
        else:
            assert self.job.keep is not None
            room = round((1 - self.job.keep) * self.whole) - (self.start - now)  # still to be saved
            most = self._together(now, [offer.left[0] for offer in offers.values()])
            if most < room:
                raise self._too_little(self.start - now + most)
            least = sum(own[0] for own in logs)
            chosen = widths_under_budget(curves, max(_log(1 - room / whole), least))
        left = [now - math.ceil(whole * (1 - math.exp(log / UNITS))) for log in chosen]
        return dict(zip(offers, left, strict=True))

    def _together(self, now: int, left: list[int]) -> int:
        """What parts save one behind the other, given what each leaves alone: later ones find less."""
        whole = self.whole - (self.start - now)
        share = 1.0
        for own in left:
            share *= 1 - (now - own) / whole
        return round(whole * (1 - share))

    def _too_little(self, saved: int) -> CompressionError:
        cache = f" and the cache of {self.tokens:,} tokens" if self.has_cache else ""
        return CompressionError(
            "`keep`",
            expected=f"at least {1 - saved / self.whole:.3g} of the {self.whole:,} bytes that these parts "
            "work "
            f"on: {self.layers} linear layers{cache}",
            got=f"{self.job.keep:g}",
            fix="Keep more, or name more parts.",
        )


def _log(share: float) -> int:
    """The logarithm of a share of bytes that is left, as a whole number."""
    return math.floor(UNITS * math.log(max(share, 1e-9)))
