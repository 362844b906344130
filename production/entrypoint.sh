#!/bin/sh
# Files of secrets become variables of the same name; with RAY_HEAD this container joins a Ray cluster first.
set -eu
for file in "${SECRETS:-/run/secrets}"/*; do
    if [ -f "$file" ]; then
        # `export` would succeed where `cat` fails, and a server whose credential is empty lets everybody in.
        value=$(cat "$file") || {
            echo "$file cannot be read by user $(id -u): let others read the secret's file (chmod 644)" >&2
            exit 1
        }
        export "$(basename "$file")=$value"
    fi
done
if [ -n "${RAY_HEAD:-}" ]; then
    ray start --address="$RAY_HEAD" --num-cpus=0 --num-gpus=0 --disable-usage-stats
fi
exec "$@"
