"""Which chat format a model directory asks for: named in its config.json, or known from its architecture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

from core.errors import ConfigError
from core.image_plan import read_rules
from gateway.text.chat import ChatFormat
from gateway.text.deepseek_chat import DeepseekChat, Version, Vision
from gateway.text.images import ImageLimits
from gateway.text.segments import SegmentEncoder
from gateway.text.template_chat import AnswerParsing, TemplateChat
from gateway.text.tokenizer import Tokenizer, read_json

FORMAT_KEY = "tandem_format"
"""Entry of config.json that names the format: `template`, `deepseek-v4` or `deepseek-v4.1`."""
_BY_ARCHITECTURE: Mapping[str, Version] = {
    "DeepseekV4ForCausalLM": "deepseek-v4",
    "DeepseekV41ForCausalLM": "deepseek-v4.1",
}
_BY_TYPE: Mapping[str, Version] = {"deepseek_v4": "deepseek-v4", "deepseek_v41": "deepseek-v4.1"}


def load_format(
    directory: Path, tokenizer: Tokenizer, limits: ImageLimits, parsing: AnswerParsing | None = None
) -> ChatFormat:
    """Return the format of a model directory; raises `ConfigError`."""
    config = read_json(directory / "config.json")
    name = _name(config)
    if name == "template":
        return TemplateChat(tokenizer, parsing)
    for version in get_args(Version):
        if name == version:
            segments = SegmentEncoder(tokenizer.to_definition())
            return DeepseekChat(version, tokenizer, segments, vision=_vision(directory, config, limits))
    raise ConfigError(
        f"{directory / 'config.json'}: `{FORMAT_KEY}` is {name!r}; known are template, {', '.join(get_args(Version))}"
    )


def _name(config: Mapping[str, Any]) -> str:
    named = config.get(FORMAT_KEY)
    if named is not None:
        return str(named)
    for architecture in cast("list[str]", config.get("architectures") or []):
        if architecture in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[architecture]
    return _BY_TYPE.get(str(config.get("model_type")), "template")


def _vision(directory: Path, config: Mapping[str, Any], limits: ImageLimits) -> Vision | None:
    fields = cast("dict[str, object] | None", config.get("vision_config"))
    if fields is None:
        return None
    token_id = config.get("image_token_id")
    if not isinstance(token_id, int):
        raise ConfigError(f"{directory / 'config.json'} has a vision_config, but no image_token_id")
    return Vision(rules=read_rules(fields), limits=limits, token_id=token_id)
