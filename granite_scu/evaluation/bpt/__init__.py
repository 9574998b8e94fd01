"""The base model and adapters scored on the same held-out text; the command is ``granite-scu eval``."""
