"""From a checkpoint's tensors to the decoder's params: which tensors make which weight."""

from __future__ import annotations

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import GatedDeltaConfig, LayerKind, ModelConfig
from jaxinfer.models import stored_weights
from jaxinfer.models.family import Family
from jaxinfer.models.params import DecoderParams, leaf, param_shapes
from jaxinfer.models.stored_weights import Put, StoredWeight, Tensors
from jaxinfer.models.vision.assembly import vision_recipe
from jaxinfer.models.vision.params import VisionParams
from jaxinfer.models.vision.shapes import vision_param_shapes
from jaxinfer.nn import AttentionParams, BlockParams, GatedDeltaParams, MlpParams, MoeParams

PREFIXES = ("model.", "model.language_model.", "language_model.model.")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")

_logger = logging.getLogger(__name__)


def assemble_params(config: ModelConfig, family: Family, tensors: Tensors) -> DecoderParams:
    """Returns the decoder's params of a checkpoint in `config.dtype`; nothing is ever filled in.

    A checkpoint that ties its head to the embedding and yet stores a head of its own gets that head. The
    tensors of an image tower are for `assemble_vision`.

    Raises:
      WeightsError: a missing, extra or misshapen tensor.
    """
    reader = _Reader(config, family, tensors)
    recipe, shapes = _recipe(config, reader), param_shapes(config)
    stored_head = config.tie_embeddings and reader.head in tensors.names()
    if stored_head:
        recipe = dataclasses.replace(recipe, lm_head=_head(config, reader))
    stored_weights.check(
        recipe,
        tensors,
        model=config.family,
        ignored_prefixes=family.ignored_prefixes + family.vision_prefixes,
    )
    if stored_head:
        if reader.repeats_embedding():
            recipe = dataclasses.replace(recipe, lm_head=None)
        else:
            shapes = dataclasses.replace(shapes, lm_head=shapes.embedding)
            _logger.warning(
                "%s: its config ties the head to the embedding, but %s differs from it and is used",
                tensors.description,
                reader.head,
            )
    return stored_weights.read(recipe, shapes)


def assemble_vision(config: ModelConfig, family: Family, tensors: Tensors) -> VisionParams | None:
    """Returns the params of a checkpoint's image tower in `config.dtype`, None for a text model.

    Raises:
      WeightsError: a missing, extra or misshapen tensor.
    """
    if config.vision is None:
        return None
    recipe = vision_recipe(config.vision, tensors)
    stored_weights.check(
        recipe,
        tensors,
        model=f"{config.family}'s image tower",
        only_prefixes=family.vision_prefixes,
    )
    return stored_weights.read(recipe, vision_param_shapes(config.vision, config.dtype))


class _Reader:
    """The tensors of one checkpoint under one prefix, as leaves of a recipe."""

    def __init__(self, config: ModelConfig, family: Family, tensors: Tensors):
        self.config, self.tensors, self.names = config, tensors, tensors.names()
        found = [prefix for prefix in PREFIXES if any(n.startswith(f"{prefix}layers.") for n in self.names)]
        self.prefix = found[0] if found else PREFIXES[0]
        self.head = next((head for head in _HEADS if head in self.names), _HEADS[0])
        self.scale_offset = 0.0 if tensors.norm_scales_include_one else family.norm_scale_offset

    def weight(self, name: str, *shape: int) -> jax.Array:
        return leaf(StoredWeight(self.tensors, (self.prefix + name,), (shape,)))

    def weights(self, names: list[str], shapes: list[tuple[int, ...]], put: Put) -> jax.Array:
        return leaf(StoredWeight(self.tensors, [self.prefix + name for name in names], shapes, put=put))

    def scale(self, name: str, size: int) -> jax.Array:
        return leaf(StoredWeight(self.tensors, (self.prefix + name,), ((size,),), offset=self.scale_offset))

    def repeats_embedding(self) -> bool:
        """True when the stored head is the embedding once more, in the model's dtype."""
        names = (f"{self.prefix}embed_tokens.weight", self.head)
        embedding, head = (self.tensors.read(name, jnp.dtype(self.config.dtype)) for name in names)
        return np.array_equal(embedding, head)


def _head(config: ModelConfig, reader: _Reader) -> jax.Array:
    return leaf(StoredWeight(reader.tensors, (reader.head,), ((config.vocab_size, config.embed_dim),)))


def _recipe(config: ModelConfig, reader: _Reader) -> DecoderParams:
    """Returns the params of `config` with `StoredWeight` leaves."""
    return DecoderParams(
        embedding=reader.weight("embed_tokens.weight", config.vocab_size, config.embed_dim),
        layers=tuple(_block(config, reader, index) for index in range(len(config.layers))),
        final_norm=reader.scale("norm.weight", config.embed_dim),
        lm_head=None if config.tie_embeddings else _head(config, reader),
    )


def _block(config: ModelConfig, reader: _Reader, index: int) -> BlockParams:
    layer = f"layers.{index}."

    def scale(name: str) -> jax.Array:
        return reader.scale(f"{layer}{name}.weight", config.embed_dim)

    # With norms on both sides of a part, the name that others give the second input norm means the first
    # output norm.
    post = config.post_norms
    is_moe = config.layers[index].mlp == "moe"
    is_recurrent = config.layers[index].kind is LayerKind.GATED_DELTA
    return BlockParams(
        mixer_norm=scale("input_layernorm"),
        mixer=_gated_delta(config, reader, f"{layer}linear_attn.")
        if is_recurrent
        else _attention(config, reader, f"{layer}self_attn."),
        mlp_norm=scale("pre_feedforward_layernorm" if post else "post_attention_layernorm"),
        mlp=_moe(config, reader, f"{layer}mlp.")
        if is_moe
        else _mlp(config, reader, f"{layer}mlp.", config.mlp_dim),
        mixer_post_norm=scale("post_attention_layernorm") if post else None,
        mlp_post_norm=scale("post_feedforward_layernorm") if post else None,
    )


def _attention(config: ModelConfig, reader: _Reader, at: str) -> AttentionParams:
    kv_heads, dim = config.num_kv_heads, config.head_dim
    per_query = 2 if config.attention_gate else 1

    def put(out: np.ndarray, index: int, tensor: np.ndarray) -> None:
        if index == 0:
            # Stored [heads, (query, gate), H, D]: the queries of a key/value head come first, then their
            # gates.
            grouped = tensor.reshape(kv_heads, config.num_groups, per_query, dim, -1).swapaxes(1, 2)
            out[:, :-2] = grouped.reshape(kv_heads, -1, dim, grouped.shape[-1])
        else:
            out[:, index - 3] = tensor.reshape(kv_heads, dim, -1)  # key, value: the last two

    rows = (config.num_q_heads * per_query * dim, kv_heads * dim, kv_heads * dim)
    return AttentionParams(
        qkv=reader.weights(
            [f"{at}{part}_proj.weight" for part in "qkv"], [(size, config.embed_dim) for size in rows], put
        ),
        out=reader.weight(f"{at}o_proj.weight", config.embed_dim, config.num_q_heads * dim),
        q_norm=reader.scale(f"{at}q_norm.weight", dim) if config.qk_norm else None,
        k_norm=reader.scale(f"{at}k_norm.weight", dim) if config.qk_norm else None,
    )


def _gated_delta(config: ModelConfig, reader: _Reader, at: str) -> GatedDeltaParams:
    sizes = config.gated_delta
    assert sizes is not None  # held by ModelConfig
    heads, values = sizes.num_value_heads, sizes.num_value_heads * sizes.value_head_dim

    def put_conv(out: np.ndarray, index: int, tensor: np.ndarray) -> None:
        out[:] = _by_key_head(tensor[:, 0], sizes)

    return GatedDeltaParams(
        in_proj=_gated_delta_in_proj(config, sizes, reader, at),
        conv=reader.weights([f"{at}conv1d.weight"], [(sizes.conv_channels, 1, sizes.conv_width)], put_conv),
        log_rate=reader.weight(f"{at}A_log", heads),
        dt_bias=reader.weight(f"{at}dt_bias", heads),
        # Unlike the family's other norms this one stores its full multiplier.
        norm=reader.weight(f"{at}norm.weight", sizes.value_head_dim),
        out=reader.weight(f"{at}out_proj.weight", config.embed_dim, values),
    )


def _gated_delta_in_proj(config: ModelConfig, sizes: GatedDeltaConfig, reader: _Reader, at: str) -> jax.Array:
    """Qwen3-Next stores two matrices whose rows go by key head, Qwen3.5 four whose rows go by kind."""
    key_heads, heads = sizes.num_key_heads, sizes.num_value_heads
    values = heads * sizes.value_head_dim
    mixed = sizes.conv_channels_per_key_head
    gates = slice(mixed, mixed + values // key_heads)
    fused = [f"{at}in_proj_{part}.weight" for part in ("qkvz", "ba")]
    apart = [f"{at}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")]

    def put_fused(out: np.ndarray, index: int, tensor: np.ndarray) -> None:
        rows = slice(0, gates.stop) if index == 0 else slice(gates.stop, None)
        out[:, rows] = tensor.reshape(key_heads, -1, tensor.shape[-1])

    def put_apart(out: np.ndarray, index: int, tensor: np.ndarray) -> None:
        if index == 0:
            out[:, :mixed] = _by_key_head(tensor, sizes)
        else:
            beta_end = gates.stop + sizes.num_groups
            rows = (gates, slice(gates.stop, beta_end), slice(beta_end, None))[index - 1]
            out[:, rows] = tensor.reshape(key_heads, -1, tensor.shape[-1])

    if any(reader.prefix + name in reader.names for name in fused):
        names, rows, put = fused, (sizes.conv_channels + values, 2 * heads), put_fused
    else:
        names, rows, put = apart, (sizes.conv_channels, values, heads, heads), put_apart
    return reader.weights(names, [(size, config.embed_dim) for size in rows], put)


def _by_key_head(channels: np.ndarray, sizes: GatedDeltaConfig) -> np.ndarray:
    """Returns [C, ...] in the order (all queries, all keys, all values) as [nk, 2 dk + r dv, ...]."""
    keys = sizes.num_key_heads * sizes.key_head_dim
    parts = np.split(channels, (keys, 2 * keys))
    shape = (sizes.num_key_heads, -1, *channels.shape[1:])
    return np.concatenate([part.reshape(shape) for part in parts], axis=1)


def _mlp(config: ModelConfig, reader: _Reader, at: str, mlp_dim: int) -> MlpParams:
    names = [f"{at}{part}_proj.weight" for part in ("gate", "up")]
    return MlpParams(
        gate_up=reader.weights(names, [(mlp_dim, config.embed_dim)] * 2, stored_weights.stack),
        down=reader.weight(f"{at}down_proj.weight", config.embed_dim, mlp_dim),
    )


def _moe(config: ModelConfig, reader: _Reader, at: str) -> MoeParams:
    moe, embed_dim = config.moe, config.embed_dim
    assert moe is not None  # held by ModelConfig
    if f"{reader.prefix}{at}experts.gate_up_proj" in reader.names:  # fused: [E, gate rows then up rows, D]
        gate_up = reader.weight(f"{at}experts.gate_up_proj", moe.num_experts, 2 * moe.mlp_dim, embed_dim)
        down = reader.weight(f"{at}experts.down_proj", moe.num_experts, embed_dim, moe.mlp_dim)
    else:
        experts = [f"{at}experts.{index}." for index in range(moe.num_experts)]
        names = [f"{expert}{part}_proj.weight" for expert in experts for part in ("gate", "up")]
        gate_up = reader.weights(names, [(moe.mlp_dim, embed_dim)] * len(names), stored_weights.stack)
        names = [f"{expert}down_proj.weight" for expert in experts]
        down = reader.weights(names, [(embed_dim, moe.mlp_dim)] * len(names), stored_weights.stack)
    shared = moe.shared_mlp_dim
    return MoeParams(
        router=reader.weight(f"{at}gate.weight", moe.num_experts, embed_dim),
        gate_up=gate_up,
        down=down,
        shared=None if shared is None else _mlp(config, reader, f"{at}shared_expert.", shared),
        shared_gate=None if shared is None else reader.weight(f"{at}shared_expert_gate.weight", 1, embed_dim),
    )
