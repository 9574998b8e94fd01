"""The site of the documents builds without a warning, and asks nothing of another host."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", place]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


@pytest.mark.slow
def test_every_page_is_in_it(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}


@pytest.mark.slow
def test_the_reference_is_made_of_the_code(site):
    cli, configuration, presets, run_folder, python = (
        (site / "reference" / f"{name}.html").read_text(encoding="utf-8")
        for name in ("cli", "configuration", "presets", "run-folder", "python")
    )
    assert "granite-scu validate" in cli and "--stop-at-equilibrium" in cli
    assert "data.block_size" in configuration and "--block-size" in configuration
    assert "gpu_4090" in presets and "batch_size: 4" in re.sub(r"<[^>]*>", "", presets)
    assert "as_record" in run_folder and "ShannonCallback" in python


@pytest.mark.slow
def test_nothing_is_fetched_from_another_host(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\ssrc=\"(https?://[^\"]+)", text)
        fetched += re.findall(
            r"<link\b[^>]*rel=\"(?:stylesheet|preconnect|preload)\"[^>]*href=\"(https?://[^\"]+)", text
        )
        assert not fetched, page
