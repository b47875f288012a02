"""The application over real sockets with the official client."""


from gateway.text.tokenizer import Tokenizer
from tests.fakes.generator import ScriptedGenerator, obedient

MESSAGES = [{"role": "user", "content": "Hello there"}]


async def test_a_chat_streams_and_answers_whole_with_the_same_text(serve, tokenizer: Tokenizer):
    ids = tokenizer.encode_prompt("Hello world, 你好 the end")
    generator = ScriptedGenerator(obedient([*ids, 2], cached=3))
    async with serve(generator) as served:
        whole = await served.openai.chat.completions.create(model="tiny", messages=MESSAGES)
        stream = await served.openai.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content == "Hello world, 你好 the end"
    assert whole.choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == len(ids) + 1
    assert whole.usage.prompt_tokens_details.cached_tokens == 3
    assert generator.num_open == 0
