"""Weights & Biases and MLflow themselves, offline."""

import pytest

import tfrl
from tfrl import callbacks


@pytest.mark.long
def test_wandb_and_mlflow_get_the_metrics_of_a_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no database
    store = f"file:{tmp_path}/mlruns"
    given = [callbacks.WandB(project="mine", mode="offline"), callbacks.MLflow(store)]
    settings = {"env": "CartPole-v1", "num_envs": 4, "num_steps": 64, "total_steps": 512, "epochs": 1}
    run = tfrl.train("ppo", logdir=tmp_path, run_name="r", eval_episodes=2, callbacks=given, **settings)
    assert list((run.folder / "wandb").glob("offline-run-*"))
    client = mlflow.MlflowClient(store)
    (found,) = client.search_runs([client.get_experiment_by_name("tfrl").experiment_id])
    assert found.info.status == "FINISHED" and found.data.params["num_steps"] == "64"
    assert [m.step for m in client.get_metric_history(found.info.run_id, "train/entropy")] == [256, 512]
