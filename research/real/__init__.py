"""Evidence on real models, by ``research/evidence/real/protocol.md``."""
