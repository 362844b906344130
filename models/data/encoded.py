"""A tokenized sample before it is in a sample set."""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class EncodedSample:
    """One sample: `tokens` `[T]` int32, `loss_mask` `[T]` bool, and its document."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    document: str
    """Content hash of the document."""
    turns: int = 0
    """Answers of a conversation in the mask."""
    thinking: bool = False
    """Whether these answers show reasoning, in the mask or not."""
    images: tuple[str, ...] = ()
    """Names of the images that stand in it, in order."""
    prompt: int = 0
    """Prompt tokens, if the target answers while it is captured: the tokens after them keep place for the answer. 0 for
    any other sample, -1 where all tokens keep place for what a server's user asks and is answered."""

    @property
    def id(self) -> str:
        """Content hash: 32 hexadecimal digits."""
        content = self.tokens.tobytes() + self.loss_mask.tobytes() + "".join(self.images).encode()
        return hashlib.sha256(content).hexdigest()[:32]
