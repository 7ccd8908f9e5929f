"""Rows being generated: checked options, one answer a row, and the loop that extends them all."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.generation.decode import MAX_STEPS, DecodeRun, TokenBlock, decode_steps, first_token
from jaxinfer.generation.text import RowText
from jaxinfer.models import Model
from jaxinfer.sampling import Sampling, stack_sampling
from jaxinfer.state import DecodeState

FinishReason = Literal["stop", "length"]
Prompt = str | Sequence[int]

GREEDY = Sampling()
_STREAMED_STEPS = 4  # tokens a call when someone watches: a fraction of a second, a small share of host time


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities of one generated token.

    Attributes:
      token_id: the token.
      logprob: under the model's own distribution, before any sampling option.
      processed_logprob: under the distribution it was drawn from; 0 for greedy.
      top: the most likely alternatives under the model's own distribution, (id, logprob), best first.
    """

    token_id: int
    logprob: float
    processed_logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Generation:
    """The continuation of one prompt.

    Attributes:
      text: decoded, without special tokens, cut before a stop string.
      token_ids: every generated id, an end token and the tokens of a stop string included.
      finish_reason: "stop" at an end token or a stop string, "length" at max_new_tokens.
      prompt_token_ids: what the prompt became.
      stop: the stop string that ended it, None otherwise.
      logprobs: one entry a generated token, None unless asked for.
      prompt_logprobs: raw log-probability of each prompt token after the first, None unless asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...]
    stop: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class StreamChunk:
    """A piece of one row's answer, as it is generated: whole characters, possibly none."""

    row: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclasses.dataclass(frozen=True)
class RowOptions:
    """How one row is generated.

    Attributes:
      max_new_tokens: the most tokens to generate, at least 1.
      sampling: how they are chosen.
      stop: strings that end the row, none of them empty.
      logprobs: None for none; k >= 0 for each token's and its k most likely alternatives'.
    """

    max_new_tokens: int
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    logprobs: int | None = None


@dataclasses.dataclass(frozen=True)
class Options:
    """How the rows of a call are generated, one entry a row; every value checked."""

    rows: tuple[RowOptions, ...]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def checked(
        cls,
        model: Model,
        rows: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
    ) -> Options:
        """Returns the options of a call; ValueError names what does not fit `rows` or the model."""
        _check_count("max_new_tokens", max_new_tokens, least=1)
        if logprobs is not None:
            _check_count("logprobs", logprobs, least=0)
            if logprobs > model.config.vocab_size:
                raise ValueError(
                    f"generate(logprobs=...) must be at most the vocabulary of {model.config.vocab_size}; "
                    f"got {logprobs}"
                )
        each = (sampling,) * len(rows) if isinstance(sampling, Sampling) else tuple(sampling)
        if len(each) != len(rows):
            raise ValueError(
                f"generate(sampling=...) must be one Sampling, or one for each of {len(rows)} prompts; "
                f"got {len(each)}"
            )
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if any(not isinstance(text, str) or not text for text in stops):
            raise ValueError(f"generate(stop=...) must be strings that are not empty; got {stops!r}")
        for index, row in enumerate(rows):
            _check_row(model, index, row, max_new_tokens)
        row_options = tuple(RowOptions(max_new_tokens, one, stops, logprobs) for one in each)
        return cls(row_options, end_token_ids(model))

    def num_top(self, vocab_size: int) -> int:
        """Returns how many alternatives to compute for every row: a power of two: few programs."""
        most = max((row.logprobs or 0 for row in self.rows), default=0)
        return min(1 << (most - 1).bit_length(), vocab_size) if most else 0


def end_token_ids(model: Model) -> tuple[int, ...]:
    """Returns the ids that end a row: the config's and the tokenizer's."""
    return tuple(sorted({*model.config.eos_token_ids, *model.tokenizer.eos_token_ids}))


def encode_prompts(model: Model, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
    """Returns each prompt's token ids; ValueError when there is no prompt."""
    if isinstance(prompts, str):
        prompts = [prompts]
    rows = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            rows.append(model.tokenizer.encode(prompt))
        elif isinstance(prompt, Sequence | np.ndarray):
            rows.append([operator.index(token) for token in prompt])
        else:
            raise ValueError(
                f"generate(prompts=...) must hold texts or sequences of token ids; got {prompt!r} at "
                f"{index}; a single row of ids needs a list around it"
            )
    if not rows:
        raise ValueError("generate(prompts=...) must hold at least one prompt")
    return rows


def continue_rows(
    model: Model,
    logits: jax.Array,
    state: DecodeState,
    rows: Sequence[Sequence[int]],
    options: Options,
    *,
    stream: Callable[[StreamChunk], None] | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> tuple[DecodeRun, list[RowAnswer]]:
    """Returns the run after every row has finished, and the answers.

    Args:
      logits: [B, V], after each row's last token; state: that holds those rows, donated. B may exceed the
        number of rows: the rest is padding, of which nothing is generated.
      rows: the tokens that a repetition penalty counts as seen.
      stream: called with each row's new text after every device call.
      on_tokens: called with the number of tokens of every device call.
    """
    batch, vocab_size = logits.shape
    padding = batch - len(rows)
    num_top = options.num_top(vocab_size)
    answers = [RowAnswer(model, row, index, options) for index, row in enumerate(rows)]
    # numpy: as jax arrays, each would be a small program to compile before the first token.
    eos = np.array(options.eos_token_ids or (-1,), np.int32)
    limit = np.array([row.max_new_tokens for row in options.rows] + [0] * padding, np.int32)
    sampling = None
    if not all(row.sampling.is_argmax for row in options.rows):
        sampling = stack_sampling([row.sampling for row in options.rows] + [GREEDY] * padding)
    seen = _seen_tokens(rows, options, batch, vocab_size)
    run, block = first_token(logits, state, limit, eos, sampling, seen, num_top=num_top)
    steps = 1
    while True:
        host_block: TokenBlock = jax.device_get(block)
        for answer in answers:
            answer.extend(host_block, stream)
        if on_tokens is not None:
            on_tokens(int(host_block.valid.sum()))
        done = np.array([answer.is_done for answer in answers] + [True] * padding)
        if done.all():
            return run, answers
        if any(row.stop for row in options.rows):  # the device knows nothing of stop strings
            run = dataclasses.replace(run, finished=run.finished | done)
        block = None  # its buffers are not needed while the next call runs
        steps = MAX_STEPS if stream is None else min(2 * steps, _STREAMED_STEPS)
        run, block = decode_steps(model.params, run, np.int32(steps), config=model.config, num_top=num_top)


class RowAnswer:
    """One row's tokens and text as they come; belongs to one call and becomes a `Generation`."""

    def __init__(self, model: Model, prompt: Sequence[int], row: int, options: Options):
        self._options, self._ends = options.rows[row], options.eos_token_ids
        self._text = RowText(model.tokenizer.stream_decoder(), self._options.stop)
        self._prompt, self._row = tuple(prompt), row
        self._logprobs: list[TokenLogprob] = []
        self.token_ids: list[int] = []
        self.sampled_ids: list[int] = []  # also what the device sampled after a stop string it knows not of
        self.finish_reason: FinishReason | None = None
        self.failure: FloatingPointError | None = None  # why the row can get no further

    @property
    def is_done(self) -> bool:
        """True when nothing more comes."""
        return self.finish_reason is not None or self.failure is not None

    def extend(self, block: TokenBlock, stream: Callable[[StreamChunk], None] | None) -> None:
        """Takes this row's tokens of a block, up to what ends it, and streams the text they release."""
        self.sampled_ids += block.tokens[self._row, block.valid[self._row]].tolist()
        if self.is_done:
            return
        before, text = len(self.token_ids), ""
        for column in np.flatnonzero(block.valid[self._row]):
            text += self._take(block, int(column))
            if self.is_done:
                text += self._text.finish()
                if self._text.stopped_by is not None:  # completed by the mark of an unfinished character
                    self.finish_reason = "stop"
                break
        if stream is not None and len(self.token_ids) > before:
            stream(StreamChunk(self._row, text, tuple(self.token_ids[before:]), self.finish_reason))

    def _take(self, block: TokenBlock, column: int) -> str:
        token = int(block.tokens[self._row, column])
        if token < 0:
            self.failure = FloatingPointError(
                f"row {self._row}: the logits after {len(self.token_ids)} new tokens are not numbers; "
                "the weights or the inputs hold NaN or infinity"
            )
            return ""
        self.token_ids.append(token)
        if self._options.logprobs is not None:
            self._logprobs.append(_token_logprob(block, self._row, column, self._options.logprobs))
        if token in self._ends:
            self.finish_reason = "stop"
            return ""
        text = self._text.push(token)
        if self._text.stopped_by is not None:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self._options.max_new_tokens:
            self.finish_reason = "length"
        return text

    @property
    def text(self) -> str:
        """The text so far, without what is held back."""
        return self._text.text

    def result(self, prompt_logprobs: tuple[float, ...] | None = None) -> Generation:
        """Returns the finished row.

        Raises:
          FloatingPointError: its logits were not numbers.
        """
        if self.failure is not None:
            raise self.failure
        assert self.finish_reason is not None
        return Generation(
            text=self._text.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            prompt_token_ids=self._prompt,
            stop=self._text.stopped_by,
            logprobs=None if self._options.logprobs is None else tuple(self._logprobs),
            prompt_logprobs=prompt_logprobs,
        )


def _token_logprob(block: TokenBlock, row: int, column: int, num_top: int) -> TokenLogprob:
    ids, values = block.top_ids[row, column, :num_top], block.top_logprobs[row, column, :num_top]
    top = zip(ids.tolist(), values.tolist(), strict=True)
    return TokenLogprob(
        token_id=int(block.tokens[row, column]),
        logprob=float(block.logprobs[row, column]),
        processed_logprob=float(block.processed_logprobs[row, column]),
        top=tuple(top),
    )


def _seen_tokens(
    rows: Sequence[Sequence[int]], options: Options, batch: int, vocab_size: int
) -> jax.Array | None:
    """Returns which tokens each row has seen, bool [B, V]; None where no row is penalised for them."""
    if all(row.sampling.repetition_penalty in (None, 1.0) for row in options.rows):
        return None
    seen = np.zeros((batch, vocab_size), bool)
    for index, row in enumerate(rows):
        seen[index, np.asarray(row, np.int64)] = True
    return jnp.asarray(seen)


def _check_count(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"generate({name}=...) must be an int of at least {least}; got {value!r}")


def _check_row(model: Model, index: int, row: Sequence[int], max_new_tokens: int) -> None:
    vocab_size, limit = model.config.vocab_size, model.config.max_positions
    if not row:
        raise ValueError(
            f"generate(prompts=...) row {index} has no tokens; an empty prompt cannot be continued"
        )
    bad = next((token for token in row if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise ValueError(
            f"generate(prompts=...) row {index} has token id {bad}; ids must be in 0..{vocab_size - 1}"
        )
    if len(row) + max_new_tokens > limit:
        raise ValueError(
            f"generate(prompts=...) row {index} has {len(row)} tokens, and max_new_tokens={max_new_tokens} "
            f"more exceed the model's {limit} positions"
        )
