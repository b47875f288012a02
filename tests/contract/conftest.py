"""Which parts of the transport suites CI leaves to `make long`: ways of a transport that start processes for each
test, and those whose pools are on a device."""

import pytest

SLOW = {"loopback-device", "nixl-direct", "nixl-tcp", "shm-device", "tcp-device"}
ALWAYS = {
    "test_a_cancelled_read_that_waits_ends_at_once_and_writes_nothing",
    "test_a_source_that_closed_cannot_be_connected",
    "test_destroying_the_reader_quiesces_everything",
    "test_many_operations_to_two_sources_all_arrive",
    "test_records_of_every_size_and_number_arrive_at_unaligned_places",
    "test_the_peer_is_usable_after_a_cancel",
}
"""Of the contract; the fence tests always run."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        values = getattr(item, "callspec", None) and set(map(str, item.callspec.params.values()))
        if values and values & SLOW and item.path.name == "test_transport.py" and item.originalname not in ALWAYS:
            item.add_marker(pytest.mark.long)
