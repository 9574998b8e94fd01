"""A run folder on the Hugging Face hub: what is published, what keeps it back, and the upload. Reads files only."""

AGAIN = "run the same command again: what the hub has is not uploaded twice"
