"""The models that come with Tandem, each prepared once into a cache directory as a complete model directory.

`scripted`, the tiny Llamas and the small DeepSeeks are generated; `smollm2` is converted from the weights inside an
installed package. Needs no torch, except while a DeepSeek is written.
"""

import hashlib
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from core.errors import ConfigError
from engine.models.byte_tokenizer import byte_ids, chat_tail, write_byte_tokenizer
from engine.models.deepseek_v41.presets import mini_config, tiny_config
from engine.models.manifest import make_directory
from engine.models.script import Script, ScriptedConfig
from engine.models.scripted_v41 import prepare_scripted_v41
from engine.models.smollm2 import prepare_smollm2
from engine.models.tiny import write_tiny


def chat_script(user: str, reply: str) -> Script:
    """Script for a conversation whose last user message ends with `user` (byte tokenizer, ChatML template)."""
    return Script(after=byte_ids(user) + chat_tail(), emit=byte_ids(reply))


def text_script(after: str, emit: str) -> Script:
    """Script for a plain completion whose prompt ends with `after`."""
    return Script(after=byte_ids(after), emit=byte_ids(emit))


SCRIPTED = ScriptedConfig(
    scripts=(
        chat_script("Say hello.", "Hello from the scripted model."),
        chat_script("Say hello in five languages.", "Hello, 你好, Привет, مرحبا, Γειά 🙂"),
        chat_script(
            "What is the weather in Paris?",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        ),
        text_script("The quick brown fox", " jumps over the lazy dog."),
    )
)
"""What the builtin `scripted` says."""


def prepare_scripted(cache_dir: Path, config: ScriptedConfig, name: str = "scripted") -> Path:
    """Return a directory with a scripted model of this configuration; equal configurations share one."""
    body = msgspec.json.format(msgspec.json.encode(config), indent=2)

    def fill(directory: Path) -> None:
        (directory / "config.json").write_bytes(body)
        write_byte_tokenizer(directory, config.vocab_size)

    digest = hashlib.sha256(body).hexdigest()[:12]
    return make_directory(cache_dir / f"{name}-{digest}", name, fill)


def _prepare_builtin_scripted(cache_dir: Path) -> Path:
    return prepare_scripted(cache_dir, SCRIPTED)


def _prepare_tiny(name: str, dtype: str, windowed: bool, cache_dir: Path) -> Path:
    return make_directory(
        cache_dir / f"{name}-{_TINY_VERSION}", name, lambda directory: write_tiny(directory, dtype, windowed=windowed)
    )


def _prepare_random_llama(cache_dir: Path) -> Path:
    def fill(directory: Path) -> None:
        body = msgspec.json.format(msgspec.json.encode(random_llama_config()), indent=2)
        (directory / "config.json").write_bytes(body)
        write_byte_tokenizer(directory, RANDOM_VOCAB, plain=True)

    return make_directory(cache_dir / f"{RANDOM_LLAMA}-v2", RANDOM_LLAMA, fill)


def _prepare_deepseek(name: str, cache_dir: Path) -> Path:
    def fill(directory: Path) -> None:
        raw, seed, shard_bytes = _DEEPSEEK[name]
        # Imported by name: whoever prepares a model is not to pay for torch unless this one has to be written.
        exporter = importlib.import_module("engine.models.deepseek_v41.exporter")
        exporter.export(directory, raw(), seed, shard_bytes=shard_bytes)

    return make_directory(cache_dir / f"{name}-{_DEEPSEEK_VERSION}", name, fill)


RANDOM_LLAMA, RANDOM_VOCAB = "llama-8b-random", 128_256
"""For a GPU only: nothing but a shape, whose weights are drawn there."""


def random_llama_config() -> dict[str, Any]:
    """Return the config.json of a model of the shape of Llama 3 8B, in bfloat16, with random weights."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": RANDOM_VOCAB,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 65_536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": 258,
        "dtype": "bfloat16",
        "tandem_random_weights": 8,
    }


_DEEPSEEK = {"v41-tiny": (tiny_config, 41, 2 << 20), "v41-mini": (mini_config, 41, 128 << 20)}
"""Name -> configuration, seed, bytes per shard."""
_DEEPSEEK_VERSION = "v2"
"""As `_TINY_VERSION`, for `engine.models.deepseek_v41.exporter`."""
_TINY_VERSION = "v1"
"""Part of the directory name; changes whenever `engine.models.tiny` would write something else."""
_BUILTIN: dict[str, Callable[[Path], Path]] = {
    "smollm2": prepare_smollm2,
    "tiny-llama": partial(_prepare_tiny, "tiny-llama", "f32", False),
    "tiny-llama-f64": partial(_prepare_tiny, "tiny-llama-f64", "f64", False),
    "tiny-window": partial(_prepare_tiny, "tiny-window", "f32", True),
    "tiny-window-f64": partial(_prepare_tiny, "tiny-window-f64", "f64", True),
    "v41-tiny": partial(_prepare_deepseek, "v41-tiny"),
    "v41-mini": partial(_prepare_deepseek, "v41-mini"),
    RANDOM_LLAMA: _prepare_random_llama,
    "scripted": _prepare_builtin_scripted,
    "scripted-v41": prepare_scripted_v41,
}
BUILTIN_NAMES = tuple(_BUILTIN)


def prepare_builtin(name: str, cache_dir: Path) -> Path:
    """Return the directory of a builtin model, made under `cache_dir` if it is not there yet.

    Idempotent and safe against other processes doing the same. Raises `ConfigError` for an unknown name or a missing
    source package.
    """
    prepare = _BUILTIN.get(name)
    if prepare is None:
        raise ConfigError(f"there is no builtin model {name!r}; known are {', '.join(BUILTIN_NAMES)}")
    return prepare(cache_dir)
