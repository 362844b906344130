#!/bin/sh
# Files of secrets become variables of the same name; with RAY_HEAD this container joins a Ray cluster first.
set -eu
for file in "${SECRETS:-/run/secrets}"/*; do
    if [ -f "$file" ]; then
        export "$(basename "$file")=$(cat "$file")"
    fi
done
if [ -n "${RAY_HEAD:-}" ]; then
    ray start --address="$RAY_HEAD" --num-cpus=0 --num-gpus=0 --disable-usage-stats
fi
exec "$@"
