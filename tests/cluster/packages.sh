#!/usr/bin/env bash
# Installs from Debian what the tests with containers start: an engine, what a base image is made with, PostgreSQL, a browser.
set -euo pipefail

missing=()
command -v dockerd >/dev/null || [ -n "${DOCKER_HOST:-}" ] || missing+=(docker.io iptables)
command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
command -v chromium >/dev/null || missing+=(chromium)
compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || missing+=(postgresql)
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ]; then
    echo "not installed: ${missing[*]}; install them, or run this as root" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
