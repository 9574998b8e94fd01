from running import refuses


def test_bad_input_is_one_line_and_exit_code_2():
    refuses("faults", ["--kills", "x"], "--kills: invalid int value: 'x'")
