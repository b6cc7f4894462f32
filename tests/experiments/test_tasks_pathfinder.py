"""Pathfinder: whoever joins dashes across the gaps of a contour finds the answer; nothing else is drawn."""

import numpy as np
import pytest
from experiments.tasks.pathfinder import MARGIN, RADIUS, THICKNESS, Pictures, draw_pictures, pathfinder

SHA256 = "3be272c9523d1d66a9707cfd6378809cb6948e97b8f733ddb33e6b3e441d5e27"
ROUNDING = 0.03
"""Half-pixel steps and rounding to pixels leave 2·margin + 1 − √½ − ¼ = 2·margin + 0.04 between contours."""


def components(dashes: np.ndarray, gap: float) -> list[int]:
    """The component of each dash where dashes not farther apart than a gap belong together (flood fill)."""
    steps = np.linspace(0, 1, 9)[:, None]
    points = dashes[:, None, 0] + steps * (dashes[:, None, 1] - dashes[:, None, 0])
    flat = points.reshape(-1, 2)
    far = np.hypot(*(flat[:, None] - flat[None]).transpose(2, 0, 1))
    near = far.reshape(len(dashes), 9, len(dashes), 9).min((1, 3)) <= gap
    component = [-1] * len(dashes)
    for number in range(len(dashes)):
        reached = [number] if component[number] < 0 else []
        while reached:
            at = reached.pop()
            component[at] = number
            reached += [other for other in np.flatnonzero(near[at]) if component[other] < 0]
    return component


def answer(dashes: np.ndarray, dots: np.ndarray, gap: float) -> tuple[int, list[int]]:
    """Whether the dots lie on one component, and how many dashes the components have."""
    component = components(dashes, gap)
    ends = np.abs(dashes[None] - dots[:, None, None]).max(-1).min(-1)
    assert ends.min(1).max() < 1e-9  # a dot is at the end of a dash
    on = [component[i] for i in ends.argmin(1)]
    return int(on[0] == on[1]), sorted(np.unique(component, return_counts=True)[1].tolist())


def test_the_search_finds_two_components_across_a_wider_gap() -> None:
    row = np.array([[[0, 0], [0, 2]], [[0, 4], [0, 6]], [[0, 8.5], [0, 10]]])
    assert components(row, 2) == [0, 0, 2]
    assert answer(row, row[[0, 1], [0, 1]], 2) == (1, [1, 2])
    assert answer(row, row[[0, 2], [0, 1]], 2) == (0, [1, 2])


@pytest.fixture(scope="module")
def easy() -> Pictures:
    return draw_pictures(384, 6, [5])


@pytest.mark.parametrize(("length", "count"), [(6, 80), (14, 40)])
def test_the_search_finds_every_label(length: int, count: int) -> None:
    drawn = draw_pictures(count, length, [0, 1])
    for label, dashes, dots in zip(drawn.labels, drawn.dashes, drawn.dots, strict=True):
        there = dashes[~np.isnan(dashes[:, 0, 0])]
        found, sizes = answer(there, dots, 2 * MARGIN + ROUNDING)
        assert found == label
        assert sizes[-2:] == [length, length]
        assert set(sizes[:-2]) <= {length // 3}


def test_pixels_are_lit_where_dashes_and_dots_are_and_nowhere_else(easy: Pictures) -> None:
    rows, columns = np.mgrid[:32, :32]
    steps = np.linspace(0, 1, 33)[:, None]
    for pixels, dashes, dots in zip(easy.pixels[:40], easy.dashes, easy.dots, strict=False):
        there = dashes[~np.isnan(dashes[:, 0, 0])]
        points = (there[:, None, 0] + steps * (there[:, None, 1] - there[:, None, 0])).reshape(-1, 2)

        def to(places: np.ndarray) -> np.ndarray:
            return np.hypot(rows[..., None] - places[:, 0], columns[..., None] - places[:, 1]).min(-1)

        light = np.maximum(THICKNESS / 2 + 0.5 - to(points), RADIUS + 0.5 - to(dots)).clip(0, 1) * 255
        assert np.abs(pixels - light).max() <= 0.5 + 255 * 2 / 64  # rounding, and half a step of 2/32 pixels


def test_contours_turn_as_continuity_allows(easy: Pictures) -> None:
    contour = easy.dashes[:, 0:12:2]  # the first contour of each picture
    along = contour[:, :, 1] - contour[:, :, 0]
    assert np.allclose(np.hypot(*np.moveaxis(along, -1, 0)), 2)
    cosine = (along[:, 1:] * along[:, :-1]).sum(-1) / 4
    assert cosine.min() > 0  # continuity 1: |Δ| < 90°
    assert cosine.mean() > 0.6  # cos² weights give 8/(3π) = 0.85 without obstacles


def test_the_task_is_the_pictures_and_the_first_do_not_depend_on_how_many() -> None:
    few, more = (pathfinder(train=rows, test=4, contour_length=3) for rows in (5, 9))
    assert few.test.arrays["input_ids"].tolist() == more.test.arrays["input_ids"].tolist()
    assert few.train.arrays["input_ids"].tolist() == more.train.arrays["input_ids"][:5].tolist()
    assert few.record["sha256"] == SHA256
    assert pathfinder(train=5, test=4, contour_length=3, seed=1).record["sha256"] != SHA256
