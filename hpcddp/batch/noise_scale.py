"""Compare a measured gradient noise scale with a global batch (McCandlish et al. 2018, arXiv 1812.06162)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredNoise:
    """A gradient noise scale that some training measured.

    Args:
        samples: the noise scale, above 0, in samples.
        source: what measured it, as the end of a sentence after "measured by".
    """

    samples: float
    source: str


def larger_batch_pays(noise_scale: float, global_batch_size: int) -> bool:
    """Return whether a larger batch would save a worthwhile number of steps: B is below the noise scale.

    At B equal to the noise scale a training takes twice the fewest steps there can be, and twice the fewest samples;
    from there on a larger batch costs more samples than it saves steps (McCandlish et al. 2018, section 2.3).

    Args:
        noise_scale: in samples, above 0.
        global_batch_size: B.
    """
    return global_batch_size < noise_scale


def larger_batch_text(noise_scale: float, global_batch_size: int) -> str:
    """Return in words whether a larger batch would pay.

    To get equally far takes ``1 + noise / B`` times the fewest steps there can be, and ``1 + B / noise`` times the
    fewest samples (McCandlish et al. 2018, equation 2.11).

    Args:
        noise_scale: in samples, above 0.
        global_batch_size: B.
    """
    double = 2 * global_batch_size
    half = global_batch_size / 2
    fewer = 1 - (1 + noise_scale / double) / (1 + noise_scale / global_batch_size)
    saved = 1 - (1 + half / noise_scale) / (1 + global_batch_size / noise_scale)
    if larger_batch_pays(noise_scale, global_batch_size):
        return f"a larger batch would still pay: twice the batch would need {fewer:.0%} fewer steps"
    return (
        f"a larger batch would hardly pay: twice the batch would need only {fewer:.0%} fewer steps, and half of it "
        f"{saved:.0%} fewer samples"
    )


def noise_note(noise: MeasuredNoise | None, *, global_batch_size: int, measures: bool) -> str | None:
    """Return the plan's note on the size of the batch, or None where nothing is known and nothing will be.

    Args:
        noise: what was measured before; None = nothing.
        measures: whether the planned training measures it.
    """
    if noise is not None:
        return (
            f"The gradient noise scale is {noise.samples:.4g} samples, measured by {noise.source}, and the global "
            f"batch is {global_batch_size}; {larger_batch_text(noise.samples, global_batch_size)}. It usually "
            "grows during a training."
        )
    if measures:
        return (
            "Whether a larger batch would pay is not known before the training, which measures it: noise_scale in "
            f"result.json, in samples. Well above the global batch of {global_batch_size} a larger one still saves "
            "steps; well below, a smaller one saves samples and takes only a few more steps."
        )
    return None
