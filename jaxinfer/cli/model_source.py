"""`--model` and how it is loaded: shared by every command that runs a model."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from jaxinfer.cli.interrupts import in_thread
from jaxinfer.cli.pull import pull_with_progress
from jaxinfer.cli.terminal import stage
from jaxinfer.loading.cache import is_pulled
from jaxinfer.loading.known_models import DEFAULT_MODEL, KNOWN_MODELS

if TYPE_CHECKING:
    from jaxinfer.models import Model


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Declares --model, --dtype and --kv-window."""
    add_model_name(parser, f"default {DEFAULT_MODEL}, fetched when missing")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "int8"),
        help="of the weights; int8: a scale for each output channel; default: the checkpoint's own",
    )
    add_kv_window(parser)


def add_kv_window(parser: argparse.ArgumentParser) -> None:
    """Declares --kv-window and --no-kv-window."""
    parser.add_argument(
        "--kv-window",
        action=argparse.BooleanOptionalAction,
        help="drop keys and values behind the window of sliding layers; default: as JAXINFER_KV_WINDOW says",
    )


def add_model_name(parser: argparse.ArgumentParser, default: str) -> None:
    """Declares --model; `default` says what happens without it."""
    known = ", ".join(KNOWN_MODELS)
    parser.add_argument(
        "--model",
        metavar="M",
        help=f"a known name ({known}), a directory with safetensors, a .gguf file or a hub id; {default}",
    )


def load_model(args: argparse.Namespace) -> tuple[Model, float]:
    """Returns the model that the options name and the seconds that loading took.

    The default model is pulled when it is missing; any other known one is refused with what to type.
    """
    name = args.model or DEFAULT_MODEL
    if name == DEFAULT_MODEL and not is_pulled(KNOWN_MODELS[name]):
        pull_with_progress(name)
    with stage(f"loading {name}"):
        return in_thread(lambda: _load(name, args))


def _load(name: str, args: argparse.Namespace) -> tuple[Model, float]:
    from jaxinfer.loading import load
    from jaxinfer.state import KvWindowPolicy

    policy = None if args.kv_window is None else KvWindowPolicy(enabled=args.kv_window)
    start = time.perf_counter()
    model = load(name, dtype=args.dtype, kv_window=policy)
    return model, time.perf_counter() - start
