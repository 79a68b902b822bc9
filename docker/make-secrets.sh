#!/bin/sh
# Makes the secrets that compose.yaml mounts, those that are not there yet: random, and readable to the containers only
# through their mounts (the folder is closed to others on this machine).
set -eu
cd "$(dirname "$0")/secrets"
chmod 700 .
make() { [ -s "$1" ] || { printf '%s' "$2" >"$1" && chmod 644 "$1"; }; }
random() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }
make write_token "$(random)"
make read_token "$(random)"
make grafana_admin_password "$(random)"
make postgres_password "$(random)"
make database_url "postgresql+asyncpg://noisescale:$(cat postgres_password)@postgres/noisescale"
