"""How a process starts, leaves and says why."""

import asyncio
import json
import os
import signal

import msgspec
import pytest

from core.clock import SystemClock
from core.errors import ConfigError, InvariantError
from core.process import Departure, ReadyFile, run_process


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = "x"
    budget_s: float = 5.0


def run(serve, *argv):
    return run_process(
        Settings,
        argv,
        prog="test",
        configure=lambda config: None,
        budget_s=lambda config: config.budget_s,
        serve=serve,
    )


async def leave_at_once(config, departure):
    departure.begin()
    await departure.wait()


def test_an_orderly_end_exits_with_0():
    assert run(leave_at_once) == 0


@pytest.mark.parametrize(
    "argv", [("--set", "nme=y"), ("--set", "budget_s=soon"), ("--config", "/nowhere.toml"), ("x",)]
)
def test_a_bad_configuration_exits_with_3_and_one_plain_sentence(argv, capsys):
    assert run(leave_at_once, *argv) == 3
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "Traceback" not in said


def test_a_fault_found_while_starting_exits_with_3(capsys):
    async def serve(config, departure):
        raise ConfigError("port 1 is in use; choose another")

    assert run(serve) == 3
    assert capsys.readouterr().err == "port 1 is in use; choose another\n"


def test_a_crash_exits_with_1(caplog):
    async def serve(config, departure):
        raise RuntimeError("broken")

    async def engine_dies(config, departure):
        departure.crash_from_thread(RuntimeError("broken"))
        await departure.wait()

    assert run(serve) == 1
    assert run(engine_dies) == 1
    assert "broken" in caplog.text


@pytest.mark.parametrize(("error", "code"), [(InvariantError("impossible"), 1), (OSError("a library's"), 0)])
def test_a_broken_invariant_in_a_callback_ends_the_process_and_nothing_else_does(caplog, error, code):
    def broken():
        raise error

    async def serve(config, departure):
        loop = asyncio.get_running_loop()
        loop.call_soon(broken)
        loop.call_later(0.05, departure.begin)
        await departure.wait()

    assert run(serve) == code
    assert str(error) in caplog.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_begins_the_departure_and_a_second_one_shortens_it(number):
    budgets = []

    async def serve(config, departure):
        for _ in range(2):
            os.kill(os.getpid(), number)
            while True:
                await asyncio.sleep(0)
                if departure.has_begun and (not budgets or departure.left_s < budgets[-1] - 1):
                    break
            budgets.append(departure.left_s)

    assert run(serve) == 0
    assert budgets[0] == pytest.approx(5.0, abs=0.5)
    assert budgets[1] == pytest.approx(0.5, abs=0.4)


async def test_work_within_the_budget_finishes():
    departure = Departure(SystemClock(), 10.0)
    departure.begin()
    assert await departure.bound(asyncio.sleep(0))


async def test_work_is_cancelled_at_the_end_of_the_budget():
    departure = Departure(SystemClock(), 0.01)
    departure.begin()
    assert not await departure.bound(asyncio.Event().wait())


async def test_a_shortened_budget_ends_work_that_already_runs():
    departure = Departure(SystemClock(), 1000.0)
    departure.begin()
    loop = asyncio.get_running_loop()
    loop.call_soon(departure.begin, 0.01)
    loop.call_soon(departure.begin, 5000.0)
    assert not await departure.bound(asyncio.Event().wait())


async def test_a_timeout_of_the_work_itself_is_not_the_end_of_the_budget():
    departure = Departure(SystemClock(), 1000.0)
    departure.begin()

    async def work():
        raise TimeoutError

    with pytest.raises(TimeoutError):
        await departure.bound(work())


def test_the_ready_file_appears_whole_and_names_this_process(tmp_path):
    file = ReadyFile(str(tmp_path), "decode-1")
    file.write({"address": "127.0.0.1:1"})
    assert json.loads((tmp_path / "decode-1.json").read_text()) == {"address": "127.0.0.1:1", "pid": os.getpid()}
    assert len(list(tmp_path.iterdir())) == 1
    file.remove()
    file.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_ready_file_of_a_successor_stays(tmp_path):
    file = ReadyFile(str(tmp_path), "decode-1")
    file.write({})
    (tmp_path / "decode-1.json").write_text(json.dumps({"pid": os.getpid() + 1}))
    file.remove()
    assert (tmp_path / "decode-1.json").exists()


def test_a_run_directory_that_cannot_be_written_is_a_plain_sentence(tmp_path):
    with pytest.raises(ConfigError, match="run_dir"):
        ReadyFile(str(tmp_path / "absent"), "decode-1").write({})
