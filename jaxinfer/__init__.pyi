"""What the package re-exports; see `__init__.py` for how."""

# Models and steps
# Conversations
from jaxinfer.chat import ChatSession as ChatSession
from jaxinfer.chat import Reply as Reply
from jaxinfer.config import LayerConfig as LayerConfig
from jaxinfer.config import LayerKind as LayerKind
from jaxinfer.config import ModelConfig as ModelConfig

# Generation
from jaxinfer.generation import Generation as Generation
from jaxinfer.generation import StreamChunk as StreamChunk
from jaxinfer.generation import TokenLogprob as TokenLogprob
from jaxinfer.generation import generate as generate
from jaxinfer.loading import CheckpointError as CheckpointError
from jaxinfer.loading import load as load
from jaxinfer.loading import pull as pull
from jaxinfer.models import Aux as Aux
from jaxinfer.models import Model as Model
from jaxinfer.models import StepInputs as StepInputs
from jaxinfer.models import forward as forward
from jaxinfer.models import forward_with_aux as forward_with_aux

# Prefix planning
from jaxinfer.prefix import PrefixEntry as PrefixEntry
from jaxinfer.prefix import PrefixMetadata as PrefixMetadata
from jaxinfer.prefix import PrefixRestorePlan as PrefixRestorePlan
from jaxinfer.prefix import PrefixReuseMode as PrefixReuseMode
from jaxinfer.prefix import PrefixStore as PrefixStore
from jaxinfer.prefix import checkpoint_survives_save as checkpoint_survives_save
from jaxinfer.prefix import longest_common_token_prefix as longest_common_token_prefix
from jaxinfer.prefix import plan_prefix_reuse as plan_prefix_reuse
from jaxinfer.sampling import Sampling as Sampling

# Spans
from jaxinfer.spans import KeySpans as KeySpans
from jaxinfer.spans import MaskPolicy as MaskPolicy
from jaxinfer.spans import batch_span_ends as batch_span_ends
from jaxinfer.spans import chunk_splits_image_run as chunk_splits_image_run
from jaxinfer.spans import key_spans as key_spans
from jaxinfer.spans import plan_prefill_chunks as plan_prefill_chunks

# State
from jaxinfer.state import KV_WINDOW_ENV as KV_WINDOW_ENV
from jaxinfer.state import Checkpoint as Checkpoint
from jaxinfer.state import DecodeState as DecodeState
from jaxinfer.state import KvResidency as KvResidency
from jaxinfer.state import KvWindow as KvWindow
from jaxinfer.state import KvWindowPolicy as KvWindowPolicy
from jaxinfer.state import Status as Status
from jaxinfer.state import init_state as init_state
from jaxinfer.state import restore as restore
from jaxinfer.state import rollback_floor as rollback_floor
from jaxinfer.state import snapshot as snapshot
from jaxinfer.state import truncate as truncate
