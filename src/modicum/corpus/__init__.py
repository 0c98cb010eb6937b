"""What comes from outside as text: documents, conversations, evaluation items.

Documents are cleaned, deduplicated, decontaminated and split. Of tokens the rooms above know.
"""

from modicum.corpus.choices import Choice, read_choices
from modicum.corpus.clean import clean
from modicum.corpus.contamination import Contamination
from modicum.corpus.conversations import Conversation, read_conversations
from modicum.corpus.document import Document, read_documents
from modicum.corpus.prepare import prepare_corpus
from modicum.corpus.report import CorpusReport, SourceReport

__all__ = [
    "Choice",
    "Contamination",
    "Conversation",
    "CorpusReport",
    "Document",
    "SourceReport",
    "clean",
    "prepare_corpus",
    "read_choices",
    "read_conversations",
    "read_documents",
]
