"""The status page in a real browser: what an operator sees after its script has run."""

import asyncio
import re
import shutil

import httpx
import pytest

from gateway.tenants import hash_key
from tests.fakes.sim_cluster import body, complete, sim_cluster

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium-headless-shell)"),
]


async def seen(url, profile):
    """Return the page's document once its script had five seconds of its own time."""
    browser = await asyncio.create_subprocess_exec(
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        "--no-proxy-server",
        "--virtual-time-budget=5000",
        "--dump-dom",
        url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    async with asyncio.timeout(90):
        out, _ = await browser.communicate()
    return out.decode()


def cells(html, table):
    """Return the rows of a table as texts."""
    found = re.search(rf'<table id="{table}">(.*?)</table>', html, re.DOTALL)
    rows = re.findall(r"<tr>(.*?)</tr>", found[1], re.DOTALL)
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in rows]


async def test_an_operator_sees_workers_caches_and_where_time_went(tmp_path):
    async with sim_cluster(tmp_path, "p1", "d1") as cluster:
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            for _ in range(3):
                await complete(client, cluster.url, body(max_tokens=10))
        await cluster.settled("gateway-1", "scale/output_tokens_total", 30)
        html = await seen(f"{cluster.url}/status", tmp_path / "profile")
        assert 'data-state="shown"' in html, html[-2000:]
        assert "Tandem: gateway-1, ready" in html
        workers = {row[0]: row for row in cells(html, "workers")[1:]}
        assert workers["p1"][1:4] == ["prefill", "ready", "yes"]
        assert workers["d1"][1:4] == ["decode", "ready", "yes"]
        assert cells(html, "cache")[1][:4] == ["9", "15", "166.7 %", "30"]
        times = {row[0]: row for row in cells(html, "time")[1:]}
        assert float(times["first token to end"][1]) > 0
        assert [row[0] for row in cells(html, "leases")[1:]] == ["request", "queued", "permit", "attempt"]


async def test_without_a_key_the_page_says_what_is_missing(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(f'admin = ["{hash_key("k-admin")}"]\n')
    async with sim_cluster(tmp_path, gateway={"access.keys_file": keys}) as cluster:
        html = await seen(f"{cluster.url}/status", tmp_path / "profile")
        assert "this is for operators: send an admin key" in html
        assert 'data-state="shown"' not in html
