"""`jaxinfer info`: what is installed, what runs here, and what a model is and needs."""

from __future__ import annotations

import argparse
from typing import Any

from jaxinfer.cli.budget import budget_facts, budget_report
from jaxinfer.cli.exit_codes import OK, UsageError
from jaxinfer.cli.facts import environment_facts, model_facts
from jaxinfer.cli.interrupts import in_thread
from jaxinfer.cli.model_source import add_kv_window, add_model_name
from jaxinfer.cli.sizes import format_bytes, parse_bytes
from jaxinfer.cli.terminal import render, stage, write_json, write_out
from jaxinfer.loading.cache import is_pulled
from jaxinfer.loading.known_models import DEFAULT_MODEL, KNOWN_MODELS


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model_name(parser, f"default {DEFAULT_MODEL}, where it is pulled")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "int8"), help="of the weights")
    parser.add_argument(
        "--context", type=int, metavar="N", help="positions to budget for; default: as trained"
    )
    parser.add_argument("--budget", type=parse_bytes, metavar="SIZE", help="a state's bytes, such as 2GiB")
    add_kv_window(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    with stage("looking"):
        facts = in_thread(lambda: _facts(args))
    if args.json:
        write_json(facts)
    else:
        write_out(_report(facts))
    return OK


def _facts(args: argparse.Namespace) -> dict[str, Any]:
    facts = environment_facts()
    name = args.model
    if name is None and is_pulled(KNOWN_MODELS[DEFAULT_MODEL]):
        name = DEFAULT_MODEL
    facts["model"] = facts["state"] = None
    if name is not None:
        config, facts["model"] = model_facts(name, args.dtype)
        facts["state"] = budget_facts(
            config, kv_window=args.kv_window, context=args.context, budget_bytes=args.budget
        )
    elif any(option is not None for option in (args.context, args.budget, args.kv_window)):
        raise UsageError(f"a budget needs a --model, since {DEFAULT_MODEL} is not pulled")
    return facts


def _report(facts: dict[str, Any]) -> str:
    versions = " · ".join(f"{name} {version}" for name, version in facts["versions"].items())
    devices = ", ".join(
        f"{device['kind']} ({device['platform']}:{device['id']})" for device in facts["devices"]
    )
    pulled = ", ".join(f"{entry['name']} ({format_bytes(entry['file_bytes'])})" for entry in facts["pulled"])
    here = {
        "Versions": versions,
        "Devices": devices,
        "Cache": facts["cache"],
        "Pulled": pulled or "nothing",
        "Compiled programs": facts["compiled_programs"] or "not kept",
        **{
            f"{label} {name}": "runs here" if reason is None else f"not here: {reason}"
            for label, op in (("Attention", "attention"), ("Gated delta", "gated_delta"))
            for name, reason in facts[op].items()
        },
    }
    parts = [*_section("Here", here)]
    if facts["model"] is None:
        parts.append(f"\n{DEFAULT_MODEL} is not pulled: `jaxinfer pull {DEFAULT_MODEL}`, or name a --model")
    else:
        parts += ["", *_section(facts["model"]["name"], _model_rows(facts["model"], facts["state"])), ""]
        parts += budget_report(facts["state"], facts["model"]["max_positions"])
    return render(*parts)


def _model_rows(model: dict[str, Any], state: dict[str, Any]) -> dict[str, str]:
    kinds = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in model["layers"].items())
    windows = ", ".join(str(window) for window in model["windows"])
    heads = f"{model['num_q_heads']} query, {model['num_kv_heads']} key/value, of {model['head_dim']}"
    weights = f"{model['num_params'] / 1e6:.1f} M, {format_bytes(model['params_bytes'])} in {model['dtype']}"
    return {
        "File": f"{model['path']} ({format_bytes(model['file_bytes'])})",
        "Licence": model["licence"] or "the checkpoint does not say",
        "Family": model["family"],
        "Layers": kinds + (f" (window {windows})" if windows else ""),
        "Width": f"{model['embed_dim']}; heads: {heads}",
        "Parameters": weights,
        "Vocabulary": f"{model['vocab_size']:,} tokens",
        "Trained length": f"{model['max_positions']:,} positions",
        "Chat template": "yes" if model["chat_template"] else "none: a base model, continues text",
        "Keys and values": f"{state['kv_bytes_per_token']:,} bytes a token in {state['kv_dtype']}",
    }


def _section(title: str, rows: dict[str, str]) -> tuple[Any, ...]:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows.items():
        table.add_row(label, Text(value))
    return Text(title, style="bold"), table
