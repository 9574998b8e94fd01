import pytest
from running import refuses


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("command_line", ["--repeats", "0"], "--repeats 0: must be at least 1"),
        ("controller_overhead", ["--batch", "-1"], "--batch -1"),
        ("data", ["--repeats", "0"], "--repeats 0: must be at least 1"),
        ("faults", ["--kills", "x"], "--kills x: must be a whole number"),
        ("generation", ["--written", "poems"], "--written"),
        ("scaling", ["--processes", "3"], "--processes 3: must be 2 or more and divide the batch of 8"),
        ("scan", ["--repeats", "0"], "--repeats 0"),
        ("scoring", ["--batches", "0"], "--batches 0"),
        ("train_step", ["--length", "0"], "--length 0"),
        ("train_step", ["--peak-tflops", "0"], "--peak-tflops"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(name, arguments, said):
    refuses(name, arguments, said)
