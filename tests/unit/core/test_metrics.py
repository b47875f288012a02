"""Naming rules, closed label sets, catalogue and exposition."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from core.metrics import CappedLabel, MetricInfo, Metrics, check_name


def samples(metrics):
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("requests_total", "counter"),
        ("tandem_Requests_total", "counter"),
        ("tandem_requests", "counter"),
        ("tandem_pages_total", "gauge"),
        ("tandem_step_ms", "histogram"),
        ("tandem_wait_ms_total", "counter"),
        ("tandem_pulled_mb", "gauge"),
        ("tandem_hits_percent", "gauge"),
        ("tandem", "gauge"),
        ("tandem__pages", "gauge"),
        ("tandem_pages\n", "gauge"),
    ],
)
def test_names_against_the_rules_are_refused(name, kind):
    with pytest.raises(ValueError, match="metric name"):
        check_name(name, kind)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tandem_kv_pulled_bytes_total", "counter"),
        ("tandem_process_state", "gauge"),
        ("tandem_decode_step_seconds", "histogram"),
    ],
)
def test_good_names_pass(name, kind):
    check_name(name, kind)


def test_series_of_closed_label_sets_exist_before_the_first_event():
    metrics = Metrics()
    counter = metrics.counter("tandem_requests_total", "Requests.", {"outcome": ("ok", "error")})
    counter.labels("ok").inc()
    found = samples(metrics)
    assert found["tandem_requests_total", (("outcome", "ok"),)] == 1
    assert found["tandem_requests_total", (("outcome", "error"),)] == 0


def test_open_label_sets_start_empty():
    metrics = Metrics()
    metrics.gauge("tandem_worker_pages", "Pages by worker.", {"worker": ()})
    assert samples(metrics) == {}


def test_a_gauge_can_be_read_at_scrape_time():
    metrics = Metrics()
    value = [1.0]
    metrics.gauge("tandem_free_pages", "Free pages.", read=lambda: value[0])
    assert samples(metrics)["tandem_free_pages", ()] == 1
    value[0] = 2
    assert samples(metrics)["tandem_free_pages", ()] == 2


def test_histograms_have_the_given_buckets():
    metrics = Metrics()
    metrics.histogram("tandem_step_seconds", "Step time.", (0.1, 1.0)).observe(0.5)
    found = samples(metrics)
    assert found["tandem_step_seconds_bucket", (("le", "0.1"),)] == 0
    assert found["tandem_step_seconds_bucket", (("le", "1.0"),)] == 1
    with pytest.raises(ValueError, match="ascend"):
        metrics.histogram("tandem_other_seconds", "Other.", (1.0, 0.1))


def test_the_catalogue_lists_what_was_declared_and_refuses_repeats_and_silence():
    metrics = Metrics()
    metrics.gauge("tandem_free_pages", "Free pages.")
    metrics.counter("tandem_errors_total", "Errors.", {"code": ("a",)})
    assert metrics.catalogue() == (
        MetricInfo("tandem_errors_total", "counter", "Errors.", ("code",)),
        MetricInfo("tandem_free_pages", "gauge", "Free pages.", ()),
    )
    with pytest.raises(ValueError, match="twice"):
        metrics.gauge("tandem_free_pages", "Again.")
    with pytest.raises(ValueError, match="help"):
        metrics.gauge("tandem_used_pages", " ")


def test_label_sets_that_explode_are_refused():
    many = tuple(map(str, range(100)))
    with pytest.raises(ValueError, match="10000 series"):
        Metrics().counter("tandem_things_total", "Things.", {"a": many, "b": many})


def test_two_services_in_one_process_share_nothing():
    first, second = Metrics(), Metrics()
    first.gauge("tandem_free_pages", "Free pages.")
    second.gauge("tandem_free_pages", "Free pages.")
    assert first.registry is not second.registry


def test_values_from_outside_are_bounded():
    label = CappedLabel(2)
    assert [label(value) for value in ("a", "b", "c", "a", "d", "b")] == ["a", "b", "other", "a", "other", "b"]
