"""A scripted model that speaks DeepSeek-V4.1's chat format: reasoning and tool calls without any weights.

For tests and demonstrations of the whole serving path; the tokenizer is that of `v41-tiny`. Needs no torch.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.models.byte_tokenizer import byte_alphabet
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import tiny_config
from engine.models.deepseek_v41.tokenizer_files import CHAT, EOS, FIRST_BYTE, THINK_END, token_ids, write_tokenizer
from engine.models.manifest import make_directory
from engine.models.script import Script, ScriptedConfig

NAME = "scripted-v41"
_ASSISTANT = CHAT[1]
_THINK = CHAT[3]
_DSML = CHAT[5]

WEATHER_QUESTION = "What is the weather in Paris?"
WEATHER_REASONING = "The user asks for the weather, so I call the tool."
WEATHER_RESULT = '{"sky": "sunny"}'
WEATHER_ANSWER = "It is sunny in Paris. 🌞"
GREETING = "Say hello."
GREETING_REASONING = "A greeting is wanted."
GREETING_ANSWER = "Hello from the scripted model."


def weather_call(city: str) -> str:
    """Return the markup of one call of `get_weather`."""
    return (
        f'<{_DSML} calls>\n<{_DSML} invoke name="get_weather">\n'
        f'<{_DSML} parameter name="city" string="true">{city}</{_DSML} parameter>\n'
        f'<{_DSML} parameter name="days" string="false">3</{_DSML} parameter>\n'
        f"</{_DSML} invoke>\n</{_DSML} calls>"
    )


def _scripts(ids: Mapping[str, int]) -> list[Script]:
    def says(after: str, reasoning: str, answer: str) -> list[Script]:
        """With reasoning, and without where the prompt has closed it already."""
        ask = after + _ASSISTANT
        return [
            Script(after=spell(ask + _THINK, ids), emit=spell(f"{reasoning}{THINK_END}{answer}", ids)),
            Script(after=spell(ask + THINK_END, ids), emit=spell(answer, ids)),
        ]

    return [
        *says(WEATHER_QUESTION, WEATHER_REASONING, "\n\n" + weather_call("Paris")),
        *says(f"<tool_result>{WEATHER_RESULT}</tool_result>", "The tool has answered.", WEATHER_ANSWER),
        *says(GREETING, GREETING_REASONING, GREETING_ANSWER),
    ]


def spell(text: str, ids: Mapping[str, int]) -> tuple[int, ...]:
    """Return the ids of a text in which special spellings count as such; `ids` by spelling."""
    specials = sorted(ids.keys() - set(byte_alphabet()), key=len, reverse=True)
    out: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, specials)) + ")", text):
        if part in ids and part not in byte_alphabet():
            out.append(ids[part])
        else:
            out.extend(FIRST_BYTE + byte for byte in part.encode())
    return tuple(out)


def scripted_v41_config(**changes: Any) -> ScriptedConfig:
    """Return the configuration; `changes` are fields of `ScriptedConfig` (`scripts` are added to the built-in ones)."""
    config = parse_config(tiny_config())
    ids = token_ids(config)
    more: Sequence[Script] = changes.pop("scripts", ())
    return ScriptedConfig(
        vocab_size=config.vocab_size,
        eos_token_id=ids[EOS],
        first_letter=FIRST_BYTE,
        scripts=(*_scripts(ids), *more),
        **changes,
    )


def prepare_scripted_v41(cache_dir: Path, **changes: Any) -> Path:
    """Return a directory with the model, made under `cache_dir` if it is not there yet."""
    fields = {**msgspec.to_builtins(scripted_v41_config(**changes)), "tandem_format": "deepseek-v4.1"}
    body = msgspec.json.format(msgspec.json.encode(fields), indent=2)

    def fill(directory: Path) -> None:
        (directory / "config.json").write_bytes(body)
        write_tokenizer(directory, parse_config(tiny_config()))

    digest = hashlib.sha256(body).hexdigest()[:12]
    return make_directory(cache_dir / f"{NAME}-{digest}", NAME, fill)
