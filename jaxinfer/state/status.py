"""What can go wrong with a row where the host cannot see it."""

import enum


class Status(enum.IntFlag):
    """Sticky bits of `DecodeState.status`; a row with any bit set has NaN logits from then on."""

    OVERFLOWED = 1  # tokens past the capacity were dropped; `length` stays at the capacity
    BAD_TOKEN = 2  # a token id outside the vocabulary
    CUT_RUN = 4  # a step that began inside an image run which an earlier step had begun
    BAD_ROLLBACK = 8  # a truncation or restore that the resident rows do not allow
