"""The status table."""

from deploy.status import render_status


def test_the_table_shows_each_process_and_the_reason_of_a_held_one():
    text = render_status(
        {
            "name": "default",
            "model": "m",
            "http_address": "127.0.0.1:8000",
            "processes": [
                {
                    "id": "gateway-1",
                    "state": "ready",
                    "revision": 2,
                    "pid": 7,
                    "restarts": 0,
                    "http_address": "127.0.0.1:8000",
                },
                {"id": "decode-1", "state": "held", "pid": None, "restarts": 6, "reason": "6 restarts", "log": "/l"},
            ],
        }
    )
    lines = text.splitlines()
    assert lines[0] == "cluster default: m at http://127.0.0.1:8000"
    assert lines[2].split() == ["gateway-1", "ready", "2", "7", "0", "-", "127.0.0.1:8000"]
    assert lines[3].split()[:3] == ["decode-1", "held", "-"]
    assert "6 restarts (log: /l)" in lines[4]
