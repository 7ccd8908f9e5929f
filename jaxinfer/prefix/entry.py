"""What a slot holds, described without its arrays: the model it belongs to and the tokens it stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

from jaxinfer.prefix.content import ContentSpan, as_content
from jaxinfer.prefix.tokens import as_int_tuple, as_length


@dataclasses.dataclass(frozen=True)
class PrefixMetadata:
    """Everything besides the tokens that a state depends on. States are shared between equals only.

    Every field is a plain hashable value and is compared for equality; a value that is not equal to
    itself (NaN) matches nothing. Fingerprints are hashes of contents, not of shapes or names.

    Attributes:
        model_fingerprint: covers weights and config; never None or empty.
        tokenizer_fingerprint: covers vocabulary, merges and added tokens; None where there is none.
        adapter_fingerprint: covers the adapter's weights; None without an adapter.
        vocab_size: token ids.
        capacity: positions that the state was allocated for.
        kv_dtype: of key/value rows.
        rope_theta: base frequency, or one a layer kind.
        partial_rotary_factor: share of the head that rope turns; None where the model has none.
        layer_pattern: the layers' kinds and windows, or a hash of them.
        chat_template_fingerprint: None without a template.
        mask_policy: a `MaskPolicy`, its value (`"causal"`, `"vision_bidirectional"`), or a tuple or
            frozenset of these, one a layer or one a distinct policy. Image runs may be cut only where
            every one of them is causal: see `keeps_image_runs_whole`.
        kv_window: the `KvWindowPolicy` of the state.
    """

    model_fingerprint: Hashable
    tokenizer_fingerprint: Hashable
    adapter_fingerprint: Hashable
    vocab_size: int
    capacity: int
    kv_dtype: Hashable
    rope_theta: Hashable
    partial_rotary_factor: float | None
    layer_pattern: Hashable
    chat_template_fingerprint: Hashable
    mask_policy: Hashable
    kv_window: Hashable

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            try:
                hash(value)
            except TypeError:
                raise ValueError(
                    f"PrefixMetadata({field.name}=...) must be a plain hashable value; "
                    f"got {type(value).__name__}"
                ) from None
        if self.model_fingerprint in (None, "", b""):
            raise ValueError(
                f"PrefixMetadata(model_fingerprint={self.model_fingerprint!r}) must name the weights: "
                "without a fingerprint no two models can be told apart"
            )

    def differing_fields(self, other: PrefixMetadata) -> tuple[str, ...]:
        """Returns the names of the fields in which the two differ, in the order of the attributes."""
        names = (field.name for field in dataclasses.fields(self))
        return tuple(name for name in names if not _known_equal(getattr(self, name), getattr(other, name)))

    @property
    def keeps_image_runs_whole(self) -> bool:
        """True unless `mask_policy` says that every layer is causal.

        Where some layer reads image runs in both directions, rows of a run depend on all of it, so a
        state must not end inside one. A policy that is not understood counts as such a layer.
        """
        policy = self.mask_policy
        policies = policy if isinstance(policy, tuple | frozenset) else (policy,)
        return not policies or not all(map(_is_causal, policies))


def _is_causal(policy: Hashable) -> bool:
    """True for `MaskPolicy.CAUSAL`, its value or its name; the enumeration lives beside array code."""
    name = getattr(policy, "value", policy)
    return isinstance(name, str) and name.lower() == "causal"


def _known_equal(a: Hashable, b: Hashable) -> bool:
    """True where the values are equal for sure: NaN is not, not even inside a tuple or as one object."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_known_equal, a, b))
    return bool(a == b)


@dataclasses.dataclass(frozen=True)
class PrefixEntry:
    """The state that a slot holds after a turn, described for the planner.

    Attributes:
        slot: name of the slot.
        metadata: what the state was made with.
        token_ids: exactly the represented tokens; kept as a tuple of ints.
        represented_len: tokens that the state has consumed: `len(token_ids)`.
        recurrent_len: length at which the recurrent snapshot was taken; None where the model has no
            recurrent layers.
        rollback_floor: the least length that the live state can be truncated to; None where it cannot
            be truncated (recurrent layers). 0 with full KV; base + window - 1 once windowed rows were
            evicted; with M-RoPE not below the end of the last image.
        content: `(start, end, digest)` of the images among the tokens, end exclusive, digest None where
            unknown; kept in ascending order. An entry that ends inside an image holds its columns only.

    Raises:
        ValueError: `token_ids` are not `represented_len` ints, a length is negative, `recurrent_len` lies
            beyond `represented_len` or is set together with `rollback_floor`, or `content` is malformed.
    """

    slot: Hashable
    metadata: PrefixMetadata
    token_ids: tuple[int, ...]
    represented_len: int
    recurrent_len: int | None = None
    rollback_floor: int | None = None
    content: tuple[ContentSpan, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.metadata, PrefixMetadata):
            raise ValueError(f"PrefixEntry(metadata=...) must be a PrefixMetadata; got {self.metadata!r}")
        self._normalize("token_ids", as_int_tuple(self.token_ids, "PrefixEntry(token_ids=...)"))
        self._normalize(
            "represented_len", as_length(self.represented_len, "PrefixEntry(represented_len=...)")
        )
        for name, value in (("recurrent_len", self.recurrent_len), ("rollback_floor", self.rollback_floor)):
            if value is not None:
                self._normalize(name, as_length(value, f"PrefixEntry({name}=...)"))
        if len(self.token_ids) != self.represented_len:
            raise ValueError(
                f"PrefixEntry(token_ids=...) must be exactly the represented tokens; "
                f"got {len(self.token_ids)} for represented_len={self.represented_len}"
            )
        if self.recurrent_len is not None and self.recurrent_len > self.represented_len:
            raise ValueError(
                f"PrefixEntry(recurrent_len={self.recurrent_len}) must not lie beyond "
                f"represented_len={self.represented_len}"
            )
        if self.recurrent_len is not None and self.rollback_floor is not None:
            raise ValueError(
                f"PrefixEntry(recurrent_len={self.recurrent_len}, rollback_floor={self.rollback_floor}) must "
                "not set both: a recurrent state cannot be truncated; pass rollback_floor=None"
            )
        self._normalize("content", as_content(self.content, self.represented_len, "PrefixEntry(content=...)"))

    def _normalize(self, name: str, value: Any) -> None:
        """Replaces a field of this frozen value by its plain form, while it is being made."""
        object.__setattr__(self, name, value)
