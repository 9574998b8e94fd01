from running import refuses


def test_the_processes_must_share_the_batch_evenly():
    refuses("scaling", ["--processes", "3"], "--processes 3: must be 2 or more and divide the batch of 8")
