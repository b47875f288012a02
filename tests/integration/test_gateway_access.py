"""Keys, limits, the access log and operators' pages of a gateway process, and TLS between all processes of a cluster."""

import asyncio
import json
import ssl

import httpx
import pytest

from core.errors import BadRequest
from core.ids import fresh_incarnation
from core.rpc.admin import AdminClient
from core.rpc.proof import Proof
from core.tls import TlsSection
from gateway.http.metrics import CHAT, COMPLETIONS
from gateway.http.schema import ChatBody, CompletionBody, decode_body
from gateway.tenants import hash_key
from tests.fakes.certificates import Authority
from tests.fakes.sim_cluster import body, complete, sim_cluster

pytestmark = [pytest.mark.cluster]


def write_keys(path, **tenants):
    lines = [f'admin = ["{hash_key("k-admin")}"]']
    for name, more in tenants.items():
        lines += ["[[tenants]]", f'name = "{name}"', f'keys = ["{hash_key(f"k-{name}")}"]', more]
    fresh = path.with_suffix(".fresh")
    fresh.write_text("\n".join(lines))
    fresh.replace(path)
    return path


def bearer(key):
    return {"authorization": f"Bearer {key}"}


async def test_keys_rates_pages_and_the_access_log(tmp_path):
    keys = write_keys(tmp_path / "keys.toml", acme="", small="requests_per_minute = 2\ntokens_per_minute = 1000")
    async with sim_cluster(tmp_path, "p1", "d1", gateway={"access.keys_file": keys}) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=30, trust_env=False) as client:

            async def ask(headers, path="/v1/completions", **changes):
                return await client.post(path, json=body(stream=False, stream_options=None) | changes, headers=headers)

            # Who asks.
            refused = await ask({})
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
            assert (await ask(bearer("k-wrong"))).status_code == 401
            assert (await ask(bearer("k-admin"))).status_code == 401
            assert (await ask(bearer("k-acme"))).status_code == 200
            assert (await ask({"x-api-key": "k-acme"})).status_code == 200
            assert (await client.post("/v1/messages", json={})).json()["type"] == "error"
            for path in ("/health", "/readyz", "/livez", "/status"):
                assert (await client.get(path)).status_code == 200

            # How often.
            first = await ask(bearer("k-small"))
            assert first.headers["x-ratelimit-limit-requests"] == "2"
            assert first.headers["x-ratelimit-remaining-requests"] == "1"
            assert int(first.headers["x-ratelimit-remaining-tokens"]) <= 1000 - 3
            assert (await ask(bearer("k-small"))).status_code == 200
            late = await ask(bearer("k-small"))
            assert (late.status_code, late.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert 1 <= int(late.headers["retry-after"]) <= 30
            assert (await ask(bearer("k-acme"))).status_code == 200

            # Operators.
            for path in ("/statusz", "/debug/leases", "/metrics"):
                assert (await client.get(path)).status_code == 403
                assert (await client.get(path, headers=bearer("k-acme"))).status_code == 403
            leases = (await client.get("/debug/leases", headers=bearer("k-admin"))).json()
            assert leases["counts"] == {"request": 1, "queued": 0, "permit": 0, "attempt": 0}
            async with asyncio.timeout(30):
                # A picture is taken twice a second.
                while True:
                    status = (await client.get("/statusz", headers=bearer("k-admin"))).json()
                    if status["tokens"]["output"] == 5 * 8:
                        break
                    await asyncio.sleep(0.05)
            assert {worker["id"] for worker in status["workers"]} == {"p1", "d1"}
            metrics = (await client.get("/metrics", headers=bearer("k-admin"))).text
            assert 'tandem_http_tenant_tokens_total{kind="output",tenant="small"} 16.0' in metrics
            assert status["time_s"]["decode"] > 0
            assert 'tandem_gateway_worker_up{role="decode",worker="d1"} 1.0' in metrics

            # A key file that changes.
            write_keys(keys, acme="", fresh="")
            await cluster.logged("gateway-1", "tenant small removed")
            assert (await ask(bearer("k-small"))).status_code == 401
            assert (await ask(bearer("k-fresh"))).status_code == 200

        # What is written down.
        lines = [json.loads(line) for line in cluster.gateway.log_path.read_text().splitlines() if line[:1] == "{"]
        access = [line for line in lines if line["logger"] == "tandem.access"]
        served = next(line for line in access if line.get("tenant") == "acme" and line["status"] == 200)
        assert (served["prompt_tokens"], served["completion_tokens"], served["path"]) == (3, 8, "/v1/completions")
        assert served["duration_ms"] >= served["ttft_ms"] > 0
        assert {line["status"] for line in access} >= {200, 401, 403, 429}
        text = cluster.gateway.log_path.read_text()
        for secret in ("k-acme", "k-small", "k-admin", "k-wrong", "s" * 32):
            assert secret not in text


async def test_all_processes_of_a_cluster_talk_by_certificates_only(tmp_path):
    authority = Authority(tmp_path)
    certificate, key = authority.issue("cluster", "tandem", "localhost")
    files = {"certificate": certificate, "key": key, "authority": authority.path}
    gateway = {f"tls.{name}": path for name, path in files.items()}
    gateway |= {"http.tls.certificate": certificate, "http.tls.key": key}
    worker = {f"worker.tls.{name}": path for name, path in files.items()}
    async with sim_cluster(tmp_path, "p1", "d1", gateway=gateway, **worker) as cluster:
        trust = ssl.create_default_context(cafile=authority.path)
        async with httpx.AsyncClient(timeout=30, trust_env=False, verify=trust) as client:
            url = cluster.url.replace("http://", "https://")
            assert (await complete(client, url, body()))[0] == cluster.text_of((11, 12, 13), 8)
        # A worker without a certificate does not get in, though it knows the secret.
        await cluster.start_worker("d2")
        await cluster.logged("d2", "not registered at gateway")
        assert {each["id"] for each in (await cluster.status())["workers"]} == {"p1", "d1"}
        proof = Proof(b"s" * 32, fresh_incarnation(), TlsSection(**files))
        values = (await AdminClient(proof).statistics(cluster.gateway.facts["membership_address"])).values
        assert values["workers"] == 2


async def test_the_status_page_holds_no_data_and_asks_for_nothing_foreign(tmp_path):
    async with sim_cluster(tmp_path) as cluster, httpx.AsyncClient(timeout=30, trust_env=False) as client:
        page = await client.get(f"{cluster.url}/status")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "innerHTML" not in page.text
        assert "http" not in page.text.replace("http-equiv", "")
        assert (await client.post(f"{cluster.url}/status")).status_code == 405


@pytest.mark.parametrize("field", ["kv_transfer_params", "bootstrap_host", "bootstrap_room"])
def test_clients_have_no_say_in_transfers_between_workers(field):
    for route, kind in ((CHAT, ChatBody), (COMPLETIONS, CompletionBody)):
        rest = {"messages": [{"role": "user", "content": "x"}]} if route == CHAT else {"prompt": "x"}
        with pytest.raises(BadRequest, match="not by clients") as caught:
            decode_body(json.dumps({"model": "m", field: {"remote_host": "10.0.0.1"}, **rest}).encode(), kind)
        assert caught.value.param == field
        assert decode_body(json.dumps({"model": "m", field: None, **rest}).encode(), kind).ignored == ()
