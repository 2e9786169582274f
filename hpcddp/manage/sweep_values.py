"""The values of the elements of a sweep, as the sweep gives them and as resumptions have changed them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hpcddp.jobfile.placeholders import argument_text
from hpcddp.run.job_records import Change
from hpcddp.run.sweep import Sweep


def short_keys(sweep: Sweep) -> dict[str, str]:
    """Return what each key of a sweep is called: its last word where no other key has the same."""
    last_words: dict[str, str] = {}
    for values in sweep.elements:
        for key in values:
            last_words[key] = key.rpartition(".")[2]
    counts = Counter(last_words.values())
    return {key: word if counts[word] == 1 else key for key, word in last_words.items()}


def value_texts(values: Mapping[str, Any], changes: Sequence[Change]) -> dict[str, str]:
    """Return the values of an element as texts, with what resumptions have changed: ``0.1 -> 0.3``, or ``(changed)``.

    A changed command no longer tells the values of its placeholders.
    """
    texts = {}
    for key, value in values.items():
        later_texts = [argument_text(change.after) for change in changes if change.key == key]
        text = " -> ".join([argument_text(value), *later_texts])
        if _is_changed_in_part(key, changes):
            text += " (changed)"
        texts[key] = text
    return texts


def values_now(values: Mapping[str, Any], changes: Sequence[Change]) -> dict[str, Any]:
    """Return the values with which an element runs now; None where a resumption has changed them in another form."""
    newest_values = dict(values)
    newest_values.update({change.key: change.after for change in changes if change.key in values})
    for key in values:
        if _is_changed_in_part(key, changes):
            newest_values[key] = None
    return newest_values


def _is_changed_in_part(key: str, changes: Sequence[Change]) -> bool:
    """Return whether changes are about the command with a placeholder, or about fields of a section."""
    if not changes:
        return False
    # It builds the models of the job file, which a table without changes does without.
    from hpcddp.jobfile.sweep import field_of

    field = field_of(key)
    return any(change.key.startswith(f"{key}.") or change.key == field != key for change in changes)
