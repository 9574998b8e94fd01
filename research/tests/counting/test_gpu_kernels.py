import copy
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from running import refuses

from granite_scu.model import loading
from research.counting import gpu_kernels
from research.counting.operators import Step

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which make test-slow installs")

CODE = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;              /* 0x00000a00ff017b82 */
                                                                       /* 0x000fe20000000800 */
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0020*/              @!P0 FFMA R3, R2, R2, R3 ;
        /*0030*/               @P1 BRA 0x10 ;
        /*0040*/                   EXIT ;
        /*0050*/                   BRA 0x50;
        /*0060*/                   NOP;
"""


def test_what_is_in_a_loop_counts_as_often_as_it_is_run():
    assert gpu_kernels.instructions(CODE, 1) == 6
    assert gpu_kernels.instructions(CODE, 4) == 3 + 4 * 3


@pytest.fixture(scope="module")
def graphs():
    """By dtype, of the first layers of the default model: Mamba-2 and, as the sixth, attention."""
    from research.counting import lowering

    config = copy.deepcopy(loading.default_config())
    config.num_hidden_layers, config.layer_types = 6, config.layer_types[:6]
    step, found = Step(config), {}

    def lowered(dtype):
        if dtype not in found:
            found[dtype] = lowering.count(replace(step, dtype=dtype))[1]
        return found[dtype]

    return lowered


@pytest.mark.slow
@NEEDS_TRITON
@pytest.mark.parametrize("capability", gpu_kernels.SHARED)
def test_every_kernel_of_a_compiled_step_fits_the_card(capability, graphs):
    dtype = torch.float16 if capability < 80 else torch.bfloat16  # what such a card trains in
    assert gpu_kernels.misfits(graphs(dtype), capability) == []


def test_bad_input_is_refused_in_a_line():
    refuses("research/counting/gpu_kernels", ["--block", "0"], "--block 0: must be at least 1")
