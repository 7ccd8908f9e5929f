"""What the next turn of a conversation costs: `python -m benchmarks.chat_reuse`; JSON out.

Timed is a turn of `ChatSession` from its token ids to the logits that its first token is drawn from:
rendering, tokenising and sampling are left out. Everything is compiled before it is timed, and what is
compared runs in the same rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax

import jaxinfer as ji
import jaxinfer.chat.session as session_module
import jaxinfer.chat.turn as turn_module
from benchmarks.machine import HUGE_PAGES, ROOT, LoadMeter, machine_record, pin_threads, wait_until_quiet
from jaxinfer.chat.prompt import rendered
from jaxinfer.generation import kv_dtype
from jaxinfer.generation.prefill import prefill
from jaxinfer.images import ImagePrompt
from jaxinfer.loading.chat_template import ChatTemplate

HISTORY, NEW, TURNS, CAPACITY = 2048, 64, 8, 4096
_QUESTION, _LAST_QUESTION = 160, 400  # the last is longer than a sliding layer's slack: no truncation serves
_WORDS = ("river", "mountain", "garden", "winter", "music", "paper", "window", "silver", "market", "bridge")

# For a base model that brings none; it leaves answers as they are, so that the next turn extends them.
_PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{{ message['content'] }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)


@dataclasses.dataclass
class TurnClock:
    """Filled by one turn: its ids, and when it had them and the logits."""

    ids: list[int] = dataclasses.field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0
    excluded_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s - self.excluded_s


@contextlib.contextmanager
def clocked() -> Iterator[TurnClock]:
    """Times the turn that is taken inside."""
    clock = TurnClock()
    encode, go_on = session_module.prompt_of, turn_module.continue_rows
    locate = session_module.last_question_start

    def prompt_of(*args: Any, **options: Any) -> ImagePrompt:
        prompt = encode(*args, **options)
        clock.ids = list(prompt.token_ids)
        clock.began_s = time.perf_counter()
        return prompt

    def excluded(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            found = call(*args, **options)
            clock.excluded_s += time.perf_counter() - began
            return found

        return timed

    def continue_rows(model: ji.Model, logits: jax.Array, state: ji.DecodeState, *args: Any, **options: Any):
        jax.block_until_ready((logits, state))
        clock.ended_s = time.perf_counter()
        return go_on(model, logits, state, *args, **options)

    with (
        mock.patch.object(session_module, "prompt_of", prompt_of),
        mock.patch.object(session_module, "rendered_before", excluded(session_module.rendered_before)),
        mock.patch.object(session_module, "last_question_start", excluded(locate)),
        mock.patch.object(turn_module, "continue_rows", continue_rows),
    ):
        yield clock
    if not clock.ended_s > clock.began_s > 0:
        raise RuntimeError("the turn went past the clock: ChatSession no longer calls what it times")


def question_of(session: ji.ChatSession, turns: int, target: int, word: str) -> str:
    """Returns a question with which the prompt, after the first `turns` turns, has `target` tokens."""
    kept = session.turns[:turns]
    history = [message for turn in kept for message in (turn.question, turn.answer)]
    count = 1
    for _ in range(20):
        text = " ".join([word] * count)
        messages = [*history, {"role": "user", "content": text}]
        model = session.seat.model
        represented = [turn.represented for turn in kept if turn.represented]
        length = len(session_module.prompt_of(model, rendered(model, messages), represented).token_ids)
        if length == target:
            return text
        count = max(1, count + target - length)
    raise RuntimeError(f"no question of repeated {word!r} makes a prompt of {target} tokens")


def prefill_alone(session: ji.ChatSession, ids: Sequence[int], start: int) -> float:
    """Returns the seconds to prefill `ids[start:]` into a state that holds the rest and is given up."""
    model = session.seat.model
    state = ji.init_state(
        model.config, capacity=session.seat.capacity, dtype=kv_dtype(model.config), kv_window=model.kv_window
    )
    params, config = model.params, model.config
    if start:
        _, state = prefill(params, [ids[:start]], state, config=config, donate=True)
    jax.block_until_ready(state)
    began = time.perf_counter()
    jax.block_until_ready(prefill(params, [ids[start:]], state, config=config, donate=True))
    return time.perf_counter() - began


def expect(reply: ji.Reply, mode: ji.PrefixReuseMode, suffix_len: int | None = None) -> None:
    """Ends the benchmark unless the turn did what it is meant to time."""
    plan = reply.plan
    if plan.mode is not mode or suffix_len not in (None, plan.suffix_len):
        raise RuntimeError(f"expected {mode.value} with {suffix_len} new tokens; got {plan.explanation}")


def append_round(model: ji.Model, word: str) -> dict[str, float]:
    """Returns the seconds of 64 new tokens after 2,048: in a conversation, alone, and refilled."""
    session = ji.ChatSession(model, capacity=CAPACITY)
    # The one token of the answer is represented too.
    session.send(question_of(session, 0, HISTORY - 1, word), max_new_tokens=1)
    question = question_of(session, 1, HISTORY + NEW, word)
    with clocked() as turn:
        expect(session.send(question, max_new_tokens=1), ji.PrefixReuseMode.EXACT_APPEND, NEW)
    session.undo()
    session.seat.store.drop(session.seat.slot)
    with clocked() as refill:
        reply = session.send(question, max_new_tokens=1)
    expect(reply, ji.PrefixReuseMode.FULL_REFILL, HISTORY + NEW)
    alone = prefill_alone(session, turn.ids, HISTORY)
    return {"turn": turn.seconds, "refill": refill.seconds, "alone": alone}


def edit_rounds(model: ji.Model, mode: ji.PrefixReuseMode, rounds: int) -> list[dict[str, float]]:
    """Returns the seconds of editing the last of 8 turns, and of prefilling what follows the boundary."""
    session = ji.ChatSession(model, capacity=CAPACITY)
    target = 0
    for index in range(TURNS):
        target += _LAST_QUESTION if index == TURNS - 1 else _QUESTION
        session.send(question_of(session, index, target, _WORDS[0]), max_new_tokens=1)
    found = []
    for index in range(rounds + 1):
        word = _WORDS[1 + index % (len(_WORDS) - 1)]  # differs from the last one's first word on
        question = question_of(session, TURNS - 1, target, word)
        with clocked() as turn:
            reply = session.edit(TURNS - 1, question, max_new_tokens=1)
        expect(reply, mode)
        alone = prefill_alone(session, turn.ids, reply.plan.suffix_start)
        found.append({"turn": turn.seconds, "alone": alone})
    return found[1:]  # the first one compiles


def claim(
    what: str, rounds: Sequence[dict[str, float]], over: str, under: str, bound: tuple[str, float]
) -> dict[str, Any]:
    """Returns a claim on the median over rounds of one time divided by another."""
    ratios = [each[over] / each[under] for each in rounds]
    times = {key: round(1e3 * statistics.median(each[key] for each in rounds), 2) for key in rounds[0]}
    value = round(statistics.median(ratios), 3)
    return {"what": what, "value": value, "unit": "x", "bound": bound, "median_ms": times}


def with_template(model: ji.Model) -> ji.Model:
    """Returns the model, with a plain template where it is a base model."""
    if model.chat_template is not None:
        return model
    template = ChatTemplate(_PLAIN_TEMPLATE, special_tokens={"bos_token": "<bos>"})
    return dataclasses.replace(model, chat_template=template)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns all claims."""
    smollm = with_template(ji.load("smollm2-135m", dtype=args.dtype, kv_window=ji.KvWindowPolicy.off()))
    append_round(smollm, _WORDS[0])  # compiles
    appends = [append_round(smollm, _WORDS[index % len(_WORDS)]) for index in range(args.repeats)]
    what = "smollm2-135m, 64 new tokens after 2,048"
    claims = [
        claim(f"{what}, against prefilling them alone", appends, "turn", "alone", ("at most", 1.5)),
        claim(f"{what}, refill against turn", appends, "refill", "turn", ("at least", 15)),
    ]
    edits: tuple[tuple[Callable[[], ji.Model], str, ji.PrefixReuseMode], ...] = (
        (lambda: smollm, "smollm2-135m", ji.PrefixReuseMode.TRUNCATE_APPEND),
        (
            lambda: with_template(ji.load("gemma3-270m", dtype=args.dtype, kv_window=ji.KvWindowPolicy.on())),
            "gemma3-270m, eviction on",
            ji.PrefixReuseMode.REPLAY_FROM_CHECKPOINT,
        ),
    )
    for load, name, mode in edits:
        rounds = edit_rounds(load(), mode, args.repeats)
        what = f"{name}, editing the last of 8 turns ({mode.value}), against prefilling what follows"
        claims.append(claim(what, rounds, "turn", "alone", ("at most", 1.0)))
    return claims


def run(
    benchmark: str, model: str, args: argparse.Namespace, measure: Callable[[], list[dict[str, Any]]]
) -> int:
    """Measures under watch and writes the result; returns the exit code."""
    cpus = pin_threads(args.threads)
    load = wait_until_quiet(cpus, args.max_foreign_load, 0 if args.force else args.patience_s)
    if load is not None and load > args.max_foreign_load and not args.force:
        print(f"other processes use {load:.2f} cores; --force measures all the same", file=sys.stderr)
        return 1
    meter = LoadMeter(cpus)
    claims = measure()
    during = meter.read()
    malloc = HUGE_PAGES if HUGE_PAGES in args.tunables else "glibc's own"
    foreign = None if during.foreign_s is None else round(during.foreign_s / during.wall_s, 3)
    record = {
        "benchmark": benchmark,
        "model": model,
        "dtype": args.dtype,
        "environment": machine_record(args.threads, malloc),
        "settings": {"repeats": args.repeats, "forced": args.force},
        "contenders": {
            f"jaxinfer/{args.dtype}": {"library": "jaxinfer", "versions": {"jax": jax.__version__}}
        },
        "foreign_load": foreign,
        "claims": claims,
    }
    out = Path(args.out or ROOT / "benchmarks" / "results" / f"{benchmark}-jax{jax.__version__}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(claims, indent=1))
    return 0


def parser(prog: str, doc: str) -> argparse.ArgumentParser:
    """Returns the options that the benchmarks of this form share."""
    found = argparse.ArgumentParser(prog=prog, description=doc.partition("\n")[0])
    found.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    found.add_argument("--repeats", type=int, default=5)
    found.add_argument("--threads", type=int, default=2)
    found.add_argument("--out", help="default: benchmarks/results/NAME-jaxVERSION.json")
    found.add_argument("--max-foreign-load", type=float, default=0.1, help="cores")
    found.add_argument("--patience-s", type=float, default=120)
    found.add_argument("--force", action="store_true", help="measure whatever else runs")
    found.set_defaults(tunables=os.environ.get("GLIBC_TUNABLES", ""))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = parser("python -m benchmarks.chat_reuse", __doc__).parse_args(argv)
    return run("chat_reuse", "smollm2-135m and gemma3-270m", args, lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
