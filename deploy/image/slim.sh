#!/bin/sh
# Take out of a virtual environment what no process of ours loads: tests, sources and headers of compiled code, a
# download client, symbols of extension modules. Runs inside the image's build stage, which has no `strip` of its own.
#   usage: slim.sh SITE_PACKAGES      needs /debs with Debian's libbinutils and its strip
set -eu
cd "$1"
rm -rf hf_xet* torch/include torch/share torch/test numpy/f2py numpy/distutils
find . -type d \( -name tests -o -name test \) -prune -exec rm -rf {} +
find . -type f \( -name '*.c' -o -name '*.h' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.pyi' -o -name '*.a' \) -delete
for deb in /debs/*.deb; do dpkg -x "$deb" /; done
# Not the libraries in *.libs: whoever repaired their paths moved sections that strip would move again.
find . -name '*.so' -not -path './*.libs/*' -not -path './torch/*' -size +200k -exec x86_64-linux-gnu-strip --strip-unneeded {} +
