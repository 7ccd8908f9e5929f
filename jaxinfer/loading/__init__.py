"""Checkpoints on disk: tensors, configs, tokenizers and chat templates, whatever the file format."""

from jaxinfer.loading.cache import ModelNotPulledError as ModelNotPulledError
from jaxinfer.loading.cache import resolve as resolve
from jaxinfer.loading.chat_template import ChatTemplate as ChatTemplate
from jaxinfer.loading.chat_template import ChatTemplateError as ChatTemplateError
from jaxinfer.loading.checkpoint import Checkpoint as Checkpoint
from jaxinfer.loading.checkpoint import open_checkpoint as open_checkpoint
from jaxinfer.loading.known_models import DEFAULT_MODEL as DEFAULT_MODEL
from jaxinfer.loading.known_models import KNOWN_MODELS as KNOWN_MODELS
from jaxinfer.loading.load import load as load
from jaxinfer.loading.pull import PullError as PullError
from jaxinfer.loading.pull import pull as pull
from jaxinfer.loading.tensor_source import CheckpointError as CheckpointError
from jaxinfer.loading.tensor_source import TensorSource as TensorSource
from jaxinfer.loading.tokenizer import StreamDecoder as StreamDecoder
from jaxinfer.loading.tokenizer import Tokenizer as Tokenizer
