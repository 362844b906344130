"""The configurations of all draft methods: one registry line per method."""

from models.drafts.eagle3.config import Eagle3Config

DraftConfig = Eagle3Config
