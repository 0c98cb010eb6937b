import os
import signal
import threading

import pytest
from training_runs import digests, small_run

from modicum.checkpoint import load_checkpoint
from modicum.train import Interrupted
from modicum.train.run import Run
from modicum.train.stop import StopRequest


def signalled_after(updates, number, times=1):
    def progress(done, *_):
        if done == updates:
            for _ in range(times):
                os.kill(os.getpid(), number)

    return progress


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_update_saves_it_and_says_how_to_go_on(prepared_data, tmp_path, number):
    said = []
    with pytest.raises(Interrupted, match=r"after update 3 of 8, which is saved in .*step-00000003; run the same"):
        small_run(prepared_data, tmp_path, progress=signalled_after(3, number), say=said.append)
    assert any(line.startswith("stopping: finishing this update") for line in said)
    assert load_checkpoint(tmp_path / "checkpoints" / "last").step == 3
    resumed = small_run(prepared_data, tmp_path)
    straight = small_run(prepared_data, tmp_path / "straight")
    assert digests(resumed.last) == digests(straight.last)


def test_a_signal_while_the_last_checkpoint_is_written_is_followed(prepared_data, tmp_path, monkeypatch):
    save = Run.save

    def interrupted(run):
        if run.step == run.steps:
            os.kill(os.getpid(), signal.SIGINT)
        return save(run)

    monkeypatch.setattr(Run, "save", interrupted)
    with pytest.raises(Interrupted, match="all 8 updates are made and saved; run the same command again"):
        small_run(prepared_data, tmp_path)
    monkeypatch.setattr(Run, "save", save)
    assert small_run(prepared_data, tmp_path).steps == 8


def test_a_second_interrupt_quits_at_once(prepared_data, tmp_path):
    with pytest.raises(KeyboardInterrupt) as error:
        small_run(prepared_data, tmp_path, progress=signalled_after(3, signal.SIGINT, times=2))
    assert not isinstance(error.value, Interrupted)
    assert load_checkpoint(tmp_path / "checkpoints" / "last").step == 2


def test_the_command_line_takes_an_interruption_for_one():
    assert issubclass(Interrupted, KeyboardInterrupt)


def test_handlers_are_put_back_also_after_an_error():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), StopRequest(lambda _: None):
        assert signal.getsignal(signal.SIGTERM) is not before[1]
        raise ZeroDivisionError
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_training_in_another_thread_leaves_signals_alone(prepared_data, tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(small_run(prepared_data, tmp_path, steps=2)))
    thread.start()
    thread.join()
    assert results[0].steps == 2
