"""Where generated text ends: at a token, before or after a string, also across token boundaries."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

from onfoot.formats.tokenizer import Tokenizer
from onfoot.generate.decode import StreamDecoder


class StopStrings:
    """Ends a text that comes in pieces before the first of some strings, or after the first of others."""

    def __init__(self, before: Sequence[str] = (), after: Sequence[str] = ()) -> None:
        self._before, self._after = before, after
        self._tail = ""  # the end of the text that has been returned, in which a string of `after` may begin
        self._held = ""  # the text that has not been returned: a string of `before` may begin with it

    def add(self, text: str) -> tuple[str, bool]:
        """The text that is certain now, and whether it ends here."""
        known = len(self._tail)
        text = self._tail + self._held + text
        found = [(i + len(s), i) for s in self._before if (i := text.find(s)) >= 0]
        found += [(i + len(s), i + len(s)) for s in self._after if (i := text.find(s)) >= 0]
        if found:
            self._held = ""
            _, end = min(found)  # of the string that is complete first, however the text is cut into pieces
            return text[known:end], True
        end = len(text) - self._possible(text)
        self._held = text[end:]
        longest = max(map(len, self._after), default=0)
        self._tail = text[max(0, end - longest + 1) : end] if longest else ""
        return text[known:end], False

    def finish(self) -> str:
        """The text that was held back, if no more comes."""
        held, self._held = self._held, ""
        return held

    def _possible(self, text: str) -> int:
        """The length of the longest end of the text that a string of `before` begins with."""
        lengths = (n for s in self._before for n in range(min(len(s) - 1, len(text)), 0, -1) if text.endswith(s[:n]))
        return max(lengths, default=0)


def texts(decoder: StreamDecoder, tokens: Iterable[int], stop_ids: Container[int], stop: StopStrings) -> Iterator[str]:
    """The text of the tokens in pieces that are not empty, up to a stop id or a stop string."""
    for token in tokens:
        if token in stop_ids:
            break
        text, stopped = stop.add(decoder.add(token))
        if text:
            yield text
        if stopped:
            return
    text, stopped = stop.add(decoder.finish())
    text = text if stopped else text + stop.finish()
    if text:
        yield text


def cut(tokenizer: Tokenizer, ids: Sequence[int], n_prompt: int, stop: Sequence[str]) -> str:
    """The text of a prompt and of the tokens after it, up to the end of the first stop string after the prompt."""
    text, known = tokenizer.decode(ids), len(tokenizer.decode(ids[:n_prompt]))
    return text[:known] + StopStrings(after=stop).add(text[known:])[0]
