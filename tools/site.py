"""Hooks of mkdocs: the pages of the reference, made from the code, and the evidence that pages link to."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from granite_scu.cli.command_table import BY_NAME
from granite_scu.config.flags import DEFAULTS, FLAGS, MEANINGS
from granite_scu.hardware.presets import PRESETS

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "research" / "evidence"
LINKED = ("protocol.md", "bases/README.md", "real/protocol.md", "real/findings.md")
"""What pages link to."""

RUN_FOLDER = """# Run folder

[Read the report](../guides/report.md#files-of-a-run) lists the files. `scu_history.json` is a list with a record for
each tick; these functions make it:

::: granite_scu.control.loop

::: granite_scu.control.laws.base
"""

PYTHON = """# Python API

What may be imported. Everything else may change between versions.

::: granite_scu.integrations.transformers

::: granite_scu.control

::: granite_scu.model.description_length

::: granite_scu.cli.from_python

::: granite_scu.hardware.detection

::: granite_scu.cli.hardware
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and of ``research/evidence/`` what pages show or link to."""
    pages = {
        "cli": command_line(),
        "configuration": configuration(),
        "presets": presets(),
        "run-folder": RUN_FOLDER,
        "python": PYTHON,
    }
    for name, content in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    for path in sorted(EVIDENCE.glob("*/comparison.md")):
        text = f"# The comparison `{path.parent.name}`\n\n{path.read_text(encoding='utf-8')}"
        files.append(File.generated(config, f"research/evidence/{path.parent.name}/comparison.md", content=text))
    for name in LINKED:
        path = EVIDENCE / name
        text = re.sub(r"\]\(((?:\.\./)+)docs/", r"](\1", path.read_text(encoding="utf-8"))
        files.append(File.generated(config, str(path.relative_to(ROOT)), content=text))
    for path in sorted(EVIDENCE.glob("*/*.png")):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    for file in files:
        if file.src_uri.startswith("research/evidence/"):
            file.inclusion = file.inclusion.NOT_IN_NAV
    return files


def on_page_markdown(markdown: str, page, **_) -> str:
    """Lead links to pages and pictures of the evidence to the site's copies; others out of ``docs/`` become text."""
    here = Path("docs") / Path(page.file.src_uri).parent

    def inside(link: re.Match[str]) -> str:
        words, target = link[1], link[2]
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        path = os.path.normpath(here / target)
        if path.startswith("docs"):
            return link[0]
        if path.startswith("research/evidence/") and path.partition("#")[0].endswith((".md", ".png")):
            return f"[{words}]({os.path.relpath(Path('docs') / path, here)})"
        return f"`{path}`"

    return re.sub(r"\[([^\[\]]*)\]\(([^()\s]+)\)", inside, markdown)


def command_line() -> str:
    """``--help-all`` of each command, or its ``--help``."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        texts = list(pool.map(_help, BY_NAME))
    parts = [f"## granite-scu {name}\n\n```text\n{text}```\n" for name, text in zip(BY_NAME, texts, strict=True)]
    return "# Command line\n\nWhat each command prints with `--help-all`.\n\n" + "\n".join(parts)


def _help(name: str) -> str:
    for flag in ("--help-all", "--help"):
        command = [sys.executable, "-m", "granite_scu", name, flag]
        width = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
        done = subprocess.run(command, cwd=ROOT, env=width, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout
    raise RuntimeError(f"granite-scu {name} --help: {done.stderr}")


def configuration() -> str:
    """Every key with its flag, default and meaning."""
    flags = {flag.key: flag for flag in FLAGS.values()}
    lines = [
        "# Configuration",
        "",
        "Keys of YAML files (`--config`), and of the command line as `--data.block_size 512`.",
    ]
    group = ""
    for key in [*MEANINGS, *(key for key in flags if key not in MEANINGS)]:
        if key.partition(".")[0] != group:
            group = key.partition(".")[0]
            lines += ["", f"## {group}", "", "| key | flag | default | meaning |", "|---|---|---|---|"]
        flag, default = flags.get(key), DEFAULTS.get(key)
        name = f"`{flag.name}`" if flag else ""
        shown = flag.default if default is None and flag else default
        meaning = MEANINGS.get(key) or (flag.help if flag else "")
        cells = (f"`{key}`", name, "" if shown is None else f"`{shown}`", meaning.replace("``", "`"))
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def presets() -> str:
    """Every preset with its file."""
    lines = ["# Presets", "", "[Hardware](../guides/hardware.md) tells how to choose one."]
    for name, preset in PRESETS.items():
        text = (ROOT / "configs" / "hardware" / f"{name}.yaml").read_text(encoding="utf-8")
        yaml.safe_load(text)  # what is printed is a configuration
        lines += ["", f"## {name}", "", f"{preset.cards}.", "", "```yaml", text.rstrip(), "```"]
    return "\n".join(lines) + "\n"
