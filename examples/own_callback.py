"""A callback of one's own, with state that is saved with the run.

    python examples/own_callback.py

or, in this folder: tfrl ppo --callbacks own_callback:StopOnPlateau --env CartPole-v1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tfrl


class StopOnPlateau(tfrl.Callback):
    """Ends the run once the training return has not grown for a number of updates."""

    def __init__(self, patience: int = 10) -> None:
        self.patience = patience
        self.best, self.waited = float("-inf"), 0

    def on_update(self, run: tfrl.callbacks.RunOfCallback, metrics: dict[str, float]) -> None:
        """Adds two columns to progress.csv, and looks at the return; it is NaN before an episode ends."""
        if metrics["rollout/episode_return"] > self.best:
            self.best, self.waited = metrics["rollout/episode_return"], 0
        elif metrics["rollout/episodes"]:
            self.waited += 1
        metrics["plateau/best_return"], metrics["plateau/updates_since"] = self.best, self.waited
        if self.waited >= self.patience:
            run.stop(f"the return has not grown for {self.patience} updates")

    def get_state(self) -> dict[str, Any]:
        """Returns the state to save: JSON values and NumPy arrays."""
        return {"best": self.best, "waited": self.waited}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the saved state."""
        self.best, self.waited = state["best"], state["waited"]


if __name__ == "__main__":
    run = tfrl.train(
        "ppo",
        env="CartPole-v1",
        total_steps=200_000,
        seed=1,
        run_name="own-callback",
        callbacks=[StopOnPlateau(5)],
    )
    print(f"ended after {run.results['env_steps']:,} steps: {run.results.get('stopped', 'all of them')}")
    print(run.progress["plateau/best_return"])
