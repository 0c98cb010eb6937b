import signal
import subprocess
import sys
import textwrap

import pytest

from modicum.store import UserError, run_lock


def test_a_run_in_use_is_refused_and_free_again_after_a_kill(tmp_path):
    script = textwrap.dedent(f"""
        import pathlib, time
        from modicum.store import run_lock
        with run_lock(pathlib.Path({str(tmp_path)!r})):
            print("held", flush=True)
            time.sleep(60)
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="another modicum process"), run_lock(tmp_path):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    with run_lock(tmp_path):
        pass
