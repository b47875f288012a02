"""The manifests for Ray, checked without a cluster; each rule finds the fault that it is there for."""

import json
from pathlib import Path

import kubernetes_validate
import msgspec
import pytest
import yaml

from core.errors import ConfigError
from deploy.cli import main
from deploy.ray.manifests import RayClusterDoc, check_manifest, pod_templates
from tests.deploy.ray.page import commands_of

ROOT = Path(__file__).resolve().parents[3]
RAY = ROOT / "deploy" / "ray"


def changed(name, tmp_path, change):
    tree = json.loads(json.dumps(yaml.safe_load((RAY / name).read_text())))
    change(tree)
    path = tmp_path / name
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.parametrize(("name", "kind"), [("cluster.yaml", "ray up"), ("raycluster.yaml", "RayCluster")])
def test_a_shipped_manifest_is_well_by_the_command_of_the_page(name, kind, capsys, monkeypatch):
    command = f"tandem validate --on ray deploy/ray/{name}"
    assert command in commands_of((ROOT / "docs" / "deploy-ray.md").read_text())
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        main(command.split()[1:])
    assert ended.value.code == 0
    assert f"{kind}, nothing to complain about" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.update(max_workerz=2), "max_workerz"),
        (lambda t: t.pop("provider"), "'provider' is missing"),
        (lambda t: t.update(min_workers="two"), "ray up refuses it"),
        (lambda t: t.update(head_start_ray_commands=["ray start --head"]), "does not set RAY_AUTH_MODE"),
    ],
)
def test_a_wrong_description_for_ray_up_is_one_sentence(change, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        check_manifest(changed("cluster.yaml", tmp_path, change))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s: s.update(rayVersoin="2"), "rayVersoin"),
        (lambda s: s["workerGroupSpecs"].pop(), "not one for each of prefill, decode"),
        (lambda s: s["workerGroupSpecs"][0].update(minReplicas=3), "between minReplicas and maxReplicas"),
        (lambda s: s["headGroupSpec"]["rayStartParams"].update(resources='"{}"'), "offers no resource 'gateway'"),
        (lambda s: s["headGroupSpec"]["template"]["spec"]["containers"][0].update(env=[]), "RAY_AUTH_MODE"),
    ],
)
def test_a_wrong_raycluster_is_one_sentence(change, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        check_manifest(changed("raycluster.yaml", tmp_path, lambda tree: change(tree["spec"])))


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_the_pods_of_the_raycluster_pass_the_published_schema(version):
    doc = msgspec.convert(yaml.safe_load((RAY / "raycluster.yaml").read_text()), RayClusterDoc)
    for name, template in pod_templates(doc).items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, version, strict=True)
        assert template["spec"]["terminationGracePeriodSeconds"] == 615
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**pod, "spec": {**pod["spec"], "containerz": []}}, version, strict=True)
