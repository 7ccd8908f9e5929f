"""What the package re-exports; see `__init__.py` for how."""

# isort: skip_file

# Models and steps
from jaxinfer.config import LayerConfig as LayerConfig, LayerKind as LayerKind, ModelConfig as ModelConfig
from jaxinfer.config import VisionConfig as VisionConfig
from jaxinfer.images import ImageError as ImageError, PreparedImage as PreparedImage
from jaxinfer.images import prepare_image as prepare_image, prepare_pan_and_scan as prepare_pan_and_scan
from jaxinfer.loading import CheckpointError as CheckpointError, load as load, pull as pull
from jaxinfer.models import Aux as Aux, Model as Model, StepInputs as StepInputs
from jaxinfer.models import ImageFeatures as ImageFeatures, encode_image as encode_image
from jaxinfer.models import forward as forward, forward_with_aux as forward_with_aux

# State
from jaxinfer.state import Checkpoint as Checkpoint, DecodeState as DecodeState, Status as Status
from jaxinfer.state import init_state as init_state, restore as restore, snapshot as snapshot
from jaxinfer.state import rollback_floor as rollback_floor, truncate as truncate
from jaxinfer.state import KV_WINDOW_ENV as KV_WINDOW_ENV, KvResidency as KvResidency
from jaxinfer.state import KvWindow as KvWindow, KvWindowPolicy as KvWindowPolicy

# Spans
from jaxinfer.spans import KeySpans as KeySpans, MaskPolicy as MaskPolicy, key_spans as key_spans
from jaxinfer.spans import batch_span_ends as batch_span_ends
from jaxinfer.spans import chunk_splits_image_run as chunk_splits_image_run
from jaxinfer.spans import plan_prefill_chunks as plan_prefill_chunks
from jaxinfer.spans import draw_key_spans as draw_key_spans

# Generation
from jaxinfer.generation import Generation as Generation, generate as generate
from jaxinfer.generation import StreamChunk as StreamChunk, TokenLogprob as TokenLogprob
from jaxinfer.sampling import Sampling as Sampling

# Prefix planning
from jaxinfer.prefix import PrefixEntry as PrefixEntry, PrefixMetadata as PrefixMetadata
from jaxinfer.prefix import PrefixRestorePlan as PrefixRestorePlan, PrefixReuseMode as PrefixReuseMode
from jaxinfer.prefix import PrefixStore as PrefixStore, plan_prefix_reuse as plan_prefix_reuse
from jaxinfer.prefix import checkpoint_survives_save as checkpoint_survives_save
from jaxinfer.prefix import longest_common_token_prefix as longest_common_token_prefix

# Conversations
from jaxinfer.chat import ChatSession as ChatSession, Reply as Reply
from jaxinfer.chat import CapacityError as CapacityError, SavedChatError as SavedChatError
from jaxinfer.chat import ChatMismatchError as ChatMismatchError
