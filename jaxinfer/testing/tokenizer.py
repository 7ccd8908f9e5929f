"""A toy tokenizer: one token a UTF-8 byte, and control tokens for chats and images.

Ids 0 to 255 are the bytes themselves, so ids can be written and read by eye: `list(b"hi")`.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from jaxinfer.loading.tokenizer import BYTE_OF_CHARACTER
from jaxinfer.loading.tokenizer import Tokenizer as TextTokenizer

BOS, EOS, IMAGE = "<bos>", "<eos>", "<image>"
IMAGE_BEGIN, IMAGE_END = "<start_of_image>", "<end_of_image>"
CONTROL_TOKENS = (
    BOS,
    EOS,
    "<|im_start|>",
    "<|im_end|>",
    "<start_of_turn>",
    "<end_of_turn>",
    IMAGE,
    "<pad>",
    IMAGE_BEGIN,
    IMAGE_END,
)
NUM_BYTES = 256
TOKEN_IDS = {token: NUM_BYTES + index for index, token in enumerate(CONTROL_TOKENS)}
VOCAB_SIZE = NUM_BYTES + len(CONTROL_TOKENS)
_END_TOKENS = (EOS, "<|im_end|>", "<end_of_turn>")


def toy_tokenizer(*, adds_bos: bool = True) -> TextTokenizer:
    """Returns the toy tokenizer; `adds_bos`: a raw text gets a BOS in front, as with Gemma and Llama 3."""
    backend = Tokenizer(models.BPE(vocab=dict(BYTE_OF_CHARACTER), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    )
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, TOKEN_IDS[BOS])]
        )
    return TextTokenizer(
        backend,
        piece_encoding="byte_level",
        strip_leading_space=False,
        vocab_size=VOCAB_SIZE,
        bos_token_id=TOKEN_IDS[BOS],
        eos_token_ids=[TOKEN_IDS[token] for token in _END_TOKENS],
        fingerprint=f"toy-bytes-{'bos' if adds_bos else 'plain'}-2",
    )
