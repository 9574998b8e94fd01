"""Pictures of a run, drawn from its folder alone."""
