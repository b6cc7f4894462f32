"""What a head's record shows of single sequences: mask, spectrum, map, matrices, names of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rankwise.auditing.masks import Pattern
from rankwise.auditing.matrix_picture import MatrixPicture
from rankwise.auditing.merge_records import most_common
from rankwise.auditing.numbers import Measured
from rankwise.auditing.pictures import patch_grid
from rankwise.auditing.token_names import commonest, name_counts


@dataclass
class SingleSequences:
    """What is shown of the heads of one call of one mixer."""

    longest: int = 0
    """Tokens of the longest sequence: the mask is that of it."""
    patterns: list[Pattern] = field(default_factory=list)
    spectra: list[list[float]] = field(default_factory=list)
    maps: list[list[float]] = field(default_factory=list)
    picture: tuple[int, int] | None = None
    """Height and width of what the model was given, where that is pictures."""
    peaks: list[list[list[str]]] = field(default_factory=list)
    """What the token at the peak of each head is called, sequence by sequence."""
    pictures: list[dict[int, MatrixPicture]] = field(default_factory=list)
    """Of the first sequences, each by the place of the head."""

    def add(self, numbers: Sequence[Measured], found: "SingleSequences") -> None:
        """Take the sequences of a batch into account.

        Args:
            numbers: what was measured of each window.
            found: what else the batch gave: names, pictures.
        """
        for window in numbers:
            if window.values[0, 0] > self.longest:
                self.longest, self.patterns = int(window.values[0, 0]), window.patterns
            self.spectra = self.spectra or window.spectra
            self.maps = self.maps or window.maps
        self.picture = found.picture
        self.peaks += found.peaks
        self.pictures += found.pictures

    def shown(self, head: int) -> dict[str, Any]:
        """Fields of the record of a head.

        Args:
            head: its place.
        """
        peak, agreeing = commonest(name_counts(self._named(head)), len(self._named(head)))
        first, second = ([taken.get(head) for taken in self.pictures] + [None, None])[:2]
        return {
            "mask": self.patterns[head].name if self.patterns else "full",
            "membership_map": self.maps[head] if self.maps else [],
            "membership_grid": self._map_grid(head),
            "spectrum": self.spectra[head] if self.spectra else [],
            "max_token": peak,
            "max_token_sequences": agreeing,
            "picture": first,
            "second_picture": second,
        }

    def merging(self, head: int) -> dict[str, Any]:
        """Fields of what a merged record needs of it.

        Args:
            head: its place.
        """
        named = self._named(head)
        return {"longest": self.longest, "named": len(named), "names": most_common(name_counts(named))}

    def _named(self, head: int) -> list[list[str]]:
        return [names[head] for names in self.peaks if names[head]]

    def _map_grid(self, head: int) -> tuple[int, int] | None:
        """Of a whole map: the first tokens of a longer sequence are no picture."""
        tokens = len(self.maps[head]) if self.maps else 0
        return patch_grid(tokens, self.picture) if 0 < tokens == self.longest else None
