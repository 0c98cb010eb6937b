import pytest
from training_runs import prepare

from modicum.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def prepared_data(tmp_path_factory):
    """A folder with a small tokenizer and shards."""
    folder = tmp_path_factory.mktemp("prepared")
    prepare(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(prepared_data):
    return load_tokenizer(prepared_data / "tokenizer")
