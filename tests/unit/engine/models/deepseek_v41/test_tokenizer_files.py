import deepseek_recipe as recipe
import pytest
from tokenizers import Tokenizer

from core.errors import InvariantError
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import mini_config, tiny_config
from engine.models.deepseek_v41.tokenizer_files import (
    CHAT,
    EOS,
    FIRST_BYTE,
    IMAGE,
    THINK_END,
    loudness,
    token_ids,
    write_tokenizer,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(made, parse_config(tiny_config()))
    return made


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def test_every_spelling_of_the_chat_format_is_one_token(tokenizer):
    kinds = [getattr(recipe.SpecialToken, name) for name in dir(recipe.SpecialToken) if name[0].isupper()]
    assert len(kinds) == 18
    for kind in kinds:
        assert len(tokenizer.encode(kind.default_str()).ids) == 1, kind.default_str()


def test_begin_end_pad_and_image_have_the_ids_of_the_configuration(tokenizer):
    config = parse_config(tiny_config())
    assert tokenizer.token_to_id(IMAGE) == config.image_token_id == 510
    assert (tokenizer.token_to_id(EOS),) == config.eos_token_ids
    assert config.bos_token_id == 0 and config.pad_token_id == 2


def test_every_id_of_the_vocabulary_exists_once(tokenizer):
    assert tokenizer.get_vocab_size() == 512
    assert sorted(tokenizer.get_vocab().values()) == list(range(512))


def test_text_is_its_bytes(tokenizer):
    text = "Grüße, 世界 🙂\n\t"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == [FIRST_BYTE + byte for byte in text.encode()]
    assert tokenizer.decode(ids) == text


def test_markers_of_the_chat_are_not_special_as_in_the_published_tokenizer(tokenizer):
    added = tokenizer.get_added_tokens_decoder()
    assert {token.content for token in added.values() if not token.special} == set(CHAT)


def test_v41_conversations_with_thinking_and_tools_are_rendered(directory, tokenizer):
    encoding = recipe.DeepseekV41Encoding().with_tokenizer(
        recipe.Tokenizer.from_file(str(directory / "tokenizer.json"))
    )
    tool = recipe.ToolDefinition("f", "d", {"type": "object", "properties": {}})
    chat = recipe.Conversation([recipe.SystemMessage("Be brief."), recipe.UserMessage("hi")], tools=[tool])
    ids = encoding.encode(chat)
    assert ids[0] == 0 and tokenizer.token_to_id("<think>") == ids[-1]
    assert max(ids) < 510


def test_a_vocabulary_without_room_is_refused():
    raw = tiny_config()
    raw["image_token_id"] = 100
    with pytest.raises(InvariantError, match="leaves no room"):
        token_ids(parse_config(raw))


def test_loud_tokens_are_few_and_factors_are_powers_of_two():
    config = parse_config(tiny_config())
    factors = loudness(config)
    assert len(factors) == 512 and set(factors) == {0.25, 2.0, 4.0}
    assert factors[FIRST_BYTE + ord("e")] == 4.0
    ids = token_ids(config)
    assert factors[ids[THINK_END]] == 4.0 and factors[ids[EOS]] == 2.0
    assert factors.count(4.0) == 30 and factors.count(2.0) == 1


def test_minis_vocabulary_fits():
    ids = token_ids(parse_config(mini_config()))
    assert len(ids) == 32_768 and ids[IMAGE] == 32_766
