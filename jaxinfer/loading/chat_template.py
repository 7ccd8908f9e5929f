"""Chat templates: messages to the text that a model was trained on.

Templates are Jinja sources that come with a checkpoint, so they run in Jinja's immutable sandbox, with the
settings and the few extra names that the Hugging Face chat template convention defines. The rendered text
holds the BOS that the template writes; encode it with `Tokenizer.encode_rendered`, which adds none.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

DEFAULT, TOOL_USE = "default", "tool_use"


class ChatTemplateError(ValueError):
    """A template that cannot be read, or messages that it refuses; the message is one line."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks an answer for training masks; here it is its own body."""

    tags = {"generation"}  # noqa: RUF012 - the name and form are Jinja's

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise ChatTemplateError(f"the chat template refuses these messages: {_one_line(message)}")


def _strftime_now(date_format: str) -> str:
    return datetime.datetime.now().strftime(date_format)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which templates of this kind do not expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """An immutable chat template.

    Attributes:
        fingerprint: hex digest of the sources and of the special tokens they may write.
    """

    def __init__(self, source: str | Mapping[str, str], *, special_tokens: Mapping[str, str] | None = None):
        """`source`: a template, or several by name: "default" and perhaps "tool_use", taken with tools.

        `special_tokens` maps names such as `bos_token` and `eos_token` to their spelling.

        Raises:
            ChatTemplateError: a source that is not a Jinja template, or no default.
        """
        sources = {DEFAULT: source} if isinstance(source, str) else dict(source)
        if DEFAULT not in sources:
            raise ChatTemplateError(f"chat templates {sorted(sources)} hold no {DEFAULT!r}")
        self._special_tokens = dict(special_tokens or {})
        environment = _environment()
        self._templates = {}
        for name, text in sources.items():
            try:
                self._templates[name] = environment.from_string(text)
            except jinja2.TemplateError as error:
                where = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
                raise ChatTemplateError(f"chat template {name!r}{where}: {_one_line(error)}") from error
        parts = json.dumps([sources, self._special_tokens], sort_keys=True)
        self.fingerprint = hashlib.sha256(parts.encode()).hexdigest()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: mappings with at least `role`, mostly `content` too.
            add_generation_prompt: end with what introduces the model's answer.
            tools: JSON schemas of functions the model may call.
            **extra: further names the template knows, for example `enable_thinking`.

        Raises:
            ChatTemplateError: a message without a role, or messages that the template refuses or fails on.
        """
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ChatTemplateError(
                    f"render(messages[{index}]=...) must be a mapping with a 'role'; got {_brief(message)}"
                )
        template = self._templates[TOOL_USE if tools and TOOL_USE in self._templates else DEFAULT]
        names = {**self._special_tokens, **extra}
        try:
            return template.render(
                names, messages=messages, tools=tools, add_generation_prompt=add_generation_prompt
            )
        except ChatTemplateError:
            raise
        except Exception as error:  # the template is foreign code: whatever it raises is its refusal
            kind = type(error).__name__
            raise ChatTemplateError(f"the chat template failed: {kind}: {_one_line(error)}") from error


def _brief(value: object) -> str:
    text = _one_line(repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
