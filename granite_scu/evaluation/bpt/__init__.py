"""The base model and adapters scored on the same held-out text; the command is ``scripts/eval_bpt.py``."""
