"""A right script for torchrun: it saves at the end of each epoch, and handles no signal."""

from __future__ import annotations

from training import Training, main


class AtEachEpoch(Training):
    """A training that a signal simply ends."""

    def listen(self) -> None:
        """Leave the signals to torchrun."""

    def save_if_due(self) -> None:
        """Save at the end of an epoch."""
        if self.step % self.steps_per_epoch == 0:
            self.save()


if __name__ == "__main__":
    main(AtEachEpoch)
