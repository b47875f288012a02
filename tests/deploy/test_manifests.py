"""T0: every overlay and component builds, passes the published schemas of four Kubernetes versions, and is fresh."""

import copy
import json
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deploy.cluster_description import read_description
from deploy.refresh_k8s import rendered
from deploy.render import render, write_files
from deploy.validate_k8s import build, complaints
from tests.deploy.custom_schemas import SCHEMAS, key_of
from tests.deploy.overlays import COMPONENTS, K8S, OVERLAYS, kubectl, overlay, with_component

VERSIONS = ("1.29", "1.33", "1.35", "1.37")
SINCE = {"rdma-dra": "1.35", "nvl72-computedomain": "1.35", "gb200-nvl72": "1.35", "gang-podgroup": "1.37"}
"""Of VERSIONS: the first that has what they use."""
OF_1_20 = {"ci", "lab-k8s120"}
"""Speak an API that newer versions dropped; the lab runs them."""
_checked: set[str] = set()


def check(docs, since="1.29", *, skip_pdb=False):
    """Raise at the first object that a schema refuses; equal objects are looked at once."""
    for doc in docs:
        if key_of(doc) in SCHEMAS:
            jsonschema.validate(doc, SCHEMAS[key_of(doc)])
            continue
        if skip_pdb and doc["kind"] == "PodDisruptionBudget":
            continue
        for version in (v for v in VERSIONS if v >= since):
            mark = version + json.dumps(doc, sort_keys=True)
            if mark not in _checked:
                kubernetes_validate.validate(doc, version, strict=True)
                _checked.add(mark)


@pytest.mark.parametrize("name", ["base", *OVERLAYS])
def test_an_overlay_passes_the_schemas_and_the_rules(name):
    docs = overlay(name)
    check(docs, SINCE.get(name, "1.29"), skip_pdb=name in OF_1_20)
    assert complaints(docs) == []


@pytest.mark.parametrize("name", COMPONENTS)
def test_base_with_a_component_passes_the_schemas_and_the_rules(name, tmp_path):
    docs = with_component(name, tmp_path)
    check(docs, SINCE.get(name, "1.29"), skip_pdb=name in OF_1_20)
    assert complaints(docs) == []
    assert json.dumps(docs) != json.dumps(overlay("base")), "the component changes nothing"


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", ("spec", "template", "spec", "terminationGracePeriod"), 5),
        ("NetworkPolicy", ("spec", "ingres"), []),
        ("PodDisruptionBudget", ("spec", "maxUnavailable"), [1]),
    ],
)
def test_the_schemas_find_a_typo(kind, path, value):
    doc = copy.deepcopy(next(d for d in overlay("base") if d["kind"] == kind))
    node = doc
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        check([doc])


def test_our_own_schemas_find_a_typo(tmp_path):
    (doc,) = (d for d in with_component("multinode-disaggregatedset", tmp_path) if d["kind"] == "DisaggregatedSet")
    doc["spec"]["roles"][0]["spec"]["leaderWorkerTemplate"]["sise"] = 2
    with pytest.raises(jsonschema.ValidationError, match="sise"):
        check([doc])


def test_the_set_carries_the_pods_of_base(tmp_path):
    docs = with_component("multinode-disaggregatedset", tmp_path)
    assert {d["metadata"]["name"] for d in docs if d["kind"] == "Deployment"} == {"gateway", "controller"}
    (made,) = (d for d in docs if d["kind"] == "DisaggregatedSet")
    for role in made["spec"]["roles"]:
        (base,) = (d for d in overlay("base") if d["kind"] == "Deployment" and d["metadata"]["name"] == role["name"])
        assert role["spec"]["leaderWorkerTemplate"]["workerTemplate"] == base["spec"]["template"]


def test_what_is_rendered_is_fresh():
    stale = [
        str(folder / name)
        for folder, files in rendered().items()
        for name, text in files.items()
        if (folder / name).read_text() != text
    ]
    assert stale == [], "run: python -m deploy.refresh_k8s"


def test_an_overlay_rendered_by_a_user_builds_and_passes(tmp_path):
    (tmp_path / "cluster.yaml").write_text("model: {path: tiny-llama}\ngateway: {replicas: 2}\ndecode: {replicas: 3}\n")
    write_files(render(read_description(tmp_path / "cluster.yaml"), "k8s", tmp_path), tmp_path)
    docs = build(tmp_path, kubectl())
    assert complaints(docs) == []
    (decode,) = (d for d in docs if d["kind"] == "Deployment" and d["metadata"]["name"] == "decode")
    assert decode["spec"]["replicas"] == 3
    assert decode["spec"]["template"]["spec"]["initContainers"][0]["args"] == ["prepare", "tiny-llama", "/models"]


def test_no_object_of_base_needs_a_custom_resource():
    assert not [key_of(d) for d in overlay("base") if key_of(d) in SCHEMAS]
    groups = {d["apiVersion"].rpartition("/")[0] for d in overlay("base")}
    assert groups == {"", "apps", "policy", "networking.k8s.io", "rbac.authorization.k8s.io", "coordination.k8s.io", "scheduling.k8s.io"}  # fmt: skip


def test_every_file_of_the_manifests_is_used():
    """A file that no kustomization names is dead."""
    dead = []
    for folder in {p.parent for p in K8S.rglob("kustomization.yaml")}:
        text = (folder / "kustomization.yaml").read_text()
        for path in folder.iterdir():
            if path.is_file() and path.name not in {"kustomization.yaml", "cluster.yaml"} and path.name not in text:
                dead.append(str(path.relative_to(K8S)))
    assert dead == []


def test_yaml_of_the_manifests_has_no_duplicate_names():
    for name in ("base", *OVERLAYS):
        names = [(d["kind"], d["metadata"]["name"]) for d in overlay(name)]
        assert len(names) == len(set(names))


def test_the_example_description_is_valid_for_kubernetes(tmp_path):
    files = render(read_description(Path(K8S).parent / "cluster.example.yaml"), "k8s", tmp_path)
    assert yaml.safe_load(files["kustomization.yaml"])["kind"] == "Kustomization"
