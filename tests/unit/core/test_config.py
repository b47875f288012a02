"""Loading, overriding, dumping; each mistake is one plain sentence that names source, key and expectation."""

import enum
import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta

from core.config import dump, load, native_environment, parse_args, read_secret
from core.errors import ConfigError


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Section(msgspec.Struct, frozen=True, kw_only=True):
    id: Annotated[str, Meta(min_length=1)]
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    ratio: float = 0.5
    enabled: bool = True
    colour: Colour = Colour.RED
    names: tuple[str, ...] = ()
    path: Path = Path("models")
    note: str | None = None
    secret: str = ""
    secret_file: str = ""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    worker: Section
    limits: dict[str, int] = {}
    optional: Section | None = None


def write(tmp_path, text):
    path = tmp_path / "some.toml"
    path.write_text(text)
    return path


MINIMAL = '[worker]\nid = "w"\n'


def test_a_file_becomes_a_struct_with_defaults(tmp_path):
    config = load(Config, write(tmp_path, MINIMAL + "port = 80\nratio = 1\ncolour = 'blue'\npath = '/m'\n"))
    assert config == Config(worker=Section(id="w", port=80, ratio=1.0, colour=Colour.BLUE, path=Path("/m")))


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(tmp_path):
    path = write(tmp_path, MINIMAL + "port = 80\n")
    config = load(Config, path, ["worker.port=81", "worker.port=82", 'worker.names=["a", "b"]', "limits.rows=3"])
    assert (config.worker.port, config.worker.names, config.limits) == (82, ("a", "b"), {"rows": 3})


def test_required_settings_may_come_from_overrides_alone():
    assert load(Config, None, ["worker.id=w"]).worker.id == "w"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("12", "12"),
        ("2026-01-01", "2026-01-01"),
        ("true", "true"),
        ('"quoted"', "quoted"),
        ("'12'", "12"),
        ("127.0.0.1:9500", "127.0.0.1:9500"),
        ("a=b", "a=b"),
        ('x"\nworker.port = 5', 'x"\nworker.port = 5'),
        ("1\nother = 2", "1\nother = 2"),
        ("a # b", "a # b"),
    ],
)
def test_strings_may_be_bare_and_stay_what_was_typed(text, expected):
    assert load(Config, None, [f"worker.id={text}"]).worker.id == expected


def test_optional_sections_and_paths_can_be_overridden():
    config = load(Config, None, ["worker.id=w", "optional.id=o", "optional.path=/x y", "worker.note=7"])
    assert config.optional == Section(id="o", path=Path("/x y"))
    assert config.worker.note == "7"


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (MINIMAL + "prot = 1\n", [], r"some\.toml: unknown key worker\.prot; did you mean worker\.port\?"),
        (MINIMAL + "[zzz]\n", [], r"some\.toml: unknown key zzz; known keys here: limits, optional, worker"),
        (MINIMAL + 'port = "80"\n', [], r"some\.toml: worker\.port: expected `int`, got `str`"),
        (MINIMAL + "port = 70000\n", [], r"some\.toml: worker\.port: expected `int` <= 65535"),
        (MINIMAL + "names = ['a', 1]\n", [], r"some\.toml: worker\.names\[1\]: expected `str`, got `int`"),
        (MINIMAL + "colour = 'green'\n", [], r"some\.toml: worker\.colour: invalid enum value 'green'"),
        (MINIMAL + "path = 3\n", [], r"some\.toml: worker\.path: expected `Path`, got `int`"),
        ("worker = 3\n", [], r"some\.toml: worker: expected a section, got `int`"),
        ("[worker]\n", [], r"some\.toml: worker\.id is required and not set; .*--set worker\.id="),
        ("", [], r"some\.toml: worker is required"),
        ("[worker\n", [], r"some\.toml is not valid TOML: .*line 1"),
        (MINIMAL, ["worker.port=many"], r"^--set worker\.port=many: worker\.port: expected `int`, got `str`"),
        (MINIMAL, ["worker.prot=1"], r"^--set worker\.prot=1: unknown key worker\.prot; did you mean worker\.port"),
        (MINIMAL, ["wroker.port=1"], r"unknown key wroker; did you mean worker"),
        (MINIMAL, ["worker.port"], r"--set 'worker\.port' is not of the form a\.b=c"),
        (MINIMAL, ["=1"], r"not of the form"),
        (MINIMAL, ["worker..port=1"], r"not of the form"),
        (MINIMAL, ["worker.port.x=1"], r"worker\.port"),
    ],
)
def test_each_mistake_is_one_plain_sentence(tmp_path, text, overrides, expected):
    with pytest.raises(ConfigError, match=expected) as caught:
        load(Config, write(tmp_path, text), overrides)
    assert "\n" not in caught.value.message


def test_unreadable_files_are_told_plainly(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.toml: no such file"):
        load(Config, tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="cannot read"):
        load(Config, tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(Config, tmp_path / "binary.toml")


def test_a_config_stays_frozen():
    with pytest.raises(AttributeError):
        load(Config, None, ["worker.id=w"]).worker.port = 3


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@settings(max_examples=60)
@given(
    st.builds(
        Config,
        worker=st.builds(
            Section,
            id=TEXT.filter(bool),
            port=st.integers(0, 65535),
            ratio=st.floats(allow_nan=False),
            enabled=st.booleans(),
            colour=st.sampled_from(Colour),
            names=st.lists(TEXT, max_size=3).map(tuple),
            path=TEXT.filter(lambda text: text.strip("./")).map(Path),
            note=st.none() | TEXT,
            secret_file=TEXT,
        ),
        limits=st.dictionaries(TEXT, st.integers(-(2**63), 2**63 - 1), max_size=3),
        optional=st.none() | st.builds(Section, id=st.just("o")),
    )
)
def test_a_dump_loads_back_equal(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "dumped.toml"
    path.write_bytes(dump(config).encode())
    assert load(Config, path) == config


def test_a_dump_masks_secrets_but_shows_where_they_lie():
    text = dump(Config(worker=Section(id="w", secret="hunter2", secret_file="/run/secret")))
    assert "hunter2" not in text
    assert 'secret_file = "/run/secret"' in text


def test_a_dump_of_something_else_is_our_bug():
    class Odd(msgspec.Struct):
        what: Any

    with pytest.raises(NotImplementedError):
        dump(Odd(what=object()))


def test_the_command_line_is_a_file_and_settings():
    found = parse_args(["--config", "a.toml", "--set", "a.b=1", "--set", "c=d e"])
    assert (found.config, found.overrides) == (Path("a.toml"), ("a.b=1", "c=d e"))
    assert parse_args([]).overrides == ()


@pytest.mark.parametrize("argv", [["--port", "3"], ["file.toml"], ["--set"], ["--conf", "a.toml"]])
def test_any_other_argument_is_a_config_error(argv):
    with pytest.raises(ConfigError, match="prefill: "):
        parse_args(argv, "prefill")


def test_a_secret_is_read_without_its_newline_and_never_short(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef\n")
    assert read_secret(path) == b"0123456789abcdef"
    path.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="5 bytes"):
        read_secret(path)
    with pytest.raises(ConfigError, match="no such file"):
        read_secret(tmp_path / "absent")


def test_the_native_environment_is_ours_plus_what_libraries_read():
    environment = native_environment(threads=3)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["PATH"] == os.environ["PATH"]
    assert native_environment().get("OMP_NUM_THREADS") == os.environ.get("OMP_NUM_THREADS")
