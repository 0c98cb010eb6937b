"""The curves of a run as PNG pictures, each in a light and a dark inking, on a transparent ground.

Drawn with matplotlib's figure objects alone: no global state, no window system.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from modicum.road.words import short


@dataclass(frozen=True)
class Ink:
    """Colours of one inking, as #rrggbb: text, hairlines, the main line, the same line unsmoothed, held-out points."""

    text: str
    hairline: str
    main: str
    faint: str
    heldout: str


WIDE, NARROW = (7.6, 3.3), (3.75, 2.6)  # inches; text keeps its size on a small screen
_ON_DARK, _ON_NARROW = "(prefers-color-scheme: dark)", "(max-width: 34rem)"
LIGHT = Ink(text="#55524c", hairline="#dcd8cf", main="#1f4e79", faint="#a9bdd0", heldout="#b3541e")
DARK = Ink(text="#a8a59d", hairline="#3a3d42", main="#8ab8e6", faint="#3f5a75", heldout="#e8a06a")


Draw = Callable[[Ink], Figure]


@dataclass(frozen=True)
class Picture:
    """One plot: what it shows in words (`alternative`), its PNG bytes, and the PNGs that take its place where a CSS
    media query holds: {query: bytes}, the first that holds counts."""

    name: str
    alternative: str
    png: bytes
    instead: dict[str, bytes]


def stage_pictures(stage: str, curve: dict[str, Any]) -> list[Picture]:
    """Loss, learning rate and speed of one training stage.

    `curve` holds equally long lists "steps", "loss", "learning_rate"; "speed" with "steps" and "tokens_per_second";
    "heldout" with "steps" and "loss"; losses in nats a token. A stage that logged only once has no pictures.
    """
    steps = curve["steps"]
    if len(steps) < 2:
        return []
    heldout, speed = curve["heldout"], curve["speed"]
    after = f", held-out {heldout['loss'][-1]:.2f}" if heldout["loss"] else ""
    return [
        _picture(
            f"{stage}-loss",
            f"Loss over {steps[-1]} updates, from {curve['loss'][0]:.2f} to {smooth(curve['loss'])[-1]:.2f}{after}",
            lambda ink: _loss(curve, ink, WIDE),
            narrow=lambda ink: _loss(curve, ink, NARROW),
        ),
        _picture(
            f"{stage}-learning-rate",
            f"Learning rate over {steps[-1]} updates, highest {max(curve['learning_rate']):.2g}",
            lambda ink: _small(steps, curve["learning_rate"], "learning rate", ink),
        ),
        _picture(
            f"{stage}-speed",
            f"Tokens per second over {steps[-1]} updates, median {median(speed['tokens_per_second']):.0f}",
            lambda ink: _small(speed["steps"], speed["tokens_per_second"], "tokens per second", ink),
        ),
    ]


def smooth(values: Sequence[float], share: float = 0.03) -> list[float]:
    """Centred running mean over about `share` of the values on each side; shorter at both ends."""
    reach = int(len(values) * share)
    out = []
    for place in range(len(values)):
        half = min(reach, place, len(values) - 1 - place)
        window = values[place - half : place + half + 1]
        out.append(sum(window) / len(window))
    return out


def _picture(name: str, alternative: str, draw: Draw, narrow: Draw | None = None) -> Picture:
    instead = {}
    if narrow:
        instead[f"{_ON_DARK} and {_ON_NARROW}"] = _png(narrow(DARK))
        instead[_ON_NARROW] = _png(narrow(LIGHT))
    return Picture(name, alternative, _png(draw(LIGHT)), {**instead, _ON_DARK: _png(draw(DARK))})


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=170, transparent=True, metadata={"Software": None})
    return out.getvalue()


def _loss(curve: dict[str, Any], ink: Ink, inches: tuple[float, float]) -> Figure:
    figure = Figure(figsize=inches, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(curve["steps"], curve["loss"], color=ink.faint, linewidth=0.8)
    axes.plot(curve["steps"], smooth(curve["loss"]), color=ink.main, linewidth=1.8, label="training")
    heldout = curve["heldout"]
    if heldout["steps"]:
        axes.plot(
            heldout["steps"],
            heldout["loss"],
            color=ink.heldout,
            marker="o",
            markersize=4.5,
            linewidth=1,
            label="held-out",
        )
        axes.legend(frameon=False, labelcolor=ink.text, fontsize=9, loc="upper right")
    _dress(axes, ink, "loss, nats a token")
    return figure


def _small(steps: Sequence[int], values: Sequence[float], label: str, ink: Ink) -> Figure:
    figure = Figure(figsize=(3.75, 2.1), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, values, color=ink.main, linewidth=1.5)
    axes.set_ylim(bottom=0, top=max(values) * 1.12 or 1)
    _dress(axes, ink, label)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    return figure


def _tick(value: float) -> str:
    return short(value) if value >= 1 or value == 0 else f"{value:.1e}".replace("e-0", "e-")


def _dress(axes: Axes, ink: Ink, label: str) -> None:
    """Quiet axes: no box, hairline grid, small labels; the quantity stands above the plot and reads horizontally."""
    axes.set_title(label, loc="left", fontsize=9, color=ink.text)
    axes.set_xlabel("updates", fontsize=9, color=ink.text)
    axes.tick_params(colors=ink.text, labelsize=8.5, length=0)
    axes.grid(axis="y", color=ink.hairline, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(ink.hairline)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.margins(x=0.01)
