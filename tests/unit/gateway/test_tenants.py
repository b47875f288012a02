import logging

import pytest

from core.clock import ManualClock
from core.errors import ConfigError, NoCapacity
from gateway.new_key import main
from gateway.rate_limit import RateLimits
from gateway.tenants import ANYONE, Tenant, Tenants, hash_key, read_keys


def write(path, text):
    """Write so that the file's stamp differs even within one tick of the clock."""
    fresh = path.with_suffix(".fresh")
    fresh.write_text(text)
    fresh.replace(path)


def key_file(path, *, admin=(), **tenants):
    lines = [f"admin = {[hash_key(key) for key in admin]}"]
    for name, (keys, more) in tenants.items():
        lines += ["[[tenants]]", f'name = "{name}"', f"keys = {[hash_key(key) for key in keys]}", more]
    write(path, "\n".join(lines).replace("'", '"'))
    return path


def test_a_key_names_its_tenant_and_a_strange_one_nobody(tmp_path):
    tenants = Tenants(
        str(key_file(tmp_path / "keys.toml", acme=(["k-acme", "k-old"], "weight = 2.0"), else_=(["k-else"], "")))
    )
    assert tenants.of_key("k-acme").name == tenants.of_key("k-old").name == "acme"
    assert tenants.of_key("k-acme").weight == 2.0
    assert tenants.of_key("k-else").name == "else_"
    assert tenants.of_key("k-acm") is tenants.of_key("") is None
    assert tenants.of_key(hash_key("k-acme")) is None, "the hash in the file is no key"


def test_without_a_file_everybody_may_ask():
    tenants = Tenants("")
    assert tenants.are_open
    assert tenants.of_key("anything") is ANYONE
    assert tenants.is_admin("")


def test_operators_have_keys_of_their_own(tmp_path):
    tenants = Tenants(str(key_file(tmp_path / "keys.toml", admin=["k-admin"], acme=(["k-acme"], ""))))
    assert tenants.is_admin("k-admin")
    assert not tenants.is_admin("k-acme")
    assert tenants.of_key("k-admin") is None


def test_a_changed_file_is_taken_over_and_the_log_shows_what_changed_but_no_key(tmp_path, caplog):
    path = key_file(tmp_path / "keys.toml", acme=(["k-acme"], ""), gone=(["k-gone"], ""))
    heard = []
    tenants = Tenants(str(path), heard.append)
    tenants.reload_if_changed()
    assert heard == []
    caplog.set_level(logging.INFO)
    key_file(path, acme=(["k-fresh"], "weight = 4.0"), new=(["k-new"], ""))
    tenants.reload_if_changed()
    assert tenants.of_key("k-acme") is tenants.of_key("k-gone") is None
    assert tenants.of_key("k-fresh").weight == 4.0
    assert tenants.named("gone") is ANYONE
    assert heard == [True]
    for line in ("tenant gone removed", "tenant new added", "tenant acme: keys, weight 1.0 -> 4.0"):
        assert line in caplog.text
    assert "sha256" not in caplog.text


@pytest.mark.parametrize(
    "text", ["x = [", "[[tenants]]\nname = 3", "[[tenants]]\nname = 'a'\nkeys = ['plain-text-key']"]
)
def test_a_wrong_file_leaves_the_old_keys_in_use(tmp_path, caplog, text):
    path = key_file(tmp_path / "keys.toml", acme=(["k-acme"], ""))
    heard = []
    tenants = Tenants(str(path), heard.append)
    write(path, text)
    tenants.reload_if_changed()
    assert tenants.of_key("k-acme").name == "acme"
    assert heard == [False]
    assert "plain-text-key" not in caplog.text
    path.unlink()
    tenants.reload_if_changed()
    assert tenants.of_key("k-acme").name == "acme"
    assert heard == [False, False]


def test_a_key_of_two_tenants_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="twice"):
        read_keys(key_file(tmp_path / "keys.toml", a=(["same"], ""), b=(["same"], "")))


def test_a_minted_key_fits_its_line(tmp_path, capsys):
    assert main() == 0
    key, line = (text.partition(":")[2].strip() for text in capsys.readouterr().out.splitlines())
    path = tmp_path / "keys.toml"
    path.write_text(f'[[tenants]]\nname = "a"\n{line}\n')
    assert Tenants(str(path)).of_key(key).name == "a"


# Rate limits


def test_requests_are_limited_and_the_wait_is_exact():
    clock = ManualClock()
    limits, tenant = RateLimits(clock), Tenant(name="a", requests_per_minute=6)
    for left in (5, 4, 3, 2, 1, 0):
        limits.admit(tenant, 10)
        assert limits.standing(tenant, "requests").remaining == left
    with pytest.raises(NoCapacity) as caught:
        limits.admit(tenant, 10)
    assert caught.value.retry_after_s == pytest.approx(10)
    clock.advance(9.9)
    with pytest.raises(NoCapacity):
        limits.admit(tenant, 10)
    clock.advance(0.2)
    limits.admit(tenant, 10)
    assert limits.standing(tenant, "tokens") is None


def test_tokens_count_prompt_and_output_and_a_debt_is_waited_for():
    clock = ManualClock()
    limits, tenant = RateLimits(clock), Tenant(name="a", tokens_per_minute=600)
    limits.admit(tenant, 500)
    limits.spend(tenant, 400)
    standing = limits.standing(tenant, "tokens")
    assert (standing.limit, standing.remaining, standing.reset_s) == (600, 0, pytest.approx(90))
    with pytest.raises(NoCapacity) as caught:
        limits.admit(tenant, 100)
    assert caught.value.retry_after_s == pytest.approx(40)
    clock.advance(40.1)
    limits.admit(tenant, 100)


def test_a_prompt_longer_than_the_bucket_waits_for_a_full_one_instead_of_forever():
    clock = ManualClock()
    limits, tenant = RateLimits(clock), Tenant(name="a", tokens_per_minute=100)
    limits.admit(tenant, 500)
    with pytest.raises(NoCapacity):
        limits.admit(tenant, 500)
    clock.advance(301)
    limits.admit(tenant, 500)


def test_a_refused_request_costs_nothing_and_tenants_do_not_share():
    limits = RateLimits(ManualClock())
    a, b = (Tenant(name=name, requests_per_minute=60, tokens_per_minute=10) for name in "ab")
    limits.admit(a, 10)
    for _ in range(5):
        with pytest.raises(NoCapacity):
            limits.admit(a, 10)
    assert limits.standing(a, "requests").remaining == 59
    limits.admit(b, 10)


def test_each_process_grants_its_share():
    limits = RateLimits(ManualClock(), share=lambda: 0.25)
    tenant = Tenant(name="a", requests_per_minute=8)
    limits.admit(tenant, 1)
    limits.admit(tenant, 1)
    with pytest.raises(NoCapacity):
        limits.admit(tenant, 1)
