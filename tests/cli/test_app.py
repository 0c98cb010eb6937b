import errno
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import typer

from modicum.cli import app as cli
from modicum.store import UserError, atomic_directory


def modicum(*arguments):
    return subprocess.run([sys.executable, "-m", "modicum", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (UserError("x.yaml: wrong\ny.yaml: wrong too"), 2),
        (KeyboardInterrupt(), 130),
        (OSError(errno.ENOSPC, "No space left on device", "/full/file"), 2),
        (OSError(errno.EIO, "Input/output error", "/broken"), 1),
        (RuntimeError("a bug"), 1),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "file/out"), 2),
        (FileExistsError(errno.EEXIST, "File exists", "out"), 2),
        (BrokenPipeError(), 141),
    ],
)
def test_each_way_to_fail_has_its_exit_status(fault, status, capsys):
    def work():
        raise fault

    assert cli._status(work) == status
    assert ("fault of modicum" in capsys.readouterr().err) == (status == 1)


@pytest.mark.parametrize("how", ["print('x' * 9)", "sys.stdout.write('x')", "PlainConsole().print('x')"])
def test_a_reader_that_has_gone_ends_the_work_as_unfinished_and_without_a_word(how, tmp_path):
    """Also where the line is only written as the process winds up."""
    code = (
        "import sys, time; from modicum.cli import app as cli; from modicum.cli.console import PlainConsole\n"
        f"def work():\n    time.sleep(1)\n    {how}\n"
        "sys.exit(cli._status(work))"
    )
    command = f'{sys.executable} -c "$CODE" 2>{tmp_path / "errors"} | true; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", command], env={**os.environ, "CODE": code}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "141\n"
    assert (tmp_path / "errors").read_text() == ""


def test_every_line_of_a_user_error_is_told(capsys):
    def work():
        raise UserError("x.yaml: wrong\ny.yaml: wrong too")

    cli._status(work)
    assert capsys.readouterr().err == "error: x.yaml: wrong\nerror: y.yaml: wrong too\n"


def test_a_full_disk_names_the_file(capsys):
    def work():
        raise OSError(errno.ENOSPC, "No space left on device", "/full/file")

    cli._status(work)
    assert capsys.readouterr().err == "error: /full/file: No space left on device\n"


def test_sigterm_clears_away_what_is_half_written(tmp_path, capsys):
    def work():
        with atomic_directory(tmp_path / "out") as folder:
            (folder / "half").touch()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)

    before = signal.getsignal(signal.SIGTERM)
    assert cli._status(work) == 143
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == "stopped: by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_sigterm_does_not_stop_the_clearing_away(tmp_path, monkeypatch, capsys):
    clear = shutil.rmtree

    def clear_and_be_told_again(folder, **how):
        os.kill(os.getpid(), signal.SIGTERM)
        clear(folder, **how)

    def work():
        with atomic_directory(tmp_path / "out") as folder:
            (folder / "half").touch()
            monkeypatch.setattr(shutil, "rmtree", clear_and_be_told_again)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)

    before = signal.getsignal(signal.SIGTERM)
    assert cli._status(work) == 143
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == "stopped: by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_a_verb_forks_ends_by_sigterm_as_ever():
    def work():
        child = os.fork()
        if not child:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os._exit(0)  # not reached
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM

    assert cli._status(work) == 0


def test_a_wanted_exit_passes_through():
    def work():
        raise typer.Exit(3)

    with pytest.raises(typer.Exit):
        cli._status(work)


VERBS = (
    "new", "plan", "run", "prepare", "pretrain", "sft", "evaluate", "report", "generate", "chat", "import", "export",
    "serve", "doctor", "bench train", "bench serve",
)  # fmt: skip


def test_help_names_the_verbs_of_this_version_and_no_others():
    answer = modicum("--help")
    assert answer.returncode == 0
    words = answer.stdout.split()
    for name in (verb.split()[0] for verb in VERBS):
        assert name in words
    for later in ("dpo",):
        assert later not in words


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_help_with_an_example(name):
    answer = modicum(*name.split(), "--help")
    assert answer.returncode == 0
    assert f"Example: modicum {name}" in answer.stdout


def test_an_unknown_verb_or_option_is_the_users_to_mend():
    assert modicum("teleport").returncode == 2
    assert modicum("run", "--nonsense").returncode == 2


def test_a_missing_recipe_is_one_line_and_status_2(tmp_path):
    answer = modicum("run", str(tmp_path / "none.yaml"))
    assert answer.returncode == 2
    assert len(answer.stderr.splitlines()) == 1
    assert "modicum new" in answer.stderr
