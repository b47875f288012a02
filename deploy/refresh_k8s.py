"""Renders anew what `deploy/k8s` holds in rendered form: `python -m deploy.refresh_k8s`; a test checks that it is fresh."""

from collections.abc import Mapping
from pathlib import Path

from deploy.cluster_description import read_description
from deploy.render import render, write_files
from deploy.render_config import METAL, service_configs
from deploy.render_k8s import BASE, prometheus_rule

DEPLOY = Path(__file__).parent


def rendered() -> Mapping[Path, Mapping[str, str]]:
    """Return folder -> file -> text of everything rendered that is committed."""
    found: dict[Path, Mapping[str, str]] = {}
    for description in sorted(BASE.glob("*/cluster.yaml")) + sorted(BASE.glob("overlays/*/cluster.yaml")):
        folder = description.parent
        files = render(read_description(description), "k8s", folder)
        found[folder] = {name: text for name, text in files.items() if name != "kustomization.yaml"}
    found[DEPLOY / "systemd" / "config"] = service_configs(read_description(DEPLOY / "systemd" / "cluster.yaml"), METAL)
    monitoring = DEPLOY / "monitoring"
    found[BASE / "components" / "monitoring"] = {
        "rules.yaml": prometheus_rule((monitoring / "rules.yml").read_text()),
        "dashboard.json": (monitoring / "dashboard.json").read_text(),
    }
    return found


def main() -> None:
    """Rewrite all of it."""
    for folder, files in rendered().items():
        write_files(files, folder)


if __name__ == "__main__":
    main()
