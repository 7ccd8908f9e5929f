"""What makes two runs the same job: everything that decides the bytes of the output."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import jax

from jaxinfer.batch.lines import InputFacts
from jaxinfer.batch.paths import ResumeError
from jaxinfer.batch.request import Defaults
from jaxinfer.generation import kv_dtype
from jaxinfer.models import Model
from jaxinfer.ops import attention_implementations
from jaxinfer.version import own_version


@dataclasses.dataclass(frozen=True)
class JobSettings:
    """The options of a job.

    Attributes:
      defaults: what a row gets that does not say.
      batch_size: the most rows of a batch; None: 16, or what the memory allows.
      memory_bytes: what a batch's state may cost, weights not counted; None: no limit.
    """

    defaults: Defaults
    batch_size: int | None = None
    memory_bytes: int | None = None


def describe_job(
    model: Model, facts: InputFacts, settings: JobSettings, images: str | None = None
) -> dict[str, Any]:
    """Returns what a job is as JSON values, one level of groups; `images`: digest of the files it names."""
    options = dataclasses.asdict(settings.defaults)
    options |= options.pop("sampling")
    options |= {"batch_size": settings.batch_size, "memory": settings.memory_bytes}
    template = model.chat_template
    job = {
        "input": {"sha256": facts.sha256, "rows": facts.num_rows, "images": images},
        "options": options,
        "model": {
            "weights": model.fingerprint,
            "tokenizer": model.tokenizer.fingerprint,
            "chat_template": None if template is None else template.fingerprint,
            "dtype": model.config.weight_dtype,
            "kv_dtype": kv_dtype(model.config),
            "kv_window": model.kv_window.enabled,
        },
        "platform": {
            "jaxinfer": own_version(),
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "native_kernels": attention_implementations()["native"] is None,  # they round differently
            "device": jax.devices()[0].device_kind,
        },
    }
    return json.loads(json.dumps(job))  # as it is read back


def check_same_job(began: dict[str, Any], now: dict[str, Any], journal: Path) -> None:
    """Raises ResumeError, naming the first difference, where a job is not the one that a journal is of."""
    difference = next(
        (
            _difference(group, name, began[group].get(name), now[group][name])
            for group in now
            for name in now[group]
            if began[group].get(name) != now[group][name]
        ),
        None,
    )
    if difference is not None:
        raise ResumeError(
            f"{journal} is of another job: {difference}; resume with what it began with, or start anew with "
            "--overwrite"
        )


def _difference(group: str, name: str, began: Any, now: Any) -> str:
    if group == "input" and name == "images":
        return "the images that the input names are not the same"
    if group == "input":
        return "the input file is not the same"
    if group == "options":
        return f"--{name.replace('_', '-')} was {_shown(began)} and is {_shown(now)}"
    if name in ("weights", "tokenizer", "chat_template"):
        return f"the model is not the same: its {name.replace('_', ' ')} differs"
    return f"{name} was {_shown(began)} and is {_shown(now)}"


def _shown(value: Any) -> str:
    return "not given" if value in (None, []) else json.dumps(value)
