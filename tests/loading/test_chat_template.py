import datetime
import json

import pytest

from jaxinfer.loading.chat_template import ChatTemplate, ChatTemplateError

GEMMA_LIKE = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\n\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/...') }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}
    {{- prefix if loop.first else '' -}}
    {{ message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\n' }}
{%- endif -%}
"""
USER, ANSWER = {"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Hello"}


@pytest.fixture
def gemma() -> ChatTemplate:
    return ChatTemplate(GEMMA_LIKE, special_tokens={"bos_token": "<bos>"})


def test_a_system_message_and_turns_are_rendered(gemma):
    system = {"role": "system", "content": "Be kind."}
    assert gemma.render([system, USER, ANSWER], add_generation_prompt=False) == (
        "<bos><start_of_turn>user\nBe kind.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
    )


def test_the_generation_prompt_is_there_unless_declined(gemma):
    with_prompt = gemma.render([USER])
    assert with_prompt == gemma.render([USER], add_generation_prompt=False) + "<start_of_turn>model\n"


def test_what_a_template_refuses_is_one_clear_line(gemma):
    with pytest.raises(ChatTemplateError) as caught:
        gemma.render([USER, USER])
    assert str(caught.value) == (
        "the chat template refuses these messages: Conversation roles must alternate user/assistant/..."
    )


def test_messages_are_left_as_they_were(gemma):
    messages = [dict(USER), dict(ANSWER)]
    gemma.render(messages)
    assert messages == [USER, ANSWER]
    mutating = ChatTemplate("{% set _ = messages.append('x') %}")
    with pytest.raises(ChatTemplateError, match="the chat template failed: SecurityError"):
        mutating.render(messages)
    assert messages == [USER, ANSWER]


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ missing.attribute }}", "UndefinedError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ namespace.__init__.__globals__ }}", "SecurityError"),
        ("{% for i in range(10**9) %}x{% endfor %}", "OverflowError"),
        ("{% include 'file' %}", "TypeError"),
        ("{{ raise_exception | tojson }}", "TypeError"),
    ],
)
def test_whatever_goes_wrong_inside_is_a_template_error(source, kind):
    with pytest.raises(ChatTemplateError, match=f"the chat template failed: {kind}") as caught:
        ChatTemplate(source).render([USER])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'x }}", "{% generation %}x", "{% endfor %}"])
def test_a_source_that_is_not_jinja_is_refused_at_once(source):
    with pytest.raises(ChatTemplateError, match="chat template 'default', line 1: "):
        ChatTemplate(source)


@pytest.mark.parametrize("message", ["hi", {"content": "no role"}, {"role": None}, None])
def test_a_message_without_a_role_is_named(gemma, message):
    with pytest.raises(
        ChatTemplateError, match=r"render\(messages\[1\]=...\) must be a mapping with a 'role'"
    ):
        gemma.render([USER, message])


def test_blocks_take_no_room_of_their_own():
    source = "a\n    {% if true %}\nb\n    {% endif %}\nc"
    assert ChatTemplate(source).render([]) == "a\nb\nc"


def test_loop_controls_and_generation_blocks_are_known():
    source = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{% continue %}{% endif %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% break %}{% endfor %}"
    )
    assert ChatTemplate(source).render([{"role": "system", "content": "x"}, ANSWER, ANSWER]) == "Hello"


def test_tojson_writes_plain_json():
    value = {"b": "<é>&'", "a": [1, None]}
    rendered = ChatTemplate("{{ x | tojson }}|{{ x | tojson(indent=2) }}").render([], x=value)
    assert (
        rendered
        == f"{json.dumps(value, ensure_ascii=False)}|{json.dumps(value, indent=2, ensure_ascii=False)}"
    )


def test_the_date_can_be_asked_for_and_given():
    template = ChatTemplate("{{ strftime_now('%Y') }}")
    assert template.render([]) in {str(datetime.datetime.now().year + late) for late in (0, -1)}
    assert template.render([], strftime_now=lambda _: "then") == "then"


def test_extra_names_reach_the_template():
    template = ChatTemplate("{{ 'think' if enable_thinking else 'answer' }}")
    assert (template.render([], enable_thinking=True), template.render([])) == ("think", "answer")


def test_tools_choose_the_template_made_for_them():
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].name }}"})
    assert (template.render([]), template.render([], tools=[{"name": "f"}])) == ("plain", "f")
    assert ChatTemplate("{{ tools is none }}").render([]) == "True"


def test_named_templates_need_a_default():
    with pytest.raises(ChatTemplateError, match="hold no 'default'"):
        ChatTemplate({"tool_use": "x"})


def test_the_fingerprint_follows_sources_and_special_tokens():
    prints = [
        ChatTemplate("a").fingerprint,
        ChatTemplate("b").fingerprint,
        ChatTemplate("a", special_tokens={"bos_token": "<s>"}).fingerprint,
        ChatTemplate({"default": "a", "tool_use": "b"}).fingerprint,
    ]
    assert len(set(prints)) == 4
    assert ChatTemplate("a").fingerprint == prints[0]
