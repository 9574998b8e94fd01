"""The figures of runs: granite-scu plot."""

import sys

from granite_scu.viz.generate_ablation_plots import main

if __name__ == "__main__":
    sys.exit(main())
