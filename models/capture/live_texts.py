"""What a run learns of users' requests: token ids that hold no private data and no benchmark's prompt."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from infra.records.live import LiveText, Taken
from infra.refusal import Refusal
from models.data.benchmark_prompts import BenchmarkPrompts, read_excluded_prompts
from models.data.encoded import EncodedSample
from models.data.prepare import recipe_data
from models.data.rendered_turns import read_back
from models.data.tokenizer import read_tokenizer
from models.run import PreparedRun, RunWithTarget

FindPrivate = Callable[[Sequence[str]], set[str]]


@dataclass(frozen=True)
class Learned:
    """One request that is learned from: its tokens, the first `prompt` of which were asked."""

    tokens: tuple[int, ...]
    prompt: int

    def encoded(self) -> EncodedSample:
        """The sample: the answer is supervised."""
        tokens = np.array(self.tokens, dtype=np.int32)
        sample = EncodedSample(tokens, np.arange(len(tokens)) >= self.prompt, "", turns=1)
        return EncodedSample(tokens, sample.loss_mask, sample.id, turns=1)

    @property
    def marked(self) -> tuple[int, ...]:
        """The tokens as the ledger keeps them: ids that are not learned as -1 - id."""
        return tuple(-1 - token for token in self.tokens[: self.prompt]) + self.tokens[self.prompt :]


class LiveFilter:
    """Leaves out what may not be learned, and counts it.

    Args:
        run: whose recipe names what to leave out. Where its samples are prepared, dialogues that are held out are left
            out, too: those with the same first question, as in any other source.
        find: kinds of private data in texts.
        known: content hashes of samples that the run has.
    """

    def __init__(self, run: RunWithTarget, find: FindPrivate, known: Sequence[str] = ()):
        self._tokenizer: PreTrainedTokenizerBase = read_tokenizer(run.target.path)
        self._excluded = BenchmarkPrompts(read_excluded_prompts(recipe_data(run.config).exclude))
        self._find, self._known, self._data = find, set(known), run.config.data
        heldout = run.open_samples("heldout") if isinstance(run, PreparedRun) else ()
        held = (heldout[at].tokens.tolist() for at in range(len(heldout)))
        self._heldout = {read_back(self._tokenizer, tokens).dialogue_hash for tokens in held}
        self.left_out: Counter[str] = Counter()

    def learned(self, text: LiveText) -> Learned | None:
        """What is learned of a request; None: nothing."""
        found = Learned((*text.prompt, *text.answer)[: self._data.max_tokens], len(text.prompt))
        if reason := self._reason(found):
            self.left_out.update(reason)
            return None
        return found

    def summary(self, learned: int, taken: Taken) -> str:
        """One line for people: what became of the requests since the run was attached."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.left_out.most_common())
        return (
            f"{taken.finished} requests finished, {taken.passed_over} were passed over, {learned} learned; left out: "
            f"{kinds or 'none'}"
        )

    def _reason(self, text: Learned) -> set[str]:
        if len(text.tokens) < max(self._data.min_tokens, text.prompt + 1):
            return {"too short"}
        if (name := text.encoded().id) in self._known:
            return {"duplicate"}
        self._known.add(name)
        dialogue = read_back(self._tokenizer, text.tokens)
        if dialogue.dialogue_hash in self._heldout:
            return {"held out"}
        # Asked and answered apart: neither hides what stands at the other's edge. And together, as it is kept.
        parts = [self._text(part) for part in (text.tokens, text.tokens[: text.prompt], text.tokens[text.prompt :])]
        if private := self._find(parts):
            return private
        opening = read_back(self._tokenizer, text.tokens[: text.prompt]).opening
        return {"benchmark's prompt"} if self._excluded.occur_in(parts[1:], opening) else set()

    def _text(self, tokens: Sequence[int]) -> str:
        decoded: Any = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return str(decoded)


def private_data_finder() -> FindPrivate:
    """The search for private data. Raises Refusal where it is not installed."""
    try:
        from models.data.private_data import find_private_data
    except ModuleNotFoundError as error:
        raise Refusal(
            f"{error.name} is missing: nothing is learned from users without a search for private data; "
            "pip install --editable '.[drift]' in the project's folder"
        ) from error
    return find_private_data
