"""Toy chat templates: one that takes any messages, and one with the rules of Gemma's."""

from __future__ import annotations

from typing import Literal

from jaxinfer.loading.chat_template import ChatTemplate
from jaxinfer.testing.tokenizer import BOS, EOS

# Any roles in any order; no BOS; of an image the placeholder between its marks, as Qwen's.
CHATML_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{{ '<start_of_image><image><end_of_image>' if part['type'] == 'image' else part['text'] }}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

# BOS first; a first system message is put into the user's turn; then user and assistant must alternate; of an
# image its begin mark alone.
GEMMA_TEMPLATE = """\
{{- bos_token -}}
{%- set preamble = messages[0]['content'] + '\n\n' if messages and messages[0]['role'] == 'system' else '' -%}
{%- for message in (messages[1:] if preamble else messages) -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
{%- endif -%}
<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}
{{ preamble if loop.first }}
{%- if message['content'] is string -%}
{{ message['content'] | trim }}
{%- else -%}
{%- for part in message['content'] -%}
{{ '<start_of_image>' if part['type'] == 'image' else part['text'] | trim }}
{%- endfor -%}
{%- endif -%}
<end_of_turn>
{% endfor -%}
{%- if add_generation_prompt -%}
<start_of_turn>model
{% endif -%}
"""


def toy_chat_template(kind: Literal["chatml", "gemma"] = "chatml") -> ChatTemplate:
    """Returns the template named; both write only control tokens of `toy_tokenizer`."""
    sources = {"chatml": CHATML_TEMPLATE, "gemma": GEMMA_TEMPLATE}
    if kind not in sources:
        raise ValueError(f"toy_chat_template(kind=...) must be one of {tuple(sources)}; got {kind!r}")
    return ChatTemplate(sources[kind], special_tokens={"bos_token": BOS, "eos_token": EOS})
