"""A stream whose worker dies in its middle."""

from tests.fakes.audit import statistics
from tests.fakes.live_cluster import stream_text


def stream_past_a_kill(cluster, body, text, begun=5):
    """Kill the decode worker that owns a stream once so many characters came; the client must not notice.

    Returns the result of that stream. On a loaded machine one may end before its worker is found: then another is asked for.
    """
    killed = []

    def kill_owner(so_far):
        if len(so_far) < begun or killed:
            return
        found = statistics(cluster, audit=False).items()
        owners = [w for w, s in found if w.startswith("decode") and s.values["engine_rows_used"]]
        if owners:
            killed.append(owners[0])
            cluster.kill(owners[0])

    for _ in range(5):
        result = stream_text(cluster.base_url, body, kill_owner)
        assert (result["error"], result["done"]) == (None, True), result
        assert result["text"] == text, "after kill and resume"
        if killed:
            return result
    raise AssertionError("every stream ended before its worker could be killed")
