"""`jaxinfer generate`: one prompt to its continuation."""

from __future__ import annotations

import argparse
import dataclasses
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.exit_codes import INTERRUPTED, OK, UsageError
from jaxinfer.cli.interrupts import in_thread
from jaxinfer.cli.logprob_report import logprob_table
from jaxinfer.cli.model_source import add_model_options, load_model
from jaxinfer.cli.sampling_options import add_sampling_options, sampling_of
from jaxinfer.cli.terminal import note, render, say, stage, write_json, write_out
from jaxinfer.loading.known_models import DEFAULT_MODEL

if TYPE_CHECKING:
    from jaxinfer.generation import Generation, StreamChunk
    from jaxinfer.generation.image_prompts import ShownPrompt
    from jaxinfer.models import Model
    from jaxinfer.sampling import Sampling

_NEW_TOKENS = 256


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the text; - reads it from standard input")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="PATH",
        help="shown before the prompt, for models that read images; may be repeated",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message, put before the prompt")
    parser.add_argument("--raw", action="store_true", help="continue the text itself: no chat template")
    add_model_options(parser)
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"default {_NEW_TOKENS}, or what the model's positions leave",
    )
    add_sampling_options(parser)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="S", help="end before this text; may be repeated"
    )
    parser.add_argument(
        "--logprobs",
        type=int,
        metavar="K",
        help="show each token's log-probability and those of the K most likely",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-stream", action="store_true", help="print the text when it is complete")


def run(args: argparse.Namespace) -> int:
    text = _prompt_text(args.prompt)
    with stage("starting"):
        sampling = in_thread(lambda: sampling_of(args))
    if sampling.temperature > 0 and sampling.seed is None:
        # Drawn here, so that it can be told and the answer can be had again.
        sampling = dataclasses.replace(sampling, seed=secrets.randbits(32))
    model, load_s = load_model(args)
    prompt = in_thread(lambda: encode_prompt(model, text, args.image, system=args.system, raw=args.raw))
    token_ids = list(prompt.prompt.token_ids)
    answer = _Answer(echo=not (args.json or args.no_stream))
    result = None
    try:
        with stage("reading the prompt (a first run compiles)") as end_stage:
            answer.at_first_token = end_stage
            result = in_thread(lambda: _generate(args, model, prompt, sampling, answer))
    except KeyboardInterrupt:
        answer.close()
    if args.json:
        timings = {"load_ms": round(load_s * 1e3, 1), **answer.timings()}
        write_json(_record(args, model, answer, result, len(token_ids), sampling.seed) | {"timings": timings})
    else:
        _finish_text(model, answer, result)
    if answer.interrupted:
        say(f"interrupted after {len(answer.token_ids)} tokens")
        return INTERRUPTED
    return OK


def _generate(
    args: argparse.Namespace, model: Model, prompt: ShownPrompt, sampling: Sampling, answer: _Answer
) -> Generation:
    from jaxinfer.generation import generate

    token_ids = prompt.prompt.token_ids
    room = model.config.max_positions - len(token_ids)
    by_default = max(1, min(_NEW_TOKENS, room))
    [result] = generate(
        model,
        [token_ids],
        images=[prompt.images] if prompt.images else None,
        max_new_tokens=by_default if args.max_new_tokens is None else args.max_new_tokens,
        sampling=sampling,
        stop=args.stop,
        logprobs=args.logprobs,
        stream=answer,
    )
    return result


def encode_prompt(
    model: Model, text: str, images: Sequence[str], *, system: str | None, raw: bool
) -> ShownPrompt:
    """Returns a prompt: as a chat's first message where the model has a template, else as text, in which
    the placeholders of images must be written.

    Raises:
      UsageError: a system message where no template can place it.
      ChatTemplateError: the template refuses the messages.
      ImageError: an image cannot be taken, or has no placeholder.
    """
    from jaxinfer.chat.prompt import question_of, rendered
    from jaxinfer.generation.image_features import prepare_images
    from jaxinfer.generation.image_prompts import ShownPrompt, spelled_out
    from jaxinfer.images import image_prompt

    prepared = prepare_images(model, images, name="--image")
    if raw or model.chat_template is None:
        if system is not None:
            why = "--raw uses no chat template" if raw else "this model has no chat template"
            raise UsageError(f"--system cannot be used: {why}; put the text into the prompt")
        ids = model.tokenizer.encode(spelled_out(model, text, prepared) if prepared else text)
    else:
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append(dict(question_of(text, len(images))))
        ids = model.tokenizer.encode_rendered(rendered(model, messages, prepared))
    return ShownPrompt(image_prompt(ids, prepared, config=model.config), prepared)


class _Answer:
    """What has been generated so far, kept so that an interrupt loses nothing; the callback of `generate`."""

    def __init__(self, *, echo: bool):
        self.at_first_token: Callable[[], None] = lambda: None
        self.interrupted = False
        self.token_ids: list[int] = []
        self.text = ""
        self.echoed = 0
        self._echo = echo
        self._start = time.perf_counter()
        self._seen: list[tuple[float, int]] = []  # (time, tokens so far) after every device call
        self._lock = threading.Lock()

    def __call__(self, chunk: StreamChunk) -> None:
        with self._lock:
            if self.interrupted:
                raise KeyboardInterrupt
            self.token_ids += chunk.token_ids
            self.text += chunk.text
            self._seen.append((time.perf_counter(), len(self.token_ids)))
            if len(self._seen) == 1:
                self.at_first_token()
            if self._echo:
                self.print_new()

    def close(self) -> None:
        """Takes nothing more: the answer was interrupted, though the generating thread may not know yet."""
        with self._lock:
            self.interrupted = True

    def print_new(self) -> None:
        """Writes what has not been written yet."""
        if new := self.text[self.echoed :]:
            self.echoed += len(new)
            write_out(new)

    def timings(self) -> dict[str, float | None]:
        """Returns milliseconds to the first token, and the rate after it.

        The first call of the decode loop may compile it, so the rate counts from that call's end; None where
        nothing came after it.
        """
        if not self._seen:
            return {"first_token_ms": None, "tokens_per_s": None}
        (first, _), (warm, before), (last, count) = self._seen[0], self._seen[:2][-1], self._seen[-1]
        rate = round((count - before) / (last - warm), 2) if count > before else None
        return {"first_token_ms": round((first - self._start) * 1e3, 1), "tokens_per_s": rate}


def _finish_text(model: Model, answer: _Answer, result: Generation | None) -> None:
    answer.print_new()
    if not answer.text.endswith("\n") and (answer.text or result is not None):
        write_out("\n")
    if result is not None and result.logprobs is not None:
        write_out("\n" + render(logprob_table(model.tokenizer, result.logprobs)))
    timings = answer.timings()
    if not answer.interrupted:
        rate = timings["tokens_per_s"]
        speed = "" if rate is None else f" · {rate:.1f} tokens/s"
        first_s = (timings["first_token_ms"] or 0) / 1e3
        note(f"{len(answer.token_ids)} tokens · first after {first_s:.2f} s{speed}")


def _record(
    args: argparse.Namespace,
    model: Model,
    answer: _Answer,
    result: Generation | None,
    num_prompt_tokens: int,
    seed: int | None,
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "model": args.model or DEFAULT_MODEL,
        "text": answer.text,
        "finish_reason": "interrupted" if result is None else result.finish_reason,
        "stop": None if result is None else result.stop,
        "num_prompt_tokens": num_prompt_tokens,
        "num_new_tokens": len(answer.token_ids),
        "token_ids": answer.token_ids,
        "seed": seed,
    }
    if result is not None and result.logprobs is not None:
        from jaxinfer.generation.records import logprob_records

        record["logprobs"] = logprob_records(model.tokenizer, result.logprobs)
    return record


def _prompt_text(prompt: str) -> str:
    """Returns the prompt, read from standard input for "-"; one newline at its very end does not count."""
    if prompt != "-":
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UsageError("PROMPT is not UTF-8 text") from None
        return prompt
    if sys.stdin is None:
        raise UsageError("PROMPT is -, but standard input is closed")
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}") from None
