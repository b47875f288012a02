"""DeepSeek model directories as a gateway reads them, and answers in DeepSeek's markup."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import tokenizers
from PIL import Image
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import tiny_config
from engine.models.deepseek_v41.tokenizer_files import write_tokenizer
from gateway.generation import ServedModel
from gateway.text.chat import ChatFormat
from gateway.text.format import load_format
from gateway.text.images import ImageLimits
from gateway.text.tokenizer import Tokenizer, load_tokenizer
from tests.fakes.tokenizer import fixed_now

IMAGE_ID = 510
EOS = 1
SERVED = ServedModel(name="tiny", max_tokens_total=8192, vocab_size=512, eos_token_ids=(EOS,))
BOS_TEXT, EOS_TEXT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SPECIALS = (
    *(BOS_TEXT, EOS_TEXT, "<｜User｜>", "<｜Assistant｜>", "<｜System｜>", "<think>", "</think>"),
    *("｜DSML｜", "<｜latest_reminder｜>", "<｜image｜>"),
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL_TEXT = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
ARGUMENTS = {"city": "Paris", "days": 3}


def write_directory(directory: Path, *, vision: bool = True, **fields) -> Path:
    """The files of `v41-tiny` that a gateway reads, without weights."""
    config = tiny_config()
    write_tokenizer(directory, parse_config(config))
    if not vision:
        del config["vision_config"]
    (directory / "config.json").write_text(json.dumps({**config, **fields}))
    return directory


def trained_definition(size: int = 700) -> dict:
    """A byte-level BPE with merges whose added tokens carry DeepSeek's spellings."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ["The weather in Paris is sunny, the answer is yes.", "你好，世界 🌍 naïve café", CALL_TEXT] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens(
        [AddedToken(t, special="think" not in t and "DSML" not in t, normalized=False) for t in SPECIALS]
    )
    return json.loads(tokenizer.to_str())


def write_trained(directory: Path, **fields) -> Path:
    """A directory with the trained tokenizer; `fields` go into config.json."""
    (directory / "tokenizer.json").write_text(json.dumps(trained_definition()))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS_TEXT, "bos_token": BOS_TEXT}))
    (directory / "config.json").write_text(json.dumps(fields or {"model_type": "deepseek_v41"}))
    return directory


def load_chat(directory: Path, limits: ImageLimits | None = None) -> tuple[Tokenizer, ChatFormat]:
    """Tokenizer and format of a directory."""
    tokenizer = load_tokenizer(directory, fixed_now)
    return tokenizer, load_format(directory, tokenizer, limits or ImageLimits())


def spell(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of an answer: special spellings count as such."""
    return list(tokenizer.encode_prompt(text, add_special_tokens=False))


def picture(width: int, height: int, seed: int = 0, kind: str = "PNG", mode: str = "RGB") -> bytes:
    """An image file of coloured noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(out, kind)
    return out.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    """The file as clients send it."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
