"""Workers that end before their work does."""

import os
import signal

import pytest
from datatrove.pipeline.base import PipelineStep

from modicum.corpus.executor import run_stages
from modicum.corpus.pipeline import CorpusStage
from modicum.store import UserError


class Killed(PipelineStep):
    """The second of its tasks is killed, as the kernel does where memory runs out."""

    type = "test"
    name = "killed"

    def run(self, data, rank=0, world_size=1):  # noqa: ARG002
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(120)
def test_a_killed_worker_is_told_of_and_not_waited_for(tmp_path):
    stages = [CorpusStage("read", 3, [Killed()])]
    with pytest.raises(UserError, match=r"a worker was killed.*corpus\.workers"):
        run_stages(stages, tmp_path, workers=2)
