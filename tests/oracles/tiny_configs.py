"""The tiny models that `make_model_oracles.py` builds: transformers class names, config arguments and inputs.

Sizes are small and uneven on purpose, so that a mixed-up axis cannot pass: head_dim need not be embed/heads,
key and value heads differ in number and width, prompts are longer than windows (8) and than a delta-rule
chunk (64). The prompts' seeds were chosen so that the best two logits of a greedy step are at least 0.03
apart: rounding cannot change the ids.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Family:
    """One tiny model.

    `embedding_std`, `head_gain` and `final_norm_gain` give logits a standard deviation above one. Where the
    embedding is tied it stays small, and the final norm large, or every token would predict itself.
    """

    config_class: str
    model_class: str
    config: dict[str, Any]
    inputs: dict[str, np.ndarray]
    embedding_std: float = 0.3
    head_gain: float = 1.2
    final_norm_gain: float = 1.0
    pixel_seed: int | None = None
    pixel_shape: tuple[int, ...] = ()
    edges: Edges | None = None


@dataclasses.dataclass(frozen=True)
class Edges:
    """A second prompt of an image model, images at its very start and end; only its logits are kept."""

    inputs: dict[str, np.ndarray]
    pixel_seed: int
    pixel_shape: tuple[int, ...]


def prompt(seed: int, length: int) -> np.ndarray:
    """Ordinary token ids, int64 [length], clear of the special ones at both ends of the vocabulary."""
    return np.random.RandomState(seed).randint(10, 250, size=length).astype(np.int64)


def text(seed: int, length: int = 40) -> dict[str, np.ndarray]:
    return {"input_ids": prompt(seed, length)[None]}


ATTENTION = dict(
    vocab_size=256,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
)


def llama(rope: dict[str, Any], seed: int) -> Family:
    sizes = dict(hidden_size=72, intermediate_size=160, num_hidden_layers=3, num_attention_heads=6)
    config = (
        ATTENTION
        | sizes
        | dict(rms_norm_eps=1e-5, tie_word_embeddings=True, rope_parameters=rope, pad_token_id=0)
    )
    return Family("LlamaConfig", "LlamaForCausalLM", config, text(seed), embedding_std=0.15)


LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)

MISTRAL = ATTENTION | dict(intermediate_size=128, num_hidden_layers=3, head_dim=16, sliding_window=8)

QWEN3 = ATTENTION | dict(
    intermediate_size=160,
    num_hidden_layers=4,
    head_dim=24,
    tie_word_embeddings=True,
    rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
)

QWEN3_MOE = ATTENTION | dict(
    intermediate_size=96,
    moe_intermediate_size=32,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    num_hidden_layers=3,
    head_dim=16,
    mlp_only_layers=[1],
)

GEMMA3_TEXT = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    query_pre_attn_scalar=20,
    sliding_window=8,
    max_position_embeddings=512,
    rope_parameters=dict(
        sliding_attention=dict(rope_type="default", rope_theta=10000.0),
        full_attention=dict(rope_type="linear", rope_theta=1000000.0, factor=8.0),
    ),
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    pad_token_id=0,
    bos_token_id=2,
    eos_token_id=1,
)

DELTA = ATTENTION | dict(
    num_hidden_layers=4,
    head_dim=32,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)

EXPERTS = dict(
    moe_intermediate_size=32, shared_expert_intermediate_size=48, num_experts=8, num_experts_per_tok=2
)

QWEN3_NEXT = (
    DELTA
    | EXPERTS
    | dict(
        intermediate_size=96,
        rope_parameters=dict(rope_type="default", rope_theta=10000000.0, partial_rotary_factor=0.25),
    )
)

QWEN3_5 = DELTA | dict(
    intermediate_size=128,
    rope_parameters=dict(
        rope_type="default",
        rope_theta=10000000.0,
        partial_rotary_factor=0.5,
        mrope_section=[3, 3, 2],
        mrope_interleaved=True,
    ),
)

QWEN3_5_MOE = {key: value for key, value in (QWEN3_5 | EXPERTS).items() if key != "intermediate_size"}


def gemma3_image() -> Family:
    """Two images of 16 tokens each, both longer than the window of 8."""
    begin, end, image = 297, 298, 299
    vision = dict(
        model_type="siglip_vision_model",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=112,
        patch_size=14,
        num_channels=3,
        vision_use_head=False,
    )
    config = dict(
        text_config=GEMMA3_TEXT,
        vision_config=vision,
        mm_tokens_per_image=16,
        boi_token_index=begin,
        eoi_token_index=end,
        image_token_index=image,
    )
    words = prompt(33, 15)
    picture = [begin, *[image] * 16, end]
    ids = np.array([2, *words[:4], *picture, *words[4:9], *picture, *words[9:]], np.int64)[None]
    inputs = dict(input_ids=ids, token_type_ids=(ids == image).astype(np.int64))
    # An image first; two with nothing between them, which are one run; one last.
    ids = np.array([*[image] * 16, *words[:3], *[image] * 32, *words[3:13], *[image] * 16], np.int64)[None]
    edges = dict(input_ids=ids, token_type_ids=(ids == image).astype(np.int64))
    return Family(
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        config,
        inputs,
        embedding_std=0.04,
        final_norm_gain=3.75,
        pixel_seed=60,
        pixel_shape=(2, 3, 112, 112),
        edges=Edges(edges, 61, (4, 3, 112, 112)),
    )


def qwen_image(
    kind: str, text_config: dict[str, Any], seed: int, *, tied: bool = False, **vision: Any
) -> Family:
    """Two images of 6 tokens each on merged grids 2 x 3 and 3 x 2."""
    video, begin, end, image = 252, 253, 254, 255
    tower = dict(
        depth=3,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2,
        in_channels=3,
        patch_size=8,
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=64,
        num_position_embeddings=36,
        **vision,
    )
    config = dict(
        text_config=text_config,
        vision_config=tower,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=begin,
        vision_end_token_id=end,
        tie_word_embeddings=tied,
    )
    words = prompt(seed, 24)
    picture = [begin, *[image] * 6, end]
    ids = np.array([*words[:5], *picture, *words[5:12], *picture, *words[12:]], np.int64)[None]
    inputs = dict(
        input_ids=ids,
        mm_token_type_ids=(ids == image).astype(np.int64),
        image_grid_thw=np.array([[1, 4, 6], [1, 6, 4]], np.int64),
    )
    # Images of one token, of one row, and larger than the table of positions; the last one ends the prompt.
    grids = np.array([[1, 2, 2], [1, 2, 14], [1, 10, 8]], np.int64)
    ids = np.array([begin, image, end, begin, *[image] * 7, end, *words[:9], begin, *[image] * 20], np.int64)[
        None
    ]
    edges = dict(input_ids=ids, mm_token_type_ids=(ids == image).astype(np.int64), image_grid_thw=grids)
    return Family(
        f"{kind}Config",
        f"{kind}ForConditionalGeneration",
        config,
        inputs,
        embedding_std=0.15 if tied else 0.3,
        pixel_seed=70,
        pixel_shape=(48, 3 * 2 * 8 * 8),
        edges=Edges(edges, 71, (112, 3 * 2 * 8 * 8)),
    )


QWEN3_VL = ATTENTION | dict(
    intermediate_size=128,
    num_hidden_layers=4,
    head_dim=32,
    rope_parameters=dict(
        rope_type="default", rope_theta=5000000.0, mrope_section=[6, 5, 5], mrope_interleaved=True
    ),
)

FAMILIES = {
    "llama": llama(dict(rope_type="default", rope_theta=100000.0), seed=4),
    "llama_rope3": llama(LLAMA3_ROPE, seed=4),
    "mistral": Family("MistralConfig", "MistralForCausalLM", MISTRAL, text(18)),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", QWEN3, text(18), embedding_std=0.15),
    "qwen3_moe": Family("Qwen3MoeConfig", "Qwen3MoeForCausalLM", QWEN3_MOE, text(17)),
    "gemma3_text": Family(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        GEMMA3_TEXT,
        text(27),
        embedding_std=0.04,
        final_norm_gain=3.75,
    ),
    "qwen3_next": Family("Qwen3NextConfig", "Qwen3NextForCausalLM", QWEN3_NEXT, text(15, 100)),
    "qwen3_5_text": Family(
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        QWEN3_5 | dict(tie_word_embeddings=True),
        text(17, 100),
        embedding_std=0.15,
    ),
    "qwen3_5_moe_text": Family("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", QWEN3_5_MOE, text(19, 100)),
    "gemma3": gemma3_image(),
    "qwen3_vl": qwen_image("Qwen3VL", QWEN3_VL, 23, tied=True, deepstack_visual_indexes=[0, 1]),
    "qwen3_5": qwen_image("Qwen3_5", QWEN3_5, 20),
    "qwen3_5_moe": qwen_image("Qwen3_5Moe", QWEN3_5_MOE, 14),
}
