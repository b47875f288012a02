"""T0: the units are what systemd itself accepts, and agree with the configuration that lies beside them."""

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from core.config import load
from decode_worker.config import DecodeWorkerConfig
from deploy.cluster_description import GRACE_SLACK_S, read_description
from gateway.config import GatewayConfig
from prefill_worker.config import PrefillWorkerConfig

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
UNITS = {"gateway": "tandem-gateway.service", "prefill": "tandem-prefill@.service", "decode": "tandem-decode@.service"}
CONFIGS = {"gateway": GatewayConfig, "prefill": PrefillWorkerConfig, "decode": DecodeWorkerConfig}


def unit(name):
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(FOLDER / name)
    return parser


def verified(folder, needs_tool, names):
    """Run systemd's own check on copies whose program exists here."""
    tool = needs_tool("systemd-analyze")
    for name in names:
        text = (folder / name).read_text().replace("/opt/tandem/bin/tandem", "/bin/true")
        text = text.replace("User=tandem", "User=root").replace("Group=tandem", "Group=root")
        (folder / name).write_text(text)
    paths = [str(folder / name.replace("@.", "@1.")) for name in names]
    return subprocess.run([tool, "verify", "--man=no", *paths], capture_output=True, text=True, check=False)


@pytest.fixture
def copied(tmp_path):
    """The units, instances by name, with the drop-ins where a site puts them."""
    for name in (*UNITS.values(), "tandem.target"):
        shutil.copy(FOLDER / name, tmp_path / name.replace("@.", "@1."))
    for name in ("tandem-prefill@1.service", "tandem-decode@1.service"):
        shutil.copytree(FOLDER / "drop-ins", tmp_path / f"{name}.d")
    return tmp_path


def test_systemd_accepts_the_units_and_drop_ins(copied, needs_tool):
    done = verified(copied, needs_tool, [p.name for p in copied.iterdir() if p.is_file()])
    assert (done.returncode, done.stderr.strip()) == (0, "")


def test_systemd_finds_a_typo(copied, needs_tool):
    path = copied / UNITS["gateway"]
    path.write_text(path.read_text().replace("TimeoutStopSec", "TimeoutStopSek"))
    done = verified(copied, needs_tool, [path.name])
    assert "TimeoutStopSek" in done.stderr


@pytest.mark.parametrize("role", sorted(UNITS))
def test_a_unit_gives_its_process_the_time_that_it_may_drain(role):
    section = unit(UNITS[role])["Service"]
    config = load(CONFIGS[role], FOLDER / "config" / f"{role}.toml")
    said = read_description(FOLDER / "cluster.yaml")
    assert config.drain.budget_s == said.drain_s(role)
    assert int(section["TimeoutStopSec"]) == config.drain.budget_s + GRACE_SLACK_S
    assert section["RestartPreventExitStatus"] == "3"
    assert section["ExecStart"].split()[:4] == [
        "/opt/tandem/bin/tandem",
        role,
        "--config",
        f"/etc/tandem/{role}.toml",
    ]


def test_the_hosts_find_each_other_by_the_described_ports():
    said = read_description(FOLDER / "cluster.yaml").ports
    for role in ("prefill", "decode"):
        config = load(CONFIGS[role], FOLDER / "config" / f"{role}.toml")
        assert config.worker.gateways == (f"dns:tandem-gateways:{said.membership}",)
