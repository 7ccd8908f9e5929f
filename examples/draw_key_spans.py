"""Draws the figure of docs/key_spans.md: `python examples/draw_key_spans.py docs/key_spans.png`."""

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
import numpy as np

import jaxinfer as ji

# Text, an image of six columns, text, an image of four, text.
IS_IMAGE = np.repeat([False, True, False, True, False], [3, 6, 4, 4, 3])
WINDOW, MAX_CHUNK = 5, 8


def draw() -> plt.Figure:
    """Three layers' masks of one prompt: causal, bidirectional in image runs, and the same with a window."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.4), layout="constrained")
    causal, both = ji.MaskPolicy.CAUSAL, ji.MaskPolicy.VISION_BIDIRECTIONAL
    chunks = ji.plan_prefill_chunks(IS_IMAGE, MAX_CHUNK)
    panels = [
        ("CAUSAL", ji.key_spans(causal, IS_IMAGE), ()),
        ("VISION_BIDIRECTIONAL", ji.key_spans(both, IS_IMAGE), chunks),
        (f"VISION_BIDIRECTIONAL, window {WINDOW}", ji.key_spans(both, IS_IMAGE, WINDOW), chunks),
    ]
    for ax, (title, spans, lines) in zip(axes, panels, strict=True):
        ji.draw_key_spans(spans, is_image=IS_IMAGE, chunks=lines, ax=ax)
        ax.set_title(title, pad=14)
    return figure


if __name__ == "__main__":
    draw().savefig(Path(sys.argv[1]), dpi=110)
