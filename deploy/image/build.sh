#!/usr/bin/env bash
# Build localhost/tandem-gateway:dev and localhost/tandem-worker:dev on Debian 12 as root, without docker.
#   usage: build.sh CACHE_FOLDER      CACHE_FOLDER keeps the base and the wheels for the next time
set -euo pipefail
cd "$(dirname "$0")/../.."
cache=$(realpath -m "${1:?cache folder}"); mkdir -p "$cache/context"
for tool in mmdebstrap buildah podman runc; do
  command -v "$tool" >/dev/null || { apt-get update -qq; apt-get install -y -qq --no-install-recommends \
    mmdebstrap buildah podman runc catatonit containernetworking-plugins >/dev/null; break; }
done
if [ ! -s "$cache/base.tar" ]; then
  mmdebstrap -q --variant=minbase --include=python3,tini,ca-certificates,libstdc++6 \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' bookworm "$cache/part-base.tar"
  mv "$cache/part-base.tar" "$cache/base.tar"
fi
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=${STORAGE_DRIVER:-overlay}
if ! buildah images -q localhost/tandem-base:12 2>/dev/null | grep -q .; then
  mkdir -p "$cache/base"; ln -f "$cache/base.tar" "$cache/base/base.tar"
  printf 'FROM scratch\nADD base.tar /\nRUN rm -rf /var/lib/apt/lists /var/cache/apt /usr/share/perl /usr/lib/x86_64-linux-gnu/perl* /usr/bin/perl* /usr/lib/x86_64-linux-gnu/libperl* /usr/share/perl5 /usr/share/info /var/cache/debconf /usr/lib/x86_64-linux-gnu/gconv /usr/share/zoneinfo\n' > "$cache/base/Containerfile"
  buildah bud -q --squash -t localhost/tandem-base:12 "$cache/base"
fi
deploy/image/wheelhouse.sh "$cache/context"
for target in gateway worker; do
  buildah bud -q --layers --target "$target" --build-arg REVISION="$(git rev-parse HEAD)" -f deploy/image/Containerfile \
    -t "localhost/tandem-$target:dev" "$cache/context"
done
buildah images | grep localhost/tandem
