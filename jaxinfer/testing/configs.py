"""Tiny configs, one a family, with uneven sizes: a mixed-up axis does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from jaxinfer.config import (
    GatedDeltaConfig,
    LayerConfig,
    LayerKind,
    ModelConfig,
    MoeConfig,
    RopeConfig,
    VisionConfig,
)
from jaxinfer.spans import MaskPolicy
from jaxinfer.testing.tokenizer import BOS, EOS, IMAGE, IMAGE_BEGIN, IMAGE_END, TOKEN_IDS, VOCAB_SIZE

HEAD_DIM = 16
_BASE = ModelConfig(
    family="llama",
    vocab_size=VOCAB_SIZE,
    embed_dim=48,
    mlp_dim=80,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=HEAD_DIM,
    layers=(LayerConfig(LayerKind.FULL_ATTENTION, rope=RopeConfig(100_000.0, HEAD_DIM)),) * 3,
    max_positions=512,
    norm_eps=1e-5,
    softmax_scale=HEAD_DIM**-0.5,
    tie_embeddings=True,
    bos_token_id=TOKEN_IDS[BOS],
    eos_token_ids=(TOKEN_IDS[EOS],),
)


# Every image stands for 16 tokens, more than the sliding windows of the tiny models.
_SIGLIP = VisionConfig(
    kind="siglip",
    embed_dim=24,
    mlp_dim=40,
    num_layers=2,
    num_heads=2,
    patch_size=4,
    merge_size=2,
    num_positions=64,
    out_dim=_BASE.embed_dim,
    image_size=32,
    begin_token_id=TOKEN_IDS[IMAGE_BEGIN],
    end_token_id=TOKEN_IDS[IMAGE_END],
)
# A token for 8 x 8 pixels: from one to 32 tokens an image.
_QWEN_VL = VisionConfig(
    kind="qwen_vl",
    embed_dim=24,
    mlp_dim=40,
    num_layers=3,
    num_heads=2,
    patch_size=4,
    merge_size=2,
    num_positions=36,
    out_dim=_BASE.embed_dim,
    temporal_patch_size=2,
    rope_theta=10_000.0,
    min_pixels=64,
    max_pixels=2048,
    begin_token_id=TOKEN_IDS[IMAGE_BEGIN],
    end_token_id=TOKEN_IDS[IMAGE_END],
)


def _full(theta: float, policy: MaskPolicy = MaskPolicy.CAUSAL, **rope: Any) -> LayerConfig:
    return LayerConfig(LayerKind.FULL_ATTENTION, mask_policy=policy, rope=RopeConfig(theta, HEAD_DIM, **rope))


def _sliding(theta: float, window: int, policy: MaskPolicy = MaskPolicy.CAUSAL) -> LayerConfig:
    return LayerConfig(
        LayerKind.SLIDING_ATTENTION, window=window, mask_policy=policy, rope=RopeConfig(theta, HEAD_DIM)
    )


def _llama(window: int) -> ModelConfig:
    return _BASE


def _mistral(window: int) -> ModelConfig:
    layers = (_sliding(10_000.0, window),) * 3
    return dataclasses.replace(_BASE, family="mistral", layers=layers, tie_embeddings=False)


def _qwen3(window: int) -> ModelConfig:
    return dataclasses.replace(
        _BASE, family="qwen3", layers=(_full(1_000_000.0),) * 3, norm_eps=1e-6, qk_norm=True
    )


def _qwen3_moe(window: int) -> ModelConfig:
    dense, routed = _full(1_000_000.0), dataclasses.replace(_full(1_000_000.0), mlp="moe")
    experts = MoeConfig(num_experts=6, num_experts_per_token=2, mlp_dim=40)
    return dataclasses.replace(
        _qwen3(window), family="qwen3_moe", layers=(routed, dense, routed), moe=experts
    )


def _qwen3_vl(window: int) -> ModelConfig:
    layers = (_full(5_000_000.0, mrope_section=(4, 2, 2)),) * 3
    return dataclasses.replace(
        _qwen3(window),
        family="qwen3_vl",
        layers=layers,
        image_token_id=TOKEN_IDS[IMAGE],
        vision=dataclasses.replace(_QWEN_VL, deepstack_layers=(0, 1)),
    )


def _gemma3(window: int, policy: MaskPolicy = MaskPolicy.CAUSAL) -> ModelConfig:
    local = _sliding(10_000.0, window, policy)
    return dataclasses.replace(
        _BASE,
        family="gemma3",
        layers=(local, local, _full(1_000_000.0, policy, scaling="linear", factor=8.0)),
        norm_eps=1e-6,
        softmax_scale=20**-0.5,
        activation="gelu_tanh",
        scale_embeddings=True,
        qk_norm=True,
        post_norms=True,
    )


def _gemma3_image(window: int) -> ModelConfig:
    config = _gemma3(window, MaskPolicy.VISION_BIDIRECTIONAL)
    return dataclasses.replace(config, image_token_id=TOKEN_IDS[IMAGE], vision=_SIGLIP)


def _hybrid(family: str, mlp: Literal["dense", "moe"], **rope: Any) -> ModelConfig:
    recurrent = LayerConfig(LayerKind.GATED_DELTA, mlp=mlp)
    full = LayerConfig(
        LayerKind.FULL_ATTENTION, rope=RopeConfig(10_000_000.0, HEAD_DIM // 2, **rope), mlp=mlp
    )
    experts = MoeConfig(num_experts=6, num_experts_per_token=2, mlp_dim=40, shared_mlp_dim=24)
    return dataclasses.replace(
        _BASE,
        family=family,
        layers=(recurrent, recurrent, recurrent, full),
        norm_eps=1e-6,
        qk_norm=True,
        attention_gate=True,
        moe=experts if mlp == "moe" else None,
        gated_delta=GatedDeltaConfig(
            num_key_heads=2, num_value_heads=4, key_head_dim=12, value_head_dim=20, conv_width=4
        ),
    )


def _qwen3_next(window: int) -> ModelConfig:
    return _hybrid("qwen3_next", "moe")


def _qwen3_5(window: int) -> ModelConfig:
    return _with_tower(_hybrid("qwen3_5", "dense", mrope_section=(2, 1, 1)))


def _qwen3_5_moe(window: int) -> ModelConfig:
    return _with_tower(_hybrid("qwen3_5_moe", "moe", mrope_section=(2, 1, 1)))


def _with_tower(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, image_token_id=TOKEN_IDS[IMAGE], vision=_QWEN_VL)


_FAMILIES: dict[str, Callable[[int], ModelConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma3": _gemma3,
    "gemma3_image": _gemma3_image,
    "qwen3_vl": _qwen3_vl,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
}
TINY_FAMILIES = tuple(_FAMILIES)


def tiny_config(family: str = "llama", *, window: int = 8, **changes: Any) -> ModelConfig:
    """Returns a float32 config of three or four layers for the vocabulary of `toy_tokenizer`.

    Args:
      family: one of `TINY_FAMILIES`: "llama" (tied), "mistral" (all sliding, untied), "qwen3" (query and key
        norms), "qwen3_moe" (a dense layer between routed ones), "qwen3_vl" (three-axis rope, deepstack),
        "gemma3" (sliding, sliding, full), "gemma3_image" (the same, image runs read both ways), "qwen3_next"
        (three Gated DeltaNet layers and a full one, routed and shared experts), "qwen3_5" (dense, three-axis
        rope), "qwen3_5_moe" (the two joined). "gemma3_image", "qwen3_vl", "qwen3_5" and "qwen3_5_moe" have an
        image tower.
      window: of the sliding layers, where there are any.
      **changes: fields of `ModelConfig` to replace, for example `dtype="bfloat16"`.
    """
    if family not in _FAMILIES:
        raise ValueError(f"tiny_config(family=...) must be one of {TINY_FAMILIES}; got {family!r}")
    return dataclasses.replace(_FAMILIES[family](window), **changes)
