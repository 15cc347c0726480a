import pytest
from made_runs import make_run

from tfrl.reporting import runs


@pytest.fixture
def make(tmp_path):
    """Makes a run, or a part of one that has come `updates` far, and loads it."""

    def loaded(*, updates=None, name=None, **settings):
        run = make_run(tmp_path / (name or "logs"), finished=updates is None, **settings)
        if updates is not None:
            rows = (run / "progress.csv").read_text().splitlines(keepends=True)
            (run / "progress.csv").write_text("".join(rows[: updates + 1]))
        return runs.load(run)

    return loaded
