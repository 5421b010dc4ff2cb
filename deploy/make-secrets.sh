#!/bin/sh
# Makes the secrets that docker-compose.yml mounts, once; what exists is left alone.
#
# The files are readable for all, because the containers read them under user ids of their own; the folder is ours alone.
set -eu

folder="$(dirname "$0")/secrets"
umask 077
mkdir -p "$folder"
chmod 700 "$folder"

random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }

put() {
    [ -e "$folder/$1" ] && return
    printf '%s' "$2" > "$folder/$1.new"
    chmod 444 "$folder/$1.new"
    mv "$folder/$1.new" "$folder/$1"
}

put postgres_password "$(random)"
put owner_password "$(random)"
put service_password "$(random)"
put owner_database_url "postgres://opledger_owner:$(cat "$folder/owner_password")@postgres:5432/opledger"
put service_database_url "postgres://opledger:$(cat "$folder/service_password")@postgres:5432/opledger"
