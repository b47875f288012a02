"""Command lines and configuration files of the lab's programs. Pure.

What differs from a real node is owed to the machine: no CAP_SYS_RESOURCE, no AppArmor, several kubelets on one cgroup
tree, and times of seconds instead of minutes so that a test of a lost node ends.
"""

from pathlib import Path

PAUSE = "localhost/tandem-pause:1"


def control_plane(binaries: Path, state: Path, address: str) -> dict[str, list[str]]:
    """Return name -> command line of the control plane's programs."""
    config = f"--kubeconfig={state}/kubeconfig"
    return {
        "etcd": [
            "etcd",
            "--data-dir=etcd-data",
            "--unsafe-no-fsync",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
        ],
        "apiserver": [
            f"{binaries}/kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            "--secure-port=6443",
            f"--bind-address={address}",
            f"--advertise-address={address}",
            "--cert-dir=pki",
            "--service-account-key-file=pki/sa.key",
            "--service-account-signing-key-file=pki/sa.key",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--token-auth-file=tokens.csv",
            "--authorization-mode=Node,RBAC",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--runtime-config=policy/v1beta1=true",
            "--kubelet-preferred-address-types=InternalIP",
        ],
        "controllers": [
            f"{binaries}/kube-controller-manager",
            config,
            "--service-account-private-key-file=pki/sa.key",
            "--root-ca-file=pki/apiserver.crt",
            "--leader-elect=false",
            "--port=0",
            "--node-monitor-period=1s",
            "--node-monitor-grace-period=6s",
        ],
        "scheduler": [f"{binaries}/kube-scheduler", config, "--leader-elect=false", "--port=0"],
    }


def node_programs(binaries: Path, state: Path, address: str, node: str) -> dict[str, list[str]]:
    """Return name -> command line of a node's programs."""
    config, folder = f"--kubeconfig={state}/kubeconfig", state / node
    return {
        "kubelet": [
            f"{binaries}/kubelet",
            f"--config={folder}/kubelet.yaml",
            config,
            "--container-runtime=remote",
            f"--container-runtime-endpoint=unix://{folder}/c.sock",
            f"--root-dir={folder}/kubelet",
            f"--hostname-override={node}",
            f"--node-ip={address}",
        ],
        "proxy": [
            f"{binaries}/kube-proxy",
            config,
            "--proxy-mode=iptables",
            f"--hostname-override={node}",
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
            f"--healthz-bind-address={address}:10256",
            f"--metrics-bind-address={address}:10249",
            "--cluster-cidr=10.244.0.0/16",
        ],
    }


def kubeconfig(server: str) -> dict[str, object]:
    """Return the administrator's access."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "lab",
        "clusters": [{"name": "lab", "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "admin", "user": {"token": "admintoken"}}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "admin"}}],
    }


def kubelet(address: str, names: str) -> dict[str, object]:
    """Return a kubelet's configuration file."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "cgroupDriver": "cgroupfs",
        "failSwapOn": False,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "address": address,
        "port": 10250,
        "healthzPort": 0,
        "readOnlyPort": 0,
        "enforceNodeAllocatable": [],
        # Several kubelets would delete one another's groups.
        "cgroupsPerQOS": False,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "1s",
        "syncFrequency": "5s",
        "maxPods": 60,
        "clusterDomain": "cluster.local",
        "clusterDNS": [names],
    }


def cni(folder: Path, subnet: str) -> dict[str, object]:
    """Return a node's network of pods: a bridge, without address translation."""
    address = {
        "type": "host-local",
        "dataDir": str(folder / "ipam"),
        "ranges": [[{"subnet": subnet}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": address,
    }
    return {"cniVersion": "0.4.0", "name": "tandem", "plugins": [bridge]}


def containerd_toml(folder: Path, address: str) -> str:
    """Return a node's containerd configuration."""
    return f"""version = 2
root = "{folder}/root"
state = "{folder}/state"
[grpc]
  address = "{folder}/c.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  stream_server_address = "{address}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
"""
