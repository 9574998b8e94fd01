"""What pyproject.toml cannot say: the presets of --hardware lie in configs/ and are installed inside the package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithPresets(build_py):
    """Adds configs/hardware to the package; an editable installation reads them where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "granite_scu", "hardware", "configs")
            shutil.copytree(Path("configs", "hardware"), target, dirs_exist_ok=True)


setup(cmdclass={"build_py": WithPresets})
