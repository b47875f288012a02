"""What the scripted model must say, computed without any engine."""

from engine.models.builtin import SCRIPTED
from engine.models.script import ScriptedConfig, scripted_reply


def scripted_text(prompt: str, max_tokens: int, config: ScriptedConfig = SCRIPTED, *, ignore_eos: bool = False) -> str:
    """Return the text of a plain completion at temperature 0 (byte tokenizer, end-of-text id not shown)."""
    ids = scripted_reply(config, tuple(prompt.encode()), max_tokens, ignore_eos=ignore_eos)
    return bytes(i for i in ids if i < 256).decode(errors="replace")
