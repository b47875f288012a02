"""One JSON object per line, with ids of the context, extras and tracebacks."""

import asyncio
import io
import json
import logging

import pytest

from core.errors import ConfigError
from core.log import configure, log_context


@pytest.fixture
def lines():
    root = logging.getLogger()
    level = root.level
    stream = io.StringIO()
    handler = configure("decode-0", "INFO", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.removeHandler(handler)
    root.setLevel(level)


LOGGER = logging.getLogger("tests.log")


def test_a_record_is_one_json_object_on_one_line(lines):
    LOGGER.warning("pulled %d bytes\nfrom %s", 12, "ü")
    (line,) = lines()
    assert line["message"] == "pulled 12 bytes\nfrom ü"
    assert (line["level"], line["process"], line["logger"]) == ("WARNING", "decode-0", "tests.log")
    assert line["time"].endswith("+00:00")
    assert "request_id" not in line


def test_the_context_names_request_and_worker_and_ends(lines):
    with log_context(request_id="req-1", worker_id="w"):
        LOGGER.info("inside")
        with log_context(request_id="req-2"):
            LOGGER.info("deeper")
        LOGGER.info("inside again")
    LOGGER.info("outside")
    found = [(line.get("request_id"), line.get("worker_id")) for line in lines()]
    assert found == [("req-1", "w"), ("req-2", "w"), ("req-1", "w"), (None, None)]


async def test_tasks_keep_their_own_context(lines):
    async def work(name):
        with log_context(request_id=name):
            await asyncio.sleep(0)
            LOGGER.info("working")

    await asyncio.gather(work("one"), work("two"))
    assert {line["request_id"] for line in lines()} == {"one", "two"}


def test_extras_and_tracebacks_are_fields(lines):
    try:
        int("planted")
    except ValueError:
        LOGGER.exception("failed", extra={"pages": 3, "odd": object})
    (line,) = lines()
    assert line["pages"] == 3
    assert "ValueError: invalid literal" in line["traceback"]
    assert "taskName" not in line


def test_levels_below_are_dropped_and_unknown_levels_refused(lines):
    LOGGER.debug("too fine")
    assert lines() == []
    with pytest.raises(ConfigError, match="LOUD"):
        configure("x", "loud".upper())


def test_configuring_again_replaces_the_handler(lines):
    other = io.StringIO()
    handler = configure("decode-1", "info", other)
    LOGGER.info("once")
    logging.getLogger().removeHandler(handler)
    assert lines() == []
    assert json.loads(other.getvalue())["process"] == "decode-1"
