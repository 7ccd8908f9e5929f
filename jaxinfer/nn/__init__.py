"""Parts of a decoder layer: plain params and inputs in, outputs out."""

from jaxinfer.nn.attention import AttentionParams as AttentionParams
from jaxinfer.nn.attention import attention as attention
from jaxinfer.nn.block import BlockParams as BlockParams
from jaxinfer.nn.block import block as block
from jaxinfer.nn.encoder_block import AffineParams as AffineParams
from jaxinfer.nn.encoder_block import EncoderBlockParams as EncoderBlockParams
from jaxinfer.nn.encoder_block import LayerNormParams as LayerNormParams
from jaxinfer.nn.encoder_block import affine as affine
from jaxinfer.nn.encoder_block import encoder_block as encoder_block
from jaxinfer.nn.encoder_block import normed as normed
from jaxinfer.nn.gated_delta import GatedDeltaParams as GatedDeltaParams
from jaxinfer.nn.gated_delta import gated_delta as gated_delta
from jaxinfer.nn.mlp import MlpParams as MlpParams
from jaxinfer.nn.mlp import mlp as mlp
from jaxinfer.nn.moe import MoeParams as MoeParams
from jaxinfer.nn.moe import moe as moe
