"""Which NIXL wheels are accepted, and that the real one throws and returns what the adapter expects."""

from types import SimpleNamespace

import msgspec
import pytest

from core.errors import ConfigError, TransferFailed
from kv_transfer.api import MemoryRegion
from kv_transfer.backends import nixl_library
from kv_transfer.backends.native_peer import NativeExport
from kv_transfer.backends.nixl import NixlPlan
from kv_transfer.backends.nixl_engine import NixlExport
from kv_transfer.backends.nixl_library import Nixl, find_version
from kv_transfer.config import TransferConfig


def installed(monkeypatch, **wheels):
    def version(name):
        if name not in wheels:
            raise nixl_library.PackageNotFoundError(name)
        return wheels[name]

    monkeypatch.setattr(nixl_library, "version", lambda name: version(name.replace("-", "_")))


@pytest.mark.parametrize(
    ("wheels", "found"),
    [
        ({"nixl_cu12": "1.5.1"}, ("nixl-cu12", "1.5.1")),
        ({"nixl_cu13": "1.6.0rc1"}, ("nixl-cu13", "1.6.0rc1")),
        ({"nixl_rocm": "1.11"}, ("nixl-rocm", "1.11")),
    ],
)
def test_a_known_wheel_is_found(monkeypatch, wheels, found):
    installed(monkeypatch, **wheels)
    assert find_version() == found


@pytest.mark.parametrize("version", ["1.4.9", "0.9", "2.0.0", "nightly"])
def test_an_unknown_version_is_refused_by_name(monkeypatch, version):
    installed(monkeypatch, nixl_cu12=version)
    with pytest.raises(ConfigError, match=rf"nixl-cu12 {version}.*tandem-serving\[nixl\]"):
        find_version()


def test_without_a_wheel_the_error_names_the_extra(monkeypatch):
    installed(monkeypatch)
    with pytest.raises(ConfigError, match=r"pip install 'tandem-serving\[nixl\]'"):
        find_version()


def test_a_wheel_that_lacks_a_call_of_ours_is_refused(monkeypatch):
    monkeypatch.setattr(nixl_library, "_METHODS", ("transfer", "teleport"))
    with pytest.raises(ConfigError, match="teleport"):
        Nixl()


def test_agents_are_made_thread_safe_and_without_a_listener(monkeypatch):
    """Reports 11 and 25: the library's default is no locking, and its listener binds every interface."""
    library = Nixl()
    made = {}
    api = SimpleNamespace(
        nixl_agent_config=lambda **config: made.update(config),
        nixl_agent=lambda name, config: name,
        nixl_thread_sync_t=library.api.nixl_thread_sync_t,
    )
    monkeypatch.setattr(library, "api", api)
    assert library.agent("one", serves=True) == "one"
    assert made["sync_mode"] is api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    assert made["enable_listen_thread"] is False
    assert made["enable_prog_thread"] is True
    library.agent("two", serves=False)
    assert made["enable_prog_thread"] is False


def description(host="here", lane="tcp"):
    engine = NixlExport("agent", 123, b"", ((0, 4096, 64, -1),))
    return NativeExport(host=host, lane=lane, engine=msgspec.msgpack.encode(engine), regions=((0, 64),))


def plan(*, rdma=False, denied=""):
    return NixlPlan(
        "1.5.1", "auto", lambda: rdma, lambda pid, address: denied if (pid, address) == (123, 4096) else "?"
    )


def test_on_one_host_memory_is_read_directly():
    way = plan().reach(description(), "here", TransferConfig())
    assert (way.lane, way.sidecar, way.worse) == ("cma", False, "")


def test_where_that_is_denied_sockets_carry_it_and_the_reason_is_said():
    """Report 42: UCX drops to TCP in silence."""
    way = plan(denied="Operation not permitted").reach(description(), "here", TransferConfig())
    assert (way.lane, way.sidecar) == ("tcp", True)
    assert "Operation not permitted" in way.worse
    assert "ptrace_scope" in way.worse


def test_between_hosts_sockets_are_no_surprise():
    way = plan(denied="never asked").reach(description(host="there"), "here", TransferConfig())
    assert (way.lane, way.sidecar, way.worse) == ("tcp", True, "")


def test_a_lane_that_is_asked_for_and_does_not_work_is_an_error():
    with pytest.raises(TransferFailed, match="native_lane"):
        plan(denied="no").reach(description(), "here", TransferConfig(native_lane="cma"))
    with pytest.raises(TransferFailed, match="RDMA"):
        plan().reach(description(), "here", TransferConfig(native_lane="rdma"))


def test_a_process_that_serves_over_rdma_is_never_read_over_sockets():
    """Over TCP the reader's death would take that process down (section 2.5)."""
    with pytest.raises(TransferFailed):
        plan().reach(description(host="there", lane="rdma"), "here", TransferConfig())
    way = plan(rdma=True).reach(description(host="there", lane="rdma"), "here", TransferConfig())
    assert (way.lane, way.sidecar) == ("rdma", False)


def test_without_rdma_the_pool_is_served_by_a_sidecar_so_it_must_be_shared():
    private = MemoryRegion(id=0, address=4096, nbytes=64, writable=True)
    with pytest.raises(ConfigError, match="shared memory"):
        plan().serve((private,), TransferConfig())
    assert not plan(rdma=True).serve((private,), TransferConfig()).sidecar
