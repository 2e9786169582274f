"""The drawings of a report as SVG, by matplotlib."""

from __future__ import annotations

import io
import logging
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup

from hpcddp.errors import UserError
from hpcddp.manage.attempt_times import AttemptTimes, Phase
from hpcddp.manage.run_metrics import Piece

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ATTEMPTS_DRAWN: Final = 40
_MARKS: Final = 200
_MARKED_POINTS: Final = 40
_UNITS: Final = ((2 * 86400, 86400, "days"), (2 * 3600, 3600, "hours"), (120, 60, "minutes"))
# Colours that stand for variables of the page's style sheet, so that one drawing is light and dark.
_CURVE_COLOR: Final = "#e001"
_PHASE_COLOR: Final = "#e002"
_INK: Final = "#e00300"
_GRID: Final = "#e00400"
_COLOR: Final = re.compile("(?P<kind>#e0[0-9a-f]{2})(?P<number>[0-9a-f]{2})")
_TAG: Final = re.compile("<[^>]+>")
_DECIMALS: Final = re.compile(r"(\d\.\d\d)\d+")
_STYLE: Final[Mapping[Any, Any]] = MappingProxyType(
    {
        "svg.fonttype": "none", "font.size": 8.5, "text.color": _INK,
        "axes.edgecolor": _GRID, "axes.labelcolor": _INK, "xtick.color": _GRID, "ytick.color": _GRID,
        "xtick.labelcolor": _INK, "ytick.labelcolor": _INK, "axes.spines.top": False, "axes.spines.right": False,
        "axes.unicode_minus": False, "text.parse_math": False, "axes.formatter.limits": (-4, 6),
    }
)  # fmt: skip


class NoMatplotlibError(UserError):
    """The library that draws is not installed."""

    kind = "no_matplotlib"


def time_unit(seconds: float) -> tuple[int, str]:
    """Return the unit for the axis of a duration: its seconds and its name."""
    for shortest, unit_s, name in _UNITS:
        if seconds >= shortest:
            return unit_s, name
    return 1, "seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A curve with few points: the mean of each group of neighbours, and their smallest and largest values.

    Args:
        x: the mean position of each group on the horizontal axis; not a number at a gap.
        mean: the mean of each group.
        low: the smallest value of each group.
        high: the largest value of each group.
        color: the number of the colour of the curve.
    """

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    color: int

    @classmethod
    def over_steps(cls, pieces: Sequence[Piece], color: int) -> Curve:
        """Return the curve of pieces over steps."""
        return cls(
            x=[piece.steps / piece.lines for piece in pieces],
            mean=[piece.total / piece.lines for piece in pieces],
            low=[piece.low for piece in pieces],
            high=[piece.high for piece in pieces],
            color=color,
        )

    @classmethod
    def over_time(cls, pieces: Sequence[Piece], color: int, *, began: float, unit_s: float) -> Curve:
        """Return the curve of pieces over the wall time; it is interrupted between attempts.

        Args:
            began: when the run began, in seconds since the epoch.
            unit_s: the unit of the wall time, in seconds.
        """
        curve = cls(x=[], mean=[], low=[], high=[], color=color)
        previous_attempt = None
        for piece in pieces:
            time = piece.times / piece.lines
            if not math.isfinite(time):
                continue
            if previous_attempt is not None and previous_attempt != piece.attempt_index:
                curve.add(math.nan, math.nan, math.nan, math.nan)
            curve.add((time - began) / unit_s, piece.total / piece.lines, piece.low, piece.high)
            previous_attempt = piece.attempt_index
        return curve

    def add(self, x: float, mean: float, low: float, high: float) -> None:
        """Add a point, or a gap."""
        self.x.append(x)
        self.mean.append(mean)
        self.low.append(low)
        self.high.append(high)


class Drawer:
    """Draws with matplotlib.

    Raises:
        NoMatplotlibError: it is not installed.
    """

    def __init__(self) -> None:
        # Its notes about fonts and its cache are not for the users of a command.
        logging.getLogger("matplotlib").setLevel(logging.ERROR)
        try:
            import matplotlib.backends.backend_svg
            import matplotlib.figure
        except ImportError as error:
            raise NoMatplotlibError(
                f"the page of a report needs matplotlib ({error}); install it: {sys.executable} -m pip install "
                "'matplotlib>=3.9', or print the numbers: hpcddp report --json"
            ) from error
        self._matplotlib = matplotlib
        self._drawn = 0

    def chart(self, curves: Sequence[Curve], marks: Sequence[float], *, width: float, is_logarithmic: bool) -> Markup:
        """Return the drawing of curves, with a line at each mark; empty if no curve has points.

        Args:
            marks: positions on the horizontal axis.
            width: the end of that axis, which is the same for all metrics.
            is_logarithmic: whether the vertical axis is logarithmic; all values are positive.
        """
        if not any(curve.x for curve in curves):
            return Markup()

        def draw(axes: Axes) -> None:
            for mark in marks[:_MARKS]:
                axes.axvline(mark, color=_INK, linewidth=0.7, linestyle=(0, (2, 3)), alpha=0.6)
            for curve in curves:
                _draw_curve(axes, curve, has_band=len(curves) == 1)
            axes.set_xlim(-0.02 * width, 1.02 * width or 1)
            if is_logarithmic:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter("{x:g}")
            axes.grid(visible=True, color=_GRID, linewidth=0.7)

        return self._svg(draw, width=4.9, height=2.15)

    def timeline(self, attempts: Sequence[AttemptTimes]) -> Markup:
        """Return the drawing of the newest attempts of a run, a row for each; empty without one."""
        attempts = attempts[-_ATTEMPTS_DRAWN:]
        if not attempts:
            return Markup()
        began = min(span.began for attempt in attempts for span in attempt.spans)
        ended = max(attempt.ended for attempt in attempts)
        unit_s, unit = time_unit(ended - began)

        def draw(axes: Axes) -> None:
            for row, attempt in enumerate(attempts):
                _draw_attempt(axes, row, attempt, began=began, unit_s=unit_s)
            axes.set_ylim(len(attempts) - 0.4, -0.6)
            axes.set_yticks(range(len(attempts)), [f"attempt {attempt.number}" for attempt in attempts])
            axes.set_xlim(0, max((ended - began) / unit_s, 1e-9))
            axes.set_xlabel(unit)
            axes.grid(visible=True, axis="x", color=_GRID, linewidth=0.7)
            axes.set_axisbelow(True)

        return self._svg(draw, width=8.6, height=0.6 + 0.3 * len(attempts), left=0.95, below=0.45)

    def _svg(
        self, draw: Callable[[Axes], None], *, width: float, height: float, left: float = 0.6, below: float = 0.25
    ) -> Markup:
        """Return a drawing as SVG for a page; nothing in it comes from a run but numbers.

        Args:
            width: inches.
            height: inches.
            left: inches for the labels at the left.
            below: inches for the labels below the axes.
        """
        self._drawn += 1
        with self._matplotlib.rc_context({**_STYLE, "svg.hashsalt": str(self._drawn)}):
            figure = self._matplotlib.figure.Figure(figsize=(width, height))
            # A layout that adapts itself takes longer than the drawing.
            edges = {"left": left / width, "right": 1 - 0.28 / width, "top": 1 - 0.1 / height, "bottom": below / height}
            figure.subplots_adjust(**edges)
            figure.patch.set_visible(False)
            axes = figure.add_subplot()
            axes.patch.set_visible(False)
            draw(axes)
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        return Markup(_for_page(text.getvalue()))  # noqa: S704  drawn here


def _draw_curve(axes: Axes, curve: Curve, *, has_band: bool) -> None:
    """Draw a curve; a band around it reaches from the smallest to the largest value of each group."""
    color = f"{_CURVE_COLOR}{curve.color:02x}"
    if has_band and curve.low != curve.high:
        axes.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.22, linewidth=0)
    marker = "." if len(curve.x) <= _MARKED_POINTS else None
    axes.plot(curve.x, curve.mean, color=color, linewidth=1.5, marker=marker, markersize=5)


def _draw_attempt(axes: Axes, row: int, attempt: AttemptTimes, *, began: float, unit_s: float) -> None:
    for color, phase in enumerate(Phase):
        spans = [span for span in attempt.spans if span.phase is phase and span.ended > span.began]
        bars = [((span.began - began) / unit_s, (span.ended - span.began) / unit_s) for span in spans]
        if bars:
            # Short parts lie on the training that they interrupt.
            level = 1 if phase is Phase.TRAINING else 2
            axes.broken_barh(bars, (row - 0.36, 0.72), facecolors=f"{_PHASE_COLOR}{color:02x}", zorder=level)


def _for_page(svg: str) -> str:
    """Return the SVG of matplotlib for a page: with variables as colours, and in the width of its place."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r'^<svg([^>]*?) width="[^"]*"', r"<svg\1", svg)
    svg = re.sub(r'^(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    svg = svg.replace("<svg ", '<svg role="img" ', 1)
    svg = _COLOR.sub(_variable_of_color, svg)
    # Numbers in paths need no more; those on the axes stay as they are.
    return _TAG.sub(lambda tag: _DECIMALS.sub(r"\1", tag[0]), svg)


def _variable_of_color(match: re.Match[str]) -> str:
    if match[0] == _GRID:
        return "var(--grid)"
    if match["kind"] == _CURVE_COLOR:
        return f"var(--c{int(match['number'], 16)})"
    if match["kind"] == _PHASE_COLOR:
        return f"var(--p{int(match['number'], 16)})"
    return "var(--ink)"
