#!/usr/bin/env bash
# Build a real Kubernetes (1.20.2) from Debian 12's own source package: no registry of packages ships these programs.
#   usage: k8s_build.sh FOLDER      -> FOLDER/bin/{kube-apiserver,kube-controller-manager,kube-scheduler,kubelet,kube-proxy}
# Debian's binary package has kubectl only, but its source package is the whole tree with vendor/; Debian's Go 1.19
# compiles it in about 7.5 CPU minutes, 34 MB of download and 1.4 GB of disk.
set -euo pipefail
out=$(realpath -m "${1:?folder}"); mkdir -p "$out"/{bin,apt/lists/partial,apt/cache/archives/partial,apt/parts,gopath/src/k8s.io}
tools=(etcd-server containerd runc containernetworking-plugins iptables iproute2)
command -v etcd containerd runc iptables ip >/dev/null || { apt-get update -qq; apt-get install -y -qq --no-install-recommends "${tools[@]}" >/dev/null; }
# Debian's client is of the servers' own version; any other up to 1.33 will do.
command -v kubectl >/dev/null || apt-get install -y -qq --no-install-recommends kubernetes-client >/dev/null
[ -x "$out/bin/kube-proxy" ] && exit 0
apt-get install -y -qq --no-install-recommends golang-1.19-go golang-1.19-src dpkg-dev "${tools[@]}" >/dev/null
# The machine's own Debian sources, asked for source packages, in folders of our own.
awk '/^URIs|^Suites|^Components|^Signed-By/{print} /^Types/{print "Types: deb-src"} /^$/{print}' \
  /etc/apt/sources.list.d/debian.sources > "$out/apt/parts/src.sources"
apt=(-o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$out/apt/parts" -o "Dir::State::Lists=$out/apt/lists"
     -o "Dir::Cache=$out/apt/cache" -o APT::Sandbox::User=root)
apt-get "${apt[@]}" -qq update
tree=$out/gopath/src/k8s.io/kubernetes
[ -d "$tree" ] || (cd "$out" && apt-get "${apt[@]}" -qq source kubernetes && mv kubernetes-1.20* "$tree")
export GOPATH=$out/gopath GO111MODULE=off CGO_ENABLED=0 GOCACHE=$out/gocache GOPROXY=off PATH=/usr/lib/go-1.19/bin:$PATH
cd "$tree"
if [ ! -s pkg/generated/openapi/zz_generated.openapi.go ]; then
  # The one generated file that the package lacks, made with the tree's own generator.
  go build -o "$out/bin/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
  inputs=$(grep -rl --include='*.go' '+k8s:openapi-gen=' pkg staging/src/k8s.io | grep -v _test.go | xargs -n1 dirname | sort -u \
    | sed 's#^staging/src/#k8s.io/kubernetes/vendor/#; s#^pkg/#k8s.io/kubernetes/pkg/#' \
    | grep -vE 'code-generator|sample-|/testdata|kube-openapi|/examples|component-base/version$|gengo' | paste -sd,)
  "$out/bin/openapi-gen" -i "$inputs" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
    --go-header-file hack/boilerplate/boilerplate.generatego.txt -r /dev/null --output-base "$GOPATH/src"
fi
version=k8s.io/kubernetes/vendor/k8s.io/component-base/version
for program in kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy; do
  nice -n 10 go build -trimpath -ldflags "-s -w -X $version.gitVersion=v1.20.2 -X $version.gitMajor=1 -X $version.gitMinor=20" \
    -o "$out/bin/$program" "./cmd/$program"
done
