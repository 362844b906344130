"""Brings a database to the schema of the installed MLflow, whose server starts with no other.

By $MLFLOW_BACKEND_STORE_URI: `mlflow db upgrade` takes the address, which holds a password, as an argument, which every
user of the machine sees.
"""

from mlflow.db import commands

from infra.settings import tracking_database

if __name__ == "__main__":
    commands(["upgrade", tracking_database()])
