"""Key/value and recurrent state: immutable pytrees that a step extends."""

from jaxinfer.state.checkpoint import Checkpoint as Checkpoint
from jaxinfer.state.checkpoint import restore as restore
from jaxinfer.state.checkpoint import snapshot as snapshot
from jaxinfer.state.decode_state import DecodeState as DecodeState
from jaxinfer.state.decode_state import init_state as init_state
from jaxinfer.state.full_kv import FullKV as FullKV
from jaxinfer.state.gated_delta import GatedDeltaState as GatedDeltaState
from jaxinfer.state.host import known as known
from jaxinfer.state.layer_state import AttentionState as AttentionState
from jaxinfer.state.layer_state import LayerState as LayerState
from jaxinfer.state.residency import KindBytes as KindBytes
from jaxinfer.state.residency import KvResidency as KvResidency
from jaxinfer.state.rows import Rows as Rows
from jaxinfer.state.status import Status as Status
from jaxinfer.state.step import Step as Step
from jaxinfer.state.step import make_step as make_step
from jaxinfer.state.truncation import rollback_floor as rollback_floor
from jaxinfer.state.truncation import truncate as truncate
from jaxinfer.state.window import KV_WINDOW_ENV as KV_WINDOW_ENV
from jaxinfer.state.window import KvWindow as KvWindow
from jaxinfer.state.window import KvWindowPolicy as KvWindowPolicy
from jaxinfer.state.windowed_kv import WindowedKV as WindowedKV
