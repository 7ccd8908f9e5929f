"""Checkpoints on disk: tensors, configs, tokenizers and chat templates, whatever the file format."""

from jaxinfer.loading.checkpoint import Checkpoint as Checkpoint
from jaxinfer.loading.checkpoint import open_checkpoint as open_checkpoint
from jaxinfer.loading.tensor_source import CheckpointError as CheckpointError
from jaxinfer.loading.tensor_source import TensorSource as TensorSource
from jaxinfer.loading.tokenizer import StreamDecoder as StreamDecoder
from jaxinfer.loading.tokenizer import Tokenizer as Tokenizer
