"""Text to ids and back, and conversations to ids: BPE, its special tokens, and the one chat renderer.

Trains or loads a tokenizer (a tokenizer.json, or a SentencePiece tokenizer.model), encodes text so that it never yields
a control token, renders a chat template in a sandbox.
Reading corpora is corpus's part; storing ids is data's.
"""

from modicum.tokenizer.chat import Rendered
from modicum.tokenizer.load import load_tokenizer
from modicum.tokenizer.sample import SampleReport
from modicum.tokenizer.sentencepiece_model import sentencepiece_tokenizer
from modicum.tokenizer.special import PRETOKENIZER_PATTERN, SPECIAL_TOKENS
from modicum.tokenizer.template import CYBERSLM_TEMPLATE
from modicum.tokenizer.tokenizer import Tokenizer
from modicum.tokenizer.train import train_tokenizer

__all__ = [
    "CYBERSLM_TEMPLATE",
    "PRETOKENIZER_PATTERN",
    "SPECIAL_TOKENS",
    "Rendered",
    "SampleReport",
    "Tokenizer",
    "load_tokenizer",
    "sentencepiece_tokenizer",
    "train_tokenizer",
]
