"""The mask policy of a layer: a static choice, never data."""

from __future__ import annotations

import enum


class MaskPolicy(enum.Enum):
    """How far forward a query reads; how far back is the layer's window.

    With one text column, an image run of three and a text column, `is_image = 0 1 1 1 0` (rows are
    queries, columns are keys)::

        CAUSAL         VISION_BIDIRECTIONAL
        1 . . . .      1 . . . .
        1 1 . . .      1 1 1 1 .
        1 1 1 . .      1 1 1 1 .
        1 1 1 1 .      1 1 1 1 .
        1 1 1 1 1      1 1 1 1 1

    Attributes:
        CAUSAL: every query reads up to itself; image flags change nothing.
        VISION_BIDIRECTIONAL: a query in an image run also reads forward to the last column of its own
            run, as far as the step holds it; text stays causal (Gemma 3 and 4 with images).
    """

    CAUSAL = "causal"
    VISION_BIDIRECTIONAL = "vision_bidirectional"


def check_policy(policy: MaskPolicy, caller: str) -> None:
    """Raises ValueError unless `policy` is a `MaskPolicy` (a static value, so never traced)."""
    if not isinstance(policy, MaskPolicy):
        raise ValueError(
            f"{caller}(policy=...) must be a MaskPolicy, static under jit; got {policy!r}; "
            f"pass MaskPolicy.CAUSAL or MaskPolicy.VISION_BIDIRECTIONAL"
        )
