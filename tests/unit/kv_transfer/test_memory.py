"""Shared segments and anonymous memory: permissions, full file systems, stale segments."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from core.errors import ConfigError
from core.ids import fresh_incarnation
from kv_transfer.memory import SEGMENT_PREFIX, allocate, map_segment, region_view, sweep_stale_segments

ROOT = Path(__file__).resolve().parents[3]


def test_regions_are_page_aligned_zeroed_and_do_not_overlap():
    memory = allocate([10, 5000, 4096], incarnation=fresh_incarnation())
    assert [r.nbytes for r in memory.regions] == [10, 5000, 4096]
    assert all(r.address % os.sysconf("SC_PAGESIZE") == 0 for r in memory.regions)
    for i, region in enumerate(memory.regions):
        assert not region_view(region).any()
        region_view(region)[:] = i + 1
    assert [set(bytes(b)) for b in memory.buffers] == [{1}, {2}, {3}]
    memory.close()
    memory.close()


def test_a_segment_is_private_to_its_user_and_gone_after_close(tmp_path):
    memory = allocate([4096], incarnation=fresh_incarnation(), directory=str(tmp_path))
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert memory.regions[0].shared_name == path.name
    assert path.stat().st_blocks * 512 >= 4096, "allocated in full at once"
    memory.close()
    assert list(tmp_path.iterdir()) == []


def test_closing_while_somebody_still_uses_the_memory_removes_the_name(tmp_path):
    memory = allocate([4096], incarnation=fresh_incarnation(), directory=str(tmp_path))
    user = np.frombuffer(memory.buffers[0], np.uint8)
    memory.close()
    assert list(tmp_path.iterdir()) == []
    user[0] = 1


def test_a_peer_sees_the_bytes_and_cannot_write_them(tmp_path):
    memory = allocate([4096, 4096], incarnation=fresh_incarnation(), directory=str(tmp_path))
    region_view(memory.regions[1])[7] = 42
    mapped = map_segment(str(tmp_path), memory.regions[1].shared_name)
    assert mapped[memory.regions[1].shared_offset + 7] == 42
    with pytest.raises(TypeError):
        mapped[0] = 1
    mapped.close()
    memory.close()


@pytest.mark.parametrize("name", ["../etc/passwd", "passwd", f"{SEGMENT_PREFIX}/../x", ""])
def test_only_plain_segment_names_are_mapped(tmp_path, name):
    with pytest.raises(OSError, match="not the name"):
        map_segment(str(tmp_path), name)


def test_a_full_file_system_fails_at_once_with_the_sizes(tmp_path, monkeypatch):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"needs 8.0 MiB of shared memory, but .* MiB free"):
        allocate([8 << 20], incarnation=fresh_incarnation(), directory=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_more_than_the_file_system_has_is_refused_for_real(tmp_path):
    with pytest.raises(ConfigError, match="MiB"):
        allocate([1 << 50], incarnation=fresh_incarnation(), directory=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_anonymous_memory_that_the_host_does_not_give_is_told_with_its_size_and_the_setting():
    with pytest.raises(ConfigError, match=r"the KV pool needs 1073741824\.0 MiB of memory.*lower engine\.num_pages"):
        allocate([1 << 50], incarnation=fresh_incarnation())
    with pytest.raises(ConfigError, match=r"lower transfer\.staging_rows"):
        allocate([1 << 50], incarnation=fresh_incarnation(), setting="transfer.staging_rows")


def test_a_missing_directory_is_named():
    with pytest.raises(ConfigError, match="/nowhere/at/all"):
        allocate([4096], incarnation=fresh_incarnation(), directory="/nowhere/at/all")


def test_an_empty_region_is_refused():
    for sizes in ([], [0], [10, -1]):
        with pytest.raises(ConfigError):
            allocate(sizes, incarnation=fresh_incarnation())


def test_segments_of_the_dead_are_swept_and_those_of_the_living_are_not(tmp_path):
    script = (
        "import os, signal, sys\n"
        "from core.ids import fresh_incarnation\n"
        "from kv_transfer.memory import allocate\n"
        "memory = allocate([4096], incarnation=fresh_incarnation(), directory=sys.argv[1])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, check=False, timeout=30)
    (stale,) = (p.name for p in tmp_path.iterdir())
    memory = allocate([4096], incarnation=fresh_incarnation(), directory=str(tmp_path))
    assert sweep_stale_segments(str(tmp_path)) == [stale]
    assert [p.name for p in tmp_path.iterdir()] == [memory.regions[0].shared_name]
    memory.close()


def test_a_locked_segment_of_another_pid_namespace_is_left_alone(tmp_path):
    """Its pid means nothing here; the lock still says that the owner lives."""
    memory = allocate([4096], incarnation=fresh_incarnation(), directory=str(tmp_path))
    (path,) = tmp_path.iterdir()
    foreign = path.with_name(f"{SEGMENT_PREFIX}{fresh_incarnation()}-999999999-1")
    path.rename(foreign)
    assert sweep_stale_segments(str(tmp_path)) == []
    memory.close()
    assert foreign.exists()
    assert sweep_stale_segments(str(tmp_path)) == [foreign.name]


def test_files_of_others_are_never_swept(tmp_path):
    (tmp_path / "something-else").write_text("")
    assert sweep_stale_segments(str(tmp_path)) == []
