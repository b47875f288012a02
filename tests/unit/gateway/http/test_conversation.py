import pytest

from core.errors import BadRequest
from gateway.http.conversation import plain_messages
from gateway.http.schema import ContentPart, Message


def test_parts_are_joined_by_line_breaks_and_names_kept():
    parts = [ContentPart(type="text", text="a"), ContentPart(type="text", text="b")]
    assert plain_messages([Message(role="user", content=parts, name="n")]) == [
        {"role": "user", "content": "a\nb", "name": "n"}
    ]


def test_an_assistant_may_have_said_nothing():
    assert plain_messages([Message(role="assistant")]) == [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (Message(role="wizard", content="x"), "messages[0].role"),
        (Message(role="user"), "messages[0].content"),
        (Message(role="user", content=[ContentPart(type="image_url")]), "messages[0].content[0].type"),
        (Message(role="user", content=[ContentPart(type="text")]), "messages[0].content[0].text"),
        (Message(role="assistant", tool_calls=[{}]), "messages[0].tool_calls"),
    ],
)
def test_what_is_not_plain_text_is_refused_by_its_place(message: Message, param: str):
    with pytest.raises(BadRequest) as caught:
        plain_messages([message])
    assert caught.value.param == param
