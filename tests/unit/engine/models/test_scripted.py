import time

import pytest
import torch

from benchmarks.model_driver import ModelDriver as Driver
from core.errors import CheckpointError, ConfigError
from engine.models.builtin import chat_script, prepare_builtin, prepare_scripted, text_script
from engine.models.byte_tokenizer import byte_ids, chat_tail
from engine.models.registry import load_model
from engine.models.script import Script, ScriptedConfig, context_hash, finish, scripted_reply, term

torch.set_num_threads(1)
EOS = 258
PLAIN = ScriptedConfig()


def driver(tmp_path, config=PLAIN, **kwargs):
    return Driver(load_model(prepare_scripted(tmp_path, config)), **kwargs)


def test_the_model_says_what_the_reference_says(tmp_path):
    for prompt in ([1], [104, 105], list(range(40, 90)), [7] * 33):
        truth = scripted_reply(ScriptedConfig(), prompt, 40, ignore_eos=True)
        assert driver(tmp_path).greedy(0, prompt, 40) == truth


def test_chunking_and_batch_mates_do_not_change_the_text(tmp_path):
    prompt = list(range(60, 97))
    run = driver(tmp_path)
    run.step({2: [9, 9, 9]})
    run.step({1: prompt[:5], 2: [4]})
    run.step({1: prompt[5:21]})
    first = int(run.step({2: [5], 1: prompt[21:]})[1].argmax())
    assert [first] == scripted_reply(ScriptedConfig(), prompt, 1)


def test_a_script_speaks_and_then_ends_the_text(tmp_path):
    config = ScriptedConfig(scripts=(chat_script("Hi", "Yes 🙂"),))
    prompt = [257, *byte_ids("user\nHi"), *chat_tail()]
    expected = [*"Yes 🙂".encode(), EOS]
    assert scripted_reply(config, prompt, 100) == expected
    assert driver(tmp_path, config).greedy(0, prompt, len(expected)) == expected


def test_the_longest_spoken_prefix_of_a_script_wins():
    config = ScriptedConfig(scripts=(text_script("a", "aab"),))
    assert scripted_reply(config, byte_ids("xa"), 9) == [*b"aab", EOS]


@pytest.mark.parametrize("lane", [0, 1, 2, 3])
@pytest.mark.parametrize("part", [0, 1])
def test_one_wrong_number_in_kv_changes_the_text(tmp_path, part, lane):
    prompt = list(range(50, 90))
    run = driver(tmp_path)
    first = int(run.step({0: prompt})[0].argmax())
    page = int(run.tables[0][2])
    run.kv.paged("full")[page, 0, part, 0, 3, lane] += 1
    said = [first]
    for _ in range(12):
        said.append(int(run.step({0: [said[-1]]})[0].argmax()))
    assert said != scripted_reply(ScriptedConfig(), prompt, 13, ignore_eos=True)


def test_exchanged_pages_change_the_text(tmp_path):
    prompt = list(range(50, 90))
    run = driver(tmp_path)
    first = int(run.step({0: prompt})[0].argmax())
    run.tables[0][[1, 2]] = run.tables[0][[2, 1]]
    said = [first]
    for _ in range(12):
        said.append(int(run.step({0: [said[-1]]})[0].argmax()))
    assert said != scripted_reply(ScriptedConfig(), prompt, 13, ignore_eos=True)


def test_hashed_text_ends_after_varying_lengths():
    lengths = {len(scripted_reply(ScriptedConfig(), [65, n], 1000)) for n in range(40)}
    assert len(lengths) > 15
    assert max(lengths) < 1000


def test_min_tokens_replaces_end_of_text_by_the_second_choice(tmp_path):
    prompt = next([65, n] for n in range(99) if len(scripted_reply(ScriptedConfig(), [65, n], 99)) < 9)
    plain = scripted_reply(ScriptedConfig(), prompt, 99)
    longer = scripted_reply(ScriptedConfig(), prompt, 99, min_tokens=20)
    assert longer[: len(plain) - 1] == plain[:-1]
    assert len(longer) > 20
    logits = driver(tmp_path).step({0: prompt + plain[:-1]})[0]
    assert logits.topk(2).indices.tolist() == [EOS, longer[len(plain) - 1]]


def test_the_vectorised_hash_equals_the_plain_one():
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 320, (50,), generator=generator).tolist()
    total = sum(term(t, i, 4) for i, t in enumerate(tokens))
    read = torch.tensor(tokens).view(-1, 1).expand(-1, 4).numpy()
    positions = torch.arange(50).view(-1, 1).expand(-1, 4).numpy()
    assert context_hash(read, positions) == finish(total, 50)


def test_zero_rows_give_zero_logits(tmp_path):
    assert driver(tmp_path).step({}).shape == (0, 320)


def test_simulated_compute_takes_its_time(tmp_path):
    run = driver(tmp_path, ScriptedConfig(step_delay_ms=30))
    start = time.perf_counter()
    run.step({0: [1]})
    assert time.perf_counter() - start >= 0.03


def test_builtin_preparation_is_idempotent(tmp_path):
    first = prepare_builtin("scripted", tmp_path)
    stamp = (first / "config.json").stat().st_mtime_ns
    assert prepare_builtin("scripted", tmp_path) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    assert load_model(first).facts.name == "scripted"


def test_an_unknown_builtin_names_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="scripted"):
        prepare_builtin("gpt-9", tmp_path)


def test_revision_follows_the_configuration(tmp_path):
    one = load_model(prepare_scripted(tmp_path, ScriptedConfig())).facts
    two = load_model(prepare_scripted(tmp_path, ScriptedConfig(scripts=(Script(after=(1,), emit=(2,)),)))).facts
    assert one.revision != two.revision
    assert one.tokenizer_digest == two.tokenizer_digest


def test_a_changed_model_file_is_refused(tmp_path):
    directory = prepare_builtin("scripted", tmp_path)
    path = directory / "config.json"
    path.write_bytes(path.read_bytes().replace(b"48", b"49"))
    with pytest.raises(CheckpointError, match="checksum"):
        load_model(directory)
