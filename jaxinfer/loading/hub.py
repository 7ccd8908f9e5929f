"""Checkpoints on the Hugging Face hub, where its client library is installed (the `hub` extra)."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ("*.safetensors", "*.json", "*.jinja")


class HubError(RuntimeError):
    """The hub did not give a model; the message is one line that says why."""


def is_hub_id(name: str) -> bool:
    """True for `owner/name`, unless the part before the slash is a directory here: then it is a path."""
    return _HUB_ID.fullmatch(name) is not None and not Path(name).parent.is_dir()


def hub_snapshot(hub_id: str) -> Path:
    """The directory with the weights and tokenizer of a hub repository, fetched into the hub's own cache.

    Raises:
        ValueError: there is no client library.
        HubError: no such repository, no access or no network; says which.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ValueError(f"model {hub_id!r} does not exist here; to look on the hub install jaxinfer[hub]")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(_WANTED)))
    except Exception as error:  # a dozen classes of this library and of its HTTP client
        reason = next(
            (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        raise HubError(
            f"model {hub_id!r} does not exist here, and the hub does not give it: {reason}"
        ) from error
