"""Pages go to a file and come back through NIXL's POSIX plugin: what a tier of files over NIXL would stand on."""

import os
import time

import numpy as np
import pytest

from kv_transfer.backends.nixl_library import Nixl
from tests.fakes.kv_pools import content

PAGE, PAGES = 16384, 32


@pytest.fixture(params=["use_aio", "use_posix_aio"])
def agent(request):
    library = Nixl()
    agent = library.agent(f"files-{request.param}-{os.getpid()}", serves=False)
    queues = dict.fromkeys(("use_aio", "use_uring", "use_posix_aio"), "false")
    agent.create_backend("POSIX", agent.get_plugin_params("POSIX") | queues | {request.param: "true"})
    return agent


def move(agent, way, memory, pages, file, slots) -> None:
    """Copy pages of `memory` to (or from) slots of a file."""
    near = np.array([(int(memory.ctypes.data) + page * PAGE, PAGE, 0) for page in pages], np.uint64)
    far = np.array([(slot * PAGE, PAGE, file) for slot in slots], np.uint64)
    handle = agent.initialize_xfer(
        way, agent.get_xfer_descs(near, "DRAM"), agent.get_xfer_descs(far, "FILE"), agent.name
    )
    state, end = agent.transfer(handle), time.monotonic() + 60
    while state == "PROC":
        assert time.monotonic() < end, "the file was not moved in time"
        time.sleep(0.001)
        state = agent.check_xfer_state(handle)
    handle.release()
    assert state == "DONE"


def test_a_set_of_pages_goes_to_a_file_and_comes_back_to_other_places(agent, tmp_path):
    pool, back = (np.zeros(PAGE * PAGES, np.uint8) for _ in range(2))
    for page in range(PAGES):
        pool[page * PAGE : (page + 1) * PAGE] = content(("page", page), PAGE)
    for memory in (pool, back):
        agent.register_memory([(int(memory.ctypes.data), memory.nbytes, 0, "")], "DRAM")
    order = np.random.default_rng(3).permutation(PAGES).tolist()
    kept, places = order[:20], order[-20:]
    with (tmp_path / "pages.bin").open("w+b") as file:
        agent.register_memory([(0, PAGE * PAGES, file.fileno(), "")], "FILE")
        move(agent, "WRITE", pool, kept, file.fileno(), range(20))
        assert (tmp_path / "pages.bin").read_bytes() == b"".join(content(("page", page), PAGE) for page in kept)
        move(agent, "READ", back, places, file.fileno(), range(20))
    for page, place in zip(kept, places, strict=True):
        assert np.array_equal(back[place * PAGE : (place + 1) * PAGE], content(("page", page), PAGE))
    untouched = sorted(set(range(PAGES)) - set(places))
    assert not any(back[page * PAGE : (page + 1) * PAGE].any() for page in untouched)
