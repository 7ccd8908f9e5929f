"""What a model is, as a frozen and hashable value: one `ModelConfig` drives the one decoder.

A config says everything that changes the traced program and nothing else, so it can be a static
argument of `jax.jit`. The layer pattern is explicit: one `LayerConfig` a layer; layers with equal
configs share one traced block.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Literal, get_args

from jaxinfer.spans import MaskPolicy

DTYPES = ("float32", "bfloat16")
WEIGHT_DTYPES = (*DTYPES, "int8")


class LayerKind(enum.Enum):
    """What mixes tokens in a layer; the values are the names that checkpoints use in `layer_types`."""

    FULL_ATTENTION = "full_attention"
    SLIDING_ATTENTION = "sliding_attention"
    GATED_DELTA = "linear_attention"


RopeScaling = Literal["none", "linear", "llama3"]
VisionKind = Literal["siglip", "qwen_vl"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of one layer; half-split rotation of the first `rotary_dim` dims.

    `scaling` "linear" divides every inverse frequency by `factor`; "llama3" is the piecewise rule of
    Llama 3.1 with the two frequency factors. `mrope_section` (T, H, W): interleaved three-axis rope.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    mrope_section: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        if self.scaling not in get_args(RopeScaling):
            raise ValueError(
                f"RopeConfig(scaling=...) must be one of {get_args(RopeScaling)}; got {self.scaling!r}"
            )
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"RopeConfig(rotary_dim=...) must be even and positive; got {self.rotary_dim}")
        if not (self.theta > 0 and self.factor > 0):
            raise ValueError(
                f"RopeConfig(theta=..., factor=...) must be positive; got {self.theta}, {self.factor}"
            )
        if self.scaling == "llama3" and not (
            0 < self.low_freq_factor < self.high_freq_factor and self.original_max_positions > 0
        ):
            raise ValueError(
                "RopeConfig(scaling='llama3') needs 0 < low_freq_factor < high_freq_factor and "
                f"original_max_positions > 0; got {self.low_freq_factor}, {self.high_freq_factor}, "
                f"{self.original_max_positions}"
            )


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """One decoder layer: its token mixer and its feed-forward part."""

    kind: LayerKind
    window: int | None = None  # keys a query may read, itself included; None: all (never 0)
    mask_policy: MaskPolicy = MaskPolicy.CAUSAL
    rope: RopeConfig | None = None  # None for GATED_DELTA
    mlp: Literal["dense", "moe"] = "dense"

    def __post_init__(self) -> None:
        if (self.kind is LayerKind.SLIDING_ATTENTION) != (self.window is not None):
            raise ValueError(
                f"LayerConfig(window={self.window!r}) does not fit kind {self.kind.name}: "
                "a sliding layer has a window, every other kind has None"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"LayerConfig(window=...) must be at least 1 or None; got {self.window}")
        if (self.kind is LayerKind.GATED_DELTA) != (self.rope is None):
            raise ValueError(f"LayerConfig(rope={self.rope!r}) does not fit kind {self.kind.name}")


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Routed experts: softmax over all, top-k, optionally renormalised; plus an optional shared expert."""

    num_experts: int
    num_experts_per_token: int
    mlp_dim: int
    normalize_weights: bool = True
    shared_mlp_dim: int | None = None


@dataclasses.dataclass(frozen=True)
class GatedDeltaConfig:
    """Gated DeltaNet sizes: value head j reads key head j // (num_value_heads // num_key_heads)."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"GatedDeltaConfig({field.name}=...) must be at least 1; got {getattr(self, field.name)}"
                )
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"GatedDeltaConfig(num_value_heads={self.num_value_heads}) must be a multiple of "
                f"num_key_heads={self.num_key_heads}"
            )

    @property
    def num_groups(self) -> int:
        """Value heads that read one key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def conv_channels_per_key_head(self) -> int:
        """Channels of one key head's part of the convolution: its query, its key, its value heads."""
        return 2 * self.key_head_dim + self.num_groups * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels C of the convolution."""
        return self.num_key_heads * self.conv_channels_per_key_head


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """An image tower: what it computes, and how an image becomes its input.

    "siglip" (Gemma 3): square images of one size, learned positions, features pooled by `merge_size` squared.
    "qwen_vl" (Qwen3-VL, Qwen3.5): any size, a square table of positions that is interpolated, two-axis rope,
    `merge_size` squared patches joined into one feature.
    """

    kind: VisionKind
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    patch_size: int  # pixels a side
    merge_size: int  # patches a side that become one token
    num_positions: int  # entries of the learned table, a square
    out_dim: int  # the decoder's embed_dim
    norm_eps: float = 1e-6
    num_channels: int = 3
    temporal_patch_size: int = 1  # frames a patch; a still image is repeated
    rope_theta: float | None = None  # of both axes; None: no rope
    deepstack_layers: tuple[int, ...] = ()  # feature j, after the j-th of these, joins decoder layer j
    image_size: int | None = None  # siglip: pixels a side of every image
    min_pixels: int | None = None  # qwen_vl: an image is resized to between these
    max_pixels: int | None = None
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    begin_token_id: int | None = None  # of the tokens around an image's placeholders
    end_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(VisionKind):
            raise ValueError(
                f"VisionConfig(kind=...) must be one of {get_args(VisionKind)}; got {self.kind!r}"
            )
        counts = ("embed_dim", "mlp_dim", "num_layers", "num_heads", "patch_size", "merge_size")
        for name in (*counts, "num_positions", "out_dim", "num_channels", "temporal_patch_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"VisionConfig({name}=...) must be an int of at least 1; got {value!r}")
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"VisionConfig(embed_dim={self.embed_dim}) must be a multiple of num_heads={self.num_heads}"
            )
        if self.position_side**2 != self.num_positions:
            raise ValueError(f"VisionConfig(num_positions={self.num_positions}) must be a square number")
        if len(self.mean) != self.num_channels or len(self.std) != self.num_channels or 0 in self.std:
            raise ValueError(
                f"VisionConfig(mean=..., std=...) must be {self.num_channels} numbers each, no std 0; got "
                f"{self.mean}, {self.std}"
            )
        if any(not 0 <= layer < self.num_layers for layer in self.deepstack_layers):
            raise ValueError(
                f"VisionConfig(deepstack_layers={self.deepstack_layers}) must be layers of 0.."
                f"{self.num_layers - 1}"
            )
        if self.kind == "siglip":
            self._check_siglip()
        elif self.rope_theta is None or not 0 < (self.min_pixels or 0) <= (self.max_pixels or 0):
            raise ValueError(
                "VisionConfig(kind='qwen_vl') needs rope_theta and 0 < min_pixels <= max_pixels; got "
                f"{self.rope_theta}, {self.min_pixels}, {self.max_pixels}"
            )
        elif self.head_dim % 4:
            raise ValueError(
                f"VisionConfig(kind='qwen_vl') needs a head_dim that is a multiple of 4: half of it turns "
                f"with each axis; got {self.head_dim}"
            )

    def _check_siglip(self) -> None:
        side = self.position_side
        if self.image_size is None or self.image_size // self.patch_size != side or side % self.merge_size:
            raise ValueError(
                f"VisionConfig(kind='siglip') needs image_size // patch_size = {side} patches a side, a "
                f"multiple of merge_size={self.merge_size}; got {self.image_size} // {self.patch_size}"
            )

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.embed_dim // self.num_heads

    @property
    def position_side(self) -> int:
        """Entries a side of the square table of positions."""
        return math.isqrt(self.num_positions)

    @property
    def patch_dim(self) -> int:
        """Values of one patch: channels, frames, pixels."""
        return self.num_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def tokens_per_image(self) -> int | None:
        """Tokens that every image stands for; None where they follow from the image's size."""
        return (self.position_side // self.merge_size) ** 2 if self.kind == "siglip" else None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model. Sizes are in elements; `dtype` is that of weights and KV rows."""

    family: str
    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_positions: int  # trained length
    norm_eps: float
    softmax_scale: float
    dtype: Literal["float32", "bfloat16"] = "float32"
    quantization: Literal["int8"] | None = None  # of the matrices; their inputs and KV rows stay in `dtype`
    activation: Literal["silu", "gelu_tanh"] = "silu"
    scale_embeddings: bool = False  # token embeddings times sqrt(embed_dim), the scale rounded to dtype
    qk_norm: bool = False
    post_norms: bool = False  # norms on the mixer's and the MLP's output, before the residual
    attention_gate: bool = False  # attention output times sigmoid(gate), the gate beside each query head
    tie_embeddings: bool = False
    final_logit_soft_cap: float | None = None
    moe: MoeConfig | None = None
    gated_delta: GatedDeltaConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    image_token_id: int | None = None
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "mlp_dim", "num_q_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"ModelConfig({name}=...) must be at least 1; got {getattr(self, name)}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelConfig(num_q_heads={self.num_q_heads}) must be a multiple of num_kv_heads="
                f"{self.num_kv_heads}"
            )
        if not self.layers:
            raise ValueError("ModelConfig(layers=()) must name at least one layer")
        if self.dtype not in DTYPES:
            raise ValueError(
                f"ModelConfig(dtype=...) must be one of {DTYPES}; got {self.dtype!r} "
                "(float16 overflows in these models: use bfloat16)"
            )
        if self.quantization not in (None, "int8") or (self.quantization and self.dtype != "bfloat16"):
            raise ValueError(
                f"ModelConfig(quantization=...) must be None, or 'int8' with dtype='bfloat16'; got "
                f"{self.quantization!r} with dtype={self.dtype!r}"
            )
        if any(layer.mlp == "moe" for layer in self.layers) and self.moe is None:
            raise ValueError("ModelConfig(moe=None) does not fit a layer with mlp='moe'")
        if self.is_recurrent and self.gated_delta is None:
            raise ValueError("ModelConfig(gated_delta=None) does not fit a GATED_DELTA layer")
        if self.vision is not None and self.vision.out_dim != self.embed_dim:
            raise ValueError(
                f"ModelConfig(vision=...) gives features of {self.vision.out_dim} channels for "
                f"embed_dim={self.embed_dim}"
            )

    @property
    def weight_dtype(self) -> str:
        """Dtype of the matrices, one of `WEIGHT_DTYPES`."""
        return self.quantization or self.dtype

    def with_weight_dtype(self, weight_dtype: str) -> ModelConfig:
        """Returns the same model with matrices in a dtype of `WEIGHT_DTYPES`; int8 computes in bfloat16."""
        quantization = "int8" if weight_dtype == "int8" else None
        dtype = "bfloat16" if quantization else weight_dtype
        return dataclasses.replace(self, dtype=dtype, quantization=quantization)  # pyright: ignore

    @property
    def num_groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def is_recurrent(self) -> bool:
        """True when some layer keeps a recurrent state, so that the state cannot be truncated."""
        return any(layer.kind is LayerKind.GATED_DELTA for layer in self.layers)

    @property
    def is_bidirectional(self) -> bool:
        """True when some layer reads image runs in both directions, so that a run cannot be cut."""
        return any(layer.mask_policy is MaskPolicy.VISION_BIDIRECTIONAL for layer in self.layers)

    @property
    def uses_mrope(self) -> bool:
        """True when rope positions may differ from row order (three-axis positions of images)."""
        return any(layer.rope is not None and layer.rope.mrope_section for layer in self.layers)
