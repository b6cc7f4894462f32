"""Dashed contours that turn smoothly and keep apart, many pictures at a time.

Coordinates are (row, column) in pixels. A contour goes from joint to joint, ``dash + 2·margin`` apart;
between two joints lies a dash, ``margin`` away from both. Of two dashes that do not follow one another in a
contour, no points are nearer than 2·margin, the widest gap within a contour: whoever joins dashes across gaps
of 2·margin finds the contours.
"""

from typing import NamedTuple

import numpy as np

CANDIDATES = 24
"""Headings, or places, that a dash is drawn from."""
TRIES = 4
"""Attempts at a distractor before it is left out, as in the published generator."""


class Rule(NamedTuple):
    """Lengths in pixels, and the counts of dashes and of distractors.

    ``apart`` is between the beginnings of both contours. ``continuity`` c bends a contour by Δ with
    probability ∝ cos²(c Δ), |c Δ| < 90°.
    """

    size: int
    dash: int
    margin: int
    thickness: float
    radius: float
    apart: int
    continuity: float
    contour_length: int
    distractor_length: int
    distractors: int

    @property
    def step(self) -> int:
        """From joint to joint."""
        return self.dash + 2 * self.margin

    @property
    def border(self) -> int:
        """Pixels outside of the picture that a candidate may reach."""
        return 2 * self.step + self.apart

    @property
    def clearance(self) -> float:
        """Around a dash no point of another is tried: 2·margin, and what rounding to pixels can lose."""
        return 2 * self.margin + 1.0


class Dashes(NamedTuple):
    """Dashes of one index in many contours: where they begin, end, and which are there."""

    begin: np.ndarray
    end: np.ndarray
    there: np.ndarray

    def of(self, pictures: np.ndarray) -> "Dashes":
        """The dashes of some of the pictures.

        Args:
            pictures: which.
        """
        return Dashes(self.begin[pictures], self.end[pictures], self.there[pictures])


def draw_contours(draw: np.random.Generator, pictures: int, rule: Rule) -> tuple[list[Dashes], np.ndarray]:
    """Draw two contours and the distractors of each picture.

    Args:
        draw: the random numbers.
        pictures: how many.
        rule: of the contours.

    Returns:
        All dashes, and the tips (pictures, 2 contours, begin and end, 2) of both contours.
    """
    occupied = np.ones((pictures, rule.size + 2 * rule.border, rule.size + 2 * rule.border), dtype=bool)
    inside = slice(rule.border + 1, rule.border + rule.size - 1)
    occupied[:, inside, inside] = False
    dashes = _both_contours(draw, occupied, rule)
    tips = np.stack(
        [
            np.stack([dashes[contour].begin, dashes[2 * (rule.contour_length - 1) + contour].end], axis=1)
            for contour in (0, 1)
        ],
        axis=1,
    )
    for _ in range(rule.distractors):
        dashes += _distractor(draw, occupied, rule)
    return dashes, tips


def _both_contours(draw: np.random.Generator, occupied: np.ndarray, rule: Rule) -> list[Dashes]:
    """Grow two contours dash by dash, again and again until all pictures have theirs."""
    pictures, count = len(occupied), 2 * rule.contour_length
    begin, end = np.empty((count, pictures, 2)), np.empty((count, pictures, 2))
    pending = np.arange(pictures)
    while len(pending):
        tried = np.resize(pending, pictures)  # the fewer are left, the more attempts at each
        layers = [occupied[tried], occupied[tried]]
        made, layers, kept = _grow(draw, layers, _seeds(draw, pictures, rule), rule.contour_length, rule)
        done, first = np.unique(tried[kept], return_index=True)
        begin[:, done] = np.stack([dash.begin[first] for dash in made])
        end[:, done] = np.stack([dash.end[first] for dash in made])
        occupied[done] = layers[0][first] | layers[1][first]
        pending = np.setdiff1d(pending, done)
    return [Dashes(b, e, np.ones(pictures, dtype=bool)) for b, e in zip(begin, end, strict=True)]


def _seeds(draw: np.random.Generator, pictures: int, rule: Rule) -> list[np.ndarray]:
    """Where both contours may begin: the first in the middle, the second ``apart`` from it."""
    low = min(2 * rule.apart, rule.size // 2 - 2)
    first = draw.uniform(low, rule.size - low, (pictures, 1, 2))
    second = first + rule.apart * _unit(draw.uniform(0, 2 * np.pi, (pictures, 1)))
    return [np.broadcast_to(place, (pictures, CANDIDATES, 2)) for place in (first, second)]


def _distractor(draw: np.random.Generator, occupied: np.ndarray, rule: Rule) -> list[Dashes]:
    """Add a short contour to every picture that has room for it, and mark what it takes."""
    pictures, count = len(occupied), rule.distractor_length
    begin, end = np.zeros((count, pictures, 2)), np.zeros((count, pictures, 2))
    pending = np.arange(pictures)
    for _ in range(TRIES):
        places = draw.uniform(0, rule.size, (len(pending), CANDIDATES, 2))
        made, layers, kept = _grow(draw, [occupied[pending]], [places], count, rule)
        done = pending[kept]
        begin[:, done] = np.stack([dash.begin for dash in made])
        end[:, done] = np.stack([dash.end for dash in made])
        occupied[done] = layers[0]
        pending = np.setdiff1d(pending, done)
    there = ~np.isin(np.arange(pictures), pending)
    return [Dashes(b, e, there) for b, e in zip(begin, end, strict=True)]


def _grow(
    draw: np.random.Generator, layers: list[np.ndarray], seeds: list[np.ndarray], length: int, rule: Rule
) -> tuple[list[Dashes], list[np.ndarray], np.ndarray]:
    """Grow contours in turns, and drop the pictures where a dash finds no room.

    A layer holds what its contour has to avoid: all but its own last dash.
    """
    made: list[Dashes] = []
    kept, own = np.arange(len(layers[0])), len(layers)
    for number in range(length):
        for contour in range(own):
            last = made[-own] if number else None
            if last is None:
                places = seeds[contour][kept]
                angles = draw.uniform(0, 2 * np.pi, (len(kept), CANDIDATES))
                weights = np.ones(angles.shape)
            else:
                unit = (last.end - last.begin) / rule.dash
                places = np.repeat((last.end + rule.margin * unit)[:, None], CANDIDATES, axis=1)
                bends = _bends(draw, len(kept), rule)
                angles = np.arctan2(unit[:, 0], unit[:, 1])[:, None] + bends
                weights = np.cos(rule.continuity * bends) ** 2
            place, angle, found = _choose(draw, layers[contour], places, angles, weights, rule)
            kept, layers = kept[found], [layer[found] for layer in layers]
            made = [dash.of(found) for dash in made]
            place, unit = place[found], _unit(angle[found])
            begin = place + rule.margin * unit
            made.append(Dashes(begin, begin + rule.dash * unit, np.ones(len(kept), dtype=bool)))
            if number:
                mark(layers[contour], made[-own - 1], rule)
            for other in range(own):
                if other != contour:
                    mark(layers[other], made[-1], rule)
    for contour in range(own):
        mark(layers[contour], made[contour - own], rule)
    return made, layers, kept


def _bends(draw: np.random.Generator, pictures: int, rule: Rule) -> np.ndarray:
    """Candidates for the next turn: one from each of equal parts of what ``continuity`` allows."""
    spread = np.pi / 2 / max(rule.continuity, 0.5)
    parts = (np.arange(CANDIDATES) + draw.random((pictures, 1))) / CANDIDATES
    return (2 * parts - 1) * spread


def _choose(
    draw: np.random.Generator,
    occupied: np.ndarray,
    places: np.ndarray,
    angles: np.ndarray,
    weights: np.ndarray,
    rule: Rule,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw a free dash of the candidates by their weights; whether there was any."""
    along = np.arange(2 * rule.dash + 1) / 2 + rule.margin
    points = places[:, :, None] + along[:, None] * _unit(angles)[:, :, None]
    pixels = np.clip(np.rint(points).astype(np.intp) + rule.border, 0, occupied.shape[1] - 1)
    rows = np.arange(len(occupied))
    blocked = occupied[rows[:, None, None], pixels[..., 0], pixels[..., 1]].any(-1)
    total = np.cumsum(weights * ~blocked, axis=1)
    at = (total <= draw.random((len(rows), 1)) * total[:, -1:]).sum(1).clip(max=CANDIDATES - 1)
    return places[rows, at], angles[rows, at], total[:, -1] > 0


def _unit(angle: np.ndarray) -> np.ndarray:
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1)


def mark(occupied: np.ndarray, dash: Dashes, rule: Rule) -> None:
    """Take the pixels around dashes.

    Args:
        occupied: (pictures, rows, columns) with the border, changed in place.
        dash: a dash for each picture.
        rule: of the contours.
    """
    rows, columns, distance = distances(dash, rule.clearance, rule)
    near = distance <= rule.clearance
    rows, columns = (np.clip(x + rule.border, 0, occupied.shape[1] - 1) for x in (rows, columns))
    pictures = np.broadcast_to(np.arange(len(occupied))[:, None, None], near.shape)
    rows, columns = (np.broadcast_to(x, near.shape) for x in (rows, columns))
    occupied[pictures[near], rows[near], columns[near]] = True


def distances(dash: Dashes, reach: float, rule: Rule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, columns and distances to a dash of the pixels around it.

    Args:
        dash: a dash for each picture.
        reach: pixels farther away than this may be left out.
        rule: of the contours.

    Returns:
        (pictures, W, 1), (pictures, 1, W) and (pictures, W, W).
    """
    half = int(np.ceil(reach + rule.dash / 2)) + 1
    centre = np.rint((dash.begin + dash.end) / 2).astype(np.intp)
    offsets = np.arange(-half, half + 1)
    rows, columns = centre[:, 0, None, None] + offsets[:, None], centre[:, 1, None, None] + offsets
    by_row, by_column = rows - dash.begin[:, 0, None, None], columns - dash.begin[:, 1, None, None]
    along = (dash.end - dash.begin)[:, :, None, None]
    share = (by_row * along[:, 0] + by_column * along[:, 1]) / max(rule.dash, 1) ** 2
    share = share.clip(0, 1)
    return rows, columns, np.hypot(by_row - share * along[:, 0], by_column - share * along[:, 1])
