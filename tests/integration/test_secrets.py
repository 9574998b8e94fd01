"""A first run asks nobody for anything, and tells nobody's secrets."""

import os
import subprocess
import sys

import pytest

MARKER = "marker-of-a-secret-4c1f"
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD")

WATCHED = """
import sys

def watch(event, arguments):
    if event == "socket.connect" and not isinstance(arguments[1], (str, bytes)):  # a path is a socket of this machine
        print("connects to", arguments[1], file=sys.stderr)
    if event == "socket.getaddrinfo":
        print("asks for", arguments[0], file=sys.stderr)

sys.addaudithook(watch)
from granite_scu.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_test_run_connects_to_nobody_and_writes_no_secret(tmp_path):
    secrets = dict.fromkeys(SECRETS, MARKER) | {"https_proxy": f"http://me:{MARKER}@127.0.0.1:9"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_HUB")} | secrets
    short = ("--max-steps", "4", "--eval-iters", "1", "--batch-size", "2", "--block-size", "64")
    where = ("--output-dir", str(tmp_path / "run"), "--cache-dir", str(tmp_path / "cache"))
    command = [sys.executable, "-c", WATCHED, "train", "--test-run", *short, *where]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    assert "connects to" not in printed and "asks for" not in printed
    assert MARKER not in printed
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 15 and not [path for path in files if MARKER.encode() in path.read_bytes()]
