"""Plants, and the record of a step test, that several tests draw on."""

import numpy as np
from hypothesis import strategies as st

from granite_scu.control import PI
from research.identification.excitation import Excitation

GAINS = st.floats(-3, -0.5)
TAUS = st.floats(2, 15)
THETAS = st.floats(0, 4)


def excitation(ticks: int, dwell: int = 4, amplitude: float = 0.5, seed: int = 0) -> np.ndarray:
    """ln lambda of a step test after 20 ticks of rest."""
    signs = Excitation(PI(setpoint=0.02), settle=2, amplitude=amplitude, dwell=dwell, seed=seed).signs(
        ticks // dwell + 1
    )
    return np.concatenate([np.zeros(20), amplitude * np.repeat(signs, dwell)])[:ticks]
