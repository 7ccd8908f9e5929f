"""The one error of this package."""

from __future__ import annotations


class ImageError(ValueError):
    """An image that cannot be taken; the message is one line that names it and says what to do."""
