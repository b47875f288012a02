"""A model's tokenizer: prompts and chats to token ids, ids to text, from a model directory.

Holds what the gateway knows of a model's text. Immutable after loading, safe to use from several threads.
Knows no HTTP and no limits of the deployment.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import tokenizers

from core.errors import BadRequest, ConfigError
from gateway.text.shield import Shield, SpecialToken
from gateway.text.template import ChatTemplate, Now
from gateway.text.vocabulary import Vocabulary, build_vocabulary, read_rules

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """Encodes and decodes for one model."""

    def __init__(
        self,
        definition: Mapping[str, Any],
        *,
        template: ChatTemplate | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        """`definition` is the content of tokenizer.json. Raises `ConfigError` if it is not understood."""
        self._parsing = _build(definition)
        self._plain = _build(definition)
        self._plain.encode_special_tokens = True
        self._inner = _build(_without_first_prefix(definition))
        self._inner.encode_special_tokens = True
        added = self._parsing.get_added_tokens_decoder()
        self.added_tokens: Mapping[str, int] = {token.content: index for index, token in added.items()}
        """Ids of the tokens outside the trained vocabulary, special ones among them, by their text."""
        self._shield = Shield(
            tuple(
                SpecialToken(index, token.content, token.lstrip, token.rstrip)
                for index, token in added.items()
                if token.special
            )
        )
        self.vocabulary: Vocabulary = build_vocabulary(
            self._parsing.get_vocab(with_added_tokens=False),
            {index: (token.content, token.special) for index, token in added.items()},
            read_rules(cast("Mapping[str, Any] | None", definition.get("decoder"))),
        )
        self.template = template
        self.eos_token_ids = eos_token_ids
        """Ids that end a text, as the model's files name them."""

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Encode a raw prompt: special tokens written in it count as such; the model's own frame (BOS) is added."""
        return tuple(self._parsing.encode(text, add_special_tokens=add_special_tokens).ids)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        continues: bool = False,
    ) -> tuple[int, ...]:
        """Encode a chat: special tokens come from the template only. Raises `BadRequest` if it refuses the messages.

        With `continues` the text ends where the content of the last message does.
        `role` is taken as it is (the caller checks it against a closed set); every other string is the user's text.
        """
        if self.template is None:
            raise BadRequest("this model has no chat template; use /v1/completions", param="messages")
        extra: dict[str, Any] = dict(variables or {})
        guard = self._shield.choose_guard([list(messages), extra, list(tools)])
        covered = [
            {key: value if key == "role" else self._shield.cover(value, guard) for key, value in message.items()}
            for message in messages
        ]
        end = guard * 3
        if continues:
            covered[-1]["content"] += end
        text = self.template.render(
            covered,
            add_generation_prompt=add_generation_prompt,
            variables={name: self._shield.cover(value, guard) for name, value in extra.items()},
            tools=[self._shield.cover(tool, guard) for tool in tools],
        )
        if continues:
            text, found, _ = text.rpartition(end)
            if not found:
                raise BadRequest("the chat template does not show the message to be continued", param="messages")
        ids: list[int] = []
        for part in self._shield.split(text, guard):
            if isinstance(part, SpecialToken):
                ids.append(part.index)
            else:
                encoder = self._inner if ids else self._plain
                ids.extend(encoder.encode(part, add_special_tokens=False).ids)
        return tuple(ids)

    def to_definition(self) -> dict[str, Any]:
        """Return the content of a tokenizer.json that says the same."""
        return cast("dict[str, Any]", json.loads(self._parsing.to_str()))

    def token_id(self, content: str) -> int | None:
        """Return the id of a token's exact text, if it is one token."""
        return self._parsing.token_to_id(content)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Decode a whole sequence that stands alone."""
        hidden = self.vocabulary.special_ids if skip_special else frozenset[int]()
        data = b"".join([self.vocabulary.bytes_of(token) for token in ids if token not in hidden])
        text = data.decode(errors="replace")
        return text.removeprefix(" ") if self.vocabulary.rules.strips_leading_space else text


def load_tokenizer(directory: Path, now: Now) -> Tokenizer:
    """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json of a model directory.

    Only tokenizer.json must exist. Raises `ConfigError` with one plain sentence.
    """
    definition = read_json(directory / "tokenizer.json", required=True)
    config = read_json(directory / "tokenizer_config.json")
    source = _template_source(directory, config)
    names = {name: _content(config[name]) for name in _SPECIAL_NAMES if config.get(name)}
    template = ChatTemplate(source, names, now) if source is not None else None
    try:
        tokenizer = Tokenizer(definition, template=template)
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error.message}") from error
    tokenizer.eos_token_ids = _eos_ids(directory, names.get("eos_token"), tokenizer)
    return tokenizer


def tokenizer_digest(directory: Path) -> str:
    """Return the SHA-256 of a model directory's tokenizer.json in hex, as workers name theirs; empty without one."""
    try:
        return hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()
    except OSError:
        return ""


def _build(definition: Mapping[str, Any]) -> tokenizers.Tokenizer:
    try:
        built = tokenizers.Tokenizer.from_str(json.dumps(definition))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"tokenizer.json is not a tokenizer definition: {error}") from error
    built.no_truncation()
    built.no_padding()
    return built


def _without_first_prefix(definition: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the definition for text in the middle of a prompt: no word marker before its first word."""
    pre = cast("Mapping[str, Any] | None", definition.get("pre_tokenizer"))
    if pre is None:
        return definition
    return {**definition, "pre_tokenizer": _never_prepend(pre)}


def _never_prepend(step: Mapping[str, Any]) -> Mapping[str, Any]:
    if step.get("type") == "Sequence":
        inner = cast("list[Mapping[str, Any]]", step["pretokenizers"])
        return {**step, "pretokenizers": [_never_prepend(one) for one in inner]}
    if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
        return {**step, "prepend_scheme": "never"}
    return step


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Return a JSON object of a model directory, {} if it may be missing and is; raises `ConfigError`."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise ConfigError(f"{path} does not exist; the model directory needs it") from None
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return cast("dict[str, Any]", content)


def _template_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template: Any = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in cast("list[dict[str, str]]", template)}
        return named.get("default")
    return cast("str | None", template)


def _content(token: Any) -> str:
    """Return a special token's text: written as a string, or as an object with `content`."""
    return str(cast("Mapping[str, Any]", token)["content"]) if isinstance(token, dict) else str(token)


def _eos_ids(directory: Path, eos_token: str | None, tokenizer: Tokenizer) -> tuple[int, ...]:
    ids: Any = read_json(directory / "generation_config.json").get("eos_token_id")
    listed = [ids] if isinstance(ids, int) else list(cast("list[int]", ids or []))
    index = tokenizer.token_id(eos_token) if eos_token is not None else None
    return tuple(dict.fromkeys([*listed, *([index] if index is not None else [])]))
