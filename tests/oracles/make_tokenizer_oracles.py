# ruff: noqa: RUF001 - the texts are meant to look like others
"""Writes token ids of a page of mixed text for the known models into `tests/loading/fixtures/`.

    python -m tests.oracles.make_tokenizer_oracles

Needs the `peers` extra and sentencepiece, and both models pulled. SmolLM2's ids come from transformers'
reading of the GGUF file, which does not know this file's pre-tokenizer, "smollm": every character of
Unicode class N stands alone. So texts are cut there first. Gemma's ids come from the sentencepiece library,
given the file's pieces and scores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import regex
import transformers
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

from jaxinfer.loading import resolve

FIXTURES = Path(__file__).parent.parent / "loading" / "fixtures"

TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 7:45 o'clock; they'll've been 1,234.56 m away!",
    "def f(x: int) -> int:\n    # tabs\tand spaces\n\n\n        return x**2 if x else -1\r\n",
    'for (int i = 0; i <= 10; ++i) { printf("%d\\n", a[i]); } // 0xDEADBEEF\n\n\n\n\n',
    '{"key": [null, true, 1.5e-8], \'nested\': {"a": "\\u00e9"}}',
    "🙂👩‍👩‍👧‍👦 flags 🇨🇭🇯🇵, skin 👍🏽, keycap 1️⃣ and a lone \U000e0041",
    "Ünïcödé naïve café — “quotes” … e\u0301 (combining) ﬁ ½ ² № ™",
    "日本語のテキストと漢字、カタカナ。中文没有空格。한국어 문장입니다.",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم",
    "नमस्ते दुनिया। สวัสดีชาวโลก ਪੰਜਾਬੀ ბეჭდვა Հայերեն አማርኛ",
    "     leading, trailing      \t \t ",
    " ",
    "\n",
    "  \n  \n\n \t\n",
    "x" * 70 + "=" * 90 + " " * 45 + "\n" * 40 + "0" * 25,
    "1234567890 3.14159 2024-12-31 ٣٤٥ Ⅷ ¼ १२३",
    "zero\u200bwidth\u00a0nbsp\u3000ideographic\u2028line",
    "<table><tr><td>cell</td></tr></table> <h1>Head</h1> <0x41> ▁▁ [multimodal]",
    "aaaaaaa ababababab haha the the thethe ing ing-ing",
    "https://example.com/a_b/c?d=e&f=%20#g user@mail.org C:\\dir\\file.txt",
    "∀x∈ℝ: ∑ᵢ xᵢ² ≥ 0 ⇒ √(a²+b²) 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𒀀 \ue000 \U0010fffd",
)
CONTROL_TEXTS = (
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|> more <|im_end|> <repo_name>x<file_sep>",
)
CHAT = (
    [{"role": "user", "content": "What is 2+2?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "  Bye\n"},
    ],
)


def smollm2() -> dict:
    path = resolve("smollm2-135m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)

    def encode(text: str) -> list[int]:
        parts = [part for part in regex.split(r"(\p{N})", text) if part]
        return [index for part in parts for index in tokenizer(part).input_ids]

    return {
        "texts": [[text, encode(text)] for text in TEXTS + CONTROL_TEXTS],
        "chats": [
            {
                "messages": messages,
                "text": tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
                "ids": tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"],
            }
            for messages in CHAT
        ],
    }


def sentence_piece(fields: Mapping[str, gguf.ReaderField]) -> SentencePieceProcessor:
    """The library's own reading of the pieces and scores in a GGUF file."""
    model = sentencepiece_model_pb2.ModelProto()
    unknown = fields["tokenizer.ggml.unknown_token_id"].contents()
    columns = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "scores", "token_type"))
    for index, (token, score, kind) in enumerate(zip(*columns, strict=True)):
        # The file writes user-defined pieces with plain spaces, and <unk> as a control piece.
        kind = sentencepiece_model_pb2.ModelProto.SentencePiece.UNKNOWN if index == unknown else kind
        model.pieces.add(piece=token.replace(" ", "\u2581"), score=score, type=kind)
    model.trainer_spec.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.vocab_size = len(model.pieces)
    model.trainer_spec.unk_id = unknown
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = fields["tokenizer.ggml.add_space_prefix"].contents()
    model.normalizer_spec.remove_extra_whitespaces = False
    return SentencePieceProcessor(model_proto=model.SerializeToString())


def gemma3() -> dict:
    fields = gguf.GGUFReader(resolve("gemma3-270m")).fields
    processor = sentence_piece(fields)
    assert fields["tokenizer.ggml.add_bos_token"].contents()
    bos = fields["tokenizer.ggml.bos_token_id"].contents()
    return {"texts": [[text, [bos, *processor.encode(text)]] for text in TEXTS]}


def main() -> None:
    FIXTURES.mkdir(exist_ok=True)
    for name, made in (("smollm2-135m", smollm2()), ("gemma3-270m", gemma3())):
        path = FIXTURES / f"tokens-{name}.json"
        path.write_text(json.dumps(made, ensure_ascii=True, separators=(",", ":")) + "\n")
        print(f"{path}: {len(made['texts'])} texts")


if __name__ == "__main__":
    main()
