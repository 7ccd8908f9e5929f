"""A picture of the end-to-end results: tokens a second by measurement and contender."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_OWN_COLOURS = ("#1f6feb", "#76a9fa", "#0b3d91")
_PEER_COLOURS = ("#8c8c8c", "#b8b8b8", "#d8b365", "#5e5e5e", "#c9a0a0")


def draw_speed(records: Mapping[str, dict[str, Any]], path: Path) -> None:
    """Writes an SVG with one row of panels a model, one panel a measurement, one bar a contender.

    The same records give the same bytes under one version of matplotlib.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    settings = {"svg.hashsalt": "jaxinfer", "font.size": 7, "axes.titlesize": 7.5, "svg.fonttype": "none"}
    most = max(len(record["cells"]) for record in records.values())
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(
            len(records), most, figsize=(1.55 * most, 1.9 * len(records)), squeeze=False, layout="constrained"
        )
        colours = _colours(records.values())
        for row, (name, record) in zip(axes, records.items(), strict=True):
            for axis, cell in zip(row, record["cells"], strict=False):
                _panel(axis, cell, colours)
            for axis in row[len(record["cells"]) :]:
                axis.set_axis_off()
            row[0].set_ylabel(f"{name}\ntokens/s")
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
        labels = [contender.replace("/", " ") for contender in colours]
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def _panel(axis: Any, cell: dict[str, Any], colours: Mapping[str, str]) -> None:
    shown = [name for name in colours if name in cell["results"]]
    rates = [cell["results"][name]["tokens_per_s"] for name in shown]
    bars = axis.bar(range(len(shown)), rates, color=[colours[name] for name in shown])
    axis.bar_label(bars, [f"{rate:,.0f}" for rate in rates], fontsize=6)
    axis.set_xticks([])
    axis.spines[["top", "right"]].set_visible(False)
    if cell["measure"] == "prefill":
        axis.set_title(f"prefill {cell['tokens']:,}")
    else:
        axis.set_title(f"decode x{cell['batch']} at {cell['context']:,}")


def _colours(records: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Returns a colour a contender: blues for this library's dtypes, greys and browns for its peers."""
    own, peers = itertools.cycle(_OWN_COLOURS), itertools.cycle(_PEER_COLOURS)
    names = dict.fromkeys(name for record in records for cell in record["cells"] for name in cell["results"])
    return {name: next(own if name.startswith("jaxinfer/") else peers) for name in names}
