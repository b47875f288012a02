#!/usr/bin/env bash
# Write the images that the lab's nodes load into FOLDER, and the one that holds a pod's namespaces.
#   usage: archives.sh FOLDER
set -euo pipefail
out=$(realpath -m "${1:?folder}"); mkdir -p "$out/pause"
export BUILDAH_ISOLATION=chroot
if ! buildah images | grep -q localhost/tandem-pause; then
  cp "$(dpkg -L catatonit | grep bin/catatonit)" "$out/pause/catatonit"
  printf 'FROM scratch\nCOPY catatonit /catatonit\nENTRYPOINT ["/catatonit", "-P"]\n' > "$out/pause/Containerfile"
  buildah bud -q -t localhost/tandem-pause:1 "$out/pause"
fi
for image in tandem-pause:1 tandem-gateway:dev tandem-worker:dev; do
  archive=$out/${image%%:*}.tar
  rm -f "$archive"
  buildah push -q "localhost/$image" "docker-archive:$archive:localhost/$image"
done
