"""One turn at the level of tokens: open a slot, prefill what is new, generate, save."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

from jaxinfer.generation import Generation, StreamChunk, kv_dtype
from jaxinfer.generation.image_features import ImageEncoder
from jaxinfer.generation.image_prompts import ShownPrompt
from jaxinfer.generation.image_rows import ImageRow, image_row
from jaxinfer.generation.prefill import prefill, prefill_chunks
from jaxinfer.generation.rows import Options, continue_rows
from jaxinfer.images.prompt import Span
from jaxinfer.models import Model
from jaxinfer.prefix import ContentSpan, PrefixMetadata, PrefixRestorePlan, PrefixStore
from jaxinfer.prefix.store import ring_checkpoint
from jaxinfer.state import DecodeState, KvResidency, init_state


@dataclasses.dataclass(frozen=True)
class Seat:
    """Where a conversation's state lives, and what it is made with.

    Attributes:
      store: holds the slot.
      slot: the conversation's name in it.
      model: what the state belongs to.
      capacity: positions that the state is allocated for.
      checkpoints: the most checkpoints kept of its history; none are where its state can simply be truncated.
    """

    store: PrefixStore
    slot: Hashable
    model: Model
    capacity: int
    checkpoints: int

    @property
    def keeps_checkpoints(self) -> bool:
        """True where some length of the history may be out of a truncation's reach."""
        config, policy = self.model.config, self.model.kv_window
        evicts = any(policy.layer_window(config, index) for index in range(len(config.layers)))
        return self.checkpoints > 0 and (evicts or config.is_recurrent)

    def wants_checkpoints(self, *, has_images: bool) -> bool:
        """Returns whether a turn is to take checkpoints: also where images bound the truncation of a state
        that has only them to bound it, with three-axis rope."""
        return self.keeps_checkpoints or (
            has_images and self.checkpoints > 0 and self.model.config.uses_mrope
        )

    @property
    def metadata(self) -> PrefixMetadata:
        """What two states must have in common to be exchangeable."""
        model, config = self.model, self.model.config
        ropes = [layer.rope for layer in config.layers if layer.rope is not None]
        return PrefixMetadata(
            # Weights in another dtype are other weights, whatever the rows are kept in.
            model_fingerprint=model.fingerprint and (model.fingerprint, config.weight_dtype),
            tokenizer_fingerprint=model.tokenizer.fingerprint,
            adapter_fingerprint=None,
            vocab_size=config.vocab_size,
            capacity=self.capacity,
            kv_dtype=kv_dtype(config),
            rope_theta=tuple(rope.theta for rope in ropes),
            partial_rotary_factor=ropes[0].rotary_dim / config.head_dim if ropes else None,
            layer_pattern=config.layers,
            chat_template_fingerprint=None
            if model.chat_template is None
            else model.chat_template.fingerprint,
            mask_policy=frozenset(layer.mask_policy for layer in config.layers),
            kv_window=model.kv_window,
        )

    def fresh_state(self) -> DecodeState:
        """Returns an empty state."""
        model = self.model
        return init_state(
            model.config, capacity=self.capacity, dtype=kv_dtype(model.config), kv_window=model.kv_window
        )


def seat_bytes(model: Model, capacity: int, checkpoints: int) -> int:
    """Returns the bytes of one conversation's state with all its checkpoints."""
    residency = KvResidency.from_config(
        model.config, model.kv_window, dtype=kv_dtype(model.config), checkpoints=checkpoints
    )
    return residency.allocated_bytes(capacity)


@dataclasses.dataclass(frozen=True)
class TurnResult:
    """What a turn gave.

    Attributes:
      plan: what of the slot's state was kept.
      generation: the answer.
      fed_ids: every id that the state has taken after the prompt: the answer's, and what was sampled before
        a stop string was noticed.
    """

    plan: PrefixRestorePlan
    generation: Generation
    fed_ids: tuple[int, ...]


def run_turn(
    seat: Seat,
    ids: Sequence[int],
    options: Options,
    *,
    checkpoint_at: Sequence[int] = (),
    shown: ShownPrompt | None = None,
    encoder: ImageEncoder | None = None,
    stream: Callable[[StreamChunk], None] | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> TurnResult:
    """Returns the answer to a prompt and leaves prompt and answer in the seat's slot.

    Whatever goes wrong on the way, the slot is as it was before, or empty where the store's budget had no
    room to keep it beside the turn's own state.

    Args:
      ids: the whole prompt, checked with `options` and against the capacity.
      checkpoint_at: lengths of the prompt to take checkpoints at, where the seat keeps any.
      shown: the same prompt with the images behind its placeholders; None: there are none.
      encoder: keeps features between turns; None: one for this turn. Images that the kept state covers are
        not encoded.
      stream: as in `generate`.
      on_tokens: called with the number of tokens of every device call.
    """
    model, config, metadata = seat.model, seat.model.config, seat.metadata
    content = () if shown is None else shown.prompt.content
    opened = seat.store.open(seat.slot, metadata, ids, fresh=seat.fresh_state, content=_spans(content))
    start = opened.plan.suffix_start
    takes = seat.wants_checkpoints(has_images=bool(content))
    wanted = [at for at in checkpoint_at if at > start] if takes else []
    chunks = prefill_chunks(
        model.params,
        [list(ids[start:])],
        opened.state,
        config=config,
        donate=opened.donate,
        checkpoint_at=wanted,
        images=[_suffix_images(seat.model, shown, start, encoder)],
    )
    taken = []
    for logits, state, checkpoints in chunks:  # noqa: B007
        taken += [ring_checkpoint(found) for found in checkpoints if bool(found.valid[0])]
    run, (answer,) = continue_rows(model, logits, state, [ids], options, stream=stream, on_tokens=on_tokens)
    generation = answer.result()
    # The last token was sampled and not fed; fed, the state stands for the whole answer.
    _, state = prefill(model.params, [answer.sampled_ids[-1:]], run.state, config=config, donate=True)
    seat.store.save(
        opened,
        metadata,
        [*ids, *answer.sampled_ids],
        state,
        max_checkpoints=seat.checkpoints,
        taken=taken,
        content=_spans(content),
    )
    return TurnResult(opened.plan, generation, tuple(answer.sampled_ids))


def _spans(content: Sequence[Span]) -> tuple[ContentSpan, ...]:
    return tuple(ContentSpan(*span) for span in content)


def _suffix_images(
    model: Model, shown: ShownPrompt | None, start: int, encoder: ImageEncoder | None
) -> ImageRow | None:
    """Returns what the columns of a prompt from `start` on need of its images, encoding no others."""
    if shown is None:
        return None
    needed = {digest for _, end, digest in shown.prompt.content if end > start}
    encoder = ImageEncoder(model) if encoder is None else encoder
    features = encoder.features(image for image in shown.images if image.digest in needed)
    return image_row(shown.prompt, features, start=start)
