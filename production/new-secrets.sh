#!/bin/sh
# Passwords for production/compose.yaml, one file each:   sh production/new-secrets.sh production/secrets
# Files that exist are kept. Only the folder is closed to others: containers read the files as another user.
set -eu
[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
mkdir -p "$1"
chmod 700 "$1"
umask 022
cd "$1"

random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
keep() { [ -e "$1" ] || printf %s "$2" > "$1"; }

keep POSTGRES_PASSWORD "$(random)"
keep PGPASSWORD "$(cat POSTGRES_PASSWORD)"
keep PREFECT_SERVER_DATABASE_CONNECTION_URL "postgresql+asyncpg://draftsmith:$(cat POSTGRES_PASSWORD)@postgres/prefect"
keep MLFLOW_BACKEND_STORE_URI "postgresql+psycopg://draftsmith:$(cat POSTGRES_PASSWORD)@postgres/mlflow"
keep PREFECT_API_AUTH_STRING "draftsmith:$(random)"
keep PREFECT_SERVER_API_AUTH_STRING "$(cat PREFECT_API_AUTH_STRING)"
keep AWS_ACCESS_KEY_ID "$(random)"
keep AWS_SECRET_ACCESS_KEY "$(random)"
keep HF_TOKEN "${HF_TOKEN:-}"     # of the Hugging Face Hub, for gated targets; may stay empty
keep s3.json "{\"identities\": [{\"name\": \"draftsmith\", \"credentials\": [{\"accessKey\": \"$(cat AWS_ACCESS_KEY_ID)\", \
\"secretKey\": \"$(cat AWS_SECRET_ACCESS_KEY)\"}], \"actions\": [\"Admin\", \"Read\", \"Write\", \"List\", \"Tagging\"]}]}"
echo "secrets in $PWD; Prefect's user and password: PREFECT_API_AUTH_STRING"
