"""Rows with images in prefill: what stands behind the placeholders of a step's columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.images import ImagePrompt
from jaxinfer.images.prompt import Span
from jaxinfer.models import ImageFeatures
from jaxinfer.state import DecodeState


@dataclasses.dataclass(frozen=True)
class ImageRow:
    """What stands behind the image columns of a row to prefill.

    Attributes:
      content: (start, end, digest) of each image, counted from the row's first column, ascending; an image
        that an earlier step began starts before 0.
      positions: of rope, absolute, int32 [3, T]; None for a model whose rope has one axis.
      features: by digest.
    """

    content: tuple[Span, ...]
    positions: np.ndarray | None
    features: Mapping[str, ImageFeatures]

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(start, end) of the runs of image columns; images side by side are one."""
        runs: list[tuple[int, int]] = []
        for start, end, _ in self.content:
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((start, end))
        return tuple(runs)


def image_row(
    prompt: ImagePrompt, features: Mapping[str, ImageFeatures], *, start: int = 0
) -> ImageRow | None:
    """Returns what the columns of `prompt` from `start` on need; None where none of them is of an image."""
    content = tuple((first - start, end - start, digest) for first, end, digest in prompt.content)
    content = tuple(span for span in content if span[1] > 0)
    if not content:
        return None
    return ImageRow(content, None if prompt.positions is None else prompt.positions[:, start:], features)


@dataclasses.dataclass(frozen=True)
class StepImages:
    """The images of all rows, to be cut into steps.

    Attributes:
      rows: one for each row; None where it has no images.
      first: rope position of each row's first column, int32 [B].
      config: of the model.
    """

    rows: tuple[ImageRow | None, ...]
    first: np.ndarray
    config: ModelConfig

    @classmethod
    def of(
        cls, rows: Sequence[ImageRow | None], state: DecodeState, config: ModelConfig
    ) -> StepImages | None:
        """Returns the images of the rows that come after `state`; None where there are none.

        Raises:
          ValueError: a row begins inside an image run that a layer reads in both directions.
        """
        if not any(row is not None for row in rows):
            return None
        begun = None if state.ends_in_image is None else np.asarray(state.ends_in_image)
        for index, row in enumerate(rows):
            if begun is not None and begun[index] and row is not None and row.runs[0][0] <= 0:
                raise ValueError(
                    f"prefill(images=...) row {index} begins inside an image run, which this model reads in "
                    "both directions; begin where the run does"
                )
        first = np.asarray(state.length)
        if state.rope_delta is not None:
            first = first + np.asarray(state.rope_delta)
        return cls(tuple(rows), first, config)

    @property
    def whole_runs(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The runs of each row that no step may cut."""
        if not self.config.is_bidirectional:
            return ((),) * len(self.rows)
        return tuple(() if row is None else row.runs for row in self.rows)

    def inputs(self, starts: np.ndarray, counts: np.ndarray, size: int) -> dict[str, Any]:
        """Returns the image inputs of a step, by their names in `StepInputs`; {} where no column is of an
        image: it is then a step of text.

        Args:
          starts, counts: the columns of each row that it takes, int32 [B].
          size: its width T.
        """
        batch, config = len(self.rows), self.config
        flags = np.zeros((batch, size), bool)
        embeddings = np.zeros((batch, size, config.embed_dim), np.float32)
        layers = 0 if config.vision is None else len(config.vision.deepstack_layers)
        deepstack = np.zeros((layers, batch, size, config.embed_dim), np.float32)
        for index, row in enumerate(self.rows):
            if row is None:
                continue
            start, end = int(starts[index]), int(starts[index] + counts[index])
            for first, last, digest in row.content:
                low, high = max(first, start), min(last, end)
                if low >= high:
                    continue
                columns, taken = slice(low - start, high - start), slice(low - first, high - first)
                features = row.features[digest]
                flags[index, columns] = True
                embeddings[index, columns] = features.embeddings[taken]
                if features.deepstack is not None:
                    deepstack[:, index, columns] = features.deepstack[:, taken]
        if not flags.any():
            return {}
        inputs: dict[str, Any] = {"is_image": flags, "embeddings": embeddings, "embedding_mask": flags}
        if layers:
            inputs["deepstack"] = deepstack
        if config.uses_mrope:
            inputs["positions"] = self._positions(starts, counts, size)
        return inputs

    def _positions(self, starts: np.ndarray, counts: np.ndarray, size: int) -> np.ndarray:
        positions = np.zeros((3, len(self.rows), size), np.int32)
        for index, row in enumerate(self.rows):
            start, count = int(starts[index]), int(counts[index])
            if row is None or row.positions is None:
                positions[:, index] = self.first[index] + start + np.arange(size)
            else:
                positions[:, index, :count] = row.positions[:, start : start + count]
        return positions
