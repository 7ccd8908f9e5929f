"""Prefix reuse: what of the last turn's state the next prompt may keep, and the checkpoints that help."""

from jaxinfer.prefix.checkpoint_ring import CheckpointRing as CheckpointRing
from jaxinfer.prefix.checkpoint_ring import RingCheckpoint as RingCheckpoint
from jaxinfer.prefix.content import ContentSpan as ContentSpan
from jaxinfer.prefix.entry import PrefixEntry as PrefixEntry
from jaxinfer.prefix.entry import PrefixMetadata as PrefixMetadata
from jaxinfer.prefix.planner import PrefixReason as PrefixReason
from jaxinfer.prefix.planner import PrefixRestorePlan as PrefixRestorePlan
from jaxinfer.prefix.planner import PrefixReuseMode as PrefixReuseMode
from jaxinfer.prefix.planner import checkpoint_survives_save as checkpoint_survives_save
from jaxinfer.prefix.planner import plan_prefix_reuse as plan_prefix_reuse
from jaxinfer.prefix.store import OpenTurn as OpenTurn
from jaxinfer.prefix.store import PrefixStore as PrefixStore
from jaxinfer.prefix.store import Slot as Slot
from jaxinfer.prefix.tokens import longest_common_token_prefix as longest_common_token_prefix
