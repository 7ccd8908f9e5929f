"""A drawn mask is the mask: a colour for keys read, read ahead, the query's own, and not read."""

import sys

import matplotlib as mpl
import numpy as np
import pytest

mpl.use("agg")

import jaxinfer as ji
from jaxinfer.spans.draw import draw_key_spans

FLAGS = np.array([0, 0, 1, 1, 1, 0, 1, 1, 0], bool)


def cells(ax):
    mesh = ax.collections[0]
    return np.asarray(mesh.get_array()).reshape(mesh.get_coordinates().shape[0] - 1, -1)


@pytest.fixture(autouse=True)
def _close():
    import matplotlib.pyplot as plt

    yield
    plt.close("all")


def test_the_cells_are_the_mask_with_what_is_read_ahead_apart():
    spans = ji.key_spans(ji.MaskPolicy.VISION_BIDIRECTIONAL, FLAGS, 3)
    drawn = cells(draw_key_spans(spans, is_image=FLAGS))
    mask = np.asarray(spans.as_mask(9))
    query, key = np.mgrid[:9, :9]
    np.testing.assert_array_equal(drawn > 0, mask)
    np.testing.assert_array_equal(drawn == 2, mask & (key > query))
    np.testing.assert_array_equal(drawn == 3, np.eye(9, dtype=bool))
    causal = cells(draw_key_spans(ji.key_spans(ji.MaskPolicy.CAUSAL, FLAGS)))
    assert not (causal == 2).any()


def test_runs_are_bars_along_both_axes_and_chunks_are_lines():
    spans = ji.key_spans(ji.MaskPolicy.VISION_BIDIRECTIONAL, FLAGS)
    ax = draw_key_spans(spans, is_image=FLAGS, chunks=[(0, 5), (5, 9)])
    bars = [line for line in ax.lines if line.get_linestyle() == "-"]
    assert [tuple(bar.get_xdata()) for bar in bars[::2]] == [(1.6, 4.4), (5.6, 7.4)]
    assert [tuple(bar.get_ydata()) for bar in bars[1::2]] == [(1.6, 4.4), (5.6, 7.4)]
    lines = [line for line in ax.lines if line.get_linestyle() == "--"]
    assert [list(line.get_ydata()) for line in lines] == [[4.5, 4.5]]


def test_a_later_step_is_drawn_at_its_positions_on_the_axes_given():
    import matplotlib.pyplot as plt

    _, ax = plt.subplots()
    spans = ji.key_spans(ji.MaskPolicy.CAUSAL, np.zeros(2, bool), 2, offset=3)
    assert draw_key_spans(spans, kv_len=8, first_query=3, ax=ax) is ax
    assert cells(ax).tolist() == [[0, 0, 1, 3, 0, 0, 0, 0], [0, 0, 0, 1, 3, 0, 0, 0]]


def test_what_does_not_fit_is_refused(monkeypatch):
    spans = ji.key_spans(ji.MaskPolicy.CAUSAL, np.zeros((2, 3), bool))
    with pytest.raises(ValueError, match=r"must be of one row.*got \(2, 3\)"):
        draw_key_spans(spans)
    one = ji.KeySpans(spans.lo[0], spans.hi[0])
    with pytest.raises(ValueError, match=r"must be bool \[3\], one flag a key; got \(2,\)"):
        draw_key_spans(one, is_image=np.zeros(2, bool))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"the extra `plot`: pip install 'jaxinfer\[plot\]'"):
        draw_key_spans(one)
