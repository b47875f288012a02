import datetime as dt

import pytest

from core.errors import BadRequest, ConfigError
from gateway.text.template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def now() -> dt.datetime:
    return dt.datetime(2026, 2, 3, 4, 5, 6, tzinfo=dt.UTC)


def render(source: str, messages=USER, *, add_generation_prompt: bool = False, **variables) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, now)
    return template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)


def test_the_names_that_published_templates_use_are_there():
    assert render("{{ bos_token }}{{ strftime_now('%d %b %Y') }}") == "<s>03 Feb 2026"
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "hi"}]'
    assert render("{{ {'a': '<é>'} | tojson(indent=2) }}") == '{\n  "a": "<é>"\n}'
    assert render("{% if tools is none and documents is none %}plain{% endif %}") == "plain"
    assert render("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}") == "hi"
    assert render("{% for m in messages %}{% break %}{% endfor %}done") == "done"
    assert render("{% if thinking %}think{% endif %}", thinking=True) == "think"


def test_blocks_leave_no_blank_lines():
    assert render("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}\n") == "x\n"


def test_a_template_that_refuses_names_its_reason():
    with pytest.raises(BadRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ messages[0].content + 1 }}", "{{ 1 // 0 }}", "{{ nothing.there }}"])
def test_a_template_that_fails_on_the_messages_is_the_requests_fault(source: str):
    with pytest.raises(BadRequest):
        render(source)


def test_the_sandbox_keeps_templates_away_from_python():
    with pytest.raises(BadRequest):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}")


def test_users_text_is_never_evaluated():
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "{{ 7 * 7 }}"}]) == "{{ 7 * 7 }}"


def test_a_request_cannot_replace_the_messages_by_template_arguments():
    with pytest.raises(BadRequest):
        ChatTemplate("x", {}, now).render(USER, add_generation_prompt=True, variables={"messages": []})


def test_a_syntax_error_is_told_at_load_with_its_line():
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("ok\n{% if %}", {}, now)
