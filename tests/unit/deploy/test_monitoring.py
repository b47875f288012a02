"""Rules and dashboard speak only of metrics that exist; each alert fires in its fault and is silent without it."""

import json
import re
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml

from deploy.catalogue import catalogues
from deploy.monitoring.dashboard import PANELS, PATH, dashboard

FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "monitoring"
RULES = yaml.safe_load((FOLDER / "rules.yml").read_text())
TESTS = yaml.safe_load((FOLDER / "rules_test.yml").read_text())
ALL_RULES = [rule for group in RULES["groups"] for rule in group["rules"]]
RECORDED = {rule["record"] for rule in ALL_RULES if "record" in rule}
EXPRESSIONS = {
    **{rule.get("record") or rule["alert"]: rule["expr"] for rule in ALL_RULES},
    **{f"{panel.title}, {legend}": expression for panel in PANELS for legend, expression in panel.series},
}


def known():
    names = set(RECORDED)
    for _, metrics in catalogues():
        for info in metrics.catalogue():
            names |= (
                {f"{info.name}{s}" for s in ("_bucket", "_sum", "_count")} if info.kind == "histogram" else {info.name}
            )
    return names


def unknown_metrics(expression, names):
    used = set(re.findall(r"\btandem[a-z0-9_:]+", expression))
    return used - names


@pytest.mark.parametrize("name", sorted(EXPRESSIONS))
def test_an_expression_parses_and_names_only_metrics_that_exist(name):
    promql_parser.parse(EXPRESSIONS[name])
    assert unknown_metrics(EXPRESSIONS[name], known()) == set()


def test_the_check_finds_a_metric_that_does_not_exist():
    assert unknown_metrics("rate(tandem_no_such_total[1m])", known()) == {"tandem_no_such_total"}


def test_the_committed_dashboard_is_what_the_code_says():
    assert json.loads(PATH.read_text()) == dashboard()


def test_every_alert_is_tested_firing_and_silent():
    alerts = {rule["alert"] for rule in ALL_RULES if "alert" in rule}
    for test in TESTS["tests"]:
        assert {case["alertname"] for case in test["alert_rule_test"]} == alerts
    healthy, broken = TESTS["tests"]
    assert not any(case.get("exp_alerts") for case in healthy["alert_rule_test"])
    assert all(case.get("exp_alerts") for case in broken["alert_rule_test"])


def test_the_rules_pass_their_tests_in_prometheus(needs_tool):
    promtool = needs_tool("promtool")
    checked = subprocess.run(
        [promtool, "check", "rules", "rules.yml"], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tested = subprocess.run(
        [promtool, "test", "rules", "rules_test.yml"], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
