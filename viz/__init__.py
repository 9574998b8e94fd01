"""For ``python -m viz.generate_ablation_plots`` in a checkout; the package is ``granite_scu.viz``."""
