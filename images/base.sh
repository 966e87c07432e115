#!/usr/bin/env bash
# A base image from Debian's packages alone, for machines that reach no image registry. Needs root and mmdebstrap.
#
#   images/base.sh [NAME]         NAME is debian-python:bookworm if not given
#
# CONTAINER      docker, if not given, or podman
# DEBIAN_MIRROR  another mirror than Debian's own; a snapshot's address pins every package
# PACKAGES       more packages, separated by blanks
set -euo pipefail
name=${1:-debian-python:bookworm}
packages="ca-certificates python3 python3-venv libgomp1 libstdc++6 ${PACKAGES:-}"

# Debian's essential packages and what the wheels need; no apt, so that nothing is added later
mmdebstrap --quiet --variant=essential --include="$packages" \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    bookworm - ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} |
    "${CONTAINER:-docker}" import --change 'CMD ["python3"]' - "$name"
