"""SVG charts of the pages: panels with lines, dots and labels, on white paper."""

from collections.abc import Iterable
from dataclasses import dataclass

BLUE, ORANGE, GRAY = "#1d5ba6", "#c2500f", "#39424e"
Point = tuple[float, float]


@dataclass(frozen=True)
class Panel:
    """Rectangle of a chart, in pixels, and the range of the data that it shows."""

    x: Point
    """Data at the left and at the right edge."""
    y: Point
    """Data at the bottom and at the top edge."""
    left: float = 56
    top: float = 30
    width: float = 440
    height: float = 224

    def pixels(self, x: float, y: float) -> Point:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + across * self.width, self.top + (1 - up) * self.height

    def _path(self, points: Iterable[Point]) -> str:
        return " ".join("{:.1f},{:.1f}".format(*self.pixels(*point)) for point in points)

    def line(self, points: Iterable[Point], color: str = GRAY, dash: str = "none") -> str:
        return (
            f'<polyline points="{self._path(points)}" fill="none" stroke="{color}" stroke-width="1.6" '
            f'stroke-dasharray="{dash}"/>'
        )

    def dot(self, x: float, y: float, color: str, title: str = "") -> str:
        """Return a dot, whose title is shown at the mouse pointer."""
        across, down = self.pixels(x, y)
        place = f'cx="{across:.1f}" cy="{down:.1f}"'
        return f'<circle {place} r="3.5" fill="{color}"><title>{title}</title></circle>'

    def text(
        self, x: float, y: float, words: str, anchor: str = "middle", right: float = 0, down: float = 0
    ) -> str:
        """Return text at a data point, moved by pixels to the right and down."""
        left, top = self.pixels(x, y)
        return f'<text x="{left + right:.1f}" y="{top + down:.1f}" text-anchor="{anchor}">{words}</text>'

    def axes(
        self, x_ticks: Iterable[tuple[float, str]], y_ticks: Iterable[float], title: str, y_title: str
    ) -> list[str]:
        """Return the x-axis with its ticks and title, the numbers at the y-axis, and its title above them."""
        (left, right), (bottom, top) = self.x, self.y
        return [
            self.line([(left, bottom), (right, bottom)]),
            *(self.text(at, bottom, words, down=18) for at, words in x_ticks),
            *(self.text(left, at, f"{at:.3g}", "end", right=-6, down=4) for at in y_ticks),
            self.text((left + right) / 2, bottom, title, down=36),
            self.text(left, top, y_title, "start", right=-30, down=-14),
        ]


def chart(title: str, parts: Iterable[str], width: float = 520, height: float = 300, font: int = 11) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{title}" font-family="sans-serif" font-size="{font}" fill="{GRAY}">'
    )
    paper = f'<title>{title}</title>\n<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([head, paper, *parts, "</svg>", ""])
