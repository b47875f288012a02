"""The tokenizer of generated models: one token per byte, then special tokens, and a ChatML template.

Id b is byte b; 256..258 are ``<|endoftext|>``, ``<|im_start|>``, ``<|im_end|>``; reserved special tokens fill the
vocabulary, so that every id a model can emit exists. Writes files that any client library reads; knows no model.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT, IM_START, IM_END = 256, 257, 258
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_ids(text: str) -> tuple[int, ...]:
    """Return the token ids of plain text."""
    return tuple(text.encode())


def chat_tail() -> tuple[int, ...]:
    """Return the ids that the template puts between the end of the last message and the answer."""
    return (IM_END, *byte_ids("\n"), IM_START, *byte_ids("assistant\n"))


def byte_alphabet() -> list[str]:
    """Return the printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = {byte: chr(byte) for byte in printable}
    spare = iter(range(0x100, 0x200))
    return [chars.get(byte) or chr(next(spare)) for byte in range(256)]


def write_byte_tokenizer(directory: Path, vocab_size: int, *, plain: bool = False) -> None:
    """Write tokenizer.json and tokenizer_config.json for ids 0..`vocab_size` - 1 (at least 259).

    `plain`: the reserved ids are ordinary tokens with a text of their own (``[300]``); a hundred thousand special ones
    would make every reader slow.
    """
    vocabulary = {char: i for i, char in enumerate(byte_alphabet())}
    if plain:
        vocabulary |= {text: 256 + i for i, text in enumerate(_SPECIAL)}
        vocabulary |= {f"[{i}]": i for i in range(256 + len(_SPECIAL), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    reserved = [] if plain else [f"<|reserved_{i}|>" for i in range(vocab_size - 256 - len(_SPECIAL))]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (*_SPECIAL, *reserved)])
    tokenizer.save(str(directory / "tokenizer.json"))
    write_tokenizer_config(
        directory, bos=None, eos=_SPECIAL[2], pad=_SPECIAL[0], chat_template=CHAT_TEMPLATE, extra=_SPECIAL[:2]
    )


def write_tokenizer_config(
    directory: Path,
    *,
    bos: str | None,
    eos: str,
    pad: str,
    chat_template: str | None,
    add_bos: bool = False,
    extra: Sequence[str] = (),
) -> None:
    """Write tokenizer_config.json in the form that Transformers and ourselves read."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "unk_token": None,
        "additional_special_tokens": list(extra),
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
