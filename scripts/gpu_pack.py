#!/usr/bin/env python3
"""Pack what a machine without a network lacks for a check of its GPU, in parts; put the parts together there.

    python scripts/gpu_pack.py pack --there FILE --out DIR --add FOLDER ...      here, where pip has a network
    python scripts/gpu_pack.py unpack DIR ... --into PLACE                       there, with the standard library alone

FILE lists the packages that the machine has: lines NAME==VERSION, or NAME where the version is not known; or it is the
``gpu_check.json`` of an earlier check there. What else ``pyproject.toml`` asks for is fetched as wheels for its Python,
in the versions of ``constraints.txt``. ``--add`` takes wheels, and files or folders that come to lie in PLACE.

DIR has ``manifest.json`` and the parts, each with its checksum. They may be carried one at a time: ``unpack`` keeps
those that it has been given, and exits with 1, saying which are missing, until all are there. Then packages are in
PLACE/site, which belongs on PYTHONPATH.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

try:
    import tomllib
except ImportError:
    print("gpu_pack.py: takes Python 3.11 or newer, to read pyproject.toml; name another python", file=sys.stderr)
    sys.exit(2)

ROOT = Path(__file__).parents[1]
MANIFEST, KEPT, SITE = "manifest.json", "parts", "site"
MB = 10**6
BLOCK = 2**20

EXTRAS = ("gguf", "kernels", "quant")
"""Of ``pyproject.toml``, whose packages a check takes too."""
PEERS = ("trl", "einops")
"""Packages that a check sets ours against, and what mamba-ssm imports."""
GLIBC = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
"""Wheels are taken of these manylinux_2_N; pip matches N exactly."""
OLD_NAMES = ("manylinux2014", "manylinux2010", "manylinux1")


def refuse(text: str) -> NoReturn:
    """End with a line about the user's mistake."""
    print(f"error: {text}", file=sys.stderr)
    raise SystemExit(2)


def digest(path: Path) -> str:
    """The sha256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            found.update(block)
    return found.hexdigest()


# ---- here ----


def pack(options: argparse.Namespace) -> int:
    """Write the parts; 0."""
    if options.out.exists() and any(options.out.iterdir()):
        refuse(f"--out {options.out}: has other contents; choose another folder, or remove it")
    for path in options.add:
        if not path.exists():
            refuse(f"--add {path}: is not there")
    there = have(options.there)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        staged = Path(temporary)
        wheels = staged / "wheels"
        wheels.mkdir()
        for path in options.add:
            if path.suffix == ".whl":
                shutil.copy(path, wheels)
        fetch_missing(there, wheels, options.python, set(options.without))
        sources = [(f"wheels/{path.name}", path) for path in sorted(wheels.iterdir())]
        sources += [(path.resolve().name, path.resolve()) for path in options.add if path.suffix != ".whl"]
        parts = split(sources, options.out, options.part_mb * MB)
    manifest = {"python": options.python, "parts": parts, "files": [name for name, _ in sources]}
    (options.out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for part in parts:
        print(f"{options.out / part['name']}: {part['bytes'] / MB:.1f} MB")
    return 0


def have(path: Path) -> dict[str, str | None]:
    """The packages of a list, or of a check's JSON, by name; the version is None where it is not known."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    try:
        text = path.read_text(encoding="utf-8")
        lines = json.loads(text)["packages"] if path.suffix == ".json" else text.splitlines()
        asked = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    except (OSError, ValueError, KeyError, TypeError, InvalidRequirement) as error:
        refuse(f"--there {path}: is neither a list of packages nor a check's JSON ({error})")
    return {canonicalize_name(one.name): next((spec.version for spec in one.specifier), None) for one in asked}


def fetch_missing(there: dict[str, str | None], wheels: Path, python: str, without: set[str]) -> None:
    """Download the wheels of what a check takes and is not there, and of what these need in their turn."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name, parse_wheel_filename

    def applying(lines: list[str], extras: set[str]) -> list[Any]:
        machine = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": "x86_64"}
        machine |= {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
        found = [Requirement(line) for line in lines]
        asked = [machine | {"extra": extra} for extra in ("", *extras)]
        return [one for one in found if one.marker is None or any(map(one.marker.evaluate, asked))]

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    done = {str(parse_wheel_filename(path.name)[0]) for path in wheels.iterdir()} | without
    waiting = applying([*project["dependencies"], *optional, *PEERS], set())
    while waiting:
        one = waiting.pop(0)
        name = canonicalize_name(one.name)
        version = there.get(name)
        if name in done or (name in there and (version is None or one.specifier.contains(version, prereleases=True))):
            continue
        wheel = download(one, wheels, python)
        done.add(name)
        remark = f", for {one}: {version} is there" if name in there else ""
        print(f"{wheel.name}: {wheel.stat().st_size / MB:.1f} MB{remark}", flush=True)
        waiting += applying(needs_of(wheel), one.extras)


def download(one: Any, wheels: Path, python: str) -> Path:
    """The wheel of a requirement for Linux on x86-64, in the version of ``constraints.txt``."""
    with tempfile.TemporaryDirectory(dir=wheels.parent) as folder:
        platforms = [f"manylinux_2_{number}_x86_64" for number in GLIBC] + [f"{name}_x86_64" for name in OLD_NAMES]
        line = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        line += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", "-d", folder]
        line += [f"--platform={platform}" for platform in platforms]
        line += ["-c", str(ROOT / "constraints.txt"), f"{one.name}{one.specifier}"]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        found = list(Path(folder).iterdir())
        if done.returncode or len(found) != 1:
            said = next((text for text in done.stderr.splitlines() if "ERROR" in text), done.stderr.strip()[-200:])
            refuse(f"{one}: pip brought no wheel ({said}); leave it out by --without, or --add one")
        return Path(shutil.move(found[0], wheels))


def needs_of(wheel: Path) -> list[str]:
    """The requirements that a wheel states."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode("utf-8").partition("\n\n")[0].splitlines()
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]


class Parts:
    """A stream that is written to files of at most so many bytes."""

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most, self.names = folder, most, [folder / "part-1"]
        self._file: BinaryIO = self.names[0].open("wb")

    def write(self, data: bytes) -> int:
        left = memoryview(data)
        while left:
            room = self.most - self._file.tell()
            if not room:
                self._file.close()
                self.names.append(self.folder / f"part-{len(self.names) + 1}")
                self._file = self.names[-1].open("wb")
                continue
            self._file.write(left[:room])
            left = left[room:]
        return len(data)

    def close(self) -> None:
        self._file.close()


def split(sources: list[tuple[str, Path]], out: Path, most: int) -> list[dict[str, Any]]:
    """Write files and folders as one archive, in parts; returns name, size and checksum of each part."""
    stream = Parts(out, most)
    with tarfile.open(fileobj=stream, mode="w|") as archive:  # type: ignore[call-overload]
        for name, path in sources:
            archive.add(path, arcname=name)
    stream.close()
    return [{"name": path.name, "bytes": path.stat().st_size, "sha256": digest(path)} for path in stream.names]


# ---- there ----


def unpack(options: argparse.Namespace) -> int:
    """Keep the parts that were carried; with all of them, put together what was packed. 1 while some are missing."""
    kept = options.into / KEPT
    kept.mkdir(parents=True, exist_ok=True)
    for folder in options.folders:
        if not folder.is_dir():
            refuse(f"{folder}: is no folder of parts")
        for path in sorted(folder.iterdir()) if folder.resolve() != kept.resolve() else ():
            if path.name == MANIFEST or path.name.startswith("part-"):
                shutil.copy(path, kept)
    if not (kept / MANIFEST).is_file():
        refuse(f"{options.folders[0]}: no {MANIFEST} has been carried; it lies beside the parts")
    try:
        manifest = json.loads((kept / MANIFEST).read_text(encoding="utf-8"))
    except ValueError:
        refuse(f"{MANIFEST}: was damaged on the way; carry it again")
    parts = manifest["parts"]
    missing = [part["name"] for part in parts if not (kept / part["name"]).is_file()]
    damaged = [p["name"] for p in parts if p["name"] not in missing and digest(kept / p["name"]) != p["sha256"]]
    for name in damaged:
        (kept / name).unlink()
    if damaged:
        refuse(f"{', '.join(damaged)}: is not what was packed (sha256); carry it again")
    if missing:
        print(f"{len(parts) - len(missing)} of {len(parts)} parts are there; missing: {', '.join(missing)}")
        return 1
    with tarfile.open(fileobj=Joined([kept / part["name"] for part in parts]), mode="r|") as archive:  # type: ignore
        archive.extractall(options.into, filter="data")
    wheels, site = sorted((options.into / "wheels").glob("*.whl")), (options.into / SITE).resolve()
    for wheel in wheels:
        install(wheel, site)
    name_checkout(site)
    print(f"{len(wheels)} packages in {site}, and all that was added in {options.into}")
    if manifest["python"] != (here := ".".join(map(str, sys.version_info[:2]))):
        print(f"warning: they are for Python {manifest['python']}, and this is {here}", file=sys.stderr)
    print(f"next: PYTHONPATH={site} python scripts/gpu_check.py --minutes 9")
    return 0


class Joined:
    """The parts as one stream."""

    def __init__(self, paths: list[Path]) -> None:
        self._blocks = self._read(paths)
        self._ahead = b""

    @staticmethod
    def _read(paths: list[Path]) -> Iterator[bytes]:
        for path in paths:
            with path.open("rb") as file:
                while block := file.read(BLOCK):
                    yield block

    def read(self, size: int) -> bytes:
        while len(self._ahead) < size and (block := next(self._blocks, b"")):
            self._ahead += block
        found, self._ahead = self._ahead[:size], self._ahead[size:]
        return found


def install(wheel: Path, site: Path) -> None:
    """Lay out a wheel's modules as pip's --target does; its scripts are left out."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith("/"):
                continue
            place = name
            top, _, rest = name.partition("/")
            if top.endswith(".data"):
                kind, _, place = rest.partition("/")
                if kind not in ("purelib", "platlib"):
                    continue
            path = (site / place).resolve()
            if not path.is_relative_to(site.resolve()):
                refuse(f"{wheel.name}: has a file outside of its folder ({name})")
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, BLOCK)


def name_checkout(site: Path) -> None:
    """Have this checkout known as installed, in its version, so that it runs as it lies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    about = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (folder / "METADATA").write_text(about, encoding="utf-8")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="write the parts")
    packing.add_argument("--there", type=Path, required=True, metavar="FILE", help="the packages that the machine has")
    packing.add_argument("--out", type=Path, required=True, metavar="DIR", help="the parts' folder")
    packing.add_argument("--add", type=Path, nargs="+", default=[], metavar="PATH", help="wheels, files, folders")
    packing.add_argument("--without", nargs="+", default=[], metavar="NAME", help="packages that are not fetched")
    packing.add_argument("--python", default="3.12", help="the machine's (default: %(default)s)")
    packing.add_argument("--part-mb", type=int, default=26, help="most of a part, in 10^6 bytes; 64 MiB "
                         "hold it and this checkout (default: %(default)s)")  # fmt: skip
    unpacking = commands.add_parser("unpack", help="put the parts together")
    unpacking.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="of parts that have been carried")
    unpacking.add_argument("--into", type=Path, required=True, metavar="PLACE", help="where it all is to lie")
    options = parser.parse_args(argv)
    if options.command == "pack" and options.part_mb < 1:
        parser.error(f"--part-mb {options.part_mb}: must be at least 1")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        return pack(options) if options.command == "pack" else unpack(options)
    except OSError as error:  # a full disk, a file where a folder should be
        refuse(str(error))


if __name__ == "__main__":
    sys.exit(main())
