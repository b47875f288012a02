"""Strict readers of the four APIs' answers: a stream's events are checked one by one, then told in common words."""

import json
from dataclasses import dataclass, field

from tests.fakes.http_api import CHAT, COMPLETIONS

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
CHAT_ROUTES = (CHAT, RESPONSES, MESSAGES)
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass
class Told:
    """One choice as a client understands it. `finish` and `usage` are OpenAI's chat words for all."""

    reasoning: str = ""
    text: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    """(id, name, arguments)"""
    finish: str | None = None
    usage: tuple[int, int, int] = (0, 0, 0)
    """prompt, cached, output"""
    logprobs: list[str] = field(default_factory=list)
    """Tokens of the entries of a chat or completion: reasoning first."""

    def comparable(self) -> tuple:
        """Without ids, which differ between requests; arguments as values where they are whole."""
        calls = [(name, _value(arguments)) for _, name, arguments in self.calls]
        return self.reasoning, self.text, calls, self.finish, self.usage


def _value(arguments: str):
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def body_of(route: str, text: str = "Hi", **more) -> dict:
    """The same question in the words of a route."""
    if route == RESPONSES:
        asks = {"input": text}
    elif route == COMPLETIONS:
        asks = {"prompt": text}
    else:
        asks = {"messages": [{"role": "user", "content": text}]}
    limit = {CHAT: "max_completion_tokens", RESPONSES: "max_output_tokens"}.get(route, "max_tokens")
    return {"model": "tiny", **asks, limit: more.pop("limit", 2000), **more}


def stops_of(route: str, stops: list[str]) -> dict:
    """Stop strings in the words of a route."""
    return {"stop_sequences" if route == MESSAGES else "stop": stops}


def tools_of(route: str, tool: dict) -> dict:
    """A chat's function tool in the words of a route."""
    function = tool["function"]
    if route == RESPONSES:
        return {"tools": [{"type": "function", **function}]}
    if route == MESSAGES:
        schema = {"input_schema": function["parameters"]}
        return {"tools": [{k: v for k, v in function.items() if k != "parameters"} | schema]}
    return {"tools": [tool]}


def split_events(data: bytes) -> list[tuple[str, str]]:
    """(name, data) of each event; every event is whole, one data line, no comments."""
    parts = data.decode().split("\n\n")
    assert parts.pop() == "", "the stream ends inside an event"
    events = []
    for part in parts:
        lines = part.split("\n")
        name = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else ""
        (line,) = lines
        assert line.startswith("data: "), line
        events.append((name, line.removeprefix("data: ")))
    return events


def read_stream(route: str, data: bytes) -> Told:
    """Read a stream that ended well."""
    return {CHAT: _chat, COMPLETIONS: _completion, RESPONSES: _response, MESSAGES: _message}[route](split_events(data))


def read_whole(route: str, answer: dict) -> Told:
    """Read a whole answer."""
    if route == RESPONSES:
        return _whole_response(answer)
    if route == MESSAGES:
        return _whole_message(answer)
    (choice,) = answer["choices"]
    usage = _chat_usage(answer["usage"])
    if route == COMPLETIONS:
        tokens = (choice["logprobs"] or {}).get("tokens", [])
        return Told(text=choice["text"], finish=choice["finish_reason"], usage=usage, logprobs=tokens)
    message = choice["message"]
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])
    ]
    told = Told(message.get("reasoning_content", ""), message["content"] or "", calls, choice["finish_reason"], usage)
    told.logprobs = _chat_entries(choice)
    return told


def _chat_entries(choice: dict) -> list[str]:
    lists = choice["logprobs"] or {}
    return [entry["token"] for name in ("reasoning_content", "content") for entry in lists.get(name) or []]


def _chat_usage(usage: dict) -> tuple[int, int, int]:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]


def _chat_chunks(events: list[tuple[str, str]]) -> tuple[list[dict], dict]:
    """The choices of all chunks, and the usage at the end."""
    assert [name for name, _ in events] == [""] * len(events)
    assert [data for _, data in events].count("[DONE]") == 1
    assert events[-1][1] == "[DONE]"
    *chunks, last = [json.loads(data) for _, data in events[:-1]]
    assert last["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] is not None for choice in choices] == [False] * (len(choices) - 1) + [True]
    return choices, last["usage"]


def _completion(events: list[tuple[str, str]]) -> Told:
    choices, usage = _chat_chunks(events)
    text = "".join(choice["text"] for choice in choices)
    told = Told(text=text, finish=choices[-1]["finish_reason"], usage=_chat_usage(usage))
    told.logprobs = [token for choice in choices for token in (choice["logprobs"] or {}).get("tokens", [])]
    return told


def _chat(events: list[tuple[str, str]]) -> Told:
    choices, usage = _chat_chunks(events)
    told = Told(finish=choices[-1]["finish_reason"], usage=_chat_usage(usage))
    calls: dict[int, list[str]] = {}
    assert choices[0]["delta"]["role"] == "assistant"
    for choice in choices:
        delta = choice["delta"]
        told.logprobs += _chat_entries(choice)
        told.reasoning += delta.get("reasoning_content") or ""
        told.text += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            assert ("id" in call) == (call["index"] not in calls), "the id comes once, first"
            known = calls.setdefault(call["index"], [call.get("id", ""), "", ""])
            known[1] += call["function"].get("name", "")
            known[2] += call["function"]["arguments"]
    assert list(calls) == list(range(len(calls)))
    told.calls = [tuple(calls[index]) for index in calls]
    return told


_ENDS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


def _message_usage(usage: dict) -> tuple[int, int, int]:
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached, usage["output_tokens"]


def _whole_message(answer: dict) -> Told:
    told = Told(finish=_ENDS[answer["stop_reason"]], usage=_message_usage(answer["usage"]))
    assert (answer["type"], answer["role"]) == ("message", "assistant")
    for block in answer["content"]:
        match block["type"]:
            case "thinking":
                told.reasoning += block["thinking"]
            case "text":
                told.text += block["text"]
            case "tool_use":
                given = block["input"]
                told.calls.append((block["id"], block["name"], given if isinstance(given, str) else json.dumps(given)))
    return told


def _message(events: list[tuple[str, str]]) -> Told:
    told, blocks = Told(), []
    is_open = False
    parsed = [(name, json.loads(data)) for name, data in events]
    assert all(name == data["type"] for name, data in parsed)
    assert [parsed[0][0], parsed[-2][0], parsed[-1][0]] == ["message_start", "message_delta", "message_stop"]
    started = parsed[0][1]["message"]
    assert (started["content"], started["stop_reason"]) == ([], None)
    for name, data in parsed[1:-2]:
        match name:
            case "content_block_start":
                assert not is_open
                assert data["index"] == len(blocks)
                is_open = True
                blocks.append(data["content_block"])
            case "content_block_delta":
                assert is_open
                assert data["index"] == len(blocks) - 1
                delta, kind = data["delta"], blocks[-1]["type"]
                match delta["type"]:
                    case "text_delta":
                        assert kind == "text"
                        told.text += delta["text"]
                    case "thinking_delta":
                        assert kind == "thinking"
                        told.reasoning += delta["thinking"]
                    case "input_json_delta":
                        assert kind == "tool_use"
                        blocks[-1]["json"] = blocks[-1].get("json", "") + delta["partial_json"]
                    case "signature_delta":
                        assert kind == "thinking"
                    case other:
                        raise AssertionError(other)
            case "content_block_stop":
                assert is_open
                is_open = False
            case other:
                raise AssertionError(other)
    assert not is_open
    told.calls = [(b["id"], b["name"], b.get("json", "")) for b in blocks if b["type"] == "tool_use"]
    told.finish = _ENDS[parsed[-2][1]["delta"]["stop_reason"]]
    told.usage = _message_usage(parsed[-2][1]["usage"])
    assert _message_usage(started["usage"])[:2] == told.usage[:2]
    return told


def _whole_response(answer: dict) -> Told:
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    told = Told(usage=(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]))
    for item in answer["output"]:
        match item["type"]:
            case "reasoning":
                told.reasoning += "".join(part["text"] for part in item["content"])
            case "message":
                told.text += "".join(part["text"] for part in item["content"])
            case "function_call":
                told.calls.append((item["call_id"], item["name"], item["arguments"]))
    finished = "tool_calls" if told.calls else "stop"
    told.finish = {"completed": finished, "incomplete": "length"}[answer["status"]]
    return told


def _response(events: list[tuple[str, str]]) -> Told:
    parsed = [(name, json.loads(data)) for name, data in events]
    assert all(name == data["type"] for name, data in parsed)
    assert [data["sequence_number"] for _, data in parsed] == list(range(len(parsed)))
    names = [name.removeprefix("response.") for name, _ in parsed]
    assert names[:2] == ["created", "in_progress"]
    assert sum(name in ("completed", "incomplete", "failed") for name in names) == 1
    told = Told()
    items: list[dict] = []
    done: list[dict] = []
    for name, data in [(n.removeprefix("response."), d) for n, d in parsed[2:-1]]:
        if name == "output_item.added":
            assert data["output_index"] == len(items) == len(done)
            items.append({**data["item"], "text": ""})
            continue
        assert data["output_index"] == len(items) - 1
        item = items[-1]
        assert data.get("item_id", item["id"]) == item["id"]
        if name in ("output_text.delta", "reasoning_text.delta", "function_call_arguments.delta"):
            item["text"] += data["delta"]
        elif name in ("output_text.done", "reasoning_text.done"):
            assert data["text"] == item["text"]
        elif name == "function_call_arguments.done":
            assert data["arguments"] == item["text"]
        elif name == "output_item.done":
            assert data["item"]["id"] == item["id"]
            done.append(data["item"])
        else:
            assert name in ("content_part.added", "content_part.done"), name
    last = parsed[-1][1]["response"]
    assert last["output"] == done
    told = _whole_response(last)
    assert told.text == "".join(item["text"] for item in items if item["type"] == "message")
    assert told.reasoning == "".join(item["text"] for item in items if item["type"] == "reasoning")
    return told
