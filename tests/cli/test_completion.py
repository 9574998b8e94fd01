"""What the shell offers after ``granite-scu`` and TAB."""

import subprocess
import sys

import pytest

from granite_scu.cli.main import main


@pytest.fixture(scope="module")
def offered(tmp_path_factory):
    """What bash offers for the last of some words."""
    pytest.importorskip("shtab")
    script = tmp_path_factory.mktemp("shell") / "completion.bash"
    code = "import sys; from granite_scu.cli.main import main; main(['--print-completion', 'bash'])\n"
    code += "assert 'torch' not in sys.modules"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    script.write_text(made.stdout)

    def ask(*words: str) -> list[str]:
        typed = ["granite-scu", *words]
        line = f'COMP_WORDS=("$@"); COMP_CWORD={len(words)}; _shtab_granite_scu; echo "${{COMPREPLY[@]}}"'
        call = ["bash", "-c", f'. "{script}"; {line}', "bash", *typed]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.split()

    return ask


def test_the_shell_completes_commands_flags_cards_and_files(offered, tmp_path):
    (tmp_path / "chats.jsonl").touch()
    assert offered("tr") == ["train"]
    assert offered("train", "--lambda-m") == ["--lambda-min", "--lambda-max"], "not in the short help"
    assert offered("plan", "--hardware", "gpu_409") == ["gpu_4090"]
    assert offered("train", "--data-dir", f"{tmp_path}/ch") == [f"{tmp_path}/chats.jsonl"]


def test_an_unknown_shell_is_refused(capsys):
    pytest.importorskip("shtab")
    assert main(["--print-completion", "cmd"]) == 2
    assert "--print-completion cmd: there are bash, zsh" in capsys.readouterr().err


def test_without_shtab_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    assert "shtab is not installed; pip install 'granite-scu[completion]'" in capsys.readouterr().err
