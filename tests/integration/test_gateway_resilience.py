"""The gateway process over simulated worker processes: kills, restarts, drains, refusals, with real signals."""

import asyncio
import signal

import httpx
import pytest

from tests.fakes.sim_cluster import body, complete, sim_cluster, stream

pytestmark = [pytest.mark.cluster]


@pytest.fixture
async def client():
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        yield client


async def left(client, cluster):
    """Wait until the gateway says that it leaves."""
    async with asyncio.timeout(30):
        while (await client.get(f"{cluster.url}/readyz")).status_code != 503:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_killed_decode_worker_is_resumed_and_the_text_is_identical(tmp_path, client):
    async with sim_cluster(tmp_path, "p1", "d1", "d2", step_s=0.02) as cluster:
        prompts = [(number, 50, 60) for number in range(1, 17)]
        answers = [
            asyncio.create_task(complete(client, cluster.url, body(prompt, max_tokens=60))) for prompt in prompts
        ]
        await cluster.reached("d1", "tokens", 20)
        await cluster.children["d1"].kill(signal.SIGKILL)
        for prompt, answer in zip(prompts, await asyncio.gather(*answers), strict=True):
            text, finish, usage, last = answer
            assert (text, finish, last) == (cluster.text_of(prompt, 60), "length", "[DONE]")
            assert usage["completion_tokens"] == 60
            assert usage["prompt_tokens_details"]["cached_tokens"] == 5
        survivor = await cluster.statistics("d2")
        assert survivor["resumes"] >= 1
        assert survivor["local"] == 0
        values = await cluster.statistics("gateway-1")
        assert (values["in_flight"], values["open_handles"], values["own_requests"]) == (0, 0, 0)


async def test_the_kill_is_felt_where_resuming_is_forbidden(tmp_path, client):
    """Negative control of the test above: the same kill without resumes reaches the clients, as an honest error."""
    async with sim_cluster(tmp_path, "p1", "d1", step_s=0.02, gateway={"retries.max_crashes": 1}) as cluster:
        text = ""
        async for event in stream(client, cluster.url, body((1, 50, 60), max_tokens=60)):
            if "error" in event:
                break
            text += event["choices"][0]["text"]
            await cluster.children["d1"].kill(signal.SIGKILL)
        assert event["error"]["code"] == "worker_lost"
        assert 0 < len(text) < len(cluster.text_of((1, 50, 60), 60))


async def test_with_all_workers_dead_the_answer_is_503_with_retry_after(tmp_path, client):
    async with sim_cluster(tmp_path, "p1", "d1") as cluster:
        await cluster.children["d1"].kill()
        await cluster.children["p1"].kill()
        [event] = [event async for event in stream(client, cluster.url, body())]
        assert event["status"] == 503
        assert int(event["headers"]["retry-after"]) >= 1
        assert event["error"]["code"] == "no_worker"


async def test_a_stopped_worker_is_noticed_within_its_ttl_and_its_requests_move(tmp_path, client):
    async with sim_cluster(tmp_path, "p1", "d1", "d2", step_s=0.02) as cluster:
        answers = [
            asyncio.create_task(complete(client, cluster.url, body((number, 1), max_tokens=40)))
            for number in range(1, 9)
        ]
        await cluster.reached("d1", "tokens", 20)
        cluster.children["d1"].process.send_signal(signal.SIGSTOP)
        results = await asyncio.gather(*answers)
        for number, answer in zip(range(1, 9), results, strict=True):
            assert answer[0] == cluster.text_of((number, 1), 40)
        assert (await cluster.statistics("d2"))["resumes"] >= 1


async def test_a_client_that_leaves_is_aborted_within_a_step(tmp_path, client):
    async with sim_cluster(tmp_path, "p1", "d1", step_s=0.5) as cluster:
        async for event in stream(client, cluster.url, body(max_tokens=2000)):
            if event["choices"]:
                break
        before = await cluster.statistics("d1")
        assert before["submits"] == 1
        await cluster.settled("d1", "running", 0)
        after = await cluster.statistics("d1")
        assert after["aborts"] == 1
        assert after["steps"] - before["steps"] <= 2
        assert after["tokens"] < 20
        await cluster.settled("gateway-1", "in_flight", 0)


async def test_rolling_replacement_under_load_fails_no_request(tmp_path, client):
    async with sim_cluster(tmp_path, "p1", "p2", "d1", "d2", step_s=0.01) as cluster:
        stop = asyncio.Event()
        ended = []

        async def load(number):
            prompt = (number, 70)
            while not stop.is_set():
                ended.append((await complete(client, cluster.url, body(prompt, max_tokens=30)))[0::3])
                assert ended[-1] == (cluster.text_of(prompt, 30), "[DONE]")

        clients = [asyncio.create_task(load(number)) for number in range(1, 9)]
        for name in ("d1", "p1", "d2"):
            await asyncio.sleep(0.3)
            assert await cluster.children[name].kill(signal.SIGTERM) == 0
            await cluster.start_workers(name, step_s=0.01)
        stop.set()
        await asyncio.gather(*clients)
        assert len(ended) > 20


async def test_a_draining_gateway_finishes_its_streams_and_refuses_new_ones(tmp_path, client):
    async with sim_cluster(tmp_path, "p1", "d1", step_s=0.02) as cluster:
        running = asyncio.create_task(complete(client, cluster.url, body(max_tokens=150)))
        await cluster.reached("d1", "tokens", 1)
        cluster.gateway.process.send_signal(signal.SIGTERM)
        await left(client, cluster)
        [event] = [event async for event in stream(client, cluster.url, body())]
        assert (event["status"], event["error"]["code"]) == (503, "draining")
        text, finish, _, last = await running
        assert (text, finish, last) == (cluster.text_of((11, 12, 13), 150), "length", "[DONE]")
        assert await cluster.gateway.process.wait() == 0


async def test_a_leaving_gateway_says_so_at_once_and_takes_requests_until_load_balancers_have_noticed(tmp_path, client):
    async with sim_cluster(tmp_path, "p1", "d1", gateway={"drain.accept_s": 30.0}) as cluster:
        cluster.gateway.process.send_signal(signal.SIGTERM)
        await left(client, cluster)
        assert (await complete(client, cluster.url, body()))[0] == cluster.text_of((11, 12, 13), 8)


async def test_workers_come_back_to_a_restarted_gateway(tmp_path, client):
    async with sim_cluster(tmp_path, "p1", "d1") as cluster:
        port = cluster.gateway.facts["membership_address"].rsplit(":", 1)[1]
        await cluster.gateway.kill()
        await cluster.start_gateway(membership__port=port)
        await cluster.routable("p1", "d1")
        assert (await complete(client, cluster.url, body()))[0] == cluster.text_of((11, 12, 13), 8)


async def test_workers_find_every_process_of_a_gateway(tmp_path, client):
    async with sim_cluster(tmp_path) as cluster:
        first = cluster.gateway.facts["membership_address"]
        second = await cluster.start_gateway("gateway-2", membership__siblings=f'["{first}"]')
        address = second.facts["membership_address"]
        await cluster.start_workers("p1", "d1", worker__gateways=f'["{address}"]')
        await cluster.routable("p1", "d1", gateway="gateway-2")
        for gateway in (cluster.gateway, second):
            url = f"http://{gateway.facts['http_address']}"
            assert (await complete(client, url, body()))[0] == cluster.text_of((11, 12, 13), 8)


async def test_repeated_prompts_go_to_the_worker_that_holds_them(tmp_path, client):
    async with sim_cluster(tmp_path, "p1", "d1", "d2", "d3", prefill_mode="auto") as cluster:
        prompt = tuple(range(3, 203))
        await complete(client, cluster.url, body(prompt, max_tokens=2))
        await cluster.settled("gateway-1", "index_pages", 200 // 16)
        for _ in range(6):
            await complete(client, cluster.url, body(prompt, max_tokens=2))
        submits = [(await cluster.statistics(name))["submits"] for name in ("d1", "d2", "d3")]
        assert sorted(submits) == [0, 0, 7]


async def test_a_worker_of_another_model_secret_or_fingerprint_is_refused_in_words(tmp_path):
    other = tmp_path / "other-secret"
    other.write_text("o" * 32)
    async with sim_cluster(tmp_path, "d1", gateway={"model.name": "sim"}) as cluster:
        await cluster.start_worker("d2", model="else")
        await cluster.start_worker("d3", revision="r2")
        await cluster.start_worker("d4", worker__secret_file=other)
        for sentence in (
            "this gateway serves 'sim', worker 'd2' serves 'else'",
            "worker 'd3' has fingerprint",
            "does not know the cluster secret",
        ):
            await cluster.logged("gateway-1", sentence)
        assert [worker["id"] for worker in (await cluster.status())["workers"]] == ["d1"]
