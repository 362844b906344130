#!/bin/sh
# Makes the bucket of MLflow's artifacts and brings prefect.yaml into force; recipes that are edited in /data stay.
set -eu
python -c 'import fsspec; fs = fsspec.filesystem("s3"); fs.exists("draftsmith") or fs.mkdir("draftsmith")'
cp /opt/draftsmith/prefect.yaml .
[ -e recipes ] || cp -r /opt/draftsmith/recipes recipes
exec python -m tasks.deployments .deployed
