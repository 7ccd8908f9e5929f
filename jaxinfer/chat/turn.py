"""One turn at the level of tokens: open a slot, prefill what is new, generate, save."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

from jaxinfer.generation import Generation, StreamChunk, kv_dtype
from jaxinfer.generation.prefill import prefill, prefill_chunks
from jaxinfer.generation.rows import Options, continue_rows
from jaxinfer.models import Model
from jaxinfer.prefix import PrefixMetadata, PrefixRestorePlan, PrefixStore
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

    @property
    def metadata(self) -> PrefixMetadata:
        """What two states must have in common to be exchangeable."""
        model, config = self.model, self.model.config
        ropes = [layer.rope for layer in config.layers if layer.rope is not None]
        return PrefixMetadata(
            # Weights in another dtype are other weights, whatever the rows are kept in.
            model_fingerprint=model.fingerprint and (model.fingerprint, config.dtype),
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
    stream: Callable[[StreamChunk], None] | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> TurnResult:
    """Returns the answer to a prompt and leaves prompt and answer in the seat's slot.

    Whatever goes wrong on the way, the slot is as it was before, or empty where the store's budget had no
    room to keep it beside the turn's own state.

    Args:
      ids: the whole prompt, checked with `options` and against the capacity.
      checkpoint_at: lengths of the prompt to take checkpoints at, where the seat keeps any.
      stream: as in `generate`.
      on_tokens: called with the number of tokens of every device call.
    """
    model, config, metadata = seat.model, seat.model.config, seat.metadata
    opened = seat.store.open(seat.slot, metadata, ids, fresh=seat.fresh_state)
    start = opened.plan.suffix_start
    wanted = [at for at in checkpoint_at if at > start] if seat.keeps_checkpoints else []
    chunks = prefill_chunks(
        model.params,
        [list(ids[start:])],
        opened.state,
        config=config,
        donate=opened.donate,
        checkpoint_at=wanted,
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
    )
    return TurnResult(opened.plan, generation, tuple(answer.sampled_ids))
