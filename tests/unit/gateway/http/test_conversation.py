import pytest

from core.errors import BadRequest
from gateway.http.conversation import chat_characters, read_chat
from gateway.http.schema import CalledFunction, ChatBody, ContentPart, ImageUrl, Message, Thinking, ToolCall

PICTURE = ContentPart(type="image_url", image_url=ImageUrl(url="data:image/png;base64,AAAA"))


def body(*messages: Message, **fields) -> ChatBody:
    return ChatBody(model="m", messages=list(messages), **fields)


def test_texts_and_parts_and_names_are_kept_as_sent():
    parts = [ContentPart(type="text", text="a"), ContentPart(type="text", text="b")]
    chat = read_chat(body(Message(role="system", content="s"), Message(role="user", content=parts, name="n")))
    assert chat.messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"},
    ]


def test_images_are_set_apart_and_numbered_over_all_messages():
    low = ContentPart(type="image_url", image_url=ImageUrl(url="data:image/gif;base64,BBBB", detail="low"))
    text = ContentPart(type="text", text="t")
    chat = read_chat(body(Message(role="user", content=[PICTURE, text]), Message(role="user", content=[low])))
    assert chat.messages[0]["content"] == [{"type": "image", "image": 0}, {"type": "text", "text": "t"}]
    assert chat.messages[1]["content"] == [{"type": "image", "image": 1}]
    assert [(image.url[-4:], image.detail, image.where) for image in chat.images] == [
        ("AAAA", "auto", "messages[0].content[0].image_url"),
        ("BBBB", "low", "messages[1].content[0].image_url"),
    ]


def test_an_assistant_may_have_said_nothing_or_called_tools():
    call = ToolCall(id="c", function=CalledFunction(name="f", arguments="{}"))
    chat = read_chat(
        body(Message(role="assistant"), Message(role="assistant", reasoning_content="r", tool_calls=[call]))
    )
    assert chat.messages == [
        {"role": "assistant", "content": None},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "r",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
    ]


def test_switches_of_the_body_become_those_of_the_chat():
    user = Message(role="user", content="u")
    chat = read_chat(body(user))
    assert (chat.thinking, chat.effort, chat.add_generation_prompt, chat.continues) == (None, None, True, False)
    chat = read_chat(
        body(
            user,
            thinking=Thinking(type="disabled"),
            reasoning_effort="low",
            add_generation_prompt=False,
            continue_final_message=True,
        )
    )
    assert (chat.thinking, chat.effort, chat.add_generation_prompt, chat.continues) == (False, "low", False, True)


def test_the_size_of_a_chat_counts_all_that_is_turned_into_a_prompt():
    small = chat_characters(read_chat(body(Message(role="user", content="abc"))))
    assert small < 10
    tools = [{"type": "function", "function": {"name": "f" * 100}}]
    assert chat_characters(read_chat(body(Message(role="user", content="abc"), tools=tools))) > 100
    url = ImageUrl(url="data:image/png;base64," + "A" * 1000)
    picture = Message(role="user", content=[ContentPart(type="image_url", image_url=url)])
    assert chat_characters(read_chat(body(picture))) > 1000
    assert chat_characters(read_chat(body(Message(role="assistant", reasoning_content="x" * 500)))) > 500


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (Message(role="user"), "messages[0].content"),
        (Message(role="user", content=[ContentPart(type="image_url")]), "messages[0].content[0].image_url"),
        (Message(role="user", content=[ContentPart(type="text")]), "messages[0].content[0].text"),
        (Message(role="user", content=[ContentPart(type="input_audio")]), "messages[0].content[0].type"),
        (Message(role="assistant", function_call={"name": "f"}), "messages[0].function_call"),
    ],
)
def test_what_is_neither_text_nor_image_is_refused_by_its_place(message: Message, param: str):
    with pytest.raises(BadRequest) as caught:
        read_chat(body(message))
    assert caught.value.param == param
